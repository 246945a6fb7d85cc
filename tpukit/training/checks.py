"""Check the arguments of `fit` before the first step, and find statistics that do not change.

Without these checks, the mistakes would appear only after an epoch, or not at all.
"""

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from tpukit.essentials.data import Batches, inside
from tpukit.essentials.display import (
    InvalidTypeError,
    InvalidValueError,
    better,
    check_count,
    check_flag,
    check_number,
    first_few,
)
from tpukit.essentials.launcher import Core


def check_batches(name: str, batches: object) -> None:
    """Raise unless batches come from `core.batches`, which divides the data among the cores."""
    if isinstance(batches, Batches):
        return
    # Write the fix with the dataset and the batch size of the DataLoader that was passed.
    options = ", shuffle=True, drop_last=True" if name == "train" else ""
    size = getattr(batches, "batch_size", None) or 32
    dataset = "loader.dataset" if hasattr(batches, "dataset") else "dataset"
    raise InvalidTypeError(
        f"{name} must come from core.batches, got a {type(batches).__name__}",
        found="every core would get the same batches",
        fix=f"core.batches({dataset}, batch_size={size}{options})",
    )


# By model, the names of the classes in its training data.
_trained_on = weakref.WeakKeyDictionary()


def remember_classes(model, train: Batches) -> None:
    """Store the class names of a model's training data, for `check_classes`."""
    _trained_on[model] = _classes(train.dataset)


def check_classes(model, batches: Batches, what: str) -> None:
    """Raise if a dataset numbers its classes in another way than the training data.

    With other class numbers, right answers would count as wrong. Nothing is compared if `fit` has
    not trained the model in this launch, or if one of the datasets has no list `classes`.

    Args:
        model: the model to evaluate.
        batches: the batches to evaluate it on.
        what: "validation" or "evaluation", for the message.
    """
    trained = _trained_on.get(model)
    given = _classes(batches.dataset)
    if not trained or not given or trained == given:
        return
    # Report the first class that differs; if none differs, one of the lists is longer.
    found = f"{len(trained)} and {len(given)} classes"
    for number, (here, there) in enumerate(zip(trained, given, strict=False)):
        if here != there:
            found = f"class {number} is {here!r} in the training data, {there!r} in the {what} data"
            break
    raise InvalidValueError(
        f"the training data and the {what} data have different class numbers",
        found=found,
        fix=f"pack(..., classes=train.classes) for the {what}'s images, too",
    )


def _classes(dataset) -> list:
    """Return a dataset's class names, or [] if it has none; look into Subset and ConcatDataset."""
    # `inside` returns the datasets in a Subset or ConcatDataset; it is empty for other datasets.
    parts = inside(dataset)
    if not parts:
        names = getattr(dataset, "classes", None)
        return [str(name) for name in names] if isinstance(names, list | tuple) else []
    first, *others = map(_classes, parts)
    for other in others:
        if other != first:
            names = [first_few(classes, 4) or "no names" for classes in (first, other)]
            raise InvalidValueError(
                "the joined datasets number their classes differently",
                found="; and ".join(names),
                fix="pack the other datasets with the classes of the first one: "
                "pack(..., classes=first_dataset.classes)",
            )
    return first


def check_numbers(
    *,
    max_grad_norm: float | None,
    steps_per_epoch: int | None,
    epochs: int,
    accumulate_grad_batches: int,
    bf16: bool,
) -> None:
    """Raise for arguments of `fit` that have a wrong type or are out of range."""
    check_flag("bf16", bf16)
    check_count("epochs", epochs)
    check_count("accumulate_grad_batches", accumulate_grad_batches)
    if steps_per_epoch is not None:
        check_count("steps_per_epoch", steps_per_epoch, otherwise="None for all the data")
    if max_grad_norm is not None:
        check_number("max_grad_norm", max_grad_norm, fix="max_grad_norm=1.0, or None")
    # `not ... > 0` and not `<= 0`, so that NaN raises the error, too.
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise InvalidValueError(
            f"max_grad_norm must be a number above 0, got {max_grad_norm}",
            fix="max_grad_norm=1.0, or None",
        )


def check_parameters(core: Core, model, loss, optimizer) -> None:
    """Raise unless the optimizer trains this model, and model and loss are on the core's device.

    Print the trainable parameters of model and loss that are not in the optimizer.
    """
    of_model = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in of_model.values()):
        raise InvalidValueError(
            "the model has no parameters to train",
            fix=(
                "pass a torch.nn.Module with layers, and unfreeze some: "
                "parameter.requires_grad_(True)"
            ),
        )
    _check_device(core, "model", model)
    _check_device(core, "loss", loss)
    # Compare parameters by id: two different parameters may have equal values.
    held = []
    for group in optimizer.param_groups:
        held += group["params"]
    ids = {id(parameter) for parameter in held}
    if not any(id(parameter) in ids for parameter in of_model.values()):
        raise InvalidValueError(
            "the optimizer holds none of the model's parameters: it would train other parameters",
            found=f"{len(held)} parameters in it, none of them among the model's {len(of_model)}",
            fix="make the optimizer from the model that core.model returns: "
            "torch.optim.Adam(model.parameters())",
        )
    of_loss = [(f"loss.{name}", parameter) for name, parameter in _parameters(loss)]
    # A loss with parameters, such as a learned temperature, needs them in the optimizer as well.
    left_out = [
        name
        for name, parameter in [*of_model.items(), *of_loss]
        if parameter.requires_grad and id(parameter) not in ids
    ]
    if left_out:
        core.print(f"not in the optimizer, so not trained: {first_few(left_out, 5)}")


