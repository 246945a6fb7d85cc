"""Draw the calibration curve of each exam label: frequency against predicted probability."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpukit.essentials.display import figure_style as look
from tpukit.pe.calibration import Answers, answers
from tpukit.pe.labels import WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_IN_A_POINT = 10  # a point of a curve has at least this many exams
_MOST_POINTS = 8  # a curve has at most this many points
_DOTTED = (0, (1, 2))
_TICKS = [0, 0.5, 1]


def show_calibration(labels: Any, before: Any, after: Any = None) -> Figure:
    """Draw the frequency of each of the nine exam labels against its predicted probability.

    On the dotted line, probabilities are right: of the exams with the probability 0.3, three in ten
    have the label. Each point stands for ten exams or more, with Wilson's 95 % interval. There is
    no curve if fewer than 5 exams have the label, or fewer than 5 do not. The small marks are the
    exams, at the top if they have the label, else at the bottom.

    Args:
        labels, before, after: as for `calibration_table`.

    Returns:
        The figure.

    Raises:
        ValueError: as for `challenge_loss`.
    """
    tables = [answers(labels, before)[1:]]  # without the first label, which is of images
    if after is not None:
        tables.append(answers(labels, after)[1:])
    with look.style():
        figure = look.new_figure(9, 9.4, layout="constrained")
        grid = figure.subplots(3, 3, sharex=True, sharey=True)
        panels = zip(grid.flat, *tables, strict=True)
        descriptions = [_draw_panel(axes, of_label) for axes, *of_label in panels]
        style = {"fontsize": look.SMALL + 1, "color": look.INK}
        figure.supylabel("share of exams that have the label", **style)
        figure.supxlabel("predicted probability", **style)
        if after is None:
            legend = ["light blue: predictions"]
        else:
            legend = ["light blue: uncalibrated", "orange: calibrated"]
        legend.append("dotted: perfect calibration")
        small = {"fontsize": look.SMALL, "color": look.MUTED}
        figure.suptitle("    ".join(legend), x=0.01, ha="left", **small)
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        text = ". ".join(descriptions)
        look.describe(figure, f"Calibration curves of nine labels of exams. {text}.")
    return figure


def _draw_panel(axes: Axes, of_label: list[Answers]) -> str:
    """Draw the curves of one label, before and after calibration; return a description."""
    axes.plot([0, 1], [0, 1], color=look.MUTED, linewidth=1, linestyle=_DOTTED)
    for one, color in zip(of_label, (look.COLORS[3], look.COLORS[1]), strict=False):
        _draw_curve(axes, one, color)
    first = of_label[0]
    name = WORDS[first.label]
    losses = " to ".join(f"{one.mean_loss():.3f}" for one in of_label)
    count = f"{first.truth.sum():.0f} of {len(first.truth)} exams, log loss {losses}"
    axes.set_title(name, loc="left", fontsize=look.SMALL + 1.5, fontweight="bold", pad=16)
    small = {"fontsize": look.SMALL - 0.5, "color": look.MUTED}
    axes.text(0, 1.03, count, transform=axes.transAxes, **small)
    description = f"{name}: {count}"
    few = first.too_few()
    if few:
        description += f"; {few}"
        narrow = few.replace(", ", ",\n").replace(": ", ":\n")  # fits above the dotted line
        axes.text(0.02, 0.94, narrow, va="top", fontsize=look.SMALL, color=look.COLORS[1])
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.06, 1.06), xticks=_TICKS, yticks=_TICKS)
    axes.set_aspect("equal")
    axes.grid(axis="x")
    return description


def _draw_curve(axes: Axes, one: Answers, color: str) -> None:
    """Draw the curve of a label, and a mark per exam: on top if it has the label, else below."""
    import numpy as np
    from scipy.stats import binomtest

    marks = {"markersize": 5, "markeredgewidth": 0.7, "alpha": 0.6}
    for truth, height in ((1, 1.03), (0, -0.03)):
        places = one.probabilities[one.truth == truth]
        axes.plot(places, np.full(len(places), height), "|", color=color, **marks)
    if one.too_few():
        return
    # Bins of equally many exams, by probability.
    order = np.argsort(one.probabilities, kind="stable")
    points = int(np.clip(len(order) // _IN_A_POINT, 1, _MOST_POINTS))
    bins = np.array_split(order, points)
    given = np.array([one.probabilities[part].mean() for part in bins])
    true = np.array([one.truth[part].mean() for part in bins])
    intervals = []
    for part in bins:
        test = binomtest(int(one.truth[part].sum()), len(part))
        intervals.append(test.proportion_ci(method="wilson"))
    low, high = np.transpose(intervals)
    axes.plot(given, true, color=color, linewidth=1.2, alpha=0.7)
    style = {"fmt": "o", "markersize": 4.5, "elinewidth": 1, "capsize": 0}
    errors = [true - low, high - true]
    axes.errorbar(given, true, errors, color=color, markeredgecolor=look.PAPER, **style)
