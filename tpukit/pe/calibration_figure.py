"""A figure of whether probabilities mean what they say: the calibration curve of each exam label."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpukit.essentials.show import house_style as look
from tpukit.pe.calibration import Answers, answers
from tpukit.pe.challenge import log_loss
from tpukit.pe.labels import WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_IN_A_POINT, _MOST_POINTS = 10, 8  # exams behind a point of the curve, at least; points of a curve


def show_calibration(labels: Any, before: Any, after: Any = None) -> Figure:
    """Draw, for each of the nine answers about an exam, how often it was true where a probability was given.

    On the dotted line, of the exams that were given 0.3 three in ten have the label. Each point is ten exams or
    more, with the 95 % interval of so many (Wilson's); the small marks below and above are the exams.

    Args:
        labels, before, after: as for `calibration_table`, which says what is raised, too.
    """
    tables = [answers(labels, table)[1:] for table in (before, after) if table is not None]
    with look.style():
        figure = look.new_figure(9, 9.4, layout="constrained")
        grid = figure.subplots(3, 3, sharex=True, sharey=True)
        said = []
        for axes, *of_label in zip(grid.flat, *tables, strict=True):
            axes.plot([0, 1], [0, 1], color=look.MUTED, linewidth=1, linestyle=(0, (1, 2)))
            for one, color in zip(of_label, (look.COLORS[3], look.COLORS[1])[: len(of_label)], strict=True):
                _curve(axes, one, color)
            first = of_label[0]
            losses = " to ".join(f"{one.mean(log_loss(one.truth, one.chances)):.3f}" for one in of_label)
            axes.set_title(WORDS[first.label], loc="left", fontsize=look.SMALL + 1.5, fontweight="bold", pad=16)
            count = f"{first.truth.sum():.0f} of {len(first.truth)} exams, log loss {losses}"
            axes.text(0, 1.03, count, transform=axes.transAxes, fontsize=look.SMALL - 0.5, color=look.MUTED)
            if few := first.too_few():
                words = few.replace(", ", ",\n").replace(": ", ":\n")  # narrow: above the line, and not on it
                axes.text(0.02, 0.94, words, va="top", fontsize=look.SMALL, color=look.COLORS[1])
            axes.set(xlim=(-0.02, 1.02), ylim=(-0.06, 1.06), aspect="equal", xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
            axes.grid(axis="x")
            said.append(f"{WORDS[first.label]}: {count}{'; ' + few if few else ''}")
        figure.supylabel("share of these exams that have it", fontsize=look.SMALL + 1, color=look.INK)
        figure.supxlabel("probability that was given", fontsize=look.SMALL + 1, color=look.INK)
        about = "light blue: as the network gave it    " + "orange: calibrated    " * (after is not None)
        figure.suptitle(f"{about}dotted: as it should be", x=0.01, ha="left", fontsize=look.SMALL, color=look.MUTED)
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        look.describe(figure, f"Calibration curves of nine labels of exams. {'. '.join(said)}.")
    return figure


def _curve(axes: Axes, one: Answers, color: str) -> None:
    """Draw the curve of one label, and its exams as marks: those that have it above, the others below."""
    import numpy as np
    from scipy.stats import binomtest

    for truth, height in ((1, 1.03), (0, -0.03)):
        here = one.chances[one.truth == truth]
        axes.plot(here, np.full(len(here), height), "|", color=color, markersize=5, markeredgewidth=0.7, alpha=0.6)
    if one.too_few():
        return
    order = np.argsort(one.chances, kind="stable")
    bins = np.array_split(order, int(np.clip(len(order) // _IN_A_POINT, 1, _MOST_POINTS)))
    said = np.array([one.chances[part].mean() for part in bins])
    true = np.array([one.truth[part].mean() for part in bins])
    counts = [binomtest(int(one.truth[part].sum()), len(part)) for part in bins]
    low, high = np.transpose([count.proportion_ci(method="wilson") for count in counts])
    axes.plot(said, true, color=color, linewidth=1.2, alpha=0.7)
    bars = {"fmt": "o", "markersize": 4.5, "elinewidth": 1, "capsize": 0, "markeredgecolor": look.PAPER}
    axes.errorbar(said, true, [true - low, high - true], color=color, **bars)
