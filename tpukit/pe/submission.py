"""Write and read submission.csv of the challenge: one line per image, and nine per exam.

id,label
<SOPInstanceUID>,0.13
<StudyInstanceUID>_negative_exam_for_pe,0.81
"""

import os
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, PathNotFoundError
from tpukit.pe.challenge import exams_of
from tpukit.pe.consistency import broken_by
from tpukit.pe.labels import EXAM_LABELS, IMAGE, LABELS, STUDY
from tpukit.pe.rules import RULES

_EXAMS_A_PART = 500  # exams that are written at once, to limit the memory


def write_submission(table, path) -> Path:
    """Write submission.csv with one line per image and nine lines per exam; return its path.

    Until the file is complete, its name ends in .unfinished; then it replaces an older file.
    Numbers are written with all digits, so that a value just above 0.5 remains above 0.5.

    Args:
        table: a table of probabilities with one row per image, from `make_consistent`; see
            `challenge_loss`.
        path: the path of the file. Kaggle expects the name submission.csv in the working folder.

    Returns:
        The path.

    Raises:
        ValueError: an answer is not a probability, the rows of an exam have different answers for
            an exam label, or the answers of an exam break a rule of consistency.
    """
    import numpy as np
    import pandas as pd

    path = Path(path)
    exams = exams_of(table)
    _check_rules(exams, "the table", "pe.write_submission(pe.make_consistent(table), path)")
    images = table[IMAGE].to_numpy()
    # The rows of the table sorted by exam; those of exam k are by_exam[starts[k] : starts[k + 1]].
    by_exam = np.argsort(exams.exam, kind="stable")
    starts = np.concatenate([[0], exams.counts().cumsum()])
    count = len(exams.studies)
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "w", newline="") as file:
        file.write("id,label\n")
        for first in range(0, count, _EXAMS_A_PART):
            last = min(first + _EXAMS_A_PART, count)
            rows = by_exam[starts[first] : starts[last]]
            ids = [*images[rows], *_exam_ids(exams.studies[first:last])]
            values = np.concatenate([exams.images[rows], exams.answers[first:last].ravel()])
            part = pd.DataFrame({"id": ids, "label": values})
            part.to_csv(file, index=False, header=False)
    os.replace(unfinished, path)
    return path


def read_submission(path, images):
    """Read submission.csv, and check it as Kaggle does.

    `read_submission` checks that every id occurs once, that each label is a probability, and that
    no exam breaks a rule of consistency.

    Args:
        path: the path of the file.
        images: a table with the columns StudyInstanceUID and SOPInstanceUID and a row for every
            image to predict: the competition's test.csv, or labels.

    Returns:
        A table with one row per row of `images`, in the same order, with StudyInstanceUID,
        SOPInstanceUID and the ten `LABELS`: the predictions for `challenge_loss`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the columns are not id and label; an id is missing, unknown or listed twice; a
            label is missing, not a number, or outside [0, 1]; or an exam breaks a rule of
            consistency.
    """
    import numpy as np
    import pandas as pd

    lines, labels = _read_lines(path)
    exam, studies = pd.factorize(images[STUDY])
    # The questions in the order of the result: all images, then the nine of each exam.
    wanted = np.concatenate([images[IMAGE].to_numpy(object), _exam_ids(studies)])
    given = pd.Index(lines["id"])
    repeated = given[given.duplicated()]
    # get_indexer needs unique ids, and gives -1 for a question without an answer. If an id is
    # repeated, the error below ends the function.
    rows = given.drop_duplicates().get_indexer(wanted)
    absent = wanted[rows < 0]
    unknown = given[~given.isin(wanted)]
    if len(repeated) or len(absent) or len(unknown):
        problems = []
        for ids, problem in (
            (absent, "is missing"),
            (repeated, "is twice"),
            (unknown, "was not asked for"),
        ):
            problems += [f"{name} {problem}" for name in ids[:2]]
        exams = f"{len(studies):,} exams"
        raise InvalidValueError(
            f"{path} does not have one line for each id",
            found=f"{len(lines):,} lines for {len(wanted):,} ids: {', '.join(problems)}",
            fix=f"write a line for each of {len(images):,} images, and nine for each of {exams}",
        )
    values = labels[rows]
    of_images = values[: len(images)]
    of_exams = values[len(images) :].reshape(len(studies), len(EXAM_LABELS))
    columns = dict(zip(LABELS, [of_images, *of_exams[exam].T], strict=True))
    table = images[[STUDY, IMAGE]].reset_index(drop=True).assign(**columns)
    _check_rules(exams_of(table), path, "write what pe.make_consistent returns")
    return table


def _read_lines(path) -> tuple:
    """Return the lines of a submission as a table of text, and their labels, (N,) float64."""
    import numpy as np
    import pandas as pd

    if not Path(path).is_file():
        raise PathNotFoundError(
            f"there is no file {path}",
            fix="check the path, or write the file: pe.write_submission(predictions, path)",
        )
    lines = pd.read_csv(path, dtype=str, keep_default_na=False)
    if list(lines.columns) != ["id", "label"]:
        raise InvalidValueError(
            f"the columns of {path} are not id,label",
            found=",".join(map(str, lines.columns)),
            fix="write the file with pe.write_submission(table, path)",
        )
    # to_numeric only finds the texts that are numbers. Its values lose a digit with pandas 2.2, so
    # numpy converts the texts.
    is_number = pd.to_numeric(lines["label"], errors="coerce").notna()
    labels = lines["label"].where(is_number, "nan").to_numpy(np.float64)
    is_probability = (labels >= 0) & (labels <= 1)  # nan is not
    if not is_probability.all():
        row = int(is_probability.argmin())
        label = str(lines["label"].iloc[row]) or "nothing"
        raise InvalidValueError(
            f"{int((~is_probability).sum()):,} labels of {path} are not probabilities",
            found=f"{label} for {lines['id'].iloc[row]}",
            fix="write a number from 0 to 1 for every id; for logits, logits.sigmoid()",
        )
    return lines, labels


def _exam_ids(studies) -> list[str]:
    """Return the ids of the nine lines of each exam, exam by exam."""
    ids = []
    for study in studies:
        ids += [f"{study}_{name}" for name in EXAM_LABELS]
    return ids


def _check_rules(exams, source, fix: str) -> None:
    """Raise ValueError if the answers of an exam break a rule of consistency."""
    broken = {rule: which for rule, which in broken_by(exams).items() if which.any()}
    if not broken:
        return
    rule, which = next(iter(broken.items()))
    count = int(sum(broken.values()).astype(bool).sum())
    raise InvalidValueError(
        f"{count:,} of {len(exams.studies):,} exams of {source} contradict themselves",
        found=f"study {exams.studies[which.argmax()]} breaks rule {rule}, {RULES[rule]}",
        fix=fix,
    )
