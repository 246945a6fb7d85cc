"""Calibrate probabilities by temperatures that are fitted on one fold and applied to another.

Among the answers with probability 0.9, nine in ten should be true. If fewer are true, the network
is overconfident. A temperature T divides the logits:

    probability 0.9  ->  logit 2.2  ->  2.2 / T = 1.1 with T = 2  ->  probability 0.75
"""

from dataclasses import dataclass

from tpukit.essentials.display import InvalidValueError, counted
from tpukit.metrics import FEW, count_groups
from tpukit.pe.challenge import IMAGE_WEIGHT, image_share, log_loss, match_tables
from tpukit.pe.labels import EXAM_LABELS, LABELS, STUDY

_LEAST = 1e-12  # probabilities are clipped to at least this, and at most 1 minus this
# The bounds of a temperature. A lower one would make all answers 0 or 1, a higher one all 0.5.
_LOWEST = 0.1
_HIGHEST = 10.0


@dataclass(frozen=True)
class Temperatures:
    """One temperature per label, from `fit_temperatures`; `apply` divides logits by it.

    With a temperature above 1, overconfident answers move towards 0.5. With a temperature below 1,
    underconfident answers move towards 0 or 1. No answer crosses 0.5, so the answers of
    `make_consistent` remain consistent.

    Attributes:
        values: the temperature of each label of `pe.LABELS`.
        studies: the StudyInstanceUIDs of the exams on which the temperatures were fitted.
        notes: for each label without a fitted temperature, the reason; its temperature is 1.
    """

    values: dict[str, float]
    studies: frozenset[str]
    notes: dict[str, str]

    def __repr__(self) -> str:
        values = ", ".join(f"{name} {value:.2f}" for name, value in self.values.items())
        return f"Temperatures fitted on {len(self.studies):,} studies: {values}"

    def apply(self, table):
        """Return a copy of a table with calibrated probabilities of the ten labels.

        Args:
            table: a table with one row per image, StudyInstanceUID and the probabilities of
                `pe.LABELS`.

        Raises:
            ValueError: the temperatures were fitted on an exam of the table, so a score of the
                result would be too good.
        """
        import numpy as np
        from scipy.special import expit

        # A fit always looks good on the exams on which it was fitted.
        both = self.studies & set(table[STUDY])
        if both:
            raise InvalidValueError(
                f"the temperatures were fitted on {len(both)} of the studies in this table",
                found=min(both),
                fix="fit the temperatures on another fold than the one that you score",
            )
        changed = table.copy()
        for name, temperature in self.values.items():
            values = table[name].to_numpy(np.float64)
            if temperature != 1:
                values = expit(_logits(values) / temperature)
            changed[name] = values
        return changed


def fit_temperatures(labels, predictions) -> Temperatures:
    """Find the temperature of each label, 0.1 to 10, with the smallest log loss.

    For an exam label, each exam has the same weight. For the image label, images have the weights
    of the challenge's score: 0 in an exam without a positive image. A temperature is 1 if fewer
    than 5 exams have a row with a one for the label, or fewer than 5 have a row with a zero.

    Args:
        labels: a table of zeros and ones, one row per image; see `challenge_loss`.
        predictions: a table of probabilities for the same images.

    Returns:
        The temperatures.

    Raises:
        ValueError: as for `challenge_loss`.
    """
    values = {}
    notes = {}
    for one in answers(labels, predictions):
        few = one.too_few()
        if few:
            values[one.label] = 1.0
            notes[one.label] = few
        else:
            values[one.label] = _best_temperature(one)
    return Temperatures(values, frozenset(labels[STUDY]), notes)


def _best_temperature(one: "Answers") -> float:
    import numpy as np
    from scipy.optimize import minimize_scalar
    from scipy.special import expit

    logits = _logits(one.probabilities)

    # The search is over the logarithm of T, because T = 1/2 and T = 2 are then equally far from 1.
    def cost(log_temperature):
        return one.mean(log_loss(one.truth, expit(logits / np.exp(log_temperature))))

    bounds = (np.log(_LOWEST), np.log(_HIGHEST))
    found = minimize_scalar(cost, bounds=bounds, method="bounded")
    return float(np.exp(found.x))


