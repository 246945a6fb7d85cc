"""Exams for a network that reads along the body: the features of every slice, in the order of the body."""

from tpukit.essentials.show import WrongValue
from tpukit.pe.challenge import IMAGE, IMAGE_WEIGHT, STUDY
from tpukit.pe.exam_check import find_irregular
from tpukit.pe.labels import EXAM_LABELS, LABELS, SERIES, check_columns, check_yes_or_no


class ExamSequences:
    """A map-style dataset of exams, for `core.batches`: the slices of each, divided into the same number of parts.

    `[i]` is `(features, targets)`: (slices, 2F) float32, from the feet to the head, and what `exam_loss` takes:
    "answers" (9,) in the order of `EXAM_LABELS`, "images" (slices,) in [0, 1], and "image_weight" (slices,). Without
    labels it is the features alone.

    Exams of 60 and of 600 slices become equally long, so that a batch has one shape, and every slice has its say: a
    part is the mean of the features of its slices, and beside it their maximum, in which an embolus of two slices is
    not lost. Where slices are fewer than parts, each stands in several.

    Args:
        table: a row for each image: the three identifiers, `position`, and the ten `LABELS` or none of them; as
            `index_images` and `index_dicom` return it, in any order.
        features: (N, F), of the image in each row of the table.
        slices: parts of an exam.
        irregular: "raise" an error if an exam has two series, two slices at one place, or a gap where a slice is
            missing; or "keep" it, its slices in the order of their positions, and print how many there are.
            `check_exams` says it of a table before anything is trained.

    Attributes:
        studies: (E,) their StudyInstanceUIDs; exam i of the dataset is studies[i].

    Raises:
        ValueError: an exam is irregular, a position is missing, a label is missing or neither 0 nor 1, or there is not
            one row of features for each row of the table.
    """

    def __init__(self, table, features, slices: int = 96, *, irregular: str = "raise"):
        import numpy as np
        import pandas as pd

        if irregular not in ("raise", "keep"):
            raise ValueError(f'irregular is "raise" or "keep", got {irregular!r}')
        self._labelled = _check_table(table, features)
        self.slices = slices
        exam, self.studies = pd.factorize(table[STUDY], sort=True)
        position = table["position"].to_numpy(np.float64)
        self._order = np.lexsort((position, exam))  # by exam, then along the body
        self._starts = np.searchsorted(exam[self._order], np.arange(len(self.studies) + 1))
        _check_order(table, irregular)
        self._identifiers = table[[STUDY, IMAGE]].reset_index(drop=True)
        self._features = features
        if self._labelled:
            self._labels = table[list(LABELS)].to_numpy(np.float32)[self._order]

    def __len__(self) -> int:
        return len(self.studies)

    def __getitem__(self, index: int):
        import numpy as np
        import torch

        start, end = self._starts[:-1][index], self._starts[1:][index]  # IndexError ends a loop over the exams
        slices, parts = self._divide(end - start)
        begin, count = np.searchsorted(parts, np.arange(self.slices)), np.bincount(parts)[:, None]
        features = torch.as_tensor(self._features[self._order[start:end][slices]], dtype=torch.float32).numpy()
        mean, most = np.add.reduceat(features, begin) / count, np.maximum.reduceat(features, begin)
        pooled = torch.from_numpy(np.concatenate([mean, most], axis=1, dtype=np.float32))
        if not self._labelled:
            return pooled
        labels = self._labels[start:end]
        # As the challenge has it: each image weighs as the exam's share of positive ones, whichever part it fell to.
        weight = IMAGE_WEIGHT * labels[:, 0].mean() * np.add.reduceat(1 / np.bincount(slices)[slices], begin)
        images = np.add.reduceat(labels[slices, 0], begin) / count[:, 0]
        return pooled, {
            "answers": torch.from_numpy(labels[0, 1:].copy()),
            "images": torch.from_numpy(images.astype(np.float32)),
            "image_weight": torch.from_numpy(weight.astype(np.float32)),
        }

    def _divide(self, count: int) -> tuple:
        """Return which slice falls to which part: all slices, or, where these are fewer, all parts with one each."""
        import numpy as np

        if count >= self.slices:
            return np.arange(count), np.arange(count) * self.slices // count
        return np.arange(self.slices) * count // self.slices, np.arange(self.slices)

    def table(self, outputs):
        """Return the answers for every image, as `challenge_loss`, `make_consistent` and `write_submission` take them.

        Args:
            outputs: what `predict` returns for all exams, an `ExamNetwork`'s logits: (E, 9) "answers", (E, S) "images".

        Returns:
            A row for each row of the table given, in its order: StudyInstanceUID, SOPInstanceUID and the ten `LABELS`,
            probabilities.
        """
        import numpy as np
        from scipy.special import expit

        answers = expit(np.asarray(outputs["answers"], np.float64))
        exam = np.empty(len(self._order), np.int64)
        exam[self._order] = np.repeat(np.arange(len(self)), np.diff(self._starts))
        columns = [expit(self.to_slices(outputs["images"])), *answers[exam].T]
        return self._identifiers.assign(**dict(zip(LABELS, columns, strict=True)))

    def to_slices(self, values):
        """Return (E, S) numbers of parts as (N,), one for each row of the table: that of the part it fell to."""
        import numpy as np

        values, of_rows = np.asarray(values, np.float64), np.empty(len(self._order))
        for exam, (start, end) in enumerate(zip(self._starts[:-1], self._starts[1:], strict=True)):
            slices, parts = self._divide(end - start)
            sums = np.bincount(slices, weights=values[exam, parts])  # of several parts, where slices are fewer
            of_rows[self._order[start:end]] = sums / np.bincount(slices)
        return of_rows


