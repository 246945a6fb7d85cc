"""Read, check and split the labels of the RSNA STR 2020 pulmonary-embolism data set.

An exam is one CT examination. The data set and its columns call it a study. A row is one image:
pe_present_on_image is the label of the image, and all other labels are those of the whole exam.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, PathNotFoundError, first_few
from tpukit.pe.rules import RULES, broken_rules

STUDY = "StudyInstanceUID"
SERIES = "SeriesInstanceUID"
IMAGE = "SOPInstanceUID"
IDS = (STUDY, SERIES, IMAGE)
COLUMNS = (  # of train.csv, in its order
    *IDS,
    "pe_present_on_image",
    "negative_exam_for_pe",
    "qa_motion",
    "qa_contrast",
    "flow_artifact",
    "rv_lv_ratio_gte_1",
    "rv_lv_ratio_lt_1",
    "leftsided_pe",
    "chronic_pe",
    "true_filling_defect_not_pe",
    "rightsided_pe",
    "acute_and_chronic_pe",
    "central_pe",
    "indeterminate",
)
QUALITY = (  # quality flags, which networks do not predict
    "qa_motion",
    "qa_contrast",
    "flow_artifact",
    "true_filling_defect_not_pe",
)
LABELS = tuple(name for name in COLUMNS if name not in IDS + QUALITY)
EXAM_LABELS = LABELS[1:]
# The labels in words, in the order of LABELS, for `names=` of the figures.
WORDS = {
    "pe_present_on_image": "embolus on this image",
    "negative_exam_for_pe": "negative exam",
    "rv_lv_ratio_gte_1": "RV/LV ratio 1 or above",
    "rv_lv_ratio_lt_1": "RV/LV ratio below 1",
    "leftsided_pe": "embolus on the left",
    "chronic_pe": "chronic embolus",
    "rightsided_pe": "embolus on the right",
    "acute_and_chronic_pe": "acute and chronic",
    "central_pe": "central embolus",
    "indeterminate": "indeterminate exam",
}

_COPY_AGAIN = "copy it again from the competition's data"


def read_labels(path, *, inconsistent: str = "raise"):
    """Read train.csv, and check that its labels are complete and consistent.

    The labels of an exam are consistent if each exam label is the same in all rows of the exam, and
    if the labels break no rule of `tpukit.pe.rules.RULES`.

    Args:
        path: the path of train.csv, or of the folder that contains it.
        inconsistent: "raise" for a ValueError if the labels of exams are not consistent, or "drop"
            to leave these exams out and print their number.

    Returns:
        A DataFrame with all columns of the file, in the order of the file; labels are uint8.

    Raises:
        FileNotFoundError: the file does not exist, or the folder has no train.csv.
        ValueError: the file is empty, a column or value is missing, a label is neither 0 nor 1, an
            image is listed twice, or the labels of an exam contradict each other.
    """
    if inconsistent not in ("raise", "drop"):
        raise ValueError(f'inconsistent must be "raise" or "drop", got {inconsistent!r}')
    file = _find_file(Path(path))
    table = _read_table(file)
    _check_values(table, file)
    # The first three columns are identifiers. The labels are 0 or 1 by now, so uint8 has room.
    table = table.astype(dict.fromkeys(COLUMNS[3:], "uint8"))
    contradictions = _contradictions(table)
    if not contradictions:
        return table
    studies = set().union(*contradictions.values())
    counts = f"{len(studies)} of {table[STUDY].nunique()} studies"
    lines = []
    for fact, found in contradictions.items():
        lines.append(f"{len(found)} {fact}: {first_few(found)}")
    if inconsistent == "raise":
        drop = 'read_labels(path, inconsistent="drop")'
        raise InvalidValueError(
            f"{counts} in {file} have labels that contradict each other",
            found="\n".join(lines),
            fix=f"correct these rows, or leave the studies out with {drop}",
        )
    print(f"left out {counts} whose labels contradict each other: {'; '.join(lines)}")
    return table[~table[STUDY].isin(studies)].reset_index(drop=True)


def _find_file(path: Path) -> Path:
    """Return the path of train.csv; FileNotFoundError if it is neither `path` nor in it."""
    file = path / "train.csv" if path.is_dir() else path
    if file.is_file():
        return file
    found = "no such file or folder"
    if path.is_dir():
        found = sorted(entry.name for entry in path.iterdir())[:5]
    folder = "the folder of the competition's data"
    raise PathNotFoundError(
        f"there is no train.csv at {path}",
        found=found,
        fix=f"pass {folder}; or draw phantoms, which have a train.csv: pe.phantom(folder)",
    )


def _read_table(file: Path):
    import pandas as pd

    try:
        with warnings.catch_warnings():
            # If rows have more fields than the header, pandas drops the last fields, or without
            # `index_col` shifts all columns by one. It only warns, so make the warning an error.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(file, dtype=dict.fromkeys(IDS, str), index_col=False)
    except pd.errors.EmptyDataError:
        raise InvalidValueError(f"{file} is empty", fix=_COPY_AGAIN) from None
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise InvalidValueError(
            f"{file} is not a comma-separated table in UTF-8",
            found=f"{_file_kind(file)}; {str(error).strip()}",
            fix=f"{_COPY_AGAIN}, or save it as UTF-8 with the same number of fields in each row",
        ) from error


def _file_kind(file: Path) -> str:
    """Return the kind of a file by its first bytes, for messages."""
    with open(file, "rb") as begun:
        start = begun.read(4)
    kinds = {
        b"\x1f\x8b": "gzip",
        b"PK": "a zip archive",
        b"\xff\xfe": "UTF-16",
        b"\xfe\xff": "UTF-16",
    }
    return kinds.get(start[:2], f"it begins with {start!r}")


def _check_values(table, file: Path) -> None:
    """Raise ValueError unless all columns are present and every value is valid."""
    import pandas as pd

    others = "test.csv and submissions have fewer"
    fix = f"this needs the competition's train.csv with its 17 columns; {others}"
    check_columns(table, COLUMNS, f"{file} has", fix=fix)
    if table.empty:
        raise InvalidValueError(f"{file} has a header but no rows", fix=_COPY_AGAIN)
    counted = "(counted from 0, header left out)"
    for name in COLUMNS:
        rows = table.index[table[name].isna()]
        if len(rows):
            drop = f'table.dropna(subset=["{name}"]).to_csv(file, index=False)'
            raise InvalidValueError(
                f"{name} has {len(rows)} missing values in {file}",
                found=f"rows {first_few(rows)} {counted}",
                fix=f"fill these rows in, or drop them: {drop}",
            )
    for name in COLUMNS[3:]:
        # to_numeric, because pandas reads a whole column as text if a single value is a word.
        rows = table.index[~pd.to_numeric(table[name], errors="coerce").isin([0, 1])]
        if len(rows):
            found = first_few(f"{table.at[row, name]} in row {row}" for row in rows)
            raise InvalidValueError(
                f"{name} has {len(rows)} labels that are neither 0 nor 1 in {file}",
                found=f"{found} {counted}",
                fix="correct these rows; a label says yes (1) or no (0)",
            )
    rows = table.index[table[IMAGE].duplicated()]
    if len(rows):
        found = first_few(f"{table.at[row, IMAGE]} in row {row}" for row in rows)
        drop = f'table.drop_duplicates("{IMAGE}").to_csv(file, index=False)'
        raise InvalidValueError(
            f"{len(rows)} rows of {file} list an image that an earlier row lists",
            found=f"{found} {counted}",
            fix=f"if these rows equal the earlier ones: {drop}",
        )


def _contradictions(table) -> dict[str, list[str]]:
    """Return a dict from each contradiction between labels, in words, to the exams that have it."""
    groups = table.groupby(STUDY, sort=False)[list(LABELS)]
    exam = groups.max()
    lowest = groups.min()
    masks = {}
    for name in EXAM_LABELS:
        masks[f"studies where {name} varies"] = exam[name] != lowest[name]
    broken = broken_rules(exam == 1, exam.pe_present_on_image == 1)
    for rule, mask in broken.items():
        masks[f'against rule {rule}, "{RULES[rule]}"'] = mask
    return {fact: exam.index[mask].tolist() for fact, mask in masks.items() if mask.any()}


def assign_folds(
    labels,
    folds: int = 5,
    *,
    stratify: str | None = None,
    groups: str = STUDY,
):
    """Add a column `fold`, from 0 to folds - 1; all images of an exam are in one fold.

    The same table always gives the same folds. All folds have about the same number of images.

    Args:
        labels: the table of `read_labels` or `read_exams`, one row per image.
        folds: the number of folds, 2 or more.
        stratify: a column of zeros and ones whose mean should be about the same in all folds, such
            as "pe_present_on_image"; None to balance only the number of images.
        groups: a column; each of its values is in one fold only. Pass "patient" for a table of
            `read_exams` if a patient may have several exams.

    Returns:
        A copy of the table with the column `fold`, int8; int16 for more than 128 folds.

    Raises:
        ValueError: `folds` is below 2, there are fewer groups than folds, or a column does not
            exist.
    """
    import numpy as np
    import pandas as pd
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    if stratify is not None and stratify not in labels.columns:
        raise InvalidValueError(
            f"the table has no column {stratify!r} to stratify by",
            found=", ".join(map(str, labels.columns)),
            fix="one of these columns, with zeros and ones; or leave stratify out",
        )
    # Integers, because sorting the identifiers of all images would take seconds.
    check_columns(labels, [groups], "the table has", fix=f"groups={STUDY!r}")
    study, names = pd.factorize(labels[groups], sort=True)
    studies = len(names)
    words = "studies" if groups == STUDY else f"values of {groups}"
    if not 2 <= folds <= studies:
        least = "" if studies > 1 else f"; this takes at least two {words}"
        raise InvalidValueError(
            f"{studies} {words} cannot be split into {folds} folds",
            fix=f"pass folds between 2 and {studies}{least}",
        )
    if stratify is None:
        splitter = GroupKFold(folds)
        classes = None
    else:
        splitter = StratifiedGroupKFold(folds)
        classes = labels[stratify]
    # Whole exams, because adjacent slices are nearly the same image: if they were in different
    # folds, overfitting would remain undetected.
    fold = np.empty(len(labels), np.min_scalar_type(-folds))
    for number, (_, rows) in enumerate(splitter.split(study, classes, groups=study)):
        fold[rows] = number
    return labels.assign(fold=fold)


def check_columns(table, wanted: Iterable[str], what: str, *, fix: str = "") -> None:
    """Raise ValueError unless a table has all these columns.

    Args:
        table: a DataFrame.
        wanted: the names of the columns.
        what: the beginning of the message, such as "the labels have".
        fix: the fix of the error.
    """
    missing = [name for name in wanted if name not in table.columns]
    if missing:
        raise InvalidValueError(
            f"{what} no column {', '.join(missing)}",
            found=", ".join(map(str, table.columns)),
            fix=fix,
        )


# The usual mistake is to pass the predictions, which are probabilities, as labels.
_LABELS_FIRST = "labels come first, predictions second; labels of pe.read_labels are 0 and 1"


def check_yes_or_no(table, names: Iterable[str], *, fix: str = _LABELS_FIRST) -> None:
    """Raise ValueError with this fix unless all labels of these columns are 0 or 1."""
    for name in names:
        wrong = ~table[name].isin([0, 1]).to_numpy()
        if wrong.any():
            raise InvalidValueError(
                f"{name} has {int(wrong.sum())} labels that are neither 0 nor 1",
                found=repr(table[name][wrong].tolist()[0]),
                fix=fix,
            )
