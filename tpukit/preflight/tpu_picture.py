"""One picture of a machine with TPU chips: who runs where, and what becomes of a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpukit.essentials.machine import GENERATIONS, Generation
from tpukit.essentials.show import counted, house_style
from tpukit.measure import find_tpu

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _PALE, _ORANGE, _GREEN = "#3b78c2", "#7aa6d6", "#d1782b", "#4b9b62"
_INK, _MUTED, _RULE, _FILL, _PAPER = "#2b2b2b", "#66645f", "#bdbab4", "#f4f3f0", "#ffffff"
_WIDTH, _HEIGHT = 10.0, 7.7  # inches
_SMALL, _BODY, _TITLE = 8.5, 9.5, 14.0  # points


def show_tpu(name: str = "v5e-8") -> Figure:
    """Draw a machine with TPU chips: the kernel, its worker processes, the chips, and what becomes of a step.

    `name` is what Google calls the machine: "v5e-8" is Kaggle's, "v5e-1" and "v6e-1" are Colab's; "v3-8" has two cores
    a chip. It need not be this machine, and nothing is asked of it.

    Raises:
        ValueError: no machine with one host has this name.
    """
    tpu = find_tpu(name)
    kind, chips = GENERATIONS[tpu.generation], tpu.chips
    figure, axes = _canvas()
    title = f"A TPU {tpu.name}: {counted(chips, 'chip')}, {counted(tpu.cores, 'core')}"
    _text(axes, 0.25, 7.38, title, _TITLE, weight="bold")
    _text(axes, 9.75, 7.38, "who runs where: one process a chip", _BODY, color=_MUTED, ha="right")
    places = [3.05 + 6.55 * (index + 0.5) / chips for index in range(chips)]
    room = 6.55 / max(chips, 4)
    _draw_host(axes, kind, places, room)
    _draw_chips(axes, kind, places, room)
    _draw_step(axes)
    _draw_shapes(axes)
    forked = f"the notebook's kernel forks {counted(chips, 'worker process')}, one a chip"
    step = "A step is recorded as a graph, compiled once, and run again for every batch of the same shapes"
    house_style.describe(figure, f"{title}: {forked}. {step}; another shape is compiled again, and the chip waits.")
    return figure


def _canvas() -> tuple[Figure, Axes]:
    """Return a figure that pyplot does not know, and axes over all of it whose unit is an inch."""
    figure = house_style.new_figure(_WIDTH, _HEIGHT)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(0, _HEIGHT), facecolor=_PAPER, xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return figure, axes


def _draw_host(axes: Axes, kind: Generation, places: list[float], room: float) -> None:
    """Draw the host: the notebook's kernel, and the processes forked from it."""
    _box(axes, 0.25, 5.45, 9.5, 1.7, _FILL, _RULE)
    _text(axes, 0.4, 6.98, "host: processors, memory and disk; all Python runs here", _SMALL, color=_MUTED)
    _box(axes, 0.45, 5.62, 1.75, 1.14, _PAPER, _INK, name="kernel")
    _text(axes, 1.325, 6.52, "notebook kernel", _BODY, weight="bold", ha="center")
    _text(axes, 1.325, 6.1, "launches and draws;\nnever opens a chip,\nso cells can run again", _SMALL, ha="center")
    _arrow(axes, (2.25, 6.19), (places[0] - 0.42 * room, 6.19), _INK)
    _text(axes, 2.58, 6.33, "fork", _SMALL, color=_MUTED, ha="center")
    for index, x in enumerate(places):
        _box(axes, x - 0.42 * room, 5.62, 0.84 * room, 1.14, _BLUE, _BLUE, name="process")
        ranks = range(index * kind.cores, (index + 1) * kind.cores)
        words = "worker" if room < 1 else "worker process"
        _text(axes, x, 6.48, words, _SMALL, color="white", ha="center")
        told = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} and {ranks[-1]}"
        _text(axes, x, 6.19, told, _BODY, color="white", ha="center", weight="bold")
        reads = "one thread a core" if len(ranks) > 1 else "batches"
        _text(axes, x, 5.9, reads, _SMALL, color="white", ha="center")


def _draw_chips(axes: Axes, kind: Generation, places: list[float], room: float) -> None:
    """Draw the chips below their processes, in two slanted rows as on their board, with the links between them."""
    side = min(0.9, 0.76 * room)
    middles = [(x, 4.72 if index % 2 == 0 else 3.92) for index, x in enumerate(places)]
    for index, (x, y) in enumerate(middles):
        neighbours = ([index + 1] if index % 2 == 0 else []) + [index + 2]
        for other in (middles[one] for one in neighbours if one < len(middles)):
            axes.plot(*zip((x, y), other, strict=True), color=_GREEN, linewidth=4, zorder=1, solid_capstyle="round")
        axes.plot((x, x), (5.45, y), color=_BLUE, linewidth=1.2, linestyle=(0, (3, 2)), zorder=0.5)
    for index, (x, y) in enumerate(middles):
        _box(axes, x - side / 2, y - 0.27, side, 0.54, _ORANGE, _PAPER, name="chip")
        _text(axes, x, y + 0.14, f"chip {index}", _SMALL, color="white", ha="center", weight="bold")
        width = (side - 0.12) / kind.tensor_cores
        joined = kind.tensor_cores > kind.cores  # drawn without a gap: PyTorch sees one
        for core in range(kind.tensor_cores):
            left = x - side / 2 + 0.06 + core * width
            _box(axes, left, y - 0.2, width - (0 if joined else 0.04), 0.2, "#f3d9c3", "none", name="core", round=0)
        for core in range(kind.cores):
            at = x - side / 2 + 0.06 + (core + 0.5) * (side - 0.12) / kind.cores - (0 if joined else 0.02)
            _text(axes, at, y - 0.11, "core", _SMALL - 0.5, ha="center")
    a_chip = "one core" if kind.tensor_cores == 1 else "two cores"
    if kind.tensor_cores > kind.cores:
        a_chip = "two cores that work as one"
    links = "the links between chips average\nthe gradients, past the host"
    _text(axes, 0.25, 5.22, "PCI bus: batches go down,\nresults come up", _SMALL, color=_BLUE)
    gib, teraflops = kind.gib * kind.cores, kind.teraflops * kind.cores
    words = f"a chip: {a_chip},\n{gib} GiB of memory,\nup to {teraflops:.0f} TFLOP/s in bfloat16"
    _text(axes, 0.25, 4.56, words, _SMALL, color="#a85a17")
    if len(places) > 1:
        _text(axes, 0.25, 3.9, links, _SMALL, color="#34744a")


