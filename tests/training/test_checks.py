"""What `fit` refuses or says before its first step, and what an unlucky argument no longer breaks after it."""

import math

import numpy as np
import pytest
import torch
from helpers.fit_arguments import grouped
from helpers.launching import DRY_RUNS, quietly
from helpers.workers import Pairs, Tied, small_net
from torch import nn

from tpukit import WorkerError, evaluate, fit, launch
from tpukit.training.metrics import _takes_classes

MSE = nn.MSELoss()


def train(core, *, net=None, optimizer=None, loss=MSE, data=None, valid=None, lr=0.01, **options):
    """Fit a small net for two epochs of four steps; return its history and its weights."""
    model = core.model(net or small_net(False))
    optimizer = optimizer(model) if optimizer else torch.optim.Adam(model.parameters(), lr=lr)
    batches = core.batches(
        data or Pairs(), batch_size=16 // core.world_size, shuffle=True, drop_last=True
    )
    valid = core.batches(valid, batch_size=8) if valid else None
    history = fit(
        core,
        model,
        optimizer,
        loss,
        batches,
        valid,
        **grouped({"epochs": 2, "log_every": 2, **options}),
    )
    return history, core.to_host(model.state_dict())


def over_the_notebooks_module(core, fixed):
    net = small_net(False)
    model = core.model(net)
    optimizer = torch.optim.SGD((model if fixed else net).parameters(), lr=0.01)
    return fit(core, model, optimizer, MSE, core.batches(Pairs(), batch_size=8, shuffle=True))


def not_from_core_model(core, fixed):
    torch.manual_seed(core.rank)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    model = core.model(model) if fixed else model.to(core.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return fit(core, model, optimizer, MSE, core.batches(Pairs(), batch_size=8, shuffle=True))


def a_loader(core, fixed):
    loader = torch.utils.data.DataLoader(Pairs(), batch_size=8)
    batches = (
        core.batches(loader.dataset, batch_size=8, shuffle=True, drop_last=True)
        if fixed
        else loader
    )
    model = core.model(small_net(False))
    return fit(core, model, torch.optim.SGD(model.parameters(), lr=0.01), MSE, batches)


class NeverMoves(nn.BatchNorm2d):
    """What TorchTPU 0.2.0 makes of a BatchNorm: it counts its batches, and that is all."""

    def forward(self, x):
        self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, training=True)


def statistics_that_never_move(core, fixed):
    net = small_net(True)
    net[1] = nn.BatchNorm2d(4, track_running_stats=False) if fixed else NeverMoves(4)
    model = core.model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return fit(core, model, optimizer, MSE, core.batches(Pairs(), batch_size=8, shuffle=True))


