"""Read your own CT exams: a folder of DICOM files, and a table with labels of exams or images.

    exam,embolus            image,embolus
    scan-017,1              1.2.840.113619.2.1,0
    scan-018,0              1.2.840.113619.2.2,1

`read_exams` finds the slices of each exam, joins the labels to them, and chooses a series. The
result is a table for `assign_folds`, `pack_dicom` and `ExamSequences`, with any names of labels.
"""

import os
import tempfile
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, first_few
from tpukit.pe.dicom import load_pydicom, not_decoded, open_dataset
from tpukit.pe.dicom_index import ADVICE, notice_others
from tpukit.pe.labels import IMAGE, SERIES, STUDY, check_yes_or_no
from tpukit.pe.missing_images import check_missing, leave_out
from tpukit.pe.series import find_files, find_places, read_headers, series_numbers, without_copies

ON_IMAGE = "_on_image"  # the ending of a column with the labels of images instead of exams
_KEYS = (STUDY, "AccessionNumber", "folder")  # a table of labels may name exams by one of these
# Elements that `_with_facts` reads from one header per series.
_FACTS = ("PatientID", "AccessionNumber", "SeriesDescription")
_ORDER = [STUDY, SERIES, "position", "number"]


def read_exams(
    folder,
    labels=None,
    *,
    series: str | None = None,
    missing: str = "raise",
    workers: int | None = None,
    progress: str | None = None,
):
    """Find the CT slices of exams in a folder, and join a table of labels to them.

    Localizers, reports, images of other modalities and files that are not DICOM are left out, and
    counted. So are slices without a position, or with another orientation, in a series where others
    have positions. Exams in the folder that the table does not name are left out, too.

    Args:
        folder: the folder of the exams. Files and folders may have any names.
        labels: the path of a CSV file, or a DataFrame; None for exams without labels. The table
            has one of two columns. `exam` is the StudyInstanceUID, the AccessionNumber, or the name
            of the exam's folder directly below `folder`. `image` is the SOPInstanceUID, or the name
            of the file. A column `patient` replaces PatientID. All other columns are labels, 0 or
            1.
        series: a part of the SeriesDescription, which selects one series if exams have several;
            None if each exam has one series.
        missing: "raise" for a FileNotFoundError if the folder does not have the exam or image of a
            row, or "drop" to leave such rows out.
        workers: the number of processes that read headers; None for one per CPU.
        progress: as for `pack_dicom`.

    Returns:
        A DataFrame with one row per slice, sorted by exam and along the body. Its columns are
        StudyInstanceUID, SeriesInstanceUID, SOPInstanceUID, `exam`, `patient`, `description`,
        `path`, `position` in mm, `number` (InstanceNumber), and a uint8 column per label. If a
        series has no positions, `position` is the InstanceNumber. If the table has labels of
        images, their columns are named `<label>_on_image`, and `<label>` is 1 if the exam has a
        positive image. Pass the result to `check_exams`, which lists anything unusual.

    Raises:
        FileNotFoundError: the folder has no DICOM file, or lacks the exam or image of a row.
        ValueError: the table is not as above; an exam has several series, and `series` does not
            select one of them; or no file is a CT slice.
        OSError: a file cannot be read.
        ModuleNotFoundError: pydicom, or a decoder that these files need, is not installed.
    """
    check_missing(missing)
    load_pydicom()
    table = _find_slices(folder, workers, progress)
    table = _with_facts(table, folder)
    if labels is not None:
        labels = _read_labels(labels)
        if "exam" in labels:
            table = _join_exams(table, labels, missing, folder=folder)
        else:
            table = _join_images(table, labels, missing, folder=folder)
    else:
        table = table.assign(exam=table[STUDY])
    table = _one_series(table, series).drop(columns=["AccessionNumber", "folder"])
    return table.sort_values(_ORDER, kind="stable").reset_index(drop=True)


def _find_slices(folder, workers: int | None, progress: str | None):
    """Return a table with identifiers, path, position and number of the CT slices in a folder.

    Its `attrs["noticed"]` lists anything unusual, for `check_exams`.
    """
    import numpy as np
    import pandas as pd

    names = find_files(folder)
    with tempfile.TemporaryDirectory() as work:
        headers, others = read_headers(folder, names, Path(work), workers, progress)
    noticed = notice_others(folder, names, others)
    if not len(headers):
        raise InvalidValueError(
            f"none of the {len(names):,} files in {folder} is a CT slice",
            found=f"for instance {names[others[0][0]]}: {others[0][1]}",
            fix="pass the folder that holds series of CT",
        )
    headers = without_copies(headers)
    series = series_numbers(headers)
    position, facts = find_places(headers, series)
    for fact, (count, first) in facts.items():
        print(f"{count:,} {fact}; series {first}")
        if fact in ADVICE:
            noticed.append([f"{count:,} {fact}", f"series {first}", ADVICE[fact]])
    has_place = np.isfinite(position)
    is_placed = np.bincount(series, weights=has_place)[series] > 0
    # In a series where no slice has a position, InstanceNumber determines the order.
    position = np.where(is_placed, position, headers["number"])
    uids = {STUDY: "study", SERIES: "series", IMAGE: "image"}
    columns = {name: np.char.decode(headers[field]) for name, field in uids.items()}
    table = pd.DataFrame(columns).astype(object)
    table["path"] = [os.path.join(folder, names[file]) for file in headers["file"].tolist()]
    table = table.assign(position=position, number=headers["number"].astype(float))
    lost = int((is_placed & ~has_place).sum())
    if lost:
        print(f"left out {lost:,} slices that have no position along their series")
    table = table[np.isfinite(position)].sort_values(_ORDER, kind="stable")
    table.attrs["noticed"] = noticed
    return table.reset_index(drop=True)


