"""Send any picklable value from a worker to the kernel through a pipe, completely or not at all.

    serialize({"loss": tensor})    [pickle without the numbers, the tensor's bytes]
    on the pipe                    count = 2 | length, length | part | part
    Receiver                       reads each part into the memory that the tensor then uses

So the kernel never has two copies of a large tensor or array.
"""

import io
import os
import pickle
import struct
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

from tpukit.essentials.display import TpukitError
from tpukit.essentials.launcher.signals import without_interrupts

# The header of a message: the number of its parts, then the size of each in bytes.
_COUNT = struct.Struct("!I")
_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20  # bytes per read at most; a smaller pickle is written together with its header
_DEEPEST = 20  # levels to which a value is searched for the part that cannot be pickled


class SerializationError(TpukitError, TypeError):
    """A value cannot be pickled, so it cannot be sent to another process."""


class Sender:
    """The worker's end of a pipe, which several threads may use.

    Attributes:
        fd: the file descriptor of the pipe.
        lock: locked while a thread writes a message.
    """

    def __init__(self, fd: int):
        self.fd = fd
        self.lock = threading.Lock()

    def send(self, value: object) -> None:
        """Write a message; wait for the reader while the pipe is full.

        Raises:
            SerializationError: a part of `value` cannot be pickled; nothing was written.
        """
        parts = serialize(value)
        lengths = [_LENGTH.pack(part.nbytes) for part in parts]
        header = _COUNT.pack(len(parts)) + b"".join(lengths)
        pieces = [header, *parts]
        if len(parts[0]) < _CHUNK:
            # In one piece, because Linux writes up to 4 KiB at once or not at all (pipe(7),
            # PIPE_BUF). While only a part of a message has arrived, the watchdog reports no hang.
            pieces = [header + parts[0], *parts[1:]]
        with self.lock, without_interrupts():  # after half a message, no later one is readable
            for piece in map(memoryview, pieces):
                while piece:
                    written = os.write(self.fd, piece)
                    piece = piece[written:]


class Receiver:
    """The kernel's end of a pipe. It never waits for the rest of a message.

    Attributes:
        fd: the file descriptor of the pipe.
        closed: True once the pipe has ended.
        in_message: True if a part of a message has arrived, and the rest has not.
    """

    def __init__(self, fd: int):
        self.fd = fd
        self.closed = False
        self.in_message = False
        self._messages = self._parse()
        self._wanted = next(self._messages)
        os.set_blocking(fd, False)

    def receive(self) -> Iterator[object]:
        """Yield the messages that have arrived completely.

        For a message that cannot be unpickled, it yields the exception.
        """
        while not self.closed:
            try:
                count = os.readv(self.fd, [self._wanted[:_CHUNK]])
            except BlockingIOError:
                return
            if count == 0:
                self.closed = True
                return
            self._wanted = self._wanted[count:]
            self.in_message = True
            # The buffer is full: get the next buffer, or the parts of a complete message.
            while not self._wanted:
                parts = next(self._messages)
                if isinstance(parts, memoryview):
                    self._wanted = parts
                    continue
                self.in_message = False
                try:
                    yield deserialize(parts)
                except Exception as error:  # a user's __setstate__ may raise anything
                    yield error
                self._wanted = next(self._messages)

    def close(self) -> None:
        """Close the pipe; messages that were not read are lost."""
        self.closed = True
        os.close(self.fd)

    @staticmethod
    def _parse() -> Iterator[memoryview | list[bytearray]]:
        """Yield each buffer that must be filled next, then the list of a message's parts.

        Every part is read into the memory that its array will use, so an array of 500 MB is never
        in memory twice.
        """
        while True:
            header = bytearray(_COUNT.size)
            yield memoryview(header)
            (count,) = _COUNT.unpack(header)
            lengths = bytearray(_LENGTH.size * count)
            yield memoryview(lengths)
            parts = [bytearray(length) for (length,) in _LENGTH.iter_unpack(lengths)]
            for part in parts:
                if part:
                    yield memoryview(part)
            yield parts


