"""Read the code cells of a notebook or a script, and write them back without other changes.

json.loads does not return the position of a string in the file. The decoder here does, so that a
fixed cell replaces only its own lines.
"""

import io
import itertools
import json
import os
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

# Folders of installed or built files, as ruff skips them; other environments have one of the marks.
_SKIPPED = {"site-packages", "dist-packages", "node_modules", "__pypackages__"}
_SKIPPED |= {"build", "_build", "dist", "venv"}
_MARKS = ("pyvenv.cfg", "conda-meta")
# json, tokenize and ast raise all of these for damaged files.
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, SyntaxError, RecursionError)
_UNREADABLE += (AttributeError,)
_FIXES = {".ipynb": "open it in Jupyter and save it", ".py": "save it as UTF-8"}


class _Placed(str):
    """A string with its position in the JSON text, quotes included."""

    start: int
    end: int


def _placed(text: str, end: int, strict: bool = True) -> tuple[_Placed, int]:
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
    """A notebook or a script: the `texts` of its code cells, and their `numbers` from 1.

    The numbers include Markdown cells. A script has one text, with the number None.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise PathNotFoundError(
                f"there is no file {path}", fix=f"pass a path relative to {Path.cwd()}"
            )
        if path.suffix not in _FIXES:
            fix = "a file .ipynb or .py, or a folder"
            raise InvalidValueError(f"{path} is not a notebook and not a script", fix=fix)
        self.path = path
        self.texts: list[str] = []
        self.numbers: list[int | None] = []
        self._cells: list[list[_Placed]] = []  # the lines of each code cell
        try:
            self._read(path.read_bytes())
        except _UNREADABLE as error:
            fix = _FIXES[path.suffix]
            raise InvalidValueError(f"{path} cannot be read", found=error, fix=fix) from error

    def _read(self, data: bytes) -> None:
        # The encoding of a script stands in its first lines; JSON is UTF-8.
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
        """Return the file with new texts; everything else is the same, byte by byte."""
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
        """Return the JSON of a cell's new text, with the old JSON of each line that stays."""
        known = {str(line): self._text[line.start : line.end] for line in lines}
        is_ascii = "".join(known.values()).isascii()
        if len(lines) == 1:  # a cell may be a string instead of a list
            return json.dumps(new, ensure_ascii=is_ascii)
        for line in split_lines(new):
            known.setdefault(line, json.dumps(line, ensure_ascii=is_ascii))
        between = self._text[lines[0].end : lines[1].start]
        return between.join(map(known.__getitem__, split_lines(new)))


def _is_python(book: object) -> bool:
    """Return whether a notebook is in Python, or does not name its language."""
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
    """Give each file once, and the notebooks and scripts in folders.

    `skipped` receives the folders that are not searched, but hidden folders are not listed.
    `errors` receives an error for each folder that cannot be read.
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
        errors.append(SystemFailureError(fact, fix=f"chmod u+rx {error.filename}"))

    for place, folders, names in os.walk(folder, onerror=refuse):
        visible = [Path(place, name) for name in sorted(folders) if not name.startswith(".")]
        environments = list(filter(_is_skipped, visible))
        skipped += environments
        folders[:] = [inner.name for inner in visible if inner not in environments]
        for name in sorted(names):
            file = Path(place, name)
            if file.suffix in _FIXES and not name.startswith(".") and file.is_file():
                yield file


def _is_skipped(folder: Path) -> bool:
    return folder.name in _SKIPPED or any((folder / mark).exists() for mark in _MARKS)
