"""Draw a step on the roofline of its chip, and find what limits its time.

A chip computes at most `peak` FLOP/s, and its memory transfers at most `bandwidth` bytes per
second. The *arithmetic intensity* of an operation is its FLOPs per byte. If it is low, the
operation cannot reach the peak:

    FLOP/s <= min(peak, intensity * bandwidth)

On logarithmic axes these are a slope and a flat roof, which meet at the intensity peak / bandwidth:
241 FLOP per byte on a v5e. Source: Samuel Williams and others, "Roofline" (2009),
doi:10.1145/1498765.1498785.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.display import figure_style as look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    "forward": look.COLORS[0],
    "backward": look.COLORS[1],
    "optimizer": look.COLORS[2],
    "": look.COLORS[5],
}
_ADVICE = {
    "compute": "only fewer FLOPs, or more chips, make the step shorter",
    "memory": "bf16=True halves the bytes, and a larger batch reads the weights less often",
    "host": "fit(replay=True), or a larger batch",
    "input": "notebook 09: a cache of decoded pixels, threads, workers",
    "links": "a larger batch per chip sends the gradients less often",
    # A matrix unit has 128 x 128 multiply-adds up to v5p, and 256 x 256 from v6e on.
    "operations": "larger layers, and channels that are multiples of 128, fill the units of the "
    "chip",
}
# If a step reaches less than this share of both the compute and the memory limit, its time is lost
# inside of its operations.
_FILLED = 0.5


class Point(NamedTuple):
    """An operation on the roofline.

    Attributes:
        name: the name of the module that made the operation, or the operation's opcode.
        direction: "forward", "backward" or "optimizer"; "" if unknown.
        intensity: FLOPs per byte of HBM.
        rate: FLOPs per second.
        share: the share of the cycles of the step, 0 to 1.
    """

    name: str
    direction: str
    intensity: float
    rate: float
    share: float


def points(found) -> list[Point]:
    """Return the points of a `Preflight`'s `products`, which are its most expensive operations.

    An operation whose arrays are all in on-chip memory has an infinite intensity. Therefore this
    function limits intensities to ten times that of the ridge point, where slope and roof meet.
    """
    edge = 10 * found.chip.flops / found.chip.bandwidth
    drawn = []
    for cost in found.products:
        if cost.cycles:
            point = Point(
                cost.module or cost.operation.opcode,
                cost.direction,
                intensity=min(edge, cost.flops / max(1, cost.hbm_bytes)),
                rate=cost.flops * found.chip.clock / cost.cycles,
                share=cost.share,
            )
            drawn.append(point)
    return drawn


def limit(found) -> tuple[str, str]:
    """Return what limits the time of a step, and a sentence with the numbers and advice.

    Args:
        found: a `Preflight` whose step was compiled.

    Returns:
        "compute", "memory", "operations", "host", "input" or "links"; and the sentence.
    """
    chip = found.seconds
    samples = (found.batch_size or 0) * found.chip.cores
    seconds = {"chip": chip, "host": found.host_seconds, "links": found.link_seconds}
    if found.pipeline and samples:
        seconds["input"] = samples / found.pipeline
    known = {name: value for name, value in seconds.items() if not math.isnan(value)}
    slowest = max(known, key=known.get)
    if slowest != "chip":
        times = f"{known[slowest] * 1e3:.1f} ms per step, the chip's operations {chip * 1e3:.1f} ms"
        verb = "are" if slowest == "links" else "is"
        return slowest, f"the {slowest} {verb} the limit: {times}; {_ADVICE[slowest]}"
    compute = found.flops_share
    # Not `bandwidth_share`, because in that the compiler also counts bytes in on-chip memory.
    memory = min(1.0, found.hbm_traffic / (chip * found.chip.bandwidth)) if chip else 0.0
    name = "compute" if compute >= memory else "memory"
    share = max(compute, memory)
    if share < _FILLED:
        reached = f"{compute:.0%} of the peak and {memory:.0%}"
        text = f"neither compute nor memory is used up, {reached} of the bandwidth"
        return "operations", f"{text}; {_ADVICE['operations']}"
    text = f"the chip's {name} is the limit, at {share:.0%} of its peak"
    return name, f"{text}; {_ADVICE[name]}"


def roofline_figure(found, *, step_seconds: float | None = None) -> Figure:
    """Return a figure: the step and its most expensive operations under the chip's roofline.

    Args:
        found: a `Preflight` whose step was compiled.
        step_seconds: the measured time of the same step on the chip. With it, the figure also shows
            the measured step, and the title compares the measured with the estimated time.

    Raises:
        InvalidValueError: the step needs too much memory, so nothing was compiled; or
            `step_seconds` is not positive.
    """
    if step_seconds is not None and not step_seconds > 0:
        raise InvalidValueError(
            "step_seconds must be positive",
            found=f"step_seconds={step_seconds}",
            fix="pass the seconds of a step, such as core.step_seconds after the first steps",
        )
    if not found.compiled:
        raise InvalidValueError(
            "a step that does not fit has no roofline, because it was not compiled",
            fix="use a smaller batch; `tpukit.preflight.largest_batch` finds one that fits",
        )
    drawn = points(found)
    whole = Point(
        "the whole step",
        "",
        intensity=found.flops / max(1, found.hbm_traffic),
        rate=found.flops / found.seconds,
        share=1.0,
    )
    _, sentence = limit(found)
    measured = None
    if step_seconds is not None:
        measured = whole._replace(name="measured", rate=found.flops / step_seconds)
        sentence = _measured_sentence(found, step_seconds, sentence)
    with look.style():
        figure = look.new_figure(9, 4.2, layout="constrained")
        axes = figure.subplots()
        steps = [whole] if measured is None else [whole, measured]
        _draw_roof(axes, found.chip, [*drawn, *steps])
        for point in drawn:
            axes.plot(
                point.intensity,
                point.rate / 1e12,
                "o",
                markersize=5 + 18 * math.sqrt(point.share),  # its area grows with the share
                color=_COLORS[point.direction],
                alpha=0.75,
                markeredgecolor=look.PAPER,
            )
        axes.plot(whole.intensity, whole.rate / 1e12, "D", color=look.INK, markersize=8)
        if measured is not None:
            hollow = {"color": look.INK, "markerfacecolor": look.PAPER, "markersize": 8}
            axes.plot(measured.intensity, measured.rate / 1e12, "D", **hollow)
        # Lines without points, so that all markers in the legend have the same size.
        for direction in dict.fromkeys(point.direction for point in drawn):
            axes.plot([], [], "o", color=_COLORS[direction], label=direction or "no module")
        axes.plot([], [], "D", color=look.INK, label="the whole step")
        if measured is not None:
            axes.plot([], [], "D", label="the whole step, measured", **hollow)
        _name_largest(axes, drawn)
        axes.legend(loc="lower right")
        axes.set_title(textwrap.fill(sentence, 110), loc="left")
        look.describe(figure, _description(found, drawn, whole, sentence))
    return figure


def _measured_sentence(found, step_seconds: float, sentence: str) -> str:
    """Return the title for a measured step; `sentence` is the compiler's limit, from `limit`."""
    share = min(1.0, found.seconds / step_seconds)
    peak = found.flops / step_seconds / found.chip.flops
    measured = f"measured {step_seconds * 1e3:.1f} ms per step, {peak:.0%} of the peak"
    operations = f"the chip's operations take {found.seconds * 1e3:.1f} ms ({share:.0%})"
    rest = sentence
    if share < _FILLED:
        rest = "the rows of the report name what takes the rest"
    return f"{measured}; by the compiler's estimate {operations}; {rest}"


