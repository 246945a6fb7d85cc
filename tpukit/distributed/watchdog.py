"""When does a run hang? Cores that wait for one that will not come, told from cores that compile."""

import time
from collections.abc import Callable
from dataclasses import dataclass

_UNEVEN_SECONDS = 5.0  # a core that returned has done its part of every collective: the rest is bytes on their way
_CPU_SAMPLE_SECONDS = 2.0
_IDLE = 0.2  # of one processor: a compiler, a decoder or a loop uses more, a sleep or a lock nothing


@dataclass(frozen=True)
class Limits:
    """How long a run may take, and how long it may stand still.

    Attributes:
        timeout: seconds for the whole run; None for no limit.
        stall: seconds that cores may wait for one that neither moves on nor uses a processor; None to wait for ever.
        heartbeat: seconds between two signs of life of a worker.
    """

    timeout: float | None = None
    stall: float | None = 120.0
    heartbeat: float = 1.0

    def __post_init__(self) -> None:
        for name in ("timeout", "stall", "heartbeat"):
            value = getattr(self, name)
            optional = name != "heartbeat" and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                none = "" if name == "heartbeat" else ", or None for no limit"
                raise ValueError(f"{name} is a number of seconds above 0{none}, got {value!r}")


@dataclass
class Heartbeat:
    """What a core last said of itself: how much it has done, in which collective it waits, and since when."""

    activity: int
    waiting: str | None
    since: float


@dataclass(frozen=True)
class Stall:
    """A run that hangs: the core to blame, and what is known of it."""

    rank: int
    what: str
    fix: str


class Watchdog:
    """Judges from heartbeats whether a run still moves."""

    def __init__(self, cores: int, limits: Limits, cpu_seconds: Callable[[int], float]):
        self.cores, self.limits = cores, limits
        self._cpu_seconds = cpu_seconds  # of the process that has a rank
        self._pulses: dict[int, Heartbeat] = {}
        self._sample: tuple[float, dict[int, float]] | None = None
        self._began = time.monotonic()
        self._silent = Heartbeat(0, None, self._began)  # a core that has not said a word

    def beat(self, rank: int, activity: int, waiting: str | None) -> None:
        """Note a heartbeat."""
        last = self._pulses.get(rank)
        if last is None or (last.activity, last.waiting) != (activity, waiting):
            self._pulses[rank] = Heartbeat(activity, waiting, time.monotonic())

    def judge(self, returned: set[int]) -> Stall | None:
        """Say which core the others wait for in vain, given those that have returned; None while all is well."""
        now = time.monotonic()
        if self.limits.timeout is not None and now - self._began > self.limits.timeout:
            return self._timed_out(returned)
        pulses = {rank: self._pulses.get(rank, self._silent) for rank in range(self.cores) if rank not in returned}
        quiet = {rank: now - pulse.since for rank, pulse in pulses.items()}
        waiting = [rank for rank in quiet if pulses[rank].waiting]
        waits = {rank: f"{pulses[rank].waiting}()" for rank in waiting}
        nobody_started = self._silent in pulses.values() and not waiting
        late = [rank for rank in waiting if quiet[rank] > _UNEVEN_SECONDS]
        if returned and late and len(waiting) == self.cores - len(returned):
            return Stall(
                min(returned),
                f"returned while core {late[0]} still waits for it in {waits[late[0]]}",
                "let every core do the same number of steps: core.batches gives each the same number of batches",
            )
        limit = self.limits.stall
        if limit is None or not (waiting or nobody_started) or min(quiet.values()) <= limit:
            self._sample = None
            return None
        busy = [rank for rank in quiet if rank not in waiting]
        if busy and not self._idle(busy, now):
            return None
        if not busy:  # all wait, and not for the same
            told = ", ".join(f"core {rank} in {waits[rank]}" for rank in waiting)
            rank = min(waiting, key=lambda rank: list(waits.values()).count(waits[rank]))
            what = f"waits with all others for {quiet[rank]:.0f} s, each for the other: {told}"
            return Stall(rank, what, "let every core call the same collectives in the same order")
        if nobody_started:
            silent = next(rank for rank in busy if pulses[rank] is self._silent)
            fix = "see tpukit.check() for who holds the chips; launch(..., stall=seconds) allows a longer start"
            return Stall(silent, f"has not started in {quiet[silent]:.0f} s, and uses no processor", fix)
        return Stall(
            busy[0],
            f"has not moved for {quiet[busy[0]]:.0f} s, while core {waiting[0]} waits for it in {waits[waiting[0]]}",
            f"see below where core {busy[0]} stands; launch(..., stall=seconds) allows more than {limit:g}",
        )

    def _timed_out(self, returned: set[int]) -> Stall:
        left = [rank for rank in range(self.cores) if rank not in returned]
        pulses = {rank: self._pulses.get(rank) for rank in left}
        rank = next((rank for rank in left if not (pulses[rank] and pulses[rank].waiting)), left[0])
        pulse = pulses[rank]
        doing = f", waiting in {pulse.waiting}()" if pulse and pulse.waiting else ""
        what = f"was not done after timeout={self.limits.timeout:g} seconds{doing}"
        return Stall(rank, what, "a longer timeout, or None for no limit; see below where the cores stand")

    def _idle(self, ranks: list[int], now: float) -> bool:
        """Say whether one of the ranks used no processor over the last seconds: only then does it not compile."""
        spent = {rank: self._cpu_seconds(rank) for rank in ranks}
        if self._sample is None or set(self._sample[1]) != set(spent):
            self._sample = now, spent
        began, before = self._sample
        if now - began < _CPU_SAMPLE_SECONDS:
            return False
        self._sample = None
        return any(spent[rank] - before[rank] < _IDLE * (now - began) for rank in ranks)
