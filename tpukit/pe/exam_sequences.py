"""Exams for a network that reads along the body: the same number of parts for all of them.

Exams of 60 and of 600 slices become equally long, so that a batch has a single shape. With 4 parts:

    6 slices, from the feet    0  1  2  3  4  5        3 slices    0  1  2
    part of each slice         0  0  1  2  2  3        slice of each part    0  0  1  2

The features of a part are the mean over its slices, followed by the maximum. An embolus on two
slices does not vanish in the maximum. If slices are fewer than parts, a slice is in several parts.
"""

from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError
from tpukit.pe.challenge import IMAGE, IMAGE_WEIGHT, STUDY
from tpukit.pe.exam_check import find_irregular
from tpukit.pe.labels import EXAM_LABELS, LABELS, SERIES, check_columns, check_yes_or_no


class _Pairs(NamedTuple):
    """Which slices of an exam belong to which parts, as pairs in the order of the body."""

    slices: object  # (n,) integers
    parts: object  # (n,) integers, ascending


class ExamSequences:
    """Exams as sequences of image features, all of the same length, for `core.batches`.

    Exams have different numbers of slices, but a TPU needs fixed shapes. So each exam is divided
    into the same number of parts, from the feet to the head. A part is a group of adjacent slices;
    in an exam with fewer slices than parts, a slice fills several parts.

    Item i is `(features, targets)`, or `features` alone if the table has no labels:

    - features: (slices, 2F) float32; the mean over the slices of a part, then their maximum.
    - targets: a dict for `exam_loss`. "answers" (9,) are the labels of the exam in the order of
      `EXAM_LABELS`. "images" (slices,) is the share of positive slices in each part, and
      "image_weight" (slices,) the weight of each part in the loss.

    Args:
        table: a row per image, in any order, as `index_images` and `index_dicom` return it: the
            three identifiers, `position`, and the ten `LABELS` or none of them.
        features: (N, F), of the image in each row of the table.
        slices: parts per exam.
        irregular: "raise" an error if an exam has two series, two slices at one place, or a gap
            because a slice is missing. "keep" uses its slices in the order of their positions, and
            prints how many exams are irregular. `check_exams` lists them before.

    Attributes:
        studies: (E,) StudyInstanceUIDs; exam i of the dataset is studies[i].

    Raises:
        ValueError: an exam is irregular, a position is missing, a label is missing or neither 0
            nor 1, or the features are not one row per row of the table.
    """

    def __init__(self, table, features, slices: int = 96, *, irregular: str = "raise"):
        import numpy as np
        import pandas as pd

        if irregular not in ("raise", "keep"):
            raise ValueError(f'irregular is "raise" or "keep", got {irregular!r}')
        self._has_labels = _check_table(table, features)
        self.slices = slices
        exam, self.studies = pd.factorize(table[STUDY], sort=True)
        position = table["position"].to_numpy(np.float64)
        self._order = np.lexsort((position, exam))  # by exam, then along the body
        self._starts = np.searchsorted(exam[self._order], np.arange(len(self.studies) + 1))
        _check_order(table, irregular)
        self._identifiers = table[[STUDY, IMAGE]].reset_index(drop=True)
        self._features = features
        if self._has_labels:
            self._labels = table[list(LABELS)].to_numpy(np.float32)[self._order]

    def __len__(self) -> int:
        return len(self.studies)

    def __getitem__(self, index: int):
        import numpy as np
        import torch

        start = self._starts[:-1][index]  # IndexError ends a loop over the exams
        end = self._starts[1:][index]
        pairs = self._divide(end - start)
        rows = self._order[start:end][pairs.slices]
        features = torch.as_tensor(self._features[rows], dtype=torch.float32).numpy()
        first = np.searchsorted(pairs.parts, np.arange(self.slices))  # pair of each part
        count = np.bincount(pairs.parts)[:, None]
        mean = np.add.reduceat(features, first) / count
        highest = np.maximum.reduceat(features, first)
        pooled = torch.from_numpy(np.concatenate([mean, highest], axis=1, dtype=np.float32))
        if not self._has_labels:
            return pooled
        return pooled, self._targets(self._labels[start:end], pairs, first)

    def _targets(self, labels, pairs: _Pairs, first) -> dict:
        """Return the targets of an exam: `labels` are (count, 10) of its slices."""
        import numpy as np
        import torch

        present = labels[:, 0]
        count = np.bincount(pairs.parts)
        images = np.add.reduceat(present[pairs.slices], first) / count
        # As in the challenge, each image has the weight of its exam's share of positive images. A
        # slice in several parts is divided among them.
        share_of_slice = 1 / np.bincount(pairs.slices)[pairs.slices]
        weight = IMAGE_WEIGHT * present.mean() * np.add.reduceat(share_of_slice, first)
        return {
            "answers": torch.from_numpy(labels[0, 1:].copy()),
            "images": torch.from_numpy(images.astype(np.float32)),
            "image_weight": torch.from_numpy(weight.astype(np.float32)),
        }

    def _divide(self, count: int) -> _Pairs:
        """Return all slices with their parts; if slices are fewer, all parts with their slices."""
        import numpy as np

        if count >= self.slices:
            slices = np.arange(count)
            return _Pairs(slices, slices * self.slices // count)
        parts = np.arange(self.slices)
        return _Pairs(parts * count // self.slices, parts)

    def table(self, outputs):
        """Return the answers for every image, for `challenge_loss` and `make_consistent`.

        Args:
            outputs: logits of an `ExamNetwork` for all exams, as `predict` returns them: (E, 9)
                "answers" and (E, S) "images".

        Returns:
            A DataFrame with a row per row of the given table, in its order: StudyInstanceUID,
            SOPInstanceUID and the ten `LABELS` as probabilities.
        """
        import numpy as np
        from scipy.special import expit

        answers = expit(np.asarray(outputs["answers"], np.float64))
        exam = np.empty(len(self._order), np.int64)
        exam[self._order] = np.repeat(np.arange(len(self)), np.diff(self._starts))
        columns = [expit(self.to_slices(outputs["images"])), *answers[exam].T]
        return self._identifiers.assign(**dict(zip(LABELS, columns, strict=True)))

    def to_slices(self, values):
        """Return (E, S) numbers of parts as (N,) numbers, one per row of the table.

        A slice in several parts gets their mean.
        """
        import numpy as np

        values = np.asarray(values, np.float64)
        of_rows = np.empty(len(self._order))
        for exam, (start, end) in enumerate(zip(self._starts[:-1], self._starts[1:], strict=True)):
            pairs = self._divide(end - start)
            sums = np.bincount(pairs.slices, weights=values[exam, pairs.parts])
            of_rows[self._order[start:end]] = sums / np.bincount(pairs.slices)
        return of_rows


def _check_table(table, features) -> bool:
    """Raise unless rows are complete and match the features; return whether they have labels."""
    import numpy as np

    has_labels = any(name in table.columns for name in LABELS)
    needed = [STUDY, SERIES, IMAGE, "position"]
    if has_labels:
        needed += LABELS
    source = "the table of pe.index_dicom or pe.index_images"
    fix = f"{source}, with all ten of pe.LABELS or none of them"
    check_columns(table, needed, "the table has", fix=fix)
    for name in needed:
        empty = table[name].isna().to_numpy()
        if empty.any():
            row = table.iloc[int(empty.argmax())]
            reason = "an exam with a part of its slices is another exam"
            raise InvalidValueError(
                f"{name} is missing in {int(empty.sum())} rows",
                found=f"image {row[IMAGE]} of study {row[STUDY]}",
                fix=f"fill it in, or leave out the whole exam: {reason}",
            )
    if len(features) != len(table) or getattr(features, "ndim", 0) != 2:
        rows = f"{len(table)} rows of the table, got {np.shape(features)}"
        raise InvalidValueError(
            f"there is one row of features for each of the {rows}",
            fix="features of the same images in the same order: table.iloc[images.rows]",
        )
    if has_labels:
        _check_labels(table)
    return has_labels


def _check_labels(table) -> None:
    """Raise unless labels are 0 or 1, and those of an exam the same in all of its rows."""
    check_yes_or_no(table, LABELS)
    names = list(EXAM_LABELS)
    first = table.groupby(STUDY)[names].transform("first").to_numpy()
    differs = (table[names].to_numpy() != first).any(axis=1)
    if differs.any():
        raise InvalidValueError(
            "an exam has several answers to one question",
            found=f"study {table[STUDY].iloc[int(differs.argmax())]}",
            fix="labels of pe.read_labels, which checks",
        )


def _check_order(table, irregular: str) -> None:
    """Raise for exams that are not a single series with even steps, or print how many there are."""
    for found, evidence, fix in find_irregular(table):
        if irregular == "raise":
            keep = 'take the exams as they are: ExamSequences(..., irregular="keep")'
            raise InvalidValueError(
                f"some exams are irregular: {found}",
                found=evidence,
                fix=f"{fix}; or {keep}",
            )
        print(f"{found}, and are taken as they are; {evidence}")
