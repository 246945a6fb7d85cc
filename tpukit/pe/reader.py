"""The reader: the slices of one exam through three windows, with what a network says of each along the body."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpukit.essentials.show import WrongValue, figure_inputs
from tpukit.essentials.show import house_style as look
from tpukit.pe.challenge import IMAGE, STUDY
from tpukit.pe.ct import WINDOWS
from tpukit.pe.labels import EXAM_LABELS, LABELS, SERIES, WORDS, check_columns, check_yes_or_no
from tpukit.pe.notices import NOT_FOR_CLINICAL_USE
from tpukit.pe.slice_viewer import Curve, Study, as_jpeg, highest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDE = 256  # pixels of each window in the page
_MONTAGE = 12
_FLAGS = {  # of train.csv: what the readers who labelled the exams noted, and no network is asked
    "qa_motion": "motion",
    "qa_contrast": "poor contrast",
    "flow_artifact": "flow artefact",
    "true_filling_defect_not_pe": "a filling defect that is no embolus",
}


class ReadStudy(Study):
    """One exam with a slider, made by `pe.show_study`; `montage()` is a picture of it, for print."""

    def montage(self) -> Figure:
        """Draw the slices of the overview through the middle window: of each twelfth of the exam the one that matters.

        That is one that shows an embolus, where one does, and the one with the highest probability. The highest of all
        is among them.
        """
        chosen, chances = self.overview, [fact["chance"] for fact in self.facts]
        columns = min(6, len(chosen))
        rows, side = -(-len(chosen) // columns), look.WIDTH / 6 - look.MARGIN
        with look.style():
            up = rows * (side + 0.3) + 0.55
            figure = look.new_figure(columns * (side + look.MARGIN) + look.MARGIN, up)
            across = figure.get_figwidth()
            for place, index in enumerate(chosen):
                row, column = divmod(place, columns)
                left, bottom = look.MARGIN + column * (side + look.MARGIN), up - 0.25 - (row + 1) * (side + 0.3)
                axes = look.image_at(figure, self.pixels[index], left, bottom, side, side)
                fact = self.facts[index]
                axes.set_title(f"slice {fact['number']}", loc="left", fontsize=look.SMALL, color=look.MUTED, pad=3)
                if fact["chance"] is not None:
                    axes.set_title(
                        f"{fact['chance']:.2f}", loc="right", fontsize=look.SMALL, color=look.COLORS[0], pad=3
                    )
                if fact["present"]:
                    line = {"color": look.COLORS[1], "linewidth": 3, "clip_on": False}
                    axes.plot([0, 1], [-0.02, -0.02], transform=axes.transAxes, **line)
            figure.text(look.MARGIN / across, 1 - 0.1 / up, self.title, va="top", fontsize=look.SMALL + 1)
            about = "orange: an embolus on this image    " * any(fact["present"] for fact in self.facts)
            about += "blue: its probability    " * (None not in chances) + NOT_FOR_CLINICAL_USE
            look.note(figure, about)
            listed = "; ".join(self.facts[index]["words"] for index in chosen)
            look.describe(figure, f"{len(chosen)} slices of {self.title}: {listed}. {NOT_FOR_CLINICAL_USE}")
        return figure


def show_study(
    images: Any,
    labels: Any,
    study: str,
    *,
    predictions: Any = None,
    series: str | None = None,
    views: Sequence[str] = tuple(WINDOWS),
    limit: int = 128,
) -> ReadStudy:
    """Show one exam: a slider through its slices in three windows, and the probability of an embolus along the body.

    It moves without a kernel, also by the arrow keys once it was clicked. A page that runs no scripts shows twelve
    slices; `.montage()` draws them for print. The notebook keeps about 40 KB for each slice. What is left out of either
    is never what matters: a button goes to the highest probability of all slices.

    Args:
        images: what was packed of these labels: `Records` or a `Cache`; or (N, 3, H, W) uint8, one for each of their
            rows. The channels are the `views`.
        labels: of `index_images` or `index_dicom`: a row for each image with `position`; labels and quality flags are
            shown where there are such columns.
        study: its StudyInstanceUID.
        predictions: a row for each image with SOPInstanceUID and pe_present_on_image, as the network gave them, and
            whichever exam labels are to be shown, "consistent", pe_present_on_image after `make_consistent`, and
            "attention", how much the slice counted, 0 or more; None for none.
        series: its SeriesInstanceUID, where the study has several.
        views: what the three channels are: of a pack of one window "slice below", "slice", "slice above".
        limit: stretches that a longer exam is divided into: the slider reaches the one with the highest probability of
            each, and all that show an embolus.

    Raises:
        ValueError: there is no such study, it has several series, none of its slices is
            among the images, or a column is missing, a label is, or a prediction.
    """
    import numpy as np

    figure_inputs.at_least_one(limit=limit)
    rows = slices_of(labels, study, series)
    notes = _irregularities(rows.position.to_numpy(float))
    rows, places = _found(images, labels, rows, notes)
    said, count = _join(rows, predictions), len(rows)
    chances = said.chance.to_numpy() if "chance" in said else np.zeros(count)
    present = said[LABELS[0]].to_numpy() == 1 if LABELS[0] in said else np.zeros(count, bool)
    chosen = np.arange(count)
    if count > limit:
        raised = [said.consistent.argmax()] if "consistent" in said else []  # of equal slices the rules raise one
        chosen = np.unique([*highest(chances, limit), *np.flatnonzero(present), *raised])
        notes.append(
            f"the slider takes {len(chosen)} of {count}: the highest of {limit} stretches, and all with an embolus"
        )
    said, chances, present = said.iloc[chosen], chances[chosen], present[chosen]
    pixels = _pixels(images, places[chosen], len(views))
    facts = [_facts(row, int(number), count) for number, row in zip(chosen, said.to_dict("records"), strict=True)]
    matters = chances + 2 * present + 4 * (chances == chances.max())
    marked = [number for number, fact in enumerate(facts) if fact["present"]]
    jump, curves = None, []
    if "chance" in said:
        jump = int(said.chance.argmax())
        curves = [Curve("probability of an embolus, as the network gave it", said.chance.tolist())]
    if "consistent" in said:
        curves.append(Curve("without contradictions", said.consistent.tolist(), "currentColor", dashed=True))
    if "attention" in said:
        heights = (said.attention / (said.attention.max() or 1)).tolist()
        curves.insert(0, Curve("attention, to its own maximum", heights, look.COLORS[2], filled=True))
    first, caption = rows.iloc[0], [f"{count} slices, from the feet to the head", *notes, NOT_FOR_CLINICAL_USE]
    shown = ReadStudy(
        [as_jpeg(np.hstack(image), (len(views) * _SIDE, _SIDE)) for image in pixels],
        [fact["words"] for fact in facts],
        marked,
        WORDS[LABELS[0]] if LABELS[0] in rows else "",
        highest(matters, _MONTAGE),
        " · ".join(caption),
        [fact["number"] for fact in facts],
        views=views,
        curves=curves,
        jump=jump,
        above=_heading(first),
        below=_answers(first, said.iloc[0]),
    )
    shown.pixels, shown.facts, shown.title = pixels[:, len(views) // 2], facts, f"study {study}"
    return shown


def slices_of(labels: Any, study: str, series: str | None = None):
    """Return the rows of a study's series in the order of the body; raises as `show_study`."""
    fix = "pe.index_images(labels, folder), or of DICOM files pe.index_dicom(labels, folder)"
    check_columns(labels, (STUDY, IMAGE, "position"), "the labels have", fix=fix)
    rows = labels.assign(_row=range(len(labels)))
    rows = rows[rows[STUDY] == study]
    if rows.empty:
        raise WrongValue(
            f"there is no study {study!r} in the labels",
            found=f"{labels[STUDY].nunique():,} others, such as {labels[STUDY].iloc[0] if len(labels) else None}",
        )
    there = rows[SERIES].unique().tolist() if SERIES in rows else [None]
    if series is None and len(there) > 1:
        raise WrongValue(
            f"study {study} has {len(there)} series, and their slices would be mixed",
            found=", ".join(there),
            fix=f"show_study(..., series={there[0]!r})",
        )
    if series is not None:
        rows = rows[rows[SERIES] == series]
        if rows.empty:
            raise WrongValue(f"study {study} has no series {series!r}", found=f"{', '.join(there)}")
    rows = rows.sort_values("position", kind="stable")
    for name in LABELS:
        if name in rows and (lacking := rows[name].isna()).any():
            raise WrongValue(
                f"{name} is missing for {int(lacking.sum())} slices of study {study}",
                found=f"image {rows[IMAGE][lacking].iloc[0]}",
                fix="fill it in, or leave the column out",
            )
    check_yes_or_no(rows, [name for name in LABELS if name in rows])
    return rows