def _draw_roof(axes: Axes, chip, drawn: list[Point]) -> None:
    ridge = chip.flops / chip.bandwidth
    left = min([ridge / 30, *(point.intensity / 2 for point in drawn)])
    right = ridge * 15
    low = min([chip.bandwidth * left, *(point.rate / 2 for point in drawn)])
    roof = [chip.bandwidth * left / 1e12, chip.flops / 1e12, chip.flops / 1e12]
    axes.plot([left, ridge, right], roof, color=look.INK, linewidth=1.4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(low / 1e12, 2.2 * chip.flops / 1e12)
    axes.axvline(ridge, color=look.RULE, linewidth=1)
    style = {"fontsize": look.SMALL, "color": look.MUTED}
    peak = f"{chip.flops / 1e12:g} TFLOP/s in bfloat16"
    axes.text(right, 1.1 * chip.flops / 1e12, f"{peak} ", ha="right", va="bottom", **style)
    memory = (
        f" left of {ridge:.0f} FLOP/byte the memory is the limit, {chip.bandwidth / 1e9:g} GB/s"
    )
    axes.text(left, 1.1 * chip.flops / 1e12, memory, va="bottom", **style)
    axes.set_xlabel("arithmetic intensity, FLOP per byte of HBM (by the compiler's estimate)")
    axes.set_ylabel(f"TFLOP/s of a {chip.generation} core")


def _name_largest(axes: Axes, drawn: list[Point]) -> None:
    """Write the name of the three largest points beside them."""
    for point in sorted(drawn, key=lambda point: point.share, reverse=True)[:3]:
        axes.annotate(
            f"{point.name}, {point.share:.0%}",
            (point.intensity, point.rate / 1e12),
            xytext=(9, -3),
            textcoords="offset points",
            fontsize=look.SMALL,
            color=look.INK,
        )


def _description(found, drawn: list[Point], whole: Point, sentence: str) -> str:
    numbers = f"{whole.rate / 1e12:.3g} TFLOP/s at {whole.intensity:.3g} FLOP per byte"
    text = f"Roofline of {found.chip.name}: the step reaches {numbers}; {sentence}."
    if drawn:
        first = drawn[0]
        text += f" Most time: {first.name}, {first.share:.0%}, {first.rate / 1e12:.3g} TFLOP/s."
    return text
