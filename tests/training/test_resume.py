"""A run resumes with the data that it began with, and each call of fit has its own random numbers."""

import math
import random

import pytest
import torch
from helpers.launching import quietly
from torch import nn
from torch.utils.data import Subset, TensorDataset

from tpukit import WorkerError, fit
from tpukit.training.losses import PendingStep, StepLosses
from tpukit.training.resume import TimeLimit

INPUTS = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS[:, :2])


class Fold(torch.utils.data.Dataset):
    """Every second sample, from a number on."""

    def __init__(self, fold):
        self.fold = fold

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return DATA[2 * index + self.fold]


def train(core, folder, data, valid=None, weights=None, epochs=1):
    torch.manual_seed(0)
    model = core.model(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = core.batches(data, batch_size=8, shuffle=True, drop_last=True, weights=weights)
    held_out = core.batches(valid, batch_size=8) if valid is not None else None
    options = {"epochs": epochs, "checkpoints": folder}
    fit(core, model, optimizer, nn.MSELoss(), batches, held_out, **options)


OTHER_DATA = {
    "a subset": (
        {"data": Subset(DATA, range(48))},
        {"data": Subset(DATA, range(48, 96))},
        "dataset.indices",
    ),
    "a setting": ({"data": Fold(0)}, {"data": Fold(1)}, "dataset.fold 0, here 1"),
    "contents": (
        {"data": DATA},
        {"data": TensorDataset(INPUTS.flip(1), INPUTS[:, :2])},
        "dataset.tensors",
    ),
    "data for evaluation": (
        {"data": Fold(0), "valid": Subset(DATA, range(8))},
        {"data": Fold(0), "valid": Subset(DATA, range(8, 16))},
        "dataset.indices",
    ),
    "weights": (
        {"data": Fold(0), "weights": [1.0] * 48},
        {"data": Fold(0), "weights": [1.0] * 24 + [2.0] * 24},
        "weights of samples",
    ),
}


@pytest.mark.parametrize("kind", OTHER_DATA)
@pytest.mark.parametrize("epochs", [1, 2])
def test_other_data_of_the_same_length_are_refused_by_name(kind, epochs, tmp_path):
    first, second, different = OTHER_DATA[kind]
    quietly(lambda core: train(core, tmp_path, **first), backend="cpu")
    with pytest.raises(WorkerError, match=f"different: {different}"):
        quietly(lambda core: train(core, tmp_path, epochs=epochs, **second), backend="cpu")
    quietly(lambda core: train(core, tmp_path, epochs=epochs, **first), backend="cpu")
    own = tmp_path / "own"
    quietly(lambda core: train(core, own, epochs=epochs, **second), backend="cpu")


class Noisy(torch.utils.data.Dataset):
    """Samples with numbers of all generators of the host."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((8,), random.random() + torch.rand(()).item()), torch.zeros(2)


class Noting(nn.Module):
    """A layer that keeps the last inputs and the mask of its dropout."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(2, 8, 8))

    def forward(self, inputs):
        mask = self.drop(torch.ones_like(inputs))
        if self.training:
            self.seen.copy_(torch.stack([inputs.detach(), mask]))
        return self.layer(inputs * mask)


def call_again(core, calls, folder=None, epochs=1):
    """Call fit several times; return what the last step of each saw."""
    torch.manual_seed(1)
    model = core.model(Noting(), allow_different=["seen"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = core.batches(Noisy(), batch_size=8, shuffle=True, drop_last=True)
    seen = []
    for call in range(calls):
        options = {"checkpoints": folder / str(call)} if folder else {}
        fit(core, model, optimizer, nn.MSELoss(), batches, epochs=epochs, **options)
        seen.append(core.to_host(model.seen.clone()))
    return seen, core.to_host(model.layer.weight.detach().clone())


@pytest.mark.parametrize("cores", [1, 2])
def test_each_call_of_fit_draws_its_own_random_numbers_and_a_launch_draws_them_again(cores):
    def work(core):
        return call_again(core, 3)[0]

    for seen, again in zip(
        quietly(work, cores=cores, backend="cpu", seed=5).results,
        quietly(work, cores=cores, backend="cpu", seed=5).results,
        strict=True,
    ):
        for first, second in ((0, 1), (1, 2), (0, 2)):
            assert not seen[first][0].equal(seen[second][0])
            assert not seen[first][1].equal(seen[second][1])
        assert all(map(torch.equal, seen, again))


def test_calls_of_fit_that_are_resumed_end_as_those_without_an_interruption(tmp_path):
    def work(core, calls, folder):
        return call_again(core, calls, folder)[1]

    options = {"cores": 1, "backend": "cpu", "seed": 5}
    whole = quietly(work, 3, tmp_path / "whole", **options).results[0]
    quietly(work, 2, tmp_path / "cut", **options)
    resumed = quietly(work, 3, tmp_path / "cut", **options).results[0]
    assert resumed.equal(whole)


def flags_that_arrive(core, seconds, due):
    """Take a step of averaging, and return what this core reads from the flags of all cores."""
    limit = TimeLimit(core, seconds if core.rank == core.world_size - 1 else math.inf)
    limit.update(save_is_due=due and core.is_main)
    reduced = torch.stack([torch.tensor(0.25), *limit.flags])
    core.backend.average([reduced])
    losses = StepLosses(core)
    losses.add(PendingStep(1, samples=(0,), local=torch.tensor(0.25), reduced=reduced, lr=0.1))
    assert losses.fetch() is None
    return losses.time_is_up, losses.save_is_due, losses.end_interval()


@pytest.mark.parametrize("due", [False, True])
@pytest.mark.parametrize("seconds", [math.inf, -1.0])
def test_all_cores_read_that_time_is_up_on_one_and_that_a_save_is_due(seconds, due):
    expected = (seconds < 0, due, 0.25)
    assert quietly(flags_that_arrive, seconds, due, cores=3).results == [expected] * 3
