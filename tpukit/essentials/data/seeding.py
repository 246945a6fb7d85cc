"""Seed the host's random numbers: per core, per step, per batch of a loader process.

The generators belong to the process. Two cores of a v2 or v3 chip are threads of the same process,
so they take turns (`TURN`).
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterator

TURN = threading.RLock()  # held by the thread that uses the generators


def seed_host(numbers: tuple[int, ...]) -> int:
    """Seed `random`, numpy and torch's CPU generator from whole numbers; return the 32-bit seed.

    The same numbers give the same seed in every process and on every machine. So core, epoch and
    batch decide which random numbers are drawn, not the process that draws them.
    """
    import random

    import numpy
    import torch

    seed = _seed_of(numbers)
    random.seed(seed)
    numpy.random.seed(seed)
    # Not torch.manual_seed: it keeps a stack trace for every device that is not started, which
    # takes half a millisecond per step.
    torch.default_generator.manual_seed(seed)
    return seed


def _seed_of(numbers: tuple[int, ...]) -> int:
    """Return one number of 32 bits from several; numpy.random.seed takes no more bits."""
    text = repr(tuple(map(int, numbers)))
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def seed_generators(generators: list, numbers: tuple[int, ...]) -> None:
    """Seed generators of Python, numpy and torch in place, each with another seed."""
    for position, generator in enumerate(generators):
        seed = _seed_of((*numbers, position))
        if hasattr(generator, "bit_generator"):  # numpy's, which has no method for it
            fresh = type(generator.bit_generator)(seed)
            generator.bit_generator.state = fresh.state
        elif hasattr(generator, "manual_seed"):
            generator.manual_seed(seed)
        else:
            generator.seed(seed)


def host_numbers() -> tuple:
    """Return the states of the host's three generators, for `put_back`."""
    import random

    import numpy
    import torch

    return random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()


def put_back(state: tuple) -> None:
    """Restore the states of the host's generators, as `host_numbers` returned them."""
    import random

    import numpy
    import torch

    of_python, of_numpy, of_torch = state
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)
    torch.default_generator.set_state(of_torch)


@contextlib.contextmanager
def numbers_kept() -> Iterator[None]:
    """Restore the states of the host's generators after this block."""
    before = host_numbers()
    try:
        yield
    finally:
        put_back(before)


@contextlib.contextmanager
def seeded_in_turn(numbers: tuple[int, ...]) -> Iterator[None]:
    """Seed the host's random numbers for a block that the threads of a process enter in turn.

    Afterwards the former states are restored. So the block draws the same numbers, independently of
    other threads that draw in such blocks or call `seed_in_turn`.
    """
    with TURN, numbers_kept():
        seed_host(numbers)
        yield


def seed_in_turn(numbers: tuple[int, ...]) -> int:
    """Call `seed_host` after other threads have left their blocks of `seeded_in_turn`."""
    with TURN:
        return seed_host(numbers)