def _with_facts(table, folder):
    """Add the columns patient, AccessionNumber, folder and description of each series.

    They are read from one header per series.
    """
    import pandas as pd

    rows = []
    firsts = table.drop_duplicates([STUDY, SERIES])
    for study, series, path in zip(firsts[STUDY], firsts[SERIES], firsts["path"], strict=True):
        try:
            file = open_dataset(path, stop_before_pixels=True, specific_tags=list(_FACTS))
            facts = [str(file.get(name) or "").strip() for name in _FACTS]
        except OSError:
            raise
        except Exception as error:  # pydicom raises many types for a damaged header
            raise not_decoded(path, error) from error
        inner = os.path.relpath(path, folder).split(os.sep)
        rows.append([study, series, *facts, inner[0] if len(inner) > 1 else ""])
    names = [STUDY, SERIES, "patient", "AccessionNumber", "description", "folder"]
    facts = pd.DataFrame(rows, columns=names)
    nameless = facts["patient"] == ""
    if nameless.any():
        count = facts[STUDY][nameless].nunique()
        print(f"{count:,} exams have no PatientID: each counts as a separate patient")
        facts["patient"] = facts["patient"].mask(nameless, facts[STUDY])
    noticed = table.attrs  # `merge` loses the attributes
    table = table.merge(facts, on=[STUDY, SERIES], how="left")
    table.attrs.update(noticed)
    return table


def _read_labels(labels):
    """Read and check a table of labels; return it with identifiers as text and uint8 labels.

    Raises:
        ValueError: the table has not exactly one of the columns `exam` and `image`, has no label,
            or has a missing, repeated or wrong value.
    """
    import pandas as pd

    source = "the table"
    if isinstance(labels, str | os.PathLike):
        source = os.fspath(labels)
        texts = dict.fromkeys(("exam", "image", "patient"), str)  # as a number, 0017 would be 17
        labels = pd.read_csv(labels, dtype=texts, skipinitialspace=True)
    keys = [name for name in ("exam", "image") if name in labels]
    names = label_names(labels)
    if len(keys) != 1 or not names:
        raise InvalidValueError(
            f"{source} needs either a column 'exam' or a column 'image', and a column per label",
            found=", ".join(map(str, labels.columns)),
            fix='labels.rename(columns={"AccessionNumber": "exam"})',
        )
    key = keys[0]
    for name in [name for name in (key, "patient", *names) if name in labels]:
        missing = labels[name].isna()
        if missing.any():
            raise InvalidValueError(
                f"{name} is missing in {int(missing.sum())} rows of {source}",
                found=f"row {int(missing.to_numpy().argmax())}, counted from 0",
                fix=f'labels.dropna(subset=["{name}"])',
            )
    labels = labels.assign(**{key: labels[key].astype(str).str.strip()})
    twice = labels[key][labels[key].duplicated()]
    if len(twice):
        raise InvalidValueError(
            f"{len(twice)} rows of {source} have the same {key} as an earlier row",
            found=first_few(twice),
            fix=f'correct these rows; if they are copies: labels.drop_duplicates("{key}")',
        )
    for name in names:
        fix = f'correct these, or if the column is no label: labels.drop(columns="{name}")'
        check_yes_or_no(labels, [name], fix=fix)
    return labels.astype(dict.fromkeys(names, "uint8"))


def label_names(labels) -> list[str]:
    """Return the names of a table's labels: all columns except exam, image and patient."""
    return [name for name in labels.columns if name not in ("exam", "image", "patient")]


