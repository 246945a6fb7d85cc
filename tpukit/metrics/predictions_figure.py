"""Draw images with their predicted probabilities as bars, filled if the label is true.

+-------+   embolus on this image ●  ████████████········  0.61
| image |   chronic ○                ██··················  0.10
+-------+   left-sided ○             □□□□□□··············  0.32
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display import InvalidValueError, figure_inputs
from tpukit.essentials.display import figure_style as look
from tpukit.metrics.samples import check_probabilities, check_threshold

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lengths in inches.
_IMAGE_WIDTH = 1.8
_BLOCK_WIDTH = (look.WIDTH - look.MARGIN) / 2 - look.MARGIN  # an image, the names and their bars
_FEWEST_BARS_WIDTH = 0.75
_NUMBER_WIDTH = 0.3
_MARK_WIDTH = 0.35
_BETWEEN_ROWS = 1.6 * look.MARGIN
_LETTER_WIDTH = look.SMALL * 0.59 / 72  # on average; 72 points are an inch


def show_predictions(
    images: Any,
    labels: Any,
    probabilities: Any,
    *,
    names: Sequence[str] | Mapping | None = None,
    limit: int = 8,
    top: int = 10,
    threshold: float = 0.5,
    channel: int | None = None,
) -> Figure:
    """Draw images, each with its predicted probabilities as bars, filled if the label is true.

    Args:
        images, names, channel: as for `show_batch`.
        labels: (N, L) zeros and ones; or, for two or more classes, (N,) class numbers.
        probabilities: (N, L) in [0, 1], not logits.
        limit: the largest number of images to draw; the first ones are drawn.
        top: the largest number of labels per image. The true labels of the image are chosen first,
            then the most probable ones.
        threshold: in [0, 1], drawn as a dotted line; a label with this probability or more is
            predicted positive.

    Returns:
        a figure of matplotlib.

    Raises:
        TypeError: `images` is not an array, or has a dtype that cannot be drawn.
        ValueError: the shapes do not match, a probability or the threshold is outside [0, 1], or
            another number is out of range.
    """
    figure_inputs.at_least_one(limit=limit, top=top)
    pixels, caption = figure_inputs.pixels(images, limit, "show_predictions", channel)
    chances = _chances(probabilities, len(images))
    truth = _truth(labels, chances)
    check_threshold(threshold)
    words = figure_inputs.label_names(names, chances.shape[1])
    # Shorten long names, so that the bars keep at least `_FEWEST_BARS_WIDTH`.
    beside_names = _IMAGE_WIDTH + _MARK_WIDTH + _FEWEST_BARS_WIDTH + _NUMBER_WIDTH
    longest = min(max(map(len, words)), look.letters(_BLOCK_WIDTH - beside_names))
    shown = [_shortened(word, longest) for word in words]
    layout = _Layout(
        images=len(pixels),
        bars=min(top, len(words)),
        image_height=_IMAGE_WIDTH * look.aspect(pixels),
        caption_height=look.text_height([caption]),
        names_width=longest * _LETTER_WIDTH + _MARK_WIDTH,
    )
    with look.style():
        figure = look.new_figure(layout.width, layout.height)
        for index, image in enumerate(pixels):
            layout.draw_image(figure, index, image)
            chosen = _chosen(chances[index], truth[index], layout.bars)
            axes = layout.bars_axes(figure, index)
            _bars(
                axes,
                [shown[label] for label in chosen],
                chances[index, chosen],
                truth[index, chosen],
                threshold=threshold,
            )
        legend = "● filled: the label is true    ○ hollow: it is not"
        legend += f"    dotted: {threshold:g}"
        look.note(figure, f"{legend}    {caption}")
        in_words = _in_words(words, truth, chances[: len(pixels)], threshold=threshold)
        look.describe(figure, f"{caption}, with their predicted probabilities. {in_words}")
    return figure


@dataclass(frozen=True)
class _Layout:
    """The sizes of the figure, in inches. A row has up to two blocks: an image with its bars."""

    images: int
    bars: int
    image_height: float
    caption_height: float
    names_width: float

    @property
    def columns(self) -> int:
        return min(2, self.images)

    @property
    def block_height(self) -> float:
        # 0.19 inches per bar: room for a line of text.
        return max(self.image_height, 0.19 * self.bars)

    @property
    def width(self) -> float:
        return self.columns * (_BLOCK_WIDTH + look.MARGIN) + look.MARGIN

    @property
    def height(self) -> float:
        rows = math.ceil(self.images / self.columns)
        return 2 * look.MARGIN + rows * (self.block_height + _BETWEEN_ROWS) + self.caption_height

    def _corner(self, index: int) -> tuple[float, float]:
        """Return the left and the bottom edge of a block."""
        row, column = divmod(index, self.columns)
        left = look.MARGIN + column * (_BLOCK_WIDTH + look.MARGIN)
        top = self.height - look.MARGIN - row * (self.block_height + _BETWEEN_ROWS)
        return left, top - self.block_height

    def draw_image(self, figure: Figure, index: int, image: np.ndarray) -> None:
        """Draw an image at the left of its block."""
        left, bottom = self._corner(index)
        size = {"width": _IMAGE_WIDTH, "height": self.block_height}
        look.image_at(figure, image, left=left, bottom=bottom, **size)

    def bars_axes(self, figure: Figure, index: int) -> Axes:
        """Return axes for the bars, at the top right of a block."""
        left, bottom = self._corner(index)
        indent = _IMAGE_WIDTH + self.names_width
        height = min(self.block_height, 0.21 * self.bars)
        return look.axes_at(
            figure,
            left=left + indent,
            bottom=bottom + self.block_height - height,
            width=_BLOCK_WIDTH - indent - _NUMBER_WIDTH,
            height=height,
        )


def _chances(probabilities: Any, images: int) -> np.ndarray:
    """Return the probabilities as an array (N, L); raise if they are not in [0, 1]."""
    chances = figure_inputs.as_array(probabilities)
    if chances.ndim != 2 or len(chances) != images or not chances.shape[1]:
        raise InvalidValueError(
            f"probabilities must be (N, L), a row for each of {images} images, got {chances.shape}",
            fix="pass the probabilities of these images; for one label: probabilities[:, None]",
        )
    check_probabilities(chances)
    return chances


def _truth(labels: Any, chances: np.ndarray) -> np.ndarray:
    """Return whether each label is true, (N, L) bool."""
    import numpy as np

    count = chances.shape[1]
    # (N,) class numbers become one-hot rows, if all of them are below the number of columns.
    truth = figure_inputs.label_array(labels, len(chances))
    if truth.ndim == 1 and count == 1:
        raise InvalidValueError(
            "(N,) labels are class numbers, but (N, 1) probabilities belong to a yes-or-no label",
            fix="pass labels[:, None]",
        )
    if truth.ndim == 1 and truth.max() < count:
        truth = np.eye(count)[truth]  # class 2 of the classes 0, 1, 2 becomes (0, 0, 1)
    if truth.shape != chances.shape:
        found = f"{truth.shape[1]} columns" if truth.ndim == 2 else f"class {truth.max()}"
        fact = f"probabilities are of {count} labels, labels have {found}"
        raise InvalidValueError(fact, fix="pass the same labels to both, in the same order")
    return truth.astype(bool)


def _chosen(chances: np.ndarray, truth: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of an image's labels to draw: the true ones, then the most probable.

    The indices are in ascending order, so that the bars of different images can be compared.
    """
    import numpy as np

    # `lexsort` sorts by its last key first: true labels, then by descending probability.
    by_importance = np.lexsort((-chances, ~truth))
    return np.sort(by_importance[:count])


