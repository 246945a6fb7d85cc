"""sensitivity_at_false_alarms: exams whose images are known."""

import numpy as np
import pytest

from tpukit.metrics import sensitivity_at_false_alarms


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


def test_a_score_may_be_infinite():
    truth = np.tile([1, 0], 12)
    scores = np.linspace(0, 1, 24)
    exams = np.arange(24) // 2
    infinite = np.where((scores > 0.5) & (truth == 1), np.inf, scores)
    found = sensitivity_at_false_alarms(0.25, truth, infinite, groups=exams)
    assert found == sensitivity_at_false_alarms(0.25, truth, infinite.clip(max=9), groups=exams)


def test_an_image_with_the_score_minus_infinity_can_be_marked():
    scores = np.array([-np.inf, 0.5, 0.4, -np.inf])
    found = sensitivity_at_false_alarms(9, [1, 1, 0, 0], scores, groups=range(4))
    assert (found.sensitivity, found.false_alarms, found.threshold) == (1.0, 0.5, -np.inf)


def test_the_interval_is_of_drawn_exams():
    random = np.random.default_rng(1)
    exams = np.repeat(np.arange(100), 10)
    truth = (random.random(1000) < 0.2) * (exams < 50)
    chances = 1 / (1 + np.exp(-2 * truth - random.normal(0, 1, 1000)))
    found = sensitivity_at_false_alarms(1.0, truth, chances, groups=exams, resamples=200)
    low, high = found.interval
    assert low < found.sensitivity < high
    assert found.false_alarms <= 1.0
    assert "sensitivity 0." in str(found)
