"""What a worker prints, as the kernel reads it: whole lines, floods cut short, nothing lost at the end."""

import os
import time
from collections import deque
from collections.abc import Iterator

_LINES_PER_SECOND = 500  # of one process; a browser that has to lay out a hundred thousand lines stops answering
_LAST_LINES = 200  # kept for the report of a process that died without a word
_READ = 1 << 16
_MOST_READS = 16  # per look: a process that never stops printing must not keep the kernel from the others
_LONGEST_LINE = 1 << 16  # bytes; what is longer is shown in pieces
_SECONDS_BETWEEN_STATES = 10.0  # of a line that is written over and over, as progress bars do


class WorkerOutput:
    """The kernel's end of a worker's standard output and error."""

    def __init__(self, fd: int):
        self.fd, self.closed = fd, False
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._line = bytearray()  # what has arrived of a line that is not complete
        self._shown = self._hidden = 0
        self._second = 0
        self._next_state = time.monotonic() + _SECONDS_BETWEEN_STATES
        os.set_blocking(fd, False)

    def lines(self) -> Iterator[str]:
        """Yield the lines that are complete by now, and now and then the state of one that is written over."""
        for _ in range(_MOST_READS):
            if self.closed:
                return
            try:
                data = os.read(self.fd, _READ)
            except BlockingIOError:
                break
            self.closed = not data
            yield from self._within_limit(self._complete(data))
        if b"\r" in self._line and time.monotonic() >= self._next_state:
            self._next_state = time.monotonic() + _SECONDS_BETWEEN_STATES
            yield _text(self._line)

    def rest(self) -> Iterator[str]:
        """Yield at the end of a run what is left: a line without an end, and how many lines were not shown."""
        if self._line:
            yield from self._within_limit(self._cut(len(self._line)))
        yield from self._count_hidden()

    def last_lines(self) -> str:
        """Return what a dying process printed last; of a crash, the lines around Python's own word of it."""
        last = list(self._last)
        crash = next((n for n, line in enumerate(last) if line.startswith("Fatal Python error")), None)
        return "\n".join(last[-20:] if crash is None else last[max(0, crash - 10) : crash + 10])

    def close(self) -> None:
        """Close the pipe."""
        self.closed = True
        os.close(self.fd)

    def _complete(self, data: bytes) -> list[str]:
        """Add what was read, and return the lines that it completes."""
        *ended, rest = data.split(b"\n")
        lines = []
        for part in ended:
            self._line += part
            lines += self._cut(len(self._line))
        self._line += rest
        while len(self._line) > _LONGEST_LINE:
            lines += self._cut(_LONGEST_LINE)
        if self.closed and self._line:
            lines += self._cut(len(self._line))
        return lines

    def _cut(self, size: int) -> list[str]:
        """Take so many bytes off the line under way, as a line of its own."""
        text = _text(self._line[:size])
        del self._line[:size]
        self._last.append(text)
        return [text]

    def _within_limit(self, lines: list[str]) -> Iterator[str]:
        second = int(time.monotonic())
        if second != self._second:
            yield from self._count_hidden()
            self._second, self._shown = second, 0
        room = max(0, _LINES_PER_SECOND - self._shown)
        yield from lines[:room]
        self._shown += len(lines[:room])
        self._hidden += len(lines[room:])

    def _count_hidden(self) -> Iterator[str]:
        if self._hidden:
            yield f"... {self._hidden:,} lines more, over {_LINES_PER_SECOND} a second, are not shown"
            self._hidden = 0


def _text(line: bytes | bytearray) -> str:
    """Return a line as text; of one that was written over, the last state."""
    return line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
