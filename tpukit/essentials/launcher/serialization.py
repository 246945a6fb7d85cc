"""Send a call to the workers of a session: the function as it is now, with everything it uses.

    call = serialize_call(train, (1,))    the function by value, with everything it uses
    CallFile.write(call)                  one file in memory for all workers
    CallFile.read()                       the circumstances, then train, (1,)

Functions and classes of the notebook are pickled by value in both directions. The sources of cells
are sent, too, so that a traceback in a worker shows the line of the cell.
"""

import contextlib
import io
import linecache
import marshal
import math
import mmap
import os
import pickle
import sys
import sysconfig
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import cloudpickle

from tpukit.essentials.display import InvalidValueError, human_size
from tpukit.essentials.environment import is_installed_file
from tpukit.essentials.launcher import channel
from tpukit.essentials.launcher.channel import SerializationError

MOST_BYTES = 64 * 10**6  # the largest size of a call, because every run sends it to every core
_LIBRARIES = (f"{sysconfig.get_path('stdlib')}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")


class Circumstances(NamedTuple):
    """The part of the kernel's state that the workers copy before a run.

    Attributes:
        folder: the working directory.
        path: `sys.path`.
        sources: entries of `linecache` by file, for cells of the notebook.
        was_left: whether a core left the previous run before its function returned.
        seeds_again: whether the workers seed all random numbers again.
    """

    folder: str
    path: list[str]
    sources: dict[str, tuple]
    was_left: bool
    seeds_again: bool


class SerializedCall(NamedTuple):
    """A pickled function with its arguments.

    Attributes:
        data: the pickle.
        sources: `linecache` entries by file, as in `Circumstances`.
    """

    data: bytes
    sources: dict[str, tuple]


class _TooLargeError(Exception):
    """The call is larger than allowed."""


class Pickler(cloudpickle.Pickler):
    """Pickles classes and functions of the notebook by value, and tensors as their bytes.

    Attributes:
        files: names of the files of all code that it has pickled.
    """

    def __init__(self, stream, protocol: int = 5, buffer_callback: Callable | None = None):
        super().__init__(stream, protocol=protocol, buffer_callback=buffer_callback)
        self.files: set[str] = set()

    def reducer_override(self, value: object) -> object:
        """Return (function, arguments) that rebuild a value; raise TypeError for an open file."""
        if isinstance(value, types.CodeType):
            # cloudpickle would write "<dynamic-code>" in place of the name of the file.
            self.files.add(value.co_filename)
            return marshal.loads, (marshal.dumps(value),)
        if value is sys.stdout or value is sys.stderr:
            return getattr, (sys, "stdout" if value is sys.stdout else "stderr")
        if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO):
            # cloudpickle would send the contents of a text file that is open for reading.
            raise TypeError("an open file belongs to one process; open it in the worker function")
        reduced = channel.Pickler.reducer_override(self, value)
        if reduced is NotImplemented:
            return super().reducer_override(value)
        return reduced


def serialize_call(fn: Callable, args: tuple) -> SerializedCall:
    """Pickle a call once for all cores.

    Raises:
        InvalidValueError: the call is larger than 64 MB; the error names the largest part.
        SerializationError: a part of the call cannot be pickled; the error names the part.
    """
    try:
        return _pickle((fn, args), MOST_BYTES)
    except _TooLargeError:
        name, size = _largest_part(fn, args)
        raise InvalidValueError(
            f"the function and its arguments are larger than {MOST_BYTES // 10**6} MB, and "
            "every run sends them to every core",
            found=f"{name}: {human_size(size)}",
            fix="load or make large data in a worker function, and keep them for later runs: "
            "core.state.data = ...",
        ) from None
    except Exception as error:  # __reduce__ of a user's class may raise anything
        culprit, cause = "the call", f"{type(error).__name__}: {error}"
        # Pickle each part alone, to name the part that fails.
        for name, value in _parts_of(fn, args):
            try:
                _pickle(value)
            except Exception as error_of_part:
                culprit, cause = f"{name} ({type(value).__name__})", error_of_part
                break
        raise SerializationError(
            f"{culprit} cannot be sent to the workers: {cause}",
            fix="make this object in a worker function, and keep it for later runs: "
            "core.state.name = ...",
        ) from error


def _pickle(value: object, most: float = math.inf) -> SerializedCall:
    stream = io.BytesIO()

    def may_take(data) -> bool:
        if stream.tell() + memoryview(data).nbytes > most:
            raise _TooLargeError
        return True  # a buffer goes into the stream, too

    def write(data) -> None:
        may_take(data)
        stream.write(data)

    # An array is passed to `may_take` before pickle copies it.
    pickler = Pickler(types.SimpleNamespace(write=write), buffer_callback=may_take)
    pickler.dump(value)
    # A copy: while a view of its buffer exists, Python 3.13 complains at the end of the stream.
    return SerializedCall(stream.getvalue(), _sources(pickler.files))


def _sources(files: set[str]) -> dict[str, tuple]:
    """Return the `linecache` entries of cells. The workers can read real files themselves."""
    found = {}
    for name in files:
        entry = linecache.cache.get(name, ())
        if len(entry) == 4 and not os.path.exists(name):
            size, _, lines, path = entry
            # Without a time, or `linecache.checkcache` would drop the entry: IPython 7 keeps only
            # the cells that it has seen itself, and the worker has not.
            found[name] = (size, None, lines, path)
    return found


