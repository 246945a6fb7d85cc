"""Draw the probability of an embolus along the body, with a panel per exam."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display import InvalidValueError, check_count
from tpukit.essentials.display import figure_style as look
from tpukit.metrics import as_array, check_probabilities
from tpukit.pe.labels import LABELS, STUDY, check_columns, check_yes_or_no

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EMBOLUS = LABELS[0]
_MARKED = 40  # in exams of more slices, the points of the curve would touch, so none are drawn
_DASHED = (0, (4, 2))
_DOTTED = (0, (1, 2))


@dataclass(frozen=True)
class _Shown:
    """The settings of all panels."""

    consistent: bool  # True to draw the consistent probabilities
    attention: bool  # True to draw the attention
    threshold: float  # the probability of the dotted line


def show_exams(
    labels: Any,
    probabilities: Any,
    *,
    consistent: Any = None,
    attention: Any = None,
    limit: int = 8,
    threshold: float = 0.5,
) -> Figure:
    """Draw the probability of an embolus along the body, and the slices that truly show one.

    Half of the panels show exams with an embolus, ordered from many slices with an embolus to few.
    The other half show exams without an embolus, ordered from a high probability to a low one.
    If there are too few exams of one kind, more exams of the other kind are drawn.

    Args:
        labels: the table of the predicted images with StudyInstanceUID, position and
            pe_present_on_image, as from `index_images`.
        probabilities: (N,), the predicted probabilities of pe_present_on_image, in the order of
            the table.
        consistent: (N,), the probabilities after `make_consistent`, drawn as a thin line; None to
            omit them.
        attention: (N,), the weight of each slice in the answers about its exam, 0 or more; None to
            omit it. It is drawn in green. The largest weight of each exam has the height 1.
        limit: the most exams to draw, 1 or more.
        threshold: the probability at which a dotted line is drawn.

    Returns:
        The figure.

    Raises:
        ValueError: the table has no rows or lacks a column; an argument has another length; a label
            is neither 0 nor 1; a probability is outside [0, 1]; or an attention is negative.
    """
    check_count("limit", limit)
    table = _table(labels, probabilities, consistent, attention=attention)
    sick, sound = _choose(table, limit)
    chosen = [*sick, *sound]
    columns = min(4, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    shown = _Shown(consistent is not None, attention is not None, threshold)
    with look.style():
        figure = look.new_figure(2.45 * columns + 0.4, 1.75 * rows + 0.7, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        shares = []
        for axes, study in zip(grid.flat, chosen, strict=False):
            share = _draw_exam(axes, table[table[STUDY] == study], shown)
            if share:
                shares.append(f"{_short(study)} {share}")
        for axes in grid.flat[len(chosen) :]:  # the last row may have fewer exams than columns
            axes.set_visible(False)
        small = {"fontsize": look.SMALL, "color": look.MUTED}
        figure.supylabel("probability of an embolus", **small)
        letters = look.letters(figure.get_figwidth())
        figure.supxlabel(textwrap.fill(_legend(shown), letters), **small)
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        highest = table.groupby(STUDY).probability.max()
        found = int((highest[sick] >= threshold).sum())
        attended = f" Attention on slices with an embolus: {', '.join(shares)}." if shares else ""
        look.describe(
            figure,
            f"The probability of an embolus along the body in {len(chosen)} exams, "
            f"{len(sick)} of them with an embolus. "
            f"In {found} of these it reaches {threshold:g} on some slice."
            f"{attended}",
        )
    return figure


def _table(labels: Any, probabilities: Any, consistent: Any, *, attention: Any) -> pd.DataFrame:
    """Check the arguments of `show_exams`; return one table, sorted by exam and position."""
    count = len(labels)
    if not count:
        raise InvalidValueError("the table of show_exams has no rows", fix="pass at least one exam")
    weights = None
    if attention is not None:
        weights = as_array(attention)
        is_shape_right = weights.shape == (count,)
        if not is_shape_right or not (weights >= 0).all():
            given = f"{weights.min():.3g}" if is_shape_right else f"shape {weights.shape}"
            raise InvalidValueError(
                "attention must have a number of 0 or more for each of the "
                f"{count} rows, got {given}",
                fix="convert an ExamNetwork's attention: ExamSequences(...).to_slices(attention)",
            )
    columns = (STUDY, "position", _EMBOLUS)
    fix = "labels of index_images(read_labels(...), ...)"
    check_columns(labels, columns, "the table of show_exams has", fix=fix)
    given = as_array(probabilities)
    changed = given if consistent is None else as_array(consistent)
    for values in (given, changed):
        if values.shape != (count,):
            shape = values.shape
            raise InvalidValueError(
                f"show_exams needs one probability for each of the {count} rows, got {shape}",
                fix="pass the image label's probabilities of all rows: probabilities[:, 0]",
            )
        check_probabilities(values)
    check_yes_or_no(labels, [_EMBOLUS])
    table = labels.assign(
        probability=given,
        consistent=changed,
        weight=0.0 if weights is None else weights,
    )
    table = table.sort_values([STUDY, "position"])
    if table.position.dtype.kind == "f":  # mm from DICOM files; the figure needs slice numbers
        table["position"] = table.groupby(STUDY).cumcount()
    return table


def _choose(table: pd.DataFrame, limit: int) -> tuple:
    """Return the exams to draw: those with an embolus, and those without."""
    import numpy as np

    by_exam = table.groupby(STUDY)
    positive = by_exam[_EMBOLUS].sum()
    highest = by_exam.probability.max()
    sick = positive[positive > 0].sort_values(ascending=False, kind="stable").index
    sound = highest[positive == 0].sort_values(ascending=False, kind="stable").index
    # More than half of the panels for exams with an embolus, if there are few without one.
    half = limit - min(limit // 2, len(sound))
    spread = np.linspace(0, len(sick) - 1, min(half, len(sick))).round().astype(int)
    sick = sick[spread]
    return sick, sound[: limit - len(sick)]


def _draw_exam(axes: Axes, exam: pd.DataFrame, shown: _Shown) -> str:
    """Draw the panel of an exam; return the share of its attention on the embolus, or ""."""
    places = exam.position.to_numpy()
    is_positive = exam[_EMBOLUS].to_numpy() == 1
    count = int(is_positive.sum())
    for place in places[is_positive]:
        style = {"color": look.COLORS[1], "alpha": 0.3, "linewidth": 0}
        axes.axvspan(place - 0.5, place + 0.5, **style)
    share = ""
    if shown.attention:
        height = exam.weight / (exam.weight.max() or 1)
        style = {"color": look.COLORS[2], "alpha": 0.35, "linewidth": 0}
        axes.fill_between(places, height, step="mid", **style)
        if count:
            on_embolus = exam.weight[is_positive].sum() / (exam.weight.sum() or 1)
            share = f"{100 * on_embolus:.0f} %"
            small = {"fontsize": look.SMALL, "color": look.COLORS[2], "pad": 4}
            axes.set_title(share, loc="right", **small)
    mark = {"marker": "o", "markersize": 3} if len(places) <= _MARKED else {}
    axes.plot(places, exam.probability, color=look.COLORS[0], linewidth=1.5, zorder=3, **mark)
    if shown.consistent:  # zorder below the blue line, so this line is visible only if they differ
        style = {"color": look.INK, "linewidth": 1, "linestyle": _DASHED, "zorder": 2.5}
        axes.plot(places, exam.consistent, **style)
    axes.axhline(shown.threshold, color=look.MUTED, linewidth=0.8, linestyle=_DOTTED)
    ends = (places.min() - 0.5, places.max() + 0.5)
    axes.set(ylim=(-0.03, 1.03), xlim=ends, yticks=[0, 0.5, 1])
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    slices = f"{count} of {len(exam)} slices" if count else "no embolus"
    title = f"{_short(exam[STUDY].iloc[0])}: {slices}"
    axes.set_title(title, loc="left", fontsize=look.SMALL + 0.5, pad=4)
    return share


def _short(study: str) -> str:
    """Return six characters of an identifier: the last of a DICOM UID, the first of Kaggle's."""
    return study[-6:] if "." in study else study[:6]


def _legend(shown: _Shown) -> str:
    entries = [
        "slice of the series",
        "orange: slices that truly show an embolus",
        "blue: the output of the network",
    ]
    if shown.consistent:
        entries.append("dashed: without contradictions")
    if shown.attention:
        entries.append("green: its attention, and the share of it on orange")
    return "    ".join(entries)
