"""Find state that forked processes would share or copy: open files, generators, threads.

Cores and loader processes are forks of the kernel. If an object was made before the fork:

    an open file          has a common position for all processes, so a process reads at the
                          position to which another process has moved it
    a random generator    is a copy in each process, so all draw the same numbers
    threads               do not exist in the fork, so the process waits for them forever

Before the cores are forked, `remember` records these objects. In a session, each core also records
those of the function that it has received, because all cores get equal copies. `refuse_shared`
raises an error if a dataset uses one of them; with loader processes, also for an object made later.
A dataset uses an object if it is an attribute at some depth, or if a function that reads a sample
uses its name:

    rng = numpy.random.default_rng(0)                 # a cell of the notebook

    class Images(Dataset):
        def __getitem__(self, index):
            return self.images[index] + rng.random()  # "Images.__getitem__, which uses rng"
"""

import concurrent.futures
import dis
import functools
import io
import logging
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.environment import is_installed_file

# Levels of a search: a Subset, the dataset in it, its transform, the list in that, the transforms.
# At a dataset inside another one, the count begins again.
_DEPTH = 5
_MOST = 64  # items of a list or dict that are examined
_MOST_OBJECTS = 5_000  # examined in a search, which then takes 20 ms at most
# ids of the objects that `remember` found. A fork does not change addresses, so not ids.
_BEFORE: set[int] = set()

# Kinds of objects that forked processes cannot share, and the fix for each: in a dataset, and in a
# worker function.
_FILE = "an open file"
_GENERATOR = "a random generator"
_THREADS = "a pool of threads"
_FIXES = {
    _FILE: "open it in __getitem__: with open(self.path, 'rb') as file, or h5py.File(self.path)",
    _GENERATOR: "numpy.random.default_rng((seed, index)) in __getitem__; or random, numpy.random "
    "and torch themselves, whose numbers differ between the processes",
    _THREADS: "make the pool in __getitem__, at the first call in each process; or leave the "
    "pool out and use core.batches(..., workers=2)",
}
_FIXES_IN_WORKER = {
    _FILE: "open it in the worker function",
    _GENERATOR: "to draw other numbers on each core, make it in the worker function: "
    "numpy.random.default_rng((seed, core.rank))",
    _THREADS: "make it in the worker function, `if core.is_main:`; for TensorBoard, "
    "launch(..., loggers=tpukit.training.TensorBoardWriter('runs'))",
}
_GENERATORS = ("Generator", "RandomState")  # classes of numpy.random and torch
# Packages whose classes have items but are not datasets.
_WITH_ITEMS = {"builtins", "collections", "numpy", "pandas", "torch"}
# (package, class) of objects that hold an open file.
_HANDLES = {
    *(("h5py", name) for name in ("File", "Group", "Dataset")),
    *(("builtins", name) for name in ("Environment", "Transaction")),  # lmdb's, written in C
    *(("sqlite3", name) for name in ("Connection", "Cursor")),
}
# Containers: the owner of an object in one is the object that has the container.
_WITHOUT_NAMES = (Mapping, list, tuple, functools.partial, type)
# Methods that run when a sample is read. Methods that these use by name are examined, too.
_READING = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward")
# Base classes whose methods read no sample.
_WITHOUT_METHODS = {"object", "Generic", "Dataset", "IterableDataset"}
# Names in code that may look up attributes by a text, so that their names are not in the code.
_BY_TEXT = {"getattr", "vars", "__dict__", "attrgetter", "eval", "exec"}
_USES = ", which uses "  # in a path, before the name of a variable of a function


class _Held(NamedTuple):
    """A file, generator or pool that a worker function or a dataset uses."""

    path: str  # the code that leads to it, such as "Subset.dataset.file"
    kind: str  # _FILE, _GENERATOR or _THREADS
    value: object
    owner: object  # the object with the attribute; None for a variable of a function


