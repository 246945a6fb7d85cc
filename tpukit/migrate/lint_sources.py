"""Read the code cells of a notebook or a script, and write them back without other changes.

`json.loads` does not return the position of a string in the file. The decoder of this module does,
so a fixed cell replaces only its own lines, and the rest of the file is the same to the byte.
"""

import io
import itertools
import json
import os
import shlex
import tokenize
from collections.abc import Iterator
from json.decoder import scanstring
from json.scanner import py_make_scanner
from pathlib import Path

from tpukit.essentials.display import (
    InvalidValueError,
    PathNotFoundError,
    SystemFailureError,
    TpukitError,
)
from tpukit.migrate.code_pieces import split_lines

# The names of folders with installed or built files; ruff skips the same. An environment under
# another name contains one of the marks.
_SKIPPED = {"site-packages", "dist-packages", "node_modules", "__pypackages__"}
_SKIPPED |= {"build", "_build", "dist", "venv"}
_MARKS = ("pyvenv.cfg", "conda-meta")
# json, tokenize and ast raise all of these for damaged files.
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, SyntaxError, RecursionError)
_UNREADABLE += (AttributeError,)
_FIXES = {".ipynb": "open it in Jupyter and save it", ".py": "save it as UTF-8"}


class _Placed(str):
    """A string with the positions in the JSON text where it starts and ends, with its quotes."""

    start: int
    end: int


def _placed(text: str, end: int, strict: bool = True) -> tuple[_Placed, int]:
    """Read a string of the JSON text, as json's `scanstring` does, and note its position.

    Args:
        text: the whole JSON text.
        end: the position after the opening quote; json gives it this name.
        strict: whether control characters in the string are errors.
    """
    value, after = scanstring(text, end, strict)
    placed = _Placed(value)
    placed.start = end - 1
    placed.end = after
    return placed, after


# Python's decoder gives no positions, so its function for strings is replaced in this instance.
_DECODER = json.JSONDecoder()
_DECODER.parse_string = _placed
_DECODER.scan_once = py_make_scanner(_DECODER)  # the scanner in C would ignore `parse_string`


class LintSource:
    """A notebook or a script as it is on the disk.

    Attributes:
        path: the file.
        data: its bytes.
        texts: the code cells of a notebook, or the one text of a script.
        numbers: the number of each of these cells in the notebook, from 1, with Markdown cells
            counted; [None] for a script.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise PathNotFoundError(
                f"there is no file {path}", fix=f"pass a path relative to {Path.cwd()}"
            )
        if path.suffix not in _FIXES:
            fix = "pass a file that ends in .ipynb or .py, or a folder"
            raise InvalidValueError(f"{path} is not a notebook and not a script", fix=fix)
        self.path = path
        self.texts: list[str] = []
        self.numbers: list[int | None] = []
        self._cells: list[list[_Placed]] = []  # the lines of each code cell
        try:
            self.data = path.read_bytes()
            self._read(self.data)
        except _UNREADABLE as error:
            fix = _FIXES[path.suffix]
            raise InvalidValueError(f"{path} cannot be read", found=error, fix=fix) from error

    def _read(self, data: bytes) -> None:
        # A script may name its encoding in its first two lines; JSON is UTF-8.
        self._encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        self._text = data.decode(self._encoding)
        if self.path.suffix == ".py":
            self.texts = [self._text]
            self.numbers = [None]
            return
        book = _DECODER.decode(self._text)
        if not _is_python(book):
            return
        for number, cell in enumerate(_cells_of(book), start=1):
            source = cell.get("source", cell.get("input", ""))
            lines = source if isinstance(source, list) else [source]
            if cell.get("cell_type") == "code":
                self.texts.append("".join(lines))
                self.numbers.append(number)
                self._cells.append(lines)

    def with_texts(self, texts: list[str]) -> bytes:
        """Return the bytes of the file with new texts; all other bytes are unchanged.

        Args:
            texts: one text for each text of `self.texts`.
        """
        if not self._cells:
            return texts[0].encode(self._encoding)
        out = []
        end = 0
        for lines, old, new in zip(self._cells, self.texts, texts, strict=True):
            if new != old:
                out += [self._text[end : lines[0].start], self._as_json(lines, new)]
                end = lines[-1].end
        return "".join([*out, self._text[end:]]).encode(self._encoding)

    def _as_json(self, lines: list[_Placed], new: str) -> str:
        """Return the JSON of a cell's new text, with the old JSON of each unchanged line."""
        known = {str(line): self._text[line.start : line.end] for line in lines}
        # Some editors escape letters beyond ASCII. New lines do as the old ones of the cell do.
        is_ascii = "".join(known.values()).isascii()
        if len(lines) == 1:  # a cell may be a string instead of a list
            return json.dumps(new, ensure_ascii=is_ascii)
        for line in split_lines(new):
            known.setdefault(line, json.dumps(line, ensure_ascii=is_ascii))
        # The comma, line end and indent between two lines of this cell.
        between = self._text[lines[0].end : lines[1].start]
        return between.join(map(known.__getitem__, split_lines(new)))


def _is_python(book: object) -> bool:
    """Return True if a notebook is in Python, or does not name its language."""
    metadata = book.get("metadata") if isinstance(book, dict) else None
    kernel = metadata.get("kernelspec") if isinstance(metadata, dict) else None
    language = kernel.get("language") if isinstance(kernel, dict) else None
    return language is None or str(language).lower().startswith(("python", "ipython"))


def _cells_of(book: dict) -> list[dict]:
    """Return the cells of a notebook of format 4, or those in the worksheets of format 2 or 3."""
    if not isinstance(book, dict) or not book.keys() & {"cells", "worksheets"}:
        raise ValueError("JSON without cells: it is not a notebook")
    sheets = book.get("worksheets", [book])
    return list(itertools.chain.from_iterable(sheet["cells"] for sheet in sheets))


def files_in(
    paths: list[Path], *, skipped: list[Path], errors: list[TpukitError]
) -> Iterator[Path]:
    """Yield each file, and the notebooks and scripts in each folder; no file twice.

    Args:
        paths: files and folders. A file is yielded whatever its ending, also if it is missing.
        skipped: a list, to which `files_in` adds folders that it does not search, such as Python
            environments. Hidden folders and links to folders are not searched either, but are not
            added.
        errors: a list, to which `files_in` adds an error for each folder that cannot be read.
    """
    seen: set[Path] = set()
    for path in paths:
        for file in _inside(path, skipped, errors) if path.is_dir() else [path]:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                yield file


def _inside(folder: Path, skipped: list[Path], errors: list[TpukitError]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        fact = f"{error.filename} cannot be read: {error.strerror}"
        fix = f"chmod u+rx {shlex.quote(error.filename)}"
        errors.append(SystemFailureError(fact, fix=fix))

    for place, folders, names in os.walk(folder, onerror=refuse):
        visible = [Path(place, name) for name in sorted(folders) if not name.startswith(".")]
        environments = list(filter(_is_skipped, visible))
        skipped += environments
        # os.walk goes on into the folders that this list still contains, in its order.
        folders[:] = [inner.name for inner in visible if inner not in environments]
        for name in sorted(names):
            file = Path(place, name)
            if file.suffix in _FIXES and not name.startswith(".") and file.is_file():
                yield file


def _is_skipped(folder: Path) -> bool:
    """Return True for a folder of installed or built files, or of a Python environment."""
    return folder.name in _SKIPPED or any((folder / mark).exists() for mark in _MARKS)
