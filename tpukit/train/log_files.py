"""Functions that write the logged rows of a run into files, for `launch(..., to=...)`: TensorBoard's and CSV."""

import csv
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from tpukit.essentials.show import NotInstalled
from tpukit.train.log_writers import Row


class TensorBoardWriter:
    """Writes every value of a row as a scalar of TensorBoard: `launch(..., to=TensorBoardWriter("runs/1"))`.

    Args:
        folder: of one run; TensorBoard draws the runs of different folders as different curves.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike):
        if importlib.util.find_spec("tensorboard") is None:
            raise NotInstalled(
                "TensorBoardWriter needs the package tensorboard, which is not installed",
                fix="%pip install tensorboard, then run this cell again; or CsvWriter, which needs nothing",
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder)

    def __call__(self, row: Row) -> None:
        """Write a row; it is in the file when this returns."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()


class CsvWriter:
    """Appends every row to a CSV file: `launch(..., to=CsvWriter("log.csv"))`.

    A file that is there is continued, as a run is that was cut off. A column may appear later: the file is then written
    anew, once, with the column empty in the rows before.
    """

    def __init__(self, file: str | os.PathLike):
        self._file = Path(file)
        self._columns: list[str] | None = None  # not yet looked

    def __call__(self, row: Row) -> None:
        """Write a row; it is in the file when this returns."""
        if self._columns is None or row.keys() - set(self._columns):
            self._add_columns(row)
        self._write(self._file, "a", [row])

    def _add_columns(self, names: Iterable[str]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        rows: list[dict] = []
        self._columns = []
        if self._file.exists():
            with open(self._file, newline="") as file:
                reader = csv.DictReader(file)
                self._columns, rows = list(reader.fieldnames or ()), list(reader)
        self._columns = list(dict.fromkeys([*self._columns, *names]))
        whole = self._file.with_name(f"{self._file.name}.new")
        self._write(whole, "w", [{name: name for name in self._columns}, *rows])
        os.replace(whole, self._file)

    def _write(self, path: Path, mode: str, rows: list[dict]) -> None:
        with open(path, mode, newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerows(rows)
