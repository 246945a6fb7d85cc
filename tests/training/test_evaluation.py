"""The loss of an evaluation: small modules on the host, those with a network in them on the device."""

import functools

import pytest
import torch
from helpers.launching import quietly
from torch import nn
from torch.utils.data import TensorDataset

from tpukit import WorkerError, evaluate

HIDDEN = 200_000  # columns: the teacher has 7 MB


def samples(count=37):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 8, generator=generator), torch.randn(count, 2, generator=generator)


class Distillation(nn.Module):
    """The mean squared error to a frozen teacher, as `torch.nn.MSELoss` reduces."""

    def __init__(self, with_weight):
        super().__init__()
        torch.manual_seed(2)
        layers = nn.Linear(2, HIDDEN), nn.Tanh(), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 2)
        self.teacher = nn.Sequential(*layers).requires_grad_(False)
        self.with_weight = with_weight

    def forward(self, outputs, targets):
        errors = (outputs - self.teacher(targets)).square()
        if self.with_weight:
            return errors.sum(), errors.numel()
        return errors.mean()


def net():
    torch.manual_seed(1)
    return nn.Linear(8, 2)


def expected_loss(inputs, targets):
    loss = Distillation(with_weight=False).eval()
    with torch.no_grad():
        return loss(net()(inputs), targets).item()


def received_bytes():
    """Return the bytes that torch_xla has copied from the device to the host."""
    import torch_xla.debug.metrics as metrics

    _, total, _ = metrics.metric_data("InboundData") or (0, 0, ())
    return total


@pytest.mark.xla
def test_a_frozen_teacher_in_a_loss_stays_on_the_device_and_is_not_trained():
    inputs, targets = samples()

    def work(core, *, with_weight, keep_outputs):
        model = core.model(net())
        loss = core.model(Distillation(with_weight))
        loss.teacher[0].eval()  # a mode of its own, which is put back
        before = received_bytes()
        batches = core.batches(TensorDataset(inputs, targets), batch_size=8)
        found = evaluate(core, model, loss, batches, keep_outputs=keep_outputs)
        batchnorm = loss.teacher[2]
        modes = loss.training, loss.teacher[0].training
        return found.loss, received_bytes() - before, batchnorm.num_batches_tracked.item(), modes

    def all_cases(core):
        cases = [(False, True), (True, True), (False, False)]
        return [
            work(core, with_weight=with_weight, keep_outputs=keep_outputs)
            for with_weight, keep_outputs in cases
        ]

    results = quietly(all_cases, backend="xla:simulator").results
    size = sum(weight.nbytes for weight in Distillation(False).parameters())
    assert size > 5e6
    for loss, received, updates, modes in [case for result in results for case in result]:
        assert abs(loss - expected_loss(inputs, targets)) < 1e-5
        assert received < size / 50
        assert updates == 0
        assert modes == (True, False)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("xla:simulator", marks=pytest.mark.xla)])
def test_a_loss_function_may_use_modules_and_tensors_that_are_on_the_device(backend):
    inputs, targets = samples()
    weights = torch.tensor([0.25, 0.75])

    def work(core):
        model = core.model(net())
        teacher = core.model(Distillation(False)).eval()
        on_device = core.to_device([weights])[0]
        batches = core.batches(TensorDataset(inputs, targets), batch_size=8)
        losses = (
            lambda outputs, targets: teacher(outputs, targets),
            functools.partial(teacher),
            lambda outputs, targets: (on_device * (outputs - targets)).sum(1).mean(),
        )

        @functools.wraps(nn.functional.mse_loss)  # gives it the `__module__` of torch's function
        def wrapper(outputs, targets):
            return (on_device * (outputs - targets)).sum(1).mean()

        return [evaluate(core, model, loss, batches).loss for loss in (*losses, wrapper)]

    with torch.no_grad():
        weighted = (weights * (net()(inputs) - targets)).sum(1).mean().item()
    for distilled, partial, with_weights, wrapped in quietly(work, backend=backend).results:
        assert abs(distilled - expected_loss(inputs, targets)) < 1e-5
        assert abs(partial - expected_loss(inputs, targets)) < 1e-5
        assert abs(with_weights - weighted) < 1e-6
        assert wrapped == with_weights


def weighted(outputs, targets, weights):
    """A loss for which torch_xla takes no weights on the device with outputs on the host."""
    return nn.functional.cross_entropy(outputs, (targets[:, 0] > 0).long(), weights)


