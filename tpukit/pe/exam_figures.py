"""A figure of what a network says along the body, exam by exam."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from tpukit.essentials.show import WrongValue
from tpukit.essentials.show import house_style as look
from tpukit.pe.labels import check_yes_or_no
from tpukit.scores import as_array

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_exams(
    labels: Any,
    probabilities: Any,
    *,
    consistent: Any = None,
    attention: Any = None,
    limit: int = 8,
    threshold: float = 0.5,
) -> Figure:
    """Draw the probability of an embolus along the body, a panel an exam, over where it truly is.

    Half of the panels are exams with an embolus on some slice, from many such slices to few; the other half are
    exams without one, those with the highest probability first: where a network is wrong, it is wrong there.

    Args:
        labels: a table with StudyInstanceUID, position and pe_present_on_image, as `index_images` makes it; of the
            images that were predicted.
        probabilities: (N,) of pe_present_on_image, in the order of the table, as the network gave them.
        consistent: (N,) the same after `make_consistent`, drawn as a second, thin line; None for none.
        attention: (N,) how much each slice counted in the answers about its exam, 0 or more; None where nothing does.
            Drawn in green, to the height of 1 where it is highest.
        limit: the most exams to draw.
        threshold: drawn as a dotted line.

    Raises:
        ValueError: there is not one probability for each row, a label is neither 0 nor 1, or the table lacks a column.
    """
    import numpy as np

    weighs = None if attention is None else as_array(attention)
    if weighs is not None and (weighs.shape != (len(labels),) or not (weighs >= 0).all()):
        raise WrongValue(
            f"attention is one number of 0 or more for each of the {len(labels)} rows, got {weighs.shape}, from "
            f"{weighs.min():.3g}",
            fix="what the model weighs the slices by, after the softmax",
        )
    missing = [name for name in ("StudyInstanceUID", "position", "pe_present_on_image") if name not in labels.columns]
    chances = as_array(probabilities)
    repaired = chances if consistent is None else as_array(consistent)
    for given in (chances, repaired):
        if missing or given.shape != (len(labels),):
            raise WrongValue(
                f"show_exams takes a table and one probability for each of its {len(labels)} rows, got {given.shape}"
                f"{', and no column ' + missing[0] if missing else ''}",
                fix="labels of index_images(read_labels(...), ...), and probabilities[:, 0]",
            )
    check_yes_or_no(labels, ["pe_present_on_image"])
    table = labels.assign(chance=chances, repaired=repaired, weight=0.0 if weighs is None else weighs)
    table = table.sort_values(["StudyInstanceUID", "position"])
    if table.position.dtype.kind == "f":  # in mm, of DICOM files: slices are counted
        table["position"] = table.groupby("StudyInstanceUID").cumcount()
    exams = table.groupby("StudyInstanceUID").agg(shown=("pe_present_on_image", "sum"), most=("chance", "max"))
    sick = exams[exams.shown > 0].sort_values("shown", ascending=False, kind="stable").index
    sound = exams[exams.shown == 0].sort_values("most", ascending=False, kind="stable").index
    half = limit - min(limit // 2, len(sound))
    spread = np.linspace(0, len(sick) - 1, min(half, len(sick))).round().astype(int)
    sick = sick[spread]
    chosen = [*sick, *sound[: limit - len(sick)]]
    columns = min(4, len(chosen))
    rows = -(-len(chosen) // columns)

    with look.style():
        figure = look.new_figure(2.45 * columns + 0.4, 1.75 * rows + 0.7, layout="constrained")
        shares = []
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes, study in zip(grid.flat, chosen, strict=False):
            exam = table[table.StudyInstanceUID == study]
            places = exam.position.to_numpy()
            for place in places[exam.pe_present_on_image.to_numpy() == 1]:
                axes.axvspan(place - 0.5, place + 0.5, color=look.COLORS[1], alpha=0.3, linewidth=0)
            if weighs is not None:
                height = exam.weight / (exam.weight.max() or 1)
                axes.fill_between(places, height, color=look.COLORS[2], alpha=0.35, linewidth=0, step="mid")
                on_embolus = exam.weight[exam.pe_present_on_image == 1].sum() / (exam.weight.sum() or 1)
                if exams.shown[study]:
                    share = f"{100 * on_embolus:.0f} %"
                    axes.set_title(share, loc="right", fontsize=look.SMALL, color=look.COLORS[2], pad=4)
                    shares.append(f"{study[:6]} {share}")
            mark = {"marker": "o", "markersize": 3} if len(places) <= 40 else {}
            axes.plot(places, exam.chance, color=look.COLORS[0], linewidth=1.5, zorder=3, **mark)
            if consistent is not None:  # below the other: it is seen where they differ
                axes.plot(places, exam.repaired, color=look.INK, linewidth=1, linestyle=(0, (4, 2)), zorder=2.5)
            axes.axhline(threshold, color=look.MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
            axes.set(ylim=(-0.03, 1.03), xlim=(places.min() - 0.5, places.max() + 0.5), yticks=[0, 0.5, 1])
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
            count = int(exams.shown[study])
            slices = f"{count} of {len(exam)} slices" if count else "no embolus"
            axes.set_title(f"{study[:6]}: {slices}", loc="left", fontsize=look.SMALL + 0.5, pad=4)
        for axes in grid.flat[len(chosen) :]:
            axes.set_visible(False)
        figure.supylabel("probability of an embolus", fontsize=look.SMALL, color=look.MUTED)
        about = "slice of the series    orange: slices that truly show an embolus    blue: what the network says"
        about += "    dashed: without contradictions" * (consistent is not None)
        about += "    green: its attention, and how much of it lies on orange" * (weighs is not None)
        about = textwrap.fill(about, look.letters(figure.get_figwidth()))  # few panels have little room below them
        figure.supxlabel(about, fontsize=look.SMALL, color=look.MUTED)
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        best = table.groupby("StudyInstanceUID").chance.max()
        found = int((best[sick] >= threshold).sum())
        look.describe(
            figure,
            f"The probability of an embolus along the body in {len(chosen)} exams, {len(sick)} of them with an "
            f"embolus. In {found} of these it reaches {threshold:g} on some slice."
            f"{' Attention on slices with an embolus: ' + ', '.join(shares) + '.' if shares else ''}",
        )
    return figure