def _largest_part(fn: Callable, args: tuple) -> tuple[str, int]:
    sizes = {"the call": 0}
    for name, value in _parts_of(fn, args):
        with contextlib.suppress(Exception):  # a part that cannot be pickled has no size
            sizes[name] = len(_pickle(value).data)
    name = max(sizes, key=sizes.get)
    return name, sizes[name]


def _parts_of(fn: Callable, args: tuple) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of everything that is sent with a call."""
    for number, value in enumerate(args, start=1):
        yield f"argument {number}", value
    # The function, and the functions that it uses: each brings its globals and its closure.
    seen = set()
    waiting = [fn]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        if hasattr(function, "func") and hasattr(function, "keywords"):  # functools.partial
            waiting.append(function.func)
            for value in (*function.args, *function.keywords.values()):
                yield "an argument of functools.partial", value
        elif isinstance(function, types.FunctionType):
            for name, value in _captured(function).items():
                if isinstance(value, types.FunctionType):
                    waiting.append(value)
                else:
                    yield f"`{name}`, which {function.__name__} uses", value
        else:  # a method or a callable object, which brings its attributes
            yield "the function", function


def _captured(function: types.FunctionType) -> dict[str, object]:
    """Return the values that cloudpickle sends with a function: closure, globals and defaults."""
    captured = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a name that has no value yet
            captured[name] = cell.cell_contents
    if function.__module__ == "__main__":  # the workers import functions of real modules
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                captured[name] = function.__globals__[name]
        positional = function.__code__.co_varnames[: function.__code__.co_argcount]
        # The defaults are those of the last positional arguments.
        captured |= zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False)
        captured |= function.__kwdefaults__ or {}
    return captured


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def of_earlier_classes(state: types.SimpleNamespace, fn: Callable) -> list[str]:
    """Return a warning for each object in `core.state` whose class was defined again later."""
    while hasattr(fn, "func"):  # functools.partial
        fn = fn.func
    # The classes that came with this call, by name.
    values = getattr(fn, "__globals__", {}).values()
    sent = {value.__qualname__: value for value in values if isinstance(value, type)}
    lines = []
    for name, value in vars(state).items():
        kind = type(value)
        # The same name and module but another class: the notebook has run the cell again.
        newer = sent.get(kind.__qualname__, kind)
        if newer is not kind and newer.__module__ == kind.__module__:
            lines.append(
                f"core.state.{name} is an object of an earlier class {kind.__qualname__}, with the "
                f"earlier methods; core.state.{name}.__class__ = {kind.__qualname__} gives it the "
                "new methods"
            )
    return lines


class CallFile:
    """A file in memory, which the kernel makes before the fork and all workers read."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # Linux only
            self._fd = os.memfd_create("tpukit call")
        else:
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())
        self.close = weakref.finalize(self, os.close, self._fd)

    def write(self, call: SerializedCall, *, was_left: bool, seeds_again: bool) -> None:
        """Write a call and its `Circumstances` into the file; no worker may read it meanwhile."""
        circumstances = Circumstances(os.getcwd(), sys.path, call.sources, was_left, seeds_again)
        with open(self._fd, "wb", closefd=False) as file:
            file.seek(0)
            file.truncate()  # frees the memory of an earlier, larger call
            pickle.dump(circumstances, file)
            file.write(call.data)

    def read(self) -> Iterator[object]:
        """Yield the `Circumstances`, then (function, arguments).

        Apply the `Circumstances` before the second value is read, because unpickling the function
        may need their `sys.path`. The values do not share memory with the file.
        """
        # Not with the file's position, which all workers share after the fork.
        with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as content:
            yield pickle.load(content)
            yield pickle.load(content)


class Surroundings:
    """Detects changed modules and environment variables; the workers still have the old ones."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._modules: dict[str, tuple[str, float]] = {}
        self.changes()

    def changes(self) -> list[str]:
        """Return lines about modules and environment variables that changed since the last call."""
        lines = []
        modules = self._changed_modules()
        if modules:
            lines.append(
                f"{', '.join(modules)}: the file has changed, but the workers of the session use "
                f"the old code; for the new code call importlib.reload({modules[0]}), and then "
                f"make a new session, or call cloudpickle.register_pickle_by_value({modules[0]})"
            )
        # Variables that were added, removed or changed.
        names = sorted({name for name, _ in self._environ.items() ^ os.environ.items()})
        if names:
            lines.append(
                f"{', '.join(names)}: changed in os.environ since the session began, but the "
                "workers use the old values; a new session uses the new values"
            )
            self._environ = dict(os.environ)
        return lines

    def _changed_modules(self) -> list[str]:
        by_value = cloudpickle.list_registry_pickle_by_value()
        changed = []
        # A copy, because another thread may import at the same time.
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            is_library = not file or file.startswith(_LIBRARIES) or is_installed_file(file)
            if is_library or name in by_value:
                continue
            with contextlib.suppress(OSError):
                now = file, os.stat(file).st_mtime
                if self._modules.setdefault(name, now) != now:
                    self._modules[name] = now
                    changed.append(name)
        return changed
