"""Probabilities that mean what they say: temperatures fitted on one fold, applied to another, and their worth."""

from dataclasses import dataclass

from tpukit.essentials.show import WrongValue, counted
from tpukit.pe.challenge import IMAGE_WEIGHT, STUDY, beside, image_share, log_loss
from tpukit.pe.labels import EXAM_LABELS, LABELS
from tpukit.scores import FEW, count_groups

_LOWEST, _HIGHEST = 0.1, 10.0  # of a temperature: further out it would only repeat that all was right, or guessed


@dataclass(frozen=True)
class Temperatures:
    """A temperature for each label, as `fit_temperatures` finds it: logits are divided by it.

    Above 1 the answers were too sure, and move towards 0.5; below 1 they were too timid. No answer crosses 0.5, so
    answers that obeyed the rules of consistency still do.

    Attributes:
        values: of each label of `pe.LABELS`.
        studies: StudyInstanceUIDs of those it was fitted on.
        notes: why a label has a temperature of 1 that was not fitted.
    """

    values: dict[str, float]
    studies: frozenset[str]
    notes: dict[str, str]

    def __repr__(self) -> str:
        values = ", ".join(f"{name} {value:.2f}" for name, value in self.values.items())
        return f"Temperatures fitted on {len(self.studies):,} studies: {values}"

    def apply(self, table):
        """Return a copy of a table with its ten answers at these temperatures.

        Raises:
            ValueError: a study of the table was fitted on: what is found there says nothing of others.
        """
        import numpy as np
        from scipy.special import expit, logit

        both = self.studies & set(table[STUDY])
        if both:
            raise WrongValue(
                f"{len(both)} of the studies are those that the temperatures were fitted on",
                found=sorted(both)[0],
                fix="fit on another fold than the one that is judged",
            )
        changed = table.copy()
        for name, temperature in self.values.items():
            values = table[name].to_numpy(np.float64, copy=True)
            inside = (values > 0) & (values < 1)  # the others stay, whatever the temperature
            values[inside] = expit(logit(values[inside]) / temperature)
            changed[name] = values
        return changed


def fit_temperatures(labels, predictions) -> Temperatures:
    """Find for each label the temperature with the least log loss on these studies.

    Exams count once for each of the nine answers about them; images count as in the challenge's score, so only those of
    positive exams do. A label that fewer than 5 exams have, or lack, keeps a temperature of 1.

    Args:
        labels: a row for each image with 0 and 1, see `challenge_loss`.
        predictions: the same with probabilities.

    Raises:
        ValueError: see `challenge_loss`.
    """
    import numpy as np
    from scipy.optimize import minimize_scalar
    from scipy.special import expit, logit

    values, notes = {}, {}
    for one in answers(labels, predictions):
        values[one.label] = 1.0
        if few := one.too_few():
            notes[one.label] = few
            continue
        logits = logit(np.clip(one.chances, 1e-12, 1 - 1e-12))

        def cost(log_temperature, one=one, logits=logits):
            return one.mean(log_loss(one.truth, expit(logits / np.exp(log_temperature))))

        found = minimize_scalar(cost, bounds=(np.log(_LOWEST), np.log(_HIGHEST)), method="bounded")
        values[one.label] = float(np.exp(found.x))
    return Temperatures(values, frozenset(labels[STUDY]), notes)


def calibration_table(labels, before, after=None):
    """Return a row a label: how many have it, its log loss, and what the label's frequency alone would cost.

    Args:
        labels: a row for each image, with 0 and 1.
        before: probabilities of the same images, as the network gave them.
        after: the same at other temperatures, or None.

    Raises:
        ValueError: see `challenge_loss`.
    """
    import numpy as np
    import pandas as pd

    first, *others = [answers(labels, table) for table in (before, after) if table is not None]
    rows = []
    for number, one in enumerate(first):
        row = {"label": one.label.replace("_", " "), "positives": int(one.truth.sum()), "of": len(one.truth)}
        columns = {"frequency alone": np.full(len(one.truth), one.mean(one.truth)), "log loss": one.chances}
        if others:
            columns["calibrated"] = others[0][number].chances
        rows.append(row | {name: one.mean(log_loss(one.truth, of)) for name, of in columns.items()})
        rows[-1]["note"] = one.too_few()
    return pd.DataFrame(rows).set_index("label")


@dataclass(frozen=True)
class Answers:
    """What was said of one label, and what is true: of images for the first label, of exams for the others."""

    label: str  # of `pe.LABELS`
    chances: object  # (N,) float64
    truth: object  # (N,) float64
    exam: object  # (N,) which exam each is of, counted from 0
    weights: object  # (N,) how much each counts

    def mean(self, values) -> float:
        """Return the weighted mean of (N,) values; nan where nothing counts."""
        import numpy as np

        return float(np.average(values, weights=self.weights)) if self.weights.any() else float("nan")

    def too_few(self) -> str:
        """Say that too few exams have the label, or lack it, to judge it; empty where they are enough."""
        counts = zip(("with it", "without"), count_groups(self.truth, self.exam), strict=True)
        few = [f"{counted(count, 'exam')} {kind}" for kind, count in counts if count < FEW]
        return f"only {', '.join(few)}: too few to tell" if few else ""


def answers(labels, predictions) -> list[Answers]:
    """Return what was said of each label; images weigh as in the challenge's score, exams one each."""
    import numpy as np

    truth, said = beside(labels, predictions)
    images = IMAGE_WEIGHT * image_share(truth)[truth.exam]
    numbers, once = np.arange(len(truth.studies)), np.ones(len(truth.studies))
    return [Answers(LABELS[0], said.images, truth.images, truth.exam, images)] + [
        Answers(name, said.answers[:, column], truth.answers[:, column], numbers, once)
        for column, name in enumerate(EXAM_LABELS)
    ]
