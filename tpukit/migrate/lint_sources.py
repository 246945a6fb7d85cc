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

_SUFFIXES = (".ipynb", ".py")
# Folders of installed or built files, as ruff leaves them out; other environments have one of the marks.
_LEFT_OUT = {"site-packages", "dist-packages", "node_modules", "__pypackages__", "build", "_build", "dist", "venv"}
_MARKS = ("pyvenv.cfg", "conda-meta")


class _Placed(str):
    """A string that knows where it stands in its JSON text."""

    start: int
    end: int


class LintSource:
    """A notebook or a script: the `texts` of its code cells, and their `numbers`, from 1, Markdown counted.

    A script has one text, with the number None. A notebook of another language has no texts.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise NoSuchFile(f"there is no file {path}", fix=f"a path from here, {Path.cwd()}")
        if path.suffix not in _SUFFIXES:
            raise WrongValue(f"{path} is not a notebook and not a script", fix="a file .ipynb or .py, or a folder")
        self.path = path
        self.numbers: list[int | None] = [None]
        try:
            data = path.read_bytes()
            self._encoding = "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-8"
            if path.suffix == ".py":
                self._encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
            self._text = data.decode(self._encoding)
            self.texts = [self._text]
            if path.suffix == ".ipynb":
                self._read(json.loads(self._text))
        except (OSError, ValueError, TypeError, LookupError, SyntaxError, RecursionError) as error:
            fix = "open it in Jupyter and save it" if path.suffix == ".ipynb" else "save it as UTF-8"
            raise WrongValue(f"{path} cannot be read", found=error, fix=fix) from error

    def _read(self, book: object) -> None:
        self.texts = []
        self.numbers = []
        for number, cell in enumerate(_cells_of(book), start=1):
            lines = _lines_of(cell)
            if not all(isinstance(one, str) for one in lines):
                raise ValueError(f"cell {number} has no text")
            if cell.get("cell_type") == "code" and _language(book) in ("", "python", "ipython"):
                self.texts.append("".join(lines))
                self.numbers.append(number)

    def with_texts(self, texts: list[str]) -> bytes:
        """Return the file with new texts; all that does not change is the same, byte by byte."""
        if self.numbers == [None]:
            return texts[0].encode(self._encoding)
        decoder = json.JSONDecoder()
        decoder.parse_string = _placed
        book = py_make_scanner(decoder)(self._text, len(self._text) - len(self._text.lstrip()))[0]
        cells = _cells_of(book)
        out: list[str] = []
        end = 0
        for number, old, new in zip(self.numbers, self.texts, texts, strict=True):
            if new != old:
                lines = _lines_of(cells[number - 1])
                is_one_text = isinstance(_source(cells[number - 1]), str)
                out += [
                    self._text[end : lines[0].start],
                    self._as_json(lines, [new] if is_one_text else split_lines(new)),
                ]
                end = lines[-1].end
        return "".join([*out, self._text[end:]]).encode(self._encoding)

    def _as_json(self, lines: list[_Placed], new: list[str]) -> str:
        known = {str(one): self._text[one.start : one.end] for one in lines}
        between = self._text[lines[0].end : lines[1].start] if len(lines) > 1 else ", "
        is_ascii = all(one.isascii() for one in known.values())
        return between.join(known.get(one) or json.dumps(one, ensure_ascii=is_ascii) for one in new)


def _placed(text: str, end: int, strict: bool = True) -> tuple[_Placed, int]:
    value, after = scanstring(text, end, strict)
    placed = _Placed(value)
    placed.start = end - 1
    placed.end = after
    return placed, after


def _cells_of(book: object) -> list[dict]:
    """Return the cells of a notebook of format 4, or of format 2 or 3, which has them in worksheets."""
    cells = book.get("cells") if isinstance(book, dict) else None
    if cells is None and isinstance(book, dict) and isinstance(book.get("worksheets"), list):
        cells = [cell for sheet in book["worksheets"] for cell in sheet["cells"]]
    if not isinstance(cells, list) or not all(isinstance(one, dict) for one in cells):
        raise ValueError("JSON without cells: it is not a notebook")
    return cells


def _source(cell: dict) -> object:
    return cell.get("source", cell.get("input", ""))


def _lines_of(cell: dict) -> list:
    source = _source(cell)
    return source if isinstance(source, list) else [source]


def _language(book: dict) -> str:
    metadata = book.get("metadata")
    for key, name in (("language_info", "name"), ("kernelspec", "language")) if isinstance(metadata, dict) else ():
        if isinstance(entry := metadata.get(key), dict) and entry.get(name):
            return str(entry[name]).lower().rstrip("23")
    return ""


def files_in(paths: list[Path], left_out: list[Path]) -> Iterator[Path]:
    """Give the files once each, and the notebooks and scripts in folders; folders left out go to `left_out`."""
    seen: set[Path] = set()
    for path in paths:
        for one in _inside(path, left_out) if path.is_dir() else [path]:
            if one.resolve() not in seen:
                seen.add(one.resolve())
                yield one


def _inside(folder: Path, left_out: list[Path]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise SystemFailed(f"{error.filename} cannot be read: {error.strerror}", fix=f"chmod u+rx {error.filename}")

    for where, folders, names in os.walk(folder, onerror=refuse):
        here = Path(where)
        skipped = [one for one in sorted(folders) if _is_left_out(here / one)]
        left_out += [here / one for one in skipped if not one.startswith(".")]
        folders[:] = sorted({*folders} - {*skipped})
        for path in (here / name for name in sorted(names)):
            if path.suffix in _SUFFIXES and not path.name.startswith(".") and path.is_file():
                yield path


def _is_left_out(folder: Path) -> bool:
    is_known = folder.name.startswith(".") or folder.name in _LEFT_OUT
    return is_known or any((folder / mark).exists() for mark in _MARKS)