class WithAttribute(nn.Module):
    """A loss with weights that are no buffer, as many write it."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, outputs, targets):
        return weighted(outputs, targets, self.weights)


class Trainer:
    """A class of the user, whose method is the loss; its model has no part in it."""

    def __init__(self, model, criterion):
        self.model = model
        self.criterion = criterion

    def loss(self, outputs, targets):
        return self.criterion(outputs, targets)

    def __call__(self, outputs, targets):
        return self.loss(outputs, targets)


def ways_to_weights(core, weights):
    """Return losses with the same weights on the device, by the way in which a loss finds them."""

    def with_closure(outputs, targets):
        return weighted(outputs, targets, weights)

    def with_default(outputs, targets, weights=weights):
        return weighted(outputs, targets, weights)

    module = WithAttribute(weights)
    parts = {"first": module}
    trainer = Trainer(nn.Linear(1000, 1000), module)
    core.state.criterion = module
    return {
        "a module's attribute": module,
        "a default": with_default,
        "a function": lambda outputs, targets: with_closure(outputs, targets),
        "a dict": lambda *rows: sum(part(*rows) for part in parts.values()),
        "a method": trainer.loss,
        "an object": trainer,
        "an attribute of an object": lambda *rows: trainer.criterion(*rows),
        "core.state": lambda *rows: core.state.criterion(*rows),
    }


@pytest.mark.xla
def test_weights_on_the_device_are_found_in_whatever_way_a_loss_finds_them():
    inputs, targets = samples()
    weights = torch.tensor([0.25, 0.75])

    def work(core):
        model = core.model(net())
        batches = core.batches(TensorDataset(inputs, targets), batch_size=8)
        found = {}
        for name, loss in ways_to_weights(core, core.to_device([weights])[0]).items():
            try:
                result = evaluate(core, model, loss, batches, metrics={"again": loss})
                assert result.metrics["again"] == pytest.approx(result.loss)
                found[name] = result.loss
            except RuntimeError as error:
                found[name] = str(error)
        return found

    with torch.no_grad():
        expected = weighted(net()(inputs), targets, weights).item()
    found = quietly(work, cores=1, backend="xla:simulator").results[0]
    assert found == pytest.approx(dict.fromkeys(found, expected), abs=1e-6)


def test_cpu_processes_give_the_loss_of_a_large_module_that_the_device_gives():
    inputs, targets = samples()

    def work(core):
        batches = core.batches(TensorDataset(inputs, targets), batch_size=8)
        return evaluate(core, core.model(net()), core.model(Distillation(False)), batches).loss

    for loss in quietly(work).results:
        assert abs(loss - expected_loss(inputs, targets)) < 1e-5


@pytest.mark.parametrize("keep_outputs", [True, False])
def test_a_small_loss_module_is_in_evaluation_mode_like_a_large_one(keep_outputs):
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2))

        def forward(self, outputs, targets):
            return self.layers(outputs - targets).abs().mean()

    def work(core):
        loss = core.model(Distances())
        batches = core.batches(TensorDataset(*samples()), batch_size=8)
        found = evaluate(core, core.model(net()), loss, batches, keep_outputs=keep_outputs)
        return found.loss, loss.training

    inputs, targets = samples()
    with torch.no_grad():
        expected = Distances().eval()(net()(inputs), targets).item()
    for loss, training in quietly(work).results:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert training


def test_a_loss_with_parameters_may_be_a_metric_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, outputs, targets):
            return (self.scale * outputs - targets).abs().mean()

    def work(core):
        loss = core.model(Scaled())
        batches = core.batches(TensorDataset(*samples()), batch_size=8)
        found = evaluate(core, core.model(net()), loss, batches, metrics={"scaled": loss})
        return found.loss, found.metrics["scaled"]

    for loss, metric in quietly(work).results:
        assert loss == pytest.approx(metric)


@pytest.mark.parametrize("keep_outputs", [True, False])
def test_a_total_and_its_weight_may_be_a_list_as_in_fit(keep_outputs):
    def work(core, form):
        def loss(outputs, targets):
            errors = (outputs - targets).square()
            return form((errors.sum(), errors.numel()))

        batches = core.batches(TensorDataset(*samples()), batch_size=4)
        return evaluate(core, core.model(net()), loss, batches, keep_outputs=keep_outputs).loss

    assert quietly(work, list).results == quietly(work, tuple).results


def test_the_fix_for_a_loss_that_returns_its_parts_works():
    parts = {"error": nn.functional.mse_loss, "distance": nn.functional.l1_loss}

    def loss(outputs, targets):
        return {name: part(outputs, targets) for name, part in parts.items()}

    def work(core, loss):
        batches = core.batches(TensorDataset(*samples()), batch_size=4)
        return evaluate(core, core.model(net()), loss, batches).loss

    with pytest.raises(WorkerError, match="its parts are 'error', 'distance'") as caught:
        quietly(work, loss)
    fixed = eval(caught.value.fix.partition("loss=")[2], {"your_loss": loss})
    assert quietly(work, fixed).results[0] > 0
