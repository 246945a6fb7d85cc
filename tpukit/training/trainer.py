"""Train a model over a Core: no wait for the host in a step, exact evaluation, a run that survives being cut off."""

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tpukit.data.batches import Batches
from tpukit.distributed.core import Core
from tpukit.training.checkpoints import Checkpoints
from tpukit.training.fitting import Trainer
from tpukit.training.history import History


def fit(
    core: Core,
    model,
    optimizer,
    loss: Callable,
    train: Batches,
    valid: Batches | None = None,
    *,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    schedule=None,
    metrics: Mapping[str, Callable] | None = None,
    prepare: Callable | None = None,
    augment: Callable | None = None,
    bf16: bool = False,
    accumulate: int = 1,
    clip: float | None = None,
    average=None,
    best: str = "valid_loss",
    log_every: int = 50,
    folder: str | Path | None = None,
    keep: int = 3,
    save_every: str | float = "10m",
    resume: bool = True,
    budget: str | float | None = None,
) -> History:
    """Train a model, together, and return its `History`, the same on every core.

    Losses stay on the device: one copy to the host every `log_every` steps. Gradients, float buffers and the loss are
    averaged over the cores in one message, so all cores hold the same model after every step. Random numbers of a step
    depend on the run's seed, the step and the rank alone, so a resumed run is the uninterrupted one, bit for bit.

    Args:
        core: this core.
        model: from `core.model`; takes the batch's first part.
        optimizer: over the model's parameters.
        loss: from (outputs, targets) to one number, the mean over the samples.
        train: `core.batches(..., shuffle=True, drop_last=True)`, batches of (inputs, targets).
        valid: `core.batches(...)` in order, judged after every epoch as `evaluate` does; None for none.
        epochs: passes over the data, or parts of it.
        steps_per_epoch: optimiser steps after which an epoch is over; None for all the data.
        schedule: of torch.optim.lr_scheduler, stepped after every optimiser step.
        metrics: functions of (outputs, targets), or torchmetrics' metrics, by name; rows say `valid_<name>`.
        prepare: changes the inputs on the device, in training and evaluation: normalises.
        augment: changes (inputs, targets) on the device before that, in training only.
        bf16: run the forward pass under autocast to bfloat16; loss, BatchNorm's statistics and optimiser stay float32.
        accumulate: batches whose gradients one optimiser step takes, all in one graph.
        clip: the largest norm of the gradients; None for no limit.
        average: a `moving_average` of the model, updated every step, and judged and kept in its place.
        best: the column that says which epoch is best; a loss or an error is best low, anything else high.
        log_every: optimiser steps between two copies of the losses to the host.
        folder: of checkpoints and `best.pt`, the best epoch's weights; None to keep nothing.
        keep: checkpoints kept beside the best.
        save_every: time between checkpoints: "90s", "10m", "1h30m" or seconds; one is saved after every epoch anyway.
        resume: go on from the newest whole checkpoint in the folder, if there is one.
        budget: time after which to stop with a checkpoint, counted from here: "8h30m" or seconds; None for no limit.

    Raises:
        NotFinite: the loss became NaN or infinite.
        ValueError: an argument is out of range, the model has no parameters, the loss is not one number, or the
            checkpoint is of another architecture or dataset.
        OSError: a checkpoint could not be written.
    """
    for name, value in (("epochs", epochs), ("accumulate", accumulate), ("log_every", log_every), ("keep", keep)):
        if value < 1:
            raise ValueError(f"{name} is at least 1, got {value}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "the model has no parameters to train\n  fix:   pass a torch.nn.Module with layers, and unfreeze some: "
            "parameter.requires_grad_(True)"
        )
    steps = min(len(train) // accumulate, steps_per_epoch or len(train))
    if steps < 1:
        raise ValueError(
            f"an epoch has {len(train)} batches, which is less than accumulate={accumulate}\n"
            f"  fix:   accumulate={len(train)}, or a smaller batch_size"
        )
    return Trainer(
        core,
        model,
        optimizer,
        loss,
        train,
        valid,
        epochs=epochs,
        steps=steps,
        schedule=schedule,
        metrics=copy.deepcopy(dict(metrics or {})),  # cores may be threads of one process
        prepare=prepare,
        augment=augment,
        bf16=bf16,
        accumulate=accumulate,
        clip=clip,
        average=average,
        best=best if valid is not None else "train_loss",
        log_every=log_every,
        save_seconds=seconds(save_every),
        budget=seconds(budget) if budget is not None else float("inf"),
        checkpoints=Checkpoints(folder, keep) if folder is not None else None,
        resume=resume,
    ).run()


def seconds(text: str | float) -> float:
    """Return how many seconds "8h30m", "90s" or a number are.

    Raises:
        ValueError: it is none of these, or not above 0.
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and text >= 0:
        return float(text)
    parts = re.fullmatch(r"(?:(\d+)d)? ?(?:(\d+)h)? ?(?:(\d+)m)? ?(?:(\d+)s)?", str(text).strip())
    if not parts or not any(parts.groups()):
        raise ValueError(f'a time is written "8h30m", "10m", "90s", or as seconds; got {text!r}')
    days, hours, minutes, rest = (int(part or 0) for part in parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
