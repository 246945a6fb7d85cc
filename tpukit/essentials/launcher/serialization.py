"""Send a call to the workers of a session: the function as it is now, with everything it uses.

    serialize_call(train, (1,))    -> parts: the function by value, and the bytes of its tensors
    CallFile.write(circumstances, parts)   # one file in memory for all workers
    CallFile.read().deserialize()  -> train, (1,)

Functions and classes of the notebook are pickled by value in both directions. The sources of cells
are sent, too, so that a traceback in a worker shows the line of the cell.
"""

import contextlib
import io
import linecache
import marshal
import os
import pickle
import struct
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
from tpukit.essentials.launcher import channel
from tpukit.essentials.launcher.channel import SerializationError, deserialize

MOST_BYTES = 64 * 10**6  # the largest size of a call, because every run sends it to every core
_SIZE = struct.Struct("!Q")
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
_IN_A_WORKER = "make it in the worker function, and keep it: core.state.name = ..."


class Circumstances(NamedTuple):
    """The state of the kernel that the workers copy before a run.

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


class Call(NamedTuple):
    """A call as a worker reads it."""

    circumstances: Circumstances
    parts: list[bytearray]

    def deserialize(self) -> tuple[Callable, tuple]:
        """Return the function and its arguments after the core."""
        return deserialize(self.parts)


class SerializedCall(NamedTuple):
    """A pickled function with its arguments.

    Attributes:
        parts: as `channel.serialize` returns them.
        files: the names of the files with the function's code; a cell has such a name, too.
    """

    parts: list[memoryview]
    files: set[str]

    def sources(self) -> dict[str, tuple]:
        """Return the `linecache` entries of cells. The workers can read real files themselves."""
        found = {}
        for name in self.files:
            entry = linecache.cache.get(name, ())
            if len(entry) == 4 and not os.path.exists(name):
                size, _, lines, path = entry
                # Without a time, or `linecache.checkcache` would drop the entry: IPython 7 keeps
                # only the cells that it has seen itself, and the worker has not.
                found[name] = (size, None, lines, path)
        return found


class _TooLargeError(Exception):
    """The call is larger than allowed."""


class _LimitedStream(io.BytesIO):
    """A stream that raises as soon as more bytes are written than allowed."""

    def __init__(self, most: float):
        super().__init__()
        self._left = most

    def take(self, size: int) -> None:
        """Count bytes towards the limit, also those of arrays outside the stream."""
        self._left -= size
        if self._left < 0:
            raise _TooLargeError

    def write(self, data) -> int:
        self.take(memoryview(data).nbytes)
        return super().write(data)


class Pickler(cloudpickle.Pickler):
    """Pickles classes and functions of the notebook by value, and tensors as their bytes.

    Attributes:
        files: names of the files of all code that it has pickled.
    """

    def __init__(self, stream, protocol: int = 5, buffer_callback: Callable | None = None):
        super().__init__(stream, protocol=protocol, buffer_callback=buffer_callback)
        self.files: set[str] = set()

    def reducer_override(self, value: object) -> object:
        """Return (function, arguments) that make a value again; a TypeError for an open file."""
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
            f"the call is larger than {MOST_BYTES // 10**6} MB, and every run sends it to every "
            "core",
            found=f"{name}: {human_size(size)}",
            fix="load or make it in the worker function once, and keep it: core.state.data = ...",
        ) from None
    except Exception as error:  # __reduce__ of a user's class may raise anything
        # Pickle each part alone, to name the part that fails.
        for name, value in _parts_of(fn, args):
            try:
                _pickle(value)
            except Exception as cause:
                raise SerializationError(
                    f"{name} ({type(value).__name__}) cannot be sent to the workers: {cause}",
                    fix=_IN_A_WORKER,
                ) from error
        raise SerializationError(
            f"the call cannot be sent to the workers: {type(error).__name__}: {error}",
            fix=_IN_A_WORKER,
        ) from error


def _pickle(value: object, most: float = float("inf")) -> SerializedCall:
    stream = _LimitedStream(most)
    # Arrays stay outside of the stream, without a copy: PEP 574, protocol 5.
    buffers = []

    def keep(buffer: pickle.PickleBuffer) -> None:
        stream.take(buffer.raw().nbytes)
        buffers.append(buffer.raw())

    pickler = Pickler(stream, buffer_callback=keep)
    pickler.dump(value)
    # A copy: while a view of its buffer exists, Python 3.13 complains at the end of the stream.
    return SerializedCall([memoryview(stream.getvalue()), *buffers], pickler.files)


def _largest_part(fn: Callable, args: tuple) -> tuple[str, int]:
    sizes = {"the call": 0}
    for name, value in _parts_of(fn, args):
        with contextlib.suppress(Exception):  # a part that cannot be pickled has no size
            sizes[name] = sum(part.nbytes for part in _pickle(value).parts)
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


def _captured(function: types.FunctionType) -> dict[str, object]:
    """Return the variables that cloudpickle sends with a function: its closure and globals."""
    captured = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a name that has no value yet
            captured[name] = cell.cell_contents
    if function.__module__ == "__main__":  # the workers import functions of real modules
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                captured[name] = function.__globals__[name]
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
    sent = {}  # the classes that came with this call, by name
    for value in getattr(fn, "__globals__", {}).values():
        if isinstance(value, type):
            sent[value.__qualname__] = value
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

    def write(self, circumstances: Circumstances, parts: list[memoryview]) -> None:
        """Replace the call. No worker may read at this time."""
        # The file: size of the head, head (circumstances and sizes of the parts), the parts.
        head = pickle.dumps((circumstances, [part.nbytes for part in parts]))
        os.ftruncate(self._fd, 0)  # frees the memory of an earlier, larger call
        place = 0
        for part in (_SIZE.pack(len(head)), head, *parts):
            left = memoryview(part).cast("B")
            while left:  # pwrite(2) may write fewer bytes than it is given
                written = os.pwrite(self._fd, left, place)
                left = left[written:]
                place += written

    def read(self) -> Call:
        """Return the call. Its arrays do not share memory with the file."""
        (length,) = _SIZE.unpack(self._read_at(0, _SIZE.size))
        place = _SIZE.size + length
        circumstances, lengths = pickle.loads(self._read_at(_SIZE.size, length))
        parts = []
        for length in lengths:
            parts.append(self._read_at(place, length))
            place += length
        return Call(circumstances, parts)

    def _read_at(self, place: int, length: int) -> bytearray:
        """Read bytes without the file's position, which all workers share after the fork."""
        data = bytearray(length)
        done = 0
        while done < length:
            done += os.preadv(self._fd, [memoryview(data)[done:]], place + done)
        return data


class Surroundings:
    """Detects changes of modules and variables in the kernel, which do not reach the workers."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._modules: dict[str, tuple[str, float]] = {}
        self.changes()

    def changes(self) -> list[str]:
        """Return a line on changed modules and one on changed variables, since the last call."""
        lines = []
        modules = self._changed_modules()
        if modules:
            lines.append(
                f"{', '.join(modules)}: the file has changed, but the workers of the session use "
                "the old code; a new session, or "
                f"cloudpickle.register_pickle_by_value({modules[0]}), uses the new code"
            )
        # Variables that were added, removed or changed.
        names = [
            name
            for name in sorted({*self._environ, *os.environ})
            if self._environ.get(name) != os.environ.get(name)
        ]
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
            is_library = not file or file.startswith(_LIBRARIES) or "site-packages" in file
            if is_library or name in by_value:
                continue
            with contextlib.suppress(OSError):
                now = file, os.stat(file).st_mtime
                if self._modules.setdefault(name, now) != now:
                    self._modules[name] = now
                    changed.append(name)
        return changed
