"""Compare the areas under the ROC curves of two networks on the same samples.

Both networks see the same samples, so their areas vary together, and overlapping intervals of the
areas prove nothing. The variance of the difference is that of DeLong et al. (1988), and for
samples in groups that of Obuchowski (1997). Both variances use the rank of each sample among those
of the other class:

    positives 0.9 0.4, negatives 0.5 0.1: 0.9 is above both negatives, 0.4 above one of the two,
    so the area is the mean of 1 and 1/2, 0.75
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tpukit.metrics.areas import FEW
from tpukit.metrics.samples import count_groups, one_label

_NORMAL = 1.96  # standard errors on each side hold 95 % of a normal distribution


@dataclass(frozen=True)
class AurocDifference:
    """The areas of two networks, and their difference.

    Attributes:
        first, second: AUROC of each.
        interval: (low, high), 95 % of the difference `second - first`; None with fewer than 5
            positive or negative groups.
        p_value: the probability of a difference at least as large if the networks are equally good;
            nan without an interval.
    """

    first: float
    second: float
    interval: tuple[float, float] | None
    p_value: float

    def __str__(self) -> str:
        text = f"AUROC {self.first:.3f} and {self.second:.3f}: {self.second - self.first:+.3f}"
        if self.interval is None:
            return f"{text}, too few groups to tell"
        low, high = self.interval
        return f"{text} ({low:+.3f} to {high:+.3f}, p {self.p_value:.2g})"


def compare_aurocs(labels: Any, first: Any, second: Any, *, groups: Any = None) -> AurocDifference:
    """Compare the areas of two networks by the test of DeLong.

    Args:
        labels: (N,) zeros and ones.
        first, second: (N,) the probabilities, or any scores, of each network for the same samples.
        groups: (N,) the study or patient of each sample; None if every sample is independent.

    Raises:
        ValueError: as `show_roc`.
    """
    import numpy as np

    truth, chances, numbers = one_label(labels, first, groups)
    _, others, _ = one_label(labels, second, groups)
    places = _places(truth, chances)
    other_places = _places(truth, others)
    areas = [values[truth == 1].mean() for values in (places, other_places)]
    if min(count_groups(truth, numbers)) < FEW:
        return AurocDifference(float(areas[0]), float(areas[1]), interval=None, p_value=math.nan)
    # Differences from their mean, summed by group: samples of a group vary together.
    by_class = []
    for value in (1, 0):
        mine = truth == value
        excess = (other_places - places - (areas[1] - areas[0]))[mine]
        sums = np.bincount(numbers[mine], weights=excess, minlength=numbers.max() + 1)
        by_class.append(sums / mine.sum())
    positive, negative = by_class
    having, lacking = count_groups(truth, numbers)
    both = numbers.max() + 1
    variance = (positive**2).sum() * having / (having - 1)
    variance += (negative**2).sum() * lacking / (lacking - 1)
    variance += 2 * (positive * negative).sum() * both / (both - 1)
    error = math.sqrt(max(variance, 0.0))
    difference = float(areas[1] - areas[0])
    interval = (difference - _NORMAL * error, difference + _NORMAL * error)
    p_value = math.erfc(abs(difference) / error / math.sqrt(2)) if error else float(difference == 0)
    return AurocDifference(float(areas[0]), float(areas[1]), interval, p_value)


def _places(truth, chances):
    """Return the share of negatives below each positive, and of positives above each negative."""
    import numpy as np
    from scipy.stats import rankdata

    places = np.empty(len(truth))
    ranks = rankdata(chances)  # equal scores share their mean rank, so they count as half
    for value in (1, 0):
        mine = truth == value
        below = (ranks[mine] - rankdata(chances[mine])) / (~mine).sum()
        places[mine] = below if value else 1 - below
    return places
