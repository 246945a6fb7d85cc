"""Choose one threshold instead of a curve: the sensitivity at a given specificity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpukit.essentials.display import InvalidValueError
from tpukit.metrics.areas import FEW, above_each, drawn_weights, middle_95, sensitivity_text
from tpukit.metrics.samples import count_groups, one_label

_ROUNDING = 1e-9  # a specificity that is lower by this is not lower


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold on the probability, and its effect on the samples.

    Attributes:
        threshold: probabilities of this value or more are a yes; infinity if no threshold that is
            specific enough finds a positive sample.
        sensitivity: share of the positive samples that are a yes.
        specificity: share of the negative samples that are a no.
        asked: the required specificity.
        interval: (low, high), the middle 95 % of the sensitivity in a bootstrap that draws whole
            groups and chooses the threshold anew each time; None with fewer than 5 positive or
            negative groups.
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
    """Return the highest sensitivity of any threshold that is specific enough.

    The threshold is chosen and judged on the same samples, as when a ROC curve is read.
    Choose a threshold that you will use on other samples.

    Args:
        specificity: the required specificity, 0 to 1; with 0.9, one negative sample in ten is a
            false alarm.
        labels, probabilities, groups, resamples, seed: as for `show_roc`.

    Raises:
        ValueError: the specificity is not in [0, 1], or as `show_roc`.
    """
    import numpy as np

    if not 0 <= specificity <= 1:
        fact = f"a specificity must be a share, 0 to 1, got {specificity}"
        raise InvalidValueError(fact, fix="0.9 for 90 %")
    truth, chances, numbers = one_label(labels, probabilities, groups)
    # Ranks, because each drawing of the bootstrap weighs the same samples anew: they are sorted
    # once.
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
    rank: int | None  # of the threshold; None if it is above all probabilities
    sensitivity: float
    specificity: float


def _best(truth, rank, weights, *, specificity: float) -> _Best:
    import numpy as np

    counts = above_each(truth, rank, weights)
    specificities = 1 - counts.negative / counts.negative[-1]
    is_enough = np.flatnonzero(specificities >= specificity - _ROUNDING)
    found = counts.positive[is_enough].max(initial=0)
    if found == 0:
        return _Best(None, sensitivity=0.0, specificity=1.0)
    # Of all thresholds that find as many positive samples, the highest is the most specific.
    highest = int(np.searchsorted(counts.positive, found))
    sensitivity = counts.positive[highest] / counts.positive[-1]
    return _Best(counts.rank[highest], float(sensitivity), float(specificities[highest]))
