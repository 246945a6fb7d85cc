"""One file: its findings, and its text with the safe renames."""

import difflib
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.show import SystemFailed
from tpukit.migrate.code_pieces import Piece, pieces_of
from tpukit.migrate.lint_sources import LintSource
from tpukit.migrate.name_checks import Checker, NameFinding
from tpukit.migrate.safe_fixes import Edit

PAGE = "docs/from_torch_xla_1x.md"


@dataclass
class LintReport:
    """The findings in a notebook or a script; printing it shows them.

    Attributes:
        path: the file.
        findings: in the order of the file.
        texts: the code cells as they are, or the one text of a script.
        fixed_texts: the same with the safe renames.
        numbers: of the cells, from 1, Markdown included; None for a script.
    """

    path: Path
    findings: list[NameFinding]
    texts: list[str]
    fixed_texts: list[str]
    numbers: list[int | None]
    _source: LintSource = field(repr=False)

    def __str__(self) -> str:
        return "\n".join(printable(line) for one in self.findings for line in self._lines(one))

    def _lines(self, one: NameFinding) -> list[str]:
        cell = f"cell {one.cell}, " if one.cell is not None else ""
        fixable = " [--fix]" if one.is_fixable else ""
        return [
            f"{self.path}: {cell}line {one.line}: {one.kind}: {one.name}{fixable}",
            f"  found: {one.happened}",
            f"  fix:   {one.write}",
            f"  see:   {PAGE}#{one.kind}",
        ]

    def diff(self) -> str:
        """Return the lines that the safe renames change, cell by cell."""
        out: list[str] = []
        for number, old, new in zip(self.numbers, self.texts, self.fixed_texts, strict=True):
            name = str(self.path) if number is None else f"{self.path}: cell {number}"
            lines = difflib.unified_diff(old.split("\n"), new.split("\n"), name, name, lineterm="")
            out += [printable(line) for line in lines]
        return "\n".join(out)

    def fix(self) -> bool:
        """Write the safe renames into the file; return whether there were any."""
        if self.fixed_texts == self.texts:
            return False
        target = self.path.resolve()  # of a link the file, not the link
        data = self._source.with_texts(self.fixed_texts)
        try:
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(name, target.stat().st_mode & 0o7777)
            os.replace(name, target)  # a power cut leaves the old file or the new one
        except OSError as error:
            raise SystemFailed(f"{target} cannot be written: {error}", fix=f"chmod u+w {target}") from error
        return True


def lint(path: str | Path) -> LintReport:
    """Return the names in a notebook or a script that are not what they were; nothing is written.

    Args:
        path: a file .ipynb or .py.

    Returns:
        A `LintReport`: `findings`, `diff()`, and `fix()`, which writes the renames that cannot change a meaning.

    Raises:
        NoSuchFile: it is not there.
        WrongValue: it is not a notebook and not a script, or cannot be read.
    """
    source = LintSource(Path(path))
    texts = source.texts
    findings: list[NameFinding] = []
    fixed = list(texts)
    groups = pieces_of(texts, source.numbers) if source.is_python else []
    for pieces in groups:
        checker = Checker(pieces)
        checker.check()
        findings += checker.findings
        if all(_still_parses(piece, checker.edits[piece]) for piece in pieces):
            for piece in pieces:
                text = fixed[piece.index]
                new = apply(piece.text, checker.edits[piece])
                fixed[piece.index] = text[: piece.start] + new + text[piece.start + len(piece.text) :]
    findings.sort(key=lambda one: (one.cell or 0, one.line))
    unique = list(dict.fromkeys(findings))
    return LintReport(source.path, unique, texts, fixed, source.numbers, source)


def apply(text: str, edits: set[Edit]) -> str:
    """Return a text with edits, which do not overlap."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


def _still_parses(piece: Piece, edits: set[Edit]) -> bool:
    """Return whether a piece is Python after its edits too: a line end in an unusual place could break it."""
    if not edits:
        return True
    new = Piece(apply(piece.text, edits), piece.cell, piece.index)
    new.parse()
    return not new.broken


def printable(text: str) -> str:
    """Return a line of text with its control characters escaped, so that it cannot drive a terminal."""
    return re.sub(r"[^\t\x20-\x7e]", lambda one: one[0] if one[0].isprintable() else ascii(one[0])[1:-1], text)
