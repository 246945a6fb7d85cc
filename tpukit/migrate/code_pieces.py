"""The code of a file in pieces: its cells, the scripts that cells write, and the cells that stand in strings."""

import ast
import itertools
import re
import warnings
from dataclasses import dataclass, field

from tpukit.migrate.magics import FILES, SHELLS, is_python, magic_of, mask, shell_lines, split_lines

_MOST_BROKEN = 25  # lines of one cell that are set aside, each after a try of the parser


@dataclass(eq=False)
class Piece:
    """A piece of code: its text, its Python (empty for a shell cell), its shell lines by number.

    It stands in a cell, numbered from 1 with Markdown (None in a script), which is the file's code cell `index`.
    There it begins at `start`, `above` lines down. A cell inside a string has the string's line as its fixed line.
    """

    text: str
    cell: int | None
    index: int
    start: int = 0
    above: int = 0
    fixed_line: int = 0
    tree: ast.Module = field(default_factory=lambda: ast.Module(body=[], type_ignores=[]))
    shell: dict[int, str] = field(default_factory=dict)
    broken: list[tuple[int, str, str]] = field(default_factory=list)  # line, text and message of what is no Python

    def __post_init__(self):
        self._lines = split_lines(self.text) or [""]
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]

    @property
    def is_fixable(self) -> bool:
        """Whether all of it is Python, and stands in the file as it is."""
        return not self.broken and not self.fixed_line

    def offset(self, line: int, column: int) -> int:
        """Return where in the text a position of the parser is, whose columns count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode(errors="ignore"))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends in the text."""
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def parse(self) -> None:
        """Read the piece as Python; a line that is not Python is set aside, and the others are read without it."""
        lines, self.shell = mask(self.text)
        while len(self.broken) < _MOST_BROKEN:
            try:
                with warnings.catch_warnings(action="ignore"):  # such as "\\d" in a string: the author's own
                    self.tree = ast.parse("\n".join([*lines, ""]))
                return
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                at = min(getattr(error, "lineno", None) or 1, len(lines))
                full = [number for number in range(at, 0, -1) if lines[number - 1].strip() not in ("", "pass")]
                line = full[0] if full else at
                self.broken.append((line, self._lines[line - 1].strip()[:100], str(error.args[0])))
                lines[line - 1] = re.match(r"\s*", lines[line - 1])[0] + "pass"


def pieces_of(texts: list[str], numbers: list[int | None]) -> list[list[Piece]]:
    """Return the pieces in groups; the pieces of a group share their names."""
    groups: list[list[Piece]] = [[]]
    for index, (text, number) in enumerate(zip(texts, numbers, strict=True)):
        piece = Piece(text, number, index)
        _read(piece, *(magic_of(text) if number is not None else ("", "")), groups)
        for node in ast.walk(piece.tree):  # nbconvert's get_ipython().run_cell_magic("time", "", "...")
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "run_cell_magic":
                values = [str(getattr(one, "value", "")) for one in node.args]
                if len(values) == 3:
                    inner = Piece(values[2], number, index, fixed_line=node.lineno + piece.above)
                    _read(inner, values[0], values[1], groups)
    return groups


def _read(piece: Piece, magic: str, rest: str, groups: list[list[Piece]]) -> None:
    if magic in SHELLS:
        piece.shell = shell_lines(piece.text)
    elif magic in FILES and rest.endswith(".py"):
        groups.append([_without_magic(piece)])
        return
    elif is_python(magic):
        piece.parse()
    groups[0].append(piece)


def _without_magic(piece: Piece) -> Piece:
    """Return the script that a `%%writefile` cell writes."""
    head = re.match(r"(\s*%%[^\r\n]*(\r\n|\r|\n|$))?", piece.text)[0]
    above = len(split_lines(head))
    script = Piece(piece.text[len(head) :], piece.cell, piece.index, len(head), above, piece.fixed_line)
    script.parse()
    return script