def remember(fn: Callable, args: tuple) -> None:
    """Record the open files, random generators and threads that a worker function uses.

    Call `remember` before the cores are forked, so that `refuse_shared` recognises these objects.

    Args:
        fn: the worker function. Its closure and the globals in its code are examined, too.
        args: the arguments of the worker function.

    Raises:
        InvalidValueError: an object that the function uses needs threads of this process, as
            TensorBoard's SummaryWriter does.
    """
    _BEFORE.clear()
    name = getattr(fn, "__name__", type(fn).__name__)
    seen: set[int] = set()  # shared by all searches, so that each object is examined once
    found = list(_find(fn, name, depth=_DEPTH, seen=seen))
    for number, value in enumerate(args):
        found += _find(value, f"argument {number}", depth=_DEPTH, seen=seen)
    _BEFORE.update(id(held.value) for held in found)
    for held in found:
        # The path of an attribute has a dot. A variable may be a thread, which has ended in a fork.
        is_attribute = "." in held.path.rpartition(_USES)[2]
        # For the threads of a dataset, `core.batches` raises an error with a better fix.
        is_running = isinstance(held.value, threading.Thread) and not _is_read(held)
        if is_running and is_attribute:
            raise InvalidValueError(
                "the worker function uses threads of the notebook, which do not exist on the "
                f"cores: {held.path}",
                found=f"{_class_name(held.value)}, which runs only in the notebook's process",
                fix=_FIXES_IN_WORKER[_THREADS],
            )


def lines_about(fn: Callable) -> list[str]:
    """Return a warning for each variable of a function with an open file or random generator.

    An object inside another one, such as an attribute, gets no warning.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    lines = []
    for path, part in _parts(fn, getattr(fn, "__name__", type(fn).__name__)):
        kind = _kind(part)
        if kind in (_FILE, _GENERATOR):
            lines.append(
                f"{path}: {kind} of the notebook, the same on every core; {_FIXES_IN_WORKER[kind]}"
            )
    return lines


def _is_read(held: _Held) -> bool:
    """Return whether the path leads through a method that reads samples of a dataset."""
    return any(f".{method}" in held.path for method in _READING)


def refuse_shared(dataset, *, world_size: int, workers: int) -> list:
    """Raise an error if several processes would share or copy state of a dataset.

    Args:
        dataset: the dataset.
        world_size: the number of cores.
        workers: the number of loader processes per core.

    Returns:
        The random generators of transforms inside the dataset, such as albumentations' and MONAI's.
        They are allowed, but each process has a copy, so the caller must seed them for each batch
        with `seeding.seed_generators`.

    Raises:
        InvalidValueError: several processes would share an open file or a random generator of the
            dataset, or the dataset uses threads. Forked processes have no copy of threads.
    """
    readers = f"{workers} loader processes" if workers else f"{world_size} cores"
    inside = []
    for held in _find(dataset, type(dataset).__name__, depth=_DEPTH, seen=set()):
        if not _is_shared(held, world_size=world_size, workers=workers):
            continue
        is_inside = (
            held.owner is not None and held.owner is not dataset and not _is_own_dataset(held.owner)
        )
        # A generator of a library's transform only needs another seed for each batch.
        if held.kind == _GENERATOR and is_inside:
            inside.append(held.value)
            continue
        name = _class_name(held.value)
        raise InvalidValueError(
            f"the dataset holds {held.kind}, which forked processes cannot share",
            found=f"{held.path}: a {name}; {readers} read the dataset, each in a forked process",
            fix=_FIXES[held.kind],
        )
    return inside


def _is_shared(held: _Held, *, world_size: int, workers: int) -> bool:
    if workers:
        return True
    was_made_before = id(held.value) in _BEFORE
    # Threads are missing in every fork. A single core shares its files and generators with nobody.
    return was_made_before and (world_size > 1 or held.kind == _THREADS)


# The search


def _find(value, path: str, *, depth: int, seen: set[int], owner=None) -> Iterator[_Held]:
    """Yield the files, generators and pools that a value contains or uses.

    Args:
        value: the object to search.
        path: the code that leads to it.
        depth: number of levels to search below it.
        seen: ids of the objects examined so far.
        owner: the object that has `value` as an attribute; None for none.
    """
    if id(value) in seen or len(seen) > _MOST_OBJECTS:
        return
    seen.add(id(value))
    if kind := _kind(value):
        yield _Held(path, kind, value, owner)
        return
    if _is_dataset(value):
        depth = _DEPTH
    if depth == 0 or _is_closed(value):
        return
    # The owner of the parts: none for variables of code, the object for its attributes.
    if isinstance(value, types.FunctionType | types.MethodType):
        owner = None
    elif not isinstance(value, _WITHOUT_NAMES):
        owner = value
    for part_path, part in _parts(value, path):
        is_code = isinstance(part, types.FunctionType | types.MethodType | type)
        part_depth = depth if is_code else depth - 1  # code is no level of its own
        yield from _find(part, part_path, depth=part_depth, seen=seen, owner=owner)


def _is_closed(value) -> bool:
    """Return whether the search does not examine the parts of a value.

    Such values are modules, loggers, threads, file handles, the notebook's shell, and tpukit's own
    objects.
    """
    if isinstance(value, types.ModuleType | logging.Logger | threading.Thread):
        return True
    module = _module_of(type(value))
    if isinstance(value, types.FunctionType | type):
        module = _module_of(value)
    is_ours = module.partition(".")[0] == "tpukit"  # tpukit's own objects work after a fork
    return is_ours or _is_handle(value) or _is_shell(value)


def _is_shell(value) -> bool:
    """Return whether a value is the notebook's shell, which `get_ipython` refers to.

    The shell has threads, for example for its history, but no worker function needs them.
    """
    bases = type(value).__mro__
    return any(_module_of(base).startswith(("IPython.", "ipykernel.")) for base in bases)


def _is_dataset(value) -> bool:
    """Return whether a value is a dataset of torch, or has items and a length like one."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(value, data.Dataset):
        return True
    kind = type(value)
    package = _module_of(kind).partition(".")[0]
    has_items = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return has_items and package not in _WITH_ITEMS


