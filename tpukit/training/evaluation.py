"""Evaluate a model on every sample of a dataset exactly once, on any number of cores."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tpukit.essentials.data import Batches, ShardedSampler
from tpukit.essentials.display import InvalidValueError, check_flag
from tpukit.essentials.launcher import Core, gather_objects
from tpukit.training.batch import FurtherParts
from tpukit.training.checks import check_classes
from tpukit.training.index_checks import watched_loss
from tpukit.training.metrics import StreamedMetrics, as_classes, has_state, separate_metrics
from tpukit.training.prediction import check_order, evaluating, host_steps, in_dataset_order
from tpukit.training.weighted_loss import Loss, as_loss


@dataclass(frozen=True)
class Evaluation:
    """A model's outputs for a dataset, its loss and metrics; the same on every core.

    Attributes:
        loss: the loss of all samples together, as if they were one batch.
        metrics: the other numbers, by name.
        outputs: (N, ...) on the CPU, float32 or wider, in dataset order; nested as the model's
            outputs. None with `keep_outputs=False`.
        targets: (N, ...) on the CPU, in dataset order, nested as the dataset's. None with
            `keep_outputs=False`.
    """

    loss: float
    metrics: dict[str, float]
    outputs: object
    targets: object

    def __repr__(self) -> str:
        from torch.utils import _pytree as tree

        parts = [f"loss {self.loss:.4f}"]
        parts += [f"{name} {value:.4f}" for name, value in self.metrics.items()]
        leaves = tree.tree_leaves(self.targets)
        if leaves and leaves[0] is not None:
            parts.insert(0, f"{len(leaves[0]):,} samples")
        return f"Evaluation: {', '.join(parts)}"


def evaluate(
    core: Core,
    model,
    loss: Callable,
    batches: Batches,
    *,
    metrics: Mapping[str, Callable] | None = None,
    preprocess: Callable | None = None,
    bf16: bool = False,
    keep_outputs: bool = True,
) -> Evaluation:
    """Evaluate a model on every sample exactly once. Collective: call it on every core.

        found = evaluate(core, model, loss, core.batches(images, batch_size=64))
        found.loss, found.outputs.shape

    Outputs and targets of all cores are gathered in the step, copied to the host every 32 steps
    or 256 MB, and put into dataset order, without the padding of the last step. There, the loss and
    the metrics are computed from all samples at once. So they do not depend on the number of cores,
    even if the loss is not a plain mean. Every core holds all N outputs and targets.

    With `keep_outputs=False` nothing is gathered. Each core updates torchmetrics' metrics with
    its own samples, step by step, and at the end their states are combined. The loss is then the
    mean of the steps' losses, weighted by their samples. It equals the loss of all samples only
    if that is a plain mean over them. With class weights or `ignore_index` it is not: return
    `(total, weight)` from the loss, or use a metric in its place.

    Batches reach the model and the loss as in `fit`. The loss and the metrics get outputs and
    targets with their nesting. An output without an axis, such as a loss that the model computes
    itself, is None here, because it cannot be joined exactly: compute it from the other outputs.

    The mode of the model's layers is restored afterwards.

    Args:
        core: this core.
        model: from a batch's inputs to outputs (B, ...), or to a tuple or dict of such tensors.
        loss: from (outputs, targets) to one number, or to `(total, weight)`. A module is copied to
            the CPU first.
        batches: `core.batches(dataset, batch_size=...)`, not shuffled, nothing dropped.
        metrics: functions of (outputs, targets), or torchmetrics' metrics, by name; see `fit`.
        preprocess: changes the inputs on the device, as in `fit`.
        bf16: run the forward pass under autocast to bfloat16.
        keep_outputs: gather and return all outputs and targets. Use False if they do not fit
            into memory.

    Raises:
        ValueError: the batches are shuffled or leave samples out; their classes are numbered in
            another way than those that `fit` trained this model on; an output has no axis of
            samples; or a metric is not one number.
        TypeError: a batch, or an output of the model, has an unknown type; or a metric cannot be
            updated step by step.
    """
    metrics = separate_metrics(core, metrics or {})
    check_flag("bf16", bf16)
    check_flag("keep_outputs", keep_outputs)
    check_classes(model, batches, "evaluation")
    core.average_buffers(model)
    core.internal.agreement.compare(
        "in evaluate", modules={"": model}, data=batches.facts(), layers=False
    )
    return evaluate_synced(
        core,
        model,
        loss,
        batches,
        metrics=metrics,
        preprocess=preprocess,
        bf16=bf16,
        keep_outputs=keep_outputs,
    )


def evaluate_synced(
    core: Core,
    model,
    loss: Callable,
    batches: Batches,
    *,
    metrics: Mapping[str, Callable] | None,
    keep_outputs: bool,
    label: str | None = "valid",
    **options: object,
) -> Evaluation:
    """Do the work of `evaluate` for a model whose buffers are in sync already.

    Args:
        core: this core.
        model: as in `evaluate`.
        loss: as in `evaluate`.
        batches: as in `evaluate`.
        metrics: as in `evaluate`.
        keep_outputs: as in `evaluate`.
        label: the label of the progress bar; None for no bar.
        options: further options of `host_steps`.
    """
    import torch

    check_order("evaluate", batches.sampler)
    if isinstance(loss, torch.nn.Module):
        # A copy, because the module's own weights (of classes, say) are in use on the device.
        loss = copy.deepcopy(loss).cpu()
    streamed = None if keep_outputs else StreamedMetrics(core, metrics or {})
    gather = core.gather if keep_outputs else torch.Tensor.detach
    split = FurtherParts(batches, loss).split
    steps = host_steps(core, model, batches, split, gather=gather, label=label, **options)
    with evaluating(model):
        if not keep_outputs:
            return _streamed(core, steps, sampler=batches.sampler, loss=loss, metrics=streamed)
        outputs, targets = in_dataset_order(steps, batches.sampler)
    targets, further = targets
    value = _loss(watched_loss(loss, outputs, targets, *further)).mean
    numbers = {
        name: _one_number(name, _of_all(metric, outputs, targets))
        for name, metric in (metrics or {}).items()
    }
    value, numbers = _from_core_0(core, (value, numbers))
    return Evaluation(value, numbers, outputs=outputs, targets=targets)


def _from_core_0(core: Core, numbers: tuple) -> tuple:
    """Return core 0's numbers on every core. Collective.

    A metric may draw random numbers, or read a clock or a file of its host. But every core chooses
    the best epoch by these numbers, and all must choose the same.
    """
    if core.world_size == 1 or core.backend.is_recording:
        return numbers
    return gather_objects(core, numbers)[0]


def _streamed(
    core: Core,
    steps: Iterator[tuple],
    *,
    sampler: ShardedSampler,
    loss: Callable,
    metrics: StreamedMetrics,
) -> Evaluation:
    """Return the `Evaluation` without outputs: each core sees its own samples only."""
    from torch.utils import _pytree as tree

    total = 0.0
    weight = 0.0
    for step, positions in zip(steps, sampler.positions(), strict=True):
        real = int((positions < sampler.count).sum())  # the rest is padding
        if not real:
            continue

        def without_padding(leaf, real=real):
            return None if leaf is None else leaf[:real]

        outputs, targets = tree.tree_map(without_padding, step)
        targets, further = targets
        value = _loss(watched_loss(loss, outputs, targets, *further))
        if value.weight is None:
            value = Loss(real * float(value.total), real)
        total += float(value.total)
        weight += float(value.weight)
        metrics.update(outputs, targets)
    totals, weights = zip(*gather_objects(core, (total, weight)), strict=True)
    mean = Loss(sum(totals), sum(weights)).mean
    numbers = {name: _one_number(name, value) for name, value in metrics.compute().items()}
    mean, numbers = _from_core_0(core, (mean, numbers))
    return Evaluation(mean, numbers, outputs=None, targets=None)


def _loss(value: object) -> Loss:
    """Return the value of a loss; raise if it is None or not one number."""
    return as_loss(value if isinstance(value, tuple) else _one_number("the loss", value))


def _one_number(name: str, value: object) -> float:
    if value is None:
        raise InvalidValueError(
            f"{name} must return one number, got None",
            found=(
                "a loss that the model computes itself is None in an evaluation, because the "
                "mean of one batch includes its padding"
            ),
            fix=(
                "compute it from the other outputs: lambda outputs, labels: "
                "cross_entropy(outputs.logits, labels)"
            ),
        )
    if isinstance(value, Mapping):
        part = next(iter(value), "name")
        raise InvalidValueError(
            f"{name} must return one number, got a {type(value).__name__} of "
            f"{', '.join(map(repr, value))}",
            fix="a function for each of its numbers: "
            f"lambda outputs, targets: {name}(outputs, targets)[{part!r}]",
        )
    size = value.numel() if hasattr(value, "numel") else 1
    if size != 1 or not hasattr(value, "__float__"):
        found = type(value).__name__
        if hasattr(value, "shape"):
            found += f" {tuple(value.shape)}"
        raise InvalidValueError(
            f"{name} must return one number, got a {found}",
            fix='take its mean; for a torchmetrics metric, pass average="macro"',
        )
    return float(value)


def _of_all(metric: Callable, outputs, targets) -> object:
    """Return a metric of all samples at once."""
    if has_state(metric):  # torchmetrics
        metric.reset()
        targets = as_classes(metric, targets)
    return metric(outputs, targets)
