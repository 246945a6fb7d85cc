"""What the cores of a run do right now, in words: whoever compiles, traces, waits, and for whom."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tpukit.essentials.backends import Compiling
from tpukit.essentials.display import duration

# A step, an exchange or a batch of less is no news; a compile is, as soon as a heartbeat tells of it.
_QUIET_SECONDS, _COMPILE_SECONDS = 2.0, 0.5
_SILENT_SECONDS = 10.0  # without a step, a message or a word on why
_HEARTBEATS_MISSED = 5
_MOST_ROWS = 16  # of cores


@dataclass
class CoreState:
    """What the heartbeats of a core have said: its `activity`, `waiting` and `doing`, or what it compiles."""

    activity: int
    waiting: str | None
    doing: Compiling | str | None
    since: float  # when this was first heard
    heard: float  # when the last heartbeat came


class CoreStates:
    """Keeps what the heartbeats say, and puts it into words where a run seems to stand still."""

    def __init__(self, ranks: Sequence[int], heartbeat: float = 1.0, clock: Callable[[], float] = time.monotonic):
        self.ranks = ranks
        self._heartbeat, self._clock = heartbeat, clock
        self._began = clock()
        self._states: dict[int, CoreState] = {}
        self._compiled: dict[int, Compiling] = {}  # that was over before it was said to be
        self._differ_since: float | None = None

    def started(self, rank: int) -> None:
        """Note that the device of a core is up."""
        now = self._clock()
        self._states.setdefault(rank, CoreState(0, None, None, now, now))

    def beat(self, rank: int, activity: int, waiting: str | None, doing: Compiling | str | None) -> None:
        """Note a heartbeat; the clock of a core starts again when it does something else."""
        self.started(rank)
        last, now = self._states[rank], self._clock()
        if isinstance(doing, Compiling):
            if doing == last.doing and activity != last.activity:
                self._compiled[rank] = doing  # it has moved on: a graph that could not be compiled stays counted
            if doing == self._compiled.get(rank):
                doing = None
        same = (last.activity, last.waiting, last.doing) == (activity, waiting, doing)
        self._states[rank] = CoreState(activity, waiting, doing, last.since if same else now, now)

    def words(self, returned: Collection[int] = ()) -> str:
        """Return in one line why nothing moves; "" where something does."""
        now, running = self._clock(), [rank for rank in self.ranks if rank not in returned]
        missing = [rank for rank in running if rank not in self._states]
        if missing:
            seconds = now - self._began
            return f"starting {self._who(missing)} for {duration(seconds)}" if seconds > _QUIET_SECONDS else ""
        compiles = [rank for rank in running if self._compiles(rank, now)]
        if compiles:
            return self._compile_words(compiles, running, now)
        still = [rank for rank in running if self._quiet(rank, now) > _QUIET_SECONDS]
        if not still or len(still) < len(running):
            return ""
        tracing = [rank for rank in still if self._states[rank].doing == "tracing" and not self._states[rank].waiting]
        if tracing:
            return f"{self._subject(tracing, running)}tracing the step, for {self._longest(tracing, now)}"
        late = [rank for rank in still if not self._states[rank].waiting]
        waiting = [rank for rank in still if self._states[rank].waiting]
        if late and waiting:
            call = self._states[waiting[0]].waiting
            what = f"waiting in {call}() for {self._who(late)}, for {self._longest(waiting, now)}"
            why = self._doing(late[0], now)
            return f"{self._subject(waiting, running)}{what}" + (f", which is {why}" if why else "")
        if waiting:
            return self._all_wait(waiting, now)
        reading = [rank for rank in late if self._states[rank].doing == "data"]
        if reading:
            return f"{self._subject(reading, running)}waiting for data, for {self._longest(reading, now)}"
        if all(self._states[rank].doing == "running" for rank in late):
            return f"running the step on the device, for {self._longest(late, now)}"
        seconds = min(self._quiet(rank, now) for rank in late)
        return f"no step and no message for {duration(seconds)}" if seconds > _SILENT_SECONDS else ""

    def rows(self, returned: Collection[int] = ()) -> list[tuple[str, str]]:
        """Return (core, what it does) for each core if one of them does something else.

        Call it often: what differs for a moment only, between two heartbeats, is not told.
        """
        now, ranks = self._clock(), sorted(self._states)
        rows = self._rows(ranks, returned, now) if len(ranks) > 1 else []
        self._differ_since = (self._differ_since or now) if rows else None
        return rows if rows and now - self._differ_since > _QUIET_SECONDS else []

    def _rows(self, ranks: Sequence[int], returned: Collection[int], now: float) -> list[tuple[str, str]]:
        words = {rank: "" if rank in returned else self._about(rank, now) for rank in ranks}
        if len({_kind(found) for found in words.values()}) < 2:
            return []
        shown = ranks if len(ranks) <= _MOST_ROWS else [rank for rank in ranks if words[rank]][:_MOST_ROWS]
        others = {rank: "done" if rank in returned else "working" for rank in shown}
        return [(f"core {rank}", words[rank] or others[rank]) for rank in shown]

    def _about(self, rank: int, now: float) -> str:
        """Return what holds a core up; "" for nothing."""
        is_held_up = self._quiet(rank, now) > _QUIET_SECONDS or self._compiles(rank, now)
        return self._doing(rank, now) if is_held_up else ""

    def _compiles(self, rank: int, now: float) -> bool:
        state = self._states[rank]
        return isinstance(state.doing, Compiling) and now - state.since > _COMPILE_SECONDS

    def _compile_words(self, compiles: Sequence[int], running: Sequence[int], now: float) -> str:
        longest = min(compiles, key=lambda rank: (self._states[rank].doing.is_waiting, self._states[rank].since))
        graph: Compiling = self._states[longest].doing
        last = f"; graph {graph.number - 1} took {duration(graph.last_seconds)}" if graph.last_seconds else ""
        others = [rank for rank in running if rank not in compiles]
        who = f" on {self._who(compiles)}" if others else ""
        waits = f", {self._who(others)} {'wait' if len(others) > 1 else 'waits'}" if others else ""
        if not all(self._states[rank].waiting for rank in others):
            waits = ""
        return f"{graph.doing} graph {graph.number}{who} for {self._longest(compiles, now)}{last}{waits}"

    def _all_wait(self, waiting: Sequence[int], now: float) -> str:
        calls = {rank: self._states[rank].waiting for rank in waiting}
        if len(set(calls.values())) > 1:
            each = ", ".join(f"core {rank} in {call}()" for rank, call in list(calls.items())[:4])
            return f"waiting, each for the other: {each}, for {self._longest(waiting, now)}"
        call = calls[waiting[0]]
        if self._states[waiting[0]].doing == "running":
            return f"running the step on the device, for {self._longest(waiting, now)}"
        return f"{'all cores' if len(waiting) > 1 else 'core 0'} in {call}() for {self._longest(waiting, now)}"

    def _doing(self, rank: int, now: float) -> str:
        """Return what a core does, where that is known."""
        state, silent = self._states[rank], now - self._states[rank].heard
        if silent > max(_QUIET_SECONDS, _HEARTBEATS_MISSED * self._heartbeat):
            return f"without a sign of life for {duration(silent)}"
        seconds = duration(self._quiet(rank, now))
        if isinstance(state.doing, Compiling):
            return f"{state.doing.doing} graph {state.doing.number} for {seconds}"
        if state.waiting:
            return f"waiting in {state.waiting}() for {seconds}"
        names = {"tracing": "tracing the step", "running": "running the step", "data": "waiting for data"}
        return f"{names[state.doing]} for {seconds}" if state.doing else ""

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
        return f"cores {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if len(ranks) <= 4 else f"{len(ranks)} cores"

    def _subject(self, ranks: Sequence[int], running: Sequence[int]) -> str:
        return "" if len(ranks) == len(running) else f"{self._who(ranks)}: "


def _kind(words: str) -> str:
    """Return what is said without its number of seconds, which may differ by one."""
    return words.partition(" for ")[0]
