"""Optimizers, schedulers, averages, metrics and losses of other packages, as users pass them."""

import textwrap

import pytest
import torch
from helpers.launching import quietly
from sklearn.metrics import f1_score, precision_score, r2_score
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

import tpukit
from tpukit import FitOptions, WorkerError

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
classes = (inputs[:, 0] > 0).long()
data = TensorDataset(inputs, classes)


def fit(core, *, dataset=data, optimizer=torch.optim.SGD, loss=None, scheduler=None, **options):
    torch.manual_seed(0)
    model = core.model(nn.Linear(8, 2))
    made = optimizer(model.parameters(), lr=0.5)
    train = core.batches(dataset, batch_size=8, shuffle=True, drop_last=True)
    if scheduler is not None:
        options["scheduler"] = scheduler(made)
    if "average" in options:
        options["options"] = FitOptions(averaged_model=options.pop("average")(model))
    loss = loss or nn.CrossEntropyLoss()
    tpukit.fit(core, model, made, loss, train, **options)
    return core.to_host(model(inputs)).argmax(1), options.get("options")


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation in its two steps, as the usual file has it."""

    def __init__(self, params, lr, rho=0.05):
        self.base = torch.optim.SGD(params, lr=lr)
        super().__init__(self.base.param_groups, {"rho": rho})
        self.rho = rho

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        for weight in weights:
            self.state[weight]["old"] = weight.clone()
            weight.add_(weight.grad, alpha=self.rho / float(norm + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.copy_(self.state[weight]["old"])
        self.base.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        assert closure is not None, "SAM requires closure"
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()


class Strict(torch.optim.SGD):
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("this optimizer evaluates the model again: pass a closure")
        return super().step(closure)


class LBFGS(torch.optim.LBFGS):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr, max_iter=4)


@pytest.mark.parametrize("kind", [SAM, Strict, LBFGS])
def test_an_optimizer_that_needs_a_closure_is_refused_and_the_loop_of_its_fix_trains(kind):
    with pytest.raises(WorkerError, match=f"{kind.__name__} evaluates the loss several") as caught:
        quietly(lambda core: fit(core, optimizer=kind), backend="cpu")
    _, _, loop = caught.value.fix.partition("gradients:\n")

    def by_hand(core, size):
        torch.manual_seed(0)
        model = core.model(nn.Linear(8, 2))
        optimizer = kind(model.parameters(), lr=0.5)
        names = {
            "core": core,
            "model": model,
            "optimizer": optimizer,
            "loss": nn.CrossEntropyLoss(),
            "batches": core.batches(data, batch_size=size, drop_last=True),
        }
        exec(textwrap.dedent(loop), names)
        return core.to_host(model.weight.detach())

    one = quietly(by_hand, 64, cores=1, backend="cpu").results[0]
    for weights in quietly(by_hand, 32, backend="cpu").results:
        assert torch.allclose(weights, one, atol=1e-5)  # as of one core with the joined batch


def test_an_error_about_a_closure_that_is_not_the_optimizers_stays_as_it_is():
    def loss(outputs, targets):
        raise RuntimeError("cannot pickle the closure of this loss")

    with pytest.raises(WorkerError, match="closure of this loss") as caught:
        quietly(lambda core: fit(core, loss=loss), backend="cpu")
    assert "SGD.step" not in str(caught.value)


class TimmScheduler:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch, metric=None):
        raise AssertionError("never called")


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_whose_step_needs_an_epoch_is_refused_before_the_first_step(interval, capfd):
    options = FitOptions(scheduler_interval=interval)
    with pytest.raises(WorkerError, match=r"TimmScheduler(.|\n)*step needs epoch"):
        quietly(lambda core: fit(core, scheduler=TimmScheduler, options=options), backend="cpu")


class Stepless:
    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_a_scheduler_without_step_is_refused_and_the_fix_trains():
    with pytest.raises(WorkerError, match="found: Stepless has no method step") as caught:
        quietly(lambda core: fit(core, scheduler=Stepless), backend="cpu")
    # `fit` steps a scheduler after every optimizer step, unless the options say otherwise.
    schedulers = (
        caught.value.fix.partition(", or another")[0],
        caught.value.fix.rpartition("; or ")[2],
    )
    names = {"torch": torch, "tpukit": tpukit, "steps": 64 // 16}
    for text in schedulers:

        def scheduler(optimizer, text=text):
            return eval(text, names | {"optimizer": optimizer})

        quietly(lambda core, made=scheduler: fit(core, scheduler=made) and None, backend="cpu")


class TimmEma(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = __import__("copy").deepcopy(model)

    @torch.no_grad()
    def update(self, model, step=None):
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)


def test_an_average_with_timms_update_is_updated_after_every_step():
    def work(core):
        _, options = fit(core, average=TimmEma)
        torch.manual_seed(0)
        moved = options.averaged_model.module.weight - nn.Linear(8, 2).weight
        return float(moved.detach().abs().max())

    assert quietly(work, cores=1, backend="cpu").results[0] > 0.01


def test_an_object_that_is_no_average_is_refused_with_one_that_is():
    with pytest.raises(WorkerError, match="averaged_model needs `module`") as caught:
        quietly(lambda core: fit(core, average=lambda model: nn.Linear(8, 2)), backend="cpu")

    def average(model):
        return eval(caught.value.fix, {"torch": torch, "model": model})

    quietly(lambda core: fit(core, average=average) and None, backend="cpu")


def per_sample(outputs, targets, weight):
    return (weight * nn.functional.cross_entropy(outputs, targets, reduction="none")).mean()


doubtful = torch.arange(64) >= 32
noisy = TensorDataset(inputs, torch.where(doubtful, 1 - classes, classes), (~doubtful).float())


def test_weights_of_samples_reach_a_loss_of_three_arguments_in_training_and_evaluation():
    def work(core):
        predicted, _ = fit(core, dataset=noisy, loss=per_sample, epochs=10)
        model = core.model(nn.Linear(8, 2))
        batches = core.batches(noisy, batch_size=7)
        losses = [
            tpukit.evaluate(core, model, per_sample, batches, keep_outputs=keep).loss
            for keep in (True, False)
        ]
        with torch.no_grad():
            return predicted, losses, per_sample(core.to_host(model(inputs)), *noisy.tensors[1:])

    predicted, losses, expected = quietly(work, backend="cpu").results[0]
    assert (predicted == classes).float().mean() > 0.9
    assert losses == pytest.approx([float(expected)] * 2)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_a_third_part_that_the_loss_does_not_take_is_refused_or_ignored_by_name(loss):
    with pytest.raises(WorkerError, match="a batch has 3 parts, and the loss takes 2") as caught:
        quietly(lambda core: fit(core, dataset=noisy, loss=loss), backend="cpu")
    ignores = caught.value.fix.rpartition("loss=")[2]
    assert ignores == "lambda outputs, targets, *_: loss(outputs, targets)"
    ignoring = eval(ignores, {"loss": loss})
    quietly(lambda core: fit(core, dataset=noisy, loss=ignoring) and None, backend="cpu")


@pytest.mark.parametrize("keep_outputs", [True, False])
def test_a_metric_collection_is_its_metrics(keep_outputs):
    def work(core):
        model = core.model(nn.Linear(8, 2))
        both = MetricCollection([MulticlassAccuracy(2), MulticlassRecall(2)])
        batches = core.batches(data, batch_size=7)
        found = tpukit.evaluate(
            core,
            model,
            nn.CrossEntropyLoss(),
            batches,
            metrics={"all": both},
            keep_outputs=keep_outputs,
        )
        return found.metrics

    numbers = quietly(work, backend="cpu").results[0]
    assert set(numbers) == {"all_MulticlassAccuracy", "all_MulticlassRecall"}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_metric_of_a_collection_does_not_replace_another_of_that_name(is_first):
    both = {"all": MetricCollection({"recall": MulticlassRecall(2)}), "all_recall": abs}
    if is_first:
        both = dict(reversed(both.items()))

    def work(core):
        model = core.model(nn.Linear(8, 2))
        batches = core.batches(data, batch_size=7)
        tpukit.evaluate(core, model, nn.CrossEntropyLoss(), batches, metrics=both)

    with pytest.raises(WorkerError, match="two metrics have the name 'all_recall'"):
        quietly(work, backend="cpu")


def test_a_metric_that_returns_a_dict_is_refused_and_its_fix_works():
    def both(outputs, targets):
        return {"mean": outputs.mean(), "sum": targets.sum()}

    def work(core, metric):
        batches = core.batches(data, batch_size=8)
        model = core.model(nn.Linear(8, 2))
        loss = nn.CrossEntropyLoss()
        tpukit.evaluate(core, model, loss, batches, metrics={"both": metric})

    with pytest.raises(WorkerError, match="both must return one number, got a dict") as caught:
        quietly(work, both, backend="cpu")
    fix = caught.value.fix.partition(": ")[2]
    quietly(work, eval(fix, {"both": both}), backend="cpu")


def test_scikit_learns_metrics_get_the_truth_first(capfd):
    votes = TensorDataset(torch.tensor([1, 1, 1, 1, 0, 0]), torch.tensor([1, 0, 0, 0, 1, 0]))
    partial = __import__("functools").partial(f1_score, zero_division=0)
    metrics = {"r2": r2_score, "precision": precision_score, "f1": partial}

    def work(core):
        model = core.model(nn.Identity())
        batches = core.batches(votes, batch_size=3)
        found = tpukit.evaluate(core, model, lambda a, b: 0.0 * a.sum(), batches, metrics=metrics)
        expected = {name: fn(found.targets, found.outputs) for name, fn in metrics.items()}
        return found.metrics, expected

    numbers, expected = quietly(work, backend="cpu").results[0]
    assert numbers == pytest.approx(expected)
    assert "precision takes the truth first (y_true)" in capfd.readouterr().out


@pytest.mark.parametrize("jit", [torch.jit.script, lambda m: torch.jit.trace(m, inputs)])
def test_modules_of_torch_jit_are_refused_before_they_move(jit):
    module = nn.Sequential(nn.Flatten(), jit(nn.Linear(8, 2)))
    with pytest.raises(WorkerError, match="does not support modules of torch.jit"):
        quietly(lambda core: core.model(module), backend="cpu")
