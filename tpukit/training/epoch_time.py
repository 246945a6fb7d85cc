"""Divide the time of an epoch into parts, recommend the part to improve, and draw them as a bar.

    device        9.0 s    the device computes
    input         6.0 s    the loop waits for batches; the largest part besides the device, so the
                           advice is `workers=`
    compile       5.0 s
                 20.0 s    the epoch

Each core measures its own times, and they add up to the time of the epoch. While the device
computes a step, the host prepares the next step. This time counts as "device" only.
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
# If the device computes for this share of the time, the other parts are too small to improve.
_ENOUGH = 0.8
# If the host waits for the device for this share of the time of steps, the device is always busy.
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
    """Measures the time of each part of an epoch. At any time, exactly one part is measured.

    Args:
        backend: the backend of this core. It counts the seconds of all compilations.
        wait_seconds: function that returns the total seconds in which loops waited for batches.
        host_seconds: function that returns the processor seconds that this thread spent in steps.
        device_seconds: function that returns the total seconds in which programs ran on the
            device; None if they are unknown.
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
        """Set all times to 0, and begin to measure the part "other"."""
        self._seconds = dict.fromkeys([*PARTS, "steps"], 0.0)
        self._part = "other"
        self._since = time.perf_counter()
        self._compiled = self._compile_seconds()
        self._before = [count() for count in self._counters]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block as "steps", "evaluation" or "checkpoints".

        Blocks may be nested: the time of an inner block does not count for the outer block.
        """
        outer = self._part
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def end_epoch(self) -> dict[str, float]:
        """Return the seconds of each part of the epoch so far.

        The time of steps is divided into "input", "device" and "host".
        """
        self._switch("other")
        seconds = dict(self._seconds)
        steps = seconds.pop("steps")
        now = [count() for count in self._counters]
        waited, on_host, on_device = (
            None if end is None else end - start
            for end, start in zip(now, self._before, strict=True)
        )
        # The wait for batches is a part of the time of steps. `_switch` has counted compilations
        # separately.
        seconds["input"] = min(waited, steps)
        steps -= seconds["input"]
        seconds["device"] = self._device_seconds(steps, on_host, on_device)
        seconds["host"] = steps - seconds["device"]
        return seconds

    def _device_seconds(self, steps: float, on_host: float, on_device: float | None) -> float:
        """Return the seconds of steps in which the device computed; estimate them if necessary.

        Args:
            steps: seconds of steps, without the time that the loop waited for batches.
            on_host: processor seconds of this thread in steps.
            on_device: seconds in which programs ran on the device; None if unknown.
        """
        if on_device is not None:
            return min(on_device, steps)
        if self._backend.device.type == "cpu":
            return steps  # the host is the device
        # Without a counter of the device: in the time that this thread does not compute, it waits
        # for the device. If it waits often, the device is never idle.
        idle = max(0.0, steps - on_host)
        if idle >= _HOST_IS_AHEAD * steps:
            return steps
        return idle

    def _switch(self, part: str) -> None:
        now = time.perf_counter()
        compiled = self._compile_seconds()
        elapsed = now - self._since
        # On v2 and v3, two cores of a process may compile at the same time, and the seconds of both
        # are counted. So they may be more than the elapsed time.
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
    """Return the total seconds of each part over several rows of `History.times`."""
    return {part: sum(row.get(part, 0.0) for row in rows) for part in PARTS}


def part_to_work_on(seconds: dict[str, float]) -> str:
    """Return the part to improve: the largest besides "device".

    If the device computes for 80 % of the time or more, return "device".
    """
    whole = sum(seconds.values())
    if seconds["device"] >= _ENOUGH * whole:
        return "device"
    others = {part: value for part, value in seconds.items() if part != "device"}
    return max(others, key=others.get)


def time_advice(seconds: dict[str, float]) -> str:
    """Return a sentence with the part to improve, its share of the time, and the fix.

    Args:
        seconds: the seconds of each part, from `total_time`.
    """
    part = part_to_work_on(seconds)
    share = seconds[part] / (sum(seconds.values()) or 1)
    return f"{part} takes {share:.0%} of the time: {_FIXES[part]}"


def show_time(history) -> Figure:
    """Draw the time of a run as one bar of its parts, with advice on the part to improve.

    Args:
        history: the `History` that `fit` returned on core 0, because the figure's label says
            "seconds of core 0".

    Returns:
        a figure of matplotlib.

    Raises:
        InvalidValueError: the history has no finished epoch.
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
