"""Python objects of all cores, brought together through the device's collectives."""

import pickle


def gather_objects(core, value: object) -> list:
    """Return the objects of all cores, in order of rank, together; their tensors are in host memory."""
    import torch

    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    (length,) = core.to_device([torch.tensor([len(data)])])
    with core.step():  # on a TPU, a collective that no `step` ends becomes part of the next step, which compiles again
        lengths = core.gather(length)
    lengths = core.to_host(lengths).tolist()
    # Collectives need one shape; a power of two, so that states which grow a little do not compile another graph.
    padded = torch.zeros(1 << (max(lengths) - 1).bit_length(), dtype=torch.uint8)
    padded[: len(data)] = data
    (padded,) = core.to_device([padded])
    with core.step():
        rows = core.gather(padded)
    rows = core.to_host(rows).view(core.world_size, -1)
    return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]
