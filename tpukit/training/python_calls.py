"""Detect that the Python code of a step reads the clock, a file or new random numbers.

    time.monotonic()             in your loss: reported, because its result differs in each step
    time.monotonic()             in a library: not reported, because libraries measure themselves
    numpy.random.default_rng()   anywhere: reported, because it gets a new seed from the system

A captured step gets a new result of such a call each time, but a replayed step does not call it.
"""

import contextlib
import functools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# Functions of these modules may return another result next time. The names are those in a
# function's `__module__`.
_OUTSIDE = {
    "time", "posix", "nt", "io", "_io", "genericpath", "pathlib", "socket", "_socket", "select",
    "subprocess",
}  # fmt: skip
_NOW = ("now", "today", "utcnow")  # of datetime
_LIBRARIES = (os.path.dirname(os.__file__), str(Path(__file__).parents[1]), "<frozen")
_NEW_SEED = "the operating system for random numbers"


@contextlib.contextmanager
def calls_outside() -> Iterator[set[str]]:
    """In the block, collect the names of calls for the clock, for files and for new seeds.

    Only calls of this thread count. Calls for the clock and for files count only in the user's own
    functions, not in a library. Calls for new random numbers always count. A profiling hook sees
    every call, so the step takes about 1.5 times as long. If another profiler is active, nothing is
    collected.
    """
    found: set[str] = set()

    # Python calls this hook with "call" for its own functions, and "c_call" for functions in C.
    def look(frame, event: str, called) -> None:
        name = None
        if event == "c_call":
            name = _call_of_c(frame, called)
        elif event == "call":
            name = _call_of_python(frame)
        if name:
            found.add(name)

    if sys.getprofile() is not None:
        yield found
        return
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _call_of_c(frame, called) -> str | None:
    """Return the name to report for a call of a function in C; None if it is harmless."""
    import torch

    name = called.__name__
    owner = getattr(called, "__self__", None)
    # numpy's generators without a seed, `secrets` and uuid4 all end in os.urandom.
    if name in ("urandom", "getrandom"):
        return _NEW_SEED
    if name == "seed" and isinstance(owner, torch.Generator):
        return _NEW_SEED
    if not is_own(frame.f_code.co_filename):
        return None
    owner_type = owner if isinstance(owner, type) else type(owner)
    module = called.__module__ or getattr(owner_type, "__module__", "")
    is_now = module == "datetime" and name in _NOW
    if module in _OUTSIDE or is_now:
        return f"{module}.{called.__qualname__}"
    return None


def _call_of_python(frame) -> str | None:
    """Return the name to report for a call of a Python function; None if it is harmless."""
    code = frame.f_code
    # random.Random() without a seed reads one from the operating system.
    if code is random.Random.seed.__code__ and frame.f_locals.get("a") is None:
        return _NEW_SEED
    module = frame.f_globals.get("__name__", "")
    package = module.partition(".")[0]  # because pathlib is a package from Python 3.13 on
    if package in _OUTSIDE and frame.f_back and is_own(frame.f_back.f_code.co_filename):
        return f"{module}.{code.co_qualname}"
    return None


@functools.lru_cache(maxsize=10_000)
def is_own(file: str) -> bool:
    """Return whether a source file is the user's: a notebook cell, or a .py file of the user.

    Files of Python, of installed packages and of tpukit are not the user's.
    """
    return "-packages" not in file and not file.startswith(_LIBRARIES)