class Centred(nn.Module):
    """A layer with two of BatchNorm's buffers, and without its variance and its momentum."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x):
        self.num_batches_tracked += 1
        return x - self.running_mean.view(1, -1, 1, 1)


def test_a_layer_with_some_buffers_of_batchnorm_is_trained():
    def work(core):
        net = small_net(True)
        net[1] = Centred()
        model = core.model(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return fit(core, model, optimizer, MSE, core.batches(Pairs(), batch_size=8, shuffle=True))

    assert quietly(work, cores=1).results[0].epochs


MISUSES = {
    "an optimiser over the notebook's module": (
        over_the_notebooks_module,
        "holds none of the model's parameters",
    ),
    "a model of each core's own": (
        not_from_core_model,
        r"the cores hold different weights(.|\n)*found: weights: 1.weight, 1.bias",
    ),
    "statistics that never move": (
        statistics_that_never_move,
        "the running statistics of 1 have not moved",
    ),
    "a DataLoader": (
        a_loader,
        r"got a DataLoader(.|\n)*fix:   core.batches\(loader.dataset, batch_size=8, shuffle=True",
    ),
}


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize(("work", "message"), MISUSES.values(), ids=MISUSES)
def test_what_would_train_nothing_or_every_core_alone_is_refused_and_the_fix_works(
    work, message, backend
):
    with pytest.raises(WorkerError, match=message) as failure:
        quietly(work, False, backend=backend)
    assert "fix:" in str(failure.value)
    assert quietly(work, True, backend=backend).results[0].epochs


@pytest.mark.xla
def test_a_model_that_is_not_on_the_device_is_refused():
    def work(core):
        net = small_net(False)
        return fit(
            core,
            net,
            torch.optim.SGD(net.parameters()),
            MSE,
            core.batches(Pairs(), batch_size=8, shuffle=True),
        )

    with pytest.raises(
        WorkerError, match=r"0.weight is on cpu, the device is xla:0\n  fix:   model = core"
    ):
        quietly(work, backend="xla:cpu", cores=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_grad_norm": -1.0},
            "max_grad_norm must be a number above 0, got -1.0",
        ),
        ({"max_grad_norm": 0}, "above 0, got 0"),
        ({"max_grad_norm": math.nan}, "above 0, got nan"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be at least 1, got 0(.|\n)*None for all"),
        ({"steps_per_epoch": -1}, "steps_per_epoch must be at least 1, got -1"),
        (
            {"monitor": "valid_los", "valid": Pairs(8)},
            "got 'valid_los'\n(.|\n)*fix:   one of train_loss, valid_loss",
        ),
        ({"monitor": "valid_mae"}, "got 'valid_mae'"),
        ({"monitor": "train_loss", "mode": "lowest"}, 'mode must be "min", "max" or None'),
        (
            {"monitor": "valid_score", "valid": Pairs(8), "metrics": {"score": nn.L1Loss()}},
            'does not show whether lower or higher is better\n  fix:   mode="min" if lower is '
            'better, mode="max" if higher',
        ),
        (
            {"valid": Pairs(8), "metrics": {"loss": nn.L1Loss()}},
            'a metric named "loss" would replace the loss in the column valid_loss',
        ),
    ],
)
def test_arguments_are_checked_before_the_first_step(options, message):
    def work(core):
        return train(core, augment=lambda *batch: pytest.fail("a step was made"), **options)

    with pytest.raises(WorkerError, match=message) as failure:
        quietly(work, cores=1)
    assert str(failure.value).partition("its traceback:")[0].count("  fix:") == 1


def test_what_a_run_leaves_out_or_cuts_short_is_said(capsys):
    def work(core):
        return train(
            core,
            steps_per_epoch=99,
            optimizer=lambda model: torch.optim.SGD(model[4].parameters(), lr=0.01),
        )

    history, _ = quietly(work).results[0]
    printed = capsys.readouterr().out
    assert history.epochs[-1]["step"] == 8
    assert printed.count("steps_per_epoch=99 is more than the data has: an epoch is 4 steps") == 1
    assert printed.count("not in the optimizer, so not trained: 0.weight, 0.bias") == 1


def raising(outputs, targets):
    raise KeyError("metric")


def one_class(outputs, targets):
    if len(targets) < 20:
        raise ValueError("only one class")
    return (outputs - targets).abs().mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": {"bad": raising}}, "KeyError: 'metric'"),
        ({"metrics": {"each": lambda o, t: (o - t).mean(0)}}, "each must return one number"),
        (
            {"loss": lambda o, t: MSE(o, t[:, :2]) if o.requires_grad else o},
            "the loss must return one number",
        ),
    ],
)
def test_what_the_evaluation_raises_is_raised_before_the_first_step(options, message):
    def work(core):
        return train(
            core, valid=Pairs(37), augment=lambda *batch: pytest.fail("a step was made"), **options
        )

    with pytest.raises(WorkerError, match=message):
        quietly(work)


def test_a_metric_that_one_batch_is_too_few_for_is_no_mistake():
    history, _ = quietly(
        lambda core: train(core, valid=Pairs(37), metrics={"mae": one_class})
    ).results[0]
    assert len(history.epochs) == 2


class Noisy(Pairs):
    """Draws random numbers whenever a sample is read."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image + torch.rand(1) * 0.1 + np.random.rand() * 0.1, target  # noqa: NPY002


class Counted:
    """A metric with a state."""

    calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return torch.tensor(float(self.calls))


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_the_trial_changes_nothing(backend):
    def work(core, valid):
        net = nn.Sequential(*small_net(True), nn.Dropout(0.5))
        return train(
            core,
            net=net,
            data=Noisy(),
            valid=valid,
            metrics={"calls": Counted()} if valid else None,
        )

    with_trial, without = (
        quietly(work, valid, backend=backend).results[0] for valid in (Noisy(37), None)
    )
    assert [row["train_loss"] for row in with_trial[0].intervals] == [
        row["train_loss"] for row in without[0].intervals
    ]
    assert all(torch.equal(tensor, without[1][name]) for name, tensor in with_trial[1].items())
    assert {row["valid_calls"] for row in with_trial[0].epochs} == {1.0}


@pytest.mark.xla
def test_the_trial_compiles_no_graph_that_evaluation_does_not_need():
    def work(core):
        compiles = []

        def note(inputs):
            compiles.append(core.backend.compiles()[0])
            return inputs

        train(core, valid=Pairs(24), preprocess=note, epochs=1)
        return compiles, core.backend.compiles()[0]

    before, after = quietly(work, backend="xla:cpu", cores=1).results[0]
    assert after - before[5] == 0  # calls: the trial, four steps, three batches of the evaluation


