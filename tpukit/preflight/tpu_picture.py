"""Draw a machine with TPU chips, its processes, and the path of a training step to a chip.

The figure has four parts, from top to bottom, each with a function in this module:

- host: the notebook's kernel, and the worker processes that it forks.
- chips: a chip below each process, and the links between chips.
- step: lines of Python become a graph, and the graph a program of the chip.
- shapes: the time of a chip if all batches are equal, and if the last batch is smaller.

All coordinates are in inches from the lower left corner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tpukit.essentials.display import counted, figure_style
from tpukit.essentials.environment import GENERATIONS, Generation
from tpukit.profiling import find_tpu

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE = "#3b78c2"
_LIGHT_BLUE = "#7aa6d6"
_ORANGE = "#d1782b"
_DARK_ORANGE = "#a85a17"
_LIGHT_ORANGE = "#f3d9c3"
_GREEN = "#4b9b62"
_DARK_GREEN = "#34744a"
_BLACK = "#2b2b2b"
_GRAY = "#66645f"
_RULE = "#bdbab4"
_FILL = "#f4f3f0"
_WHITE = "#ffffff"

# Inches.
_WIDTH = 10.0
_HEIGHT = 7.7
_LEFT = 0.25
_RIGHT = _WIDTH - _LEFT

# Points.
_SMALL = 8.5
_BODY = 9.5
_TITLE = 14.0

# The processes and their chips are in columns, which begin here and have this width together.
_FIRST_COLUMN = 3.05
_COLUMNS_WIDTH = 6.55
_FEWEST_COLUMNS = 4  # a chip has at most a quarter of the width, so that one chip is not too wide

Point = tuple[float, float]


def draw_tpu(name: str = "v5e-8") -> Figure:
    """Draw a machine with TPU chips: its processes, its chips, and the path of a training step.

    The machine need not be this one: only the name is used.

    Args:
        name: Google's name of the machine: "v5e-8" for Kaggle, "v5e-1" and "v6e-1" for Colab; the
            chips of "v3-8" have two cores each.

    Returns:
        The matplotlib figure.

    Raises:
        ValueError: no machine with one host has this name.
    """
    tpu = find_tpu(name)
    kind = GENERATIONS[tpu.generation]
    canvas = _Canvas()
    columns = _columns(tpu.chips)
    title = f"A TPU {tpu.name}: {counted(tpu.chips, 'chip')}, {counted(tpu.cores, 'core')}"
    canvas.text((_LEFT, 7.38), title, size=_TITLE, weight="bold")
    subtitle = "who runs where: one process per chip"
    canvas.text((_RIGHT, 7.38), subtitle, size=_BODY, color=_GRAY, ha="right")
    _draw_host(canvas, kind, columns)
    _draw_chips(canvas, kind, columns)
    _draw_step(canvas)
    _draw_shapes(canvas)
    processes = counted(tpu.chips, "worker process")
    figure_style.describe(
        canvas.figure,
        f"{title}: the notebook's kernel forks {processes}, one per chip. A step is recorded as a "
        "graph, compiled once, and run again for every batch of the same shapes; another shape is "
        "compiled again, and the chip waits.",
    )
    return canvas.figure


class _Columns(NamedTuple):
    middles: list[float]
    width: float


def _columns(chips: int) -> _Columns:
    middles = [_FIRST_COLUMN + _COLUMNS_WIDTH * (chip + 0.5) / chips for chip in range(chips)]
    return _Columns(middles, width=_COLUMNS_WIDTH / max(chips, _FEWEST_COLUMNS))


class _Canvas:
    """A figure outside of pyplot, with axes over its whole area whose unit is an inch."""

    def __init__(self) -> None:
        self.figure = figure_style.new_figure(_WIDTH, _HEIGHT)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, _WIDTH), ylim=(0, _HEIGHT), facecolor=_WHITE, xticks=[], yticks=[])
        self.axes.spines[:].set_visible(False)

    def text(self, at: Point, words: str, *, size: float = _SMALL, **options: object) -> None:
        """Write a text that begins at a point; with `ha`, its middle or its end is at the point."""
        look = {
            "va": "center",
            "color": _BLACK,
            "zorder": 3,
            "linespacing": 1.3,
            "family": "DejaVu Sans",
            **options,
        }
        self.axes.text(*at, words, fontsize=size, **look)

    def box(
        self,
        corner: Point,
        size: Point,
        *,
        fill: str,
        edge: str,
        rounding: float = 0.06,
        name: str | None = None,
    ) -> None:
        """Draw a box from its lower left corner. A test counts the boxes of each name."""
        from matplotlib.patches import FancyBboxPatch

        style = f"round,pad=0,rounding_size={rounding}"
        patch = FancyBboxPatch(corner, *size, boxstyle=style, facecolor=fill, edgecolor=edge)
        patch.set(linewidth=1.2, zorder=2, gid=name)
        self.axes.add_patch(patch)

    def arrow(self, start: Point, end: Point, *, color: str = _BLACK) -> None:
        """Draw an arrow."""
        look = {"arrowstyle": "-|>", "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", end, start, arrowprops={**look, "color": color})

    def line(self, start: Point, end: Point, **options: object) -> None:
        """Draw a line."""
        xs, ys = zip(start, end, strict=True)
        self.axes.plot(xs, ys, **options)


def _draw_host(canvas: _Canvas, kind: Generation, columns: _Columns) -> None:
    """Draw the host with the notebook's kernel and the processes that are forked from it."""
    canvas.box((_LEFT, 5.45), (9.5, 1.7), fill=_FILL, edge=_RULE)
    heading = "host: processors, memory and disk; all Python runs here"
    canvas.text((0.4, 6.98), heading, color=_GRAY)
    canvas.box((0.45, 5.62), (1.75, 1.14), fill=_WHITE, edge=_BLACK, name="kernel")
    canvas.text((1.325, 6.52), "notebook kernel", size=_BODY, weight="bold", ha="center")
    words = "launches and draws;\nnever opens a chip,\nso cells can run again"
    canvas.text((1.325, 6.1), words, ha="center")
    canvas.arrow((2.25, 6.19), (columns.middles[0] - 0.42 * columns.width, 6.19))
    canvas.text((2.58, 6.33), "fork", color=_GRAY, ha="center")
    for chip in range(len(columns.middles)):
        _draw_process(canvas, kind, columns, chip)