def _check_table(table, features) -> bool:
    """Raise ValueError unless rows are complete and match the features; return whether they are labelled."""
    import numpy as np

    given = [name for name in LABELS if name in table.columns]
    needed = [STUDY, SERIES, IMAGE, "position", *(LABELS if given else ())]
    fix = "the table of pe.index_dicom or pe.index_images, with all ten of pe.LABELS or none of them"
    check_columns(table, needed, "the table has", fix=fix)
    for name in needed:
        empty = table[name].isna().to_numpy()
        if empty.any():
            row = table.iloc[int(empty.argmax())]
            raise WrongValue(
                f"{name} is missing in {int(empty.sum())} rows",
                found=f"image {row[IMAGE]} of study {row[STUDY]}",
                fix="fill it in, or leave out the whole exam: an exam with a part of its slices is another exam",
            )
    if len(features) != len(table) or getattr(features, "ndim", 0) != 2:
        raise WrongValue(
            f"there is one row of features for each of the {len(table)} rows of the table, got {np.shape(features)}",
            fix="features of the same images in the same order: table.iloc[images.rows]",
        )
    if given:
        check_yes_or_no(table, LABELS)
        answers = table[list(EXAM_LABELS)].to_numpy()
        vary = (answers != table.groupby(STUDY)[list(EXAM_LABELS)].transform("first").to_numpy()).any(axis=1)
        if vary.any():
            raise WrongValue(
                "an exam has several answers to one question",
                found=f"study {table[STUDY].iloc[int(vary.argmax())]}",
                fix="labels of pe.read_labels, which checks",
            )
    return bool(given)


def _check_order(table, irregular: str) -> None:
    """Raise ValueError for exams whose slices are not one series with even steps, or say how many there are."""
    for what, evidence, fix in find_irregular(table):
        if irregular == "raise":
            fix += '; or take the exams as they are: ExamSequences(..., irregular="keep")'
            raise WrongValue(f"some exams are irregular: {what}", found=evidence, fix=fix)
        print(f"{what}, and are taken as they are; {evidence}")
