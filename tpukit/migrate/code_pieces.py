"""The code of a file in pieces: its cells, the scripts that cells write, and cells inside strings.

A magic or a shell line is recognised because Python's parser refuses it. A placeholder of the
same line takes its place, so that the positions of all other code do not change:

    %matplotlib inline          pass
    %time step()                if 1: step()
    files = !ls \\               files = None
        -l                      (empty)
"""

import ast
import itertools
import re
import warnings
from dataclasses import dataclass, field

# Cell magics by the contents of their cell.
_SHELLS = {"bash", "sh", "shell", "script", "cmd", "system", "sx"}
_FILES = {"writefile", "file"}
_TEXTS = {"html", "HTML", "javascript", "js", "latex", "markdown", "svg", "perl", "ruby", "cython"}
_NOT_PYTHON = _SHELLS | _FILES | _TEXTS | {"R", "sql"}
_MOST_BROKEN = 25  # per cell; each line that Python refuses costs another run of the parser
# "%%time", "%%bash -e": the name and the rest of the line.
_CELL_MAGIC = re.compile(r"\s*%%(\w+)[ \t]*(.*)")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$")  # `splitlines` also splits at a form feed
# "!ls", "%matplotlib inline", "?print", "print??".
_MAGIC = re.compile(r"\s*[!%]|\s*\?{1,2}[\w.*]+\s*$|\s*[\w.]+\?{1,2}\s*$")
# "files = !ls", "a, b = %magic".
_ASSIGNED = re.compile(r"(\s*[\w.]+(?:\s*,\s*[\w.]+)*\s*=\s*)[!%]")
# "%time model(x)": Python follows the magic, and is checked.
_RUNS_CODE = re.compile(r"(\s*)(%(?:time|timeit|prun|memit)\s+)(?=[A-Za-z_])")
_SHELL_LINE = re.compile(r"(?:[^\n]*\\\r?\n)*[^\n]+")  # with the lines after a backslash


def split_lines(text: str) -> list[str]:
    """Return the lines as Python counts them, each with its end."""
    return _LINE.findall(text)


@dataclass(eq=False)
class Piece:
    """A piece of code: its `text`, its `tree`, and its magics and shell lines by number.

    It is the file's code cell `index`, with the number `cell` if Markdown counts (None in a
    script). A cell inside a string reports the line of the string, `fixed_line`.
    """

    text: str
    cell: int | None = None
    index: int = 0
    fixed_line: int = 0
    tree: ast.Module = field(default_factory=lambda: ast.Module(body=[], type_ignores=[]))
    shell: dict[int, str] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)  # the parser's message, by line

    def __post_init__(self):
        self.lines = split_lines(self.text) or [""]
        self._starts = [0, *itertools.accumulate(map(len, self.lines))]

    @property
    def is_fixable(self) -> bool:
        """Whether all of it is Python, and the file contains it as it is."""
        return not self.broken and not self.fixed_line

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the first and the last position of a node in the text."""
        first = self._offset(node.lineno, node.col_offset)
        return first, self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        encoded = self.lines[line - 1].encode()[:column]  # columns of the parser count bytes
        return self._starts[line - 1] + len(encoded.decode(errors="ignore"))

    def parse(self) -> None:
        """Read the piece as Python, without its magics and the lines that Python refuses."""
        lines = [line.rstrip("\r\n") for line in self.lines]
        while len(self.broken) < _MOST_BROKEN:
            try:
                with warnings.catch_warnings(action="ignore"):  # such as "\\d" in a string
                    self.tree = ast.parse("\n".join([*lines, ""]))
                return
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                number = min(getattr(error, "lineno", None) or 1, len(lines))
                # Python may refuse the end of a block: the reason is the last line that has code.
                while number and lines[number - 1].strip() in ("", "pass"):
                    number -= 1
                if number == 0:
                    return
                self._set_aside(lines, number, message=str(error.args[0]))

    def _set_aside(self, lines: list[str], number: int, *, message: str) -> None:
        """Replace a line that the parser refused with a placeholder."""
        line = lines[number - 1]
        indent = re.match(r"\s*", line)[0]
        assigned = _ASSIGNED.match(line)
        if runs_code := _RUNS_CODE.match(line):
            # As wide as the magic, so that columns stay as they are.
            ones = "1" * (len(runs_code[2]) - len("if : "))
            lines[number - 1] = f"{indent}if {ones}: {line[runs_code.end() :]}"
        elif assigned or _MAGIC.match(line):
            self.shell[number] = _SHELL_LINE.match("\n".join(lines[number - 1 :]))[0]
            following = self.shell[number].count("\n")
            lines[number : number + following] = [""] * following
            lines[number - 1] = f"{assigned[1]}None" if assigned else f"{indent}pass"
        else:
            self.broken[number] = message
            lines[number - 1] = f"{indent}pass"


def pieces_of(texts: list[str], numbers: list[int | None]) -> list[list[Piece]]:
    """Return the pieces in groups; the pieces of a group share one namespace."""
    shared: list[Piece] = []
    groups = [shared]
    waiting = [Piece(*row) for row in zip(texts, numbers, range(len(texts)), strict=True)]
    for piece in waiting:
        magic = _CELL_MAGIC.match(piece.text) or ["", "", ""]
        is_script = numbers == [None] and not piece.fixed_line
        is_written = magic[1] in _FILES and magic[2].strip().endswith(".py")
        if is_written:
            groups.append([piece])
        else:
            shared.append(piece)
        if magic[1] in _SHELLS:
            for found in _SHELL_LINE.finditer(piece.text):
                piece.shell[piece.text.count("\n", 0, found.start()) + 1] = found[0]
        if is_script or is_written or magic[1] not in _NOT_PYTHON:
            piece.parse()
        waiting += _cells_in_strings(piece)
    return groups


def _cells_in_strings(piece: Piece) -> list[Piece]:
    """Return the cells of nbconvert's get_ipython().run_cell_magic("time", "", "...")."""
    found = []
    for node in ast.walk(piece.tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "run_cell_magic":
            values = [str(getattr(value, "value", "")) for value in node.args]
            text = f"%%{' '.join(values[:2])}\n{''.join(values[2:])}"
            found.append(Piece(text, piece.cell, piece.index, piece.fixed_line or node.lineno))
    return found
