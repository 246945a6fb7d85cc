"""The options of `fit` that travel together: what they accept, and what they refuse with a fix that works."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from helpers.launching import quietly
from torch import nn

import tpukit
from tpukit import Checkpoints, EarlyStopping, FitOptions, WorkerError, fit

PAIRS = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 64).reshape(16, 4), torch.ones(16, 1))

# The call as a text, and the message.
REFUSED = {
    "a patience of 0": (
        "EarlyStopping(patience=0)",
        ValueError,
        "patience must be at least 1, got 0",
    ),
    "a patience in parts": (
        "EarlyStopping(patience=2.5)",
        TypeError,
        "patience must be a whole number, got 2.5",
    ),
    "a patience that is a flag": (
        "EarlyStopping(patience=True)",
        TypeError,
        "patience must be a whole number, got True",
    ),
    "no folder": ("Checkpoints(None)", TypeError, "folder must be a path, got None"),
    "a bucket as the folder": (
        'Checkpoints("gs://bucket/run")',
        ValueError,
        "folder must be a path on this machine",
    ),
    "none kept": (
        'Checkpoints("run", keep_last=0)',
        ValueError,
        "keep_last must be at least 1, got 0",
    ),
    "no time": ('Checkpoints("run", save_every="soon")', ValueError, "a time is written"),
    "the folder as its backup": (
        'Checkpoints("run", backup_dir="./run")',
        ValueError,
        "backup_dir and folder must be different folders",
    ),
    "a number as the backup": (
        'Checkpoints("run", backup_dir=3)',
        TypeError,
        "backup_dir must be a folder or a URL, got 3",
    ),
    "an unknown interval": (
        'FitOptions(scheduler_interval="batch")',
        ValueError,
        "scheduler_interval must be",
    ),
    "no first epoch": (
        "FitOptions(augment_from=0)",
        ValueError,
        "augment_from must be at least 1, got 0",
    ),
    "never logged": ("FitOptions(log_every=0)", ValueError, "log_every must be at least 1, got 0"),
    "a text": (
        'FitOptions(log_every="10")',
        TypeError,
        "log_every must be a whole number, got '10'",
    ),
    "a hook that is none": (
        "FitOptions(on_epoch_end=1)",
        TypeError,
        "on_epoch_end must be a function of the history",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_value_is_refused_when_the_options_are_made(call, kind, message):
    with pytest.raises(kind, match=message) as failure:
        eval(call)
    assert "  fix:" in str(failure.value)


def trained(core, **options):
    model = core.model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = core.batches(PAIRS, batch_size=4, drop_last=True)
    return fit(core, model, optimizer, nn.functional.mse_loss, batches, **options)


# The argument of `fit`, and the message.
ARGUMENTS = {
    "a flag in place of a patience": (
        {"early_stopping": True},
        "early_stopping must be a number of epochs or an",
    ),
    "a text in place of a patience": (
        {"early_stopping": "3"},
        "early_stopping must be a number of epochs or an",
    ),
    "a flag in place of a folder": (
        {"checkpoints": True},
        "checkpoints must be a folder or a Checkpoints, got True",
    ),
    "a dict": ({"options": {"log_every": 3}}, "options must be a FitOptions, got a dict"),
    "epochs in parts": ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
}


@pytest.mark.parametrize(("options", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_wrong_type_is_refused_by_fit_and_its_fix_works(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerError, match=message) as failure:
        quietly(lambda core: trained(core, **options), cores=1)
    (fix,) = re.findall(r"fix:\s+(.*)", str(failure.value).partition("its traceback:")[0])
    for part in fix.split(", or "):
        again = eval(f"dict({part})")
        assert quietly(lambda core, again=again: trained(core, **again), cores=1).results[0].epochs


def test_a_number_is_the_patience_and_a_path_the_folder(tmp_path):
    def work(core, early_stopping, checkpoints):
        options = {"epochs": 4, "metrics": None, "monitor": "train_loss", "mode": "max"}
        history = trained(core, early_stopping=early_stopping, checkpoints=checkpoints, **options)
        return history.stopped, len(history.epochs)

    short = quietly(work, 1, tmp_path / "short").results
    long = quietly(work, EarlyStopping(patience=1), Checkpoints(tmp_path / "long")).results
    assert short == long == [("no better train_loss since epoch 1, patience=1", 2)] * 2
    assert [path.name[:13] for path in sorted((tmp_path / "short").glob("step-*"))] == [
        path.name[:13] for path in sorted((tmp_path / "long").glob("step-*"))
    ]


def test_the_best_weights_can_be_restored_without_stopping_early():
    def work(core, early_stopping):
        model = core.model(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = core.batches(PAIRS, batch_size=4, drop_last=True)
        loss = nn.functional.mse_loss
        # With "max" the first epoch, with the largest loss, is the best.
        options = {"epochs": 3, "monitor": "train_loss", "mode": "max"}
        history = fit(
            core, model, optimizer, loss, batches, early_stopping=early_stopping, **options
        )
        return len(history.epochs), history.best["epoch"], core.to_host(model.weight.detach())

    last = quietly(work, None, cores=1, seed=0).results[0]
    best = quietly(work, EarlyStopping(restore_best_weights=True), cores=1, seed=0).results[0]
    assert last[:2] == best[:2] == (3, 1)
    assert not torch.equal(last[2], best[2])


def test_fit_has_22_parameters_and_every_field_is_described():
    assert len(inspect.signature(fit).parameters) == 22
    for kind in (FitOptions, Checkpoints, EarlyStopping):
        for field in dataclasses.fields(kind):
            assert f"    {field.name}: " in inspect.getdoc(kind), field.name
        assert getattr(tpukit, kind.__name__) is getattr(tpukit.training, kind.__name__) is kind


def test_options_are_made_without_torch(tmp_path):
    import subprocess
    import sys

    code = "import sys, tpukit; tpukit.Checkpoints('run'); tpukit.EarlyStopping(3); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