def _irregularities(position) -> list[str]:
    """Say how many slices are missing between others, by the usual step, and how many lie where another one does."""
    import numpy as np

    steps = np.diff(position)
    twice = int((steps == 0).sum())
    notes = [f"{twice} {'slices are' if twice > 1 else 'slice is'} at the position of another one"] if twice else []
    apart = steps[steps > 0]
    usual = np.quantile(apart, 0.5, method="lower") if len(apart) else 1.0  # as in exam_check
    wide = steps[steps > 1.5 * usual]
    gone = int((np.round(wide / usual) - 1).sum()) if len(wide) else 0
    return notes + ([f"{gone} {'slices are' if gone > 1 else 'slice is'} missing between others"] if gone else [])


def _found(images: Any, labels: Any, rows: Any, notes: list[str]) -> tuple:
    """Return the rows whose image there is, and the number of each image."""
    import numpy as np

    if not hasattr(images, "take") or not hasattr(images, "rows"):
        if len(images) != len(labels):
            raise WrongValue(
                f"there are {len(images):,} images and {len(labels):,} rows of labels",
                fix="pass the table that was packed, or an image for each row",
            )
        return rows, rows["_row"].to_numpy()
    if images.rows.max(initial=-1) >= len(labels):
        raise WrongValue(
            f"the images are of a table of {images.rows.max() + 1:,} rows or more, the labels have {len(labels):,}",
            fix="pass the table that was packed, all of it",
        )
    number = np.full(len(labels), -1)
    number[images.rows] = np.arange(len(images.rows))
    places = number[rows["_row"].to_numpy()]
    if (gone := int((places < 0).sum())) == len(rows):
        raise WrongValue(
            f"none of the {gone} slices of study {rows[STUDY].iloc[0]} is among the images",
            fix="pass the table that was packed, and a study that was not left out",
        )
    if gone:
        notes.append(f"{gone} of its slices {'are' if gone > 1 else 'is'} not among the images")
    return rows[places >= 0], places[places >= 0]


