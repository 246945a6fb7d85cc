"""One file: its findings, and its text with the safe renames."""

import difflib
import os
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from tpukit.essentials.show import SystemFailed
from tpukit.migrate.code_pieces import Piece, pieces_of
from tpukit.migrate.lint_sources import LintSource
from tpukit.migrate.name_checks import Checker, NameFinding
from tpukit.migrate.safe_fixes import Edit

PAGE = "docs/from_torch_xla_1x.md"


@dataclass
class LintReport:
    """The findings in a notebook or a script, and its code cells without and with the safe renames.

    `numbers` are those of the cells, from 1, Markdown included; None for a script. Printing it shows the findings.
    """

    path: Path
    findings: list[NameFinding]
    texts: list[str]
    fixed_texts: list[str]
    numbers: list[int | None]
    _source: LintSource = field(repr=False)

    def __str__(self) -> str:
        lines = []
        for one in self.findings:
            cell = "" if one.cell is None else f"cell {one.cell}, "
            lines.append(f"{self.path}: {cell}line {one.line}: {one.kind}: {one.name}{' [--fix]' * one.is_fixable}")
            lines += [f"  found: {one.happened}", f"  fix:   {one.write}", f"  see:   {PAGE}#{one.kind}"]
        return "\n".join(map(printable, lines))

    def diff(self) -> str:
        """Return the lines that the safe renames change, cell by cell."""
        lines: list[str] = []
        for number, old, new in zip(self.numbers, self.texts, self.fixed_texts, strict=True):
            name = str(self.path) if number is None else f"{self.path}: cell {number}"
            lines += difflib.unified_diff(old.split("\n"), new.split("\n"), name, name, lineterm="")
        return "\n".join(map(printable, lines))

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
            os.replace(name, target)  # after a power cut the old file is there or the new one
        except OSError as error:
            raise SystemFailed(f"{target} cannot be written: {error}", fix=f"chmod u+w {target.parent}") from error
        return True


def lint(path: str | Path) -> LintReport:
    """Return the names in a notebook or a script that are not what they were; nothing is written.

    Raises:
        NoSuchFile: it is not there.
        WrongValue: it is not a notebook and not a script, or cannot be read.
    """
    source = LintSource(Path(path))
    fixed = list(source.texts)
    findings: list[NameFinding] = []
    for pieces in pieces_of(source.texts, source.numbers):
        checker = Checker(pieces)
        checker.check()
        findings += checker.findings
        changes = {piece: _edited(piece, edits) for piece, edits in checker.edits.items() if edits}
        if any(_is_broken(new) for new in changes.values()):  # a line end in a place that nobody thought of
            changes = {}
            findings = [replace(one, is_fixable=False) for one in findings]
        for piece, new in changes.items():
            text = fixed[piece.index]
            fixed[piece.index] = text[: piece.start] + new + text[piece.start + len(piece.text) :]
    findings.sort(key=lambda one: (one.cell or 0, one.line))
    return LintReport(source.path, list(dict.fromkeys(findings)), source.texts, fixed, source.numbers, source)


def _edited(piece: Piece, edits: set[Edit]) -> str:
    text = piece.text
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _is_broken(text: str) -> bool:
    piece = Piece(text, cell=None, index=0)
    piece.parse()
    return bool(piece.broken)


def printable(text: str) -> str:
    """Return a line of text with its control characters escaped, so that it cannot drive a terminal."""
    return re.sub(r"[^\t\x20-\x7e]", lambda one: one[0] if one[0].isprintable() else ascii(one[0])[1:-1], text)