def _check_device(core: Core, what: str, module: object) -> None:
    for name, parameter in _parameters(module):
        if parameter.device != core.device:
            raise InvalidValueError(
                f"the {what} is not on this core's device",
                found=f"{name} is on {parameter.device}, the device is {core.device}",
                fix=f"{what} = core.model({what}), before the optimizer is made",
            )


_OF_BATCHNORM = ("running_mean", "running_var", "num_batches_tracked")


def check_statistics(core: Core, model) -> None:
    """Raise if a layer has counted batches, but its running statistics have not changed.

    An evaluation would use mean 0 and variance 1.
    """
    # This happened with TorchTPU 0.2.0. `launch` corrects BatchNorm there, but no other layers.
    layers = {}
    for name, layer in model.named_modules():
        # With momentum=0, the statistics stay as they are on purpose.
        has_buffers = all(getattr(layer, buffer, None) is not None for buffer in _OF_BATCHNORM)
        if has_buffers and getattr(layer, "momentum", None) != 0:
            layers[name] = layer
    tensors = []
    for layer in layers.values():
        tensors += [layer.running_mean, layer.running_var, layer.num_batches_tracked]
    on_cpu = iter(core.backend.to_cpu(tensors))  # one transfer for all layers
    stuck = [
        name
        for name, mean, variance, count in zip(layers, on_cpu, on_cpu, on_cpu, strict=False)
        if count > 0 and not mean.any() and (variance == 1).all()
    ]
    if stuck:
        raise InvalidValueError(
            f"the running statistics of {first_few(stuck, 3)} have not moved in an epoch: "
            "evaluation would use mean 0 and variance 1",
            found=f"on {core.device}, running_mean is 0 and running_var is 1, although "
            "num_batches_tracked is above 0",
            fix="use GroupNorm, or track_running_stats=False in these layers; or train on another "
            "backend",
        )


def _parameters(module: object) -> list[tuple[str, object]]:
    return list(module.named_parameters()) if hasattr(module, "named_parameters") else []


@dataclass(frozen=True)
class Best:
    """The rule that decides which of two epochs is better.

    Attributes:
        column: the column of the history that is compared.
        lower: whether lower numbers are better.
    """

    column: str
    lower: bool

    def is_better(self, row: dict, than: dict | None) -> bool:
        """Return whether an epoch is better than the best so far; an epoch with NaN never is.

        Args:
            row: the epoch's row of the history.
            than: the row of the best epoch so far; None if there is none.
        """
        value = row[self.column]
        best = math.nan
        if than is not None:
            best = than.get(self.column, math.nan)
        # Without a number to compare with, any number but NaN is the best.
        if math.isnan(value) or math.isnan(best):
            return not math.isnan(value)
        return value < best if self.lower else value > best


def best_of(
    core: Core, column: str, mode: str | None, *, metrics: Iterable[str], valid: bool
) -> Best:
    """Return the rule that decides which epoch is best.

    If `mode` is None, the name of the column decides whether higher or lower is better. For a
    metric, this decision is printed.

    Args:
        core: this core.
        column: `monitor` of `fit`.
        mode: `mode` of `fit`.
        metrics: the names of the metrics.
        valid: whether `fit` has validation data.

    Raises:
        ValueError: the history will have no such column; a metric has the name "loss"; or `mode` is
            None, and the column's name does not show which numbers are better.
    """
    if not valid and column == "valid_loss":
        column = "train_loss"  # `valid_loss` is the default of `monitor`, also without `valid`
    if valid and "loss" in metrics:
        raise InvalidValueError(
            'a metric named "loss" would replace the loss in the column valid_loss',
            fix="another name for this metric",
        )
    columns = ["train_loss"]
    if valid:
        columns += ["valid_loss", *(f"valid_{name}" for name in metrics)]
    if column not in columns:
        raise InvalidValueError(
            f"monitor must be a column of the history, got {column!r}",
            fix=f"one of {', '.join(columns)}",
        )
    if mode not in (None, "min", "max"):
        raise InvalidValueError(
            f'mode must be "min", "max" or None, got {mode!r}',
            fix='mode="min" if lower is better',
        )
    if mode is not None:
        return Best(column, lower=mode == "min")
    direction = better(column)  # "low", "high", or None for an unknown name
    if direction is None:
        raise InvalidValueError(
            f"the name {column} does not show whether lower or higher is better",
            fix='mode="min" if lower is better, mode="max" if higher is',
        )
    if not column.endswith("_loss"):
        core.print(
            f"the best epoch is that with the {direction}est {column}; to choose otherwise, pass "
            'mode="min" or "max"'
        )
    return Best(column, lower=direction == "low")
