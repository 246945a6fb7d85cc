"""Save tensors without the memory leak of `torch.save`; move modules with their tied weights."""

import pickle
import types

from tpukit.essentials.display import InvalidTypeError


def save_tensors(value: object, file) -> None:
    """Write a value with `torch.save` into an open file, without a memory leak.

    In each call `torch.save` makes a class for its pickler. A class refers to itself, and this
    class refers to the memory of every saved tensor (`serialized_storages` in
    torch/serialization.py, 2.8 and 2.9). So the memory stays until Python's garbage collector
    examines old objects. That is rare in training, which has few and large objects: each checkpoint
    of ResNet-34 and Adam kept 244 MiB. This function removes the reference. A call of `gc.collect`
    would also free the memory, but would examine every object of the process.
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
        # `persistent_id` is the method whose closure has `serialized_storages`.
        for kind in made:
            kind.persistent_id = None


def move_module(module, device):
    """Move a module to a device, and return it; tied weights remain a single tensor.

    On XLA `Module.to` makes a tensor for each name of a tied weight, and an optimizer would train
    these separately.
    """
    # By the id of each tensor, all (dict of a layer, name) that refer to it.
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

    The copy of such a module has weights that no optimizer accepts, and its move to XLA ends in an
    assertion of torch or a segmentation fault (torch 2.9).
    """
    import torch

    layers = module.named_modules() if hasattr(module, "named_modules") else ()
    for name, layer in layers:
        if isinstance(layer, torch.jit.ScriptModule):
            raise InvalidTypeError(
                "core.model does not support modules of torch.jit",
                found=f"{name or 'the module'} is a {type(layer).__name__}",
                fix="pass the module as it was before torch.jit.script or torch.jit.trace: "
                "core.model(module)",
            )