def serialize(value: object) -> list[memoryview]:
    """Pickle a value; return the pickle, then the memory of each array in the value.

    Raises:
        SerializationError: the value cannot be pickled; the message names the part of the value.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:  # __reduce__ of a user's class may raise anything
        raise SerializationError(
            f"{_culprit(value)} cannot be pickled: {error}",
            fix="return tensors, arrays, numbers and containers of them",
        ) from error
    return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def deserialize(parts: list[bytearray]) -> object:
    """Return the value from the parts of `serialize`; its arrays use the memory of the parts."""
    return pickle.loads(parts[0], buffers=parts[1:])


class Pickler(pickle.Pickler):
    """Pickles a tensor of any device as its bytes, without its gradient and its history."""

    # torch's own reducers would share memory between processes, or need the device in the kernel.

    def reducer_override(self, value: object) -> object:
        """Return (function, arguments) that rebuild a tensor; NotImplemented for other values."""
        torch = sys.modules.get("torch")  # if torch is not loaded, the value is no tensor
        if torch is None or not isinstance(value, torch.Tensor) or not _has_plain_memory(value):
            return NotImplemented
        host = value.detach().as_subclass(torch.Tensor).cpu()
        # Conjugate and negative views are flags of the tensor, which its bytes do not contain.
        host = host.resolve_conj().resolve_neg().contiguous()
        raw = b""
        if host.numel():
            raw = host.reshape(-1).view(torch.uint8).numpy()
        facts = _TensorFacts(
            dtype=host.dtype,
            shape=tuple(host.shape),
            kind=type(value),
            requires_grad=value.requires_grad and value.is_leaf,
            attributes=vars(value) or None,
        )
        return _tensor, (raw, facts)


_pickler = Pickler


def pickle_with(pickler: type) -> None:
    """Set the pickler class of `serialize` in this process, which is a session's worker."""
    global _pickler
    _pickler = pickler


class _TensorFacts(NamedTuple):
    """A tensor without its numbers."""

    dtype: object
    shape: tuple[int, ...]
    kind: type
    requires_grad: bool
    attributes: dict | None


def _has_plain_memory(tensor) -> bool:
    """Return whether `Pickler` can send a tensor as its bytes; torch pickles other tensors."""
    import torch

    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return False
    # A subclass with its own dispatch contains other tensors in place of numbers.
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    is_special = tensor.is_nested or tensor.is_quantized or wraps
    return tensor.layout == torch.strided and not is_special


def _tensor(raw, facts: _TensorFacts):
    """Return the tensor with these bytes and facts; unpickling calls it."""
    import torch

    if len(raw):
        tensor = torch.from_numpy(raw).view(facts.dtype).reshape(facts.shape)
    else:
        tensor = torch.empty(facts.shape, dtype=facts.dtype)
    if facts.kind is torch.nn.Parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    elif facts.kind is not torch.Tensor:
        tensor = tensor.as_subclass(facts.kind)
    if facts.attributes:
        vars(tensor).update(facts.attributes)
    return tensor.requires_grad_(facts.requires_grad)


def _culprit(value: object, name: str = "the value", depth: int = 0) -> str:
    """Name the innermost part that cannot be pickled: `the value['model'][0] (a function)`."""
    if depth < _DEEPEST:
        # Pickle each part alone: the first that fails contains the culprit.
        for step, part in _parts_of(value):
            try:
                _pickler(io.BytesIO(), protocol=5, buffer_callback=lambda _: None).dump(part)
            except Exception:
                return _culprit(part, name + step, depth + 1)
    return f"{name} (a {type(value).__name__})"


def _parts_of(value: object) -> list[tuple[str, object]]:
    """Return the parts of a value, each with the code that reads it, such as "['model']"."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, type)
    if has_attributes and not callable(value):
        return [(f".{key}", part) for key, part in vars(value).items()]
    return []
