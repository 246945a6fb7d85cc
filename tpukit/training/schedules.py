"""Learning rates over the steps of a run: a warmup, then constant, stepped or cosine.

Each function returns torch's own `LambdaLR`. Make it before a state is loaded, and step it after
every optimizer step:

    rate = 0.1 * batches.samples_per_step / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    scheduler = cosine(optimizer, epochs * len(batches), warmup=5 * len(batches))

LambdaLR is used instead of LinearLR, CosineAnnealingLR and StepLR in a SequentialLR for these
reasons. LambdaLR computes the rate from the step alone, so a resumed run has exactly the same
rates. Its state contains the step and no lengths. Loading the state of another scheduler restores
the old lengths, and replaces new arguments without a warning. SequentialLR warns whenever one
scheduler follows another (torch 2.8), and CosineAnnealingLR rises again after its end.

On XLA, a learning rate is an input of the graph and may change in every step. Three values are
exceptions, measured on torch_xla 2.9: 0, 1 and -1, after rounding to float32, are compiled as
constants of the graph (pytorch/xla pull request 715). So no scheduler here ever returns 0. In these
cases a step is still compiled again:

- once for SGD, when its rate becomes exactly 1.0;
- twice for an Adam or AdamW that is not recorded as in `tpukit/accelerators/adam.py`, such as one
  with `amsgrad`. The first time is when AdamW's lr * weight_decay falls below 2 ** -25 = 3e-8; a
  larger `floor` prevents it. The second time is step 16,628, when 0.999 ** step falls below
  2 ** -24; `capturable=True`, which counts the steps on the device, prevents it.
"""

import math
from collections.abc import Callable

from tpukit.essentials.display import InvalidValueError
from tpukit.training.interfaces import check_step_of_scheduler


def constant(optimizer, *, warmup: int = 0):
    """Return a scheduler that warms up to the optimizer's learning rate and then keeps it.

    The warmup is linear: step 0 has 1 / (warmup + 1) of the rate, and step `warmup` has all of it.

    Args:
        optimizer: an optimizer of torch, or one with its interface.
        warmup: steps of the linear warmup, 0 for none.

    Returns:
        a `LambdaLR`, to be stepped after every optimizer step.

    Raises:
        ValueError: `warmup` is negative, or the learning rate is a tensor on an XLA device.
    """
    return _scheduler(optimizer, warmup, lambda step: 1.0)


def stepped(optimizer, every: int, *, factor: float = 0.5, warmup: int = 0):
    """Return a scheduler that multiplies the learning rate by `factor` every `every` steps.

    Args:
        optimizer: an optimizer of torch, or one with its interface.
        every: number of optimizer steps, at least 1; `len(batches)` steps are an epoch.
        factor: a number above 0. For ImageNet, 0.1 every 30 epochs is common.
        warmup: steps of a linear warmup at the beginning, 0 for none.

    Returns:
        a `LambdaLR`, to be stepped after every optimizer step.

    Raises:
        ValueError: a number is out of range, or the learning rate is a tensor on an XLA device.
    """
    if every < 1 or not factor > 0:  # `not ... > 0`, so that NaN raises the error, too
        raise ValueError(f"every must be 1 or more and factor above 0, got {every=} and {factor=}")
    return _scheduler(optimizer, warmup, lambda step: factor ** (step // every))


def cosine(optimizer, steps: int, *, warmup: int = 0, floor: float = 0.0):
    """Return a scheduler that lowers the learning rate along half a cosine until the run ends.

    After `steps` steps, the rate stays at its last value.

    Args:
        optimizer: an optimizer of torch, or one with its interface.
        steps: optimizer steps of the whole run, with the warmup: `epochs * len(batches)`.
        warmup: steps of a linear warmup at the beginning, 0 for none; less than `steps`.
        floor: the lower limit of the rate, as a fraction of the full rate: 0 to below 1.

    Returns:
        a `LambdaLR`, to be stepped after every optimizer step.

    Raises:
        ValueError: a number is out of range, or the learning rate is a tensor on an XLA device.
    """
    if not 0 <= floor < 1:
        raise ValueError(f"floor must be a fraction of the full rate, 0 to below 1, got {floor}")
    if not steps > warmup:
        raise InvalidValueError(
            f"cosine needs more steps than its warmup has, got {steps=} and {warmup=}",
            fix="both count optimizer steps: steps=epochs * len(batches)",
        )

    def fall(step: int) -> float:
        # Steps count from 0, so the last is `steps - 1`, and `done` stays below 1. So the rate
        # never reaches the floor, which may be 0: a rate of 0 would be compiled as a constant.
        last = min(step, steps - 1)
        done = max(0, last - warmup) / (steps - warmup)
        half_cosine = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
        return floor + (1 - floor) * half_cosine

    return _scheduler(optimizer, warmup, fall)


def is_plateau(scheduler) -> bool:
    """Return whether a scheduler is torch's ReduceLROnPlateau, whose `step` needs a number."""
    import torch

    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def check_schedule(scheduler, interval: str, *, column: str, lower: bool) -> str:
    """Return when `fit` steps a scheduler: after every "step" or after every "epoch".

    Args:
        scheduler: the scheduler of `fit`, or None.
        interval: `scheduler_interval` of `FitOptions`.
        column: the column of the history that a ReduceLROnPlateau gets.
        lower: whether lower values of this column are better.

    Raises:
        ValueError: the `mode` of a ReduceLROnPlateau does not fit the column.
        TypeError: the `step` of the scheduler needs arguments, as in some other packages.
    """
    if not is_plateau(scheduler):
        if scheduler is not None:
            check_step_of_scheduler(scheduler)
        return interval
    # Its default mode "min" is wrong for an accuracy: it would lower the rate as this improves.
    mode = "min" if lower else "max"
    if scheduler.mode != mode:
        raise InvalidValueError(
            f"ReduceLROnPlateau would lower the learning rate while {column} gets better",
            found=f'the mode of the scheduler is "{scheduler.mode}"',
            fix=f'ReduceLROnPlateau(optimizer, mode="{mode}")',
        )
    return "epoch"


def _scheduler(optimizer, warmup: int, factor: Callable[[int], float]):
    import torch

    if warmup < 0:
        raise ValueError(f"warmup must be a number of steps, 0 for none, got {warmup}")
    for group in optimizer.param_groups:
        rate = group["lr"]
        if torch.is_tensor(rate) and rate.device.type == "xla":
            raise InvalidValueError(
                "the learning rate is a tensor on the XLA device",
                found="every step would copy it to the host (aten::_local_scalar_dense)",
                fix="pass a float, such as lr=0.1; a change of it does not cause a compilation",
            )

    def scaled(step: int) -> float:
        # step + 1, because otherwise step 0 would have the rate 0, which needs another graph.
        warmed = min(1.0, (step + 1) / (warmup + 1))
        return warmed * factor(step)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, scaled)
