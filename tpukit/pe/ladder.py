"""The challenge's score beside those that others reported: a figure that keeps phantoms and patients apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tpukit.essentials.show import WrongValue
from tpukit.essentials.show import house_style as look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What was reported of the challenge's test set, private where not said otherwise. Sources, in this order: Inoichan's
# slides of his solution; seculayer/AutoAPE-challenge4; Inoichan's slides; TheoViel/kaggle_rsna_pe;
# KeremTurgutlu's and yuval6957's repositories on GitHub. Of the first and second place no figure was found.
RUNGS = {
    "0.5 for everything": math.log(2),
    "no image: how often at which slice": 0.33,
    "EfficientNet and GRU, 2023": 0.232,
    "a public notebook, B0 and GRU": 0.208,
    "18th: EfficientNet-B3 on these JPEGs (public)": 0.179,
    "13th: CNN and LSTM, 512 pixels": 0.165,
    "7th: features and a transformer": 0.157,
}
_APART = 0.045  # of the height of the axis: a line of text


def show_ladder(scores: Mapping[str, float], *, data: str = "phantoms") -> Figure:
    """Draw scores of your own beside those that were reported for the challenge's test set; lower is better.

    The two stand in columns of their own. Scores on phantoms are of another task, and an easier one: they say that one
    method beats another there, never where on the ladder it would stand.

    Args:
        scores: what was scored, in words, and its `challenge_loss`.
        data: what they were computed on: "phantoms", or in words which patients, as "a fifth of the training set".

    Raises:
        ValueError: there is none, or one is not a finite number above 0.
    """
    wrong = {name: value for name, value in scores.items() if not (math.isfinite(value) and value > 0)}
    if wrong or not scores:
        raise WrongValue(
            f"show_ladder draws challenge losses, numbers above 0, got {wrong or 'none'}",
            fix='{"exam model": pe.challenge_loss(predictions, labels)}',
        )
    low = 0.85 * min(*scores.values(), *RUNGS.values())
    high = 1.15 * max(*scores.values(), *RUNGS.values())
    with look.style():
        figure = look.new_figure(9, 4.8, layout="constrained")
        axes = figure.subplots()
        axes.set(yscale="log", ylim=(low, high), xlim=(0, 2), xticks=[])
        axes.set_ylabel("challenge loss (log scale), lower is better")
        marks = [mark for mark in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0) if low <= mark <= high]
        axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
        axes.minorticks_off()
        axes.axvline(1, color=look.RULE, linewidth=1)
        _column(axes, 0.02, RUNGS, look.INK, look.MUTED)
        _column(axes, 1.04, scores, look.COLORS[0], look.COLORS[0])
        where = "on phantoms: not on this ladder" if data == "phantoms" else f"this run, {data}"
        reported = "reported: patients of the challenge's test set"
        for left, words, color in ((0.02, reported, look.MUTED), (1.04, where, look.COLORS[0])):
            axes.text(left, 1.02, words, transform=axes.get_xaxis_transform(), fontsize=look.SMALL + 1, color=color)
        listed = "; ".join(f"{name} {value:.3f}" for name, value in scores.items())
        rungs = "; ".join(f"{name} {value:.3f}" for name, value in RUNGS.items())
        look.describe(figure, f"Challenge losses, lower is better. Computed on {data}: {listed}. Reported: {rungs}.")
    return figure


def _column(axes: Axes, left: float, scores: Mapping[str, float], words: str, line: str) -> None:
    """Draw scores as rungs from `left` on, each with its words at its height, or as near as other words leave room."""
    low, high = map(math.log, axes.get_ylim())
    ordered = sorted(scores.items(), key=lambda one: one[1])
    places = [(math.log(value) - low) / (high - low) for _, value in ordered]
    for _ in range(200):  # neighbours that are too close push each other apart
        for index in range(len(places) - 1):
            lacking = _APART - (places[index + 1] - places[index])
            if lacking > 0:
                places[index] -= lacking / 2
                places[index + 1] += lacking / 2
    for (name, value), place in zip(ordered, places, strict=True):
        height = math.exp(low + place * (high - low))
        axes.plot([left, left + 0.12, left + 0.17], [value, value, height], color=line, linewidth=1.4)
        axes.text(left + 0.19, height, f"{value:.3f}", va="center", fontsize=look.SMALL, color=words, fontweight="bold")
        axes.text(left + 0.29, height, name, va="center", fontsize=look.SMALL, color=words)
