"""Evaluate a model on every sample of a set exactly once, over any number of cores."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpukit.data.batches import Batches
from tpukit.distributed.core import Core
from tpukit.training.step import forward

# Outputs wait on the device for so many steps and are then copied in one transfer. More would save little and keep more
# of the device's memory occupied.
_STEPS_BETWEEN_COPIES = 32


@dataclass(frozen=True)
class Evaluation:
    """A model's outputs for a set, and how good they are; the same on every core.

    Attributes:
        loss: the loss of all samples together, as the loss function gives it for them in one batch.
        metrics: the other numbers, by name.
        outputs: (N, ...) on the CPU, float32 at least, in dataset order.
        targets: (N, ...) on the CPU, in dataset order.
    """

    loss: float
    metrics: dict[str, float]
    outputs: object
    targets: object

    def __repr__(self) -> str:
        metrics = "".join(f", {name} {value:.4f}" for name, value in self.metrics.items())
        return f"Evaluation: {len(self.outputs):,} samples, loss {self.loss:.4f}{metrics}"


def evaluate(
    core: Core,
    model,
    loss: Callable,
    batches: Batches,
    *,
    metrics: Mapping[str, Callable] | None = None,
    prepare: Callable | None = None,
    bf16: bool = False,
) -> Evaluation:
    """Evaluate a model on every sample exactly once, together; the model's mode is restored afterwards.

    Outputs and targets of all cores are gathered in the step, copied to the host every 32 steps, put into dataset order
    and cut to its length. The loss and the metrics are computed there, of all samples at once: that is the same number
    over any number of cores, also for losses that are not a plain mean.

    Args:
        core: this core.
        model: from the batch's first part to outputs (B, ...).
        loss: from (outputs, targets) to one number. A module is copied to the CPU first.
        batches: `core.batches(dataset, batch_size=...)` in order, nothing dropped.
        metrics: functions of (outputs, targets), or torchmetrics' metrics, by name.
        prepare: changes the batch's first part on the device; for example, it normalises.
        bf16: compute in bfloat16 where autocast does.

    Raises:
        ValueError: the batches are shuffled or leave samples out, or a metric is not one number.
    """
    core.average_buffers(model)
    return evaluate_synced(core, model, loss, batches, metrics=metrics, prepare=prepare, bf16=bf16)


def evaluate_synced(
    core: Core,
    model,
    loss: Callable,
    batches: Batches,
    *,
    metrics: Mapping[str, Callable] | None = None,
    prepare: Callable | None = None,
    bf16: bool = False,
    between_steps: Callable[[], None] | None = None,
) -> Evaluation:
    """Do what `evaluate` does, for a model whose buffers are the same on every core already.

    `between_steps` is called after every step; an exception from it ends the evaluation.
    """
    import torch

    sampler = batches.sampler
    if sampler.shuffle or sampler.drop_last:
        raise ValueError(
            f"evaluate needs every sample once, in order; got batches with shuffle={sampler.shuffle}, "
            f"drop_last={sampler.drop_last}\n  fix:   core.batches(dataset, batch_size=...) without them"
        )
    was_training, on_device, on_host = model.training, [], []
    model.eval()
    with torch.no_grad():
        for batch in core.progress(batches, "valid"):
            with core.step():
                inputs, targets = batch[:2]
                outputs = forward(core, model, prepare(inputs) if prepare else inputs, bf16=bf16)
                # Of every step, though only the last has padding: a cut in one step would be one more graph.
                on_device.append((core.gather(outputs), core.gather(targets)))
            if between_steps:
                between_steps()
            if len(on_device) == _STEPS_BETWEEN_COPIES:
                on_host += core.to_host(on_device)
                on_device = []
    on_host += core.to_host(on_device)
    model.train(was_training)
    outputs, targets = (_in_dataset_order(core, steps, sampler.count) for steps in zip(*on_host, strict=True))
    # A copy, because the module's own weights (of classes, say) are on the device and in use there.
    loss = copy.deepcopy(loss).cpu() if isinstance(loss, torch.nn.Module) else loss
    value = _one_number("the loss", loss(outputs, targets))
    numbers = {name: _one_number(name, _compute(metric, outputs, targets)) for name, metric in (metrics or {}).items()}
    return Evaluation(value, numbers, outputs, targets)


def _one_number(name: str, value: object) -> float:
    if getattr(value, "numel", lambda: 1)() != 1 or not hasattr(value, "__float__"):
        shape = f" {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ValueError(
            f"{name} is one number, got a {type(value).__name__}{shape}\n"
            f'  fix:   take its mean; of a torchmetrics metric, average="macro"'
        )
    return float(value)


def _in_dataset_order(core: Core, steps: tuple, count: int):
    """Join (world_size * B, ...) tensors, one per step, to (count, ...): core 0 had the dataset's first samples."""
    import torch

    stacked = torch.stack(steps)
    shape = (len(steps), core.world_size, -1, *stacked.shape[2:])
    return stacked.reshape(shape).transpose(0, 1).reshape(-1, *stacked.shape[2:])[:count]


def _compute(metric: Callable, outputs, targets) -> object:
    if hasattr(metric, "reset") and hasattr(metric, "update"):  # torchmetrics
        metric.reset()
        # Classes are integers there: an AUROC refuses float targets, which BCEWithLogitsLoss needs.
        if _takes_classes(metric) and targets.is_floating_point() and bool((targets == targets.round()).all()):
            targets = targets.int()
    return metric(outputs, targets)


def _takes_classes(metric) -> bool:
    """Say whether a metric of torchmetrics, or one that it wraps, compares classes, and not numbers."""
    rooms = ("torchmetrics.classification", "torchmetrics.retrieval", "torchmetrics.segmentation")
    parts = metric.modules() if hasattr(metric, "modules") else [metric]
    return any(base.__module__.startswith(rooms) for part in parts for base in type(part).__mro__)
