"""Figures for a notebook: a batch, the curves of a run, predictions. Each function returns one Figure.

A figure is returned, not shown: as the last line of a cell it appears once, and pyplot does not know of it. `_style`
gives all figures the same look and ends with the call: the reader's own matplotlib settings stay as they are.
"""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tpukit.display import figure_inputs
from tpukit.display.measures import better

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# An opaque background, slightly darker than white so that it does not glare in a dark notebook. Not transparent: the
# grey that has a contrast of 4.5:1 on white has only 2.6:1 on Colab's dark page.
_PAPER, _INK, _MUTED, _RULE, _GRID = "#fbfaf8", "#2b2b2b", "#716f6b", "#d9d7d2", "#eeece7"
# Blue, vermilion, green, ... of seaborn's "colorblind" palette: they differ with any colour vision, and in grey.
_COLORS = ("#0173b2", "#d55e00", "#029e73", "#cc78bc", "#ca9161", "#949494")
_WIDTH, _MARGIN = 10.0, 0.18  # inches
_SMALL, _BODY = 8.0, 10.0  # points

_VALIDATION = ("valid", "val", "validation", "test", "eval", "dev")
_SPLITS = ("train", "training", *_VALIDATION)
_NOISY = 50  # points; longer series are drawn pale, with their moving mean on top


