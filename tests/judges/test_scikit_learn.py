"""Measures of 200 random tables equal those of scikit-learn and scipy.

Probabilities are multiples of 1/8 in most tables, so they have ties. Some tables have one class,
and some have missing values.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
from scipy.stats import bootstrap, mannwhitneyu, rankdata
from sklearn.calibration import calibration_curve
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score, roc_curve

from tpukit import metrics
from tpukit.metrics.areas import FEW, drawn_weights, score

DRAWS = 50  # of the bootstrap, with a curve of scikit-learn's for each
SPECIFICITIES = (0.0, 0.5, 0.9, 1.0)
ONE_CLASS = range(0, 200, 20)
MISSING = range(10, 200, 20)


class Table(NamedTuple):
    labels: np.ndarray  # (N,) 0 or 1
    probabilities: np.ndarray  # (N,)


def table(number):
    random = np.random.default_rng(number)
    count = int(random.integers(2 * FEW, 300))
    labels = (random.random(count) < random.uniform(0.1, 0.9)).astype(float)
    if number in ONE_CLASS:
        labels[:] = labels[0]
    else:
        labels[:2] = 0, 1
    logits = random.uniform(0, 3) * labels + random.normal(0, 1, count)
    probabilities = 1 / (1 + np.exp(-logits))
    has_ties = number % 4 != 1
    if has_ties:
        probabilities = np.round(probabilities * 8) / 8
    if number in MISSING:
        probabilities[random.random(count) < 0.1] = math.nan
        probabilities[0] = math.nan
    return Table(labels, probabilities)


ALL = range(200)
USUAL = [number for number in ALL if number not in ONE_CLASS and number not in MISSING]


@pytest.mark.parametrize("number", USUAL)
def test_areas_and_their_intervals(number):
    labels, probabilities = table(number)
    found = score(labels, probabilities, resamples=DRAWS, seed=number)
    area = roc_auc_score(labels, probabilities)
    average = average_precision_score(labels, probabilities)
    assert found.auroc == metrics.auroc_table(labels, probabilities, resamples=1)["AUROC"].item()
    assert (found.auroc, found.average_precision) == pytest.approx((area, average), abs=1e-12)
    positives = probabilities[labels == 1]
    negatives = probabilities[labels == 0]
    pairs = len(positives) * len(negatives)
    assert area == pytest.approx(mannwhitneyu(positives, negatives).statistic / pairs, abs=1e-12)
    if min(len(positives), len(negatives)) < FEW:
        assert np.isnan(found.auroc_interval).all()
        return
    draws = list(drawn_weights(labels, np.arange(len(labels)), DRAWS, seed=number))
    areas = [roc_auc_score(labels, probabilities, sample_weight=drawn) for drawn in draws]
    averages = [
        average_precision_score(labels, probabilities, sample_weight=drawn) for drawn in draws
    ]
    limits = np.percentile([areas, averages], (2.5, 97.5), axis=1).T
    np.testing.assert_allclose(found.auroc_interval, limits[0], atol=1e-12)
    np.testing.assert_allclose(found.average_precision_interval, limits[1], atol=1e-12)


@pytest.mark.parametrize("number", USUAL)
def test_calibration(number):
    labels, probabilities = table(number)
    brier = brier_score_loss(labels, probabilities)
    assert metrics.brier_score(labels, probabilities) == pytest.approx(brier, abs=1e-12)
    bins = 15  # no multiple of 1/8 but 0 and 1 is a limit of a bin
    observed, predicted = calibration_curve(labels, probabilities, n_bins=bins)
    in_bin = np.bincount((probabilities * bins).astype(int).clip(max=bins - 1), minlength=bins)
    weights = in_bin[in_bin > 0] / len(labels)
    expected = (weights * abs(observed - predicted)).sum()
    assert metrics.calibration_error(labels, probabilities, bins=bins) == pytest.approx(expected)


@pytest.mark.parametrize("number", USUAL)
def test_operating_point(number):
    labels, probabilities = table(number)
    false_rate, recall, thresholds = roc_curve(labels, probabilities, drop_intermediate=False)
    for specificity in SPECIFICITIES:
        found = metrics.sensitivity_at(specificity, labels, probabilities, resamples=1)
        best = recall[1 - false_rate >= specificity - 1e-9].max()
        assert found.sensitivity == pytest.approx(best, abs=1e-12)
        # Of the thresholds with this sensitivity, the highest has the fewest false alarms.
        place = np.flatnonzero(recall == best)[0]
        assert found.specificity == pytest.approx(1 - false_rate[place], abs=1e-12)
        assert found.threshold == thresholds[place]


def has_many_of_each(number):
    """Return whether every draw of a bootstrap has both classes; scipy keeps the others."""
    labels, _ = table(number)
    return min(labels.sum(), (1 - labels).sum()) > 4 * FEW


@pytest.mark.parametrize("number", list(filter(has_many_of_each, USUAL))[:20])
def test_interval_of_an_area_is_scipys_apart_from_chance(number):
    labels, probabilities = table(number)

    def area(labels, probabilities, axis=-1):
        ranks = rankdata(probabilities, axis=axis)
        positives = labels.sum(axis=axis)
        negatives = (1 - labels).sum(axis=axis)
        larger = (ranks * labels).sum(axis=axis) - positives * (positives + 1) / 2
        return larger / (positives * negatives)

    how = {"paired": True, "vectorized": True, "n_resamples": 2000, "method": "percentile"}
    random = np.random.default_rng(number)
    theirs = bootstrap((labels, probabilities), area, rng=random, **how)
    ours = score(labels, probabilities, resamples=2000).auroc_interval
    # A limit from 2,000 draws has a standard error of 0.06 standard deviations; both have one.
    most = 4 * math.sqrt(2) * 0.06 * theirs.standard_error
    np.testing.assert_allclose(ours, theirs.confidence_interval, atol=most)


@pytest.mark.parametrize("number", ONE_CLASS)
def test_one_class_has_no_area_but_a_calibration(number):
    labels, probabilities = table(number)
    row = metrics.auroc_table(labels, probabilities).iloc[0]
    assert math.isnan(row["AUROC"])
    assert row["note"] == ("in every sample" if labels[0] else "in no sample")
    with pytest.raises(ValueError, match="samples with the label and samples without"):
        metrics.sensitivity_at(0.9, labels, probabilities)
    expected = ((labels - probabilities) ** 2).mean()
    assert metrics.brier_score(labels, probabilities) == pytest.approx(expected)


@pytest.mark.parametrize("number", MISSING)
def test_missing_values_are_refused_and_the_others_are_measured(number):
    labels, probabilities = table(number)
    measures = (
        score,
        metrics.auroc_table,
        metrics.brier_score,
        metrics.calibration_error,
        lambda *samples: metrics.sensitivity_at(0.9, *samples),
        lambda *samples: metrics.compare_aurocs(*samples, samples[1]),
    )
    for measure in measures:
        with pytest.raises(ValueError, match="are nan"):
            measure(labels, probabilities)
    known = ~np.isnan(probabilities)
    area = roc_auc_score(labels[known], probabilities[known])
    assert score(labels[known], probabilities[known], resamples=1).auroc == pytest.approx(area)
