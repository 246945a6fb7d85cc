"""Draw the ROC curve and the precision-recall curve of a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display import counted, plural
from tpukit.essentials.display import figure_style as look
from tpukit.metrics.areas import Scores, score
from tpukit.metrics.operating_point import OperatingPoint, sensitivity_at
from tpukit.metrics.samples import as_array

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREEN = look.COLORS[:3]
_DOTTED = {"color": look.MUTED, "linewidth": 1, "linestyle": (0, (1, 2))}


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
    """Draw a label's ROC curve and its precision-recall curve, with 95 % bands.

    The title has the number of samples with the label, and the number of groups with such a sample.

    Samples of the same patient are not independent. Pass the patients as `groups`, so that the
    bootstrap draws whole patients; otherwise the band is too narrow. If fewer than 5 groups have a
    positive sample, or fewer than 5 have a negative one, the title has a warning, and no bands are
    drawn.

    Args:
        labels: (N,) zeros and ones, of one label.
        probabilities: (N,) probabilities of this label, or any scores, because only their order
            counts.
        name: the name of the label, for the title.
        groups: (N,) the study or patient of each sample; None if every sample is independent.
        group: the word for a group in the texts, such as "study".
        sample: the word for a sample in the texts, such as "exam".
        specificity: draw a ring at the highest sensitivity with this specificity or more, see
            `sensitivity_at`; None for no ring.
        resamples: number of draws of the bootstrap, 1 or more.
        seed: the seed of the bootstrap.

    Returns:
        a figure of matplotlib.

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, all labels are equal, a
            probability is nan, a sample has no group, or a number is out of range.
    """
    import numpy as np

    found = score(labels, probabilities, groups, resamples=resamples, seed=seed)
    # `score` has checked the arguments, so (N, 1) is the only other shape.
    truth = as_array(labels).ravel()
    # Ranks have the same curves as the scores, which may be infinite.
    chances = np.unique(as_array(probabilities).ravel(), return_inverse=True)[1]
    counts = f"{found.positives:,} of {found.samples:,} {plural(sample)} positive"
    band = f"band: middle 95 % of {resamples} draws"
    unit = sample  # the name of the unit that the bootstrap draws
    if groups is not None:
        all_groups = counted(found.groups, group)
        counts += f", in {found.positive_groups:,} of {all_groups}"
        band += f" of whole {plural(group)}"
        unit = group
    # Too few groups: the title says so, and the caption does not describe a band.
    few = found.too_few(unit)
    if few:
        few += ": too few to tell, and to draw an interval"
        band = ""
    point = None
    if specificity is not None:
        options = {"groups": groups, "resamples": resamples, "seed": seed}
        point = sensitivity_at(specificity, truth, chances, **options)
    words = _Words(name.replace("_", " "), counts, few, band)
    with look.style():
        figure = look.new_figure(8.6, 4.5, layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_roc(left, truth, chances, found)
        _draw_precision(right, truth, chances, found)
        if point:
            _draw_point(left, point)
        _write_texts(figure, words)
        look.describe(figure, _description(words, found, point))
    return figure


@dataclass(frozen=True)
class _Words:
    """The texts of the figure."""

    name: str  # of the label
    counts: str  # of samples and groups that have the label
    few: str  # the reason why no interval is drawn; "" if the intervals are drawn
    band: str  # the meaning of the bands; "" if there are none


def _draw_roc(axes: Axes, truth: np.ndarray, chances: np.ndarray, found: Scores) -> None:
    from sklearn.metrics import roc_curve

    false_rate, recall, _ = roc_curve(truth, chances)
    _draw_band(axes, found.recall_band, color=_BLUE)
    axes.plot(false_rate, recall, color=_BLUE, linewidth=1.8)
    axes.plot([0, 1], [0, 1], **_DOTTED)  # guessing: both rates are equal
    axes.set_xlabel("false positive rate (1 - specificity)")
    axes.set_ylabel("true positive rate (sensitivity)")
    area = f"AUROC {found.auroc:.3f}{_interval(found, found.auroc_interval)}"
    _write_area(axes, area, guessing="0.5")


def _draw_precision(axes: Axes, truth: np.ndarray, chances: np.ndarray, found: Scores) -> None:
    from sklearn.metrics import precision_recall_curve

    precision, recall, _ = precision_recall_curve(truth, chances)
    share = found.positives / found.samples
    _draw_band(axes, found.precision_band, color=_GREEN)
    # Leave out scikit-learn's last point, precision 1 at recall 0: it belongs to no threshold.
    look_of_curve = {"color": _GREEN, "linewidth": 1.8, "drawstyle": "steps-post"}
    axes.plot(recall[:-1], precision[:-1], **look_of_curve)
    # Guessing has a precision equal to the share of positive samples.
    axes.axhline(share, **_DOTTED)
    axes.set_xlabel("recall (sensitivity)")
    axes.set_ylabel("precision")
    interval = _interval(found, found.average_precision_interval)
    area = f"average precision {found.average_precision:.3f}{interval}"
    _write_area(axes, area, guessing=f"{share:.2f}")


def _draw_band(axes: Axes, band: np.ndarray, *, color: str) -> None:
    import numpy as np

    low, high = band
    axes.fill_between(np.linspace(0, 1, len(low)), low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")  # room for a line at 1
    axes.grid(axis="x")


def _interval(found: Scores, limits: np.ndarray) -> str:
    if found.too_few():
        return ""
    low, high = limits
    return f"  ({low:.3f} to {high:.3f})"


def _write_area(axes: Axes, text: str, *, guessing: str) -> None:
    axes.set_title(text, loc="left", fontsize=look.SMALL + 1, fontweight="bold")
    small = {"color": look.MUTED, "fontsize": look.SMALL, "transform": axes.transAxes}
    axes.text(0.98, 0.04, f"dotted, guessing: {guessing}", ha="right", **small)


def _draw_point(axes: Axes, point: OperatingPoint) -> None:
    """Draw a ring around the operating point, its interval, and its numbers."""
    false_rate = 1 - point.specificity
    # The interval is of the sensitivity, so it is a vertical line.
    if point.interval:
        axes.plot([false_rate, false_rate], point.interval, color=_ORANGE, linewidth=1.6)
    axes.plot(
        false_rate,
        point.sensitivity,
        marker="o",
        markersize=8,
        markerfacecolor=look.PAPER,
        markeredgecolor=_ORANGE,
        markeredgewidth=1.8,
    )
    words = str(point).replace(" at ", "\nat ")  # two short lines fit next to the curve
    small = {"color": _ORANGE, "fontsize": look.SMALL, "transform": axes.transAxes}
    axes.text(0.98, 0.13, words, ha="right", **small)


def _write_texts(figure: Figure, words: _Words) -> None:
    title = words.counts
    if words.name:
        title = f"{words.name}: {title}"
    color = look.INK
    if words.few:
        title += f"\n{words.few}"
        color = _ORANGE
    figure.suptitle(title, x=0.01, ha="left", color=color)
    figure.supxlabel(words.band, x=0.01, ha="left", fontsize=7, color=look.MUTED)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)


def _description(words: _Words, found: Scores, point: OperatingPoint | None) -> str:
    area = f"AUROC {found.auroc:.3f}"
    if not words.few:
        low, high = found.auroc_interval
        area += f", 95 % interval {low:.3f} to {high:.3f}"
    curves = f"ROC and precision-recall curves of {words.name or 'one label'}"
    precision = f"average precision {found.average_precision:.3f}"
    if point:
        precision += f"; {point}"
    return f"{curves}: {words.counts}. {area}; {precision}. {words.few}"
