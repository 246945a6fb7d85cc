"""compare_aurocs: against the formula of DeLong written out."""

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from tpukit.metrics import compare_aurocs


@pytest.fixture
def samples():
    random = np.random.default_rng(0)
    truth = (random.random(400) < 0.3).astype(int)
    ease = random.normal(0, 0.5, 400)  # what both networks see
    first = truth + ease + random.normal(0, 1, 400)
    second = 1.3 * truth + ease + random.normal(0, 1, 400)
    return truth, first.round(1), second.round(1)  # with equal scores


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
