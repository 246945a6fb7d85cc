"""Files: a notebook or a script as its cells, and back with everything else as it was."""

import json
from pathlib import Path

from tpukit.essentials.show import NoSuchFile, WrongValue

_KIT_CELL = Path(__file__).with_name("first_cell.txt")


class OldFile:
    """A notebook or a script.

    Attributes:
        path: where it is.
        texts: of its code cells, in their order; of a script its one text.
        numbers: of these cells, from 1, Markdown counted; None for a script.

    Raises:
        NoSuchFile: it is not there.
        WrongValue: it is no notebook and no script, or a notebook of a format before 4.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise NoSuchFile(f"there is no file {path}", fix=f"the path from here, {Path.cwd()}")
        if path.suffix not in (".ipynb", ".py"):
            raise WrongValue(f"{path} is no notebook and no script", fix="a file .ipynb or .py, or a folder of them")
        try:
            text = path.read_bytes().decode()
            self._book = json.loads(text.removeprefix("\ufeff")) if path.suffix == ".ipynb" else None
        except ValueError as error:  # of either: it is no UTF-8, or no JSON
            fix = "open it in Jupyter and save it again" if path.suffix == ".ipynb" else "save it as UTF-8"
            raise WrongValue(f"{path} cannot be read: {error}", fix=fix) from error
        self.path = path
        if self._book is None:
            self.texts, self.numbers = [text], [None]
            return
        if not isinstance(self._book, dict) or "cells" not in self._book:
            old = isinstance(self._book, dict) and "worksheets" in self._book
            raise WrongValue(
                f"{path} is a notebook of format {self._book.get('nbformat', 3)}" if old else f"{path} is no notebook",
                found="its cells are in worksheets" if old else "JSON without cells",
                fix=f"jupyter nbconvert --to notebook {path}" if old else "a notebook, as Jupyter saves it",
            )
        if not _are_cells(self._book["cells"]):
            fix = "a notebook, as Jupyter saves it"
            raise WrongValue(f"{path} is no notebook", found="a cell without a text", fix=fix)
        self._cells = [one for one in enumerate(self._book["cells"], start=1) if one[1].get("cell_type") == "code"]
        self.texts, self.numbers = [_source(cell) for _, cell in self._cells], [number for number, _ in self._cells]

    def with_texts(self, texts: list[str], *, kit_before: int | None = None) -> str:
        """Return the file with new texts; `kit_before` is the number of the cell before which the kit's first goes."""
        if self._book is None:
            return texts[0]
        book = json.loads(json.dumps(self._book))
        for (number, _), text in zip(self._cells, texts, strict=True):
            cell = book["cells"][number - 1]
            if text != _source(cell):
                cell["source"] = text if isinstance(cell["source"], str) else text.splitlines(keepends=True)
            cell["outputs"], cell["execution_count"] = [], None  # they are of a run on another machine
        if kit_before is not None:
            cell = {"cell_type": "code", "execution_count": None, "id": "tpukit-first-cell", "metadata": {}}
            cell |= {"outputs": [], "source": first_cell().splitlines(keepends=True)}
            if book.get("nbformat_minor", 0) < 5:  # where a cell has no name
                del cell["id"]
            book["cells"].insert(kit_before - 1, cell)
        return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def first_cell() -> str:
    """Return the cell that finds the kit or installs it, the same as in the kit's notebooks."""
    return _KIT_CELL.read_text().replace("ADDRESS", "").rstrip("\n")


def _are_cells(cells: object) -> bool:
    texts = (
        [one.get("source", "") if isinstance(one, dict) else None for one in cells] if isinstance(cells, list) else [0]
    )
    return all(
        isinstance(one, str) or (isinstance(one, list) and all(isinstance(x, str) for x in one)) for one in texts
    )


def _source(cell: dict) -> str:
    return "".join(cell.get("source", ""))


def files_in(paths: list[Path]) -> list[Path]:
    """Return the files, and of folders the notebooks and scripts in them that are not migrated already."""
    found = []
    for path in paths:
        inside = sorted(one for one in path.rglob("*") if one.suffix in (".ipynb", ".py")) if path.is_dir() else [path]
        found += [one for one in inside if not path.is_dir() or not _is_left_out(one.relative_to(path))]
    return found


def _is_left_out(path: Path) -> bool:
    return path.stem.endswith(".tpukit") or any(part.startswith(".") for part in path.parts)
