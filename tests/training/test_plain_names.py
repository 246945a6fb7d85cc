"""Checkpoints of compiled and of plain models are the same files."""

import pytest
import torch
from helpers.launching import quietly
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tpukit import EarlyStopping, FitOptions, fit


def plain():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def whole(model):
    return torch.compile(model, backend="eager")


def a_layer(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


def as_it_is(model):
    return model


FORMS = [whole, a_layer, as_it_is]


def train(core, folder, form, epochs, averaged=False):
    model = form(core.model(plain()))
    average = AveragedModel(model) if averaged else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :2])
    history = fit(
        core,
        model,
        optimizer,
        nn.MSELoss(),
        core.batches(data, batch_size=8),
        epochs=epochs,
        checkpoints=folder,
        early_stopping=EarlyStopping(restore_best_weights=True),
        options=FitOptions(averaged_model=average),
    )
    return len(history.epochs), core.to_host(list(model.state_dict().values()))


def names(state):
    for name, value in state.items():
        yield name
        if isinstance(value, dict):
            yield from names(value)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_files_of_a_compiled_model_load_into_the_plain_one_and_back(form, averaged, tmp_path):
    def run(form, epochs, folder=tmp_path):
        return quietly(train, folder, form, epochs, averaged, backend="cpu", cores=1).results[0]

    run(form, 1)
    plain().load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True))
    newest = sorted(tmp_path.glob("step-*.pt"))[-1]
    state = torch.load(newest, weights_only=True)
    plain().load_state_dict(state["model"])
    assert not any("_orig_mod" in str(name) for name in names(state))
    count, _ = run(as_it_is, 2)
    assert count == 2
    count, weights = run(form, 3)
    assert count == 3
    _, straight = run(as_it_is, 3, tmp_path / "straight")
    for mine, other in zip(weights, straight, strict=True):
        assert torch.equal(mine, other)
