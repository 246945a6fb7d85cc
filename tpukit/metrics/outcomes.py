"""Classify predictions by their outcome, choose examples of each, and draw them.

label  probability  outcome at 0.5
1      0.9          hit
1      0.2          miss
0      0.7          false alarm
0      0.1          true negative
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display import InvalidValueError, figure_inputs
from tpukit.essentials.display import figure_style as look
from tpukit.metrics.samples import as_array, group_numbers, one_label_with_threshold

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

OUTCOMES = ("hit", "miss", "false alarm", "true negative")
# A miss and a false alarm are both mistakes, so they share a colour.
_COLORS = {
    "hit": look.COLORS[2],
    "miss": look.COLORS[1],
    "false alarm": look.COLORS[1],
    "true negative": look.COLORS[0],
}

# Lengths in inches.
_IMAGES_WIDTH = 9.6  # all images of a row
_TITLE = 0.24  # above an image
_NOTE = 0.2  # below an image
_CAPTION = 0.24  # the last line of the figure


def outcomes(labels: Any, probabilities: Any, *, threshold: float = 0.5) -> np.ndarray:
    """Return the outcome of each prediction: "hit", "miss", "false alarm" or "true negative".

    Args:
        labels: (N,) zeros and ones, of one label.
        probabilities: (N,) the probabilities of this label, in [0, 1], not logits.
        threshold: in [0, 1]; a sample with this probability or more is predicted positive.

    Returns:
        (N,) texts.

    Raises:
        ValueError: the shapes are not (N,) or (N, 1); the lengths differ; a label is neither 0 nor
            1; or a probability or the threshold is outside [0, 1].
    """
    import numpy as np

    truth, chances, _ = one_label_with_threshold(labels, probabilities, threshold)
    is_true = truth > 0.5  # the labels are 0.0 or 1.0
    is_yes = chances >= threshold
    return np.select([is_true & is_yes, is_true, is_yes], OUTCOMES[:3], default=OUTCOMES[3])


def choose_predictions(
    labels: Any,
    probabilities: Any,
    *,
    hits: int = 2,
    misses: int = 1,
    false_alarms: int = 1,
    true_negatives: int = 2,
    threshold: float = 0.5,
) -> np.ndarray:
    """Return the indices of typical predictions of each outcome.

    The predictions of an outcome are sorted by probability and divided into equal parts. The middle
    prediction of each part is chosen. Hits come first, then misses, false alarms and true
    negatives.

    Args:
        labels: (N,) zeros and ones, of one label.
        probabilities: (N,) the probabilities of this label, in [0, 1], not logits.
        hits, misses, false_alarms, true_negatives: the number of predictions to choose of each
            outcome. If there are fewer, all are chosen.
        threshold: in [0, 1]; a sample with this probability or more is predicted positive.

    Returns:
        (K,) int64, to index images, labels and probabilities.

    Raises:
        ValueError: the shapes are not (N,) or (N, 1); the lengths differ; a label is neither 0 nor
            1; or a probability or the threshold is outside [0, 1].
    """
    import numpy as np

    words = outcomes(labels, probabilities, threshold=threshold)
    chances = as_array(probabilities).ravel()
    wanted = (hits, misses, false_alarms, true_negatives)
    chosen = []
    for word, most in zip(OUTCOMES, wanted, strict=True):
        indices = np.flatnonzero(words == word)
        indices = indices[np.argsort(chances[indices], kind="stable")]
        count = min(most, len(indices))
        for part in range(count):
            middle = (part + 0.5) / count  # of each of `count` equal parts
            chosen.append(indices[int(middle * len(indices))])
    return np.array(chosen, dtype=np.int64)


def hardest_mistakes(
    labels: Any,
    probabilities: Any,
    *,
    threshold: float = 0.5,
    limit: int = 6,
    groups: Any = None,
) -> np.ndarray:
    """Return the indices of the most confident wrong predictions, the worst first.

    The worst mistakes often are labelling errors, broken images, or cases that the model has not
    learned.

    Args:
        labels, probabilities, threshold: as for `choose_predictions`.
        limit: the largest number of indices to return.
        groups: (N,) the study or patient of each sample: at most one mistake per group is returned.
            None: mistakes of the same group may be returned.

    Returns:
        (K,) int64, to index images, labels and probabilities.

    Raises:
        ValueError: as `choose_predictions`, or a sample has no group.
    """
    import numpy as np

    words = outcomes(labels, probabilities, threshold=threshold)
    # A miss with probability 0.1 has the error 0.9, and so has a false alarm with 0.9.
    errors = np.abs(as_array(labels).ravel() - as_array(probabilities).ravel())
    wrong = np.flatnonzero((words == "miss") | (words == "false alarm"))
    wrong = wrong[np.argsort(-errors[wrong], kind="stable")]
    if groups is not None:
        numbers = group_numbers(groups, len(words))
        # `wrong` is sorted, so the first mistake of a group is its worst.
        _, first_of_group = np.unique(numbers[wrong], return_index=True)
        wrong = wrong[np.sort(first_of_group)]
    return wrong[:limit]


def show_outcomes(
    images: Any,
    labels: Any,
    probabilities: Any,
    *,
    threshold: float = 0.5,
    notes: Any = None,
    limit: int = 12,
) -> Figure:
    """Draw images, each with its outcome (such as "miss") and its probability above it.

    Args:
        images: as for `show_batch`; pass `images[:, 1:2]` to draw the second channel in grey.
        labels: (N,) zeros and ones, of one label.
        probabilities: (N,) the probabilities of this label, in [0, 1], not logits.
        threshold: in [0, 1]; a sample with this probability or more is predicted positive.
        notes: N short texts, one to write under each image; None for no texts.
        limit: the largest number of images to draw; the first ones are drawn.

    Returns:
        a figure of matplotlib.

    Raises:
        TypeError: `images` is not an array, or has a dtype that cannot be drawn.
        ValueError: the shapes do not match; a label is neither 0 nor 1; or a probability or the
            threshold is outside [0, 1].
    """
    figure_inputs.at_least_one(limit=limit)
    pixels, caption = figure_inputs.pixels(images, limit, "show_outcomes")
    words = outcomes(labels, probabilities, threshold=threshold)
    if notes is not None:
        notes = list(notes)  # a Series of pandas would be indexed by its own index
    if len(words) != len(images) or (notes is not None and len(notes) != len(images)):
        counts = f"{len(images)} images and {len(words)} labels"
        if notes is not None:
            counts += f", with {len(notes)} notes"
        indexed = "images[chosen], labels[chosen], probabilities[chosen]"
        raise InvalidValueError(
            f"each image has one label and one probability, got {counts}",
            fix=f"select the same images from each, by their indices: {indexed}",
        )
    chances = as_array(probabilities).ravel()
    layout = _layout(pixels, has_notes=notes is not None)
    with look.style():
        figure = look.new_figure(layout.width, layout.height)
        for index, image in enumerate(pixels):
            axes = _draw_image(figure, layout, index, image)
            _write_title(axes, str(words[index]), chances[index])
            if notes is not None:
                _write_note(axes, notes[index])
        meaning = f"number: the probability, and from {threshold:g} on it counts as a yes"
        look.note(figure, f"{meaning}    {caption}")
        drawn = zip(words[:limit], chances, strict=False)
        listed = ", ".join(f"{word} {chance:.2f}" for word, chance in drawn)
        images_drawn = f"{len(pixels)} images by the outcome of their prediction"
        look.describe(figure, f"{images_drawn}, with its probability: {listed}.")
    return figure


@dataclass(frozen=True)
class _Layout:
    """A grid of cells with a title, an image and perhaps a note; lengths are inches."""

    columns: int
    image_width: float
    image_height: float
    cell_height: float
    width: float  # of the figure
    height: float


def _layout(pixels: np.ndarray, *, has_notes: bool) -> _Layout:
    count = len(pixels)
    # Up to four images share a row at full size; more images are smaller, up to six in a row.
    columns = count if count <= 4 else min(count, 6)
    # With fewer than four images, each has the size that it would have with four.
    image_width = _IMAGES_WIDTH / max(columns, 4) - look.MARGIN
    # Height by width. Very long images are drawn in a cell of limited height.
    aspect = pixels.shape[1] / pixels.shape[2]
    image_height = image_width * min(max(aspect, 0.4), 2.0)
    cell_height = _TITLE + image_height + look.MARGIN
    if has_notes:
        cell_height += _NOTE
    return _Layout(
        columns,
        image_width,
        image_height=image_height,
        cell_height=cell_height,
        width=columns * (image_width + look.MARGIN) + look.MARGIN,
        height=math.ceil(count / columns) * cell_height + _CAPTION,
    )


def _draw_image(figure: Figure, layout: _Layout, index: int, image: np.ndarray):
    """Draw an image in its cell, and return its axes."""
    row, column = divmod(index, layout.columns)
    top = layout.height - look.MARGIN / 2 - row * layout.cell_height
    return look.image_at(
        figure,
        image,
        left=look.MARGIN + column * (layout.image_width + look.MARGIN),
        bottom=top - _TITLE - layout.image_height,
        width=layout.image_width,
        height=layout.image_height,
    )


def _write_title(axes, word: str, chance: float) -> None:
    font = {"fontsize": look.SMALL + 1, "pad": 4}
    axes.set_title(word, loc="left", fontweight="bold", color=_COLORS[word], **font)
    axes.set_title(f"{chance:.2f}", loc="right", color=look.INK, **font)


def _write_note(axes, text: str) -> None:
    font = {"fontsize": look.SMALL - 1, "color": look.MUTED}
    axes.text(0, -0.03, text, va="top", transform=axes.transAxes, **font)
