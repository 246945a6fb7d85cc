"""Decide whether a run hangs, and which core caused that.

Every core reports a counter (its activity) and the collective that it waits in, if any:

               activity    waits in          uses a processor
    core 0     12          optimizer_step    no                  waits for another core
    core 1     11          -                 yes                 compiles: the run does not hang
    core 1     11          -                 no                  hangs: core 1 is the cause

If some cores wait in a collective and others do not, the cause is a core that does not. A core that
uses a processor is never the cause, because a compilation takes minutes and changes no counter. The
same rule holds for a core whose last report is old: while a core pickles a large result, its thread
that reports is blocked.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError

# Cores normally reach a collective within so many seconds of each other. A core that has returned
# has sent its part of every collective, so that only the transfer can take time.
_UNEVEN_SECONDS = 5.0
# Between two measurements of processor time, each of which reads all of /proc for each process.
_SECONDS_BETWEEN_LOOKS = 0.25
_CPU_SAMPLE_SECONDS = 2.0  # at least, between the two measurements that are compared
# Share of a processor below which a core is idle. A compiler, a decoder or a loop uses almost 1.0;
# a core that sleeps or waits for a lock uses almost 0.
_IDLE = 0.5
_LONGER = "launch(..., limits=tpukit.Limits(stall=seconds))"


@dataclass(frozen=True)
class Limits:
    """The limits of a launch: how long a core may hang, and how often workers report.

    Attributes:
        stall: seconds without progress after which tpukit ends a run that hangs, and reports the
            stacks of all cores. A run hangs if no core makes progress and no core keeps a
            processor busy, so a long compilation is no hang. On macOS only progress counts. None
            for no limit. If all unfinished cores wait for a core that has returned, the limit is
            always five seconds.
        heartbeat: seconds between two reports of a worker to the notebook's process.

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
    """Raise an InvalidValueError unless the value is a number of seconds above 0.

    Args:
        name: name of the argument, for the message.
        value: the value.
        fix: the line that the message advises.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not value > 0:  # not `value <= 0`, which would accept NaN
        raise InvalidValueError(
            f"{name} must be a number of seconds above 0, got {value!r}", fix=fix
        )


class Heartbeat(NamedTuple):
    """A core's last report, and the time of its last progress."""

    activity: int
    waiting: str | None  # a collective
    since: float  # `time.monotonic()` of the last progress


class Stall(NamedTuple):
    """A run that hangs: the core that causes it, the event, and the fix."""

    rank: int
    what: str
    fix: str


class _Sample(NamedTuple):
    """A measurement of the cores' processor times."""

    time: float  # `time.monotonic()` of the measurement
    busy_seconds: dict[int, float]  # by rank


