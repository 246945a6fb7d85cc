"""Measure whether the predicted probabilities equal the frequencies of the labels.

probabilities 0.8 0.8 0.8 0.8 0.8, true 1 1 1 0 0: predicted 0.8, observed 0.6, an error of 0.2
"""

from __future__ import annotations

from typing import Any

from tpukit.essentials.display import InvalidValueError
from tpukit.metrics.samples import one_label_with_threshold


def brier_score(labels: Any, probabilities: Any) -> float:
    """Return the mean squared difference between probabilities and labels, 0 to 1; 0 is best.

    A network that always predicts the frequency f of a label has f (1 - f), such as 0.16 for 20 %.

    Args:
        labels: (N,) zeros and ones.
        probabilities: (N,) in [0, 1].

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, or a probability is outside
            [0, 1].
    """
    truth, chances, _ = one_label_with_threshold(labels, probabilities, threshold=0.5)
    return float(((chances - truth) ** 2).mean())


def calibration_error(labels: Any, probabilities: Any, *, bins: int = 15) -> float:
    """Return the expected calibration error (ECE), 0 to 1; 0 is best.

    It divides [0, 1] into bins of equal width, and returns the mean over the samples of the
    difference between the probability and the frequency of their bin. With few samples it is too
    large, because frequencies of small bins vary.

    Args:
        labels, probabilities: as for `brier_score`.
        bins: their number; 15 is usual (Guo et al. 2017).

    Raises:
        ValueError: as `brier_score`, or `bins` is less than 1.
    """
    import numpy as np

    if bins < 1:
        raise InvalidValueError(f"bins must be 1 or more, got {bins}", fix="bins=15")
    truth, chances, _ = one_label_with_threshold(labels, probabilities, threshold=0.5)
    bin_of = np.minimum((chances * bins).astype(int), bins - 1)
    claimed = np.bincount(bin_of, weights=chances, minlength=bins)
    found = np.bincount(bin_of, weights=truth, minlength=bins)
    return float(abs(claimed - found).sum() / len(truth))
