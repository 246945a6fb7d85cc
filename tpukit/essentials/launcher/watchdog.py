"""When does a run hang? Tells cores that wait for one that will not come from cores that compile."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tpukit.essentials.display import InvalidValueError

_UNEVEN_SECONDS = 5.0  # a core that returned has done its part of every collective: the rest is bytes on their way
_SECONDS_BETWEEN_LOOKS = 0.25  # at what processes do: all of /proc is read for each of them
_CPU_SAMPLE_SECONDS = 2.0  # over which processor time is compared
_IDLE = 0.5  # of one processor: a compiler, a decoder or a loop uses one or waits for one, a sleep or a lock hardly
_LONGER = "launch(..., limits=tpukit.Limits(stall=seconds))"


@dataclass(frozen=True)
class Limits:
    """How long cores may wait for a core that does not move, and how often workers report.

    Attributes:
        stall: seconds that cores may wait for a core that neither moves on nor uses a processor.
            Then the run is ended with the stacks of all cores. None for no limit. A core that
            compiles uses a processor.
        heartbeat: seconds between two reports of a worker to the kernel.

    Raises:
        InvalidValueError: a value is not a number above 0.
    """

    stall: float | None = 120.0
    heartbeat: float = 1.0

    def __post_init__(self) -> None:
        if self.stall is not None:
            refuse_seconds("stall", self.stall, fix="Limits(stall=600), or Limits(stall=None) for no limit")
        refuse_seconds("heartbeat", self.heartbeat, fix="Limits(heartbeat=1)")


def refuse_seconds(name: str, value: object, *, fix: str) -> None:
    """Raise InvalidValueError unless the value is a number of seconds above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0:  # so NaN is refused, too
        raise InvalidValueError(f"{name} is a number of seconds above 0, got {value!r}", fix=fix)


@dataclass(frozen=True)
class Heartbeat:
    """What a core last said of itself that was new: its `activity` and `waiting`."""

    activity: int
    waiting: str | None
    since: float  # `time.monotonic()` when the kernel first heard this


@dataclass(frozen=True)
class Stall:
    """A run that hangs: the core to blame, and what is known of it."""

    rank: int
    what: str
    fix: str


