"""Read the standard output and error of a worker: whole lines, at most 500 per second.

    pipe       "loss 0.5\\nlo" "ss 0.4\\n" "\\r 5%\\r 10%"
    lines      "loss 0.5", "loss 0.4", and every ten seconds the state of the bar, " 10%"

If the process dies, the report of its failure has its last lines.
"""

import os
import time
from collections import deque
from collections.abc import Iterator

_LINES_PER_SECOND = 500  # of a process; a browser with a hundred thousand lines stops answering
_LAST_LINES = 200  # stored per process; the report of its death shows a part of them
_LINES_OF_REPORT = 20  # the last ones, if Python has printed no crash report
_LINES_AROUND_CRASH = 10  # before the first line of a crash report, and as many from it on
_READ = 1 << 16  # bytes per read: the capacity of a pipe in Linux
_MOST_READS = 16  # per call of `lines`, so that a process that prints forever delays no other
_LONGEST_LINE = 1 << 16  # bytes; a longer line is shown in pieces
# Between two outputs of a line that its process overwrites, as a progress bar does with "\r".
_SECONDS_BETWEEN_STATES = 10.0


class WorkerOutput:
    """The kernel's end of a worker's standard output and error.

    Attributes:
        fd: the file descriptor of the pipe.
        closed: True once the pipe has ended.
    """

    def __init__(self, fd: int):
        self.fd = fd
        self.closed = False
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._line = bytearray()  # the part of an incomplete line that has arrived
        self._shown = 0  # lines in this second
        self._hidden = 0
        self._second = 0
        self._next_state = time.monotonic() + _SECONDS_BETWEEN_STATES
        os.set_blocking(fd, False)

    def lines(self) -> Iterator[str]:
        """Yield the new complete lines, and every ten seconds the state of a progress bar."""
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
        """Yield the last texts of a run: an incomplete line, and the number of hidden lines."""
        if self._line:
            yield from self._within_limit(self._cut(len(self._line)))
        yield from self._count_hidden()

    def last_lines(self) -> str:
        """Return the last lines; after a crash, the lines around faulthandler's report."""
        last = list(self._last)
        for number, line in enumerate(last):
            if line.startswith("Fatal Python error"):
                begin = max(0, number - _LINES_AROUND_CRASH)
                return "\n".join(last[begin : number + _LINES_AROUND_CRASH])
        return "\n".join(last[-_LINES_OF_REPORT:])

    def forget(self) -> None:
        """Forget the last lines, because they belong to an earlier run of the session."""
        self._last.clear()

    def close(self) -> None:
        """Close the pipe."""
        self.closed = True
        os.close(self.fd)

    def _complete(self, data: bytes) -> list[str]:
        """Add data, and return the lines that it completes."""
        *ended, rest = data.split(b"\n")
        lines = []
        for part in ended:
            self._line += part
            lines += self._cut(len(self._line))
        self._line += rest
        if len(self._line) > _LONGEST_LINE:
            # Remove the states of a bar that its process has overwritten.
            del self._line[: max(0, self._line.rstrip(b"\r").rfind(b"\r"))]
        while len(self._line) > _LONGEST_LINE:
            lines += self._cut(_LONGEST_LINE)
        if self.closed and self._line:
            lines += self._cut(len(self._line))
        return lines

    def _cut(self, size: int) -> list[str]:
        """Take this many bytes off the incomplete line, and return them as a line."""
        text = _text(self._line[:size])
        del self._line[:size]
        self._last.append(text)
        return [text]

    def _within_limit(self, lines: list[str]) -> Iterator[str]:
        second = int(time.monotonic())
        if second != self._second:
            yield from self._count_hidden()
            self._second = second
            self._shown = 0
        allowed = max(0, _LINES_PER_SECOND - self._shown)
        shown = lines[:allowed]
        yield from shown
        self._shown += len(shown)
        self._hidden += len(lines) - len(shown)

    def _count_hidden(self) -> Iterator[str]:
        if self._hidden:
            limit = f"over {_LINES_PER_SECOND} per second"
            yield f"... {self._hidden:,} lines more, {limit}, are not shown"
            self._hidden = 0


def _text(line: bytes | bytearray) -> str:
    """Return a line as text, from its last "\\r" on; a progress bar has one before each state."""
    return line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
