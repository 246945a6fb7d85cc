"""The code of a file in pieces: its cells, the scripts that cells write, and the cells that stand in strings."""

import ast
import re
import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

from tpukit.migrate.magics import FILES, SHELLS, is_python, magic_of, mask, split_lines

MOST_BROKEN = 25  # lines of one cell that are set aside, each after a try of the parser


class Broken(NamedTuple):
    """A line that is not Python, with Python's own message."""

    line: int
    text: str
    message: str


@dataclass(eq=False)
class Piece:
    """A piece of code.

    Attributes:
        text: as it is written, magics included.
        cell: the number of its cell, from 1, Markdown included; None in a script.
        index: the number of its cell among the file's code cells, from 0.
        start: where the piece begins in the text of the cell.
        above: how many lines of the cell stand above it.
        fixed_line: the line to report for all of it; 0 if each line has its own. For a cell that stands in a string.
        tree: its Python; empty for a shell cell.
        shell: its shell lines and magics, by line.
    """

    text: str
    cell: int | None
    index: int
    start: int = 0
    above: int = 0
    fixed_line: int = 0
    tree: ast.Module = field(default_factory=lambda: ast.Module(body=[], type_ignores=[]))
    shell: dict[int, str] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)

    def __post_init__(self):
        lines = split_lines(self.text)
        self._lines = lines
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    @property
    def is_fixable(self) -> bool:
        """Whether an edit of this piece can be written back: all of it is Python that stands in the file as it is."""
        return not self.broken and not self.fixed_line

    def offset(self, line: int, column: int) -> int:
        """Return where in the text a position of the parser is, whose columns count bytes."""
        text = self._lines[line - 1]
        return self._starts[line - 1] + len(text.encode()[:column].decode(errors="ignore"))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends in the text."""
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def parse(self) -> None:
        """Read the piece as Python; a line that is not Python is set aside, and the others are read without it."""
        python, self.shell = mask(self.text)
        lines = python.split("\n")
        while len(self.broken) <= MOST_BROKEN:
            try:
                with warnings.catch_warnings(action="ignore"):  # such as "\\d" in a string: the author's own
                    self.tree = ast.parse("\n".join(lines))
                return
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                line = min(getattr(error, "lineno", None) or 1, len(lines))
                message = str(error.args[0]) if error.args else type(error).__name__
                if lines[line - 1].strip() in ("", "pass"):  # setting it aside again would not help
                    line = next((n for n in range(line, 0, -1) if lines[n - 1].strip() not in ("", "pass")), 1)
                self.broken.append(Broken(line, self._lines[line - 1].strip() if self._lines else "", message))
                indent = re.match(r"\s*", lines[line - 1])[0]
                lines[line - 1] = f"{indent}pass"


def pieces_of(texts: list[str], numbers: list[int | None]) -> list[list[Piece]]:
    """Return the pieces in groups; the pieces of a group share their names."""
    own: list[Piece] = []
    groups = [own]
    for index, (text, number) in enumerate(zip(texts, numbers, strict=True)):
        magic, rest = magic_of(text) if number is not None else ("", "")
        piece = Piece(text, number, index)
        if magic in FILES:
            if rest.endswith(".py"):
                groups.append([_written_file(piece)])
        elif magic in SHELLS:
            piece.shell = dict(_logical_lines(text))
            own.append(piece)
        elif is_python(magic):
            piece.parse()
            own.append(piece)
            own += _inside_strings(piece)
    return groups


def _written_file(cell: Piece) -> Piece:
    """Return the script that a `%%writefile` cell writes."""
    head = re.match(r"\s*%%[^\r\n]*(\r\n|\r|\n|$)", cell.text)[0]
    above = len(split_lines(head))
    inside = Piece(cell.text[len(head) :], cell.cell, cell.index, start=len(head), above=above)
    inside.parse()
    return inside


def _inside_strings(piece: Piece) -> list[Piece]:
    """Return the cells that nbconvert wrote as strings: get_ipython().run_cell_magic("time", "", "...")."""
    found = []
    for node in ast.walk(piece.tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if not is_call or node.func.attr != "run_cell_magic":
            continue
        values = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if len(values) != 3:
            continue
        inner = Piece(values[2], piece.cell, piece.index, fixed_line=node.lineno + piece.above)
        if values[0] in SHELLS:
            inner.shell = dict(_logical_lines(values[2]))
        elif is_python(values[0]):
            inner.parse()
        found.append(inner)
    return found


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines of a shell's text by number, with what follows a backslash."""
    found: list[tuple[int, str]] = []
    goes_on = False
    for number, whole in enumerate(split_lines(text), start=1):
        line = whole.rstrip("\r\n")
        if goes_on:
            first, before = found[-1]
            found[-1] = (first, f"{before}\n{line}")
        else:
            found.append((number, line))
        goes_on = line.endswith("\\")
    return found