def show_batch(
    images: Any,
    labels: Any = None,
    *,
    names: Sequence[str] | None = None,
    columns: int | None = None,
    limit: int = 8,
) -> Figure:
    """Draw the first images of a batch, each with its labels by name.

    `images` is `(N, C, H, W)` with 1 or 3 channels, a torch tensor of any dtype on any device, or a numpy array. Only
    the first `limit` images are copied to the host. Do not pass an XLA tensor in the notebook's kernel: its copy starts
    the XLA runtime there. The line under the figure says how values became grey levels:

    - integers in [0, 255] and floats in [0, 1] are drawn as they are;
    - floats of three channels that look like ImageNet's normalisation of [0, 1] (some below -1): it is undone;
    - any other floats are stretched, so that the smallest value drawn is black and the largest white.

    `labels` is `(N, L)` of zeros and ones (the names of the ones are written under the image, or "none") or `(N,)`
    class numbers; without `names`, numbers are written. `columns=None` chooses up to four; more than twenty images
    beside each other are not drawn.

    Raises:
        TypeError: `images` is not an array, or has a dtype that cannot be drawn.
        ValueError: `images` has another shape, is empty, or has a value that is nan or infinite; labels or names do
            not match the images.
    """
    figure_inputs.at_least_one(limit=limit)
    pixels, caption = figure_inputs.pixels(images, limit, "show_batch")
    columns = figure_inputs.columns(columns, len(pixels))
    rows = -(-len(pixels) // columns)
    cell = min(3.2, (_WIDTH - _MARGIN) / columns - _MARGIN)
    height = cell * _aspect(pixels)
    titles = [] if labels is None else figure_inputs.titles(labels, names, len(images))[: len(pixels)]
    titles = [_wrap(words, cell) if words else "none" for words in titles]
    below = [_lines(titles[row * columns : (row + 1) * columns]) for row in range(rows)]

    with _style():
        up = _MARGIN + rows * (height + _MARGIN) + sum(below) + _lines([caption])
        figure = _figure(columns * (cell + _MARGIN) + _MARGIN, up)
        for index, image in enumerate(pixels):
            row, column = divmod(index, columns)
            bottom = up - (row + 1) * (height + _MARGIN) - sum(below[:row])
            axes = _image(figure, image, _MARGIN + column * (cell + _MARGIN), bottom, cell, height)
            if titles:
                color = _INK if titles[index] != "none" else _MUTED
                axes.set_title(titles[index], loc="left", y=0, pad=-5, va="top", fontsize=_SMALL, color=color)
        _note(figure, caption)
    return figure


def show_history(history: Any) -> Figure:
    """Draw the curves of a run: the loss in a large panel, every other measure in a small one.

    `history` is a dict of series (`{"train_loss": [...], "valid_loss": [...]}`), a list of rows (`[{"epoch": 1,
    "train_loss": 0.4}, ...]`), a DataFrame, or anything with `.rows`. The horizontal axis is "step", or "epoch" where
    there is no "step". A series shorter than the axis is spread over it evenly, with its last point at the end: five
    validation losses of a run of 1000 steps are drawn at 200, 400, ... 1000.

    Series share a panel when their names differ only in train / valid / val / test / eval: `train_loss` and
    `valid_loss` do, `lr` has its own. A single number is a dotted line across the panel whose name its own name ends
    with (`base_rate_loss` in `loss`). A series of 50 points or more is drawn pale, under a moving mean over a twentieth
    of its length. A ring marks the best validation point, for measures known to be better when low (loss, error, ...)
    or high (auroc, accuracy, f1, ...). What cannot be drawn is named under the figure.

    Raises:
        TypeError: `history` is none of these.
        ValueError: `history` contains no series of numbers.
    """
    axis, series, levels, notes = figure_inputs.series(history)
    panels: dict[str, dict] = {}
    for name, points in series.items():
        panels.setdefault(_kind(name), {})[name] = points
    kinds = sorted(panels, key=lambda kind: kind.split()[-1] != "loss")  # stable: losses first, the others as they came
    stack = min(2, len(kinds) - 1)  # small panels, at most two in a column
    beside = -(-(len(kinds) - 1) // 2)
    ends = [end for x, _ in series.values() for end in (x[0], x[-1])]
    span = max(ends) - min(ends)
    limits = (min(ends) - 0.03 * span, max(ends) + 0.03 * span) if span else (ends[0] - 0.5, ends[0] + 0.5)

    with _style():
        figure = _figure(min(_WIDTH, 7 + 3 * beside), 3.9, layout="constrained")
        grid = figure.add_gridspec(stack or 1, 1 + beside, width_ratios=[2.2 if beside < 2 else 1.7] + [1] * beside)
        for index, kind in enumerate(kinds):
            column, row = (0, slice(None)) if index == 0 else ((index + 1) // 2, (index - 1) % 2)
            if index == len(kinds) - 1 and index % 2 == 1:
                row = slice(None)  # the last of an odd number has its column to itself
            axes = figure.add_subplot(grid[row, column])
            axes.set_xlim(limits)
            known = {name: levels.pop(name) for name in list(levels) if _kind(name).split()[-1:] == kind.split()[-1:]}
            _curves(axes, kind, panels[kind], known, axis)
        notes += [f"{name} is one number: {value:.4g}" for name, value in levels.items()]
        if notes:
            text = textwrap.fill("not drawn: " + "; ".join(notes), _letters(figure.get_figwidth()))
            figure.supxlabel(text, x=0.01, ha="left", fontsize=_SMALL - 1, color=_MUTED)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    return figure


def show_predictions(
    images: Any,
    labels: Any,
    probabilities: Any,
    *,
    names: Sequence[str] | None = None,
    limit: int = 8,
    top: int = 10,
) -> Figure:
    """Draw images, and beside each its predicted probabilities as bars, filled where the label is true.

    `images` as for `show_batch`; `labels` `(N, L)` of zeros and ones, or `(N,)` class numbers; `probabilities` `(N, L)`
    in [0, 1], not logits. Where there are more than `top` labels, each image shows `top` of them: its true labels
    first, then the most probable.

    Raises:
        TypeError: `images` is not an array, or has a dtype that cannot be drawn.
        ValueError: the shapes do not match one another, or a probability is outside [0, 1].
    """
    import numpy as np

    figure_inputs.at_least_one(limit=limit, top=top)
    pixels, caption = figure_inputs.pixels(images, limit, "show_predictions")
    truth, chances = figure_inputs.predictions(labels, probabilities, len(images))
    words = figure_inputs.label_names(names, chances.shape[1])

    shown, columns = min(top, len(words)), min(2, len(pixels))
    rows = -(-len(pixels) // columns)
    block = (_WIDTH - _MARGIN) / 2 - _MARGIN  # an image, the names beside it and their bars
    side = 2.0
    letters = min(max(map(len, words)), _letters(block - side - 1.4))
    words = [textwrap.shorten(name, letters, placeholder="…") for name in words]
    text = letters * _SMALL * 0.59 / 72 + 0.35
    height = max(side * _aspect(pixels), 0.19 * shown)

    with _style():
        up = 2 * _MARGIN + rows * (height + 1.6 * _MARGIN) + _lines([caption])
        figure = _figure(columns * (block + _MARGIN) + _MARGIN, up)
        for index, image in enumerate(pixels):
            row, column = divmod(index, columns)
            left, bottom = _MARGIN + column * (block + _MARGIN), up - _MARGIN - (row + 1) * height - row * 1.6 * _MARGIN
            _image(figure, image, left, bottom, side, height)
            chosen = np.lexsort((-chances[index], ~truth[index]))[:shown]  # the true ones, then the most probable
            chosen.sort()  # in the order of the labels, so that images can be compared
            high = min(height, 0.21 * shown)
            axes = _axes(figure, left + side + text, bottom + height - high, block - side - text - 0.3, high)
            _bars(axes, [words[label] for label in chosen], chances[index, chosen], truth[index, chosen])
        _note(figure, f"● filled: the label is true    ○ hollow: it is not    dotted: 0.5    {caption}")
    return figure


@contextmanager
def _style() -> Iterator[None]:
    """Give a figure the look of all figures while it is made; the reader's settings are restored afterwards."""
    import matplotlib
    import seaborn

    look = {
        "figure.facecolor": _PAPER,
        "axes.facecolor": _PAPER,
        "axes.edgecolor": _RULE,
        "axes.labelcolor": _MUTED,
        "axes.labelsize": _SMALL,
        "axes.titlesize": _BODY,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid.axis": "y",
        "grid.color": _GRID,
        "text.color": _INK,
        "text.parse_math": False,  # a name may contain a dollar sign
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
        "xtick.labelsize": _SMALL,
        "ytick.labelsize": _SMALL,
        "legend.frameon": False,
        "legend.fontsize": _SMALL,
        "font.family": "DejaVu Sans",  # comes with matplotlib, so widths are the same on every machine
    }
    with matplotlib.rc_context():  # seaborn's set_theme would change the colours "b", "r", ... for the whole session
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**seaborn.axes_style("whitegrid"), **seaborn.plotting_context("paper"), **look})
        yield


def _figure(width: float, height: float, layout: str | None = None) -> Figure:
    """Return an empty figure that a notebook can draw although pyplot does not know it; sizes in inches."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure((width, height), dpi=100, layout=layout)
    # IPython can draw figures once pyplot has loaded its backend; before that, it asks the object for a PNG.
    figure._repr_png_ = functools.partial(_png, figure)
    # Notebooks crop a figure to what is drawn; this rectangle reaches the edge, so the margins stay.
    figure.add_artist(Rectangle((0, 0), 1, 1, transform=figure.transFigure, facecolor=_PAPER, linewidth=0, zorder=-1))
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=_PAPER)
    return buffer.getvalue()


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes at a position given in inches."""
    across, up = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / up, width / across, height / up))


