"""A batch taken apart: what the model gets, and what its outputs are compared with."""

import inspect
from collections.abc import Callable, Mapping

from tpukit.essentials.data import Batches
from tpukit.essentials.display import InvalidTypeError, InvalidValueError

# The keys of a mapping that may hold its targets: Hugging Face's models and datasets use the first two.
TARGETS = ("labels", "label", "targets", "target")


def inputs_and_targets(batch: object) -> tuple:
    """Return (inputs, targets) of a batch: its first two parts, or a mapping and its entry "labels".

    Raises:
        TypeError: the batch has no targets, or holds something that is not a tensor; its key is named.
    """
    import torch

    if isinstance(batch, list | tuple) and len(batch) > 1:
        inputs, targets = batch[:2]
        if not (isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)):  # the usual case costs nothing
            _check_tensors((inputs, targets))
        return inputs, targets
    if isinstance(batch, Mapping):
        names = [name for name in TARGETS if name in batch]
        if len(names) == 1:
            _check_tensors(batch)
            return batch, batch[names[0]]
        found = f"a mapping with the keys {', '.join(map(repr, batch))}"
    else:
        found = f"a {type(batch).__name__}" + f" of {len(batch)}" * isinstance(batch, list | tuple)
    raise InvalidTypeError(
        f"a batch is (inputs, targets), or a mapping with one of the keys {', '.join(TARGETS)}",
        found=found,
        fix="let the dataset return (inputs, targets); each may be a dict of several tensors",
    )


def inputs_targets_and_mask(batch: tuple) -> tuple:
    """Return (inputs, (targets, mask)) of a batch of tuples from buckets, whose last part says what is data."""
    inputs, targets = inputs_and_targets(batch)
    return inputs, (targets, batch[-1])


def takes_mask(batches: Batches, loss: Callable) -> bool:
    """Return whether the loss gets the mask of what is data, which batches of tuples from buckets have.

    Raises:
        ValueError: there is such a mask, and the loss would count the padding.
    """
    if batches.buckets is None or not isinstance(batches.dataset[0], list | tuple):
        return False
    pads = batches.buckets.pad or {}
    if 1 in pads and pads[1] == getattr(loss, "ignore_index", -100):
        return False
    taken = list(inspect.signature(getattr(loss, "forward", loss)).parameters.values())[2:3]
    if taken and (taken[0].default is taken[0].empty or "mask" in taken[0].name):
        return True
    raise InvalidValueError(
        "samples that are tuples are padded to the length of a bucket, and the loss would count the padding",
        found=f"{type(loss).__name__} takes outputs and targets",
        fix="a loss of (outputs, targets, mask), (B, L) bool, True where data is; or samples that are mappings, "
        '{"series": ..., "labels": ...}, whose mask the model gets as attention_mask',
    )


def inputs_only(batch: object) -> tuple:
    """Return (inputs, None) of a batch, whether or not it has targets; refuse inputs as `inputs_and_targets` does."""
    inputs = batch[0] if isinstance(batch, list | tuple) else batch
    _check_tensors(inputs)
    return inputs, None


def kind_of_samples(batch: object) -> str:
    """Say what the samples of a batch are: "images" where its first part is (N, 1 or 3, H, W), else "samples"."""
    inputs = batch[0] if isinstance(batch, list | tuple) else batch
    shape = getattr(inputs, "shape", ())
    return "images" if len(shape) == 4 and shape[1] in (1, 3) else "samples"


def call(model, inputs: object) -> object:
    """Return the model's outputs; a mapping is passed by name, with its targets only where `forward` takes them."""
    if not isinstance(inputs, Mapping):
        return model(inputs)
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return model(**inputs)
    if unknown := [name for name in inputs if name not in parameters and name not in TARGETS]:
        raise InvalidTypeError(
            f"{type(model).__name__}.forward has no argument {unknown[0]!r}, and a mapping is passed by name",
            found=f"inputs {', '.join(inputs)}; arguments {', '.join(parameters)}",
            fix="leave it out of the dataset, or pass what forward takes: "
            'preprocess=lambda inputs: {"image": inputs["image"]}',
        )
    return model(**{name: value for name, value in inputs.items() if name in parameters})


def _check_tensors(batch: object) -> None:
    import torch
    from torch.utils import _pytree as tree

    for path, leaf in tree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, torch.Tensor):
            text = f" {leaf[:40]!r}" if isinstance(leaf, str) else ""
            key = next((part.key for part in path if hasattr(part, "key")), None)
            where = f"of the key {key!r}" if key is not None else f"at {tree.keystr(path)}"
            raise InvalidTypeError(
                f"a model takes tensors, and this batch holds a {type(leaf).__name__}{text} {where}",
                fix=(
                    "leave it out of what the dataset returns; Hugging Face's: dataset.remove_columns"
                    f"({str(key if key is not None else 'text')!r}).with_format('torch')"
                ),
            )
