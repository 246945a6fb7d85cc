"""The labels of the RSNA STR 2020 pulmonary-embolism set: read, check, and split into folds by study."""

import warnings
from collections.abc import Iterable
from pathlib import Path

from tpukit.essentials.show import NoSuchFile, WrongValue, first_few
from tpukit.pe.rules import RULES, broken_rules

IDS = STUDY, SERIES, IMAGE = "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID"
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
QUALITY = ("qa_motion", "qa_contrast", "flow_artifact", "true_filling_defect_not_pe")  # are not predicted
LABELS = tuple(name for name in COLUMNS if name not in IDS + QUALITY)
EXAM_LABELS = LABELS[1:]  # the same on every image of a study; pe_present_on_image belongs to one image
# What a person says for each label, in the order of LABELS: `names=` of the figures takes it.
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


def read_labels(path, *, inconsistent: str = "raise"):
    """Read train.csv, and check that its labels are complete and consistent.

    The labels of an exam are the same on all of its images and break none of `tpukit.pe.rules.RULES`.

    Args:
        path: train.csv, or the folder that contains it.
        inconsistent: "raise" an error if studies break a rule, or "drop" these studies and print how many.

    Returns:
        A DataFrame with all columns of the file, in the order of the file; labels are uint8.

    Raises:
        FileNotFoundError: there is no such file, or no train.csv in the folder.
        ValueError: the file is empty, a column or value is missing, a label is neither 0 nor 1, an image is listed
            twice, or the labels of a study contradict each other.
    """
    import pandas as pd

    if inconsistent not in ("raise", "drop"):
        raise ValueError(f'inconsistent is "raise" or "drop", got {inconsistent!r}')
    path = Path(path)
    file = path / "train.csv" if path.is_dir() else path
    if not file.is_file():
        there = sorted(p.name for p in path.iterdir())[:5] if path.is_dir() else "no such file or folder"
        raise NoSuchFile(
            f"there is no train.csv at {path}",
            found=there,
            fix="pass the folder of the competition's data that contains train.csv, or make one: pe.phantom(folder)",
        )
    try:
        with warnings.catch_warnings():
            # A field too many in every row would make the first column an index, and shift the others by one.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(file, dtype=dict.fromkeys(IDS, str), index_col=False)
    except pd.errors.EmptyDataError:
        raise WrongValue(f"{file} is empty", fix="copy it again from the competition's data") from None
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise WrongValue(
            f"{file} is no table of commas in UTF-8",
            found=f"{_first_bytes(file)}; {str(error).strip()}",
            fix="copy it again from the competition's data, or save it as UTF-8 with as many fields in each row",
        ) from error
    _check_values(table, file)
    table = table.astype(dict.fromkeys(COLUMNS[3:], "uint8"))
    wrong = _contradictions(table)
    if not wrong:
        return table
    studies, of = set().union(*wrong.values()), table["StudyInstanceUID"].nunique()
    lines = [f"{len(found)} {words}: {first_few(found)}" for words, found in wrong.items()]
    if inconsistent == "raise":
        raise WrongValue(
            f"{len(studies)} of {of} studies in {file} have labels that contradict each other",
            found="\n".join(lines),
            fix='correct these rows, or leave the studies out with read_labels(path, inconsistent="drop")',
        )
    print(f"left out {len(studies)} of {of} studies whose labels contradict each other: " + "; ".join(lines))
    return table[~table.StudyInstanceUID.isin(studies)].reset_index(drop=True)


def assign_folds(labels, folds: int = 5, *, stratify: str | None = None):
    """Add a column `fold`, 0 to folds - 1, so that all images of a study are in the same one.

    The same table gives the same folds every time; all folds have about the same number of images.

    Args:
        labels: as `read_labels` returns them.
        folds: how many.
        stratify: a column of which all folds are to have about the same share, such as "pe_present_on_image".

    Raises:
        ValueError: folds is below 2, there are fewer studies than folds, or no such column.
    """
    import numpy as np
    import pandas as pd
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    if stratify is not None and stratify not in labels.columns:
        raise WrongValue(
            f"the table has no column {stratify!r} to stratify by",
            found=", ".join(map(str, labels.columns)),
            fix='stratify="pe_present_on_image"',
        )

    study, names = pd.factorize(labels["StudyInstanceUID"], sort=True)  # a sort of all images would take seconds
    studies = len(names)
    if not 2 <= folds <= studies:
        least = "" if studies > 1 else "; this takes at least two studies"
        raise WrongValue(
            f"{studies} studies cannot be split into {folds} folds", fix=f"pass folds between 2 and {studies}{least}"
        )
    # By study: neighbouring slices are nearly the same image, and a split between them would hide overfitting.
    fold = np.empty(len(labels), np.int8)
    splitter = GroupKFold(folds) if stratify is None else StratifiedGroupKFold(folds)
    classes = None if stratify is None else labels[stratify]
    for number, (_, rows) in enumerate(splitter.split(study, classes, groups=study)):
        fold[rows] = number
    return labels.assign(fold=fold)


