"""Notice that the Python of a step asks something outside its process: the clock, a file, new random numbers.

A step that asks may get another answer each time, and a replayed step does not ask.
"""

import contextlib
import functools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# Modules whose functions may answer otherwise the next time, by the names that these functions give.
_OUTSIDE = {"time", "posix", "nt", "io", "_io", "genericpath", "pathlib", "socket", "_socket", "select", "subprocess"}
_NOW = ("now", "today", "utcnow")  # of datetime
_LIBRARIES = (os.path.dirname(os.__file__), str(Path(__file__).parents[1]), "<frozen")
_NEW_SEED = "the operating system for random numbers"


@contextlib.contextmanager
def calls_outside() -> Iterator[set[str]]:
    """Collect in a set the names of what this thread asks within: the clock and files, and new random numbers.

    The clock and files count if a function of the user asks, not a library. Random numbers count whoever asks.
    Python calls a function of ours for every call, which makes a step half as long again. If a profiler is at work
    already, nothing is collected.
    """
    found: set[str] = set()

    def look(frame, event: str, called) -> None:
        if event == "c_call":
            found.update(_call_of_c(frame, called))
        elif event == "call":
            found.update(_call_of_python(frame))

    if sys.getprofile() is not None:
        yield found
        return
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _call_of_c(frame, called) -> Iterator[str]:
    import torch

    name, owner = called.__name__, getattr(called, "__self__", None)
    # numpy's generators without a seed, `secrets` and uuid4 all end in os.urandom.
    if name in ("urandom", "getrandom") or (name == "seed" and isinstance(owner, torch.Generator)):
        yield _NEW_SEED
    elif is_own(frame.f_code.co_filename):
        owner_type = owner if isinstance(owner, type) else type(owner)
        module = called.__module__ or getattr(owner_type, "__module__", "")
        if module in _OUTSIDE or (module == "datetime" and name in _NOW):
            yield f"{module}.{called.__qualname__}"


def _call_of_python(frame) -> Iterator[str]:
    code, module = frame.f_code, frame.f_globals.get("__name__", "")
    if code is random.Random.seed.__code__ and frame.f_locals.get("a") is None:
        yield _NEW_SEED
    # The top-level name, because pathlib is a package from Python 3.13 on.
    elif module.partition(".")[0] in _OUTSIDE and frame.f_back and is_own(frame.f_back.f_code.co_filename):
        yield f"{module}.{code.co_qualname}"


@functools.lru_cache(maxsize=10_000)
def is_own(file: str) -> bool:
    """Return whether a file is the user's: a notebook's cell or a module of theirs, not an installed package."""
    return "-packages" not in file and not file.startswith(_LIBRARIES)
