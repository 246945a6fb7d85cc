"""Files: a notebook or a script as the texts of its code cells, and back with every other byte as it was."""

import codecs
import io
import json
import os
import tokenize
from collections.abc import Iterator
from json.decoder import scanstring
from json.scanner import py_make_scanner
from pathlib import Path

from tpukit.essentials.show import NoSuchFile, SystemFailed, WrongValue
from tpukit.migrate.magics import split_lines

SUFFIXES = (".ipynb", ".py")
# Folders of installed or built files, as ruff leaves them out; a virtual environment is known by its pyvenv.cfg.
LEFT_OUT = {"site-packages", "dist-packages", "node_modules", "__pypackages__", "build", "_build", "dist", "venv"}
_MARKS = ("pyvenv.cfg", "conda-meta")
_AS_JUPYTER = "a notebook, as Jupyter saves it"


class _Placed(str):
    """A string of a JSON text that knows where it stands."""

    start: int
    end: int


class LintSource:
    """A notebook or a script.

    Attributes:
        path: where it is.
        texts: of its code cells, in their order; of a script its one text.
        numbers: of these cells, from 1, Markdown counted; None for a script.
        is_python: whether the notebook's language is Python, or is not named.

    Raises:
        NoSuchFile: it is not there.
        WrongValue: it is not a notebook and not a script, or cannot be decoded.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise NoSuchFile(f"there is no file {path}", fix=f"a path from here, {Path.cwd()}")
        if path.suffix not in SUFFIXES:
            raise WrongValue(f"{path} is not a notebook and not a script", fix="a file .ipynb or .py, or a folder")
        self.path = path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SystemFailed(f"{path} cannot be read: {error}", fix=f"chmod u+r {path}") from error
        self._encoding = self._encoding_of(data)
        try:
            self.text = data.decode(self._encoding)
        except (ValueError, LookupError) as error:
            raise WrongValue(f"{path} cannot be read: {error}", fix="save it as UTF-8") from error
        self.is_python = True
        self._cells: list[tuple[dict, str]] = []
        self.numbers: list[int | None] = [None]
        self.texts = [self.text]
        if path.suffix == ".ipynb":
            self._read_notebook()

    def _encoding_of(self, data: bytes) -> str:
        """Return the encoding that a script names in its first lines, or UTF-8."""
        if data.startswith(codecs.BOM_UTF8):
            return "utf-8-sig"
        if self.path.suffix == ".ipynb":
            return "utf-8"
        try:
            return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        except SyntaxError as error:
            raise WrongValue(f"{self.path} cannot be read: {error}", fix="save it as UTF-8") from error

    def _read_notebook(self) -> None:
        try:
            book = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise WrongValue(f"{self.path} is not JSON: {error}", fix="open it in Jupyter and save it") from error
        cells = _cells_of(book)
        if cells is None:
            raise WrongValue(f"{self.path} is not a notebook", found="JSON without cells", fix=_AS_JUPYTER)
        self.texts = []
        self.numbers = []
        for number, cell in enumerate(cells, start=1):
            key = _key_of(cell)
            if key == "":
                raise WrongValue(f"{self.path} is not a notebook", found=f"cell {number} has no text", fix=_AS_JUPYTER)
            if cell.get("cell_type") == "code":
                self._cells.append((cell, key))
                self.texts.append("".join(cell.get(key, "")))
                self.numbers.append(number)
        self.is_python = _language(book) in ("", "python", "ipython", "python3", "python2")

    def with_texts(self, texts: list[str]) -> bytes:
        """Return the file with new texts; all that does not change is the same, byte by byte."""
        if self.path.suffix == ".py":
            return texts[0].encode(self._encoding)
        decoder = json.JSONDecoder()
        decoder.parse_string = _placed_string
        book = py_make_scanner(decoder)(self.text, len(self.text) - len(self.text.lstrip()))[0]
        cells = [one for one in _cells_of(book) if one.get("cell_type") == "code"]
        out: list[str] = []
        end = 0
        for cell, old, new in zip(cells, self.texts, texts, strict=True):
            if new != old:
                source = cell[_key_of(cell)]
                parts = [source] if isinstance(source, str) else source
                out += [self.text[end : parts[0].start], self._json_of(parts, old, new, is_list=parts is source)]
                end = parts[-1].end
        return "".join([*out, self.text[end:]]).encode(self._encoding)

    def _json_of(self, parts: list[_Placed], old: str, new: str, *, is_list: bool) -> str:
        """Return the new text of a cell as JSON, in the lines of the old one if it was a list of lines."""
        raw = self.text[parts[0].start : parts[-1].end]
        is_ascii = raw.isascii()
        if not is_list:
            return json.dumps(new, ensure_ascii=is_ascii)
        between = self.text[parts[0].end : parts[1].start] if len(parts) > 1 else ", "
        known = {str(one): self.text[one.start : one.end] for one in parts}
        lines = [known.get(one) or json.dumps(one, ensure_ascii=is_ascii) for one in split_lines(new)]
        return between.join(lines)


def _placed_string(text: str, end: int, strict: bool = True) -> tuple[_Placed, int]:
    value, after = scanstring(text, end, strict)
    placed = _Placed(value)
    placed.start = end - 1
    placed.end = after
    return placed, after


def _cells_of(book: object) -> list[dict] | None:
    """Return the cells of a notebook of format 4, or of format 2 or 3, which has them in worksheets."""
    if not isinstance(book, dict):
        return None
    cells = book.get("cells")
    if cells is None and isinstance(book.get("worksheets"), list):
        sheets = [one.get("cells", []) for one in book["worksheets"] if isinstance(one, dict)]
        cells = sum((one for one in sheets if isinstance(one, list)), [])
    if not isinstance(cells, list) or not all(isinstance(one, dict) for one in cells):
        return None
    return cells


def _key_of(cell: dict) -> str:
    """Return the key of a cell's text, "" if what stands there is no text."""
    key = "input" if "input" in cell and "source" not in cell else "source"
    text = cell.get(key, "")
    lines = text if isinstance(text, list) else [text]
    return key if all(isinstance(one, str) for one in lines) else ""