def _first_bytes(file) -> str:
    with open(file, "rb") as begun:
        start = begun.read(4)
    kinds = {b"\x1f\x8b": "gzip", b"PK": "a zip archive", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
    return kinds.get(start[:2], f"it begins with {start!r}")


def _check_values(table, file) -> None:
    """Raise ValueError unless all columns are present and every value is valid."""
    import pandas as pd

    fix = "this needs the competition's train.csv with its 17 columns; test.csv and submissions have fewer"
    check_columns(table, COLUMNS, f"{file} has", fix=fix)
    if table.empty:
        raise WrongValue(f"{file} has a header but no rows", fix="copy it again from the competition's data")
    for name in COLUMNS:
        rows = table.index[table[name].isna()]
        if len(rows):
            raise WrongValue(
                f"{name} has {len(rows)} missing values in {file}",
                found=f"rows {first_few(rows)} (counted from 0, header left out)",
                fix=f'fill these rows in, or drop them: table.dropna(subset=["{name}"]).to_csv(file, index=False)',
            )
    for name in COLUMNS[3:]:
        # A single word in a column makes pandas read the whole column as text.
        rows = table.index[~pd.to_numeric(table[name], errors="coerce").isin([0, 1])]
        if len(rows):
            found = first_few(f"{table.at[row, name]} in row {row}" for row in rows)
            raise WrongValue(
                f"{name} has {len(rows)} labels that are neither 0 nor 1 in {file}",
                found=f"{found} (counted from 0, header left out)",
                fix="correct these rows; a label says yes (1) or no (0)",
            )
    twice = table.index[table["SOPInstanceUID"].duplicated()]
    if len(twice):
        found = first_few(f"{table.SOPInstanceUID[row]} in row {row}" for row in twice)
        raise WrongValue(
            f"{len(twice)} rows of {file} list an image that an earlier row lists",
            found=f"{found} (counted from 0, header left out)",
            fix='table.drop_duplicates("SOPInstanceUID").to_csv(file, index=False), if the rows agree',
        )


def check_columns(table, wanted: Iterable[str], what: str, *, fix: str = "") -> None:
    """Raise WrongValue unless a table has all these columns; `what` begins the message: "the labels have"."""
    if missing := [name for name in wanted if name not in table.columns]:
        raise WrongValue(f"{what} no column {', '.join(missing)}", found=", ".join(map(str, table.columns)), fix=fix)


def check_yes_or_no(table, names: Iterable[str]) -> None:
    """Raise WrongValue unless all labels of these columns are 0 or 1: a probability in their place is a prediction."""
    for name in names:
        wrong = ~table[name].isin([0, 1]).to_numpy()
        if wrong.any():
            raise WrongValue(
                f"{name} has {int(wrong.sum())} labels that are neither 0 nor 1",
                found=f"{table[name].iloc[int(wrong.argmax())]}, as predictions have",
                fix="labels come first, predictions second; labels of pe.read_labels are 0 and 1",
            )


def _contradictions(table) -> dict[str, list[str]]:
    """Return what is wrong with the labels of studies, in words, with these studies."""
    groups = table.groupby("StudyInstanceUID", sort=False)[list(LABELS)]
    exam, low = groups.max(), groups.min()
    found = {f"studies where {name} varies": exam[name] != low[name] for name in EXAM_LABELS}
    broken = broken_rules(exam == 1, exam.pe_present_on_image == 1)
    found |= {f'against rule {rule}, "{RULES[rule]}"': mask for rule, mask in broken.items()}
    return {words: exam.index[mask].tolist() for words, mask in found.items() if mask.any()}
