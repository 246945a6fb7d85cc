"""Draw challenge losses: your own, and those that others reported on patients.

Your losses have a column of their own, because phantoms are an easier task than patients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.display import figure_style as look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Reported losses on the challenge's test set. They are of its private part unless the name
# ends in "(public)". The first is computed. The sources of the others, in this order: Inoichan's
# slides of his solution; seculayer/AutoAPE-challenge4; Inoichan's slides; TheoViel/kaggle_rsna_pe;
# the repositories of KeremTurgutlu and of yuval6957 on GitHub. No loss of the first and second
# place was found.
RUNGS = {
    "0.5 for everything": math.log(2),
    "no image: how often at which slice": 0.33,
    "EfficientNet and GRU, 2023": 0.232,
    "a public notebook, B0 and GRU": 0.208,
    "18th: EfficientNet-B3 on these JPEGs (public)": 0.179,
    "13th: CNN and LSTM, 512 pixels": 0.165,
    "7th: features and a transformer": 0.157,
}
_MARKS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
_APART = 0.045  # the height of a line of text as a share of the axis
_LEFT = 0.02  # the left edge of the column of reported losses; the x axis is from 0 to 2
_RIGHT = 1.04  # the left edge of the column of your losses


def show_ladder(scores: Mapping[str, float], *, data: str = "phantoms") -> Figure:
    """Draw your challenge losses, and those that others reported for the challenge's test set.

    Lower is better. Your losses and the reported losses have separate columns. Phantoms are an
    easier task than patients. Losses on phantoms can show that one method is better than another on
    phantoms, but they cannot be compared with the reported losses.

    Args:
        scores: a dict from the name of each method to its `challenge_loss`.
        data: the data of these scores: "phantoms", or a text about patients, such as "a fifth of
            the training set".

    Returns:
        The figure.

    Raises:
        ValueError: `scores` is empty, or a score is not a finite number above 0.
    """
    wrong = {}
    for name, value in scores.items():
        if not math.isfinite(value) or value <= 0:
            wrong[name] = value
    if wrong or not scores:
        raise InvalidValueError(
            f"show_ladder needs challenge losses, as numbers above 0, got {wrong or 'none'}",
            fix='pe.show_ladder({"exam model": pe.challenge_loss(labels, predictions)})',
        )
    everything = [*scores.values(), *RUNGS.values()]
    # Space below the lowest mark and above the highest one, for their text.
    low = 0.85 * min(everything)
    high = 1.15 * max(everything)
    with look.style():
        figure = look.new_figure(9, 4.8, layout="constrained")
        axes = figure.subplots()
        axes.set(yscale="log", ylim=(low, high), xlim=(0, 2), xticks=[])
        axes.set_ylabel("challenge loss (log scale), lower is better")
        marks = [mark for mark in _MARKS if low <= mark <= high]
        axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
        axes.minorticks_off()
        axes.axvline(1, color=look.RULE, linewidth=1)
        _draw_column(axes, _LEFT, RUNGS, words=look.INK, line=look.MUTED)
        _draw_column(axes, _RIGHT, scores, words=look.COLORS[0], line=look.COLORS[0])
        own = f"this run, {data}"
        if data == "phantoms":
            own = "on phantoms: not on this ladder"
        reported = "reported: patients of the challenge's test set"
        place = {"transform": axes.get_xaxis_transform(), "fontsize": look.SMALL + 1}
        axes.text(_LEFT, 1.02, reported, color=look.MUTED, **place)
        axes.text(_RIGHT, 1.02, own, color=look.COLORS[0], **place)
        computed = f"Computed on {data}: {_in_words(scores)}"
        description = f"{computed}. Reported: {_in_words(RUNGS)}."
        look.describe(figure, f"Challenge losses, lower is better. {description}")
    return figure


def _in_words(scores: Mapping[str, float]) -> str:
    return "; ".join(f"{name} {value:.3f}" for name, value in scores.items())


def _draw_column(
    axes: Axes,
    left: float,
    scores: Mapping[str, float],
    *,
    words: str,
    line: str,
) -> None:
    """Draw a column of scores, each a line with its number and name.

    If the texts of two scores would overlap, they are moved apart, and the lines are bent.

    Args:
        axes: matplotlib's axes with a logarithmic y axis.
        left: the left edge of the column on the x axis.
        scores: the loss of each method, by its name.
        words, line: the colors of texts and lines.
    """
    low, high = map(math.log, axes.get_ylim())
    ordered = sorted(scores.items(), key=lambda item: item[1])
    places = _spread([(math.log(value) - low) / (high - low) for _, value in ordered])
    for (name, value), place in zip(ordered, places, strict=True):
        height = math.exp(low + place * (high - low))
        rung = [left, left + 0.12, left + 0.17]
        axes.plot(rung, [value, value, height], color=line, linewidth=1.4)
        style = {"va": "center", "fontsize": look.SMALL, "color": words}
        axes.text(left + 0.19, height, f"{value:.3f}", fontweight="bold", **style)
        axes.text(left + 0.29, height, name, **style)


def _spread(places: list[float]) -> list[float]:
    """Move ascending heights apart until they differ by a line of text, and return them.

    For example, 0.50, 0.51 and 0.60 become 0.4825, 0.5275 and 0.60.

    Args:
        places: heights as shares of the axis.
    """
    places = list(places)
    for _ in range(200):  # repeat, because a pair that moves apart may come too close to the next
        for index in range(len(places) - 1):
            lacking = _APART - (places[index + 1] - places[index])
            if lacking > 0:
                places[index] -= lacking / 2
                places[index + 1] += lacking / 2
    return places