def test_an_epoch_is_saved_before_it_is_judged(tmp_path):
    def work(core, broken):
        epoch = []

        def metric(outputs, targets):
            epoch.append(1)
            if broken and len(epoch) > 1:
                raise KeyError("metric")
            return 0.0

        return train(core, valid=Pairs(37), metrics={"mae": metric}, folder=tmp_path, epochs=1)

    with pytest.raises(WorkerError, match="KeyError: 'metric'"):
        quietly(work, True)
    assert [path.name[:13] for path in tmp_path.glob("step-*")] == ["step-00000004"]
    history, weights = quietly(work, False).results[0]
    assert (history.resumed[:13], history.epochs[0]["step"]) == ("step-00000004", 4)
    undisturbed, expected = quietly(lambda core: train(core, valid=Pairs(37), epochs=1)).results[0]
    assert history.epochs[0]["valid_loss"] == undisturbed.epochs[0]["valid_loss"]
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("name", "mode", "values", "best"),
    [
        ("mae", None, [math.nan, 0.2, 0.05, 0.1], 3),
        ("auroc", None, [math.nan, 0.2, 0.5, math.nan], 3),
        ("score", "min", [0.3, math.nan, 0.1, 0.2], 3),
        ("score", "max", [0.1, 0.4, 0.2, 0.3], 2),
        ("accuracy", "min", [0.1, 0.4, 0.2, 0.3], 1),
        ("auroc", None, [math.nan] * 4, None),
        ("mae", None, [math.inf, 0.5, 0.4, math.inf], 3),
    ],
)
def test_the_best_epoch_is_never_nan_and_has_a_direction(name, mode, values, best, tmp_path):
    def work(core):
        numbers = iter([0.0, *values])  # the first is the trial's
        metrics = {name: lambda outputs, targets: next(numbers)}
        options = (
            {"monitor": f"valid_{name}", "mode": mode} if mode else {"monitor": f"valid_{name}"}
        )
        return train(core, valid=Pairs(8), metrics=metrics, epochs=4, folder=tmp_path, **options)[0]

    history = quietly(work).results[0]
    assert (history.best and history.best["epoch"]) == best
    assert (tmp_path / "best.pt").exists() == (best is not None)


