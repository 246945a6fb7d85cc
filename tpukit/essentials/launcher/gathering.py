"""Gather Python objects, and tensors with gradients, from all cores; average numbers by name.

core 0    mean_by_name(core, {"cat": 0.9, "dog": 0.5})    {"cat": 0.5, "dog": 0.6}
core 1    mean_by_name(core, {"dog": 0.7, "cat": 0.1})    {"dog": 0.6, "cat": 0.5}
"""

import math
import pickle
from collections.abc import Mapping

from tpukit.essentials.launcher.difference import OutOfSyncError, different_names


def gather_objects(core, value: object) -> list:
    """Return the objects of all cores, in order of rank. Collective.

    Args:
        core: the `Core`.
        value: an object that pickle supports, with its tensors in host memory.
    """
    import torch

    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    (length,) = core.to_device([torch.tensor([len(data)])])
    lengths = core.gather(length)
    # Without `sync` this gather would become a part of the next step, which would compile again.
    # `core.step` would do the same, but it would add to the measured step times.
    core.sync()
    lengths = core.to_host(lengths).tolist()
    # A collective needs the same shape on every core. A power of two, so that objects that grow a
    # little do not compile another graph.
    power_of_two = 1 << (max(lengths) - 1).bit_length()
    padded = torch.zeros(power_of_two, dtype=torch.uint8)
    padded[: len(data)] = data
    (padded,) = core.to_device([padded])
    rows = core.gather(padded)
    core.sync()
    rows = core.to_host(rows).view(core.world_size, -1)
    objects = []
    for row, length in zip(rows, lengths, strict=True):
        objects.append(pickle.loads(row[:length].numpy().tobytes()))
    return objects


def gather_with_gradient(core, tensor):
    """Gather a tensor of shape (N, ...) as `Core.gather` does, with a gradient.

    In backward each core gets the sum of all cores' gradients for its own N rows.
    """
    import torch

    # The class is made here, because it uses `core`, and torch must not be imported at the start.
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(context, mine):
            with core.internal.together("gather"):
                return core.backend.gather(mine.detach())

        @staticmethod
        def backward(context, gradient):
            with core.internal.together("gather's backward"):
                return core.backend.reduce_scatter(gradient.contiguous())

    return Gather.apply(tensor)


def mean_by_name(core, values: Mapping) -> dict:
    """Return, by name, the mean of each number and tensor over the cores. Collective.

    Dicts may be nested. Tensors are averaged in the order of their names. The cores compare the
    names, but not in a step that is recorded as a graph and has only tensors in `values`.

    Raises:
        OutOfSyncError: the cores have different names, or different kinds of values.
    """
    import torch

    flat = _flat(values)
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    numbers = {name: float(value) for name, value in flat.items() if name not in tensors}
    # The message with the numbers and names would cut the graph of a step in two.
    in_graph = core.backend.traced and core.internal.open_steps > 0 and not numbers
    if not in_graph and not core.backend.is_recording:
        kinds = dict.fromkeys(numbers, "a number")
        for name, tensor in tensors.items():
            kinds[name] = f"{tuple(tensor.shape)} {tensor.dtype}"
        everyone = gather_objects(core, (kinds, numbers))
        _refuse_different_names([kinds for kinds, _ in everyone])
        for name in numbers:
            parts = [theirs[name] for _, theirs in everyone]
            numbers[name] = math.fsum(parts) / len(parts)  # exact, so equal on all cores
    means = dict(numbers)
    # In the order of names, so that all cores call the collectives in the same order.
    for name in sorted(tensors, key=repr):
        means[name] = core.mean(tensors[name])
    return _nested(values, means)


def _flat(values: Mapping, path: tuple = ()) -> dict[tuple, object]:
    """Return the values of nested dicts by their path of keys."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, (*path, key))
        else:
            flat[*path, key] = value
    return flat


def _nested(like: Mapping, means: Mapping[tuple, object], path: tuple = ()) -> dict:
    nested = {}
    for key, value in like.items():
        here = (*path, key)
        nested[key] = _nested(value, means, here) if isinstance(value, Mapping) else means[here]
    return nested


def _refuse_different_names(everyone: list[dict[tuple, str]]) -> None:
    """Raise OutOfSyncError if the cores have different names, or different kinds of values."""
    if all(kinds == everyone[0] for kinds in everyone):
        return
    named = []
    for kinds in everyone:
        named.append({".".join(map(str, path)): kind for path, kind in kinds.items()})
    different = "names"
    fix = (
        "use the same names on every core, for example with 0 for a name that a core lacks: "
        "core.mean({name: values.get(name, 0.0) for name in names})"
    )
    if all(kinds.keys() == everyone[0].keys() for kinds in everyone):
        different = "kinds of values"
        fix = "give each name a number, or a tensor of the same shape and dtype, on every core"
    raise OutOfSyncError(
        f"core.mean of a dict averages by name, and the cores have different {different}",
        found=different_names(named),
        fix=fix,
    )