def _logits(probabilities):
    """Return the logits of probabilities; those of 0 and 1 are finite.

    From a logit of 17 on, a float32 probability is exactly 1. `fit_temperatures` and `apply` use
    this function, so that both treat such a probability in the same way.
    """
    import numpy as np
    from scipy.special import logit

    return logit(np.clip(probabilities, _LEAST, 1 - _LEAST))


def calibration_table(labels, before, after=None):
    """Return a table with the log loss of each label and of a constant baseline.

    Args:
        labels: a table of zeros and ones, one row per image.
        before: a table of the network's probabilities for the same images.
        after: a table of calibrated probabilities for the same images; None to omit them.

    Returns:
        A DataFrame with one row per label. The column "of" is the number of images or exams, and
        "positives" the number of them that have the label. "frequency alone" is the log loss if
        each answer is the frequency of the label. "log loss" is the log loss of `before`, and
        "calibrated" the log loss of `after`. In all losses, images of negative exams have the
        weight 0. "note" is a warning if fewer than 5 exams have the label or fewer than 5 do not
        have it, else "".

    Raises:
        ValueError: as for `challenge_loss`.
    """
    import numpy as np
    import pandas as pd

    first = answers(labels, before)
    calibrated = None if after is None else answers(labels, after)
    rows = []
    for number, one in enumerate(first):
        # The baseline that a network must beat: each answer is the frequency of the label.
        frequency = np.full(len(one.truth), one.mean(one.truth))
        row = {
            "label": one.label.replace("_", " "),
            "positives": int(one.truth.sum()),
            "of": len(one.truth),
            "frequency alone": one.mean(log_loss(one.truth, frequency)),
            "log loss": one.mean_loss(),
        }
        if calibrated is not None:
            row["calibrated"] = calibrated[number].mean_loss()
        rows.append(row | {"note": one.too_few()})
    return pd.DataFrame(rows).set_index("label")


@dataclass(frozen=True)
class Answers:
    """Predicted and true answers of one label, for N images or, if it is an exam label, N exams."""

    label: str  # a member of `pe.LABELS`
    probabilities: object  # (N,) float64, the predicted answers
    truth: object  # (N,) float64, 0 or 1
    exam: object  # (N,) the number of each answer's exam, from 0
    weights: object  # (N,) the weight of each answer in a mean

    def mean(self, values) -> float:
        """Return the weighted mean of (N,) values; nan if all weights are 0."""
        import numpy as np

        if not self.weights.any():
            return float("nan")
        return float(np.average(values, weights=self.weights))

    def mean_loss(self) -> float:
        """Return the weighted mean of the log loss of all answers."""
        return self.mean(log_loss(self.truth, self.probabilities))

    def too_few(self) -> str:
        """Return a warning if fewer than `FEW` exams are positive, or negative; otherwise ""."""
        having, lacking = count_groups(self.truth, self.exam)
        few = []
        if having < FEW:
            few.append(f"{counted(having, 'exam')} with it")
        if lacking < FEW:
            few.append(f"{counted(lacking, 'exam')} without")
        if not few:
            return ""
        return f"only {', '.join(few)}: too few to tell"


def answers(labels, predictions) -> list[Answers]:
    """Return the `Answers` of each label. Images have the challenge's weights, and exams have 1."""
    import numpy as np

    truth, predicted = match_tables(labels, predictions)
    of_images = Answers(
        LABELS[0],
        probabilities=predicted.images,
        truth=truth.images,
        exam=truth.exam,
        # In the challenge, the weight of an image is the share of positive images in its exam, so
        # it is 0 in a negative exam.
        weights=IMAGE_WEIGHT * image_share(truth)[truth.exam],
    )
    exams = len(truth.studies)
    result = [of_images]
    for column, name in enumerate(EXAM_LABELS):
        of_exams = Answers(
            name,
            probabilities=predicted.answers[:, column],
            truth=truth.answers[:, column],
            exam=np.arange(exams),
            weights=np.ones(exams),
        )
        result.append(of_exams)
    return result
