"""One threshold instead of a curve: the sensitivity that a label is found with at a given specificity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpukit.essentials.show import WrongValue
from tpukit.scores.areas import FEW, above_each, count_groups, drawn_weights, one_label


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold on the probability, and what it makes of the samples.

    Attributes:
        threshold: from this probability on it is a yes; infinity where no threshold is specific enough.
        sensitivity: share of the positive samples that are a yes.
        specificity: share of the negative samples that are a no.
        asked: the least specificity that was asked for.
        interval: (low, high), the middle 95 % of the sensitivity in a bootstrap that draws whole groups and chooses the
            threshold anew each time; None with fewer than 5 positive or negative groups.
    """

    threshold: float
    sensitivity: float
    specificity: float
    asked: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        low, high = self.interval or (0, 0)
        interval = f" ({low:.2f} to {high:.2f})" if self.interval else ""
        asked = f"{self.specificity:.2f} (asked: {self.asked:.2f})"
        return f"sensitivity {self.sensitivity:.2f}{interval} at specificity {asked}"


def sensitivity_at(
    specificity: float,
    labels: Any,
    probabilities: Any,
    *,
    groups: Any = None,
    resamples: int = 500,
    seed: int = 0,
) -> OperatingPoint:
    """Return the highest sensitivity of any threshold whose specificity is at least this, with its 95 % interval.

    The threshold is chosen on the samples that it is judged on, as readers of a ROC curve do; one that is to be used
    has to be chosen on others.

    Args:
        specificity: 0 to 1; 0.9 leaves one healthy sample in ten a false alarm.
        labels, probabilities, groups, resamples, seed: as for `show_roc`.

    Raises:
        ValueError: the specificity is not in [0, 1], or as `show_roc`.
    """
    import numpy as np

    if not 0 <= specificity <= 1:
        raise WrongValue(f"a specificity is a share, 0 to 1, got {specificity}", fix="0.9 for 90 %")
    truth, chances, groups = one_label(labels, probabilities, groups)
    scores, place = np.unique(chances, return_inverse=True)
    threshold, sensitivity, reached = _best(truth, place, np.ones(len(truth)), specificity)
    interval = None
    if min(count_groups(truth, groups)) >= FEW:
        draws = drawn_weights(truth, groups, resamples, seed)
        found = [_best(truth, place, weights, specificity)[1] for weights in draws]
        interval = tuple(np.percentile(found, [2.5, 97.5]).tolist())
    chosen = float(scores[threshold]) if threshold is not None else float("inf")
    return OperatingPoint(chosen, sensitivity, reached, specificity, interval)


def _best(truth, place, weights, specificity: float) -> tuple:
    """Return the place of the threshold, None for one above all, its sensitivity and its specificity."""
    import numpy as np

    there, positive, negative = above_each(truth, place, weights)
    enough = np.flatnonzero(1 - negative / negative[-1] >= specificity - 1e-9)
    if not len(enough):
        return None, 0.0, 1.0
    last = enough[-1]  # the lowest threshold that is specific enough
    first = int(np.searchsorted(positive, positive[last]))  # the highest one that finds as many
    return there[first], float(positive[first] / positive[-1]), float(1 - negative[first] / negative[-1])
