"""Metrics of torchmetrics through `evaluate(keep_outputs=False)` on two cores, against their functions.

Each class of `torchmetrics.classification` and `torchmetrics.segmentation` is updated step by step
on two cores. Its function in `torchmetrics.functional` gets all samples at once.
"""

import functools
import inspect

import pytest
import torch
import torchmetrics.classification
import torchmetrics.functional.classification
import torchmetrics.functional.segmentation
import torchmetrics.segmentation
from helpers.launching import quietly
from torch import nn
from torch.utils import _pytree as tree
from torch.utils.data import TensorDataset

from tpukit import evaluate

COUNT = 37  # samples: five steps of four on each core, of which the last have padding
CLASSES = 4
ARGUMENTS = {
    "num_classes": CLASSES,
    "num_labels": CLASSES,
    "num_groups": 2,
    "average": "macro",
    "beta": 2.0,
    "min_precision": 0.4,
    "min_recall": 0.4,
    "min_sensitivity": 0.4,
    "min_specificity": 0.4,
}
# A prefix of the classes of `torchmetrics.classification`, each a task.
TASKS = ("Binary", "Multiclass", "Multilabel")
NOT_OFFERED = {
    "BinaryFairness": "its update needs a third input, the groups",
    "BinaryGroupStatRates": "its update needs a third input, the groups",
}
PER_POSITION = {"MulticlassExactMatch"}  # needs a row of classes per sample


def random_numbers():
    return torch.Generator().manual_seed(0)


def samples(name):
    """Return (outputs, targets) for a metric of this name."""
    draw = functools.partial(torch.rand, generator=random_numbers())
    if name in torchmetrics.segmentation.__all__:
        masks = draw(2, COUNT, 16, 16).mul(CLASSES).long()
        return masks[0], masks[1]
    if name in PER_POSITION:
        return draw(COUNT, CLASSES, 5), draw(COUNT, 5).mul(CLASSES).long()
    if name.startswith("Multiclass"):
        return draw(COUNT, CLASSES).softmax(dim=1), draw(COUNT).mul(CLASSES).long()
    shape = (COUNT, CLASSES) if name.startswith("Multilabel") else (COUNT,)
    # Multiples of 1/16, so there are ties.
    return draw(shape).mul(16).round() / 16, draw(shape).round().long()


def class_of(name):
    if name in torchmetrics.segmentation.__all__:
        return getattr(torchmetrics.segmentation, name)
    return getattr(torchmetrics.classification, name)


def function_of(name):
    """Return the function of a class: `multiclass_fbeta_score` for MulticlassFBetaScore."""
    for module in (torchmetrics.functional.classification, torchmetrics.functional.segmentation):
        for candidate in module.__all__:
            if candidate.replace("_", "") == name.lower():
                return getattr(module, candidate)
    return None


def arguments(name):
    parameters = inspect.signature(class_of(name).__init__).parameters
    known = {key: value for key, value in ARGUMENTS.items() if key in parameters}
    if name in torchmetrics.segmentation.__all__:
        known["input_format"] = "index"
    return known


def expected(name):
    """Return what the function computes from all samples at once."""
    result = function_of(name)(*samples(name), **arguments(name))
    # The functions of segmentation return a value per sample, their classes the mean.
    if name in torchmetrics.segmentation.__all__:
        return result.nanmean()
    return result


def mean_of(result):
    """Return a metric as one number: the mean of a table, or of the places of a curve."""
    parts = [part.double().flatten() for part in tree.tree_leaves(result)]
    numbers = torch.cat(parts)
    return numbers[numbers.isfinite()].mean()


def as_one_number(kind):
    """Return a class of metrics whose result is one number, as `evaluate` needs it."""

    class Mean(kind):
        def compute(self):
            return mean_of(super().compute())

    return Mean


def evaluated(core, name):
    """Return the metric from `evaluate`."""
    data = TensorDataset(*samples(name))
    metric = as_one_number(class_of(name))(**arguments(name))
    # The outputs are the inputs, so no network comes between a metric and its numbers.
    found = evaluate(
        core,
        core.model(nn.Identity()),
        lambda outputs, targets: outputs.double().mean(),
        core.batches(data, batch_size=4),
        metrics={"value": metric},
        keep_outputs=False,
    )
    return found.metrics["value"]


NAMES = [
    name
    for name in [*torchmetrics.classification.__all__, *torchmetrics.segmentation.__all__]
    if name.startswith(TASKS) or name in torchmetrics.segmentation.__all__
]
OFFERED = [name for name in NAMES if name not in NOT_OFFERED]


@pytest.fixture(scope="module")
def on_two_cores():
    """Return, by name, the metric of each core."""
    run = quietly(lambda core: [evaluated(core, name) for name in OFFERED])
    return dict(zip(OFFERED, zip(*run.results, strict=True), strict=True))


@pytest.mark.filterwarnings("ignore")  # of a class without samples, or of memory for curves
@pytest.mark.parametrize("name", NAMES)
def test_a_metric_of_two_cores_is_that_of_all_samples(name, on_two_cores):
    if name in NOT_OFFERED:
        pytest.skip(f"not offered: {NOT_OFFERED[name]}")
    truth = mean_of(expected(name)).item()
    assert on_two_cores[name] == pytest.approx((truth, truth), abs=1e-6)
