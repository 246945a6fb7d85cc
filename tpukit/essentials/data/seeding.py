"""The one way in which the host's random numbers are seeded: per core, per step, per batch of a loader process."""

import contextlib
import hashlib
import threading
from collections.abc import Iterator

TURN = threading.RLock()  # the generators are the process's, and two cores of a v2 or v3 chip are threads of one


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


def host_numbers() -> tuple:
    """Return where the host's three generators stand, for `put_back`."""
    import random

    import numpy
    import torch

    return random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()


def put_back(state: tuple) -> None:
    """Have the host's random numbers go on from where they stood."""
    import random

    import numpy
    import torch

    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.default_generator.set_state(state[2])


@contextlib.contextmanager
def numbers_kept() -> Iterator[None]:
    """Have the host's random numbers afterwards as they were before."""
    before = host_numbers()
    try:
        yield
    finally:
        put_back(before)


@contextlib.contextmanager
def seeded_in_turn(numbers: tuple[int, ...]) -> Iterator[None]:
    """Seed the host's random numbers for a block that the threads of a process enter in turn; then put back what was.

    What the block draws is the same whatever other threads draw in blocks of their own, or seed by `seed_in_turn`.
    """
    with TURN, numbers_kept():
        seed_host(numbers)
        yield


def seed_in_turn(numbers: tuple[int, ...]) -> int:
    """Do as `seed_host`, but not while another thread is in a block of `seeded_in_turn`."""
    with TURN:
        return seed_host(numbers)
