"""What a fork shares with the process that made it, or has a copy of: open files, random generators, threads.

Cores and loader processes are forks. A file that was opened before has one position for all of them, so a sample is
read where another process looked for its own. A generator is a copy in each, so all draw the same numbers. Threads do
not come along, so who waits for one waits for ever.
"""

import concurrent.futures
import functools
import io
import random
import threading
import types
from collections.abc import Iterator, Mapping

from tpukit.essentials.display import InvalidValueError

_DEPTH = 3  # Subset, the dataset in it, what that holds
_MOST = 64  # parts of one list or dict that are looked at
_BEFORE: set[int] = set()  # what the worker function gets, by id: a fork has it at the same place
_FIXES = {
    "an open file": "open it in __getitem__: with open(self.path, 'rb') as file, or h5py.File(self.path)",
    "a random generator": "numpy.random.default_rng((seed, index)) in __getitem__; or random, numpy.random and torch "
    "themselves, which are seeded for each batch",
    "a pool of threads": "make it in __getitem__ where there is none; or without it, core.batches(..., workers=2)",
}


def remember(fn, args: tuple) -> None:
    """Note in the kernel, before it forks, what a worker function gets of this kind: arguments, what its code names."""
    _BEFORE.clear()
    _BEFORE.update(id(held) for value in (*args, *_seen_by(fn)) for _, _, held in _held(value, "", _DEPTH, set()))


def _seen_by(fn) -> Iterator[object]:
    """Yield what a function gets beside its arguments: what it encloses, the globals that its code names."""
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
    yield from (fn.__globals__[name] for name in code.co_names if name in fn.__globals__)


def refuse_shared(dataset, *, rank: int, world_size: int, workers: int) -> None:
    """Raise for what several processes would share without meaning to; name generators deep inside, once.

    Raises:
        ValueError: the dataset holds an open file, a generator of its own, or threads.
    """
    for path, kind, held in _held(dataset, type(dataset).__name__, _DEPTH, set()):
        came_along = id(held) in _BEFORE
        if not (workers or came_along and (world_size > 1 or kind == "a pool of threads")):
            continue
        shared = f"{workers} loader processes" if workers else f"{world_size} cores"
        found = f"{path}: a {type(held).__module__}.{type(held).__qualname__}; {shared} read the dataset"
        if kind == "a random generator" and path.count(".") > 1 and "dataset." not in path:  # a library's
            if rank == 0:
                print(f"{path} is {kind} that each process has a copy of: they draw the same numbers ({shared})")
            continue
        raise InvalidValueError(
            f"the dataset holds {kind}, and forks do not have one each", found=found, fix=_FIXES[kind]
        )


def _held(value, path: str, depth: int, seen: set) -> Iterator[tuple]:
    """Yield the path, the kind, and the object itself of what a value holds of this kind."""
    if id(value) in seen or isinstance(value, types.ModuleType | type | types.FunctionType):
        return
    seen.add(id(value))
    if kind := _kind(value):
        yield path, kind, value
        return
    if not depth or _is_handle(value) or type(value).__module__.partition(".")[0] == "tpukit":  # ours are made for it
        return
    if isinstance(value, Mapping):
        parts = [(f"{path}[{key!r}]", part) for key, part in list(value.items())[:_MOST]]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{number}]", part) for number, part in enumerate(value[:_MOST])]
    else:
        parts = [(f"{path}.{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
    for inside, part in parts:
        yield from _held(part, inside, depth - 1, seen)


def _kind(value) -> str | None:
    """Say what a value is, if forks do not have one each."""
    module, name = type(value).__module__, type(value).__name__
    if isinstance(value, io.IOBase):
        is_memory = isinstance(value, io.BytesIO | io.StringIO)
        return None if is_memory or value.closed else "an open file"
    if _is_handle(value):
        return "an open file" if value else None  # h5py's are false where their file is closed
    if isinstance(value, random.Random) or (module.startswith(("numpy.random", "torch")) and name in _GENERATORS):
        return "a random generator"
    if isinstance(value, concurrent.futures.ThreadPoolExecutor):
        return "a pool of threads" if value._threads else None
    if isinstance(value, threading.Thread):
        return "a pool of threads" if value.is_alive() else None
    return None


def _is_handle(value) -> bool:
    return (type(value).__module__.partition(".")[0], type(value).__name__) in _HANDLES


_GENERATORS = ("Generator", "RandomState")
_HANDLES = {
    *(("h5py", name) for name in ("File", "Group", "Dataset")),
    *(("builtins", name) for name in ("Environment", "Transaction")),  # lmdb's, which is written in C
    *(("sqlite3", name) for name in ("Connection", "Cursor")),
}