def _draw_process(canvas: _Canvas, kind: Generation, columns: _Columns, chip: int) -> None:
    x = columns.middles[chip]
    corner = (x - 0.42 * columns.width, 5.62)
    size = (0.84 * columns.width, 1.14)
    canvas.box(corner, size, fill=_BLUE, edge=_BLUE, name="process")
    is_narrow = columns.width < 1
    name = "worker" if is_narrow else "worker process"
    first = chip * kind.cores
    if kind.cores == 1:
        ranks = f"rank {first}"
        input_words = "batches"
    else:
        ranks = f"ranks {first} and {first + kind.cores - 1}"
        input_words = "one thread per core"
    canvas.text((x, 6.48), name, color="white", ha="center")
    canvas.text((x, 6.19), ranks, size=_BODY, color="white", ha="center", weight="bold")
    canvas.text((x, 5.9), input_words, color="white", ha="center")


def _draw_chips(canvas: _Canvas, kind: Generation, columns: _Columns) -> None:
    """Draw the chips below their processes, in two slanted rows as on their board."""
    middles = []
    for chip, x in enumerate(columns.middles):
        is_upper = chip % 2 == 0
        middles.append((x, 4.72 if is_upper else 3.92))
    _draw_links(canvas, middles)
    side = min(0.9, 0.76 * columns.width)
    for chip, middle in enumerate(middles):
        _draw_chip(canvas, kind, chip, middle=middle, side=side)
    _describe_chips(canvas, kind, has_links=len(middles) > 1)


def _draw_links(canvas: _Canvas, middles: list[Point]) -> None:
    """Draw the links to the next chip of the row, within a pair, and up to the host."""
    for chip, (x, y) in enumerate(middles):
        linked = [chip + 2]
        if chip % 2 == 0:
            linked.append(chip + 1)
        for other in linked:
            if other < len(middles):
                look = {"linewidth": 4, "zorder": 1, "solid_capstyle": "round"}
                canvas.line((x, y), middles[other], color=_GREEN, **look)
        dashes = (0, (3, 2))
        canvas.line((x, 5.45), (x, y), color=_BLUE, linewidth=1.2, linestyle=dashes, zorder=0.5)


def _draw_chip(canvas: _Canvas, kind: Generation, chip: int, *, middle: Point, side: float) -> None:
    x, y = middle
    left = x - side / 2
    canvas.box((left, y - 0.27), (side, 0.54), fill=_ORANGE, edge=_WHITE, name="chip")
    canvas.text((x, y + 0.14), f"chip {chip}", color="white", ha="center", weight="bold")
    inner_left = left + 0.06
    inner_width = side - 0.12
    # If PyTorch sees the tensor cores as a single core, they are drawn without a gap.
    is_joined = kind.tensor_cores > kind.cores
    gap = 0 if is_joined else 0.04
    width = inner_width / kind.tensor_cores
    for core in range(kind.tensor_cores):
        corner = (inner_left + core * width, y - 0.2)
        size = (width - gap, 0.2)
        canvas.box(corner, size, fill=_LIGHT_ORANGE, edge="none", rounding=0, name="core")
    for core in range(kind.cores):
        middle_of_core = inner_left + (core + 0.5) * inner_width / kind.cores - gap / 2
        canvas.text((middle_of_core, y - 0.11), "core", size=_SMALL - 0.5, ha="center")


