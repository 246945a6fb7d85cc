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
_PROCESSES = {"python", "python2", "python3", "pypy"}  # run by another Python than the notebook's
_TEXTS = {"html", "HTML", "javascript", "js", "latex", "markdown", "svg", "perl", "ruby", "cython"}
_NOT_PYTHON = _SHELLS | _FILES | _TEXTS | {"R", "sql"}
# If a cell has so many lines that are not Python, its names are not checked, because each such line
# costs another run of the parser over the whole cell.
_MOST_BROKEN = 25
# "%%time", "%%bash -e": the name and the rest of the line.
_CELL_MAGIC = re.compile(r"\s*%%(\w+)[ \t]*(.*)")
# `str.splitlines` would also split at a form feed, which Python's parser does not count as an end.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$")
# "!ls", "%matplotlib inline", "?print", "print??".
_MAGIC = re.compile(r"\s*[!%]|\s*\?{1,2}[\w.*]+\s*$|\s*[\w.]+\?{1,2}\s*$")
# "files = !ls", "a, b = %magic".
_ASSIGNED = re.compile(r"(\s*[\w.]+(?:\s*,\s*[\w.]+)*\s*=\s*)[!%]")
# "%time model(x)": Python follows the magic, and is checked.
_RUNS_CODE = re.compile(r"(\s*)(%(?:time|timeit|prun|memit)\s+)(?=[A-Za-z_])")
# A shell command with the lines that continue it after a backslash.
_SHELL_LINE = re.compile(r"(?:[^\n]*\\\r?\n)*[^\n]+")


def split_lines(text: str) -> list[str]:
    """Return the lines of a text as Python counts them, each with its line break."""
    return _LINE.findall(text)


@dataclass(eq=False)
class Piece:
    """A piece of code that is parsed on its own: a cell, a script, or a cell inside a string.

    In scripts from nbconvert, a cell with a magic is a string: the last argument of
    `get_ipython().run_cell_magic`.

    Attributes:
        text: the code as it is in the file.
        cell: the number of its cell in the notebook, from 1, with Markdown cells counted; None in
            a script.
        index: the number of its cell among the code cells of the file, from 0.
        fixed_line: for a cell inside a string, the line on which the string begins; each finding in
            this cell gets the same line. 0 for other pieces.
        tree: the syntax tree, without magics and without the lines that Python refuses; empty if
            Python refuses at least `_MOST_BROKEN` lines.
        shell: the magics and shell commands, by the number of their first line, from 1.
        broken: the parser's message for each line that Python refuses, by the line's number.
    """

    text: str
    cell: int | None = None
    index: int = 0
    fixed_line: int = 0
    tree: ast.Module = field(default_factory=lambda: ast.Module(body=[], type_ignores=[]))
    shell: dict[int, str] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)

    def __post_init__(self):
        self.lines = split_lines(self.text) or [""]
        self._starts = [0, *itertools.accumulate(map(len, self.lines))]

    @property
    def is_fixable(self) -> bool:
        """True if Python accepts every line, and the code is not inside a string."""
        return not self.broken and not self.fixed_line

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the first and the last position of a node in the text."""
        first = self._offset(node.lineno, node.col_offset)
        return first, self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        encoded = self.lines[line - 1].encode()[:column]  # the parser counts columns in bytes
        return self._starts[line - 1] + len(encoded.decode(errors="ignore"))

    def parse(self) -> None:
        """Parse the text, and fill `tree`, `shell` and `broken`.

        The parser reports only the first line that it refuses. So `parse` replaces this line by a
        placeholder, in a copy of the text, and runs the parser again.
        """
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
        """Replace a line that the parser refused with a placeholder, and note what it was.

        Args:
            lines: the lines of the piece without their ends; changed in place.
            number: the number of the refused line, from 1.
            message: the parser's message, which is kept if the line is no magic.
        """
        line = lines[number - 1]
        indent = re.match(r"\s*", line)[0]
        assigned = _ASSIGNED.match(line)
        if runs_code := _RUNS_CODE.match(line):
            # The placeholder is as wide as the magic, so that the columns after it do not change.
            ones = "1" * (len(runs_code[2]) - len("if : "))
            lines[number - 1] = f"{indent}if {ones}: {line[runs_code.end() :]}"
        elif assigned or _MAGIC.match(line):
            self.shell[number] = _SHELL_LINE.match("\n".join(lines[number - 1 :]))[0]
            # The lines after a backslash belong to the shell. They become empty instead of
            # vanishing, so that the numbers of the lines below do not change.
            following = self.shell[number].count("\n")
            lines[number : number + following] = [""] * following
            lines[number - 1] = f"{assigned[1]}None" if assigned else f"{indent}pass"
        else:
            self.broken[number] = message
            lines[number - 1] = f"{indent}pass"


def pieces_of(texts: list[str], numbers: list[int | None]) -> list[list[Piece]]:
    """Return the pieces of a file, parsed, in groups; the pieces of a group share one namespace.

    Args:
        texts: the code cells of a notebook, or the one text of a script.
        numbers: the number of each cell in the notebook; [None] for a script.
    """
    shared: list[Piece] = []
    groups = [shared]
    waiting = [Piece(*row) for row in zip(texts, numbers, range(len(texts)), strict=True)]
    for piece in waiting:
        magic = _CELL_MAGIC.match(piece.text) or ["", "", ""]
        is_script = numbers == [None] and not piece.fixed_line
        is_written = magic[1] in _FILES and magic[2].strip().endswith(".py")
        if is_written or magic[1] in _PROCESSES:  # it runs in another process, and shares no names
            groups.append([piece])
        else:
            shared.append(piece)
        if magic[1] in _SHELLS:
            for found in _SHELL_LINE.finditer(piece.text):
                piece.shell[piece.text.count("\n", 0, found.start()) + 1] = found[0]
        if is_script or is_written or magic[1] not in _NOT_PYTHON:
            piece.parse()
        waiting += _cells_in_strings(piece)  # the loop goes on through these, however deep
    return groups


def _cells_in_strings(piece: Piece) -> list[Piece]:
    """Return the cells that nbconvert wrote as get_ipython().run_cell_magic("time", "", "...")."""
    found = []
    for node in ast.walk(piece.tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "run_cell_magic":
            values = [str(getattr(value, "value", "")) for value in node.args]
            text = f"%%{' '.join(values[:2])}\n{''.join(values[2:])}"
            found.append(Piece(text, piece.cell, piece.index, piece.fixed_line or node.lineno))
    return found
