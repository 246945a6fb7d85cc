"""The figure of a sample batch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display import figure_inputs
from tpukit.essentials.display import figure_style as look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LARGEST_CELL = 3.2  # inches
_NO_LABEL = "none"
_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


def show_batch(
    images: Any,
    labels: Any = None,
    *,
    names: Sequence[str] | Mapping | None = None,
    columns: int | None = None,
    limit: int = 8,
    channel: int | None = None,
    points: Any = None,
) -> Figure:
    """Draw the first images of a batch, each with the names of its labels.

    tpukit copies only the first `limit` images to the host. Do not pass an XLA tensor in the
    notebook's kernel, because copying the tensor would start the XLA runtime in the kernel. The
    line under the figure states how values became grey levels:

    - Integers in [0, 255] and floats in [0, 1] are drawn as they are.
    - If floats of three channels have values below -1, tpukit undoes ImageNet's normalisation. If
      all values are then in [0, 1], tpukit draws the result.
    - Other floats are stretched: the smallest value among the drawn images is black, the largest
      white.

    Args:
        images: (N, C, H, W) with 1 or 3 channels; a torch tensor of any dtype on any device, or a
            numpy array.
        labels: the labels to write under each image, (N, L) zeros and ones ("none" if all are 0) or
            (N,) class numbers; or the masks to draw over each image, (N, H, W) class numbers, with
            a colour for each class but 0; or a dict with "labels" and "masks". None for neither.
        names: the names of the labels: a list in the order of the numbers; or a dict such as
            {0: "cat"}, {"0": "cat"} or {"cat": 0}; or a dict from label to words in the order of
            the labels, such as `tpukit.pe.WORDS`. None writes numbers.
        columns: images per row, 20 at most; None for up to four.
        limit: the largest number of images to draw.
        channel: draw only this channel, in grey; None for all. In the CTs of `tpukit.pe`, channel
            1 is the embolism window.
        points: (N, 2) floats in [0, 1]: x and y of a point per image, as shares of width and
            height from the upper left corner. An arrow points there; nan for no arrow.
            `pe.embolus_places` returns them.

    Returns:
        The figure. As the last line of a cell it appears once.

    Raises:
        InvalidTypeError: `images` is not an array, or has a dtype that cannot be drawn.
        InvalidValueError: `images` has another shape, is empty, or has a value that is nan or
            infinite; labels, names or points do not match the images; `columns`, `limit` or
            `channel` is out of range.
    """
    import numpy as np

    figure_inputs.at_least_one(limit=limit)
    if points is not None:
        points = figure_inputs.points(points, len(images))
    pixels, caption = figure_inputs.pixels(images, limit, who="show_batch", channel=channel)
    labels, masks = figure_inputs.labels_and_masks(labels)
    if masks is not None:
        count = len(images)
        pixels, classes = figure_inputs.under_masks(pixels, masks, count=count, colors=look.COLORS)
        caption = f"{caption}, masks of classes {classes}"
    columns = figure_inputs.columns(columns, len(pixels))
    names_of_images = []
    if labels is not None:
        names_of_images = figure_inputs.titles(labels, names, images=len(images))[: len(pixels)]
    rows = math.ceil(len(pixels) / columns)
    # The width of an image in inches: as large as the figure allows, but not enlarged too much.
    cell = min(_LARGEST_CELL, (look.WIDTH - look.MARGIN) / columns - look.MARGIN)
    height = cell * look.aspect(pixels)
    titles = [_wrap(words, cell) for words in names_of_images]
    # Per row, the height of the texts below its images, in inches.
    below = [look.text_height(titles[row * columns : (row + 1) * columns]) for row in range(rows)]

    with look.style():
        # The height of the figure: margin, rows of images with margins, texts, the caption.
        up = look.MARGIN + rows * (height + look.MARGIN) + sum(below) + look.text_height([caption])
        figure = look.new_figure(columns * (cell + look.MARGIN) + look.MARGIN, up)
        for index, image in enumerate(pixels):
            row, column = divmod(index, columns)
            left = look.MARGIN + column * (cell + look.MARGIN)
            bottom = up - (row + 1) * (height + look.MARGIN) - sum(below[:row])
            axes = look.image_at(figure, image, left=left, bottom=bottom, width=cell, height=height)
            if points is not None and not np.isnan(points[index]).any():
                _arrow(axes, *points[index])
            if titles:
                _write_below(axes, titles[index])
        look.note(figure, caption)
        look.describe(figure, _in_words(caption, names_of_images))
    return figure


def _in_words(caption: str, names_of_images: Sequence[Sequence[str]]) -> str:
    if not names_of_images:
        return f"{caption}. "
    parts = []
    for number, words in enumerate(names_of_images, start=1):
        parts.append(f"{number}: {', '.join(words) or _NO_LABEL}")
    return f"{caption}. Labels: {'; '.join(parts)}"


def _write_below(axes: Axes, title: str) -> None:
    color = look.MUTED if title == _NO_LABEL else look.INK
    place = {"loc": "left", "y": 0, "pad": -5, "va": "top"}
    axes.set_title(title, fontsize=look.SMALL, color=color, **place)


def _arrow(axes: Axes, x: float, y: float) -> None:
    """Draw an arrow to a point of an image, from the outer side and from above.

    On a CT the arrow is then on the dark lung, where it is easy to see.

    Args:
        axes: the axes with the image.
        x, y: the point as shares of the width and height, from the upper left corner.
    """
    # In points: 30 towards the nearer side of the image, and 20 up.
    away = (30 if x > 0.5 else -30, 20)
    pointer = {
        "arrowstyle": "-|>",
        "color": look.COLORS[1],
        "linewidth": 1.8,
        "shrinkA": 0,
        "shrinkB": 5,
    }
    axes.annotate(
        "",
        xy=(x, 1 - y),  # the axes count from below, images from above
        xytext=away,
        xycoords="axes fraction",
        textcoords="offset points",
        arrowprops=pointer,
        annotation_clip=False,
    )


def _wrap(words: list[str], inches: float) -> str:
    """Join names, and break the text into lines of this width.

    A name is broken only if it does not fit into a line.
    """
    if not words:
        return _NO_LABEL
    width = look.letters(inches)
    whole = []
    for word in words:
        fits = len(word) <= width
        whole.append(word.replace(" ", _NO_BREAK_SPACE) if fits else word)
    return textwrap.fill(f"{_NO_BREAK_SPACE}· ".join(whole), width, break_on_hyphens=False)
