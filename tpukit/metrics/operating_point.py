"""Choose one point of a ROC curve: the highest sensitivity at a required specificity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpukit.essentials.display import InvalidValueError
from tpukit.metrics.areas import FEW, above_each, drawn_weights, middle_95, sensitivity_text
from tpukit.metrics.samples import count_groups, one_label

_ROUNDING = 1e-9  # two specificities that differ by less count as equal


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold on the probability, and its effect on the samples.

    Attributes:
        threshold: a sample with this probability or more is predicted positive; infinity if no
            threshold with the required specificity finds a positive sample.
        sensitivity: share of the positive samples that are predicted positive.
        specificity: share of the negative samples that are predicted negative.
        asked: the required specificity.
        interval: (low, high), the middle 95 % of the sensitivity in a bootstrap, which draws whole
            groups and chooses a new threshold in each draw; None with fewer than 5 positive or
            fewer than 5 negative groups.
    """

    threshold: float
    sensitivity: float
    specificity: float
    asked: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        text = sensitivity_text(self.sensitivity, self.interval)
        return f"{text} at specificity {self.specificity:.2f} (asked: {self.asked:.2f})"


def sensitivity_at(
    specificity: float,
    labels: Any,
    probabilities: Any,
    *,
    groups: Any = None,
    resamples: int = 500,
    seed: int = 0,
) -> OperatingPoint:
    """Return the highest sensitivity at a required specificity, and its threshold.

    The threshold is chosen and judged on the same samples, so the sensitivity may be too high. If
    you use the threshold, report its sensitivity on other samples.

    Args:
        specificity: the required specificity, 0 to 1. With 0.9, at most one negative sample in ten
            is predicted positive.
        labels, probabilities, groups, resamples, seed: as for `show_roc`.

    Raises:
        ValueError: `specificity` is not in [0, 1]; or another argument is not valid for `show_roc`.
    """
    import numpy as np

    if not 0 <= specificity <= 1:
        fact = f"a specificity must be a share, 0 to 1, got {specificity}"
        raise InvalidValueError(fact, fix="0.9 for 90 %")
    specificity = float(specificity)  # a scalar of torch cannot be compared with an array
    truth, chances, numbers = one_label(labels, probabilities, groups)
    # Each draw of the bootstrap only changes the weights of the samples. So compute the ranks of
    # the probabilities only once.
    scores, rank = np.unique(chances, return_inverse=True)
    best = _best(truth, rank, np.ones(len(truth)), specificity=specificity)
    interval = None
    if min(count_groups(truth, numbers)) >= FEW:
        found = []
        for weights in drawn_weights(truth, numbers, resamples, seed=seed):
            found.append(_best(truth, rank, weights, specificity=specificity).sensitivity)
        interval = middle_95(found)
    return OperatingPoint(
        threshold=math.inf if best.rank is None else float(scores[best.rank]),
        sensitivity=best.sensitivity,
        specificity=best.specificity,
        asked=specificity,
        interval=interval,
    )


class _Best(NamedTuple):
    """The best threshold for weighted samples."""

    rank: int | None  # rank of the threshold; None if the threshold is infinity
    sensitivity: float
    specificity: float


def _best(truth, rank, weights, *, specificity: float) -> _Best:
    """Return the threshold with the highest sensitivity at this specificity or above."""
    import numpy as np

    counts = above_each(truth, rank, weights)
    # The specificity at each threshold, from the highest threshold down.
    specificities = 1 - counts.negative / counts.negative[-1]
    is_enough = np.flatnonzero(specificities >= specificity - _ROUNDING)
    found = counts.positive[is_enough].max(initial=0)
    if found == 0:
        return _Best(None, sensitivity=0.0, specificity=1.0)
    # If several thresholds find the same positive samples, the highest one is the most specific.
    highest = int(np.searchsorted(counts.positive, found))
    sensitivity = counts.positive[highest] / counts.positive[-1]
    return _Best(counts.rank[highest], float(sensitivity), float(specificities[highest]))
