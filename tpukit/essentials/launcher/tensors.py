"""`torch.save` without the memory leak that it has in torch 2.8 and 2.9."""

import pickle
import types


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