def _join_exams(table, labels, missing: str, *, folder):
    """Return the slices of the exams in the labels, with these labels.

    Args:
        table: the slices of all exams.
        labels: a table with the column `exam`.
        missing, folder: as for `read_exams`.
    """
    wanted = set(labels["exam"])
    # The kind of identifier in the column `exam` is the one that matches most exams.
    found = {key: wanted & set(table[key]) for key in _KEYS}
    key = max(_KEYS, key=lambda name: len(found[name]))
    examples = [f"{name} {first_few(table[name].unique(), 2)}" for name in _KEYS]
    gone = [exam for exam in labels["exam"] if exam not in found[key]]
    leave_out(
        gone,
        len(labels),
        missing,
        folder=folder,
        found="; ".join(examples),
        call="read_exams(folder, labels",
        kind="exam",
    )
    studies = table.groupby(key)[STUDY].nunique()
    several = studies[studies.index.isin(wanted) & (studies > 1)]
    if len(several):
        raise InvalidValueError(
            f"{len(several)} exams of the table have several studies each in {folder}",
            found=f"{key} {several.index[0]}",
            fix="name exams by their StudyInstanceUID in the table",
        )
    _print_unused(table, table[key].isin(wanted), folder)
    return _merge(table.assign(exam=table[key]), labels, "exam")


def _join_images(table, labels, missing: str, *, folder):
    """Return the slices in the labels, with the labels of images and the maxima of exams.

    Args:
        table: the slices of all exams.
        labels: a table with the column `image`.
        missing, folder: as for `read_exams`.
    """
    files = table["path"].map(os.path.basename)
    wanted = set(labels["image"])
    key = table[IMAGE]
    # The table may name images by their SOPInstanceUID or by their file: whichever finds more.
    if len(wanted & set(files)) > len(wanted & set(key)):
        key = files
        twice = files[files.duplicated() & files.isin(wanted)]
        if len(twice):
            raise InvalidValueError(
                f"{len(twice)} files in {folder} have the same name as another file",
                found=first_few(twice),
                fix="name images by their SOPInstanceUID in the table",
            )
    known = set(key)
    gone = [image for image in labels["image"] if image not in known]
    found = f"SOPInstanceUID {table[IMAGE].iloc[0]}; file {files.iloc[0]}"
    call = "read_exams(folder, labels"
    leave_out(gone, len(labels), missing, folder=folder, found=found, call=call)
    _print_unused(table, key.isin(wanted), folder)
    table = _merge(table.assign(exam=table[STUDY], image=key), labels, "image")
    for name in label_names(labels):
        # An exam has a finding if any of its images has it.
        of_exam = table.groupby(STUDY)[name].transform("max")
        table = table.assign(**{f"{name}{ON_IMAGE}": table[name], name: of_exam})
    return table.drop(columns="image")


def _print_unused(table, is_used, folder) -> None:
    unused = int((~is_used).sum())
    if unused:
        exams = table[STUDY].nunique() - table[STUDY][is_used].nunique()
        print(
            f"{unused:,} slices in {folder} have no row in the labels, among them all slices of "
            f"{exams:,} exams"
        )


def _merge(table, labels, key: str):
    """Join labels to slices by a column; if both tables have "patient", keep that of the labels."""
    noticed = table.attrs
    if "patient" in labels:
        table = table.drop(columns="patient")
    taken = sorted(set(labels.columns) & set(table.columns) - {key})
    if taken:
        fix = f'labels.rename(columns={{"{taken[0]}": "{taken[0]}_label"}})'
        fact = f"a label cannot have the name {taken[0]}: each table of slices has such a column"
        raise InvalidValueError(fact, fix=fix)
    table = table.merge(labels, on=key, how="inner")
    table.attrs.update(noticed)
    return table


def _one_series(table, series: str | None):
    """Return the slices of one series per exam.

    Raises:
        ValueError: no series of an exam has `series` in its description, or several series remain.
    """
    if series is not None:
        is_chosen = table["description"].str.contains(series, regex=False)
        lost = set(table["exam"]) - set(table["exam"][is_chosen])
        if lost:
            raise InvalidValueError(
                f"{len(lost)} exams have no series whose description contains {series!r}",
                found=f"exam {min(lost)}: {_descriptions(table, min(lost))}",
                fix="pass as series= a text that each exam has in one of its descriptions; or "
                "leave these exams out of the table",
            )
        table = table[is_chosen]
    count = table.groupby("exam")[SERIES].nunique()
    several = count[count > 1]
    if len(several):
        exam = several.index[0]
        texts = table[table["exam"] == exam].groupby(SERIES)["description"].first().tolist()
        description = max(texts, key=len)  # no other description contains the longest one
        fix = f"read_exams(folder, labels, series={description!r})"
        if texts.count(description) > 1:
            fix = "move the files of all series but one to another folder"
        raise InvalidValueError(
            f"{len(several)} of {len(count)} exams have several series, which cover the same "
            "part of the body",
            found=f"exam {exam}: {_descriptions(table, exam)}",
            fix=fix,
        )
    return table


def _descriptions(table, exam: str) -> str:
    counts = table[table["exam"] == exam].groupby([SERIES, "description"]).size()
    return ", ".join(f"{name!r} ({size} slices)" for (_, name), size in counts.items())