def _language(book: dict) -> str:
    metadata = book.get("metadata")
    for key in ("language_info", "kernelspec") if isinstance(metadata, dict) else ():
        entry = metadata.get(key)
        name = entry.get("name" if key == "language_info" else "language", "") if isinstance(entry, dict) else ""
        if isinstance(name, str) and name:
            return name.lower()
    return ""


def files_in(paths: list[Path], left_out: list[Path]) -> Iterator[Path]:
    """Give the files, and the notebooks and scripts in the folders; what is skipped is added to `left_out`.

    Hidden folders and files, virtual environments and installed packages in a folder are skipped.
    """
    seen: set[Path] = set()
    for path in paths:
        for one in _inside(path, left_out) if path.is_dir() else [path]:
            if one.resolve() not in seen:
                seen.add(one.resolve())
                yield one


def _inside(folder: Path, left_out: list[Path]) -> Iterator[Path]:
    for where, folders, names in os.walk(folder, onerror=_refuse):
        here = Path(where)
        skipped = [one for one in sorted(folders) if is_left_out(here / one)]
        left_out += [here / one for one in skipped if not one.startswith(".")]
        folders[:] = [one for one in sorted(folders) if one not in skipped]
        for name in sorted(names):
            path = here / name
            if path.suffix in SUFFIXES and not name.startswith(".") and path.is_file():
                yield path


def _refuse(error: OSError) -> None:
    raise SystemFailed(f"{error.filename} cannot be read: {error.strerror}", fix=f"chmod u+rx {error.filename}")


def is_left_out(folder: Path) -> bool:
    """Return whether a folder is hidden, a virtual environment, or one of installed or built files."""
    if folder.name.startswith(".") or folder.name in LEFT_OUT:
        return True
    return any((folder / mark).exists() for mark in _MARKS)
