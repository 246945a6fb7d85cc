"""Decide whether a run hangs: tell a core that hangs from cores that wait for it or compile.

Every core reports a counter (its activity) and the collective that it waits in, if any:

               activity    waits in          uses a processor
    core 0     12          optimizer_step    no                  waits for another
    core 1     11          -                 yes                 compiles: the run is fine
    core 1     11          -                 no                  hangs: core 1 is to blame

A core that waits is never to blame while another does not wait. A core that uses a processor is
never to blame, because a compilation takes minutes and changes no counter. Processor time also
decides if the last report is old, because a core that pickles a large result blocks the thread that
reports.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError

# A core that has returned has done its part of every collective: the rest is bytes on their way.
_UNEVEN_SECONDS = 5.0
_SECONDS_BETWEEN_LOOKS = 0.25  # at processor time, which reads all of /proc for each process
_CPU_SAMPLE_SECONDS = 2.0  # between the two readings that are compared
# Share of a processor below which a core is idle. A compiler, a decoder or a loop uses a whole one
# or waits for one; a sleep or a lock uses almost nothing.
_IDLE = 0.5
_LONGER = "launch(..., limits=tpukit.Limits(stall=seconds))"


@dataclass(frozen=True)
class Limits:
    """The limits of a launch: how long cores may wait for a core, and how often workers report.

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
            fix = "Limits(stall=600), or Limits(stall=None) for no limit"
            refuse_seconds("stall", self.stall, fix=fix)
        refuse_seconds("heartbeat", self.heartbeat, fix="Limits(heartbeat=1)")


