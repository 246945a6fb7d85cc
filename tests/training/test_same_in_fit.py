"""What may not differ between cores, in fit: every kind of module works, or is refused with the right word."""

import copy
import functools
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from helpers.fit_arguments import grouped
from torch import nn

import tpukit
from tpukit import Checkpoints, FitOptions, fit
from tpukit.essentials.launcher import launch

X = torch.linspace(-1, 1, 256).reshape(64, 4)
WORDS = torch.arange(64) % 20
PAGE = Path(__file__).parents[2] / "docs" / "in_sync.md"


class Changing(nn.Module):
    """A linear layer, and whatever `forward` does besides."""

    def __init__(self, buffer=None, change=lambda self, x: None):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 1), change
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        if buffer is not None:
            self.register_buffer("state", buffer)

    def forward(self, x):
        if self.training:
            self.change(self, x.detach())
        return self.layer(x)


def center(self, x):
    self.state = 0.9 * self.state + 0.1 * x.mean(0)


def center_in_place(self, x):
    self.state.mul_(0.9).add_(0.1 * x.mean(0))
    self.note = x.mean().item()  # other numbers on each core, that decide about nothing


def enqueue(self, x):
    keys, at = tpukit.current_core().gather(x.mean(0, keepdim=True)), self.pointer.item()
    self.state[at : at + len(keys)] = keys
    self.pointer.fill_((at + len(keys)) % len(self.state))


def turn(self, x):
    self.state = self.state * torch.exp(1j * x.mean())


def count(self, x):
    self.state += (x > 0).sum()


def start(self, x):
    if not hasattr(self, "ready"):
        self.layer.weight.data.copy_(x.mean(0, keepdim=True))
        self.ready = True


class Words(nn.Sequential):
    """An embedding and a head."""

    def __init__(self, **options):
        super().__init__(nn.Embedding(20, 4, **options), nn.Linear(4, 1))