def _image(figure: Figure, pixels: np.ndarray, left: float, bottom: float, width: float, height: float) -> Axes:
    axes = _axes(figure, left, bottom, width, height)
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255 if pixels.dtype == "uint8" else 1)
    axes.set_axis_off()
    axes.set_anchor("N")
    return axes


def _bars(axes: Axes, names: list[str], chances: np.ndarray, truth: np.ndarray) -> None:
    places = range(len(names))
    axes.barh(places, 1, height=0.62, color=_GRID, linewidth=0)
    fill = [_COLORS[0] if true else _PAPER for true in truth]
    axes.barh(places, chances, height=0.62, color=fill, edgecolor=_COLORS[0], linewidth=1)
    axes.axvline(0.5, color=_MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
    axes.set(xlim=(0, 1), ylim=(len(names) - 0.5, -0.5), xticks=[])
    axes.set_yticks(places, [f"{name} {'●' if true else '○'}" for name, true in zip(names, truth, strict=True)])
    axes.tick_params(length=0, pad=3)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for label, place, chance, true in zip(axes.get_yticklabels(), places, chances, truth, strict=True):
        label.set_color(_INK if true else _MUTED)
        axes.text(1.03, place, f"{chance:.2f}", va="center", fontsize=_SMALL - 0.5, color=label.get_color())


def _curves(axes: Axes, kind: str, series: dict[str, tuple], levels: dict[str, float], axis: str) -> None:
    import numpy as np

    find_best = {"low": np.nanargmin, "high": np.nanargmax}.get(better(kind))
    alone, below = len(series) == 1, axis
    rest = iter(_COLORS[2:] * len(series))
    for name, (x, y) in series.items():
        split = _split(name)
        color = _COLORS[split in _VALIDATION] if split in ("train", "valid", "val") or alone else next(rest)
        label = "" if alone else split or name
        noisy = len(y) >= _NOISY
        if noisy:
            axes.plot(x, y, color=color, alpha=0.28, linewidth=0.7)
        if find_best and split in _VALIDATION:
            at = int(find_best(y))
            axes.plot(x[at], y[at], "o", markersize=10, markerfacecolor="none", markeredgecolor=color)
            below = f"{axis}    ○ best {y[at]:.4g} at {x[at]:.4g}"
        marks = {"marker": "o", "markersize": 4} if len(y) <= 12 else {}
        axes.plot(x, _moving_mean(y) if noisy else y, color=color, linewidth=1.6, label=label or None, **marks)
    for name, value in levels.items():
        label = f"{name.replace('_', ' ').removesuffix(kind).strip() or name} {value:.4g}"
        axes.axhline(value, color=_MUTED, linewidth=1, linestyle=(0, (1, 2)), label=label)
    axes.set_title(next(iter(series)).replace("_", " ") if alone else kind, loc="left", fontweight="bold")
    axes.set_xlabel(below)
    axes.margins(y=0.12)  # room for the ring at the top
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:.4g}")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", labelcolor="linecolor", handlelength=1.2)


