import math

import numpy
import pytest
import torch
from helpers.launching import quietly
from torch import nn

import tpukit
from tpukit import WorkerError
from tpukit.essentials.display import check_count, check_flag, check_number

data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))


def fit(core, batches, options):
    model = core.model(nn.Linear(2, 2))
    train = core.batches(data, **({"batch_size": 2} | batches))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tpukit.fit(core, model, optimizer, nn.CrossEntropyLoss(), train, **options)


def evaluate(core, options):
    model = core.model(nn.Linear(2, 2))
    batches = core.batches(data, batch_size=2)
    tpukit.evaluate(core, model, nn.CrossEntropyLoss(), batches, **options)


def predict(core, options):
    tpukit.predict(core, core.model(nn.Linear(2, 2)), core.batches(data, batch_size=2), **options)


CALLS = {
    "fit": lambda core, name, value: fit(core, {}, {name: value}),
    "core.batches": lambda core, name, value: fit(core, {name: value}, {}),
    "evaluate": lambda core, name, value: evaluate(core, {name: value}),
    "predict": lambda core, name, value: predict(core, {name: value}),
    "Checkpoints": lambda _, name, value: tpukit.Checkpoints("run", **{name: value}),
    "EarlyStopping": lambda _, name, value: tpukit.EarlyStopping(**{name: value}),
    "FitOptions": lambda _, name, value: tpukit.FitOptions(**{name: value}),
}


@pytest.mark.parametrize(
    ("call", "name", "value", "fix"),
    [
        ("fit", "epochs", "3", "epochs=3"),
        ("fit", "epochs", 1.5, "epochs=1"),
        ("fit", "epochs", True, "epochs=1"),
        ("fit", "epochs", "0", "epochs=1"),
        ("fit", "max_grad_norm", numpy.ones(2), "max_grad_norm=1.0"),
        ("fit", "steps_per_epoch", "2", "steps_per_epoch=2, or None"),
        ("fit", "accumulate_grad_batches", "2", "accumulate_grad_batches=2"),
        ("fit", "max_grad_norm", "1", "max_grad_norm=1.0"),
        ("fit", "early_stopping", "2", "early_stopping=3"),
        ("fit", "bf16", "False", "bf16=False"),
        ("fit", "bf16", 1, "bf16=True"),
        ("core.batches", "batch_size", "2", "batch_size=2"),
        ("core.batches", "batch_size", 2.5, "batch_size=1"),
        ("core.batches", "workers", "0", "workers=0"),
        ("core.batches", "threads", "2", "threads=2"),
        ("core.batches", "seed", "7", "seed=7"),
        ("core.batches", "seed", -1, "seed=0"),
        ("core.batches", "shuffle", "False", "shuffle=False"),
        ("core.batches", "drop_last", "yes", "drop_last=True"),
        ("evaluate", "bf16", "no", "bf16=False"),
        ("evaluate", "keep_outputs", "False", "keep_outputs=False"),
        ("predict", "bf16", "False", "bf16=False"),
        ("Checkpoints", "resume", "no", "resume=False"),
        ("Checkpoints", "keep_last", "3", "keep_last=3"),
        ("Checkpoints", "save_every", "abc", "save_every="),
        ("EarlyStopping", "patience", "2", "patience=2"),
        ("EarlyStopping", "restore_best_weights", "False", "restore_best_weights=False"),
        ("FitOptions", "log_every", "10", "log_every=10"),
        ("FitOptions", "same_seed", "False", "same_seed=False"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(call, name, value, fix):
    with pytest.raises(WorkerError, match=rf"{name}( is|=)(.|\n)*fix:(.|\n)*{fix}") as caught:
        quietly(CALLS[call], name, value, cores=1, backend="cpu")
    assert isinstance(caught.value.__cause__, TypeError | ValueError)


def test_numbers_and_switches_of_numpy_and_torch_are_taken():
    check_count("epochs", numpy.int64(3))
    check_flag("bf16", numpy.bool_(True))
    for value in (1, 1.5, numpy.float32(1.5), torch.tensor(1.5)):
        check_number("max_grad_norm", value, fix="max_grad_norm=1.0")


@pytest.mark.parametrize(
    ("value", "fix"),
    [(1e3, "steps=1000"), (0.0, "steps=1"), (2.5, "steps=1"), (math.inf, "steps=1")],
)
def test_the_fix_for_a_float_is_its_whole_number(value, fix):
    with pytest.raises(TypeError, match=rf"whole number, got {value!r}\n  fix:   {fix}$"):
        check_count("steps", value)