def _pixels(images: Any, places: Any, views: int):
    """Return (n, views, H, W) uint8 of some images."""
    import numpy as np

    if hasattr(images, "rows"):
        found = np.moveaxis(images.take(places), -1, 1)
    else:
        found = np.asarray(images.detach().cpu() if hasattr(images, "detach") else images)[places]
    if found.ndim != 4 or found.shape[1] != views or found.dtype != np.uint8:
        raise WrongValue(
            f"show_study draws (N, {views}, H, W) uint8, a channel for each view, got {found.shape} {found.dtype}",
            fix='records of three windows: pack_dicom(..., form="jpeg"), or the JPEG set',
        )
    return found


def _join(rows: Any, predictions: Any):
    """Return the predictions of some rows, in their order: chance, attention and the exam labels that there are."""
    import pandas as pd

    if predictions is None:
        return pd.DataFrame(rows)
    check_columns(predictions, (IMAGE, LABELS[0]), "the predictions have")
    named = {LABELS[0]: "chance"} | {name: f"said {name}" for name in EXAM_LABELS if name in predictions}
    columns = [*named.values(), *(name for name in ("attention", "consistent") if name in predictions)]
    by_image = predictions.rename(columns=named).drop_duplicates(IMAGE).set_index(IMAGE)[columns]
    found = by_image.reindex(rows[IMAGE])
    joined = rows.assign(**{name: found[name].to_numpy() for name in columns})
    if (lacking := joined.chance.isna()).any():
        raise WrongValue(
            f"{int(lacking.sum())} of {len(rows)} slices of study {rows[STUDY].iloc[0]} have no prediction",
            found=f"none of image {joined[IMAGE][lacking].iloc[0]}",
            fix="predict all slices of the exam",
        )
    for of in (joined[name] for name in ("chance", "consistent") if name in joined):
        if not of.between(0, 1).all():
            raise WrongValue(
                f"probabilities lie in [0, 1], got {of.min():.3g} to {of.max():.3g}", fix="logits.sigmoid()"
            )
    return joined


def _facts(row: dict, number: int, count: int) -> dict:
    """Return what is known of a slice."""
    present, chance = row.get(LABELS[0]) == 1, row.get("chance")
    words = [f"slice {number + 1} of {count}"]
    words += [f"probability of an embolus {chance:.2f}"] if chance is not None else []
    words += [WORDS[LABELS[0]] if present else "none on this image"] if LABELS[0] in row else []
    return {"number": number + 1, "present": present, "chance": chance, "words": ", ".join(words)}


def _heading(row: Any) -> str:
    """Return which exam it is, and what its quality flags say."""
    flags = [words for name, words in _FLAGS.items() if name in row and row[name] == 1]
    noted = any(name in row for name in _FLAGS)
    chips = "".join(
        f'<span style="border:1px solid {look.COLORS[1]};color:{look.COLORS[1]};border-radius:9px;padding:0 8px;'
        f'margin-left:8px">{html.escape(words)}</span>'
        for words in flags
    )
    quality = chips or ('<span style="opacity:.75;margin-left:8px">no quality flags</span>' if noted else "")
    return f'<div style="margin-bottom:8px"><b>Study {html.escape(str(row[STUDY]))}</b>{quality}</div>'


def _answers(truth: Any, said: Any) -> str:
    """Return the nine answers about the exam: what is true, and what was said."""
    cells = []
    for name in EXAM_LABELS:
        chance = said.get(f"said {name}")
        if name not in truth and chance is None:
            continue
        dot = ("&#9679;" if truth[name] == 1 else "&#9675;") if name in truth else ""
        bar = number = ""
        if chance is not None:
            number = f"{chance:.2f}"
            bar = (
                '<div style="height:4px;background:rgba(128,128,128,.25)">'
                f'<div style="height:4px;width:{100 * chance:.0f}%;background:{look.COLORS[0]}"></div></div>'
            )
        cells.append(
            f'<div><div style="display:flex;justify-content:space-between"><span>{dot} {WORDS[name]}</span>'
            f"<span>{number}</span></div>{bar}</div>"
        )
    if not cells:
        return ""
    grid = "display:grid;grid-template-columns:repeat(3,1fr);gap:6px 24px;font-size:12px;margin-top:10px"
    key = "&#9679; true, &#9675; not" if EXAM_LABELS[0] in truth else ""
    return f'<div style="{grid}">{"".join(cells)}</div><div style="font-size:11px;opacity:.75">{key}</div>'
