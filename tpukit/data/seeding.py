"""The one way in which the host's random numbers are seeded: per core, per step, per batch of a loader process."""

import hashlib


def seed_host(numbers: tuple[int, ...]) -> int:
    """Seed `random`, numpy and torch's CPU generator from whole numbers; return the 32-bit seed made of them.

    The same numbers give the same seed in every process and on every machine: core, epoch and batch decide what is
    drawn, not who draws it.
    """
    import random

    import numpy
    import torch

    # A hash, because several numbers have to become one of 32 bits, the most that numpy.random.seed takes.
    digest = hashlib.blake2b(repr(tuple(map(int, numbers))).encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "big")
    random.seed(seed)
    numpy.random.seed(seed)
    # Not torch.manual_seed: it keeps a stack trace for every device that is not started, half a millisecond a step.
    torch.default_generator.manual_seed(seed)
    return seed