def _draw_step(axes: Axes) -> None:
    """Draw how a step becomes a program of the chip."""
    axes.plot((0.25, 9.75), (3.42, 3.42), color=_RULE, linewidth=0.8)
    _text(axes, 0.25, 3.2, "What becomes of a training step", _BODY + 1.5, weight="bold")
    _text(axes, 9.75, 3.2, "why shapes must not change", _BODY, color=_MUTED, ha="right")
    y = 2.5
    _box(axes, 0.25, y - 0.42, 2.15, 0.84, _PAPER, _BLUE)
    lines = "loss = criterion(model(x), y)\nloss.backward()\ncore.optimizer_step(adam)"
    _text(axes, 1.325, y, lines, _SMALL - 1.5, ha="center", family="DejaVu Sans Mono")
    _arrow(axes, (2.45, y), (3.75, y), _INK)
    _text(axes, 3.08, y + 0.2, "recorded", _SMALL, ha="center", weight="bold")
    _text(axes, 3.08, y - 0.24, "the Python lines\ncompute nothing", _SMALL, color=_MUTED, ha="center")
    graph = [(3.95, y + 0.22), (3.95, y - 0.22), (4.4, y), (4.8, y + 0.22), (4.8, y - 0.22), (5.2, y)]
    for start, end in ((0, 2), (1, 2), (2, 3), (2, 4), (3, 5), (4, 5)):
        axes.plot(*zip(graph[start], graph[end], strict=True), color=_MUTED, linewidth=1.2, zorder=1)
    axes.scatter(*zip(*graph, strict=True), s=70, color=_PALE, edgecolor=_BLUE, linewidth=1, zorder=2)
    _text(axes, 4.57, y - 0.52, "a graph; every shape is part of it", _SMALL, color=_MUTED, ha="center")
    _arrow(axes, (5.35, y), (6.75, y), _INK)
    _text(axes, 6.02, y + 0.2, "compiled", _SMALL, ha="center", weight="bold")
    _text(axes, 6.02, y - 0.24, "seconds\nto minutes", _SMALL, color=_MUTED, ha="center")
    _box(axes, 6.8, y - 0.42, 2.95, 0.84, _ORANGE, _ORANGE)
    _text(axes, 8.275, y + 0.17, "a program of the chip", _BODY, color="white", ha="center", weight="bold")
    words = "kept, and run again for\nevery equal graph: milliseconds"
    _text(axes, 8.275, y - 0.14, words, _SMALL, color="white", ha="center")


def _draw_shapes(axes: Axes) -> None:
    """Draw what equal shapes and another shape do to the time of a chip."""
    rows = {
        "each batch has\n128 images": ("compile", *[128] * 13),
        "but an epoch's\nlast has 37": ("compile", *[128] * 4, "compile again", 37, *[128] * 3),
    }
    for (words, blocks), y in zip(rows.items(), (1.42, 0.76), strict=True):
        _text(axes, 0.25, y, words, _SMALL)
        x = 1.45
        for block in blocks:
            if isinstance(block, str):
                width = 2.05
                _box(axes, x, y - 0.17, width, 0.34, _PAPER, _MUTED, round=0.02)
                _text(axes, x + width / 2, y, f"{block}: the chip waits", _SMALL, color=_MUTED, ha="center")
            else:
                width = 0.12 + 0.28 * block / 128
                _box(axes, x, y - 0.17, width, 0.34, _ORANGE, _ORANGE, round=0.02)
                _text(axes, x + width / 2, y, str(block), _SMALL, color="white", ha="center")
            x += width + 0.06
    _arrow(axes, (1.45, 0.4), (9.75, 0.4), _MUTED)
    _text(axes, 1.45, 0.22, "time of one chip, not to scale", _SMALL, color=_MUTED)
    _text(axes, 9.75, 0.22, "orange: a step, the chip works", _SMALL, color="#a85a17", ha="right")


def _box(axes: Axes, x: float, y: float, width: float, height: float, color: str, edge: str, **options: object) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = f"round,pad=0,rounding_size={options.get('round', 0.06)}"
    patch = FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=edge, linewidth=1.2)
    patch.set(zorder=2, gid=options.get("name"))  # so that a test can count what is drawn
    axes.add_patch(patch)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    look = {"arrowstyle": "-|>", "color": color, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=look)


def _text(axes: Axes, x: float, y: float, words: str, size: float, **options: object) -> None:
    look = {"va": "center", "color": _INK, "zorder": 3, "linespacing": 1.3, "family": "DejaVu Sans", **options}
    axes.text(x, y, words, fontsize=size, **look)
