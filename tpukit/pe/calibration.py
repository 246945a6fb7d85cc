"""Calibrated probabilities: temperatures that are fitted on one fold and applied to another.

Of the answers 0.9 nine in ten should be true. If fewer are, the network is overconfident. A
temperature T divides the logits:

    probability 0.9  ->  logit 2.2  ->  2.2 / T = 1.1 with T = 2  ->  probability 0.75
"""

from dataclasses import dataclass

from tpukit.essentials.display import InvalidValueError, counted
from tpukit.metrics import FEW, count_groups
from tpukit.pe.challenge import IMAGE_WEIGHT, STUDY, image_share, log_loss, match_tables
from tpukit.pe.labels import EXAM_LABELS, LABELS

# Bounds of a temperature: beyond them all answers would be right, or guesses.
_LEAST = 1e-12  # of a probability, and of its distance from 1
_LOWEST = 0.1
_HIGHEST = 10.0


@dataclass(frozen=True)
class Temperatures:
    """A temperature per label, found by `fit_temperatures`; logits are divided by it.

    Above 1 the answers were overconfident, and move towards 0.5. Below 1 they were underconfident.
    No answer crosses 0.5, so consistent answers stay consistent.

    Attributes:
        values: temperature of each label of `pe.LABELS`.
        studies: StudyInstanceUIDs of the exams that the temperatures were fitted on.
        notes: for each label without a fitted temperature, the reason; its temperature is 1.
    """

    values: dict[str, float]
    studies: frozenset[str]
    notes: dict[str, str]

    def __repr__(self) -> str:
        values = ", ".join(f"{name} {value:.2f}" for name, value in self.values.items())
        return f"Temperatures fitted on {len(self.studies):,} studies: {values}"

    def apply(self, table):
        """Return a copy of a table with its ten answers at these temperatures.

        Args:
            table: a row per image with StudyInstanceUID and the probabilities of `pe.LABELS`.

        Raises:
            ValueError: the temperatures were fitted on an exam of the table, so the result would
                not hold for other exams.
        """
        import numpy as np
        from scipy.special import expit

        # A fit looks good on its own exams, whatever it is worth.
        both = self.studies & set(table[STUDY])
        if both:
            raise InvalidValueError(
                f"{len(both)} of the studies are those that the temperatures were fitted on",
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
    """Find for each label the temperature with the smallest log loss on these exams.

    An exam counts once for each of its nine answers. Images count as in the challenge's score, so
    only images of positive exams count. A label keeps the temperature 1 if fewer than 5 exams have
    it, or fewer than 5 lack it.

    Args:
        labels: a row per image with 0 and 1, see `challenge_loss`.
        predictions: the same with probabilities.

    Returns:
        The temperatures.

    Raises:
        ValueError: see `challenge_loss`.
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

    # The search is over logarithms, in which T = 1/2 and T = 2 are equally far from 1.
    def cost(log_temperature):
        return one.mean(log_loss(one.truth, expit(logits / np.exp(log_temperature))))

    bounds = (np.log(_LOWEST), np.log(_HIGHEST))
    found = minimize_scalar(cost, bounds=bounds, method="bounded")
    return float(np.exp(found.x))


def _logits(probabilities):
    """Return logits; probabilities of 0 and 1 get finite logits.

    A float32 probability is exactly 1 from a logit of 17 on. The fit and its application must treat
    it in the same way.
    """
    import numpy as np
    from scipy.special import logit

    return logit(np.clip(probabilities, _LEAST, 1 - _LEAST))


def calibration_table(labels, before, after=None):
    """Return the log loss of each label, and the log loss of its frequency alone.

    Args:
        labels: a row per image, with 0 and 1.
        before: probabilities of the same images, from the network.
        after: the same at other temperatures, or None.

    Returns:
        A DataFrame with a row per label: "positives", "of", "frequency alone", "log loss",
        "calibrated" if `after` is given, and "note" if the label is too rare to judge.

    Raises:
        ValueError: see `challenge_loss`.
    """
    import numpy as np
    import pandas as pd

    first = answers(labels, before)
    calibrated = None if after is None else answers(labels, after)
    rows = []
    for number, one in enumerate(first):
        # Somebody who answers each question by how often it is true; a network must do better.
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
    """The answers to one label with the truth: of images for the first label, else of exams."""

    label: str  # of `pe.LABELS`
    probabilities: object  # (N,) float64
    truth: object  # (N,) float64
    exam: object  # (N,) the exam of each, counted from 0
    weights: object  # (N,) of each in the mean

    def mean(self, values) -> float:
        """Return the weighted mean of (N,) values; nan if all weights are 0."""
        import numpy as np

        if not self.weights.any():
            return float("nan")
        return float(np.average(values, weights=self.weights))

    def mean_loss(self) -> float:
        """Return the weighted mean of the log loss."""
        return self.mean(log_loss(self.truth, self.probabilities))

    def too_few(self) -> str:
        """Return the reason if too few exams have the label, or lack it, to judge it; else ""."""
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
    """Return the answers by label; images have the weights of the challenge, exams the weight 1."""
    import numpy as np

    truth, predicted = match_tables(labels, predictions)
    of_images = Answers(
        LABELS[0],
        probabilities=predicted.images,
        truth=truth.images,
        exam=truth.exam,
        # In the challenge an image weighs as its exam has positive images; in a negative exam,
        # nothing.
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
