"""The findings in a file, and its text with the safe renames."""

import difflib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.display import SystemFailureError
from tpukit.migrate.code_pieces import pieces_of
from tpukit.migrate.lint_sources import LintSource
from tpukit.migrate.name_checks import Checker, NameFinding

PAGE = "docs/from_torch_xla_1x.md"


@dataclass
class LintReport:
    """The findings in a notebook or a script; printing the report shows them.

    `texts` are the code cells, `fixed_texts` the same with the safe renames.
    """

    path: Path
    findings: list[NameFinding]
    texts: list[str]
    fixed_texts: list[str]
    _source: LintSource = field(repr=False)

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            mark = " [--fix]" if finding.is_fixable else ""
            cell = f"cell {finding.cell}, " if finding.cell else ""
            place = f"{self.path}: {cell}line {finding.line}"
            lines.append(f"{place}: {finding.kind}: {finding.name}{mark}")
            lines.append(f"  found: {finding.happened}")
            lines.append(f"  fix:   {finding.write}")
            lines.append(f"  see:   {PAGE}#{finding.kind}")
        return "\n".join(map(printable, lines))

    def diff(self) -> str:
        """Return the lines that the safe renames change, cell by cell."""
        lines: list[str] = []
        for number, *texts in zip(self._source.numbers, self.texts, self.fixed_texts, strict=True):
            name = f"{self.path}: cell {number}" if number else str(self.path)
            old, new = (text.split("\n") for text in texts)
            lines += difflib.unified_diff(old, new, name, name, lineterm="")
        return "\n".join(map(printable, lines))

    def fix(self) -> bool:
        """Write the safe renames into the file; return whether it had any.

        Raises:
            SystemFailureError: the file or its folder is read-only, or the disk is full.
        """
        if self.fixed_texts == self.texts:
            return False
        target = self.path.resolve()  # of a link the file, not the link
        data = self._source.with_texts(self.fixed_texts)
        try:
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(name, target.stat().st_mode & 0o7777)
            os.replace(name, target)  # after a power cut the old file is there or the new
        except OSError as error:
            fix = f"chmod u+w {target.parent}"
            raise SystemFailureError(f"{target} cannot be written: {error}", fix=fix) from error
        return True


def lint(path: str | Path) -> LintReport:
    """Find the names in a notebook or a script that have changed; write nothing.

    Raises:
        PathNotFoundError: the file does not exist.
        InvalidValueError: it is not a notebook and not a script, or cannot be read.
    """
    source = LintSource(Path(path))
    texts = list(source.texts)
    findings: list[NameFinding] = []
    for pieces in pieces_of(source.texts, source.numbers):
        checker = Checker(pieces)
        findings += checker.findings
        for edit in sorted(checker.edits, key=lambda edit: edit.start, reverse=True):
            text = texts[edit.piece.index]  # from the last edit on, so that the others still fit
            texts[edit.piece.index] = text[: edit.start] + edit.new + text[edit.end :]
    ordered = sorted(dict.fromkeys(findings), key=lambda one: (one.cell or 0, one.line))
    return LintReport(source.path, ordered, source.texts, fixed_texts=texts, _source=source)


def printable(text: str) -> str:
    """Return a line of text with its control characters escaped: they could drive a terminal."""
    unsafe = {char for char in text if not char.isprintable()} - {"\t"}
    return text.translate({ord(char): ascii(char)[1:-1] for char in unsafe})
