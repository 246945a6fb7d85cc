"""The parts of the time of an epoch, the part to work on, and both as one stacked bar.

    device        9.0 s    the device computes
    input         6.0 s    the loop waits for batches; the largest, so the text says `workers=`
    compile       5.0 s
                 20.0 s    the epoch

The parts are those of core 0 and add up to the time of the epoch. The host prepares a step while
the device computes the one before; such a second counts as one of the device.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from tpukit.essentials.display import InvalidValueError, counted
from tpukit.essentials.display import figure_style as look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.figure import Figure

PARTS = ("device", "host", "input", "compile", "evaluation", "checkpoints", "other")
# For each part, the line to write if it is the largest.
_FIXES = {
    "device": "on a TPU or GPU use bf16=True or more chips; docs/speed.md explains the MFU",
    "host": "use fit(replay=True) on XLA, or a larger batch_size",
    "input": "add workers= or threads= to core.batches, or use tpukit.pack",
    "compile": 'launch(..., compile_cache="compiled") loads the graphs in the next session',
    "evaluation": "evaluate less often, with a larger steps_per_epoch=",
    "checkpoints": 'save less often, with Checkpoints(folder, save_every="30m")',
    "other": "use longer epochs, because fit compares the cores after each",
}
_ENOUGH = 0.8  # of the time: then the other parts are too small to work on
# Of the time of steps: if the host waits that long for the device, the device is always busy.
_HOST_IS_AHEAD = 0.1
_COLORS = {
    "device": look.COLORS[2],
    "host": look.COLORS[1],
    "input": look.COLORS[0],
    "compile": look.COLORS[4],
    "evaluation": look.COLORS[3],
    "checkpoints": look.COLORS[5],
    "other": look.RULE,
}


class EpochClock:
    """Measures the parts of the epochs of one `fit`; exactly one part is running at any time.

    Args:
        backend: of this core, which counts the seconds of its compilations.
        wait_seconds: returns the seconds in which loops have waited for batches so far.
        host_seconds: returns the processor seconds of this thread in steps so far.
        device_seconds: returns the seconds in which programs ran on the device so far; None if
            that is unknown.
    """

    def __init__(
        self,
        backend,
        *,
        wait_seconds: Callable[[], float],
        host_seconds: Callable[[], float],
        device_seconds: Callable[[], float | None],
    ):
        self._backend = backend
        self._counters = (wait_seconds, host_seconds, device_seconds)
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forget the epoch before, and begin to measure."""
        self._seconds = dict.fromkeys([*PARTS, "steps"], 0.0)
        self._part = "other"
        self._since = time.monotonic()
        self._compiled = self._compile_seconds()
        self._before = [count() for count in self._counters]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time within to "steps", "evaluation" or "checkpoints", not to an outer part."""
        outer = self._part
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def end_epoch(self) -> dict[str, float]:
        """Return the seconds of each part of the epoch."""
        self._switch("other")
        seconds = dict(self._seconds)
        steps = seconds.pop("steps")
        now = [count() for count in self._counters]
        waited, on_host, on_device = (
            None if end is None else end - start
            for end, start in zip(now, self._before, strict=True)
        )
        seconds["input"] = min(waited, steps)
        steps -= seconds["input"]
        seconds["device"] = self._device_seconds(steps, on_host, on_device)
        seconds["host"] = steps - seconds["device"]
        return seconds

    def _device_seconds(self, steps: float, on_host: float, on_device: float | None) -> float:
        """Return the part of the time of steps in which the device computed."""
        if on_device is not None:
            return min(on_device, steps)
        if self._backend.device.type == "cpu":
            return steps  # the host is the device
        idle = max(0.0, steps - on_host)
        if idle >= _HOST_IS_AHEAD * steps:
            return steps
        return idle

    def _switch(self, part: str) -> None:
        now = time.monotonic()
        compiled = self._compile_seconds()
        elapsed = now - self._since
        # Two cores of a process, as on v2 and v3, may compile at the same time.
        compiling = min(elapsed, compiled - self._compiled)
        self._seconds[self._part] += elapsed - compiling
        self._seconds["compile"] += compiling
        self._part = part
        self._since = now
        self._compiled = compiled

    def _compile_seconds(self) -> float:
        _, compiling = self._backend.compiles() or (0, 0.0)
        _, loading = self._backend.loads()
        return compiling + loading


def total_time(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the seconds of each part over several epochs."""
    return {part: sum(row.get(part, 0.0) for row in rows) for part in PARTS}


def part_to_work_on(seconds: dict[str, float]) -> str:
    """Return the part that costs most, besides a device that is busy for most of the time."""
    whole = sum(seconds.values())
    if seconds["device"] >= _ENOUGH * whole:
        return "device"
    others = {part: value for part, value in seconds.items() if part != "device"}
    return max(others, key=others.get)


def time_advice(seconds: dict[str, float]) -> str:
    """Return a sentence: the part to work on, its share, and the line to write.

    Args:
        seconds: of each part, from `total_time`.
    """
    part = part_to_work_on(seconds)
    share = seconds[part] / (sum(seconds.values()) or 1)
    return f"{part} takes {share:.0%} of the time: {_FIXES[part]}"


def show_time(history) -> Figure:
    """Draw where the time of a run went, as one stacked bar, with the part to work on.

    Args:
        history: from `fit`.

    Raises:
        InvalidValueError: no epoch is finished.
    """
    if not history.times:
        raise InvalidValueError(
            "the history has no finished epoch, so there is no time to draw",
            fix="train for at least one epoch",
        )
    seconds = total_time(history.times)
    whole = sum(seconds.values())
    advice = time_advice(seconds)
    with look.style():
        figure = look.new_figure(9, 2.0, layout="constrained")
        axes = figure.subplots()
        left = 0.0
        for part, value in seconds.items():
            share = value / whole
            axes.barh([0], [value], left=left, color=_COLORS[part], label=f"{part} {share:.0%}")
            left += value
        axes.set_xlim(0, whole)
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"seconds of core 0 in {counted(len(history.times), 'epoch')}")
        axes.set_title(advice, loc="left")
        figure.legend(loc="outside lower left", ncols=len(PARTS))
        shares = ", ".join(f"{part} {value / whole:.0%}" for part, value in seconds.items())
        look.describe(figure, f"A stacked bar of {whole:.1f} seconds: {shares}. {advice}.")
    return figure
