"""Figures for a notebook: a batch, the curves of a run, predictions. Each function returns one Figure.

A figure is returned, not shown: as the last line of a cell it appears once, and pyplot does not know of it. `_style`
gives all figures the same look and ends with the call: the reader's own matplotlib settings stay as they are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpukit.essentials.show import figure_inputs
from tpukit.essentials.show import house_style as look
from tpukit.essentials.show.measures import better

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VALIDATION = ("valid", "val", "validation", "test", "eval", "dev")
_SPLITS = ("train", "training", *_VALIDATION)
_NOISY = 50  # points; longer series are drawn pale, with their moving mean on top
# What the measures of fit are called on a figure: words, unit, and how many of it one is.
_MEASURES = {
    "lr": ("learning rate", "", 1.0),
    "memory": ("peak memory", "GiB", 2.0**-30),
    "data wait": ("waiting for batches", "% of the time", 100.0),
    "samples per second": ("speed", "samples/s", 1.0),
    "images per second": ("speed", "images/s", 1.0),
    "seconds": ("time", "seconds", 1.0),
    "compiles": ("compiled so far", "graphs", 1.0),
}


def show_batch(
    images: Any,
    labels: Any = None,
    *,
    names: Sequence[str] | Mapping[str, str] | None = None,
    columns: int | None = None,
    limit: int = 8,
    channel: int | None = None,
    points: Any = None,
) -> Figure:
    """Draw the first images of a batch, each with its labels by name.

    `images` is `(N, C, H, W)` with 1 or 3 channels, a torch tensor of any dtype on any device, or a numpy array. Only
    the first `limit` images are copied to the host. Do not pass an XLA tensor in the notebook's kernel: its copy starts
    the XLA runtime there. The line under the figure says how values became grey levels:

    - integers in [0, 255] and floats in [0, 1] are drawn as they are;
    - floats of three channels that look like ImageNet's normalisation of [0, 1] (some below -1): it is undone;
    - any other floats are stretched, so that the smallest value drawn is black and the largest white.

    `labels` is `(N, L)` of zeros and ones (the names of the ones are written under the image, or "none") or `(N,)`
    class numbers; without `names`, numbers are written. Masks, `(N, H, W)` class numbers, are drawn over the images,
    each class but 0 in a colour; a dict with "labels" and "masks" has both. `names` are the words for each label, in
    their order, or a dict from label to words, such as `tpukit.pe.WORDS`. `channel` draws that channel alone, in grey:
    1 is the embolism window of the CTs of `tpukit.pe`. `points`, `(N, 2)` of x and y as shares of the width and the
    height, has an arrow in each image, none where they are nan: `pe.embolus_places` gives them. `columns=None` chooses
    up to four; more than twenty images beside each other are not drawn.

    Raises:
        TypeError: `images` is not an array, or has a dtype that cannot be drawn.
        ValueError: `images` has another shape, is empty, or has a value that is nan or infinite; labels or names do
            not match the images.
    """
    import numpy as np

    figure_inputs.at_least_one(limit=limit)
    points = None if points is None else figure_inputs.points(points, len(images))
    pixels, caption = figure_inputs.pixels(images, limit, "show_batch", channel)
    labels, masks = figure_inputs.labels_and_masks(labels)
    if masks is not None:
        pixels, classes = figure_inputs.under_masks(pixels, masks, len(images), look.COLORS)
        caption = f"{caption}, masks of classes {classes}"
    columns = figure_inputs.columns(columns, len(pixels))
    rows = -(-len(pixels) // columns)
    cell = min(3.2, (look.WIDTH - look.MARGIN) / columns - look.MARGIN)
    height = cell * look.aspect(pixels)
    titles = [] if labels is None else figure_inputs.titles(labels, names, len(images))[: len(pixels)]
    said = [f"{number}: {', '.join(words) or 'none'}" for number, words in enumerate(titles, 1)]
    titles = [_wrap(words, cell) if words else "none" for words in titles]
    below = [look.lines(titles[row * columns : (row + 1) * columns]) for row in range(rows)]

    with look.style():
        up = look.MARGIN + rows * (height + look.MARGIN) + sum(below) + look.lines([caption])
        figure = look.new_figure(columns * (cell + look.MARGIN) + look.MARGIN, up)
        for index, image in enumerate(pixels):
            row, column = divmod(index, columns)
            bottom = up - (row + 1) * (height + look.MARGIN) - sum(below[:row])
            axes = look.image_at(figure, image, look.MARGIN + column * (cell + look.MARGIN), bottom, cell, height)
            if points is not None and not np.isnan(points[index]).any():
                _arrow(axes, *points[index])
            if titles:
                color = look.INK if titles[index] != "none" else look.MUTED
                axes.set_title(titles[index], loc="left", y=0, pad=-5, va="top", fontsize=look.SMALL, color=color)
        look.note(figure, caption)
        look.describe(figure, f"{caption}. {'Labels: ' if said else ''}{'; '.join(said)}")
    return figure


def show_history(history: Any) -> Figure:
    """Draw what varied in a run: the loss in a large panel, every other measure in a small one.

    `history` is a dict of series (`{"train_loss": [...], "valid_loss": [...]}`), a list of rows (`[{"epoch": 1,
    "train_loss": 0.4}, ...]`), a DataFrame, or anything with `.rows`. The horizontal axis is "step", or "epoch" where
    there is no "step". A series shorter than the axis is spread over it evenly, with its last point at the end: five
    validation losses of a run of 1000 steps are drawn at 200, 400, ... 1000.

    Series share a panel when their names differ only in train / valid / val / test / eval: `train_loss` and
    `valid_loss` do, `lr` has its own. A single number is a dotted line across the panel whose name its own name ends
    with (`base_rate_loss` in `loss`). A series of 50 points or more is drawn pale, under a moving mean over a twentieth
    of its length. A ring marks the best validation point, for measures known to be better when low (loss, error, ...)
    or high (auroc, accuracy, f1, ...). What stayed the same, such as a constant learning rate, is a line of text under
    the figure, and what cannot be drawn is named there; only a loss or a score is drawn though it does not move.

    Raises:
        TypeError: `history` is none of these.
        ValueError: `history` contains no series of numbers.
    """
    axis, series, levels, notes = figure_inputs.series(history)
    measures = _MEASURES | {"samples per second": ("speed", f"{getattr(history, 'of', 'samples')}/s", 1.0)}
    series, constant = _what_varies(series, measures)
    panels: dict[str, dict] = {}
    for name, points in series.items():
        panels.setdefault(_kind(name), {})[name] = points
    # Losses first, then other measures of quality, then speed and the like, each as they came.
    kinds = sorted(panels, key=lambda kind: (kind.split()[-1] != "loss", better(kind) is None))
    stack = min(2, len(kinds) - 1)  # small panels, at most two in a column
    beside = -(-(len(kinds) - 1) // 2)
    ends = [end for x, _ in series.values() for end in (x[0], x[-1])]
    span = max(ends) - min(ends)
    limits = (min(ends) - 0.03 * span, max(ends) + 0.03 * span) if span else (ends[0] - 0.5, ends[0] + 0.5)

    with look.style():
        figure = look.new_figure(min(look.WIDTH, 7 + 3 * beside), 3.9, layout="constrained")
        grid = figure.add_gridspec(stack or 1, 1 + beside, width_ratios=[2.2 if beside < 2 else 1.7] + [1] * beside)
        for index, kind in enumerate(kinds):
            column, row = (0, slice(None)) if index == 0 else ((index + 1) // 2, (index - 1) % 2)
            if index == len(kinds) - 1 and index % 2 == 1:
                row = slice(None)  # the last of an odd number has its column to itself
            axes = figure.add_subplot(grid[row, column])
            axes.set_xlim(limits)
            known = {name: levels.pop(name) for name in list(levels) if _kind(name).split()[-1:] == kind.split()[-1:]}
            _curves(axes, kind, panels[kind], known, axis, measures)
        notes += [f"{name} is one number: {value:.4g}" for name, value in levels.items()]
        below = [f"throughout: {', '.join(constant)}"] * bool(constant)
        below += [f"not drawn: {'; '.join(notes)}"] * bool(notes)
        if below:
            text = textwrap.fill("    ".join(below), look.letters(figure.get_figwidth()))
            figure.supxlabel(text, x=0.01, ha="left", fontsize=look.SMALL - 1, color=look.MUTED)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        spans = [f"{name.replace('_', ' ')} from {y[0]:.4g} to {y[-1]:.4g}" for name, (_, y) in series.items()]
        across = f"{axis} {min(ends):.4g} to {max(ends):.4g}"
        look.describe(figure, f"Curves, {across}. {'; '.join([*spans, *below])}")
    return figure


def _what_varies(series: dict[str, tuple], measures: dict) -> tuple[dict[str, tuple], list[str]]:
    """Return the series that are worth a curve, in the units of the figure, and in words those that stay the same."""
    import numpy as np

    moving, constant = {}, []
    for name, (x, y) in series.items():
        words, unit, factor = measures.get(_kind(name), (name.replace("_", " "), "", 1.0))
        y = y * factor
        known = y[np.isfinite(y)]
        if better(name) is None and (known == known[0]).all():  # a loss that stays the same is news
            constant.append(f"{words} {known[0]:.4g} {unit}".strip())
        else:
            moving[name] = x, y
    return (moving, constant) if moving else (series, [])


def _arrow(axes: Axes, x: float, y: float) -> None:
    """Point at a place of an image, from the side and from above: on a CT from the dark of the lung."""
    away = (30 if x > 0.5 else -30, 20)
    pointer = {"arrowstyle": "-|>", "color": look.COLORS[1], "linewidth": 1.8, "shrinkA": 0, "shrinkB": 5}
    axes.annotate("", (x, 1 - y), away, "axes fraction", "offset points", arrowprops=pointer, annotation_clip=False)


def _curves(axes: Axes, kind: str, series: dict[str, tuple], levels: dict[str, float], axis: str, measures: dict):
    import numpy as np

    find_best = {"low": np.nanargmin, "high": np.nanargmax}.get(better(kind))
    alone, below = len(series) == 1, axis
    rest = iter(look.COLORS[2:] * len(series))
    for name, (x, y) in series.items():
        split = _split(name)
        color = look.COLORS[split in _VALIDATION] if split in ("train", "valid", "val") or alone else next(rest)
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
        axes.axhline(value, color=look.MUTED, linewidth=1, linestyle=(0, (1, 2)), label=label)
    words, unit, _ = measures.get(kind, (next(iter(series)).replace("_", " ") if alone else kind, "", 1.0))
    axes.set_title(words, loc="left", fontweight="bold")
    axes.set_xlabel(below)
    axes.set_ylabel(unit)
    axes.margins(y=0.12)  # room for the ring at the top
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:.4g}")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", handlelength=1.2)


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
    width = look.letters(inches)
    whole = [word.replace(" ", "\N{NO-BREAK SPACE}") if len(word) <= width else word for word in words]
    return textwrap.fill("\N{NO-BREAK SPACE}· ".join(whole), width, break_on_hyphens=False)
