"""Seed the host's random generators: per core, per step, per batch of a loader process.

The generators are those of `random`, `numpy.random` and torch on the CPU. A process has one of
each. Two cores of a v2 or v3 chip are threads of the same process, so they take turns (`TURN`).
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterator

TURN = threading.RLock()  # a thread acquires it before it uses the generators


def seed_host(numbers: tuple[int, ...]) -> int:
    """Seed `random`, numpy and torch's CPU generator; return the 32-bit seed.

    The same numbers give the same seed in every process and on every machine. With the numbers of
    core, epoch and batch, a batch has the same random numbers in any process that makes it.
    """
    import random

    import numpy
    import torch

    seed = _seed_of(numbers)
    random.seed(seed)
    numpy.random.seed(seed)
    # Not torch.manual_seed: for each device that is not started it records a stack trace, which
    # takes half a millisecond per step.
    torch.default_generator.manual_seed(seed)
    return seed


def _seed_of(numbers: tuple[int, ...]) -> int:
    """Return a hash of several numbers with 32 bits, the most that numpy.random.seed supports."""
    text = repr(tuple(map(int, numbers)))
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def seed_generators(generators: list, numbers: tuple[int, ...]) -> None:
    """Seed generators of Python, numpy and torch in place, each with a seed of its own."""
    for position, generator in enumerate(generators):
        seed = _seed_of((*numbers, position))
        if hasattr(generator, "bit_generator"):  # numpy's Generator, which has no method to seed it
            fresh = type(generator.bit_generator)(seed)
            generator.bit_generator.state = fresh.state
        elif hasattr(generator, "manual_seed"):
            generator.manual_seed(seed)
        else:
            generator.seed(seed)


def random_states() -> tuple:
    """Return the states of the host's generators: (random, numpy.random, torch)."""
    import random

    import numpy
    import torch

    return random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()


def restore_random_states(state: tuple) -> None:
    """Restore the states of the host's generators from the result of `random_states`."""
    import random

    import numpy
    import torch

    of_python, of_numpy, of_torch = state
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)
    torch.default_generator.set_state(of_torch)


@contextlib.contextmanager
def random_states_restored() -> Iterator[None]:
    """Restore the states of the host's generators after this block."""
    before = random_states()
    try:
        yield
    finally:
        restore_random_states(before)


@contextlib.contextmanager
def seeded_in_turn(numbers: tuple[int, ...]) -> Iterator[None]:
    """Seed the host's random numbers for a block, and restore the former states after it.

    Only one thread at a time can be in such a block. If another thread meanwhile draws random
    numbers outside such a block, the random numbers in the block change.
    """
    with TURN, random_states_restored():
        seed_host(numbers)
        yield


def seed_in_turn(numbers: tuple[int, ...]) -> int:
    """Wait until no thread is in a block of `seeded_in_turn`; then return `seed_host(numbers)`."""
    with TURN:
        return seed_host(numbers)
