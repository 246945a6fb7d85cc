"""What is checked before the first step: mistakes that would otherwise cost an epoch, or train nothing in silence."""

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from tpukit.essentials.data import Batches, inside
from tpukit.essentials.display import InvalidTypeError, InvalidValueError, better, first_few
from tpukit.essentials.launcher import Core
from tpukit.training.fit_options import check_count


def check_batches(name: str, batches: object) -> None:
    """Raise for batches of another kind than `core.batches` makes: no core would have a share of its own."""
    if isinstance(batches, Batches):
        return
    options = ", shuffle=True, drop_last=True" if name == "train" else ""
    size = getattr(batches, "batch_size", None) or 32
    dataset = "loader.dataset" if hasattr(batches, "dataset") else "dataset"
    raise InvalidTypeError(
        f"{name} is what core.batches makes, got a {type(batches).__name__}",
        found="every core would train on the same batches",
        fix=f"core.batches({dataset}, batch_size={size}{options})",
    )


_trained_on = weakref.WeakKeyDictionary()  # of a model, what its training calls the classes


def remember_classes(model, train: Batches) -> None:
    """Note what a model's training calls the classes, for `check_classes`."""
    _trained_on[model] = _classes(train.dataset)


def check_classes(model, batches: Batches, what: str) -> None:
    """Raise where a dataset numbers its classes otherwise than the training did: right answers would count as wrong.

    Nothing is known of a model that was trained elsewhere, nor of a dataset that does not name its classes.
    """
    ours, theirs = _trained_on.get(model), _classes(batches.dataset)
    if ours and theirs and ours != theirs:
        number = next((k for k, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
        other = f"{len(ours)} and {len(theirs)} classes" if number is None else f"{ours[number]!r}, {theirs[number]!r}"
        raise InvalidValueError(
            f"the classes of the training and of the {what} have other numbers",
            found=other if number is None else f"class {number} is {other}",
            fix=f"pack(..., classes=train.classes) for the {what}'s images, too",
        )


def _classes(dataset) -> list:
    """Return what a dataset calls its classes, through Subset and ConcatDataset; empty where it does not say."""
    if parts := inside(dataset):
        found, *others = map(_classes, parts)
        if other := next((one for one in others if one != found), None):
            raise InvalidValueError(
                "the datasets that are joined number their classes differently",
                found=f"{first_few(found, 4) or 'no names'}; and {first_few(other, 4) or 'no names'}",
                fix="pack(..., classes=one.classes) for the images of each",
            )
        return found
    names = getattr(dataset, "classes", None)
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def check_numbers(
    *,
    max_grad_norm: float | None,
    steps_per_epoch: int | None,
    epochs: int,
    accumulate_grad_batches: int,
) -> None:
    """Raise for numbers with which `fit` would train nothing, or uphill."""
    check_count("epochs", epochs)
    check_count("accumulate_grad_batches", accumulate_grad_batches)
    if steps_per_epoch is not None:
        check_count("steps_per_epoch", steps_per_epoch, otherwise="None for all the data")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise InvalidValueError(
            f"max_grad_norm is the largest norm of the gradients, above 0, got {max_grad_norm}",
            fix="max_grad_norm=1.0, or None",
        )


def check_parameters(core: Core, model, loss, optimizer) -> None:
    """Raise unless the optimiser trains this model, on this core's device; say which parameters it leaves out."""
    of_model = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in of_model.values()):
        raise InvalidValueError(
            "the model has no parameters to train",
            fix="pass a torch.nn.Module with layers, and unfreeze some: parameter.requires_grad_(True)",
        )
    for what, module in {"model": model, "loss": loss}.items():
        for name, parameter in _parameters(module):
            if parameter.device != core.device:
                raise InvalidValueError(
                    f"the {what} is not on this core's device",
                    found=f"{name} is on {parameter.device}, the device is {core.device}",
                    fix=f"{what} = core.model({what}), before the optimizer is made",
                )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = {id(parameter) for parameter in held}
    if not any(id(parameter) in ids for parameter in of_model.values()):
        raise InvalidValueError(
            "the optimizer holds none of the model's parameters: it would train others",
            found=f"{len(held)} parameters in it, none of them among the model's {len(of_model)}",
            fix="make it after core.model, which returns a copy: torch.optim.Adam(model.parameters())",
        )
    everything = [*of_model.items(), *((f"loss.{name}", parameter) for name, parameter in _parameters(loss))]
    left = [name for name, parameter in everything if parameter.requires_grad and id(parameter) not in ids]
    if left:
        core.print(f"not in the optimizer, so not trained: {first_few(left, 5)}")


def check_statistics(core: Core, model) -> None:
    """Raise where a layer has counted batches and keeps the running statistics of a new one: it evaluates with these.

    Seen on TorchTPU 0.2.0, where a launch corrects BatchNorm; other layers of running statistics may be left.
    """
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if None not in (getattr(layer, "running_mean", None), getattr(layer, "num_batches_tracked", None))
        and layer.momentum != 0
    ]
    tensors = [(layer.running_mean, layer.running_var, layer.num_batches_tracked) for _, layer in layers]
    found = iter(core.backend.to_cpu([tensor for three in tensors for tensor in three]))
    stuck = [
        name
        for (name, _), mean, variance, count in zip(layers, found, found, found, strict=False)
        if count > 0 and not mean.any() and (variance == 1).all()
    ]
    if stuck:
        raise InvalidValueError(
            f"the running statistics of {first_few(stuck, 3)} have not moved in an epoch: evaluation would use 0 and 1",
            found=f"running_mean 0 and running_var 1 on {core.device}, though its batches were counted",
            fix="track_running_stats=False there, or GroupNorm; or train on another backend",
        )


def _parameters(module: object) -> list[tuple[str, object]]:
    return list(module.named_parameters()) if hasattr(module, "named_parameters") else []


@dataclass(frozen=True)
class Best:
    """Which of two epochs is the better one: that with the lower, or the higher, number in a column."""

    column: str
    lower: bool

    def is_better(self, row: dict, than: dict | None) -> bool:
        """Say whether an epoch is the best so far; one without a number, or with NaN, never is."""
        value, best = row[self.column], (than or {}).get(self.column, math.nan)
        if math.isnan(value) or math.isnan(best):
            return not math.isnan(value)
        return value < best if self.lower else value > best


def best_of(core: Core, column: str, mode: str | None, *, metrics: Iterable[str], valid: bool) -> Best:
    """Return how epochs are compared; where the name of the column decided that, it is said once.

    Raises:
        ValueError: there will be no such column, or neither `mode` nor its name say which numbers are better.
    """
    if not valid and column == "valid_loss":
        column = "train_loss"  # the default of `monitor`, and no set to evaluate
    columns = ["train_loss", *(["valid_loss", *(f"valid_{name}" for name in metrics)] if valid else [])]
    if column not in columns:
        raise InvalidValueError(
            f"monitor is a column of the history, got {column!r}",
            fix=f"one of {', '.join(columns)}",
        )
    if mode not in (None, "min", "max"):
        raise InvalidValueError(f'mode is "min", "max" or None, got {mode!r}', fix='mode="min" if lower is better')
    guess = {"low": "min", "high": "max", None: None}[better(column)]
    if mode is None and guess is None:
        raise InvalidValueError(
            f"whether a low or a high {column} is better does not show in its name",
            fix='mode="min" if lower is better, mode="max" if higher is',
        )
    if mode is None and not column.endswith("_loss"):
        core.print(f'the best epoch is that with the {better(column)}est {column}; mode="min" or "max" says otherwise')
    return Best(column, lower=(mode or guess) == "min")
