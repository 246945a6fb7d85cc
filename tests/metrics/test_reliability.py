"""brier_score and calibration_error: against other libraries."""

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss
from torchmetrics.functional.classification import binary_calibration_error

from tpukit.metrics import brier_score, calibration_error


def test_calibration_is_that_of_other_libraries():
    random = np.random.default_rng(0)
    truth = (random.random(400) < 0.3).astype(int)
    scores = truth + random.normal(0, 1, 400)
    chances = 1 / (1 + np.exp(-scores))
    assert brier_score(truth, chances) == pytest.approx(brier_score_loss(truth, chances))
    theirs = binary_calibration_error(torch.tensor(chances), torch.tensor(truth), n_bins=15)
    assert calibration_error(truth, chances) == pytest.approx(float(theirs), abs=1e-6)
    assert calibration_error([1, 1, 1, 0, 0], [0.8] * 5) == pytest.approx(0.2)
    assert calibration_error([0, 1], [0.0, 1.0], bins=1) == brier_score([0, 1], [0.0, 1.0]) == 0
    for measure in (brier_score, calibration_error):
        with pytest.raises(ValueError, match="probabilities"):
            measure(truth, scores)
    with pytest.raises(ValueError, match="bins must be 1 or more"):
        calibration_error(truth, chances, bins=0)
