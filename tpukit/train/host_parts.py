"""What one object of Python consists of: what is compared of it, and the objects within it."""

import _thread
import array
import collections
import contextvars
import copyreg
import functools
import logging
import marshal
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Python's own files, and those of tpukit; not a folder beside it, such as "tpukit-experiments".
_LIBRARY = (f"{Path(os.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
_LISTS = (list, tuple, set, frozenset, collections.deque, type({}.keys()), type({}.values()), type({}.items()))
_LONG = 1000  # numbers and texts: a list of more is compared as one
_NO_NUMBERS = (logging.Logger, _thread.LockType, _thread.RLock)  # what they do is felt by no tensor
_CONSTANTS = ("dtype", "layout", "memory_format", "finfo", "iinfo", "FunctionSchema")  # torch's: they have no state
_IN_ATTRIBUTES = (types.MethodType, property, staticmethod, classmethod, functools.partial, threading.local)
_NOT_MADE_BY_PYTHON = 1 << 7  # CPython's Py_TPFLAGS_DISALLOW_INSTANTIATION: a generator, for example


class Unseen:
    """What cannot be looked into, in words that follow its name; no two are equal."""

    def __init__(self, words: str):
        self.words = words


class Early(str):
    """A value that the first step may change, in which lists and caches are filled."""


def value_and_parts(one: object, *, fits: bool) -> tuple[object, list[tuple[str, object]]]:
    """Return what is compared of an object that is not plain, and its parts, each with the step to it.

    `fits` says whether the bytes of an array may be read.
    """
    import torch

    kind = type(one)
    if isinstance(one, (dict, Mapping)):  # dict alone is found in a tenth of the time
        items = enumerate([*one.items()])
        parts = [(f"[{key!r}]" if isinstance(key, PLAIN) else f"[...{at}]", part) for at, (key, part) in items]
        return _of_many(one, kind, parts)
    if isinstance(one, _LISTS):
        return _of_many(one, kind, [(f"[{place}]", part) for place, part in enumerate([*one])])
    if isinstance(one, torch.Tensor):
        return _of_tensor(one, fits), []
    if isinstance(one, types.ModuleType) or (kind.__module__ == "torch" and kind.__name__ in _CONSTANTS):
        return one, []
    if isinstance(one, _NO_NUMBERS):
        return kind, []
    if isinstance(one, type):
        return one, _parts_of_class(one)
    if isinstance(one, types.FunctionType):
        return one.__code__, [*_in_dict(one), *_parts_of_function(one)]
    if isinstance(one, types.BuiltinFunctionType):
        of_none = isinstance(one.__self__, types.ModuleType | type | None)
        return f"{one.__module__}.{one.__qualname__}", [] if of_none else [(".__self__", one.__self__)]
    if hasattr(kind, "tobytes") or isinstance(one, bytearray):
        return _of_array(one, kind, fits)
    if isinstance(one, weakref.ref):
        return kind, [("()", one())]
    if isinstance(one, contextvars.ContextVar):
        return kind, [(".get()", one.get(None))]
    if isinstance(one, functools._lru_cache_wrapper):
        _, misses, _, size = one.cache_info()
        return Early(f"a cache of {size}, filled {misses} times"), _attributes(one)
    if isinstance(one, os.PathLike):
        return os.fspath(one), []
    parts = [] if isinstance(one, _IN_ATTRIBUTES) or not _hides(kind) else _pickled(one)
    if parts is None:
        return Unseen(f"is a {kind.__name__}, which cannot be looked into"), []
    return kind, parts + _attributes(one)


def _of_tensor(one, fits: bool) -> str:
    import torch

    kind = "trained" if one.requires_grad else "not trained"
    text = f"{kind}, {tuple(one.shape)}"
    if one.device.type != "cpu":
        return text
    if not fits or one.layout != torch.strided:
        return f"{text}, {one._version}"
    return f"{text}, {hash(one.detach().reshape(-1).view(torch.uint8).numpy().tobytes())}"


def bytes_of(one: object) -> int:
    """Return the bytes of an array, or of a tensor of the host; 0 for all else."""
    if isinstance(one, bytearray | array.array):
        return memoryview(one).nbytes
    if not hasattr(type(one), "nbytes") or str(getattr(one, "device", "cpu")) != "cpu":
        return 0
    return one.nbytes


def _of_array(one, kind: type, fits: bool) -> tuple[object, list]:
    if getattr(getattr(one, "dtype", None), "hasobject", False):
        return kind, [(f"[{place}]", part) for place, part in enumerate(one.ravel().tolist())]
    if not fits:
        return Unseen(f"holds {bytes_of(one):,} bytes, which are too many to look at"), []
    form = str(getattr(one, "dtype", "")), getattr(one, "shape", "")
    return (kind.__name__, *form, hash(one.tobytes() if hasattr(one, "tobytes") else bytes(one))), []


def _of_many(one, kind: type, parts: list) -> tuple[object, list]:
    text = Early(f"a {kind.__name__} of {len(parts)}")
    if not parts and kind in (dict, list, tuple, collections.OrderedDict):
        return text, []
    if len(parts) > _LONG and isinstance(one, dict | list | tuple) and all(type(part) in PLAIN for _, part in parts):
        return f"{text}, {hash(marshal.dumps([*one.items()] if isinstance(one, dict) else [*one], 0))}", []
    return text, parts + _attributes(one)


def _parts_of_class(one: type) -> list[tuple[str, object]]:
    parts = ((name, part) for name, part in vars(one).items() if not name.startswith(("__", "_abc_")))
    own = is_own_class(one)
    return [(f".{name}", part) for name, part in parts if own or isinstance(part, PLAIN) or code_of(part)]


def _parts_of_function(one: types.FunctionType) -> Iterator[tuple[str, object]]:
    code, names = code_of(one), one.__globals__
    if code is None:
        return
    cells = zip(code.co_freevars, one.__closure__ or (), strict=True)
    yield from ((f".{name}", cell.cell_contents) for name, cell in cells if cell != types.CellType())
    yield (".__defaults__", (one.__defaults__, one.__kwdefaults__))
    named = [*dict.fromkeys(names_in(code))]
    yield from ((f":{name}", names[name]) for name in named if name in names)
    yield from ((f":{name}", sys.modules[name]) for name in named if name not in names and name in sys.modules)
    if "getenv" in named:
        yield (":environ", os.environ)


def _attributes(one: object) -> list[tuple[str, object]]:
    return _in_dict(one) + [(f".{name}", getattr(one, name)) for name in _slots(type(one)) if hasattr(one, name)]


def _in_dict(one: object) -> list[tuple[str, object]]:
    return [(f".{name}", part) for name, part in [*getattr(one, "__dict__", {}).items()]]


@functools.lru_cache(maxsize=1000)
def _slots(kind: type) -> list[str]:
    """Return the names of slots, as a private one is kept."""
    descriptors = (one for base in kind.__mro__ for one in vars(base).values())
    return [one.__name__ for one in descriptors if isinstance(one, types.MemberDescriptorType)]


def _hides(kind: type) -> bool:
    """Say whether objects of a class hold something that only C knows."""
    for base in kind.__mro__:
        if base.__flags__ & _NOT_MADE_BY_PYTHON or isinstance(vars(base).get("__new__"), types.BuiltinFunctionType):
            return base is not object
    return False


def _pickled(one: object) -> list[tuple[str, object]] | None:
    """Return what pickle would keep of an object, None if it could not."""
    reduce = copyreg.dispatch_table.get(type(one), lambda one: one.__reduce_ex__(2))
    try:
        found = reduce(one)
    except Exception:  # whatever a library raises here, it means that it has no such form
        return None
    if isinstance(found, str):
        return [(".name", found)]
    if found[0] is copyreg.__newobj__ and not any(found[2:]):  # pybind11's: made again, it would be empty
        return None
    return [*zip((".made", ".of", ".state"), found, strict=False)]


def code_of(one: object) -> types.CodeType | None:
    """Return the code of a function that is the user's own; None for all else."""
    return one.__code__ if isinstance(one, types.FunctionType) and is_own(one.__code__.co_filename) else None


def names_in(code: types.CodeType) -> Iterator[str]:
    """Return the names that a function and those within it look up, and the texts that may be such names."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from names_in(part)
        elif isinstance(part, str):
            yield part


def is_own_class(kind: type) -> bool:
    """Say whether a class is the user's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or bool(file and is_own(file)) or any(map(code_of, vars(kind).values()))


@functools.lru_cache(maxsize=10_000)
def is_own(file: str) -> bool:
    """Say whether a file is the user's: a notebook's cell, a module of theirs, no installed package."""
    return "-packages" not in file and not file.startswith((*_LIBRARY, "<frozen"))
