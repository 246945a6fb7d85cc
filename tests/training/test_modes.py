"""Layers and optimizers have the mode in `fit` that they were given with."""

import pytest
import torch
from helpers.launching import DRY_RUNS, quietly
from torch import nn

from tpukit import Checkpoints, FitOptions, evaluate, fit


def data(count=64):
    inputs = 3 + torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :2])


def network():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(body, nn.Linear(16, 2))


def trained(core, model, *, optimizer=None, validate=False, **options):
    """Fit a model; return the lines that are printed, without those of epochs."""
    lines = []
    core.print = lines.append
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    batches = core.batches(data(), batch_size=8, shuffle=True, drop_last=True)
    valid = core.batches(data(), batch_size=8) if validate else None
    try:
        history = fit(core, model, optimizer, nn.MSELoss(), batches, valid, **options)
    finally:
        del core.print
    return history, [line for line in lines if not line.startswith("epoch")]


def freeze_body(model):
    model[0].requires_grad_(False).eval()


def freeze_statistics_only(model):
    model[0][1].eval()


def train_the_head_only(model):
    model.eval()
    model[1].train()


@pytest.mark.parametrize("freeze", [freeze_body, freeze_statistics_only, train_the_head_only])
def test_layers_in_evaluation_mode_stay_in_it_and_are_named_once(freeze):
    def work(core):
        model = core.model(network())
        freeze(model)
        given = [layer.training for layer in model.modules()]
        statistics = core.to_host(model[0][1].running_mean.clone())
        seen = []
        model[0].register_forward_hook(
            lambda *_: (
                seen.append([layer.training for layer in model.modules()])
                if torch.is_grad_enabled()
                else None
            )
        )
        _, lines = trained(core, model, validate=True, epochs=2)
        after = [layer.training for layer in model.modules()]
        is_still = torch.equal(statistics, core.to_host(model[0][1].running_mean))
        return is_still, all(modes == given for modes in [*seen, after]), lines

    is_still, are_modes_kept, lines = quietly(work, backend="cpu").results[0]
    assert is_still
    assert are_modes_kept
    assert len(lines) == 1
    assert "these layers stay in evaluation mode" in lines[0]


def test_a_model_that_is_wholly_in_evaluation_mode_is_trained_and_a_line_says_so():
    def work(core):
        model = core.model(network()).eval()
        _, lines = trained(core, model)
        return all(layer.training for layer in model.modules()), lines

    is_trained, lines = quietly(work, backend="cpu").results[0]
    assert is_trained
    assert len(lines) == 1
    assert "all layers were in evaluation mode" in lines[0]


@pytest.mark.parametrize("change", [lambda model: model.train(), lambda model: model.eval()])
def test_modes_that_are_changed_during_fit_are_restored_in_the_next_epoch(change):
    def work(core):
        model = core.model(network())
        freeze_body(model)
        modes = []
        model.register_forward_hook(
            lambda *_: modes.append((model.training, model[0].training, model[1].training))
        )
        options = FitOptions(on_epoch_end=lambda history: change(model) and None)
        _, lines = trained(core, model, epochs=3, options=options)
        return set(modes), [line for line in lines if "during fit" in line], change(model).training

    modes, lines, is_thawed = quietly(work, backend="cpu", cores=1).results[0]
    assert modes == {(True, False, True)}
    assert len(lines) == is_thawed


