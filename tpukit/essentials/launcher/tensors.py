"""`torch.save`, and afterwards nothing of what was saved is left in memory."""

import pickle
import types


def save_tensors(value: object, file) -> None:
    """Write `torch.save` of a value into an open file, and let go of its tensors' memory.

    `torch.save` makes a class for its pickler in each call, and a class refers to itself; it also refers to the memory
    of every tensor saved (`serialized_storages` in torch/serialization.py, 2.8 and 2.9). So all of that stays until
    Python's garbage collector looks at old objects, which a training with few and large ones makes it do rarely: a
    checkpoint of ResNet-34 and Adam kept 244 MiB, one more with each epoch. Collecting here would stop the training
    loop, too, while every object of the process is looked at; taking away the class's one reference does not.
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
