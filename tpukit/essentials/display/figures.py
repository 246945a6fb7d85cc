"""The figure of a sample batch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display import figure_inputs
from tpukit.essentials.display import figure_style as look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def _arrow(axes: Axes, x: float, y: float) -> None:
    """Point at a place of an image, from the side and from above: on a CT from the dark of the lung."""
    away = (30 if x > 0.5 else -30, 20)
    pointer = {"arrowstyle": "-|>", "color": look.COLORS[1], "linewidth": 1.8, "shrinkA": 0, "shrinkB": 5}
    axes.annotate("", (x, 1 - y), away, "axes fraction", "offset points", arrowprops=pointer, annotation_clip=False)


def _wrap(words: list[str], inches: float) -> str:
    """Break the words into lines of this width; a word is broken only where it is longer than a line."""
    width = look.letters(inches)
    whole = [word.replace(" ", "\N{NO-BREAK SPACE}") if len(word) <= width else word for word in words]
    return textwrap.fill("\N{NO-BREAK SPACE}· ".join(whole), width, break_on_hyphens=False)
