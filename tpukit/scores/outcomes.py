"""Predictions by their outcome: hits, misses, false alarms and true negatives, chosen, named and drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpukit.essentials.show import WrongValue, figure_inputs
from tpukit.essentials.show import house_style as look
from tpukit.scores.areas import as_array, check_yes_or_no

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

OUTCOMES = ("hit", "miss", "false alarm", "true negative")
_COLOR = {"hit": 2, "miss": 1, "false alarm": 1, "true negative": 0}  # of the house style's


def outcomes(labels: Any, probabilities: Any, *, threshold: float = 0.5) -> np.ndarray:
    """Return (N,) the words "hit", "miss", "false alarm" or "true negative" of (N,) labels and probabilities.

    Raises:
        ValueError: the shapes are not (N,), or differ; or a label is neither 0 nor 1.
    """
    import numpy as np

    truth, chances = as_array(labels), as_array(probabilities)
    if truth.ndim != 1 or truth.shape != chances.shape:
        raise WrongValue(
            f"an outcome is of one label, (N,), and its probability, got {truth.shape} and {chances.shape}",
            fix="labels[:, 0] and probabilities[:, 0] for the first label",
        )
    check_yes_or_no(truth)
    said, true = chances >= threshold, truth > 0.5
    return np.select([true & said, true, said], OUTCOMES[:3], OUTCOMES[3])


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
    """Return the numbers of some predictions of each outcome: typical ones, neither the best nor the worst.

    Of each kind those are taken whose probabilities lie evenly between its lowest and its highest; where there are
    fewer than asked for, all. Hits come first, then misses, false alarms and true negatives. Raises as `outcomes`.
    """
    import numpy as np

    words = outcomes(labels, probabilities, threshold=threshold)
    chances = as_array(probabilities)
    chosen = []
    for word, count in zip(OUTCOMES, (hits, misses, false_alarms, true_negatives), strict=True):
        there = np.flatnonzero(words == word)
        there = there[np.argsort(chances[there], kind="stable")]
        count = min(count, len(there))
        chosen += [there[int((place + 0.5) / count * len(there))] for place in range(count)]
    return np.array(chosen, dtype=np.int64)


def hardest_mistakes(labels: Any, probabilities: Any, *, limit: int = 6, groups: Any = None) -> np.ndarray:
    """Return the numbers of the most confident wrong predictions, the worst first; at most one of each group.

    The worst of a set are where a labelling error, a broken image, or what the model has not understood is found.
    Raises as `outcomes`.
    """
    import numpy as np

    words = outcomes(labels, probabilities)
    truth, chances = as_array(labels), as_array(probabilities)
    wrong = np.flatnonzero((words == "miss") | (words == "false alarm"))
    wrong = wrong[np.argsort(-np.abs(truth - chances)[wrong], kind="stable")]
    if groups is not None:
        wrong = wrong[np.sort(np.unique(np.asarray(groups)[wrong], return_index=True)[1])]
    return wrong[:limit]


def show_outcomes(
    images: Any, labels: Any, probabilities: Any, *, threshold: float = 0.5, notes: Any = None, limit: int = 12
) -> Figure:
    """Draw images, each under the name of its outcome: hit, miss, false alarm or true negative.

    Args:
        images: as for `show_batch`; `images[:, 1:2]` is the second channel in grey.
        labels: (N,) zeros and ones, of one label.
        probabilities: (N,) of that label, in [0, 1].
        threshold: probabilities from here on are a yes.
        notes: N short texts, one under each image; None for none.
        limit: the most images to draw.

    Raises:
        TypeError: `images` is not an array, or has a dtype that cannot be drawn.
        ValueError: the shapes do not match one another.
    """
    figure_inputs.at_least_one(limit=limit)
    pixels, caption = figure_inputs.pixels(images, limit, "show_outcomes")
    words = outcomes(labels, probabilities, threshold=threshold)
    if len(words) != len(images) or (notes is not None and len(notes) != len(images)):
        raise WrongValue(
            f"each image has one label and one probability, got {len(images)} images and {len(words)} labels",
            fix="index all of them with the same numbers: images[chosen], labels[chosen], probabilities[chosen]",
        )
    chances = as_array(probabilities)
    columns = min(len(pixels), 6 if len(pixels) > 4 else 4)
    rows, side = -(-len(pixels) // columns), 9.6 / max(columns, 4) - look.MARGIN
    above, below = 0.24, 0.2 if notes is not None else 0.0
    height = side * min(max(pixels.shape[1] / pixels.shape[2], 0.4), 2.0)

    with look.style():
        cell = above + height + below + look.MARGIN
        up = rows * cell + 0.24
        figure = look.new_figure(columns * (side + look.MARGIN) + look.MARGIN, up)
        for index, image in enumerate(pixels):
            row, column = divmod(index, columns)
            bottom = up - look.MARGIN / 2 - row * cell - above - height
            axes = look.image_at(figure, image, look.MARGIN + column * (side + look.MARGIN), bottom, side, height)
            word = str(words[index])
            above_it = {"fontsize": look.SMALL + 1, "pad": 4}
            axes.set_title(word, loc="left", fontweight="bold", color=look.COLORS[_COLOR[word]], **above_it)
            axes.set_title(f"{chances[index]:.2f}", loc="right", color=look.INK, **above_it)
            if notes is not None:
                below_it = {"fontsize": look.SMALL - 1, "color": look.MUTED, "transform": axes.transAxes}
                axes.text(0, -0.03, notes[index], va="top", **below_it)
        look.note(figure, f"number: the probability, and from {threshold:g} on it counts as a yes    {caption}")
        listed = ", ".join(f"{word} {chance:.2f}" for word, chance in zip(words[:limit], chances, strict=False))
        look.describe(
            figure, f"{len(pixels)} images by the outcome of their prediction, with its probability: {listed}."
        )
    return figure
