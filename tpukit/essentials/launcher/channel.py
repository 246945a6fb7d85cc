"""What travels from a worker to the kernel: any picklable value, its tensors as plain bytes, whole or not at all."""

import io
import os
import pickle
import struct
import sys
import threading
from collections.abc import Iterator

from tpukit.essentials.display import TpukitError
from tpukit.essentials.launcher.signals import without_interrupts

_COUNT = struct.Struct("!I")
_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20


class SerializationError(TpukitError, TypeError):
    """A value that cannot be pickled, so cannot leave the process that made it."""


class Sender:
    """The worker's end of a pipe. Threads may share it: each message is written whole.

    Attributes:
        lock: held while a message is written.
    """

    def __init__(self, fd: int):
        self.fd = fd
        self.lock = threading.Lock()

    def send(self, value: object) -> None:
        """Write one message, waiting for the reader where the pipe is full.

        Raises:
            SerializationError: some part of `value` cannot be pickled; nothing was written.
        """
        parts = serialize(value)
        header = _COUNT.pack(len(parts)) + b"".join(_LENGTH.pack(part.nbytes) for part in parts)
        with self.lock, without_interrupts():  # half a message would spoil all that follow it
            # Together, because the system writes up to 4 KiB at once or not at all: a short message is never seen in
            # part, which the watchdog would take for a long one on its way.
            pieces = [header + parts[0], *parts[1:]] if len(parts[0]) < _CHUNK else [header, *parts]
            for piece in map(memoryview, pieces):
                while piece:
                    piece = piece[os.write(self.fd, piece) :]


class Receiver:
    """The kernel's end of a pipe. Never waits: a message that is not complete yet stays where it is.

    Attributes:
        closed: no more can come.
        in_message: a part of a message has arrived, and the rest is on its way.
    """

    def __init__(self, fd: int):
        self.fd = fd
        self.closed = self.in_message = False
        self._messages = self._parse()
        self._wanted = next(self._messages)
        os.set_blocking(fd, False)

    def receive(self) -> Iterator[object]:
        """Yield the messages that are complete by now; `closed` tells when no more can come.

        A message that does not unpickle here is yielded as the exception that says so.
        """
        while not self.closed:
            try:
                count = os.readv(self.fd, [self._wanted[:_CHUNK]])
            except BlockingIOError:
                return
            if count == 0:
                self.closed = True
                return
            self._wanted, self.in_message = self._wanted[count:], True
            while not self._wanted:
                parts = next(self._messages)
                if isinstance(parts, memoryview):
                    self._wanted = parts
                    continue
                self.in_message = False
                try:
                    yield deserialize(parts)
                except Exception as error:  # anything may come out of a user's __setstate__
                    yield error
                self._wanted = next(self._messages)

    def close(self) -> None:
        """Close the pipe; what was not read is lost."""
        self.closed = True
        os.close(self.fd)

    @staticmethod
    def _parse() -> Iterator[memoryview | list[bytearray]]:
        """Yield the buffer to fill next, and after the last one of a message the message's parts.

        Every part is read straight into the memory its array will keep: a 500 MB result is never held twice here.
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
    """Pickle a value into one part and one more for each array in it.

    Raises:
        SerializationError: says which part of the value it is.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RecursionError) as error:
        raise SerializationError(
            f"{_culprit(value)} cannot be pickled: {error}",
            fix="return tensors, arrays, numbers and containers of them",
        ) from error
    return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def deserialize(parts: list[bytearray]) -> object:
    """Make the value again from the parts of `serialize`, its arrays in those very parts."""
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    """Sends a tensor from any device as its bytes: torch's own way would share memory or need the device."""

    def reducer_override(self, value: object) -> object:
        torch = sys.modules.get("torch")  # without torch there is no tensor
        if torch is None or not isinstance(value, torch.Tensor) or not _has_plain_memory(value):
            return NotImplemented
        # Conjugate and negative views are a note beside the numbers, which bytes do not carry.
        host = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        raw = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else b""
        return _tensor, (raw, host.dtype, tuple(host.shape), type(value), value.requires_grad, vars(value) or None)


def _has_plain_memory(tensor) -> bool:
    """Say whether a tensor is its bytes; any other travels torch's own way, its parts as tensors of their own."""
    import torch

    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # holds others in place of numbers
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized or wraps)


def _tensor(raw, dtype, shape: tuple[int, ...], kind: type, trainable: bool, attributes: dict | None):
    import torch

    tensor = torch.from_numpy(raw).view(dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=dtype)
    if kind is torch.nn.Parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=trainable)
    elif kind is not torch.Tensor:
        tensor = tensor.as_subclass(kind)
    if attributes:
        vars(tensor).update(attributes)
    return tensor


def _culprit(value: object, name: str = "the value", depth: int = 0) -> str:
    """Name the innermost part that does not pickle: `the value['model'][0] (a function)`."""
    parts: list[tuple[str, object]] = []
    if isinstance(value, dict):
        parts = [(f"[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"[{index}]", part) for index, part in enumerate(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        parts = [(f".{key}", part) for key, part in vars(value).items()]
    for step, part in parts if depth < 20 else []:
        try:
            _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda _: None).dump(part)
        except Exception:
            return _culprit(part, name + step, depth + 1)
    return f"{name} (a {type(value).__name__})"
