"""Learning rates over the steps of a run: a warmup, then constant, stepped or cosine.

Each function returns torch's own `LambdaLR`. Make it before a state is loaded, and step it after
every optimizer step:

    rate = 0.1 * batches.samples_per_step / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    scheduler = cosine(optimizer, epochs * len(batches), warmup=5 * len(batches))

Why LambdaLR, and not LinearLR, CosineAnnealingLR and StepLR in a SequentialLR: LambdaLR computes
the rate from the step alone, so a resumed run has exactly the same rates. Its state holds the step
and no lengths. Loading the state of the others restores the old lengths, and overrides new
arguments without a warning. SequentialLR warns whenever one scheduler follows another (torch 2.8),
and CosineAnnealingLR rises again after its end.

On XLA a learning rate is an input of the graph and may change every step. Three values are
exceptions, measured on 2.9: 0, 1 and -1 are compiled in as constants (pytorch/xla pull request
715), after rounding to float32. So no scheduler here ever returns 0. Some compilations remain:

- one for SGD when its rate becomes exactly 1.0;
- two for an Adam or AdamW that is not recorded as in `tpukit/accelerators/adam.py`, such as one
  with `amsgrad`. The first comes when lr * weight_decay of AdamW falls below 2 ** -25 = 3e-8; a
  `floor` above that prevents it. The second comes at step 16,628, when 0.999 ** step falls below
  2 ** -24; `capturable=True`, which counts steps on the device, prevents it.
"""

import math
from collections.abc import Callable

from tpukit.essentials.display import InvalidValueError
from tpukit.training.interfaces import check_step_of_scheduler


def constant(optimizer, *, warmup: int = 0):
    """Rise to the optimizer's learning rate in `warmup` steps, then keep it.

    The rise is linear: step 0 has 1 / (warmup + 1) of the rate, step `warmup` all of it.

    Raises:
        ValueError: a negative warmup, or a learning rate that is a tensor on an XLA device.
    """
    return _scheduler(optimizer, warmup, lambda step: 1.0)


def stepped(optimizer, every: int, *, factor: float = 0.5, warmup: int = 0):
    """Multiply the learning rate by `factor` every `every` steps of the run.

    Args:
        optimizer: any of torch's, or with torch's interface.
        every: number of steps, not epochs; `len(batches)` is once per epoch.
        factor: above 0; 0.1 every 30 epochs is common for ImageNet.
        warmup: steps of linear rise at the beginning, 0 for none.

    Raises:
        ValueError: a number out of range, or a learning rate that is a tensor on an XLA device.
    """
    if every < 1 or factor <= 0:
        raise ValueError(f"every must be 1 or more and factor above 0, got {every=} and {factor=}")
    return _scheduler(optimizer, warmup, lambda step: factor ** (step // every))


def cosine(optimizer, steps: int, *, warmup: int = 0, floor: float = 0.0):
    """Fall from the optimizer's learning rate along half a cosine that ends with the run.

    A run of more than `steps` steps keeps the last rate.

    Args:
        optimizer, warmup: as in `stepped`.
        steps: optimizer steps of the whole run, the warmup included; `epochs * len(batches)`.
        floor: the rate that the fall approaches, as a fraction of the full rate, 0 to 1.

    Raises:
        ValueError: a number out of range, or a learning rate that is a tensor on an XLA device.
    """
    if not 0 <= floor < 1:
        raise ValueError(f"floor must be a fraction of the full rate, 0 to 1, got {floor}")
    if not steps > warmup:
        raise InvalidValueError(
            f"cosine needs more steps than its warmup has, got {steps=} and {warmup=}",
            fix="both count optimizer steps: steps=epochs * len(batches)",
        )

    def fall(step: int) -> float:
        # The last step of the run is `steps - 1`. So the rate never reaches the floor, which may
        # be 0.
        last = min(step, steps - 1)
        done = max(0, last - warmup) / (steps - warmup)
        half_cosine = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
        return floor + (1 - floor) * half_cosine

    return _scheduler(optimizer, warmup, fall)


def is_plateau(scheduler) -> bool:
    """Return whether a scheduler's `step` takes a number, as torch's ReduceLROnPlateau does."""
    import torch

    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def check_schedule(scheduler, interval: str, *, column: str, lower: bool) -> str:
    """Return when `fit` steps a scheduler: after every "step" or after every "epoch".

    Raises:
        ValueError: a ReduceLROnPlateau waits for `column` to change the wrong way.
        TypeError: the `step` of the scheduler needs arguments, as in other packages.
    """
    if not is_plateau(scheduler):
        if scheduler is not None:
            check_step_of_scheduler(scheduler)
        return interval
    mode = "min" if lower else "max"
    if scheduler.mode != mode:
        raise InvalidValueError(
            f"ReduceLROnPlateau would lower the learning rate while {column} gets better",
            found=f'mode="{scheduler.mode}", its default is "min"',
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
                found=(
                    "every step would copy it to the host (aten::_local_scalar_dense), "
                    "which a float does not"
                ),
                fix="lr=0.1; a float that changes compiles nothing new",
            )

    def scaled(step: int) -> float:
        # (step + 1), because step 0 of a warmup would have the rate 0, which is a graph of its own.
        warmed = min(1.0, (step + 1) / (warmup + 1))
        return warmed * factor(step)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, scaled)
