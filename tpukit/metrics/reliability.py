"""Measure whether the predicted probabilities equal the frequencies of the labels.

probabilities  0.8  0.8  0.8  0.8  0.8     predicted mean 0.8
labels         1    1    1    0    0       observed frequency 0.6, so the error is 0.2
"""

from __future__ import annotations

from typing import Any

from tpukit.essentials.display import InvalidValueError
from tpukit.metrics.samples import one_label_with_threshold


def brier_score(labels: Any, probabilities: Any) -> float:
    """Return the mean squared difference between probabilities and labels, 0 to 1; 0 is best.

    A network that always predicts the frequency f of the label has the score f (1 - f): for 20 %
    positive samples, 0.16.

    Args:
        labels: (N,) zeros and ones.
        probabilities: (N,) in [0, 1], not logits.

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, or a probability is outside
            [0, 1].
    """
    truth, chances, _ = one_label_with_threshold(labels, probabilities, threshold=0.5)
    return float(((chances - truth) ** 2).mean())


def calibration_error(labels: Any, probabilities: Any, *, bins: int = 15) -> float:
    """Return the expected calibration error (ECE), 0 to 1; 0 is best.

    [0, 1] is divided into bins of equal width. In each bin, the mean probability is compared with
    the frequency of the label. The result is the mean absolute difference, weighted by the samples
    of each bin. With few samples the error is too large, because frequencies in small bins vary.

    Args:
        labels, probabilities: as for `brier_score`.
        bins: the number of bins, 1 or more; 15 is usual (Guo et al. 2017).

    Raises:
        ValueError: as `brier_score`, or `bins` is less than 1.
    """
    import numpy as np

    if bins < 1:
        raise InvalidValueError(f"bins must be 1 or more, got {bins}", fix="bins=15")
    truth, chances, _ = one_label_with_threshold(labels, probabilities, threshold=0.5)
    bin_of = np.minimum((chances * bins).astype(int), bins - 1)  # probability 1 is in the last bin
    # Sums in place of means: (sum of chances - sum of labels) is already weighted by the samples.
    claimed = np.bincount(bin_of, weights=chances, minlength=bins)
    found = np.bincount(bin_of, weights=truth, minlength=bins)
    return float(abs(claimed - found).sum() / len(truth))
