"""The challenge's own score: the log loss of every image and every exam, weighted.

Source of the weights: the evaluation page of the competition "RSNA STR Pulmonary Embolism Detection" (Kaggle, 2020).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tpukit.essentials.show import WrongValue
from tpukit.pe.labels import EXAM_LABELS, IMAGE, LABELS, STUDY, check_columns, check_yes_or_no

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
IMAGE_WEIGHT = 0.07361963  # of one image, times the share of images of its exam that are positive
_LEAST = 1e-15  # a probability of 0 that is wrong would cost infinitely much


@dataclass(frozen=True)
class Exams:
    """A table of answers, laid out by exam."""

    studies: object  # (E,) their StudyInstanceUIDs, in order of appearance
    answers: object  # (E, 9) float64 in [0, 1], in the order of `EXAM_LABELS`
    images: object  # (N,) float64 in [0, 1], `pe_present_on_image` of each row of the table
    exam: object  # (N,) integers, the exam of each row

    def sums(self, values):
        """Return the (E,) sums of (N,) values over the images of each exam."""
        import numpy as np

        return np.bincount(self.exam, weights=values, minlength=len(self.studies))

    def counts(self):
        """Return the (E,) number of images of each exam."""
        import numpy as np

        return np.bincount(self.exam, minlength=len(self.studies))


def exams_of(table, name: str = "table") -> Exams:
    """Lay a table out by exam, and check that every answer is a probability, and one for each exam.

    Args:
        table: a row for each image: StudyInstanceUID, SOPInstanceUID, and the ten `LABELS` as probabilities, those of
            the exam repeated in each of its rows; as `read_labels` returns labels.
        name: of the table, for messages.

    Raises:
        ValueError: a column is missing, an image occurs twice, an answer is missing or outside [0, 1], or an exam has
            several answers to one question.
    """
    import numpy as np
    import pandas as pd

    fix = "a row for each image, with its StudyInstanceUID, SOPInstanceUID and the ten labels of pe.LABELS"
    check_columns(table, (STUDY, IMAGE, *LABELS), f"the {name} has", fix=fix)
    twice = table[IMAGE].duplicated()
    if twice.any():
        raise WrongValue(
            f"{int(twice.sum())} images occur twice in the {name}",
            found=table.loc[twice.idxmax(), IMAGE],
            fix='table.drop_duplicates("SOPInstanceUID"), if the rows agree',
        )
    values = table[list(LABELS)].to_numpy(np.float64)
    wrong = ~((values >= 0) & (values <= 1))  # NaN is neither
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise WrongValue(
            f"{int(wrong.sum())} answers of the {name} are no probabilities",
            found=f"{LABELS[column]} = {values[row, column]} of image {table[IMAGE].iloc[row]}",
            fix="logits.sigmoid(), and an answer for every image and label",
        )
    exam, studies = pd.factorize(table[STUDY])
    if (exam < 0).any():
        raise WrongValue(f"a StudyInstanceUID is missing in the {name}", found=f"row {int((exam < 0).argmax())}")
    first = np.full(len(studies), len(exam))
    np.minimum.at(first, exam, np.arange(len(exam)))
    answers = values[first, 1:]
    vary = np.abs(values[:, 1:] - answers[exam]) > 1e-6
    if vary.any():
        row, column = np.argwhere(vary)[0]
        raise WrongValue(
            f"an exam has several answers to {EXAM_LABELS[column]} in the {name}",
            found=f"{answers[exam[row], column]} and {values[row, column + 1]} in study {studies[exam[row]]}",
            fix=f'one answer in all rows of an exam: table.groupby("{STUDY}")[label].transform("mean"), or the maximum',
        )
    return Exams(studies, answers, values[:, 0], exam)


def challenge_loss(labels, predictions) -> float:
    """Return the challenge's score, the weighted log loss; less is better, ln 2 = 0.693 is "0.5 everywhere".

    Every exam counts its nine answers by `EXAM_WEIGHTS`, and each of its images by `IMAGE_WEIGHT` times the share of
    its images that are positive: in a negative exam no image counts. The sum is divided by the sum of all weights.

    `exam_loss` is the same of tensors, to train an `ExamNetwork` with.

    Args:
        labels: a row for each image with 0 and 1, as `read_labels` returns them. They come first, as in scikit-learn.
        predictions: the same with probabilities, see `exams_of`, in any order.

    Raises:
        ValueError: a label is neither 0 nor 1; the two tables are not of the same images and studies; or see
            `exams_of`.
    """
    if isinstance(labels, Mapping):
        raise WrongValue("challenge_loss scores tables, got tensors", fix="pe.exam_loss(outputs, targets) trains")
    truth, predicted = beside(labels, predictions)
    images = IMAGE_WEIGHT * image_share(truth)[truth.exam]
    cost = (log_loss(truth.answers, predicted.answers) @ WEIGHTS).sum()
    cost += (log_loss(truth.images, predicted.images) * images).sum()
    return float(cost / (len(truth.studies) * sum(WEIGHTS) + images.sum()))


def exam_loss(outputs: Mapping, targets: Mapping):
    """Return the challenge's score as a loss, for `fit`: what a network says comes first, as in PyTorch.

    Args:
        outputs: of an `ExamNetwork` for B exams: logits, (B, 9) "answers" in the order of `EXAM_LABELS` and (B, S)
            "images".
        targets: of `ExamSequences`: "answers" and "images" in [0, 1], and (B, S) "image_weight", what the images of
            each part of an exam weigh together.

    Returns:
        () float32.

    Raises:
        ValueError: the targets have no "image_weight": they are the outputs.
    """
    from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

    if "image_weight" not in targets:
        raise WrongValue(
            "the targets of exam_loss have no image_weight",
            found=", ".join(targets),
            fix="pe.exam_loss(outputs of an ExamNetwork, targets of ExamSequences)",
        )
    answers = cross_entropy(outputs["answers"], targets["answers"], reduction="none").sum(0)
    images = cross_entropy(outputs["images"], targets["images"], reduction="none")
    # Python numbers, not a tensor of weights: that would be copied to the device in every step.
    cost = sum(weight * answers[column] for column, weight in enumerate(WEIGHTS))
    cost = cost + (images * targets["image_weight"]).sum()
    return cost / (len(outputs["answers"]) * sum(WEIGHTS) + targets["image_weight"].sum())


def beside(labels, predictions) -> tuple[Exams, Exams]:
    """Return the labels and the predictions, both in the order of the labels; raises as `challenge_loss`."""
    truth = exams_of(labels, "labels")
    check_yes_or_no(labels, LABELS)
    predicted = exams_of(_in_order_of(predictions, labels), "predictions")
    elsewhere = predicted.studies[predicted.exam] != truth.studies[truth.exam]
    if elsewhere.any():
        row = int(elsewhere.argmax())
        raise WrongValue(
            "images are in other studies in the predictions than in the labels",
            found=f"image {labels[IMAGE].iloc[row]}",
            fix=f"take {STUDY} from the labels",
        )
    return truth, predicted


def image_share(exams: Exams):
    """Return the (E,) share of the images of each exam that are positive; of probabilities, the share expected."""
    return exams.sums(exams.images) / exams.counts()


def log_loss(truth, predicted):
    """Return the log loss of each answer, unweighted; `truth` may be a probability, too."""
    import numpy as np

    predicted = np.clip(predicted, _LEAST, 1 - _LEAST)
    return -(truth * np.log(predicted) + (1 - truth) * np.log1p(-predicted))


def _in_order_of(predictions, labels):
    """Return the rows of `predictions` in the order of the images in `labels`."""
    import pandas as pd

    if IMAGE not in predictions.columns or IMAGE not in labels.columns:
        return predictions  # `exams_of` says so
    given, wanted = pd.Index(predictions[IMAGE]), pd.Index(labels[IMAGE])
    if given.equals(wanted):
        return predictions
    twice = len(given) - given.nunique()
    rows = wanted.get_indexer(given)  # refuses labels with an image twice, which were checked before
    unknown = given[rows < 0]
    without = wanted.difference(given)
    if twice or len(unknown) or len(without):
        few = ", ".join(map(str, [*without[:2], *unknown[:2], *given[given.duplicated()][:2]]))
        raise WrongValue(
            "predictions and labels are not of the same images",
            found=f"{len(without)} images without a prediction, {len(unknown)} without a label, {twice} twice; {few}",
            fix="one row for each image of the labels, and no other",
        )
    return predictions.iloc[rows.argsort()]
