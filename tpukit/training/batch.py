"""Split a batch into the inputs of the model and the targets of the loss."""

import inspect
import math
from collections.abc import Callable, Mapping

from tpukit.essentials.data import Batches
from tpukit.essentials.display import InvalidTypeError, InvalidValueError

# The keys under which a batch that is a mapping may have its targets. Hugging Face's models and
# datasets use the first two.
TARGETS = ("labels", "label", "targets", "target")
_IGNORE_INDEX = -100  # the default of torch's cross entropy, for a loss without this attribute
_LONGEST_TEXT = 40  # characters of a text that an error shows


def inputs_and_targets(batch: object) -> tuple:
    """Return (inputs, targets) of a batch.

    If the batch is a tuple, its first two parts are returned; `FurtherParts` returns the others. If
    the batch is a mapping, the inputs are the whole mapping. The targets are its entry whose key is
    in `TARGETS`.

    Raises:
        TypeError: the batch has no targets, or contains a value that is not a tensor. The message
            has the key or the index of this value.
    """
    import torch

    is_sequence = isinstance(batch, list | tuple)
    if is_sequence and len(batch) > 1:
        inputs, targets = batch[:2]
        # The usual case, two tensors, needs no look inside.
        if not (isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
            _check_tensors((inputs, targets))
        return inputs, targets
    found = f"a {type(batch).__name__}"
    if is_sequence:
        found += f" of {len(batch)}"
    if isinstance(batch, Mapping):
        names = [name for name in TARGETS if name in batch]
        if len(names) == 1:
            _check_tensors(batch)
            return batch, batch[names[0]]
        found = f"a mapping with the keys {', '.join(map(repr, batch))}"
    raise InvalidTypeError(
        f"a batch is (inputs, targets), or a mapping with one of the keys {', '.join(TARGETS)}",
        found=found,
        fix="let the dataset return (inputs, targets); each may be a dict of several tensors",
    )


class FurtherParts:
    """The parts of a batch after (inputs, targets), which the loss gets as further arguments.

    Samples of three parts, such as (inputs, targets, weight), need a loss of three arguments.
    If a dataset of tuples is batched with buckets, the last part of each batch is a mask, True for
    data. If the loss has a parameter for the mask, it gets the mask. A loss without this parameter
    must ignore the padding value of the targets.

    Args:
        batches: the batches of the run, from `core.batches`.
        loss: the loss of `fit`.

    Raises:
        ValueError: the loss has no parameter for the mask, and would count the padding.
    """

    def __init__(self, batches: Batches, loss: Callable):
        self._loss = loss
        self._wanted = _further_arguments(loss)
        is_padded = batches.buckets is not None and isinstance(batches.dataset[0], list | tuple)
        self._may_drop_mask = is_padded and _ignores_padding(batches.buckets.pad, loss)
        if is_padded and not self._may_drop_mask and not self._wanted:
            raise _counts_padding(loss)

    def __call__(self, batch: object) -> tuple:
        """Return the further parts of a batch.

        Raises:
            TypeError: the loss does not take as many arguments as the batch has parts.
        """
        if not isinstance(batch, list | tuple) or len(batch) < 3:
            return ()
        further = tuple(batch[2:])
        # Count the mask first: a loss that can take it gets it.
        if self._wanted in (len(further), math.inf):
            return further
        if self._may_drop_mask:
            further = further[:-1]
        if self._wanted == len(further):
            return further
        raise InvalidTypeError(
            f"a batch has {2 + len(further)} parts, and the loss takes {2 + self._wanted}",
            found=f"the loss is {getattr(self._loss, '__name__', type(self._loss).__name__)}",
            fix="to use the parts after the targets: loss=lambda outputs, targets, weight: "
            '(weight * cross_entropy(outputs, targets, reduction="none")).mean(); to ignore them: '
            "loss=lambda outputs, targets, *_: loss(outputs, targets)",
        )

    def split(self, batch: object) -> tuple:
        """Return (inputs, (targets, further parts)) of a batch."""
        inputs, targets = inputs_and_targets(batch)
        return inputs, (targets, self(batch))


def _further_arguments(loss: Callable) -> float:
    """Return the number of arguments that a loss takes after (outputs, targets).

    A parameter with a default counts only if it is named like a mask or like sample weights.
    Otherwise `weight`, the third parameter of torch's functions, would count, although it is for
    class weights. The number is infinite for *args.
    """
    try:
        parameters = inspect.signature(getattr(loss, "forward", loss)).parameters.values()
    except (TypeError, ValueError):  # a function in C
        return 0
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return math.inf
    positional = [
        one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return sum(_is_per_sample(one) for one in positional[2:])


def _is_per_sample(parameter: inspect.Parameter) -> bool:
    is_named = "mask" in parameter.name or parameter.name in ("sample_weight", "sample_weights")
    return parameter.default is parameter.empty or is_named


def _ignores_padding(pad: Mapping | None, loss: Callable) -> bool:
    """Return whether targets are padded with the value that the loss ignores."""
    pads = pad or {}  # by index of the part: 1 is the targets
    return 1 in pads and pads[1] == getattr(loss, "ignore_index", _IGNORE_INDEX)


def _counts_padding(loss: Callable) -> InvalidValueError:
    return InvalidValueError(
        "the samples are tuples and are padded to the length of a bucket, so the loss would count "
        "the padding",
        found=f"{type(loss).__name__} takes outputs and targets",
        fix="give the loss a third parameter, mask: (B, L) bool, True for data; or return mappings "
        'as samples, and the model gets the mask as attention_mask: {"series": ..., "labels": ...}',
    )


def inputs_only(batch: object) -> tuple:
    """Return (inputs, None) of a batch, which need not have targets.

    Raises:
        TypeError: the inputs contain a value that is not a tensor.
    """
    inputs = _first_part(batch)
    _check_tensors(inputs)
    return inputs, None


def kind_of_samples(batch: object) -> str:
    """Return "images" if the first part of a batch is (N, 1 or 3, H, W), otherwise "samples"."""
    shape = getattr(_first_part(batch), "shape", ())
    return "images" if len(shape) == 4 and shape[1] in (1, 3) else "samples"


def _first_part(batch: object) -> object:
    return batch[0] if isinstance(batch, list | tuple) else batch


def call(model, inputs: object) -> object:
    """Return the model's outputs; pass a mapping as keyword arguments.

    The targets in a mapping are passed only if `forward` has a parameter with their key, or
    `**kwargs`.

    Raises:
        TypeError: a key is neither in `TARGETS` nor a parameter of `forward`, and `forward` has no
            `**kwargs`.
    """
    if not isinstance(inputs, Mapping):
        return model(inputs)
    parameters = inspect.signature(model.forward).parameters
    # A forward with **kwargs may accept every key, also those of the targets.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return model(**inputs)
    unknown = [name for name in inputs if name not in parameters and name not in TARGETS]
    if unknown:
        raise InvalidTypeError(
            f"{type(model).__name__}.forward has no argument {unknown[0]!r}, but the batch is a "
            "mapping whose entries are passed by name",
            found=f"inputs {', '.join(inputs)}; arguments {', '.join(parameters)}",
            fix="leave this entry out of the dataset, or pass only what forward takes: "
            'preprocess=lambda inputs: {"image": inputs["image"]}',
        )
    return model(**{name: value for name, value in inputs.items() if name in parameters})


def _check_tensors(batch: object) -> None:
    import torch
    from torch.utils import _pytree as tree

    leaves, _ = tree.tree_flatten_with_path(batch)
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            continue
        found = type(leaf).__name__
        if isinstance(leaf, str):
            found += f" {leaf[:_LONGEST_TEXT]!r}"
        # In a mapping, the outermost key is the name of a column that the user can remove.
        keys = [part.key for part in path if hasattr(part, "key")]
        place = f"of the key {keys[0]!r}" if keys else f"at {tree.keystr(path)}"
        column = str(keys[0]) if keys else "text"
        raise InvalidTypeError(
            f"a model takes tensors, and this batch holds a {found} {place}",
            fix=(
                "leave it out of the samples of the dataset; for Hugging Face, "
                "dataset.remove_columns"
                f"({column!r}).with_format('torch')"
            ),
        )
