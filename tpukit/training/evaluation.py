"""Judge a model on every sample of a set exactly once, however many cores share it."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpukit.data.batches import Batches
from tpukit.distributed.core import Core

_STEPS_BETWEEN_COPIES = 32  # outputs wait on the device so long: one transfer for many steps


@dataclass(frozen=True)
class Evaluation:
    """What a model says of a set, and how good that is; the same on every core.

    Attributes:
        loss: the loss of all samples together, as the loss function gives it for them in one batch.
        metrics: the other numbers, by name.
        outputs: (N, ...) float32 on the CPU, in dataset order.
        targets: (N, ...) on the CPU, in dataset order.
    """

    loss: float
    metrics: dict[str, float]
    outputs: object
    targets: object

    def __repr__(self) -> str:
        told = "".join(f", {name} {value:.4f}" for name, value in self.metrics.items())
        return f"Evaluation: {len(self.outputs):,} samples, loss {self.loss:.4f}{told}"


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
    """Judge a model on every sample exactly once, together; the model's mode is put back afterwards.

    Outputs and targets of all cores are gathered in the step, brought to the host now and then, put into dataset order
    and cut to its length. The loss and the metrics are computed there, of all samples at once: that is the same number
    over any number of cores, also for losses that are no plain mean.

    Args:
        core: this core.
        model: from the batch's first part to outputs (B, ...).
        loss: from (outputs, targets) to one number. A module is copied to the CPU first.
        batches: `core.batches(dataset, batch_size=...)` in order, nothing dropped.
        metrics: functions of (outputs, targets), or torchmetrics' metrics, by name.
        prepare: changes the batch's first part on the device: normalises.
        bf16: compute in bfloat16 where autocast does.

    Raises:
        ValueError: the batches are shuffled or leave samples out, or a metric is no number.
    """
    core.average_buffers(model)
    return judge(core, model, loss, batches, metrics=metrics, prepare=prepare, bf16=bf16)


def judge(core, model, loss, batches, *, metrics=None, prepare=None, bf16=False, between_steps=None) -> Evaluation:
    """Do what `evaluate` does with buffers that are the same on every core already."""
    import torch

    if batches.sampler.shuffle or batches.sampler.drop_last:
        raise ValueError(
            f"evaluate wants every sample once, in order; got batches with shuffle={batches.sampler.shuffle}, "
            f"drop_last={batches.sampler.drop_last}\n  fix:   core.batches(dataset, batch_size=...) without them"
        )
    was_training, waiting, done = model.training, [], []
    model.eval()
    with torch.no_grad():
        for batch in core.progress(batches, "valid"):
            with core.step():
                inputs, targets = batch[:2]
                outputs = forward(core, model, prepare(inputs) if prepare else inputs, bf16)
                waiting.append((core.gather(outputs), core.gather(targets)))
            if between_steps:
                between_steps()
            if len(waiting) == _STEPS_BETWEEN_COPIES:
                done += core.to_host(waiting)
                waiting = []
    done += core.to_host(waiting)
    model.train(was_training)
    outputs, targets = (_in_order(core, parts, batches.sampler.count) for parts in zip(*done, strict=True))
    value = one_number("the loss", on_host(loss)(outputs, targets))
    numbers = {name: one_number(name, _measure(metric, outputs, targets)) for name, metric in (metrics or {}).items()}
    return Evaluation(value, numbers, outputs, targets)


def forward(core: Core, model, inputs, bf16: bool):
    """Return the model's outputs as float32, computed in bfloat16 where autocast does so."""
    import torch
    from torch.utils import _pytree as tree

    context = torch.autocast(core.device.type, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()
    with context:
        outputs = model(inputs)
    if isinstance(outputs, torch.Tensor) and outputs.dtype == torch.float32:  # as most are
        return outputs
    return tree.tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, outputs)


def on_host(loss: Callable) -> Callable:
    """Return the loss for tensors in host memory: of a module, a copy."""
    import torch

    return copy.deepcopy(loss).cpu() if isinstance(loss, torch.nn.Module) else loss


def one_number(name: str, value: object) -> float:
    """Return what a loss or a metric gave as a float, or refuse it.

    Raises:
        ValueError: it is not one number.
    """
    if getattr(value, "numel", lambda: 1)() != 1 or not hasattr(value, "__float__"):
        shape = f" {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ValueError(
            f"{name} is one number, got a {type(value).__name__}{shape}\n"
            f'  fix:   take its mean; of a torchmetrics metric, average="macro"'
        )
    return float(value)


def _in_order(core: Core, parts: tuple, count: int):
    """Put (world_size * B, ...) tensors, one a step, into the order of the dataset: core 0's stretch first."""
    import torch

    together = torch.stack(parts)
    steps, both, *rest = together.shape
    together = together.reshape(steps, core.world_size, both // core.world_size, *rest).transpose(0, 1)
    return together.reshape(steps * both, *rest)[:count]


def _measure(metric: Callable, outputs, targets) -> object:
    if hasattr(metric, "reset") and hasattr(metric, "update"):  # torchmetrics': classes are integers there
        metric.reset()
        whole = targets.is_floating_point() and bool((targets == targets.round()).all())
        targets = targets.int() if whole else targets
    return metric(outputs, targets)
