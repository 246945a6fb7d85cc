"""Save tensors without a leak of `torch.save`; move modules to XLA with their tied weights."""

import pickle
import types

from tpukit.essentials.display import InvalidTypeError


def save_tensors(value: object, file) -> None:
    """Write `torch.save` of a value into an open file, and free the memory of its tensors.

    In each call `torch.save` makes a class for its pickler. A class refers to itself, and this one
    refers to the memory of every saved tensor (`serialized_storages` in torch/serialization.py, 2.8
    and 2.9). So the memory stays until Python's garbage collector looks at old objects, which
    happens rarely in a training with few and large objects: a checkpoint of ResNet-34 and Adam
    kept 244 MiB, and one more with each epoch. Collecting here would stop the training loop while
    every object of the process is looked at. Removing the reference of the class does not.
    """
    import torch

    made: list[type] = []

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls):
            made.append(cls)

    module = types.ModuleType("pickle")
    module.Pickler = Pickler
    try:
        torch.save(value, file, pickle_module=module)
    finally:
        for kind in made:
            kind.persistent_id = None


def move_module(module, device):
    """Move a module to a device; a tensor with several names stays a single tensor.

    On XLA `Module.to` makes a tensor per name, and these are then trained separately.
    """
    places: dict[int, list[tuple[dict, str]]] = {}
    for layer in module.modules():
        for tensors in (layer._parameters, layer._buffers):
            for name, tensor in tensors.items():
                places.setdefault(id(tensor), []).append((tensors, name))
    module = module.to(device)
    for (first_tensors, first_name), *others in places.values():
        for tensors, name in others:
            tensors[name] = first_tensors[first_name]
    return module


def refuse_scripted(module) -> None:
    """Raise an InvalidTypeError for modules of torch.jit.

    A copy of one has weights that no optimizer takes, and on XLA the move to the device fails in
    an assertion of torch or in a segmentation fault (torch 2.9).
    """
    import torch

    layers = module.named_modules() if hasattr(module, "named_modules") else ()
    for name, layer in layers:
        if isinstance(layer, torch.jit.ScriptModule):
            raise InvalidTypeError(
                "core.model does not support modules of torch.jit",
                found=f"{name or 'the module'} is a {type(layer).__name__}",
                fix="core.model(module) of the module before torch.jit.script or torch.jit.trace",
            )