def _is_own_dataset(value) -> bool:
    """Return whether a value is a dataset of torch, or of a user's class like one.

    Classes of libraries do not count, because transforms may have items, such as albumentations'
    Compose.
    """
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(value, data.Dataset):
        return True
    return _is_dataset(value) and not _is_library(_module_of(type(value)))


def _parts(value, path: str) -> list[tuple[str, object]]:
    """Return (path, part) for each part of a value: items, attributes, variables of code."""
    if isinstance(value, Mapping):
        items = list(value.items())[:_MOST]
        return [(f"{path}[{key!r}]", part) for key, part in items]
    if isinstance(value, list | tuple):
        return [(f"{path}[{number}]", part) for number, part in enumerate(value[:_MOST])]
    if isinstance(value, functools.partial):
        return [(path, value.func), (path, value.args), (path, value.keywords)]
    if isinstance(value, types.MethodType):
        return [(path, value.__func__), (path, value.__self__)]
    if isinstance(value, types.FunctionType):
        return _used_by(value, path)
    if isinstance(value, type):
        return _of_class(value, path)
    if _is_generator(getattr(value, "__self__", None)):  # a method written in C
        return [(path, value.__self__)]
    attributes = getattr(value, "__dict__", {})
    if _is_dataset(value):
        attributes = _used_attributes(type(value), attributes)
    parts = [(f"{path}.{name}", part) for name, part in attributes.items()]
    # The class, too, because its methods may use variables of the notebook.
    return [*parts, (path, type(value))]


