"""Losses that are a weighted mean: a loss may return `(total, weight)`.

With `ignore_index` or class weights, the batches of a step have different weights. The mean of
their mean losses is then not the loss of the joined batch:

    core 0          8 tokens, total 4.0      mean 0.5
    core 1          2 tokens, total 3.0      mean 1.5
    mean of means                            1.0
    joined batch    10 tokens, total 7.0     mean 0.7

So `fit` divides the sum of the totals' gradients by the sum of the weights of all batches.
"""

import math
from collections.abc import Mapping
from numbers import Real
from typing import NamedTuple

from tpukit.essentials.display import InvalidTypeError, InvalidValueError


class Loss(NamedTuple):
    """The result of a loss function for one batch.

    Attributes:
        total: the sum of the weighted losses, or the mean loss if `weight` is None: a number, or a
            tensor with one element.
        weight: the sum of the weights: a number, or a tensor with one element. None: `total` is the
            mean over the samples.
    """

    total: object
    weight: object = None

    @property
    def mean(self) -> float:
        """The loss as a number; NaN if the weight is 0."""
        if self.weight is None:
            return float(self.total)
        weight = float(self.weight)
        return float(self.total) / weight if weight else math.nan


def as_loss(value: object) -> Loss:
    """Convert the result of a loss function, one number or `(total, weight)`, to a `Loss`.

    Raises:
        InvalidTypeError: the result is a mapping, or a sequence other than `(total, weight)`.
        InvalidValueError: the result is None, a tensor of several numbers, or of another type.
    """
    if isinstance(value, list | tuple):
        if len(value) == 2 and _is_one_number(value[0]) and _is_one_number(value[1]):
            return Loss(*value)
        # Losses of segmentation often return a list: the sum first, then its parts.
        kinds = ", ".join(map(_described, value))
        raise InvalidTypeError(
            f"the loss must return one number, or (total, weight); got a {type(value).__name__}",
            found=f"({kinds})",
            fix="return only the first part: "
            "loss=lambda outputs, targets: your_loss(outputs, targets)[0]",
        )
    if isinstance(value, Mapping):
        raise InvalidTypeError(
            f"the loss must return one number, got a {type(value).__name__}",
            found=f"its parts are {', '.join(map(repr, value))}",
            fix="return their sum: loss=lambda outputs, targets: "
            "sum(your_loss(outputs, targets).values())",
        )
    if isinstance(value, Real):
        return Loss(value)
    if value is None:
        raise InvalidValueError(
            "the loss must return one number, got None",
            fix="end the function with `return loss`",
        )
    if not _is_one_number(value):
        raise InvalidValueError(
            f"the loss must return one number, got {_described(value)}",
            fix='return the mean, loss.mean(); or use a loss with reduction="mean"',
        )
    return Loss(value)


def check_gradient(loss: Loss) -> None:
    """Raise unless a loss can be differentiated."""
    if isinstance(loss.total, Real):
        raise InvalidTypeError(
            f"the loss has no gradient: it is a {type(loss.total).__name__}, not a tensor",
            fix="return the tensor, without .item() or float()",
        )
    if not loss.total.requires_grad:
        raise InvalidValueError(
            "the loss has no gradient",
            found="it was detached, or computed under torch.no_grad()",
            fix="return it without .detach(), and compute it outside of torch.no_grad()",
        )


def weight_on_device(loss: Loss):
    """Return `loss.weight` as a float32 tensor () on the device of `loss.total`."""
    import torch

    total = loss.total.detach()
    if isinstance(loss.weight, torch.Tensor):
        return loss.weight.detach().to(total.device, torch.float32).reshape(())
    return torch.full((), float(loss.weight), dtype=torch.float32, device=total.device)


def _is_one_number(value: object) -> bool:
    # (loss, True), as of a helper that also returns a flag, is not (total, weight).
    if isinstance(value, bool):
        return False
    return isinstance(value, Real) or (hasattr(value, "numel") and value.numel() == 1)


def _described(value: object) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return kind if shape is None else f"{kind} {tuple(shape)}"
