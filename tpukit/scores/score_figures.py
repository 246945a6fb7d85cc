"""A figure of how well one label is told apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpukit.essentials.show import counted, plural
from tpukit.essentials.show import house_style as look
from tpukit.scores.areas import as_array, score
from tpukit.scores.operating_point import sensitivity_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_roc(
    labels: Any,
    probabilities: Any,
    *,
    name: str = "",
    groups: Any = None,
    group: str = "group",
    sample: str = "image",
    specificity: float | None = None,
    resamples: int = 500,
    seed: int = 0,
) -> Figure:
    """Draw the ROC curve of one label and its precision against recall, with the middle 95 % of a bootstrap.

    Above the curves stands how many samples, and how many groups, have the label; where fewer than 5 groups have it, or
    lack it, that is said there in place of the intervals. Samples of one study or patient are nearly one observation:
    pass these as `groups`, and the bootstrap draws whole groups, which makes the band as wide as it is.

    Args:
        labels, probabilities, groups, group, resamples, seed: as for `auroc_table`, of one label.
        name: of the label, for the title.
        sample: what a sample is called: "exam".
        specificity: a ring marks the highest sensitivity at this specificity or above, see `sensitivity_at`; None for
            none.

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, or only one of the two occurs.
    """
    import numpy as np
    from sklearn.metrics import precision_recall_curve, roc_curve

    found = score(labels, probabilities, groups, resamples=resamples, seed=seed)
    truth, chances = as_array(labels), as_array(probabilities)
    share, at = found.positives / found.samples, np.linspace(0, 1, found.recall_band.shape[1])
    counts = f"{found.positives:,} of {found.samples:,} {plural(sample)} positive"
    if groups is not None:
        in_all = counted(found.positive_groups + found.negative_groups, group)
        counts += f", in {found.positive_groups:,} of {in_all}"
    few = found.too_few(sample if groups is None else group)
    few = few and f"{few}: too few to tell, and to draw an interval"
    by = f"band: middle 95 % of {resamples} draws" + (f" of whole {plural(group)}" if groups is not None else "")
    by = "" if few else by

    with look.style():
        figure = look.new_figure(8.6, 4.5, layout="constrained")
        left, right = figure.subplots(1, 2)
        false, hit, _ = roc_curve(truth, chances)
        precision, recall, _ = precision_recall_curve(truth, chances)
        blue, orange, green = look.COLORS[:3]
        for axes, band, color in ((left, found.recall_band, blue), (right, found.precision_band, green)):
            axes.fill_between(at, *band, color=color, alpha=0.2, linewidth=0)
            axes.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
            axes.grid(axis="x")
        left.plot(false, hit, color=blue, linewidth=1.8)
        left.plot([0, 1], [0, 1], color=look.MUTED, linewidth=1, linestyle=(0, (1, 2)))
        left.set(xlabel="false positive rate (1 - specificity)", ylabel="true positive rate (sensitivity)")
        # The last point of scikit-learn's curve, precision 1 at recall 0, is no threshold: it is left out.
        right.plot(recall[:-1], precision[:-1], color=green, linewidth=1.8, drawstyle="steps-post")
        right.axhline(share, color=look.MUTED, linewidth=1, linestyle=(0, (1, 2)))
        right.set(xlabel="recall (sensitivity)", ylabel="precision")
        point = None
        if specificity is not None:
            point = sensitivity_at(specificity, truth, chances, groups=groups, resamples=resamples, seed=seed)
            place = 1 - point.specificity, point.sensitivity
            if point.interval:
                left.plot([place[0]] * 2, point.interval, color=orange, linewidth=1.6)
            ring = {"markersize": 8, "markerfacecolor": look.PAPER, "markeredgecolor": orange, "markeredgewidth": 1.8}
            left.plot(*place, "o", **ring)
            words = str(point).replace(" at ", "\nat ")
            left.text(0.98, 0.13, words, ha="right", color=orange, transform=left.transAxes, fontsize=look.SMALL)
        for axes, what, value, (low, high), guess in (
            (left, "AUROC", found.auroc, found.auroc_interval, "guessing: 0.5"),
            (right, "average precision", found.average_precision, found.average_precision_interval,
             f"guessing: {share:.2f}"),
        ):  # fmt: skip
            interval = "" if few else f"  ({low:.3f} to {high:.3f})"
            axes.set_title(f"{what} {value:.3f}{interval}", loc="left", fontsize=look.SMALL + 1, fontweight="bold")
            small = {"color": look.MUTED, "fontsize": look.SMALL, "transform": axes.transAxes}
            axes.text(0.98, 0.04, f"dotted, {guess}", ha="right", **small)
        title = f"{name.replace('_', ' ')}: {counts}" if name else counts
        figure.suptitle(title + (f"\n{few}" if few else ""), x=0.01, ha="left", color=orange if few else look.INK)
        figure.supxlabel(by, x=0.01, ha="left", fontsize=7, color=look.MUTED)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        low, high = found.auroc_interval
        interval = "" if few else f", 95 % interval {low:.3f} to {high:.3f}"
        look.describe(
            figure,
            f"ROC and precision-recall curves of {name.replace('_', ' ') or 'one label'}: {counts}. AUROC "
            f"{found.auroc:.3f}{interval}; average precision "
            f"{found.average_precision:.3f}{f'; {point}' if point else ''}. {few}",
        )
    return figure
