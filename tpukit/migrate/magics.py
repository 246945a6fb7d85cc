"""Cells as Python: a magic or a shell line becomes a placeholder of the same line, and is put back afterwards."""

import re

MARK = "tpukit-magic-"
SHELLS = {"bash", "sh", "shell", "script"}
FILES = {"writefile", "file"}
_OTHERS = {"html", "HTML", "javascript", "js", "latex", "markdown", "svg", "perl", "ruby", "cython", "R", "sql", "cmd"}
_HELP = re.compile(r"\?{1,2}[\w.*]+\s*$|[\w.]+\?{1,2}\s*$")
_ASSIGNED = re.compile(r"(\s*[\w.]+(?:\s*,\s*[\w.]+)*\s*=\s*)[!%]")
_RUNS_CODE = re.compile(r"\s*%(?:time|timeit|prun|memit)\s+(?=[A-Za-z_])")
_TOKENS = re.compile(r"""\\.|\#|\"""|'''|["']|[()\[\]{}]""")
_MARKED = re.compile(rf'^(\s*)(if "{MARK}\d+": |.*# ?{MARK}\d+.*$)', re.MULTILINE)


def magic_of(source: str) -> tuple[str, str]:
    """Return the magic of a whole cell, as ("time", "") or ("writefile", "train.py"); "" twice where it has none."""
    found = re.match(r"\s*%%(\w+)[ \t]*(.*)", source)
    return (found[1], found[2].strip()) if found else ("", "")


def is_python(magic: str) -> bool:
    """Return whether the text below such a magic may be Python that runs here."""
    return magic not in SHELLS | FILES | _OTHERS


def mask(source: str) -> tuple[str, dict[str, str | None]]:
    """Return a cell as Python, and by mark what its placeholders stand for; None for a line that another holds."""
    out, kept, state, holder = [], {}, _Inside(), ""
    magic_line = re.match(r"\s*", source)[0].count("\n") if magic_of(source)[0] else -1
    for number, line in enumerate(source.split("\n")):
        mark, indent = f"{MARK}{number:05d}", re.match(r"\s*", line)[0]
        text = line[len(indent) :]
        if holder:
            kept[holder] += f"\n{line}"
            kept[mark] = None
            out.append(f"{indent}# {mark}")
        elif number == magic_line:
            kept[mark] = line
            out.append(f"# {mark}")
            continue
        elif state:
            state.read(line)
            out.append(line)
            continue
        elif found := _RUNS_CODE.match(line):
            kept[mark] = found[0]
            out.append(f'{indent}if "{mark}": {line[found.end() :]}')
            continue
        elif text.startswith(("!", "%")) or _HELP.match(text):
            holder, kept[mark] = mark, line
            out.append(f"{indent}pass  # {mark}")
        elif found := _ASSIGNED.match(line):
            holder, kept[mark] = mark, line
            out.append(f"{found[1]}None  # {mark}")
        else:
            state.read(line)
            out.append(line)
            continue
        holder = holder if line.rstrip().endswith("\\") else ""
    return "\n".join(out), kept


def unmask(text: str, kept: dict[str, str | None]) -> str:
    """Put back what the placeholders stand for by now."""
    lines = []
    for line in text.split("\n"):
        found = _MARKED.match(line)
        stands = kept.get(re.search(rf"{MARK}\d+", found[0])[0], line) if found else line
        if stands is not None:
            lines.append(found[1] + stands.lstrip() + line[found.end() :] if found else line)
    return "\n".join(lines)


class _Inside:
    """Whether a line begins inside a string, inside brackets or after a backslash, where a % is no magic."""

    def __init__(self):
        self.quote, self.depth, self.goes_on = "", 0, False

    def __bool__(self) -> bool:
        return bool(self.quote or self.depth or self.goes_on)

    def read(self, line: str) -> None:
        """Go to the end of a line."""
        self.goes_on = line.rstrip("\r").endswith("\\")
        for found in _TOKENS.finditer(line):
            token = found[0]
            if self.quote:
                if token == self.quote or (len(self.quote) == 1 and token[0] == self.quote):
                    self.quote = ""
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