def refuse_seconds(name: str, value: object, *, fix: str) -> None:
    """Raise InvalidValueError unless the value is a number of seconds above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0:  # so NaN is refused, too
        raise InvalidValueError(
            f"{name} must be a number of seconds above 0, got {value!r}", fix=fix
        )


class Heartbeat(NamedTuple):
    """The newest report of a core that shows a change."""

    activity: int
    waiting: str | None  # a collective
    since: float  # `time.monotonic()` when the kernel first read it


class Stall(NamedTuple):
    """A run that hangs: the core to blame, the event, and the fix."""

    rank: int
    what: str
    fix: str


class _Sample(NamedTuple):
    """The processor time of cores at a moment."""

    time: float  # `time.monotonic()`
    busy_seconds: dict[int, float]  # by rank


class Watchdog:
    """Decides from heartbeats and processor time whether a run still moves.

    Args:
        ranks: the cores.
        limits: how long cores may stand still.
        busy_seconds: returns the processor time so far of a rank's process, in seconds.
        timeout: seconds that the run may take; None for no limit.
        in_graph: cores may also wait for each other when they read a tensor, which no heartbeat
            reports.
        waits_idle: a core that waits uses no processor.
        others: the run has more cores on other hosts, for which these cores may wait. Those hosts
            watch them.
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
        self.ranks = ranks
        self.limits = limits
        self.timeout = timeout
        self._busy_seconds = busy_seconds
        self._in_graph = in_graph
        self._waits_idle = waits_idle
        self._others = others
        self._began = time.monotonic()
        self._silent = Heartbeat(0, None, self._began)  # of a core that has not reported
        self._heartbeats: dict[int, Heartbeat] = {}
        self._sample: _Sample | None = None
        self._next_look = 0.0

    def beat(
        self,
        rank: int,
        activity: int,
        waiting: str | None,
        *,
        waits_outside: bool = False,
    ) -> None:
        """Take in a report; the clock of a core starts again if it has moved on.

        Args:
            rank: the core.
            activity: its counter.
            waiting: the collective it is in; None for none.
            waits_outside: it waits for a compilation in a process that may not belong to this run.
                That counts as moving.
        """
        last = self._heartbeats.get(rank, self._silent)
        has_moved = (last.activity, last.waiting) != (activity, waiting)
        if has_moved or waits_outside or last is self._silent:
            self._heartbeats[rank] = Heartbeat(activity, waiting, time.monotonic())

    def waits_long(self, returned: set[int]) -> bool:
        """Return whether a core has been in a collective for longer than cores normally differ."""
        return bool(_late(self._running(returned), time.monotonic()))

    def find_stall(self, returned: set[int], sending: Collection[int] = ()) -> Stall | None:
        """Return the core that the others wait for, if the run hangs; otherwise None.

        Args:
            returned: the cores that have returned.
            sending: the cores of which only a part of a message has arrived. They wait for the
                kernel to read the rest, and send no heartbeat before.
        """
        running = self._running(returned)
        now = time.monotonic()
        if not running:
            return None
        # A time limit holds for busy cores, too, so it comes before everything else.
        over_time = self._over_time(running, now)
        if over_time is not None:
            return over_time
        stall = self._left_early(running, returned, now) or self._stuck(running, returned, now)
        if stall is None or running.keys() & set(sending):
            self._sample = None  # the next suspicion needs a new sample
            return None
        return stall if self._all_idle(running, now) else None

    def _running(self, returned: set[int]) -> dict[int, Heartbeat]:
        """Return by rank the last heartbeat of each core that has not returned."""
        running = [rank for rank in self.ranks if rank not in returned]
        return {rank: self._heartbeats.get(rank, self._silent) for rank in running}

    def _over_time(self, running: dict[int, Heartbeat], now: float) -> Stall | None:
        if self.timeout is None or now - self._began <= self.timeout:
            return None
        working = [rank for rank, beat in running.items() if not beat.waiting]
        rank = working[0] if working else min(running)
        what = f"was not done after timeout={self.timeout:g} seconds"
        if running[rank].waiting:
            what += f", waiting in {running[rank].waiting}()"
        fix = "a longer timeout, or None for no limit; see below where the cores stand"
        return Stall(rank, what, fix)

    def _left_early(
        self,
        running: dict[int, Heartbeat],
        returned: set[int],
        now: float,
    ) -> Stall | None:
        """Return a stall if all running cores wait for a core that has returned.

        They would wait forever, so the watchdog does not wait for the limit.
        """
        late = _late(running, now)
        all_wait = all(beat.waiting for beat in running.values())
        if not returned or not late or not all_wait:
            return None
        collective = running[late[0]].waiting
        fix = (
            "let every core do the same number of steps: core.batches gives each the same number "
            "of batches"
        )
        if collective == "save":
            fix = (
                "core.save(...) on every core, not under `if core.is_main`: core 0 alone writes "
                "the file"
            )
        what = f"returned while core {late[0]} still waits for it in {collective}()"
        return Stall(min(returned), what, fix)

    def _stuck(
        self,
        running: dict[int, Heartbeat],
        returned: set[int],
        now: float,
    ) -> Stall | None:
        """Return a stall if no core has moved on within the limit."""
        quiet = {rank: now - beat.since for rank, beat in running.items()}
        # Processor time is compared last: a core that reports nothing may still work.
        if self.limits.stall is None or min(quiet.values()) <= self.limits.stall:
            return None
        waiting = [rank for rank, beat in running.items() if beat.waiting]
        working = [rank for rank, beat in running.items() if not beat.waiting]
        silent = [rank for rank, beat in running.items() if beat is self._silent]
        if waiting and working:
            return self._late_for_others(working[0], running, quiet)
        if not waiting and silent:
            rank = silent[0]
            what = f"has not started in {quiet[rank]:.0f} s, and uses no processor"
            fix = f"see tpukit.check() for who holds the chips; {_LONGER} allows a longer start"
            return Stall(rank, what, fix)
        if self._others:  # all may wait for a core of another host
            return None
        if not working:
            return self._each_for_the_other(running, quiet)
        return self._silent_all(running, returned, quiet)

    def _late_for_others(
        self,
        late: int,
        running: dict[int, Heartbeat],
        quiet: dict[int, float],
    ) -> Stall:
        """Blame a core that does not wait, while others do."""
        first = next(rank for rank, beat in running.items() if beat.waiting)
        return Stall(
            late,
            f"has not moved for {quiet[late]:.0f} s, while core {first} waits for it in "
            f"{running[first].waiting}()",
            f"see below where core {late} stands; {_LONGER} allows more than {self.limits.stall:g}",
        )

    def _silent_all(
        self,
        running: dict[int, Heartbeat],
        returned: set[int],
        quiet: dict[int, float],
    ) -> Stall:
        """Blame a core if none reports that it waits.

        They may wait for a lock, or for each other when they read a tensor of the graph.
        """
        longest = max(running, key=quiet.__getitem__)
        still = f"{quiet[longest]:.0f} s, nor used a processor"
        everyone = f"has not moved for {still}, and neither has any other core"
        if not self._in_graph:
            fix = (
                f"see below where it stands, at a lock perhaps; {_LONGER}, or None, for a long wait"
            )
            return Stall(longest, everyone, fix)
        fix = (
            "the same collectives in the same order on every core, also before what is read with "
            f".item() or print; if it waits for something else: {_LONGER}, or None"
        )
        if returned:
            what = f"returned while core {longest} has not moved for {still}"
            return Stall(min(returned), what, fix)
        return Stall(longest, everyone, fix)

    def _each_for_the_other(
        self,
        running: dict[int, Heartbeat],
        quiet: dict[int, float],
    ) -> Stall:
        """Blame a core in the rarest collective, if all cores wait but in different ones."""
        collectives = [beat.waiting for beat in running.values()]
        rank = min(running, key=lambda rank: collectives.count(running[rank].waiting))
        each = ", ".join(f"core {rank} in {beat.waiting}()" for rank, beat in running.items())
        what = f"waits with all others for {quiet[rank]:.0f} s, each for the other: {each}"
        return Stall(rank, what, "let every core call the same collectives in the same order")

    def _all_idle(self, running: dict[int, Heartbeat], now: float) -> bool:
        """Return whether no core was busy over the last seconds.

        A core that waits counts only if waiting uses no processor.
        """
        if now < self._next_look:
            return False
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        busy_seconds = {}
        for rank, beat in running.items():
            if self._waits_idle or not beat.waiting:
                busy_seconds[rank] = self._busy_seconds(rank)
        if self._sample is None or self._sample.busy_seconds.keys() != busy_seconds.keys():
            self._sample = _Sample(now, busy_seconds)
        before = self._sample
        seconds = now - before.time
        if seconds < _CPU_SAMPLE_SECONDS:
            return False
        self._sample = None
        return all(
            busy_seconds[rank] - before.busy_seconds[rank] < _IDLE * seconds
            for rank in busy_seconds
        )


def _late(running: dict[int, Heartbeat], now: float) -> list[int]:
    """Return the cores that have been in a collective for longer than cores normally differ."""
    late = []
    for rank, beat in running.items():
        if beat.waiting and now - beat.since > _UNEVEN_SECONDS:
            late.append(rank)
    return late
