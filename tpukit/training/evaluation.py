"""Evaluate a model on every sample of a set exactly once, over any number of cores."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tpukit.essentials.data import Batches, ShardedSampler
from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.launcher import Core, gather_objects
from tpukit.training.batch import inputs_and_targets, inputs_targets_and_mask, takes_mask
from tpukit.training.checks import check_classes
from tpukit.training.metrics import StreamedMetrics, as_classes, has_state
from tpukit.training.prediction import check_order, evaluating, host_steps, in_dataset_order


@dataclass(frozen=True)
class Evaluation:
    """A model's outputs for a set, and how good they are; the same on every core.

    Attributes:
        loss: the loss of all samples together, as the loss function gives it for them in one batch.
        metrics: the other numbers, by name.
        outputs: (N, ...) on the CPU, float32 at least, in dataset order; a tuple or dict of them where the model
            returns one. None with `keep_outputs=False`.
        targets: (N, ...) on the CPU, in dataset order, nested as the dataset's; None with `keep_outputs=False`.
    """

    loss: float
    metrics: dict[str, float]
    outputs: object
    targets: object

    def __repr__(self) -> str:
        from torch.utils import _pytree as tree

        metrics = "".join(f", {name} {value:.4f}" for name, value in self.metrics.items())
        count = "".join(f"{len(leaf):,} samples, " for leaf in tree.tree_leaves(self.targets)[:1] if leaf is not None)
        return f"Evaluation: {count}loss {self.loss:.4f}{metrics}"


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
    """Evaluate a model on every sample exactly once, together; the model's mode is restored afterwards.

    Outputs and targets of all cores are gathered in the step, copied to the host every 32 steps or 256 MB, and put into
    dataset order, without what only filled the last step. The loss and the metrics are computed there, of all samples
    at once: that is the same number over any number of cores, also for losses that are not a plain mean. Every core
    holds them all: N outputs and targets.

    With `keep_outputs=False` nothing is gathered. Each core updates torchmetrics' metrics with its own samples, step by
    step, and at the end their states are combined, again with every sample once. The loss is then the mean of the
    steps' losses, weighted by their samples. That is the loss of all samples where it is a plain mean over them; it is
    not with class weights, with `ignore_index`, or where it is no mean at all: then take a metric in its place.

    What a batch is, and how the model is called, is the same as in `fit`. The loss and the metrics get outputs and
    targets nested as they came. An output without an axis, as a loss that the model computes itself, is None here:
    it cannot be joined exactly, so compute it from the other outputs.

    Args:
        model: from a batch's inputs to outputs (B, ...), or to a tuple or dict of such tensors.
        loss: from (outputs, targets) to one number. A module is copied to the CPU first.
        batches: `core.batches(dataset, batch_size=...)` in order, nothing dropped.
        metrics: functions of (outputs, targets), or torchmetrics' metrics, by name.
        preprocess, bf16: as in `fit`.
        keep_outputs: whether to gather and return all outputs and targets; False where they do not fit into memory.

    Raises:
        ValueError: the batches are shuffled or leave samples out, their classes are numbered otherwise than those that
            `fit` trained this model on, an output has no axis of samples, or a metric is not one number.
        TypeError: a batch or the model's outputs are of no known kind; or a metric cannot be updated step by step.
    """
    check_classes(model, batches, "evaluation")
    core.average_buffers(model)
    core.agreement.compare("in evaluate", modules={"": model}, data=batches.facts(), layers=False)
    options = {"metrics": metrics, "preprocess": preprocess, "bf16": bf16, "keep_outputs": keep_outputs}
    return evaluate_synced(core, model, loss, batches, **options)


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
    """Do what `evaluate` does, for a model whose buffers are the same on every core already; `options` of `host_steps`.

    `label` is that of the bar.
    """
    import torch

    check_order("evaluate", batches.sampler)
    # A copy, because the module's own weights (of classes, say) are on the device and in use there.
    loss = copy.deepcopy(loss).cpu() if isinstance(loss, torch.nn.Module) else loss
    streamed = None if keep_outputs else StreamedMetrics(core, metrics or {})
    gather = core.gather if keep_outputs else torch.Tensor.detach
    masked = takes_mask(batches, loss)
    split = inputs_targets_and_mask if masked else inputs_and_targets
    steps = host_steps(core, model, batches, split, gather=gather, label=label, **options)
    with evaluating(model):
        if not keep_outputs:
            return _streamed(core, steps, batches.sampler, loss, streamed, masked=masked)
        outputs, targets = in_dataset_order(steps, batches.sampler)
    targets, *mask = targets if masked else (targets,)
    value = _one_number("the loss", loss(outputs, targets, *mask))
    numbers = {name: _one_number(name, _of_all(metric, outputs, targets)) for name, metric in (metrics or {}).items()}
    return Evaluation(*_as_core_0(core, (value, numbers)), outputs, targets)


def _as_core_0(core: Core, numbers: tuple) -> tuple:
    """Return core 0's numbers, together: what is decided by them, the best epoch say, is decided alike on all cores.

    A metric may draw random numbers, read a clock or a file of its own host.
    """
    return gather_objects(core, numbers)[0] if core.world_size > 1 and not core.backend.is_recording else numbers


def _streamed(
    core: Core, steps: Iterator[tuple], sampler: ShardedSampler, loss, metrics: StreamedMetrics, *, masked: bool
):
    """Return the `Evaluation` of outputs that nobody keeps: each core sees its own, without padding."""
    from torch.utils import _pytree as tree

    total = 0.0
    for step, positions in zip(steps, sampler.positions(), strict=True):
        real = int((positions < sampler.count).sum())
        if real:
            outputs, targets = tree.tree_map(lambda leaf, real=real: leaf if leaf is None else leaf[:real], step)
            targets, *mask = targets if masked else (targets,)
            total += real * _one_number("the loss", loss(outputs, targets, *mask))
            metrics.update(outputs, targets)
    totals = gather_objects(core, total)
    numbers = {name: _one_number(name, value) for name, value in metrics.compute().items()}
    return Evaluation(*_as_core_0(core, (sum(totals) / sampler.count, numbers)), None, None)


def _one_number(name: str, value: object) -> float:
    if value is None:
        raise InvalidValueError(
            f"{name} is one number, got None",
            found=(
                "a loss that the model computes itself is None in an evaluation: it is of one batch with its padding"
            ),
            fix="compute it from the other outputs: lambda outputs, labels: cross_entropy(outputs.logits, labels)",
        )
    if getattr(value, "numel", lambda: 1)() != 1 or not hasattr(value, "__float__"):
        shape = f" {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise InvalidValueError(
            f"{name} is one number, got a {type(value).__name__}{shape}",
            fix='take its mean; of a torchmetrics metric, average="macro"',
        )
    return float(value)


def _of_all(metric: Callable, outputs, targets) -> object:
    if has_state(metric):  # torchmetrics
        metric.reset()
        targets = as_classes(metric, targets)
    return metric(outputs, targets)