def _moving_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over a centred window, a twentieth of the series long; nan and what lies outside do not count."""
    import numpy as np

    window = np.ones(2 * (len(values) // 40) + 1)
    known = np.isfinite(values)
    total = np.convolve(np.where(known, values, 0), window, "same")
    return np.where(known, total / np.maximum(np.convolve(known, window, "same"), 1), np.nan)


def _split(name: str) -> str:
    return next((word for word in name.lower().split("_") if word in _SPLITS), "")


def _kind(name: str) -> str:
    """Return the kind of measure, a name without its split: train_loss and loss_valid are both loss."""
    return " ".join(word for word in name.lower().split("_") if word not in _SPLITS) or name


def _wrap(words: list[str], inches: float) -> str:
    """Break the words into lines of this width; a word is broken only where it is longer than a line."""
    width = _letters(inches)
    whole = [word.replace(" ", "\N{NO-BREAK SPACE}") if len(word) <= width else word for word in words]
    return textwrap.fill("\N{NO-BREAK SPACE}· ".join(whole), width, break_on_hyphens=False)


def _letters(inches: float) -> int:
    """Return how many small letters fit into a width: in DejaVu Sans, a letter of a label name is 0.59 em wide."""
    return max(8, int(inches * 72 / (_SMALL * 0.59)))


def _lines(texts: Sequence[str]) -> float:
    """Return the height in inches that the longest of these texts needs below an image."""
    count = max((text.count("\n") + 1 for text in texts), default=0)
    return count * _SMALL * 1.25 / 72 + 0.08 if count else 0.0


def _aspect(pixels: np.ndarray) -> float:
    """Return height divided by width, limited so that an image and its neighbours stay legible."""
    return min(max(pixels.shape[1] / pixels.shape[2], 0.2), 2.0)


def _note(figure: Figure, text: str) -> None:
    across, up = figure.get_size_inches()
    figure.text(_MARGIN / across, _MARGIN / up, text, fontsize=_SMALL - 1, color=_MUTED, va="bottom")
