"""Find the sensitivity per exam at a number of false alarms per exam.

A radiologist looks at every image that a network marks. Marked images that are negative are false
alarms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tpukit.essentials.display import InvalidValueError
from tpukit.metrics.areas import FEW, drawn_weights, middle_95, sensitivity_text
from tpukit.metrics.samples import count_groups, one_label

_ROUNDING = 1e-9  # two numbers of false alarms that differ by less count as equal


@dataclass(frozen=True)
class FalseAlarmPoint:
    """A threshold on the probability of an image, and its effect on the exams, or other groups.

    Attributes:
        threshold: images with this probability or more are marked. If it is infinity, no image is
            marked.
        sensitivity: share of the groups with a positive image in which at least one positive image
            is marked.
        false_alarms: number of marked negative images, divided by the number of all groups.
        interval: (low, high), the middle 95 % of the sensitivity in a bootstrap, which draws whole
            groups and chooses a new threshold in each draw; None with fewer than 5 positive or
            fewer than 5 negative groups.
    """

    threshold: float
    sensitivity: float
    false_alarms: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        text = sensitivity_text(self.sensitivity, self.interval)
        return f"{text} at {self.false_alarms:.2f} false alarms per group"


def sensitivity_at_false_alarms(
    false_alarms: float,
    labels: Any,
    probabilities: Any,
    *,
    groups: Any,
    resamples: int = 500,
    seed: int = 0,
) -> FalseAlarmPoint:
    """Return the sensitivity per exam at a number of false alarms per exam.

    The result is a point of the FROC curve. Its threshold is the lowest with at most this number of
    false alarms. The threshold is chosen and judged on the same samples.

    Args:
        false_alarms: the allowed mean number of marked negative images per group, 0 or more.
        labels: (N,) zeros and ones, for each image.
        probabilities: (N,) the probability, or any score, of each image.
        groups: (N,) the exam of each image.
        resamples: number of draws of the bootstrap, 1 or more.
        seed: the seed of the bootstrap.

    Raises:
        ValueError: `false_alarms` is negative; or another argument is not valid for `show_roc`.
    """
    import numpy as np

    if not false_alarms >= 0:
        fact = f"false_alarms must be a number per group, 0 or more, got {false_alarms}"
        raise InvalidValueError(fact, fix="false_alarms=1.0")
    truth, scores, numbers = one_label(labels, probabilities, groups)
    # Ranks in place of probabilities, so that every image is above -inf, also a score of -inf.
    _, ranks = np.unique(scores, return_inverse=True)
    # For each group, the highest rank of its positive images: an exam is found if this image is
    # marked. -inf for a group without positive images.
    found_at = np.full(numbers.max() + 1, -np.inf)
    np.maximum.at(found_at, numbers[truth == 1], ranks[truth == 1])
    is_positive = np.bincount(numbers[truth == 1], minlength=len(found_at)) > 0
    # The negative images from the most probable down: these are marked first.
    order = np.argsort(-ranks[truth == 0], kind="stable")
    alarms = ranks[truth == 0][order]
    group_of_alarm = numbers[truth == 0][order]

    def limit(weights) -> float:
        """Return the rank above which images may be marked; -inf if all may be marked."""
        count = np.cumsum(weights[group_of_alarm])
        allowed = np.searchsorted(count, false_alarms * weights.sum() + _ROUNDING, side="right")
        return alarms[allowed] if allowed < len(alarms) else -math.inf

    def sensitivity(weights) -> float:
        """Return the weighted share of the positive groups in which a positive image is marked."""
        weights_of_positive = weights * is_positive
        is_found = found_at > limit(weights)
        return float((weights_of_positive * is_found).sum() / weights_of_positive.sum())

    once = np.ones(len(found_at))
    interval = None
    if min(count_groups(truth, numbers)) >= FEW:
        # Draws are weights of samples. All samples of a group have the same weight, so take that of
        # the group's first sample.
        _, first = np.unique(numbers, return_index=True)
        draws = drawn_weights(truth, numbers, resamples, seed=seed)
        found = [sensitivity(weights[first]) for weights in draws]
        interval = middle_95(found)
    marked = scores[ranks > limit(once)]
    return FalseAlarmPoint(
        threshold=float(marked.min(initial=math.inf)),
        sensitivity=sensitivity(once),
        false_alarms=float((alarms > limit(once)).sum() / len(found_at)),
        interval=interval,
    )
