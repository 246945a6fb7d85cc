"""Gather tensors with their gradient, and Python objects, of all cores."""

import pickle


def gather_objects(core, value: object) -> list:
    """Return the objects of all cores, in order of rank. Collective: call it on every core.

    Tensors in them are in host memory.
    """
    import torch

    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    (length,) = core.to_device([torch.tensor([len(data)])])
    lengths = core.gather(length)
    # Without `sync` this would become a part of the next step, which would compile again. It is
    # not `step`, because steps are timed.
    core.sync()
    lengths = core.to_host(lengths).tolist()
    # A collective needs one shape. A power of two, so that objects that grow a little do not
    # compile another graph.
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
    """Gather a tensor; backward gives each core the sum of all cores' gradients for its rows."""
    import torch

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
