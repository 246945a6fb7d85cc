"""Compare the areas under the ROC curves of two networks on the same samples.

Both networks see the same samples, so their areas vary together. Therefore overlapping intervals of
the two areas do not show that the networks are equally good. The variance of the difference is
computed by DeLong et al. (1988), and for samples in groups by Obuchowski (1997). Both formulas use
the share of samples of the other class that a sample is ranked above or below:

    positives 0.9 and 0.4, negatives 0.5 and 0.1
    0.9 is above both negatives, and 0.4 is above one of two: the area is (1 + 1/2) / 2 = 0.75
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tpukit.metrics.areas import FEW
from tpukit.metrics.samples import count_groups, one_label

_NORMAL = 1.96  # 95 % of a normal distribution are within 1.96 standard errors of its mean


@dataclass(frozen=True)
class AurocDifference:
    """The areas under the ROC curves of two networks, and their difference.

    Attributes:
        first: AUROC of the first network.
        second: AUROC of the second network.
        interval: (low, high), the 95 % interval of `second - first`; None with fewer than 5
            positive or fewer than 5 negative groups.
        p_value: the two-sided probability of a difference at least as large, if the networks are
            equally good; nan without an interval.
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
    """Compare the areas under the ROC curves of two networks by DeLong's test.

    Args:
        labels: (N,) zeros and ones.
        first: (N,) the first network's probabilities, or any scores.
        second: (N,) the second network's probabilities or scores, for the same samples.
        groups: (N,) the study or patient of each sample; None if every sample is independent.

    Returns:
        both areas, and their difference with its interval and p-value.

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, all labels are equal, a
            score is nan, or a sample has no group.
    """
    import numpy as np

    truth, chances, numbers = one_label(labels, first, groups)
    _, others, _ = one_label(labels, second, groups)
    places = _places(truth, chances)
    other_places = _places(truth, others)
    areas = [values[truth == 1].mean() for values in (places, other_places)]
    if min(count_groups(truth, numbers)) < FEW:
        return AurocDifference(float(areas[0]), float(areas[1]), interval=None, p_value=math.nan)
    # For each class: how much more the second network ranks a sample rightly than the first, as the
    # deviation from the mean. Sum it by group, because samples of a group vary together.
    by_class = []
    for value in (1, 0):
        mine = truth == value
        excess = (other_places - places - (areas[1] - areas[0]))[mine]
        sums = np.bincount(numbers[mine], weights=excess, minlength=numbers.max() + 1)
        by_class.append(sums / mine.sum())
    positive, negative = by_class
    having, lacking = count_groups(truth, numbers)
    both = numbers.max() + 1
    # Obuchowski (1997): n / (n - 1) corrects for the number of groups. The last term is the
    # covariance of positive and negative samples of the same group.
    variance = (positive**2).sum() * having / (having - 1)
    variance += (negative**2).sum() * lacking / (lacking - 1)
    variance += 2 * (positive * negative).sum() * both / (both - 1)
    error = math.sqrt(max(variance, 0.0))
    difference = float(areas[1] - areas[0])
    interval = (difference - _NORMAL * error, difference + _NORMAL * error)
    # Without variance, p is 1 if the areas are equal, and otherwise 0.
    p_value = math.erfc(abs(difference) / error / math.sqrt(2)) if error else float(difference == 0)
    return AurocDifference(float(areas[0]), float(areas[1]), interval, p_value)


def _places(truth, chances):
    """Return for each sample the share of the other class that has a correct rank relative to it.

    For a positive sample, this is the share of negatives below it; for a negative sample, the share
    of positives above it. Equal scores count as half.
    """
    import numpy as np
    from scipy.stats import rankdata

    places = np.empty(len(truth))
    ranks = rankdata(chances)  # equal scores share their mean rank, so they count as half
    for value in (1, 0):
        mine = truth == value
        below = (ranks[mine] - rankdata(chances[mine])) / (~mine).sum()
        places[mine] = below if value else 1 - below
    return places
