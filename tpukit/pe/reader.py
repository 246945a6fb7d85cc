"""The slices of an exam in three windows, with the answers of a network along the body.

    show_study(images, labels, study, predictions=answers)

`show_study` sorts the rows of the exam along the body, and joins the predictions to them by
SOPInstanceUID. It divides a long exam into stretches, and shows the most important slice of each.
`slice_viewer` makes the page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tpukit.essentials.display import InvalidValueError, figure_inputs
from tpukit.essentials.display import figure_style as look
from tpukit.pe.challenge import IMAGE, STUDY
from tpukit.pe.ct import WINDOWS
from tpukit.pe.data_notice import NOT_FOR_CLINICAL_USE
from tpukit.pe.exam_check import SAME, WIDE
from tpukit.pe.labels import EXAM_LABELS, LABELS, SERIES, WORDS, check_columns, check_yes_or_no
from tpukit.pe.slice_viewer import SCALE_BAR, Curve, Study, as_jpeg, highest

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

_SIDE = 256  # width and height in pixels of each window on the page
_MONTAGE = 12  # the number of slices in the overview and in the montage
_TITLES = 0.3  # inches above each slice of the montage
_HEADER = 0.55  # inches of the montage for its title and its note
_EMBOLUS = LABELS[0]
_PROBABILITY = f"predicted {_EMBOLUS}"  # the column that `_join` makes of the prediction
_FLAGS = {  # quality flags by the radiologists who labelled the exams; no network predicts them
    "qa_motion": "motion",
    "qa_contrast": "poor contrast",
    "flow_artifact": "flow artefact",
    "true_filling_defect_not_pe": "a filling defect that is no embolus",
}


class SliceFacts(NamedTuple):
    """The facts about one slice that the viewer and the montage show."""

    number: int  # among the slices of the series that have an image, from 1
    present: bool  # True if the slice has an embolus by the labels
    probability: float | None  # the predicted probability of an embolus; None without predictions
    words: str  # the description of the slice


@dataclass(repr=False, eq=False)
class ReadStudy(Study):
    """An exam with a slider, made by `pe.show_study`; `montage()` draws a figure for print.

    Attributes:
        pixels: (n, H, W) uint8, the middle window of each slice.
        facts: the `SliceFacts` of each slice.
        title: the title of the montage.
    """

    pixels: np.ndarray | None = None
    facts: Sequence[SliceFacts] = ()
    title: str = ""

    def montage(self) -> Figure:
        """Draw twelve slices of the exam in the middle window, and return the figure.

        The exam is divided into twelve stretches, and one slice of each stretch is drawn. The first
        choice is the slice with the highest probability in the exam, the second a slice with an
        embolus, and the third the slice with the highest probability in the stretch.
        """
        columns = min(6, len(self.overview))
        rows = math.ceil(len(self.overview) / columns)
        side = look.WIDTH / 6 - look.MARGIN
        height = rows * (side + _TITLES) + _HEADER
        with look.style():
            figure = look.new_figure(columns * (side + look.MARGIN) + look.MARGIN, height)
            width = figure.get_figwidth()
            for place, index in enumerate(self.overview):
                row, column = divmod(place, columns)
                axes = look.image_at(
                    figure,
                    self.pixels[index],
                    left=look.MARGIN + column * (side + look.MARGIN),
                    # 0.25 inches of the header are above the slices, the rest is below them.
                    bottom=height - 0.25 - (row + 1) * (side + _TITLES),
                    width=side,
                    height=side,
                )
                _write_title(axes, self.facts[index])
                _draw_sides_and_scale(axes, has_sides=self.has_sides, scale=self.scale)
            title_at = (look.MARGIN / width, 1 - 0.1 / height)
            figure.text(*title_at, self.title, va="top", fontsize=look.SMALL + 1)
            look.note(figure, self._legend_of_montage())
            look.describe(figure, self._alternative_text())
        return figure

    def _legend_of_montage(self) -> str:
        entries = []
        if any(fact.present for fact in self.facts):
            entries.append("orange: an embolus on this image")
        if all(fact.probability is not None for fact in self.facts):
            entries.append("blue: its probability")
        view = self.views[len(self.views) // 2]
        entries.append(f"{view} {_window_in_words(view)}".strip())
        if self.scale:
            entries.append(f"white bar: {SCALE_BAR} mm")
        return "    ".join([*entries, NOT_FOR_CLINICAL_USE])

    def _alternative_text(self) -> str:
        slices = "; ".join(self.facts[index].words for index in self.overview)
        count = len(self.overview)
        return f"{count} slices of {self.title}: {slices}. {NOT_FOR_CLINICAL_USE}"


def _write_title(axes, fact: SliceFacts) -> None:
    """Write number and probability above a slice; mark an embolus by a line below the slice."""
    style = {"fontsize": look.SMALL, "pad": 3}
    axes.set_title(f"slice {fact.number}", loc="left", color=look.MUTED, **style)
    if fact.probability is not None:
        axes.set_title(f"{fact.probability:.2f}", loc="right", color=look.COLORS[0], **style)
    if fact.present:
        line = {"color": look.COLORS[1], "linewidth": 3, "clip_on": False}
        axes.plot([0, 1], [-0.02, -0.02], transform=axes.transAxes, **line)


def _draw_sides_and_scale(axes, *, has_sides: bool, scale: float) -> None:
    """Draw R and L at the edges of a slice and the scale bar at its bottom, in white.

    Args:
        axes: matplotlib's axes with the slice.
        has_sides: True to draw R and L, the patient's right and left.
        scale: the length of the scale bar as a share of the slice's width; 0 for no bar.
    """
    text = {"color": "white", "fontsize": look.SMALL, "va": "center", "transform": axes.transAxes}
    if has_sides:
        axes.text(0.02, 0.5, "R", ha="left", **text)
        axes.text(0.98, 0.5, "L", ha="right", **text)
    if scale:
        line = {"color": "white", "linewidth": 1.5, "transform": axes.transAxes}
        axes.plot([0.03, 0.03 + scale], [0.04, 0.04], **line)


def _window_in_words(view: str) -> str:
    """Return level and width of a window in Hounsfield units; "" for a view without a window."""
    if view not in WINDOWS:
        return ""
    level, width = WINDOWS[view]
    return f"level {level}, width {width} HU"


def show_study(
    images: Any,
    labels: Any,
    study: str,
    *,
    predictions: Any = None,
    series: str | None = None,
    views: Sequence[str] = tuple(WINDOWS),
    field_of_view: float | None = None,
    upright: bool = True,
    limit: int = 128,
) -> ReadStudy:
    """Show an exam in three windows, with the probability of an embolus along the body.

    A slider moves through the slices, also without a kernel. After a click on the viewer, the arrow
    keys move the slider. A page without scripts shows twelve slices, and `.montage()` draws these
    for print. The notebook stores about 40 KB per slice. Slices with an embolus and the slice with
    the highest probability are never left out. A button goes to the most probable slice.

    Args:
        images: `PackedImages` or `CachedImages` of a pack of the table `labels`; or (N, 3, H, W)
            uint8 with one image per row of `labels`. The channels are the `views`.
        labels: the table of `index_images` or `index_dicom`: one row per image, with the column
            `position`. The viewer shows labels and quality flags if the table has their columns.
        study: the StudyInstanceUID of the exam.
        predictions: a table with SOPInstanceUID and pe_present_on_image, the probability. The first
            row of each image is used. Optional columns are the exam labels;
            "consistent", which is pe_present_on_image after `make_consistent`; and "attention", the
            weight of the slice, 0 or more. None for no predictions.
        series: a SeriesInstanceUID; required if the exam has several series.
        views: the names of the three channels. For a pack of one window, pass "slice below",
            "slice", "slice above".
        field_of_view: the width of an image in mm, PixelSpacing times Columns, for a scale bar.
            None for no scale bar.
        upright: True if the patient's right is on the left side of the images, as after
            `pack_dicom`; R and L then mark the sides. False for no letters.
        limit: 1 or more. An exam with more slices than `limit` is divided into `limit` stretches.
            The slider then has all slices with an embolus, and from each stretch the most probable
            slice (the middle slice without predictions).

    Returns:
        The viewer, which a notebook displays.

    Raises:
        ValueError: the exam does not exist; it has several series and `series` is None, or has no
            such series; `images` has none of its slices; or a column, a label or a prediction is
            missing or wrong.
    """
    import numpy as np

    figure_inputs.at_least_one(limit=limit)
    if field_of_view is not None and not field_of_view > 0:
        fact = f"field_of_view must be the width of an image in mm, got {field_of_view}"
        raise InvalidValueError(fact, fix="field_of_view=350.0")
    rows = slices_of(labels, study, series)
    notes = _irregularities(rows.position.to_numpy(float))
    rows, places = _find_images(images, labels, rows, notes)
    table = _join(rows, predictions)
    count = len(table)
    numbers = _reached_slices(table, limit)
    if count > limit:
        rule = f"the highest of {limit} stretches, and all with an embolus"
        notes.append(f"the slider takes {len(numbers)} of {count}: {rule}")
    table = table.iloc[numbers]
    # Only the pixels of the shown slices are read: an exam has hundreds, and the page stores each.
    pixels = _pixels(images, places[numbers], len(views))
    records = zip(numbers.tolist(), table.to_dict("records"), strict=True)
    facts = [_facts_of(row, number, count) for number, row in records]
    caption = [f"{count} slices, from the feet to the head", *notes, NOT_FOR_CLINICAL_USE]
    return ReadStudy(
        images=[as_jpeg(np.hstack(image), (len(views) * _SIDE, _SIDE)) for image in pixels],
        words=[fact.words for fact in facts],
        marked=[index for index, fact in enumerate(facts) if fact.present],
        mark=WORDS[_EMBOLUS] if _EMBOLUS in rows else "",
        overview=highest(_importance(table), _MONTAGE),
        caption=" · ".join(caption),
        numbers=[fact.number for fact in facts],
        views=views,
        view_notes=[_window_in_words(view) for view in views],
        has_sides=upright,
        scale=SCALE_BAR / field_of_view if field_of_view else 0.0,
        curves=_curves(table),
        jump=int(table[_PROBABILITY].argmax()) if _PROBABILITY in table else None,
        above=_heading(rows.iloc[0]),
        below=_answers(rows.iloc[0], table.iloc[0]),
        pixels=pixels[:, len(views) // 2],
        facts=facts,
        title=f"study {study}",
    )


def slices_of(labels: Any, study: str, series: str | None = None):
    """Return the rows of one series of an exam, sorted along the body.

    The errors are those of `show_study`.
    """
    fix = "pe.index_images(labels, folder), or of DICOM files pe.index_dicom(labels, folder)"
    check_columns(labels, (STUDY, IMAGE, "position"), "the labels have", fix=fix)
    rows = labels.assign(_row=range(len(labels)))
    rows = rows[rows[STUDY] == study]
    if rows.empty:
        example = labels[STUDY].iloc[0] if len(labels) else None
        raise InvalidValueError(
            f"there is no study {study!r} in the labels",
            found=f"{labels[STUDY].nunique():,} others, such as {example}",
        )
    rows = _one_series(rows, study, series)
    # Slices without a position come last, and equal positions keep the order of the table.
    rows = rows.sort_values("position", kind="stable")
    names = [name for name in LABELS if name in rows]
    for name in names:
        missing = rows[name].isna()
        if missing.any():
            raise InvalidValueError(
                f"{name} is missing for {int(missing.sum())} slices of study {study}",
                found=f"image {rows[IMAGE][missing].iloc[0]}",
                fix="fill it in, or leave the column out",
            )
    check_yes_or_no(rows, names)
    return rows


def _one_series(rows: Any, study: str, series: str | None):
    """Return the rows of a series of an exam; the errors are those of `show_study`."""
    names = rows[SERIES].unique().tolist() if SERIES in rows else [None]
    if series is None and len(names) > 1:
        raise InvalidValueError(
            f"study {study} has {len(names)} series, and their slices would be mixed",
            found=", ".join(names),
            fix=f"show_study(..., series={names[0]!r})",
        )
    if series is None:
        return rows
    rows = rows[rows[SERIES] == series]
    if rows.empty:
        raise InvalidValueError(f"study {study} has no series {series!r}", found=", ".join(names))
    return rows


def _irregularities(positions: np.ndarray) -> list[str]:
    """Return notes on slices with the same position, and on missing slices between others.

    With the positions 0, 1, 1, 2, 5 the usual step is 1: one slice has the position of another one,
    and two slices, at 3 and 4, are missing.
    """
    import numpy as np

    notes = []
    steps = np.diff(positions)
    shared = int((steps < SAME).sum())
    if shared:
        slices = "slices are" if shared > 1 else "slice is"
        notes.append(f"{shared} {slices} at the position of another one")
    apart = steps[steps > SAME]
    if not len(apart):
        return notes
    usual = np.quantile(apart, 0.5, method="lower")  # the lower median, as in `exam_check`
    wide = steps[steps > WIDE * usual]
    missing = int((np.round(wide / usual) - 1).sum())
    if missing:
        slices = "slices are" if missing > 1 else "slice is"
        notes.append(f"{missing} {slices} missing between others")
    return notes


def _find_images(images: Any, labels: Any, rows: Any, notes: list[str]) -> tuple:
    """Return the rows of an exam that have an image, and the index of each row's image.

    If slices of the exam are not among the images, a note is appended to `notes`.
    """
    import numpy as np

    is_pack = hasattr(images, "take") and hasattr(images, "rows")
    if not is_pack:
        if len(images) != len(labels):
            raise InvalidValueError(
                f"there are {len(images):,} images and {len(labels):,} rows of labels",
                fix="pass the labels that belong to these images, one row per image",
            )
        return rows, rows["_row"].to_numpy()
    # A pack knows the rows of its images in the table that was packed. Another table could have the
    # same number of rows, but a shorter one is certainly wrong.
    least = images.rows.max(initial=-1) + 1
    if least > len(labels):
        raise InvalidValueError(
            f"the images come from a table of {least:,} rows or more, but the labels have "
            f"{len(labels):,}",
            fix="pass the whole table that was packed",
        )
    image_of_row = np.full(len(labels), -1)  # -1 for a row whose image was left out
    image_of_row[images.rows] = np.arange(len(images.rows))
    places = image_of_row[rows["_row"].to_numpy()]
    is_packed = places >= 0
    missing = int((~is_packed).sum())
    if missing == len(rows):
        raise InvalidValueError(
            f"none of the {missing} slices of study {rows[STUDY].iloc[0]} is among the images",
            fix="pass the whole table that was packed, and a study that is in the pack",
        )
    if missing:
        verb = "are" if missing > 1 else "is"
        notes.append(f"{missing} of its slices {verb} not among the images")
    return rows[is_packed], places[is_packed]


def _join(rows: Any, predictions: Any):
    """Join the predictions to the rows of an exam, by SOPInstanceUID.

    A predicted label becomes the column "predicted <label>"; the true label remains in the column
    "<label>". The columns "consistent" and "attention" are joined under the same names.
    """
    import pandas as pd

    if predictions is None:
        return pd.DataFrame(rows)
    check_columns(predictions, (IMAGE, _EMBOLUS), "the predictions have")
    new_names = {name: f"predicted {name}" for name in LABELS if name in predictions}
    others = [name for name in ("attention", "consistent") if name in predictions]
    columns = [*new_names.values(), *others]
    # The labels and the predictions have columns of the same names, so those of the predictions get
    # new names before the join.
    by_image = predictions.rename(columns=new_names).drop_duplicates(IMAGE).set_index(IMAGE)
    found = by_image[columns].reindex(rows[IMAGE])
    joined = rows.assign(**{name: found[name].to_numpy() for name in columns})
    missing = joined[_PROBABILITY].isna()
    if missing.any():
        study = rows[STUDY].iloc[0]
        raise InvalidValueError(
            f"{int(missing.sum())} of {len(rows)} slices of study {study} have no prediction",
            found=f"for example image {joined[IMAGE][missing].iloc[0]}",
            fix="predict all slices of the exam",
        )
    for name in (_PROBABILITY, "consistent"):
        if name in joined and not joined[name].between(0, 1).all():
            lowest = joined[name].min()
            raise InvalidValueError(
                f"probabilities lie in [0, 1], got {lowest:.3g} to {joined[name].max():.3g}",
                fix="logits.sigmoid()",
            )
    return joined


def _probabilities(table: Any) -> np.ndarray:
    """Return the predicted probability of each slice, (n,); zeros without predictions."""
    import numpy as np

    if _PROBABILITY not in table:
        return np.zeros(len(table))
    return table[_PROBABILITY].to_numpy()


def _has_embolus(table: Any) -> np.ndarray:
    """Return whether each slice has an embolus by the labels, (n,) bool; False without labels."""
    import numpy as np

    if _EMBOLUS not in table:
        return np.zeros(len(table), bool)
    return table[_EMBOLUS].to_numpy() == 1


def _reached_slices(table: Any, limit: int) -> np.ndarray:
    """Return the indices of the slices on the slider, in the order of the body."""
    import numpy as np

    if len(table) <= limit:
        return np.arange(len(table))
    reached = [*highest(_probabilities(table), limit), *np.flatnonzero(_has_embolus(table))]
    if "consistent" in table:
        # If all probabilities are equal, `make_consistent` raises only one of them: show it too.
        reached.append(table.consistent.argmax())
    return np.unique(reached)


def _importance(table: Any) -> np.ndarray:
    """Return the importance of each slice, (n,): its probability, plus 2 for an embolus.

    The slices with the highest probability of the exam get 4 more.
    """
    probabilities = _probabilities(table)
    is_highest = probabilities == probabilities.max()
    return probabilities + 2 * _has_embolus(table) + 4 * is_highest


def _pixels(images: Any, places: np.ndarray, views: int) -> np.ndarray:
    """Return the images with these indices, (n, views, H, W) uint8."""
    import numpy as np

    if hasattr(images, "rows"):
        found = np.moveaxis(images.take(places), -1, 1)  # `take` returns (n, H, W, C)
    else:
        if hasattr(images, "detach"):
            images = images.detach().cpu()
        found = np.asarray(images)[places]
    if found.ndim != 4 or found.shape[1] != views or found.dtype != np.uint8:
        given = f"{found.shape} {found.dtype}"
        raise InvalidValueError(
            f"show_study draws (N, {views}, H, W) uint8, a channel for each view, got {given}",
            fix='pass images of three windows: pack_dicom(..., form="jpeg")',
        )
    return found


def _facts_of(row: dict, number: int, count: int) -> SliceFacts:
    """Return the facts about a slice; `number`, from 0, is its position in a series of `count`."""
    present = row.get(_EMBOLUS) == 1
    probability = row.get(_PROBABILITY)
    words = [f"slice {number + 1} of {count}"]
    if probability is not None:
        words.append(f"probability of an embolus {probability:.2f}")
    if _EMBOLUS in row:
        words.append(WORDS[_EMBOLUS] if present else "none on this image")
    return SliceFacts(number + 1, present, probability, ", ".join(words))


def _curves(table: Any) -> list[Curve]:
    """Return the curves along the body: attention, probabilities and consistent probabilities."""
    curves = []
    if "attention" in table:
        heights = table.attention / (table.attention.max() or 1)
        name = "attention, to its own maximum"
        curves.append(Curve(name, heights.tolist(), color=look.COLORS[2], filled=True))
    if _PROBABILITY in table:
        name = "predicted probability of an embolus"
        curves.append(Curve(name, table[_PROBABILITY].tolist()))
    if "consistent" in table:
        name = "without contradictions"
        curves.append(Curve(name, table.consistent.tolist(), color="currentColor", dashed=True))
    return curves


def _heading(row: Any) -> str:
    """Return the identifier of the exam and its quality flags as HTML."""
    edge = f"border:1px solid {look.COLORS[1]};color:{look.COLORS[1]};border-radius:9px"
    quality = ""
    for name, words in _FLAGS.items():
        if name in row and row[name] == 1:
            style = f"{edge};padding:0 8px;margin-left:8px"
            quality += f'<span style="{style}">{html.escape(words)}</span>'
    has_flags = any(name in row for name in _FLAGS)
    if has_flags and not quality:
        quality = '<span style="opacity:.75;margin-left:8px">no quality flags</span>'
    study = html.escape(str(row[STUDY]))
    return f'<div style="margin-bottom:8px"><b>Study {study}</b>{quality}</div>'


def _answers(truth: Any, predicted: Any) -> str:
    """Return the nine labels of the exam as HTML: the truth and the predicted probability."""
    cells = []
    for name in EXAM_LABELS:
        probability = predicted.get(f"predicted {name}")
        if name in truth or probability is not None:
            cells.append(_answer(WORDS[name], truth.get(name), probability))
    if not cells:
        return ""
    grid = "display:grid;grid-template-columns:repeat(3,1fr);gap:6px 24px"
    key = "&#9679; true, &#9675; not" if EXAM_LABELS[0] in truth else ""
    return (
        f'<div style="{grid};font-size:12px;margin-top:10px">{"".join(cells)}</div>'
        f'<div style="font-size:11px;opacity:.75">{key}</div>'
    )


def _answer(words: str, truth: int | None, probability: float | None) -> str:
    """Return an exam label as HTML: a dot for the truth, a number and bar for the probability."""
    dot = ""
    if truth is not None:
        dot = "&#9679;" if truth == 1 else "&#9675;"
    bar = ""
    number = ""
    if probability is not None:
        number = f"{probability:.2f}"
        width = f"{100 * probability:.0f}%"
        bar = (
            '<div style="height:4px;background:rgba(128,128,128,.25)">'
            f'<div style="height:4px;width:{width};background:{look.COLORS[0]}"></div></div>'
        )
    return (
        '<div><div style="display:flex;justify-content:space-between">'
        f"<span>{dot} {words}</span><span>{number}</span></div>{bar}</div>"
    )