def test_the_direction_that_a_name_decides_is_said_once(capsys):
    options = {"valid": Pairs(8), "metrics": {"macro_f1": nn.L1Loss()}}
    quietly(lambda core: train(core, monitor="valid_macro_f1", **options))
    quietly(lambda core: train(core, monitor="valid_macro_f1", mode="max", **options))
    quietly(lambda core: train(core, **options))
    assert (
        capsys.readouterr().out.count("the best epoch is that with the highest valid_macro_f1") == 1
    )


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_a_learning_rate_of_numpy_is_saved_and_loaded(backend, tmp_path):
    def work(core, lr, folder):
        return train(core, lr=lr, folder=folder, save_every=0, epochs=1)[1]

    first = quietly(work, np.float64(0.01), tmp_path / "numpy", backend=backend).results[0]
    second = quietly(work, 0.01, tmp_path / "python", backend=backend).results[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
    (saved,) = (
        torch.load(path, weights_only=True) for path in (tmp_path / "numpy").glob("step-00000004*")
    )
    assert type(saved["optimizer"]["param_groups"][0]["lr"]) is float


def test_float64_models_train():
    class Doubles(Pairs):
        def __getitem__(self, index):
            return tuple(part.double() for part in super().__getitem__(index))

    history, weights = quietly(
        lambda core: train(core, net=small_net(True).double(), data=Doubles(), valid=Doubles())
    ).results[0]
    assert history.epochs[1]["valid_loss"] < history.epochs[0]["valid_loss"]
    assert weights["0.weight"].dtype == torch.float64


def test_whole_numbers_are_classes_to_metrics_of_classes_only():
    from torchmetrics import PearsonCorrCoef
    from torchmetrics.classification import BinaryAUROC
    from torchmetrics.wrappers import MinMaxMetric

    class Grades(Pairs):
        def __getitem__(self, index):
            image, target = super().__getitem__(index)
            return image, (target[0] > 0).float()

    def work(core):
        model = core.model(nn.Sequential(nn.Flatten(), nn.Linear(192, 1), nn.Flatten(0)))
        metrics = {"auroc": BinaryAUROC(), "pearson": PearsonCorrCoef()}
        return evaluate(core, model, MSE, core.batches(Grades(), batch_size=8), metrics=metrics)

    found = quietly(work).results[0]
    assert found.metrics["pearson"] == pytest.approx(
        np.corrcoef(found.outputs, found.targets)[0, 1], abs=1e-4
    )
    assert 0 < found.metrics["auroc"] < 1
    assert _takes_classes(MinMaxMetric(BinaryAUROC()))


class Words:
    """32 sequences of words and what follows each of them."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        words = torch.arange(index, index + 4) % 11
        return words, (words * 3 + 1) % 11


class NextWord(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1) * self.scale, targets.flatten())


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_a_tied_model_and_a_loss_that_learns_are_resumed_bit_for_bit(backend, tmp_path):
    def work(core, folder, epochs):
        loss = core.model(NextWord())
        model = core.model(Tied())
        optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.05)
        batches = core.batches(Words(), batch_size=4, shuffle=True, drop_last=True)
        valid = core.batches(Words(), batch_size=4)
        history = fit(
            core, model, optimizer, loss, batches, valid, epochs=epochs, checkpoints=folder
        )
        losses = [row["valid_loss"] for row in history.epochs]
        return (
            losses,
            core.to_host([model.state_dict(), loss.state_dict()]),
            len(list(model.parameters())),
        )

    once = quietly(work, tmp_path / "once", 3, backend=backend).results
    quietly(work, tmp_path / "twice", 1, backend=backend)
    twice = quietly(work, tmp_path / "twice", 3, backend=backend).results
    for (losses, (model, loss), count), (again, (model_again, loss_again), _) in zip(
        once, twice, strict=True
    ):
        assert losses == again
        assert count == 3
        assert loss["scale"] != 1
        assert all(torch.equal(tensor, model_again[name]) for name, tensor in model.items())
        assert torch.equal(loss["scale"], loss_again["scale"])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def two_groups(model):
    return torch.optim.Adam(
        [{"params": model[0].parameters()}, {"params": model[4].parameters()}], lr=0.01
    )


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        (sgd, "Adam of 4 parameters; this run has SGD of 4 parameters"),
        (two_groups, r"Adam of 4 parameters; this run has Adam of 2 \+ 2 parameters"),
    ],
)
def test_another_optimizer_on_resuming_is_refused_and_the_fix_works(optimizer, found, tmp_path):
    quietly(lambda core: train(core, folder=tmp_path, epochs=1))
    with pytest.raises(
        WorkerError, match=rf"was saved with another optimizer\n(.|\n)*found: {found}\n  fix:"
    ):
        quietly(lambda core: train(core, folder=tmp_path, optimizer=optimizer))
    assert len(quietly(lambda core: train(core, folder=tmp_path)).results[0][0].epochs) == 2
    quietly(lambda core: train(core, folder=tmp_path / "another", optimizer=optimizer))


@pytest.mark.parametrize("schedule", [None, torch.optim.lr_scheduler.ExponentialLR])
def test_a_learning_rate_that_resuming_overrides_is_said(schedule, tmp_path, capsys):
    def work(core, lr, epochs):
        model = core.model(small_net(False))
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        batches = core.batches(Pairs(), batch_size=8, shuffle=True, drop_last=True)
        changes = schedule(optimizer, 0.9) if schedule else None
        return fit(
            core,
            model,
            optimizer,
            MSE,
            batches,
            scheduler=changes,
            epochs=epochs,
            checkpoints=tmp_path,
        )

    for epochs in (1, 2):
        quietly(work, 0.01, epochs)
    assert "is used, not" not in capsys.readouterr().out
    history = quietly(work, 0.5, 3).results[0]
    assert capsys.readouterr().out.count("lr 0.01 is used, not 0.5") == 1
    assert history.epochs[-1]["lr"] <= 0.01


class Named(Pairs):
    classes = ("cat", "dog")


class Otherwise(Pairs):
    classes = ("dog", "cat")


@pytest.mark.parametrize("valid", [Named, Otherwise])
def test_classes_of_the_validation_have_the_numbers_of_the_training(valid):
    def train(core):
        model = core.model(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        parts = [
            core.batches(torch.utils.data.Subset(kind(16), range(16)), batch_size=4)
            for kind in (Named, valid)
        ]
        return fit(core, model, optimizer, nn.MSELoss(), *parts)

    if valid is Named:
        assert launch(train, cores=1, backend="cpu", progress="off").results[0].epochs
    else:
        with pytest.raises(
            WorkerError,
            match=r"class 0 is 'cat' in the training data, 'dog' in the \w+ data(.|\n)*"
            "classes=train.classes",
        ):
            launch(train, cores=1, backend="cpu", progress="off")


@pytest.mark.parametrize("test", [Named, Otherwise, Pairs])
def test_classes_of_a_later_evaluation_have_the_numbers_of_the_training(test):
    def train(core):
        model = core.model(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        fit(core, model, optimizer, nn.MSELoss(), core.batches(Named(16), batch_size=4))
        return evaluate(core, model, nn.MSELoss(), core.batches(test(16), batch_size=4)).loss

    if test is Otherwise:
        with pytest.raises(
            WorkerError,
            match=r"the training data and the evaluation data(.|\n)*class 0 is "
            "'cat' in the training data, 'dog' in the evaluation data",
        ):
            launch(train, cores=1, backend="cpu", progress="off")
    else:
        assert launch(train, cores=1, backend="cpu", progress="off").results[0] > 0
