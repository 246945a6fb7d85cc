"""Calibration, two networks, and false alarms per exam: against formulas written out, and other libraries."""

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import brier_score_loss, roc_auc_score
from torchmetrics.functional.classification import binary_calibration_error

from tpukit.metrics import (
    brier_score,
    calibration_error,
    compare_aurocs,
    sensitivity_at_false_alarms,
)


@pytest.fixture
def samples():
    random = np.random.default_rng(0)
    truth = (random.random(400) < 0.3).astype(int)
    ease = random.normal(0, 0.5, 400)  # what both networks see
    first = truth + ease + random.normal(0, 1, 400)
    second = 1.3 * truth + ease + random.normal(0, 1, 400)
    return truth, first.round(1), second.round(1)  # with equal scores


def as_probability(scores):
    return 1 / (1 + np.exp(-scores))


def test_calibration_is_that_of_other_libraries(samples):
    import torch

    truth, scores, _ = samples
    chances = as_probability(scores)
    assert brier_score(truth, chances) == pytest.approx(brier_score_loss(truth, chances))
    theirs = binary_calibration_error(torch.tensor(chances), torch.tensor(truth), n_bins=15)
    assert calibration_error(truth, chances) == pytest.approx(float(theirs), abs=1e-6)
    assert calibration_error([1, 1, 1, 0, 0], [0.8] * 5) == pytest.approx(0.2)
    assert calibration_error([0, 1], [0.0, 1.0], bins=1) == brier_score([0, 1], [0.0, 1.0]) == 0
    for measure in (brier_score, calibration_error):
        with pytest.raises(ValueError, match="probabilities"):
            measure(truth, scores)
    with pytest.raises(ValueError, match="bins is 1 or more"):
        calibration_error(truth, chances, bins=0)


def delong(truth, first, second):
    """Return the difference of two areas, and its variance, as DeLong et al. wrote it."""
    psi = []
    for scores in (first, second):
        pairs = scores[truth == 1][:, None] - scores[truth == 0][None]
        psi.append(0.5 * (pairs == 0) + (pairs > 0))
    of_difference = psi[1] - psi[0]
    positive, negative = of_difference.mean(1), of_difference.mean(0)
    variance = positive.var(ddof=1) / len(positive) + negative.var(ddof=1) / len(negative)
    return of_difference.mean(), variance


def test_two_networks_are_compared_as_delong_wrote_it(samples):
    truth, first, second = samples
    found = compare_aurocs(truth, first, second)
    difference, variance = delong(truth, first, second)
    assert found.first == pytest.approx(roc_auc_score(truth, first))
    assert found.second == pytest.approx(roc_auc_score(truth, second))
    half = 1.96 * variance**0.5
    assert found.interval == pytest.approx((difference - half, difference + half))
    assert found.p_value == pytest.approx(2 * norm.sf(abs(difference) / variance**0.5))
    assert "AUROC 0." in str(found)
    assert compare_aurocs(truth, first, first).p_value == 1
    few = compare_aurocs([0, 1, 1], first[:3], second[:3])
    assert few.interval is None
    assert "too few groups" in str(few)


def test_copies_of_a_sample_in_its_group_prove_nothing_more(samples):
    truth, first, second = samples
    once = compare_aurocs(truth, first, second)
    arguments = [np.repeat(values, 9) for values in samples]
    groups = np.repeat(np.arange(len(truth)), 9)
    grouped = compare_aurocs(*arguments, groups=groups)
    assert grouped.interval == pytest.approx(once.interval, rel=1e-6)
    low, high = compare_aurocs(*arguments).interval
    assert high - low < 0.4 * (once.interval[1] - once.interval[0])


def test_false_alarms_are_counted_per_exam():
    exams = np.repeat(np.arange(10), 4)
    truth = np.zeros(40, int)
    truth[[0, 1, 4, 8]] = 1  # three exams are positive
    chances = np.zeros(40)
    chances[[0, 4, 8]] = 0.9, 0.5, 0.2
    chances[[12, 16, 20]] = 0.7, 0.6, 0.3  # three healthy images

    def at(false_alarms):
        return sensitivity_at_false_alarms(false_alarms, truth, chances, groups=exams)

    none, two, all_of_them = at(0), at(0.2), at(100)
    assert (none.sensitivity, none.threshold, none.false_alarms) == (pytest.approx(1 / 3), 0.9, 0)
    assert (two.sensitivity, two.threshold, two.false_alarms) == (pytest.approx(2 / 3), 0.5, 0.2)
    assert (all_of_them.sensitivity, all_of_them.false_alarms) == (1, 3.6)
    assert none.interval is None
    assert str(two) == "sensitivity 0.67 at 0.20 false alarms per group"
    with pytest.raises(ValueError, match="0 or more"):
        at(-1)


def test_the_interval_is_of_drawn_exams():
    random = np.random.default_rng(1)
    exams = np.repeat(np.arange(100), 10)
    truth = (random.random(1000) < 0.2) * (exams < 50)
    chances = as_probability(2 * truth + random.normal(0, 1, 1000))
    found = sensitivity_at_false_alarms(1.0, truth, chances, groups=exams, resamples=200)
    low, high = found.interval
    assert low < found.sensitivity < high
    assert found.false_alarms <= 1.0
    assert "sensitivity 0." in str(found)
