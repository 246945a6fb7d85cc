"""submission.csv of the challenge: an `id` and a `label` for every image, and for every exam nine times."""

import os
from pathlib import Path

from tpukit.essentials.show import NoSuchFile, WrongValue
from tpukit.pe.challenge import IMAGE, STUDY, exams_of
from tpukit.pe.consistency import broken_by
from tpukit.pe.labels import EXAM_LABELS, LABELS
from tpukit.pe.rules import RULES

_EXAMS_A_PART = 500  # whose lines are in memory together


def write_submission(table, path) -> Path:
    """Write submission.csv: `<SOPInstanceUID>` for each image, `<StudyInstanceUID>_<label>` nine times for each exam.

    Written in parts, under another name until it is whole; to the last digit, so that what is just above 0.5 stays
    there.

    Args:
        table: a row for each image with probabilities, see `challenge_loss`; of `make_consistent`.
        path: of the file. On Kaggle its name is submission.csv, in the working folder.

    Returns:
        The path.

    Raises:
        ValueError: an answer is no probability, an exam has several, or they break a rule of consistency.
    """
    import numpy as np
    import pandas as pd

    path = Path(path)
    exams = exams_of(table)
    _check_rules(exams, "the table", "pe.write_submission(pe.make_consistent(table), path)")
    images = table[IMAGE].to_numpy()
    by_exam = np.argsort(exams.exam, kind="stable")
    starts = np.concatenate([[0], exams.counts().cumsum()])
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "w", newline="") as file:
        file.write("id,label\n")
        for first in range(0, len(exams.studies), _EXAMS_A_PART):
            part = slice(first, first + _EXAMS_A_PART)
            rows = by_exam[starts[first] : starts[min(first + _EXAMS_A_PART, len(exams.studies))]]
            ids = [*images[rows], *(f"{study}_{name}" for study in exams.studies[part] for name in EXAM_LABELS)]
            values = np.concatenate([exams.images[rows], exams.answers[part].ravel()])
            pd.DataFrame({"id": ids, "label": values}).to_csv(file, index=False, header=False)
    os.replace(unfinished, path)
    return path


def read_submission(path, images):
    """Read submission.csv and check it as the platform would: every id once, probabilities, and no contradictions.

    Args:
        path: of the file.
        images: StudyInstanceUID and SOPInstanceUID of every image that is to be answered: the competition's test.csv as
            a table, or labels.

    Returns:
        A row for each of the images, in their order, with StudyInstanceUID, SOPInstanceUID and the ten `LABELS`, as
        `challenge_loss` takes it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the columns are not id and label; an id is missing, unknown or there twice; a label is missing, no
            number, or outside [0, 1]; or an exam breaks a rule of consistency.
    """
    import numpy as np
    import pandas as pd

    if not Path(path).is_file():
        raise NoSuchFile(f"there is no file {path}", fix="pe.write_submission(pe.make_consistent(table), path)")
    lines = pd.read_csv(path, dtype=str, keep_default_na=False)
    if list(lines.columns) != ["id", "label"]:
        raise WrongValue(f"the columns of {path} are not id,label", found=f"{','.join(map(str, lines.columns))}")
    numbers = pd.to_numeric(lines["label"], errors="coerce").notna()  # its own values lose a digit with pandas 2.2
    labels = lines["label"].where(numbers, "nan").to_numpy(np.float64)
    bad = ~((labels >= 0) & (labels <= 1))  # NaN is neither
    if bad.any():
        row = int(bad.argmax())
        raise WrongValue(
            f"{int(bad.sum()):,} labels of {path} are no probabilities",
            found=f"{str(lines['label'].iloc[row]) or 'nothing'} for {lines['id'].iloc[row]}",
            fix="a number from 0 to 1 for every id: logits.sigmoid()",
        )
    exam, studies = pd.factorize(images[STUDY])
    wanted = np.concatenate(
        [images[IMAGE].to_numpy(object), [f"{study}_{name}" for study in studies for name in EXAM_LABELS]]
    )
    given = pd.Index(lines["id"])
    twice = given[given.duplicated()]
    rows = given.drop_duplicates().get_indexer(wanted) if len(twice) else given.get_indexer(wanted)
    absent, unknown = wanted[rows < 0], len(given) - len(twice) - int((rows >= 0).sum())
    if len(twice) or len(absent) or unknown:
        others = given[~given.isin(wanted)]
        wrong = (("is missing", absent), ("is twice", twice), ("was not asked for", others))
        few = ", ".join(f"{one} {what}" for what, ids in wrong for one in ids[:2])
        raise WrongValue(
            f"{path} does not answer every question once",
            found=f"{len(lines):,} lines for {len(wanted):,} ids: {few}",
            fix=f"a line for each of {len(images):,} images and nine for each of {len(studies):,} exams",
        )
    values = labels[rows]
    answers = values[len(images) :].reshape(len(studies), len(EXAM_LABELS))[exam]
    columns = dict(zip(LABELS, [values[: len(images)], *answers.T], strict=True))
    table = images[[STUDY, IMAGE]].reset_index(drop=True).assign(**columns)
    _check_rules(exams_of(table), path, "write what pe.make_consistent returns")
    return table


def _check_rules(exams, where, fix: str) -> None:
    broken = {rule: studies for rule, studies in broken_by(exams).items() if studies.any()}
    if broken:
        rule, which = next(iter(broken.items()))
        number = int(sum(broken.values()).astype(bool).sum())
        raise WrongValue(
            f"{number:,} of {len(exams.studies):,} exams of {where} contradict themselves",
            found=f"study {exams.studies[which.argmax()]} breaks rule {rule}, {RULES[rule]}",
            fix=fix,
        )
