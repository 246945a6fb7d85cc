"""Turn exams into sequences of equal length, for a network that reads along the body.

Each exam is divided into the same number of parts, so that exams of 60 and of 600 slices have one
shape in a batch. With 4 parts:

    6 slices, from the feet    0  1  2  3  4  5        3 slices    0  1  2
    part of each slice         0  0  1  2  2  3        slice of each part    0  0  1  2

The features of a part are the mean over its slices, followed by their maximum. The maximum shows an
embolus on one or two slices, which the mean may hide.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError
from tpukit.pe.challenge import IMAGE, IMAGE_WEIGHT, STUDY
from tpukit.pe.exam_check import find_irregular
from tpukit.pe.labels import EXAM_LABELS, LABELS, SERIES, check_columns, check_yes_or_no


class _Pairs(NamedTuple):
    """The pairs of a slice and a part that contains it, for one exam, along the body."""

    slices: object  # (n,) integers
    parts: object  # (n,) integers, ascending


class ExamSequences:
    """Exams as sequences of image features, all of the same length, for `core.batches`.

    Exams have different numbers of slices, but a TPU needs fixed shapes. So each exam is divided
    into the same number of parts, from the feet to the head. A part is a group of adjacent slices;
    in an exam with fewer slices than parts, a slice fills several parts.

    Item i is `(features, targets)`, or `features` alone if the table has no labels:

    - features: (slices, 2F) float32; for each part, F means over its slices, then F maxima.
    - targets: a dict of float32 for `exam_loss`. "answers", (A,), are the labels of the exam in the
      order of `answers`. "images", (slices,), is the share of positive slices in each part.
      "image_weight", (slices,), is the weight of each part in the loss.

    Args:
        table: a table with one row per image, in any order, as from `index_images` and
            `index_dicom`: the identifiers of study, series and image, `position`, and all columns
            of labels or none.
        features: (N, F) array or tensor, the features of the image in each row of the table.
        slices: the number of parts per exam.
        irregular: "raise" for a ValueError if an exam is irregular, as `check_exams` defines it:
            two series, two slices at the same position, a missing slice, or another spacing. "keep"
            to use its slices in the order of their positions, and print the number of such exams.
        answers: the columns with the labels of an exam.
        image_label: the column with the label of each image; None if only exams have labels, so
            that "image_weight" is 0.

    Attributes:
        studies: (E,) StudyInstanceUIDs; exam i of the dataset is studies[i].

    Raises:
        ValueError: an exam is irregular, a position is missing, a label is missing or neither 0
            nor 1, or the features do not have one row per row of the table.
    """

    def __init__(
        self,
        table,
        features,
        slices: int = 96,
        *,
        irregular: str = "raise",
        answers: Sequence[str] = EXAM_LABELS,
        image_label: str | None = LABELS[0],
    ):
        import numpy as np
        import pandas as pd

        if irregular not in ("raise", "keep"):
            raise ValueError(f'irregular must be "raise" or "keep", got {irregular!r}')
        self._answers = list(answers)
        self._image_label = image_label
        self._has_labels = _check_table(table, features, self._answers, image_label)
        self.slices = slices
        # The number of the exam of each row, and the identifiers by number.
        exam, self.studies = pd.factorize(table[STUDY], sort=True)
        position = table["position"].to_numpy(np.float64)
        self._order = np.lexsort((position, exam))  # by exam, then along the body
        # The rows of exam i are order[starts[i] : starts[i + 1]].
        self._starts = np.searchsorted(exam[self._order], np.arange(len(self.studies) + 1))
        _check_order(table, irregular)
        self._identifiers = table[[STUDY, IMAGE]].reset_index(drop=True)
        self._features = features
        first = self._order[self._starts[:-1]]
        name = "exam" if "exam" in table else STUDY
        self._names = pd.Index(table[name].iloc[first], name=name)
        if self._has_labels:
            # In the same order, so that the labels of an exam are adjacent.
            self._labels = table[self._answers].to_numpy(np.float32)[self._order]
            self._present = np.zeros(len(table), np.float32)
            if image_label is not None:
                self._present = table[image_label].to_numpy(np.float32)[self._order]

    def __len__(self) -> int:
        return len(self.studies)

    def __getitem__(self, index: int):
        import numpy as np
        import torch

        start = self._starts[:-1][index]  # IndexError ends a loop over the exams
        end = self._starts[1:][index]
        pairs = self._divide(end - start)
        rows = self._order[start:end][pairs.slices]
        features = torch.as_tensor(self._features[rows], dtype=torch.float32).numpy(force=True)
        first = np.searchsorted(pairs.parts, np.arange(self.slices))  # the first pair of each part
        count = np.bincount(pairs.parts)[:, None]  # the number of slices of each part, (S, 1)
        # `reduceat` sums from each first pair to the next one, without a loop over the parts.
        mean = np.add.reduceat(features, first) / count
        highest = np.maximum.reduceat(features, first)
        pooled = torch.from_numpy(np.concatenate([mean, highest], axis=1, dtype=np.float32))
        if not self._has_labels:
            return pooled
        # All rows of an exam have the same answers, see `_check_answers`.
        answers = torch.from_numpy(self._labels[start].copy())
        return pooled, {"answers": answers} | self._targets(self._present[start:end], pairs, first)

    def _targets(self, present, pairs: _Pairs, first) -> dict:
        """Return the targets of the parts of an exam.

        Args:
            present: (n,) the labels of the exam's slices, along the body.
            pairs: the pairs of slices and parts.
            first: (S,) the index of the first pair of each part.
        """
        import numpy as np
        import torch

        count = np.bincount(pairs.parts)
        images = np.add.reduceat(present[pairs.slices], first) / count
        # As in the challenge, the weight of an image is the share of positive images in its exam.
        # If a slice is in several parts, its weight is divided among them.
        share_of_slice = 1 / np.bincount(pairs.slices)[pairs.slices]
        weight = IMAGE_WEIGHT * present.mean() * np.add.reduceat(share_of_slice, first)
        return {
            "images": torch.from_numpy(images.astype(np.float32)),
            "image_weight": torch.from_numpy(weight.astype(np.float32)),
        }

    def _divide(self, count: int) -> _Pairs:
        """Return the pairs of slices and parts for an exam of `count` slices.

        Each slice is in one pair; if there are fewer slices than parts, each part is in one pair.
        """
        import numpy as np

        if count >= self.slices:
            slices = np.arange(count)
            # Rounded down, so that the sizes of parts differ by at most one slice.
            return _Pairs(slices, slices * self.slices // count)
        parts = np.arange(self.slices)
        return _Pairs(parts * count // self.slices, parts)

    def table(self, outputs):
        """Return the predicted probabilities of every image and its exam, for `challenge_loss`.

        Args:
            outputs: the logits of an `ExamNetwork` for all exams, as `predict` returns them:
                "answers", (E, A), and "images", (E, S).

        Returns:
            A DataFrame with the rows of the table of `ExamSequences`, in the same order, for
            `challenge_loss` and `make_consistent`. Its columns are StudyInstanceUID,
            SOPInstanceUID, and the probabilities of the image label and of each answer.
        """
        import numpy as np
        from scipy.special import expit

        answers = expit(np.asarray(outputs["answers"], np.float64))
        exam = np.empty(len(self._order), np.int64)
        exam[self._order] = np.repeat(np.arange(len(self)), np.diff(self._starts))
        columns = {}
        if self._image_label is not None:
            columns[self._image_label] = expit(self.to_slices(outputs["images"]))
        # Each row gets the answers of its exam.
        columns |= dict(zip(self._answers, answers[exam].T, strict=True))
        return self._identifiers.assign(**columns)

    def by_exam(self, outputs):
        """Return the predicted probabilities of every exam.

        For a CSV file: `by_exam(outputs).to_csv(path)`.

        Args:
            outputs: as for `table`.

        Returns:
            A DataFrame with one row per exam of `studies` and one column per answer. Its index is
            the column `exam` of the table of `ExamSequences`, or StudyInstanceUID if the table has
            no such column.
        """
        import numpy as np
        import pandas as pd
        from scipy.special import expit

        answers = expit(np.asarray(outputs["answers"], np.float64))
        return pd.DataFrame(answers, self._names, self._answers)

    def to_slices(self, values):
        """Convert one value per part of each exam, (E, S), to one value per row of the table.

        A slice gets the value of its part, or the mean of the values if it fills several parts. The
        result is (N,) float64.
        """
        import numpy as np

        values = np.asarray(values, np.float64)
        of_rows = np.empty(len(self._order))
        for exam, (start, end) in enumerate(zip(self._starts[:-1], self._starts[1:], strict=True)):
            pairs = self._divide(end - start)
            sums = np.bincount(pairs.slices, weights=values[exam, pairs.parts])
            of_rows[self._order[start:end]] = sums / np.bincount(pairs.slices)
        return of_rows


def _check_table(table, features, answers: list[str], image_label: str | None) -> bool:
    """Raise ValueError unless rows are complete and match the features; return True for labels."""
    import numpy as np

    names = [*answers]
    if image_label is not None:
        # The label of images comes first, as in `LABELS`.
        names.insert(0, image_label)
    has_labels = any(name in table.columns for name in names)
    needed = [STUDY, SERIES, IMAGE, "position"]
    if has_labels:
        needed += names
    source = "the table of pe.index_dicom or pe.index_images"
    fix = f"{source}, with all ten of pe.LABELS or none of them"
    if answers != list(EXAM_LABELS):
        fix = 'labels of pe.read_exams: answers=["x"], and image_label="x_on_image" or None'
    check_columns(table, needed, "the table has", fix=fix)
    for name in needed:
        empty = table[name].isna().to_numpy()
        if empty.any():
            row = table.iloc[int(empty.argmax())]
            reason = "because an exam needs all of its slices"
            raise InvalidValueError(
                f"{name} is missing in {int(empty.sum())} rows",
                found=f"image {row[IMAGE]} of study {row[STUDY]}",
                fix=f"fill {name} in; or leave out the whole exam, {reason}",
            )
    if len(features) != len(table) or getattr(features, "ndim", 0) != 2:
        rows = f"{len(table)} rows of the table, got {np.shape(features)}"
        raise InvalidValueError(
            f"features must have one row for each of the {rows}",
            fix="pass only the images' rows of the table, in their order: table.iloc[images.rows]",
        )
    if has_labels:
        check_yes_or_no(table, names)
        _check_answers(table, answers)
    return has_labels


def _check_answers(table, names: list[str]) -> None:
    """Raise ValueError unless the labels of each exam are the same in all of its rows."""
    first = table.groupby(STUDY)[names].transform("first").to_numpy()
    differs = (table[names].to_numpy() != first).any(axis=1)
    if differs.any():
        raise InvalidValueError(
            "the rows of an exam have different answers for an exam label",
            found=f"study {table[STUDY].iloc[int(differs.argmax())]}",
            fix='correct the study\'s labels; pe.read_labels("train.csv") lists all such studies',
        )


def _check_order(table, irregular: str) -> None:
    """Raise ValueError for irregular exams, or print their number; see `ExamSequences`."""
    for found, evidence, fix in find_irregular(table):
        if irregular == "raise":
            keep = 'take the exams as they are: ExamSequences(..., irregular="keep")'
            raise InvalidValueError(
                f"some exams are irregular: {found}",
                found=evidence,
                fix=f"{fix}; or {keep}",
            )
        print(f"{found}; their slices are used unchanged: {evidence}")
