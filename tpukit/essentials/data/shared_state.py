"""Find state in a dataset that forked processes would share or copy: files, generators, threads.

Cores and loader processes are forks of the kernel. If an object was made before the fork:

    an open file has one position for all processes, so each process moves the position of the
    others a random generator    is a copy in each process, so all draw the same numbers a pool of
    threads     does not exist in the fork, so the process waits for it forever

`remember` notes these objects before the fork, `refuse_shared` raises if a dataset holds one.
"""

import concurrent.futures
import functools
import io
import random
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError

_DEPTH = 3  # attributes of attributes of a dataset; a dataset inside of it is counted from anew
_MOST = 64  # parts of one list or dict that are examined
_BEFORE: set[int] = set()  # ids of the objects made before the fork; a fork keeps their addresses

# Kinds of objects that forked processes would share, and for each the line to write.
_FILE = "an open file"
_GENERATOR = "a random generator"
_THREADS = "a pool of threads"
_FIXES = {
    _FILE: "open it in __getitem__: with open(self.path, 'rb') as file, or h5py.File(self.path)",
    _GENERATOR: "numpy.random.default_rng((seed, index)) in __getitem__; or random, numpy.random "
    "and torch themselves, which are seeded for each batch",
    _THREADS: "make the pool in __getitem__, at the first call in each process; or leave the "
    "pool out and use core.batches(..., workers=2)",
}
_GENERATORS = ("Generator", "RandomState")  # classes of numpy.random and torch
# Packages whose classes have items and are no datasets.
_WITH_ITEMS = {"builtins", "collections", "numpy", "pandas", "torch"}
# (package, class) of objects that hold an open file.
_HANDLES = {
    *(("h5py", name) for name in ("File", "Group", "Dataset")),
    *(("builtins", name) for name in ("Environment", "Transaction")),  # lmdb's, written in C
    *(("sqlite3", name) for name in ("Connection", "Cursor")),
}


class _Held(NamedTuple):
    """An object of these kinds, and its place."""

    path: str  # such as "Subset.dataset.file"
    kind: str
    value: object


def remember(fn, args: tuple) -> None:
    """Note the objects of these kinds that a worker function gets; call it before the fork.

    Args:
        fn: the worker function. Its closure and the globals that its code names are examined too.
        args: its arguments.
    """
    _BEFORE.clear()
    for value in (*args, *_seen_by(fn)):
        _BEFORE.update(id(held.value) for held in _find(value, "", depth=_DEPTH, seen=set()))


def _seen_by(fn) -> Iterator[object]:
    """Yield the closure of a function, and the globals that its code names."""
    while isinstance(fn, functools.partial):
        yield from (*fn.args, *fn.keywords.values())
        fn = fn.func
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    for name in code.co_names:
        if name in fn.__globals__:
            yield fn.__globals__[name]


def refuse_shared(dataset, *, rank: int, world_size: int, workers: int) -> None:
    """Raise if several processes would share or copy state of a dataset.

    If the generator belongs to an object deep inside the dataset, core 0 prints a line instead.

    Args:
        dataset: the dataset.
        rank: the number of this core.
        world_size: the number of cores.
        workers: loader processes per core.

    Raises:
        ValueError: the dataset holds an open file, a generator or threads.
    """
    readers = f"{workers} loader processes" if workers else f"{world_size} cores"
    for held in _find(dataset, type(dataset).__name__, depth=_DEPTH, seen=set()):
        if not _is_shared(held, world_size=world_size, workers=workers):
            continue
        is_inside = held.path.count(".") > 1 and "dataset." not in held.path
        if held.kind == _GENERATOR and is_inside:
            if rank == 0:
                copied = f"{held.kind}, and each process has a copy of it"
                print(f"{held.path} is {copied}: all draw the same numbers ({readers})")
            continue
        kind = type(held.value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise InvalidValueError(
            f"the dataset holds {held.kind}, which forked processes cannot share",
            found=f"{held.path}: a {name}; {readers} read the dataset",
            fix=_FIXES[held.kind],
        )


def _is_shared(held: _Held, *, world_size: int, workers: int) -> bool:
    if workers:
        return True
    was_made_before = id(held.value) in _BEFORE
    # Threads are missing in every fork; a file or a generator of a single core is its own.
    return was_made_before and (world_size > 1 or held.kind == _THREADS)


def _find(value, path: str, *, depth: int, seen: set) -> Iterator[_Held]:
    """Yield the objects of these kinds in a value, down to a depth."""
    is_code = isinstance(value, types.ModuleType | type | types.FunctionType)
    if is_code or id(value) in seen:
        return
    seen.add(id(value))
    if kind := _kind(value):
        yield _Held(path, kind, value)
        return
    is_ours = type(value).__module__.partition(".")[0] == "tpukit"  # made to be forked
    if _is_dataset(value):
        depth = _DEPTH
    if any([depth == 0, is_ours, _is_handle(value)]):
        return
    for part_path, part in _parts(value, path):
        yield from _find(part, part_path, depth=depth - 1, seen=seen)


def _is_dataset(value) -> bool:
    """Return whether a value is one of torch's datasets, or a class of the user like them."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(value, data.Dataset):
        return True
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    has_items = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return has_items and package not in _WITH_ITEMS


def _parts(value, path: str) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        items = list(value.items())[:_MOST]
        return [(f"{path}[{key!r}]", part) for key, part in items]
    if isinstance(value, list | tuple):
        return [(f"{path}[{number}]", part) for number, part in enumerate(value[:_MOST])]
    attributes = getattr(value, "__dict__", {})
    return [(f"{path}.{name}", part) for name, part in attributes.items()]


def _kind(value) -> str | None:
    """Return the kind of an object that forked processes cannot share; None for others."""
    if isinstance(value, io.IOBase):
        is_memory = isinstance(value, io.BytesIO | io.StringIO)
        if is_memory or value.closed:
            return None
        return _FILE
    if _is_handle(value):
        is_open = bool(value)  # h5py's are false if their file is closed
        return _FILE if is_open else None
    if isinstance(value, random.Random) or _is_generator(value):
        return _GENERATOR
    if isinstance(value, concurrent.futures.ThreadPoolExecutor) and value._threads:
        return _THREADS
    if isinstance(value, threading.Thread) and value.is_alive():
        return _THREADS
    return None


def _is_generator(value) -> bool:
    kind = type(value)
    return kind.__name__ in _GENERATORS and kind.__module__.startswith(("numpy.random", "torch"))


def _is_handle(value) -> bool:
    package = type(value).__module__.partition(".")[0]
    return (package, type(value).__name__) in _HANDLES
