"""Describe in a line why the cores of a run make no progress, for the display.

    core 0    waits in step()     "compiling graph 2 on core 1 for 5 s; graph 1 took 17 s,
    core 1    compiles graph 2     core 0 waits"

The text is the first of these that is true: cores start, compile, trace, wait for a late core, wait
for each other, wait for data, run the step, or do something unknown.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tpukit.essentials.backends import Compiling
from tpukit.essentials.display import duration

_QUIET_SECONDS = 2.0  # a shorter step, collective or wait for a batch gets no line
_COMPILE_SECONDS = 0.5  # a compilation gets one earlier: it probably takes many seconds
_SILENT_SECONDS = 10.0  # before a line says that there is no step and no message
_HEARTBEATS_MISSED = 5  # before a process counts as silent
_MOST_ROWS = 16  # cores in the table of activities
_MOST_NAMED = 4  # cores that a text names one by one
_DOING = {
    "tracing": "tracing the step",
    "running": "running the step",
    "data": "waiting for data",
}


@dataclass
class CoreState:
    """The last heartbeat of a core."""

    activity: int  # a counter that changes when the core makes progress
    waiting: str | None  # the collective that the core is in
    doing: Compiling | str | None  # the graph it compiles, or a key of `_DOING`
    since: float  # time at which the kernel first read these values
    heard: float  # time of the last heartbeat


class CoreStates:
    """Keeps the heartbeats of all cores, and describes them.

    Args:
        ranks: the cores.
        heartbeat: seconds between two heartbeats.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        heartbeat: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.ranks = ranks
        self._heartbeat = heartbeat
        self._clock = clock
        self._began = clock()
        self._states: dict[int, CoreState] = {}
        # By rank: a graph that the core still reports, although its compilation is over.
        self._compiled: dict[int, Compiling] = {}
        self._different_since: float | None = None

    def started(self, rank: int) -> None:
        """Note that the device of a core has started."""
        now = self._clock()
        self._states.setdefault(rank, CoreState(0, None, None, since=now, heard=now))

    def beat(
        self,
        rank: int,
        activity: int,
        waiting: str | None,
        doing: Compiling | str | None,
    ) -> None:
        """Record a heartbeat; if it differs from the last one, the core has made progress."""
        self.started(rank)
        last = self._states[rank]
        now = self._clock()
        if isinstance(doing, Compiling):
            if doing == last.doing and activity != last.activity:
                # The counter changed, so the core no longer compiles. The runtime still reports a
                # graph whose compilation failed.
                self._compiled[rank] = doing
            if doing == self._compiled.get(rank):
                doing = None
        is_same = (last.activity, last.waiting, last.doing) == (activity, waiting, doing)
        since = last.since if is_same else now
        self._states[rank] = CoreState(activity, waiting, doing, since=since, heard=now)

    def words(self, returned: Collection[int] = ()) -> str:
        """Return a line about a compilation, or about the reason why no core makes progress.

        Return "" if neither applies, or if the reason is not known yet.
        """
        now = self._clock()
        running = [rank for rank in self.ranks if rank not in returned]
        missing = [rank for rank in running if rank not in self._states]
        if missing:  # their devices have not started
            seconds = now - self._began
            if seconds <= _QUIET_SECONDS:
                return ""
            return f"starting {self._who(missing)} for {duration(seconds)}"
        compiling = [rank for rank in running if self._compiles(rank, now)]
        if compiling:
            return self._compiling_text(compiling, running, now)
        still = [rank for rank in running if self._quiet(rank, now) > _QUIET_SECONDS]
        # If a core makes progress, the waits of the other cores will end.
        if still and len(still) == len(running):
            return self._still_text(still, running, now)
        return ""

    def _still_text(self, still: Sequence[int], running: Sequence[int], now: float) -> str:
        """Return why no core makes progress, given that all cores are quiet."""
        # The order of the cases is that of their certainty, as the module documents.
        waiting = [rank for rank in still if self._states[rank].waiting]
        late = [rank for rank in still if not self._states[rank].waiting]
        # The cause comes before its effect: cores that wait for one that traces are not named.
        tracing = [rank for rank in late if self._states[rank].doing == "tracing"]
        if tracing:
            subject = self._subject(tracing, running)
            return f"{subject}tracing the step, for {self._longest(tracing, now)}"
        if late and waiting:
            return self._late_text(late[0], waiting, running, now)
        if waiting:
            return self._all_wait_text(waiting, now)
        # From here on no core is in a collective.
        reading = [rank for rank in late if self._states[rank].doing == "data"]
        if reading:
            subject = self._subject(reading, running)
            return f"{subject}waiting for data, for {self._longest(reading, now)}"
        if all(self._states[rank].doing == "running" for rank in late):
            return f"running the step on the device, for {self._longest(late, now)}"
        seconds = min(self._quiet(rank, now) for rank in late)
        if seconds <= _SILENT_SECONDS:
            return ""
        return f"no step and no message for {duration(seconds)}"

    def _late_text(
        self,
        late: int,
        waiting: Sequence[int],
        running: Sequence[int],
        now: float,
    ) -> str:
        """Return a text about cores that wait for late cores; `late` is the first late core."""
        all_late = [rank for rank in running if not self._states[rank].waiting]
        call = self._states[waiting[0]].waiting
        text = (
            f"{self._subject(waiting, running)}waiting in {call}() for {self._who(all_late)}, "
            f"for {self._longest(waiting, now)}"
        )
        why = self._doing_text(late, now)
        return f"{text}, which is {why}" if why else text

    def _all_wait_text(self, waiting: Sequence[int], now: float) -> str:
        seconds = self._longest(waiting, now)
        calls = {rank: self._states[rank].waiting for rank in waiting}
        if len(set(calls.values())) > 1:
            named = list(calls.items())[:_MOST_NAMED]
            each = ", ".join(f"core {rank} in {call}()" for rank, call in named)
            return f"waiting, each for the other: {each}, for {seconds}"
        if self._states[waiting[0]].doing == "running":
            return f"running the step on the device, for {seconds}"
        who = self._who(waiting)
        if len(waiting) == len(self.ranks) > 1:
            who = "all cores"
        return f"{who} in {calls[waiting[0]]}() for {seconds}"

    def _compiling_text(self, compiling: Sequence[int], running: Sequence[int], now: float) -> str:
        # A core that compiles comes before a core that waits for its result, and among several the
        # core that began first.
        def order(rank: int) -> tuple[bool, float]:
            state = self._states[rank]
            return state.doing.is_waiting, state.since

        graph: Compiling = self._states[min(compiling, key=order)].doing
        who = ""
        last = ""
        waits = ""
        others = [rank for rank in running if rank not in compiling]
        if others:
            who = f" on {self._who(compiling)}"
        if others and all(self._states[rank].waiting for rank in others):
            verb = "wait" if len(others) > 1 else "waits"
            waits = f", {self._who(others)} {verb}"
        if graph.last_seconds:
            last = f"; graph {graph.number - 1} took {duration(graph.last_seconds)}"
        seconds = self._longest(compiling, now)
        return f"{graph.doing} graph {graph.number}{who} for {seconds}{last}{waits}"

    def rows(self, returned: Collection[int] = ()) -> list[tuple[str, str]]:
        """Return (core, activity) for at most 16 cores, if their activities differ.

        The result is empty until the calls have seen a difference for more than two seconds.
        """
        now = self._clock()
        ranks = sorted(self._states)
        rows = []
        if len(ranks) > 1:
            rows = self._rows(ranks, returned, now)
        if not rows:
            self._different_since = None
            return []
        if self._different_since is None:
            self._different_since = now
        if now - self._different_since <= _QUIET_SECONDS:
            return []
        return rows

    def _rows(
        self,
        ranks: Sequence[int],
        returned: Collection[int],
        now: float,
    ) -> list[tuple[str, str]]:
        words = {rank: "" if rank in returned else self._about(rank, now) for rank in ranks}
        if len({_kind(text) for text in words.values()}) < 2:
            return []
        shown = ranks
        if len(ranks) > _MOST_ROWS:
            shown = [rank for rank in ranks if words[rank]][:_MOST_ROWS]
        rows = []
        for rank in shown:
            other = "done" if rank in returned else "working"
            rows.append((f"core {rank}", words[rank] or other))
        return rows

    def _about(self, rank: int, now: float) -> str:
        """Return the reason why a core makes no progress; "" if it makes progress."""
        is_quiet = self._quiet(rank, now) > _QUIET_SECONDS
        if is_quiet or self._compiles(rank, now):
            return self._doing_text(rank, now)
        return ""

    def _doing_text(self, rank: int, now: float) -> str:
        """Return the activity of a core in words, if it is known."""
        state = self._states[rank]
        silent = now - state.heard
        if silent > max(_QUIET_SECONDS, _HEARTBEATS_MISSED * self._heartbeat):
            return f"without a sign of life for {duration(silent)}"
        seconds = duration(self._quiet(rank, now))
        if isinstance(state.doing, Compiling):
            return f"{state.doing.doing} graph {state.doing.number} for {seconds}"
        if state.waiting:
            return f"waiting in {state.waiting}() for {seconds}"
        if state.doing:
            return f"{_DOING[state.doing]} for {seconds}"
        return ""

    def _compiles(self, rank: int, now: float) -> bool:
        state = self._states[rank]
        return isinstance(state.doing, Compiling) and now - state.since > _COMPILE_SECONDS

    def _quiet(self, rank: int, now: float) -> float:
        return now - self._states[rank].since

    def _longest(self, ranks: Sequence[int], now: float) -> str:
        return duration(max(self._quiet(rank, now) for rank in ranks))

    def _who(self, ranks: Sequence[int]) -> str:
        """Name cores: `core 3`, `cores 0 and 2`, `all 8 cores`."""
        if len(ranks) == len(self.ranks) > 1:
            return f"all {len(ranks)} cores"
        if len(ranks) == 1:
            return f"core {ranks[0]}"
        if len(ranks) > _MOST_NAMED:
            return f"{len(ranks)} cores"
        first = ", ".join(map(str, ranks[:-1]))
        return f"cores {first} and {ranks[-1]}"

    def _subject(self, ranks: Sequence[int], running: Sequence[int]) -> str:
        """Return the subject of a sentence about cores; "" for all cores."""
        if len(ranks) == len(running):
            return ""
        return f"{self._who(ranks)}: "


def _kind(words: str) -> str:
    """Return a text about a core without its seconds, because those may differ between cores."""
    return words.partition(" for ")[0]