def _describe_chips(canvas: _Canvas, kind: Generation, *, has_links: bool) -> None:
    bus = "PCI bus: batches go down,\nresults come up"
    canvas.text((_LEFT, 5.22), bus, color=_BLUE)
    if kind.tensor_cores == 1:
        cores = "one core"
    elif kind.tensor_cores == kind.cores:
        cores = "two cores"
    else:
        cores = "two cores that work as one"
    memory = f"{kind.gib * kind.cores} GiB of memory"
    speed = f"up to {kind.teraflops * kind.cores:.0f} TFLOP/s in bfloat16"
    words = f"a chip: {cores},\n{memory},\n{speed}"
    canvas.text((_LEFT, 4.56), words, color=_DARK_ORANGE)
    if has_links:
        links = "the links between chips average\nthe gradients, past the host"
        canvas.text((_LEFT, 3.9), links, color=_DARK_GREEN)


def _draw_step(canvas: _Canvas) -> None:
    """Draw how the lines of a step become a program of the chip."""
    y = 2.5
    canvas.line((_LEFT, 3.42), (_RIGHT, 3.42), color=_RULE, linewidth=0.8)
    heading = "What becomes of a training step"
    canvas.text((_LEFT, 3.2), heading, size=_BODY + 1.5, weight="bold")
    reason = "why shapes must not change"
    canvas.text((_RIGHT, 3.2), reason, size=_BODY, color=_GRAY, ha="right")
    canvas.box((_LEFT, y - 0.42), (2.15, 0.84), fill=_WHITE, edge=_BLUE)
    code = "loss = criterion(model(x), y)\nloss.backward()\ncore.optimizer_step(adam)"
    canvas.text((1.325, y), code, size=_SMALL - 1.5, ha="center", family="DejaVu Sans Mono")
    canvas.arrow((2.45, y), (3.75, y))
    canvas.text((3.08, y + 0.2), "recorded", ha="center", weight="bold")
    lazy = "the Python lines\ncompute nothing"
    canvas.text((3.08, y - 0.24), lazy, color=_GRAY, ha="center")
    _draw_graph(canvas, y)
    graph = "a graph; every shape is part of it"
    canvas.text((4.57, y - 0.52), graph, color=_GRAY, ha="center")
    canvas.arrow((5.35, y), (6.75, y))
    canvas.text((6.02, y + 0.2), "compiled", ha="center", weight="bold")
    canvas.text((6.02, y - 0.24), "seconds\nto minutes", color=_GRAY, ha="center")
    canvas.box((6.8, y - 0.42), (2.95, 0.84), fill=_ORANGE, edge=_ORANGE)
    white = {"color": "white", "ha": "center"}
    canvas.text((8.275, y + 0.17), "a program of the chip", size=_BODY, weight="bold", **white)
    kept = "kept, and run again for\nevery equal graph: milliseconds"
    canvas.text((8.275, y - 0.14), kept, **white)


def _draw_graph(canvas: _Canvas, y: float) -> None:
    """Draw a graph of six operations at the height `y`: two inputs, three steps, one result."""
    nodes = [
        (3.95, y + 0.22),
        (3.95, y - 0.22),
        (4.4, y),
        (4.8, y + 0.22),
        (4.8, y - 0.22),
        (5.2, y),
    ]
    for start, end in ((0, 2), (1, 2), (2, 3), (2, 4), (3, 5), (4, 5)):
        canvas.line(nodes[start], nodes[end], color=_GRAY, linewidth=1.2, zorder=1)
    xs, ys = zip(*nodes, strict=True)
    canvas.axes.scatter(xs, ys, s=70, color=_LIGHT_BLUE, edgecolor=_BLUE, linewidth=1, zorder=2)


def _draw_shapes(canvas: _Canvas) -> None:
    """Draw the time of a chip for equal batches, and for epochs with a smaller last batch."""
    equal = ["compile", *[128] * 13]
    smaller_last = ["compile", *[128] * 4, "compile again", 37, *[128] * 3]
    _draw_time(canvas, "each batch has\n128 images", equal, y=1.42)
    _draw_time(canvas, "but an epoch's\nlast has 37", smaller_last, y=0.76)
    canvas.arrow((1.45, 0.4), (_RIGHT, 0.4), color=_GRAY)
    canvas.text((1.45, 0.22), "time of one chip, not to scale", color=_GRAY)
    legend = "orange: a step, the chip works"
    canvas.text((_RIGHT, 0.22), legend, color=_DARK_ORANGE, ha="right")


def _draw_time(canvas: _Canvas, words: str, blocks: list[str | int], *, y: float) -> None:
    """Draw a row of blocks: a text is a compilation, a number is a step with this many images."""
    canvas.text((_LEFT, y), words)
    left = 1.45
    for block in blocks:
        if isinstance(block, str):
            width = 2.05
            canvas.box((left, y - 0.17), (width, 0.34), fill=_WHITE, edge=_GRAY, rounding=0.02)
            label = f"{block}: the chip waits"
            color = _GRAY
        else:
            width = 0.12 + 0.28 * block / 128  # a step takes longer with more images
            canvas.box((left, y - 0.17), (width, 0.34), fill=_ORANGE, edge=_ORANGE, rounding=0.02)
            label = str(block)
            color = "white"
        canvas.text((left + width / 2, y), label, color=color, ha="center")
        left += width + 0.06
