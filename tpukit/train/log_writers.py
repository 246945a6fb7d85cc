"""Where logged rows go while a run lasts: functions of a row, called by the kernel."""

from collections import deque
from collections.abc import Callable, Iterable

from tpukit.essentials.show import explain

Row = dict[str, int | float]
Writer = Callable[[Row], object]


class LogWriters:
    """Hands every row to each of the functions in order, once; one that raises is told once and gets no more rows.

    An interrupt ends the call of a function, which may be what hangs, and it gets no more rows either: the kernel still
    takes in what the cores have sent, and must not be held up a second time.

    Args:
        to: a function of a row, a list of them, or None.
        say: shows a line of text.
    """

    def __init__(self, to: Writer | Iterable[Writer] | None, say: Callable[[str], None]):
        self._say = say
        self._writers: list[Writer] = [to] if callable(to) else list(to or ())
        self._waiting: deque[tuple[Writer, Row]] = deque()
        for writer in self._writers:
            if not callable(writer):
                raise TypeError(f"to takes a function of a row, or a list of such functions, got {writer!r}")

    def add(self, rows: Iterable[Row]) -> None:
        """Take these rows in; `write` hands them on."""
        self._waiting += [(writer, row) for row in rows for writer in self._writers]

    def write(self) -> None:
        """Hand on all rows that wait; after an interrupt, those that were left."""
        while self._waiting:
            writer, row = self._waiting.popleft()
            try:
                writer(dict(row))  # its own copy: the run keeps the row
            except (Exception, KeyboardInterrupt) as error:  # a stranger's code, which must not cost the run
                self._writers = [one for one in self._writers if one is not writer]
                self._waiting = deque(pair for pair in self._waiting if pair[0] is not writer)
                self._say(_failed(writer, row, error))
                if isinstance(error, KeyboardInterrupt):
                    raise


def _failed(writer: Writer, row: Row, error: Exception) -> str:
    name = getattr(writer, "__name__", type(writer).__name__)
    if isinstance(error, KeyboardInterrupt):
        return f"to={name} was interrupted and gets no more rows; it was given {row}, and `run.log` has all of them"
    return explain(
        f"to={name} raised {type(error).__name__}: {error}; the run goes on, and it gets no more rows",
        found=f"it was given {row}",
        fix="correct it, and call it on the rows of `run.log`, which has all of them",
    )