class FreezesItself(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        if self.is_frozen:
            self[0].eval()
        return self


def test_a_train_method_of_the_models_own_decides_in_every_epoch():
    def work(core):
        model = FreezesItself(*network())
        model.is_frozen = True
        model = core.model(model).train()
        modes = []
        model[0].register_forward_hook(lambda layer, *_: modes.append(layer.training))

        def thaw(history):
            model.is_frozen = False

        trained(core, model, epochs=2, options=FitOptions(on_epoch_end=thaw))
        return modes

    modes = quietly(work, backend="cpu", cores=1).results[0]
    assert modes == [False] * 8 + [True] * 8


@pytest.mark.parametrize(
    ("freeze", "is_reported"),
    [
        (lambda model: model[0].requires_grad_(False), True),
        (lambda model: model[0].requires_grad_(False).eval(), False),
        (lambda model: model, False),
    ],
)
@pytest.mark.parametrize("affine", [True, False])
def test_frozen_layers_whose_statistics_would_move_are_reported_and_the_fix_works(
    freeze, is_reported, affine
):
    def work(core, is_fixed=False):
        net = network()
        net[0][1] = nn.BatchNorm1d(16, affine=affine)
        model = core.model(net)
        freeze(model)
        if is_fixed:
            model[0][1].eval()
        before = core.to_host(model[0][1].running_mean.clone())
        _, lines = trained(core, model)
        moved = not torch.equal(before, core.to_host(model[0][1].running_mean))
        return moved, [line for line in lines if "running statistics" in line]

    moved, lines = quietly(work, backend="cpu", cores=1).results[0]
    assert len(lines) == is_reported
    if is_reported:
        assert moved
        assert lines[0].endswith("before fit: model[0][1].eval()")
        assert quietly(work, True, backend="cpu", cores=1).results[0] == (False, [])


class Averaging(torch.optim.Optimizer):
    """SGD that is evaluated at the mean of its weights, which `eval` puts into the model."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "trains": True})

    def _exchange(self, trains):
        for group in self.param_groups:
            if group["trains"] == trains:
                continue
            group["trains"] = trains
            for weight in group["params"]:
                mean = self.state[weight]["mean"]
                weight.data, self.state[weight]["mean"] = mean, weight.data

    def train(self):
        self._exchange(True)

    def eval(self):
        self._exchange(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight).add_(weight)
                weight.add_(weight.grad, alpha=-group["lr"])
                state["mean"].lerp_(weight, 0.05)


class AveragingFromTheStart(Averaging):
    """Has its means before the first step, so `eval` changes the weights of a new model."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["mean"] = weight.detach().clone()


@pytest.mark.parametrize("kind", [Averaging, AveragingFromTheStart])
@pytest.mark.parametrize("backend", DRY_RUNS)
def test_an_optimizer_with_modes_is_evaluated_and_saved_at_its_own_weights(backend, kind, tmp_path):
    def work(core, folder, epochs):
        torch.manual_seed(1)
        model = core.model(nn.Linear(8, 2))
        optimizer = kind(model.parameters(), lr=0.02)
        history, _ = trained(
            core,
            model,
            optimizer=optimizer,
            validate=True,
            epochs=epochs,
            checkpoints=Checkpoints(folder, save_every=0),
        )
        weights = core.to_host(model.weight.detach().clone())
        valid = core.batches(data(), batch_size=8)
        found = {}
        for mode in ("train", "eval"):
            getattr(optimizer, mode)()
            found[mode] = evaluate(core, model, nn.MSELoss(), valid).loss
        return history.epochs, found, weights

    straight = tmp_path / "straight"
    epochs, found, weights = quietly(work, straight, 2, backend=backend, cores=1).results[0]
    assert epochs[-1]["valid_loss"] == pytest.approx(found["eval"], abs=1e-6)
    assert abs(found["train"] - found["eval"]) > 1e-3
    newest = sorted(straight.glob("step-*.pt"))[-1]
    assert torch.equal(torch.load(newest)["model"]["weight"], weights)
    best = torch.load(straight / "best.pt")
    assert torch.equal(best["weight"], weights)

    parts = tmp_path / "parts"
    quietly(work, parts, 1, backend=backend, cores=1)
    resumed = quietly(work, parts, 2, backend=backend, cores=1).results[0]
    assert torch.equal(resumed[2], weights)


class LowRank(nn.Module):
    """A layer whose low-rank part is merged into its weight in evaluation mode, as loralib does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8)[:2].clone(), requires_grad=False)
        self.down = nn.Parameter(torch.full((1, 8), 0.1))
        self.up = nn.Parameter(torch.full((2, 1), 0.1))
        self.is_merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.is_merged == mode:
            sign = -1 if mode else 1
            self.weight.data = self.weight.data + sign * (self.up @ self.down).detach()
            self.is_merged = not mode
        return self

    def forward(self, inputs):
        weight = self.weight if self.is_merged else self.weight + self.up @ self.down
        return nn.functional.linear(inputs, weight)


def test_a_layer_that_merges_weights_in_evaluation_goes_on_training_after_evaluate():
    """In a loop of the user's own, with `evaluate` between two steps."""

    def work(core):
        model = core.model(nn.Sequential(LowRank(), nn.Linear(2, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = core.batches(data(), batch_size=8)
        changed = []
        for inputs, _ in batches:
            before = model[0].up.detach().clone()
            with core.step():
                model(inputs).square().mean().backward()
                core.optimizer_step(optimizer)
            changed.append(not torch.equal(before, model[0].up))
            evaluate(
                core, model, lambda outputs, _: outputs.mean(), core.batches(data(), batch_size=8)
            )
        return changed

    assert all(quietly(work, backend="cpu", cores=1).results[0])