class Watchdog:
    """Decides from heartbeats whether a run still moves.

    A core that waits is never to blame while another works: only that one can be late. And nobody is late who uses a
    processor: a compile takes minutes and moves no counter, and what a heartbeat said of waiting may be old, where a
    core pickles a large result and lets no other thread run.

    Args:
        ranks: of the cores that are watched.
        limits: how long cores may stand still.
        busy_seconds: returns for how long the process of a rank has been busy so far.
        timeout: seconds that the run may take; None for no limit.
        in_graph: cores may wait for each other in any read of a tensor, which no heartbeat mentions.
        waits_idle: a core that waits uses no processor.
        others: the run has cores on other hosts, too, for which those here may wait; these hosts watch them.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        limits: Limits,
        busy_seconds: Callable[[int], float],
        *,
        timeout: float | None = None,
        in_graph: bool = False,
        waits_idle: bool = True,
        others: bool = False,
    ):
        self.ranks, self.limits, self.timeout = ranks, limits, timeout
        self._in_graph, self._waits_idle, self._others = in_graph, waits_idle, others
        self._busy_seconds = busy_seconds
        self._began = time.monotonic()
        self._silent = Heartbeat(0, None, self._began)  # of a core that has not said a word
        self._heartbeats: dict[int, Heartbeat] = {}
        self._sample: tuple[float, dict[int, float]] | None = None
        self._next_look = 0.0

    def beat(self, rank: int, activity: int, waiting: str | None, *, waits_outside: bool = False) -> None:
        """Note a heartbeat; the clock of a core starts again when it has done something new.

        One that waits for what another process compiles, which may be no core of this run, is not standing still.
        """
        last = self._heartbeats.get(rank, self._silent)
        if waits_outside or last is self._silent or (last.activity, last.waiting) != (activity, waiting):
            self._heartbeats[rank] = Heartbeat(activity, waiting, time.monotonic())

    def waits_long(self, returned: set[int]) -> bool:
        """Say whether a core that has not returned has been in one collective for longer than cores are uneven."""
        beats = self._running(returned).values()
        return any(beat.waiting and time.monotonic() - beat.since > _UNEVEN_SECONDS for beat in beats)

    def find_stall(self, returned: set[int], sending: Collection[int] = ()) -> Stall | None:
        """Name the core that the others wait for in vain; None while all is well.

        Args:
            returned: the cores that have.
            sending: the cores of which a part of a message has arrived: what holds them up is the kernel that reads it,
                and no heartbeat comes through before it is complete.
        """
        running, now = self._running(returned), time.monotonic()
        if not running:
            return None
        if over_time := self._over_time(running, now):
            return over_time
        stall = self._left_early(running, returned, now) or self._stuck(running, returned, now)
        if stall is None or running.keys() & set(sending):
            self._sample = None
            return None
        return stall if self._all_idle(running, now) else None

    def _running(self, returned: set[int]) -> dict[int, Heartbeat]:
        return {rank: self._heartbeats.get(rank, self._silent) for rank in self.ranks if rank not in returned}

    def _over_time(self, running: dict[int, Heartbeat], now: float) -> Stall | None:
        if self.timeout is None or now - self._began <= self.timeout:
            return None
        rank = next((rank for rank, beat in running.items() if not beat.waiting), min(running))
        doing = f", waiting in {running[rank].waiting}()" if running[rank].waiting else ""
        what = f"was not done after timeout={self.timeout:g} seconds{doing}"
        return Stall(rank, what, "a longer timeout, or None for no limit; see below where the cores stand")

    def _left_early(self, running: dict[int, Heartbeat], returned: set[int], now: float) -> Stall | None:
        """All that still run wait for a core that has returned: no limit has to pass for that to be final."""
        late = [rank for rank, beat in running.items() if beat.waiting and now - beat.since > _UNEVEN_SECONDS]
        if not (returned and late and all(beat.waiting for beat in running.values())):
            return None
        call = running[late[0]].waiting
        fix = "let every core do the same number of steps: core.batches gives each the same number of batches"
        if call == "save":
            fix = "core.save(...) on every core, not under `if core.is_main`: core 0 alone writes the file"
        return Stall(min(returned), f"returned while core {late[0]} still waits for it in {call}()", fix)

    def _stuck(self, running: dict[int, Heartbeat], returned: set[int], now: float) -> Stall | None:
        """Nobody has moved for too long."""
        waiting = [rank for rank, beat in running.items() if beat.waiting]
        silent = [rank for rank, beat in running.items() if beat is self._silent]
        working = [rank for rank in running if rank not in waiting]
        quiet = {rank: now - beat.since for rank, beat in running.items()}
        # Cores that say nothing may still work, for as long as they like: that they use no processor is looked at last.
        if self.limits.stall is None or min(quiet.values()) <= self.limits.stall:
            return None
        if not working:
            return None if self._others else self._each_for_the_other(running, quiet)
        if not waiting and not silent:
            return None if self._others else self._silent_all(running, returned, quiet)
        if not waiting:
            fix = f"see tpukit.check() for who holds the chips; {_LONGER} allows a longer start"
            return Stall(silent[0], f"has not started in {quiet[silent[0]]:.0f} s, and uses no processor", fix)
        late, first = working[0], waiting[0]
        return Stall(
            late,
            f"has not moved for {quiet[late]:.0f} s, while core {first} waits for it in {running[first].waiting}()",
            f"see below where core {late} stands; {_LONGER} allows more than {self.limits.stall:g}",
        )

    def _silent_all(self, running: dict[int, Heartbeat], returned: set[int], quiet: dict[int, float]) -> Stall:
        """Nobody says that it waits: it may, for a lock, or where a tensor of the graph is read."""
        longest = max(running, key=quiet.__getitem__)
        still = f"{quiet[longest]:.0f} s, nor used a processor"
        fix = (
            "the same collectives in the same order on every core, also before what is read with .item() or print; "
            f"if it waits for something else: {_LONGER}, or None"
        )
        if not self._in_graph:
            fix = f"see below where it stands, at a lock perhaps; {_LONGER}, or None, for a long wait"
        elif returned:
            return Stall(min(returned), f"returned while core {longest} has not moved for {still}", fix)
        return Stall(longest, f"has not moved for {still}, and neither has any other core", fix)

    def _each_for_the_other(self, running: dict[int, Heartbeat], quiet: dict[int, float]) -> Stall:
        """All cores wait, so not for the same: blame one that waits where the fewest do."""
        collectives = [beat.waiting for beat in running.values()]
        rank = min(running, key=lambda rank: collectives.count(running[rank].waiting))
        each = ", ".join(f"core {rank} in {beat.waiting}()" for rank, beat in running.items())
        what = f"waits with all others for {quiet[rank]:.0f} s, each for the other: {each}"
        return Stall(rank, what, "let every core call the same collectives in the same order")

    def _all_idle(self, running: dict[int, Heartbeat], now: float) -> bool:
        """Say whether no core was busy over the last seconds; one that waits is looked at only if its wait is idle."""
        if now < self._next_look:
            return False
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        ranks = [rank for rank, beat in running.items() if self._waits_idle or not beat.waiting]
        spent = {rank: self._busy_seconds(rank) for rank in ranks}
        if self._sample is None or self._sample[1].keys() != spent.keys():
            self._sample = now, spent
        began, before = self._sample
        if now - began < _CPU_SAMPLE_SECONDS:
            return False
        self._sample = None
        return all(spent[rank] - before[rank] < _IDLE * (now - began) for rank in ranks)
