"""Compute the challenge's score: the weighted log loss of all images and all exams.

The weights of an exam with four images, of which two are positive, are

    its nine answers    EXAM_WEIGHTS, 1.0 in total
    each image          IMAGE_WEIGHT x 2 / 4 = 0.037, 0.147 in total

In an exam without a positive image, only the nine answers count.

Source of the weights: the evaluation page of the competition "RSNA STR Pulmonary Embolism
Detection" (Kaggle, 2020).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tpukit.essentials.display import InvalidValueError
from tpukit.pe.labels import EXAM_LABELS, IMAGE, LABELS, STUDY, check_columns, check_yes_or_no

# The weights on the competition's evaluation page.
EXAM_WEIGHTS = {
    "negative_exam_for_pe": 0.0736196319,
    "rv_lv_ratio_gte_1": 0.2346625767,
    "rv_lv_ratio_lt_1": 0.0782208589,
    "leftsided_pe": 0.06257668712,
    "chronic_pe": 0.1042944785,
    "rightsided_pe": 0.06257668712,
    "acute_and_chronic_pe": 0.1042944785,
    "central_pe": 0.1877300613,
    "indeterminate": 0.09202453988,
}
WEIGHTS = [EXAM_WEIGHTS[name] for name in EXAM_LABELS]
# An image's weight is this times the share of positive images in its exam.
IMAGE_WEIGHT = 0.07361963
_LEAST = 1e-15  # probabilities are clipped here: a wrong 0 would have an infinite log loss
_SAME = 1e-6  # the answers in the rows of an exam may differ this much, by rounding


@dataclass(frozen=True)
class Exams:
    """The answers in a table with N rows, one per image, and E exams."""

    studies: object  # (E,) StudyInstanceUIDs, in order of appearance
    answers: object  # (E, 9) float64 in [0, 1], in the order of `EXAM_LABELS`
    images: object  # (N,) float64 in [0, 1], `pe_present_on_image` of each row of the table
    exam: object  # (N,) integers, the index of each row's exam in `studies`

    def sums(self, values):
        """Add up `values`, one per image (N,), within each exam; return the sums, (E,)."""
        import numpy as np

        return np.bincount(self.exam, weights=values, minlength=len(self.studies))

    def counts(self):
        """Return the number of images of each exam, (E,)."""
        import numpy as np

        return np.bincount(self.exam, minlength=len(self.studies))


def exams_of(table, name: str = "table") -> Exams:
    """Arrange the rows of a table by exam, and check the values of the labels.

    Args:
        table: a table with one row per image and the columns StudyInstanceUID, SOPInstanceUID, and
            the ten `LABELS` with probabilities. The nine exam labels must be the same in all rows
            of an exam, as in the table of `read_labels`.
        name: the name of the table, for messages.

    Raises:
        ValueError: a column is missing, an image occurs twice, an answer is missing or outside
            [0, 1], or the rows of an exam have different answers for an exam label.
    """
    import numpy as np
    import pandas as pd

    ids = "with its StudyInstanceUID, SOPInstanceUID and the ten labels of pe.LABELS"
    fix = f"a row for each image, {ids}"
    check_columns(table, (STUDY, IMAGE, *LABELS), f"the {name} has", fix=fix)
    repeated = table[IMAGE].duplicated()
    if repeated.any():
        raise InvalidValueError(
            f"{int(repeated.sum())} images occur twice in the {name}",
            found=table[IMAGE].iloc[int(repeated.argmax())],
            fix='if the two rows of an image are equal: table.drop_duplicates("SOPInstanceUID")',
        )
    values = _probabilities(table, name)
    exam, studies = pd.factorize(table[STUDY])
    if (exam < 0).any():
        row = int((exam < 0).argmax())
        raise InvalidValueError(f"a StudyInstanceUID is missing in the {name}", found=f"row {row}")
    # The row in which each exam occurs first. Its answers must be those of all other rows.
    first_row = np.full(len(studies), len(exam))
    np.minimum.at(first_row, exam, np.arange(len(exam)))
    answers = values[first_row, 1:]
    varies = np.abs(values[:, 1:] - answers[exam]) > _SAME
    if varies.any():
        row, column = np.argwhere(varies)[0]
        both = f"{answers[exam[row], column]} and {values[row, column + 1]}"
        label = EXAM_LABELS[column]
        mean = f'table["{label}"] = table.groupby("{STUDY}")["{label}"].transform("mean")'
        raise InvalidValueError(
            f"the rows of an exam have different answers for {label} in the {name}",
            found=f"{both} in study {studies[exam[row]]}",
            fix=f"give all rows of an exam the same answer, such as the mean: {mean}",
        )
    return Exams(studies, answers, images=values[:, 0], exam=exam)


def _probabilities(table, name: str):
    """Return the ten answers of each row, (N, 10) float64; ValueError if one is not in [0, 1]."""
    import numpy as np

    values = table[list(LABELS)].to_numpy(np.float64)
    wrong = ~((values >= 0) & (values <= 1))  # nan is neither
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        answer = f"{LABELS[column]} = {values[row, column]}"
        raise InvalidValueError(
            f"{int(wrong.sum())} answers of the {name} are not probabilities",
            found=f"{answer} of image {table[IMAGE].iloc[row]}",
            fix="give each image and label a probability from 0 to 1: logits.sigmoid()",
        )
    return values


def challenge_loss(labels, predictions) -> float:
    """Compute the challenge's score, a weighted log loss; 0.5 everywhere gives ln 2 = 0.693.

    Lower is better. The nine answers for each exam have the weights `EXAM_WEIGHTS`. Each image has
    the weight `IMAGE_WEIGHT` times the share of positive images in its exam, so the images of a
    negative exam do not count. The sum is divided by the sum of all weights.

    To train an `ExamNetwork`, use `exam_loss`. It has the same weights.

    Args:
        labels: a table of zeros and ones with one row per image, as `read_labels` returns it.
            Labels are the first argument, as in scikit-learn.
        predictions: a table of probabilities for the same images, in any order; see `exams_of`.

    Returns:
        The score, 0 or more.

    Raises:
        ValueError: a label is neither 0 nor 1; the tables have different images or exams; or
            `exams_of` raises an error for one of the tables.
    """
    if isinstance(labels, Mapping):
        raise InvalidValueError(
            "challenge_loss scores tables, got tensors",
            fix="for training, pe.exam_loss(outputs, targets)",
        )
    truth, predicted = match_tables(labels, predictions)
    image_weights = IMAGE_WEIGHT * image_share(truth)[truth.exam]
    loss = (log_loss(truth.answers, predicted.answers) @ WEIGHTS).sum()
    loss += (log_loss(truth.images, predicted.images) * image_weights).sum()
    return float(loss / (len(truth.studies) * sum(WEIGHTS) + image_weights.sum()))


def exam_loss(outputs: Mapping, targets: Mapping):
    """Compute the challenge's score of exams and their parts, as a loss for `fit`.

    Args:
        outputs: the logits of an `ExamNetwork` for B exams: "answers", (B, A), and "images",
            (B, S). If A is 9, the answers get the weights of the challenge; otherwise all answers
            get the same weight.
        targets: the targets of `ExamSequences`: "answers", (B, A), and "images", (B, S), in [0, 1];
            and "image_weight", (B, S), the total weight of the images in each part of an exam.

    Returns:
        () float32.

    Raises:
        ValueError: the targets have no "image_weight", probably because the arguments were
            exchanged.
    """
    from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

    if "image_weight" not in targets:
        raise InvalidValueError(
            "the targets of exam_loss have no image_weight",
            found=", ".join(targets),
            fix="pass the targets of ExamSequences second: pe.exam_loss(outputs, targets)",
        )
    answers = cross_entropy(outputs["answers"], targets["answers"], reduction="none").sum(0)
    images = cross_entropy(outputs["images"], targets["images"], reduction="none")
    # Python numbers become constants of the graph. A tensor of weights would be copied to the
    # device in every step.
    weights = WEIGHTS
    if len(answers) != len(WEIGHTS):
        weights = [1 / len(answers) for _ in answers]
    loss = sum(weight * answers[column] for column, weight in enumerate(weights))
    loss = loss + (images * targets["image_weight"]).sum()
    exams = len(outputs["answers"])
    return loss / (exams * sum(weights) + targets["image_weight"].sum())


def match_tables(labels, predictions) -> tuple[Exams, Exams]:
    """Return labels and predictions as `Exams`, both in the order of the labels.

    Raises:
        ValueError: as for `challenge_loss`.
    """
    truth = exams_of(labels, "labels")
    check_yes_or_no(labels, LABELS)
    predicted = exams_of(_in_order_of(predictions, labels), "predictions")
    differs = predicted.studies[predicted.exam] != truth.studies[truth.exam]
    if differs.any():
        row = int(differs.argmax())
        raise InvalidValueError(
            "an image has another study in the predictions than in the labels",
            found=f"image {labels[IMAGE].iloc[row]}",
            fix=f"take {STUDY} from the labels",
        )
    return truth, predicted


def image_share(exams: Exams):
    """Return the mean of the image labels, or of the image probabilities, per exam: (E,)."""
    return exams.sums(exams.images) / exams.counts()


def log_loss(truth, predicted):
    """Return the unweighted log loss of each answer; `truth` is in [0, 1], not only 0 or 1."""
    import numpy as np

    predicted = np.clip(predicted, _LEAST, 1 - _LEAST)
    return -(truth * np.log(predicted) + (1 - truth) * np.log1p(-predicted))


def _in_order_of(predictions, labels):
    """Return the rows of `predictions` in the order of the images in `labels`."""
    import pandas as pd

    if IMAGE not in predictions.columns or IMAGE not in labels.columns:
        return predictions  # `exams_of` raises
    given = pd.Index(predictions[IMAGE])
    wanted = pd.Index(labels[IMAGE])
    if given.equals(wanted):
        return predictions
    repeated = given[given.duplicated()]
    rows = wanted.get_indexer(given)  # `exams_of` has checked that no image of the labels repeats
    unknown = given[rows < 0]
    missing = wanted.difference(given)
    if len(repeated) or len(unknown) or len(missing):
        counts = [
            f"{len(missing)} images without a prediction",
            f"{len(unknown)} without a label",
            f"{len(repeated)} twice",
        ]
        examples = ", ".join(map(str, [*missing[:2], *unknown[:2], *repeated[:2]]))
        raise InvalidValueError(
            "predictions and labels do not have the same images",
            found=f"{', '.join(counts)}; {examples}",
            fix="one row for each image of the labels, and no other",
        )
    return predictions.iloc[rows.argsort()]
