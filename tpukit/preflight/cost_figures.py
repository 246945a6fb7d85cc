"""Draw a preflight: the memory of a core, and the time of a step by operation.

In all functions, `found` is a `Preflight`. `costs` are the `Cost` records of its most expensive
operations, without operations that have no estimate of cycles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpukit.essentials.display import figure_style as look

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 2**30
_COLORS = {
    "forward": look.COLORS[0],
    "backward": look.COLORS[1],
    "optimizer": look.COLORS[2],
    "": look.RULE,
}


def preflight_figure(found) -> Figure:
    """Return a figure: the memory of a core as one bar, and the most expensive operations below.

    If the step needs too much memory, there is no program, so the figure has only the bar.
    """
    costs = [cost for cost in found.operations if cost.cycles]
    with look.style():
        figure = look.new_figure(9, 1.7 + 0.28 * len(costs), layout="constrained")
        if costs:
            ratios = [1, 0.55 * max(3, len(costs))]
            memory, time = figure.subplots(2, 1, height_ratios=ratios)
            _draw_time(time, found, costs)
        else:
            memory = figure.subplots()
        _draw_memory(memory, found)
        look.describe(figure, _description(found, costs))
    return figure


def _description(found, costs: Sequence) -> str:
    verdict = "fits" if found.fits else "does not fit"
    text = f"{found.subject}: it {verdict}, {found.hbm_bytes / _GIB:.2f} GiB per core"
    if costs:
        text += f"; most time in {_name(costs[0])}, {costs[0].share:.0%}"
    return f"{text}."


def _draw_memory(axes: Axes, found) -> None:
    left = 0.0
    parts = _memory_parts(found)
    for (name, size), color in zip(parts.items(), look.COLORS, strict=False):
        width = size / _GIB
        label = f"{name} {width:.2f} GiB"
        axes.barh([0], [width], left=left, color=color, height=0.6, label=label)
        left += width
    limit = found.chip.hbm / _GIB
    axes.axvline(limit, color=look.INK, linewidth=1)
    axes.set_xlim(0, max(limit, left) * 1.05)
    axes.set_yticks([])
    axes.set_xlabel(f"HBM of a {found.chip.generation} core, GiB; the line is its size")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(parts), borderaxespad=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def _memory_parts(found) -> dict[str, int]:
    """Return the parts of the memory at the moment of its largest use, in bytes."""
    if not found.compiled:
        return {"needed": found.hbm_bytes}
    program, others = found._peak
    parts = {
        "arguments": program.argument_bytes + program.output_bytes - program.alias_bytes,
        "temporaries": program.temporary_bytes,
        "code": program.code_bytes,
    }
    if round(others / _GIB, 2):  # a label "0.00 GiB" would say nothing
        parts["other tensors and programs"] = others
    return parts


def _draw_time(axes: Axes, found, costs: Sequence) -> None:
    places = range(len(costs))
    percents = [cost.share * 100 for cost in costs]
    axes.barh(places, percents, color=[_COLORS[cost.direction] for cost in costs])
    axes.set_yticks(places, [_name(cost) for cost in costs])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    for direction in dict.fromkeys(cost.direction for cost in costs):
        # A bar of length 0, to add the direction to the legend.
        axes.barh([0], [0], color=_COLORS[direction], label=direction or "no module")
    axes.legend(loc="lower right")
    axes.set_xlabel(f"% of the step's {found.cycles:,} estimated cycles (not compared with a chip)")


def _name(cost) -> str:
    return cost.module or cost.operation.opcode
