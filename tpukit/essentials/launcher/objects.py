"""Python objects of all cores, brought together through the device's collectives."""

import pickle


def gather_objects(core, value: object) -> list:
    """Return the objects of all cores, in order of rank, together; their tensors are in host memory."""
    import torch

    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    (length,) = core.to_device([torch.tensor([len(data)])])
    lengths = core.gather(length)
    core.sync()  # else the next step, which it became part of, would compile again; and no `step`, which is timed
    lengths = core.to_host(lengths).tolist()
    # Collectives need one shape; a power of two, so that states which grow a little do not compile another graph.
    padded = torch.zeros(1 << (max(lengths) - 1).bit_length(), dtype=torch.uint8)
    padded[: len(data)] = data
    (padded,) = core.to_device([padded])
    rows = core.gather(padded)
    core.sync()
    rows = core.to_host(rows).view(core.world_size, -1)
    return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]
