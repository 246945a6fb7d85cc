"""Write logged rows during a run, `launch(..., loggers=...)`: a function, TensorBoard or CSV."""

import csv
import importlib.util
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from tpukit.essentials.display import InvalidTypeError, NotInstalledError, explain

Row = dict[str, int | float]
Writer = Callable[[Row], object]


class LogWriters:
    """Calls each logger once with every row, in the order of the rows.

    If a logger raises an error, the error is printed, and the logger gets no more rows. A logger
    that is interrupted gets no more rows either, because it may hang, and the kernel must still
    receive the rows of the cores.

    Args:
        loggers: a function of a row, or several such functions; None for none.
        say: function that prints a line.

    Raises:
        TypeError: a logger is not a function.
    """

    def __init__(self, loggers: Writer | Iterable[Writer] | None, say: Callable[[str], None]):
        self._say = say
        if loggers is None:
            loggers = []
        elif not isinstance(loggers, Iterable) or callable(loggers):
            loggers = [loggers]
        self._writers: list[Writer] = list(loggers)
        self._waiting: deque[tuple[Writer, Row]] = deque()
        for writer in self._writers:
            if not callable(writer):
                raise InvalidTypeError(
                    "loggers takes a function of a row, or a list of such functions, got "
                    f"{writer!r}",
                    fix='loggers=print, or loggers=tpukit.training.CsvWriter("log.csv")',
                )

    def add(self, rows: Iterable[Row]) -> None:
        """Store rows until `write` passes them to the loggers."""
        for row in rows:
            self._waiting += [(writer, row) for writer in self._writers]

    def write(self) -> None:
        """Pass all stored rows to the loggers.

        If an interrupt ends this method, the next call passes the rows that were left.
        """
        while self._waiting:
            writer, row = self._waiting.popleft()
            try:
                writer(dict(row))  # a copy, because the logger may change it
            # The logger is the user's function: its error must not end the run.
            except (Exception, KeyboardInterrupt) as error:
                self._writers = [one for one in self._writers if one is not writer]
                self._waiting = deque(pair for pair in self._waiting if pair[0] is not writer)
                self._say(_failed(writer, row, error))
                # The interrupt must also reach the run that it was meant for.
                if isinstance(error, KeyboardInterrupt):
                    raise


def _failed(writer: Writer, row: Row, error: Exception) -> str:
    name = getattr(writer, "__name__", type(writer).__name__)
    if isinstance(error, KeyboardInterrupt):
        return (
            f"loggers={name} was interrupted and gets no more rows; it was given {row}, "
            "and `run.log` has all of them"
        )
    return explain(
        f"loggers={name} raised {type(error).__name__}: {error}; "
        "the run continues without this logger",
        found=f"it was given {row}",
        fix="correct it, and then pass it the rows of `run.log`, which are complete",
    )


class TensorBoardWriter:
    """Writes rows for TensorBoard: `launch(..., loggers=TensorBoardWriter("runs/1"))`.

    Each value of a row becomes a scalar.

    Args:
        folder: the folder of this run. TensorBoard draws a curve per folder.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike):
        if importlib.util.find_spec("tensorboard") is None:
            raise NotInstalledError(
                "TensorBoardWriter needs the package tensorboard, which is not installed",
                fix=(
                    "%pip install tensorboard, then run this cell again; "
                    "or CsvWriter, which needs nothing"
                ),
            )
        from torch.utils.tensorboard import SummaryWriter

        # Not Path(folder), which would change the slashes of a URL.
        self._writer = SummaryWriter(os.path.expanduser(folder))

    def __call__(self, row: Row) -> None:
        """Write a row and flush the file."""
        for name, value in row.items():
            if name != "step":  # the step is the horizontal axis
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()


class CsvWriter:
    """Appends every row to a CSV file: `launch(..., loggers=CsvWriter("log.csv"))`.

    If the file exists, for example after an interruption, rows are added at its end. A resumed run
    repeats the steps after its checkpoint, so these may have two rows. If a row has a new column,
    the whole file is written again, with empty cells for earlier rows in that column.

    Args:
        file: the path of the CSV file; its folder is created if it does not exist.
    """

    def __init__(self, file: str | os.PathLike):
        self._file = Path(file).expanduser()
        self._columns: list[str] | None = None  # None until the file was read

    def __call__(self, row: Row) -> None:
        """Append a row to the file and close the file."""
        is_new = self._columns is None or not self._file.exists()
        if is_new or row.keys() - set(self._columns):
            self._add_columns(row)
        self._write(self._file, "a", [row])

    def _add_columns(self, names: Iterable[str]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        rows: list[dict] = []
        self._columns = []
        if self._file.exists():
            with open(self._file, newline="") as file:
                reader = csv.DictReader(file)
                self._columns = list(reader.fieldnames or ())
                rows = list(reader)
        # New columns come after the old ones; a dict removes duplicates and keeps the order.
        self._columns = list(dict.fromkeys([*self._columns, *names]))
        # Write another file and let it replace the old one: no reader then sees half of the rows.
        whole = self._file.with_name(f"{self._file.name}.new")
        self._write(whole, "w", [{name: name for name in self._columns}, *rows])
        os.replace(whole, self._file)

    def _write(self, path: Path, mode: str, rows: list[dict]) -> None:
        with open(path, mode, newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerows(rows)