def _used_by(function: types.FunctionType, path: str) -> list[tuple[str, object]]:
    """Return (path, value) of the variables that a function uses: its closure and globals."""
    if _is_library(function.__module__):
        return []
    used = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            used[name] = cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    for name in _global_names(function.__code__) & function.__globals__.keys():
        used[name] = function.__globals__[name]
    return [(f"{path}{_USES}{name}", part) for name, part in used.items()]


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names of globals that code reads, also in functions that it defines."""
    names = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _of_class(kind: type, path: str) -> list[tuple[str, object]]:
    """Return (path, part) of a class: its generators, and its methods that read samples.

    MONAI's transforms have a generator as a class attribute.
    """
    parts = []
    for base in kind.__mro__:
        for name, part in list(vars(base).items()):
            if _kind(part) == _GENERATOR:
                parts.append((f"{path}.{name}", part))
    names = list(_READING)
    for name in names:  # the loop also visits names that it appends
        method = getattr(kind, name, None)
        if not isinstance(method, types.FunctionType) or _is_library(method.__module__):
            continue
        parts.append((f"{path}.{name}", method))
        names += [one for one in method.__code__.co_names if one not in names]
    return parts


def _used_attributes(kind: type, attributes: Mapping) -> dict[str, object]:
    """Return the attributes of a dataset, without generators that no sample uses.

    A dataset often has a generator as an attribute that only `__init__` used, to make the samples
    or their order.
    """
    names = _names_read(kind)
    if names is None:
        return dict(attributes)
    return {
        name: part
        for name, part in attributes.items()
        if name in names or _kind(part) != _GENERATOR
    }


@functools.cache
def _names_read(kind: type) -> frozenset[str] | None:
    """Return all names in the code that reads a sample of a class; None if they are unknown.

    They are unknown if methods of a library read samples, or if the code looks up attributes by a
    text, as `getattr` does.
    """
    names = set()
    waiting = list(_READING)  # names of methods to examine
    bases = [base for base in kind.__mro__ if base.__name__ not in _WITHOUT_METHODS]
    while waiting:
        name = waiting.pop()
        for base in bases:
            if name not in vars(base):
                continue
            functions = _functions_of(vars(base)[name])
            if functions is None or _is_library(base.__module__):
                return None
            for function in functions:
                found = _names_called(function) - names
                names |= found
                waiting += found
    return None if names & _BY_TEXT else frozenset(names)


def _functions_of(part: object) -> list[types.FunctionType] | None:
    """Return the functions that an attribute of a class runs; None if they are unknown."""
    if isinstance(part, types.FunctionType):
        return [part]
    if isinstance(part, staticmethod | classmethod):
        return _functions_of(part.__func__)
    if isinstance(part, property):
        return [part.fget] if part.fget else []
    if isinstance(part, functools.cached_property):
        return [part.func]
    return None if callable(part) or hasattr(part, "__get__") else []


def _names_called(function: types.FunctionType) -> set[str]:
    """Return the names in the code of a function, and of the user's functions that it uses."""
    names = set()
    seen = set()
    waiting = [function]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        names |= _names_in(function.__code__)
        for _, part in _used_by(function, ""):
            if isinstance(part, types.FunctionType):
                waiting.append(part)
    return names


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals, attributes and methods in code, and in the code inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _is_library(module: str | None) -> bool:
    """Return whether a module is part of Python or an installed package, not the user's own."""
    if module is None or module.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return is_installed_file(file)


# The kinds


def _kind(value) -> str | None:
    """Return the kind of an object that forked processes cannot share; None for others."""
    if isinstance(value, io.IOBase):
        return _FILE if _is_read_from(value) else None
    if _is_handle(value):
        is_open = bool(value)  # an object of h5py is false if its file is closed
        return _FILE if is_open else None
    if _is_generator(value):
        return _GENERATOR
    if _has_threads(value):
        return _THREADS
    return None


def _has_threads(value) -> bool:
    """Return whether a value is a thread, or a pool of threads, that runs in this process."""
    if isinstance(value, threading.Thread):
        return value.is_alive()
    # A pool starts its threads with its first task; before that a fork can use it.
    return isinstance(value, concurrent.futures.ThreadPoolExecutor) and bool(value._threads)


def _is_read_from(file: io.IOBase) -> bool:
    """Return whether a file is open for reading, and neither in memory nor standard input."""
    is_memory = isinstance(file, io.BytesIO | io.StringIO)
    is_standard = file in (sys.stdin, sys.__stdin__)
    return not (is_memory or is_standard or file.closed) and file.readable()


def _is_generator(value) -> bool:
    """Return whether a value is a random generator, other than the global ones of a module.

    tpukit seeds the global generators of each process with another seed.
    """
    kind = type(value)
    is_library = _module_of(kind).startswith(("numpy.random", "torch"))
    is_known = is_library and kind.__name__ in _GENERATORS
    if not is_known and not isinstance(value, random.Random):
        return False
    # The global generators: functions such as numpy.random.normal are their methods.
    of_numpy = getattr(sys.modules.get("numpy.random"), "normal", None)
    of_torch = getattr(sys.modules.get("torch"), "default_generator", None)
    of_modules = (random.random.__self__, getattr(of_numpy, "__self__", None), of_torch)
    return not any(value is one for one in of_modules)


def _is_handle(value) -> bool:
    package = _module_of(type(value)).partition(".")[0]
    return (package, type(value).__name__) in _HANDLES


def _module_of(code: type | types.FunctionType) -> str:
    """Return the module of a class or function; "" if it has none."""
    module = code.__module__
    return module if isinstance(module, str) else ""  # classes of Cython may have another object


def _class_name(value) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