class MovingWeight(nn.Module):
    """A loss with a statistic of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.tensor(0.5))

    def forward(self, outputs, targets):
        self.share.mul_(0.8).add_(0.2 * (targets > 0).float().mean())
        return ((outputs - targets) ** 2).mean() * self.share


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def symmetric(layer):
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def older_norms(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, that these are deprecated
        return nn.Sequential(nn.utils.spectral_norm(layer), nn.utils.weight_norm(nn.Linear(4, 4)))


def linear(change=lambda layer: layer, *after):
    return lambda: nn.Sequential(change(nn.Linear(4, 4)), *copy.deepcopy(after), nn.Linear(4, 1))


# By name: what makes the model, and what becomes of it on several cores. The documentation's table is made of these.
MODULES = {
    "`BatchNorm`": (
        linear(lambda layer: layer, nn.BatchNorm1d(4)),
        "works: running statistics are averaged",
    ),
    "`Dropout`": (linear(lambda layer: layer, nn.Dropout()), "works: each core draws its own"),
    "`nn.utils.parametrize` with a module of your own": (linear(symmetric), "works"),
    "`nn.utils.weight_norm`, `nn.utils.spectral_norm`, the older ones": (
        linear(older_norms),
        "works",
    ),
    "`nn.utils.parametrizations.weight_norm`": (
        linear(nn.utils.parametrizations.weight_norm),
        "works",
    ),
    "`nn.utils.parametrizations.spectral_norm`": (
        linear(nn.utils.parametrizations.spectral_norm),
        "works",
    ),
    "`nn.utils.parametrizations.orthogonal`": (
        linear(nn.utils.parametrizations.orthogonal),
        "works",
    ),
    "`AveragedModel` (EMA), with `averaged_model=`": (linear(), "works"),
    "a float buffer that is assigned, as DINO's centre": (
        lambda: Changing(torch.zeros(4), center),
        "works: it is averaged",
    ),
    "a float buffer that is written in place": (
        lambda: Changing(torch.zeros(4), center_in_place),
        "works: it is averaged",
    ),
    "a complex buffer": (
        lambda: Changing(torch.ones(4, dtype=torch.complex64), turn),
        "works: it is averaged",
    ),
    "a queue of `core.gather(keys)` and its pointer, as MoCo's": (
        lambda: Changing(torch.zeros(6, 4), enqueue),
        "works",
    ),
    "a float buffer of the loss": (linear(), "works: it is averaged"),
    "`Embedding`": (Words, "works"),
    "`Embedding(max_norm=...)`": (
        lambda: Words(max_norm=0.5),
        "raises an error; fix: leave max_norm out",
    ),
    "`Embedding(sparse=True)`": (lambda: Words(sparse=True), "raises an error; fix: sparse=False"),
    "`SyncBatchNorm`": (
        linear(lambda layer: layer, nn.SyncBatchNorm(4)),
        "raises an error; fix: tpukit.training.sync_batchnorm",
    ),
    "a buffer of whole numbers that differs between cores, such as a counter of classes": (
        lambda: Changing(torch.zeros((), dtype=torch.int64), count),
        'raises an error; fix: core.model(model, allow_different=["*counts"])',
    ),
    "weights set from the first batch": (
        lambda: Changing(None, start),
        "raises an error; fix: make them before core.model",
    ),
}


def outcomes(core):
    """Fit each of them for an epoch; return what was said, or a checksum of the weights and buffers."""
    found = {}
    for name, (make, _) in MODULES.items():
        inputs = WORDS if "Embedding" in name else X
        pairs = torch.utils.data.TensorDataset(inputs, X[:, :1])
        torch.manual_seed(3)
        model, loss = core.model(make()), nn.functional.mse_loss
        loss = core.model(MovingWeight()) if "loss" in name else loss
        average = (
            torch.optim.swa_utils.AveragedModel(model, use_buffers=True) if "EMA" in name else None
        )
        batches = core.batches(pairs, batch_size=8, shuffle=True, drop_last=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        try:
            fit(core, model, optimizer, loss, batches, options=FitOptions(averaged_model=average))
            parts = [model, average, loss if isinstance(loss, nn.Module) else None]
            found[name] = [
                core.to_host(dict(part.state_dict())) for part in parts if part is not None
            ]
        except ValueError as error:  # raised on every core at the same place
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def found():
    return launch(outcomes, cores=2, backend="cpu", progress="off").results


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_the_same_on_every_core_or_refused_with_the_right_word(found, name):
    one, two = (result[name] for result in found)
    outcome = MODULES[name][1]
    if outcome.startswith("works"):
        assert not isinstance(one, str), one
        pairs = [(a[key], b[key]) for a, b in zip(one, two, strict=True) for key in a]
        assert pairs
        assert all(torch.equal(*pair) for pair in pairs)
    else:
        assert outcome.removeprefix("raises an error; fix: ") in str(one), one


def test_what_a_loop_of_ones_own_left_apart_is_averaged_by_fit_and_no_error():
    def work(core):
        model = core.model(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
        batches = core.batches(
            torch.utils.data.TensorDataset(X, X[:, :1]), batch_size=8, drop_last=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, _ in batches:
            with core.step():
                model(inputs).sum().backward()
                core.optimizer_step(optimizer)
        fit(core, model, optimizer, nn.functional.mse_loss, batches)
        return model[0].running_mean

    one, two = launch(work, cores=2, backend="cpu", progress="off").results
    assert torch.equal(one, two)


def test_the_documentation_has_the_table_of_modules():
    page = PAGE.read_text()
    assert all(f"| {name} | {outcome} |" in page for name, (_, outcome) in MODULES.items())


def weighted(share):
    weights = torch.tensor([1.0, share])
    return lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, weight=weights)


# What core 1 hands to fit and core 0 does not, and what the error has to name.
SETTINGS = {
    "bf16": ({"bf16": True}, "bf16: False on core 0, True on core 1"),
    "patience": ({"patience": 1}, "patience: None on core 0, 1 on core 1"),
    "preprocess": ({"preprocess": torch.neg}, "preprocess: NoneType on core 0, "),
    "weights of classes": ({"loss": weighted(3.0)}, "loss: weighted"),
    "a share": (
        {"loss": functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)},
        "label_smoothing=0.1",
    ),
    "a loss": ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "'label_smoothing': 0.1"),
}


def test_what_fit_is_called_with_has_to_be_the_same():
    def work(core):
        said = {}
        pairs = torch.utils.data.TensorDataset(X, torch.arange(64) % 2)
        losses = {"weights of classes": weighted(2.0), "a loss": nn.CrossEntropyLoss()}
        for name, (others, _) in SETTINGS.items():
            model = core.model(nn.Linear(4, 2))
            options = {"loss": losses.get(name, nn.functional.cross_entropy)} | (
                others if core.rank else {}
            )
            train, valid = (
                core.batches(pairs, batch_size=8, drop_last=True),
                core.batches(pairs, batch_size=8),
            )
            try:
                fit(
                    core,
                    model,
                    torch.optim.SGD(model.parameters(), lr=0.1),
                    train=train,
                    valid=valid,
                    **grouped(options),
                )
            except ValueError as error:
                said[name] = str(error)
        return said

    one, two = launch(work, cores=2, backend="cpu", progress="off").results
    assert one == two
    assert not [name for name, (_, named) in SETTINGS.items() if named not in one.get(name, "")], (
        one
    )


class Draws:
    """A metric with random numbers of its own, and with a lock."""

    def __init__(self):
        import threading

        self.lock = threading.Lock()

    def __call__(self, outputs, targets):
        with self.lock:
            return numpy.random.random()  # noqa: NPY002


def test_a_metric_that_differs_by_core_decides_by_core_0s_numbers_and_is_not_copied(tmp_path):
    seen = []

    def record(outputs, targets):
        seen.append(len(outputs))
        return 0.0

    def work(core):
        model = core.model(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pairs = torch.utils.data.TensorDataset(X, X[:, :1])
        train, valid = (
            core.batches(pairs, batch_size=8, drop_last=True),
            core.batches(pairs, batch_size=8),
        )
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        history = fit(
            *(core, model, optimizer, nn.functional.mse_loss, train, valid),
            epochs=4,
            metrics={"draws": Draws(), "record": record},
            monitor="valid_draws",
            mode="min",
            scheduler=plateau,
            options=FitOptions(scheduler_interval="epoch", log_every=1),
            checkpoints=Checkpoints(tmp_path, save_every=0),
        )
        columns = ("valid_loss", "valid_draws", "lr")
        return (
            [[row[name] for name in columns] for row in history.epochs],
            history.best["epoch"],
            len(seen),
        )

    one, two = launch(work, cores=2, backend="cpu", progress="off").results
    assert one == two
    assert one[2] == 5  # four epochs, and the batch before the first


def test_folders_that_differ_by_core_are_named_when_a_run_goes_on(tmp_path):
    def work(core, epochs):
        model = core.model(nn.Linear(4, 1))
        pairs = torch.utils.data.TensorDataset(X, X[:, :1])
        batches = core.batches(pairs, batch_size=8, drop_last=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fit(
            core,
            model,
            optimizer,
            nn.functional.mse_loss,
            batches,
            epochs=epochs,
            checkpoints=tmp_path / str(core.rank),
        )

    launch(work, 1, cores=2, backend="cpu", progress="off")
    with pytest.raises(
        RuntimeError,
        match=r"checkpoint in the folder: step\S+ on core 0, None on core 1(.|\n)*folder",
    ):
        launch(work, 2, cores=2, backend="cpu", progress="off")


class Stack(nn.Module):
    """Layers dropped at random by the host, as LayerDrop does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = x + torch.tanh(layer(x))
        return self.head(x)


@pytest.mark.xla
def test_layers_dropped_by_the_host_are_the_same_on_every_core_with_same_seed_and_refused_without():
    def work(core, same_seed):
        model = core.model(Stack())
        batches = core.batches(
            torch.utils.data.TensorDataset(X, X[:, :1]), batch_size=4, drop_last=True
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        fit(
            core,
            model,
            optimizer,
            nn.functional.mse_loss,
            batches,
            options=FitOptions(same_seed=same_seed),
        )
        return core.to_host(dict(model.state_dict()))

    one, two = launch(work, True, cores=2, backend="xla", progress="off", timeout=600).results
    assert all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(RuntimeError, match=r"different layers(.|\n)*layers\.(.|\n)*same_seed=True"):
        launch(work, False, cores=2, backend="xla", progress="off", timeout=600)