def _shortened(name: str, letters: int) -> str:
    """Return a name with at most so many letters; a longer one ends with "…", after a whole word.

    If the first word is too long itself, the cut is within this word.
    """
    short = textwrap.shorten(name, letters, placeholder="…")
    if short == "…":
        return name[: letters - 1] + "…"
    return short


def _in_words(words: list[str], truth: np.ndarray, chances: np.ndarray, *, threshold: float) -> str:
    """Return a text with the true labels and the false positive labels of each image."""
    parts = []
    for index, row in enumerate(chances):
        part = f"{index + 1}: true are {_listed(words, row, truth[index].nonzero()[0])}"
        false_positives = ((row >= threshold) & ~truth[index]).nonzero()[0]
        if len(false_positives):
            listed = _listed(words, row, false_positives)
            part += f"; at least {threshold:g} and not true: {listed}"
        parts.append(part)
    return ". ".join(parts)


def _listed(words: list[str], chances: np.ndarray, labels: Iterable[int]) -> str:
    return ", ".join(f"{words[label]} {chances[label]:.2f}" for label in labels) or "none"


def _bars(
    axes: Axes, names: list[str], chances: np.ndarray, truth: np.ndarray, *, threshold: float
) -> None:
    """Draw a bar per label: its range in grey, its probability in blue if true, else hollow."""
    places = range(len(names))
    fills = [look.COLORS[0] if is_true else look.PAPER for is_true in truth]
    marks = ["●" if is_true else "○" for is_true in truth]
    ticks = [f"{name} {mark}" for name, mark in zip(names, marks, strict=True)]
    # A grey bar from 0 to 1 behind each probability shows the range.
    axes.barh(places, 1, height=0.62, color=look.GRID, linewidth=0)
    axes.barh(places, chances, height=0.62, color=fills, edgecolor=look.COLORS[0], linewidth=1)
    axes.axvline(threshold, color=look.MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
    axes.set(xlim=(0, 1), ylim=(len(names) - 0.5, -0.5), xticks=[])  # the first label at the top
    axes.set_yticks(places, ticks)
    axes.tick_params(length=0, pad=3)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    # Names and numbers of true labels are dark, the others are pale.
    labels = axes.get_yticklabels()
    for place, (label, chance, is_true) in enumerate(zip(labels, chances, truth, strict=True)):
        color = look.INK if is_true else look.MUTED
        label.set_color(color)
        font = {"fontsize": look.SMALL - 0.5, "color": color}
        axes.text(1.03, place, f"{chance:.2f}", va="center", **font)
