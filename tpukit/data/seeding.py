"""The one way random numbers of the host are seeded: for a core, for a step, for a batch made in a process."""

import hashlib


def seed_host(words: tuple[int, ...]) -> int:
    """Seed all that is drawn from on the host, by whole numbers alone; return the one number they came to."""
    import random

    import numpy
    import torch

    word = int.from_bytes(hashlib.blake2b(repr(tuple(map(int, words))).encode(), digest_size=4).digest(), "big")
    random.seed(word)
    numpy.random.seed(word)
    # Not torch.manual_seed: for every device that is not started it keeps a stack trace, half a millisecond a step.
    torch.default_generator.manual_seed(word)
    return word
