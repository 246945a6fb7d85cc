"""Cells as Python: a placeholder stands for a magic or a shell line, so that all positions stay as they are."""

import re

SHELLS = {"bash", "sh", "shell", "script", "cmd", "system", "sx"}
FILES = {"writefile", "file"}
_OTHERS = {"html", "HTML", "javascript", "js", "latex", "markdown", "svg", "perl", "ruby", "cython", "R", "sql"}
_HELP = re.compile(r"\?{1,2}[\w.*]+\s*$|[\w.]+\?{1,2}\s*$")
_ASSIGNED = re.compile(r"(\s*[\w.]+(?:\s*,\s*[\w.]+)*\s*=\s*)[!%]")
_RUNS_CODE = re.compile(r"(\s*)(%(?:time|timeit|prun|memit)\s+)(?=[A-Za-z_])")
_TOKENS = re.compile(r"""\\.|\#|\"""|'''|["']|[()\[\]{}]""")


def magic_of(source: str) -> tuple[str, str]:
    """Return the magic of a whole cell, as ("writefile", "train.py"); "" twice for a cell without one."""
    found = re.match(r"\s*%%(\w+)[ \t]*(.*)", source)
    return (found[1], found[2].strip()) if found else ("", "")


def is_python(magic: str) -> bool:
    """Return whether the text below such a magic is Python that runs in the kernel."""
    return magic not in SHELLS | FILES | _OTHERS


def split_lines(text: str) -> list[str]:
    """Return the lines as Python counts them, each with its end; `splitlines` would also split at a form feed."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$", text)


def shell_lines(text: str) -> dict[int, str]:
    """Return the lines of a shell's text by number, each with those that follow a backslash."""
    found: dict[int, str] = {}
    first = 0
    for number, line in enumerate(split_lines(text), start=1):
        first = first or number
        found[first] = "\n".join([*filter(None, [found.get(first)]), line.rstrip("\r\n")])
        first = first if found[first].endswith("\\") else 0
    return found


def mask(source: str) -> tuple[list[str], dict[int, str]]:
    """Return the lines of a cell as Python, and its magics and shell lines by the number of their first line."""
    out: list[str] = []
    shell: dict[int, str] = {}
    inside = _Inside()
    first = 0  # the line on which a shell line began that goes on with a backslash
    for number, whole in enumerate(split_lines(source), start=1):
        line = whole.rstrip("\r\n")
        text = "" if first else _placeholder(line)
        if first or (text is not None and not inside):
            if not first and text.lstrip().startswith("if 1"):  # the code behind %time stays
                inside.read(line)
            else:
                first = first or number
                shell[first] = f"{shell[first]}\n{line}" if first in shell else line
                first = first if line.endswith("\\") else 0
        else:
            inside.read(line)
            text = line
        out.append(text)
    return out, shell


def _placeholder(line: str) -> str | None:
    """Return the Python that stands for a magic or a shell line; None for a line of Python."""
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    if found := _RUNS_CODE.match(line):  # of the same width, so that columns stay as they are
        return f"{indent}if {'1' * (len(found[2]) - 5)}: {line[found.end() :]}"
    if text.startswith(("!", "%")) or _HELP.match(text):
        return indent if text.startswith("%%") else f"{indent}pass"
    found = _ASSIGNED.match(line)
    return f"{found[1]}None" if found else None


class _Inside:
    """Whether a line begins inside a string, inside brackets or after a backslash, where a % is no magic."""

    def __init__(self):
        self.quote = ""
        self.depth = 0
        self.goes_on = False

    def __bool__(self) -> bool:
        return bool(self.quote or self.depth or self.goes_on)

    def read(self, line: str) -> None:
        """Go to the end of a line."""
        self.goes_on = line.endswith("\\")
        for token in _TOKENS.findall(line):
            if self.quote:
                self.quote = "" if token == self.quote else self.quote
            elif token == "#":
                self.goes_on = False
                break
            elif token[0] in "\"'":
                self.quote = token
            elif token in "([{":
                self.depth += 1
            elif token in ")]}":
                self.depth = max(0, self.depth - 1)
        if len(self.quote) == 1 and not self.goes_on:
            self.quote = ""