class Watchdog:
    """Decides from heartbeats and processor time whether a run hangs.

    Args:
        ranks: the cores.
        limits: the seconds without progress after which a run counts as hung.
        busy_seconds: returns the processor time so far of a rank's process, in seconds.
        timeout: seconds that the run may take; None for no limit.
        in_graph: True if cores may also wait for each other when they read a tensor. Heartbeats do
            not report such a wait.
        waits_idle: True if a core that waits in a collective uses no processor.
        others: True if the run has more cores on other hosts. The cores of this host may wait for
            those cores. The launch on each host watches the cores of that host.
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
        """Record a report of a core; if it differs from the last one, the core made progress.

        Args:
            rank: the core.
            activity: the core's `Activity.count`.
            waiting: the collective that the core is in; None for none.
            waits_outside: True if the core waits while another process compiles a program, even a
                process of another run. This wait counts as progress.
        """
        last = self._heartbeats.get(rank, self._silent)
        has_moved = (last.activity, last.waiting) != (activity, waiting)
        if has_moved or waits_outside or last is self._silent:
            self._heartbeats[rank] = Heartbeat(activity, waiting, time.monotonic())

    def waits_long(self, returned: set[int]) -> bool:
        """Return whether a core has been in a collective for more than 5 seconds."""
        return bool(_late(self._running(returned), time.monotonic()))

    def find_stall(self, returned: set[int], sending: Collection[int] = ()) -> Stall | None:
        """Return the cause if the run hangs, otherwise None.

        Args:
            returned: the cores that have returned.
            sending: the cores whose last message has only arrived in part. They send no heartbeat
                until the kernel has read the rest.
        """
        running = self._running(returned)
        now = time.monotonic()
        if not running:
            return None
        # The timeout applies to busy cores, too, so it comes before the check of processor time.
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
        # Report a core outside of collectives if there is one: the others wait for it.
        working = [rank for rank, beat in running.items() if not beat.waiting]
        rank = working[0] if working else min(running)
        what = f"was not done after timeout={self.timeout:g} seconds"
        if running[rank].waiting:
            what += f", waiting in {running[rank].waiting}()"
        fix = "a longer timeout, or None for no limit; the stacks below show what the cores do"
        return Stall(rank, what, fix)

    def _left_early(
        self,
        running: dict[int, Heartbeat],
        returned: set[int],
        now: float,
    ) -> Stall | None:
        """Return a stall if all running cores wait for a core that has returned.

        They would wait forever, so the watchdog applies 5 seconds instead of `Limits.stall`.
        """
        late = _late(running, now)
        all_wait = all(beat.waiting for beat in running.values())
        if not returned or not late or not all_wait:
            return None
        collective = running[late[0]].waiting  # `late` has been in it for more than 5 seconds
        fix = (
            "let every core do the same number of steps: core.batches gives each the same number "
            "of batches"
        )
        if collective == "save":  # the collective that users most often call on core 0 alone
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
        """Return a stall if no core has made progress within `Limits.stall` seconds."""
        quiet = {rank: now - beat.since for rank, beat in running.items()}
        # `find_stall` compares processor time after this, because a core may work without reports.
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
            fix = (
                "tpukit.check() names the process that holds the chips; "
                f"{_LONGER} allows a longer start"
            )
            return Stall(rank, what, fix)
        if self._others:  # all cores here may wait for a core of another host
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
        """Return a stall caused by a core that is in no collective, while others wait in one."""
        first = next(rank for rank, beat in running.items() if beat.waiting)
        return Stall(
            late,
            f"has not moved for {quiet[late]:.0f} s, while core {first} waits for it in "
            f"{running[first].waiting}()",
            f"the stack of core {late} below shows what it does; {_LONGER} allows more than "
            f"{self.limits.stall:g} seconds",
        )

    def _silent_all(
        self,
        running: dict[int, Heartbeat],
        returned: set[int],
        quiet: dict[int, float],
    ) -> Stall:
        """Return a stall caused by the quietest core, if no core reports a collective.

        The cores may wait for a lock, or for each other when they read a tensor of the graph.
        """
        longest = max(running, key=quiet.__getitem__)
        still = f"{quiet[longest]:.0f} s, nor used a processor"
        everyone = f"has not moved for {still}, and neither has any other core"
        if not self._in_graph:
            fix = (
                "the stacks below show what the cores wait for, such as a lock; "
                f"{_LONGER}, or None, for a long wait"
            )
            return Stall(longest, everyone, fix)
        fix = (
            "call the same collectives in the same order on every core, also before you read a "
            f"tensor with .item() or print; if it waits for something else: {_LONGER}, or None"
        )
        # A core that has returned has probably left out a collective of the graph.
        if returned:
            what = f"returned while core {longest} has not moved for {still}"
            return Stall(min(returned), what, fix)
        return Stall(longest, everyone, fix)

    def _each_for_the_other(
        self,
        running: dict[int, Heartbeat],
        quiet: dict[int, float],
    ) -> Stall:
        """Return a stall if all cores wait: the cause is the core in the rarest collective."""
        collectives = [beat.waiting for beat in running.values()]
        rank = min(running, key=lambda rank: collectives.count(running[rank].waiting))
        each = ", ".join(f"core {rank} in {beat.waiting}()" for rank, beat in running.items())
        what = f"waits with all others for {quiet[rank]:.0f} s, each for the other: {each}"
        return Stall(rank, what, "let every core call the same collectives in the same order")

    def _all_idle(self, running: dict[int, Heartbeat], now: float) -> bool:
        """Return whether no core was busy over the last seconds.

        On backends whose collectives spin, cores in a collective are left out.
        """
        if now < self._next_look:
            return False
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        busy_seconds = {}  # of the cores that must be idle if the run hangs
        for rank, beat in running.items():
            if self._waits_idle or not beat.waiting:
                busy_seconds[rank] = self._busy_seconds(rank)
        # The first call after a suspicion takes a sample, and a later call compares with it.
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
    """Return the cores that have been in a collective for more than `_UNEVEN_SECONDS`."""
    late = []
    for rank, beat in running.items():
        if beat.waiting and now - beat.since > _UNEVEN_SECONDS:
            late.append(rank)
    return late
