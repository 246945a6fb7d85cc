"""Find the old names in a file, and write the file with the safe renames."""

import difflib
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, SystemFailureError
from tpukit.essentials.environment import part_of, write_whole
from tpukit.migrate.code_pieces import pieces_of
from tpukit.migrate.lint_sources import LintSource
from tpukit.migrate.name_checks import Checker, NameFinding

PAGE = "docs/from_torch_xla_1x.md"


@dataclass
class LintReport:
    """The findings in a notebook or a script; printing the report shows them.

    Attributes:
        path: the file.
        findings: in the order of the cells and lines.
        texts: the code cells of a notebook, or the one text of a script.
        fixed_texts: the same texts with the safe renames.
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
        """Return the safe renames as a unified diff of each cell that they change."""
        lines: list[str] = []
        for number, *texts in zip(self._source.numbers, self.texts, self.fixed_texts, strict=True):
            name = f"{self.path}: cell {number}" if number else str(self.path)
            old, new = (text.split("\n") for text in texts)
            lines += difflib.unified_diff(old, new, name, name, lineterm="")
        return "\n".join(map(printable, lines))

    def fix(self) -> bool:
        """Write the safe renames into the file, and return True if there were any.

        The file is replaced, even if it is read-only.

        Raises:
            InvalidValueError: the file has changed since `lint` read it.
            SystemFailureError: the folder is read-only, or the disk is full.
        """
        if self.fixed_texts == self.texts:
            return False
        target = self.path.resolve()  # a link would be replaced instead of its file
        data = self._source.with_texts(self.fixed_texts)
        part = part_of(target)
        try:
            if target.read_bytes() not in (self._source.data, data):
                fix = f"lint({str(self.path)!r}).fix()"
                raise InvalidValueError(f"{target} has changed since lint has read it", fix=fix)
            with write_whole(target, part=part) as file:
                file.write(data)
                part.chmod(target.stat().st_mode & 0o7777)
        except OSError as error:
            fix = f"chmod u+w {shlex.quote(str(target.parent))}"
            raise SystemFailureError(f"{target} cannot be written: {error}", fix=fix) from error
        return True


def lint(path: str | Path) -> LintReport:
    """Find the names in a file that torch_xla or a related library has changed or removed.

    The file is not written; `LintReport.fix` does that.

    Args:
        path: a notebook (.ipynb) or a script (.py).

    Raises:
        PathNotFoundError: the file does not exist.
        InvalidValueError: the file is not a notebook and not a script, or it cannot be read.
    """
    source = LintSource(Path(path))
    texts = list(source.texts)
    findings: list[NameFinding] = []
    for pieces in pieces_of(source.texts, source.numbers):
        checker = Checker(pieces)
        findings += checker.findings
        # From the last edit to the first, so that the positions of the others do not change.
        for edit in sorted(checker.edits, key=lambda edit: edit.start, reverse=True):
            text = texts[edit.piece.index]
            texts[edit.piece.index] = text[: edit.start] + edit.new + text[edit.end :]
    # Two nodes of the tree can give the same finding; `dict.fromkeys` keeps one of them.
    ordered = sorted(dict.fromkeys(findings), key=lambda one: (one.cell or 0, one.line))
    return LintReport(source.path, ordered, source.texts, fixed_texts=texts, _source=source)


def printable(text: str) -> str:
    """Return a line with its control characters escaped, because a terminal would obey them."""
    unsafe = {char for char in text if not char.isprintable()} - {"\t"}
    return text.translate({ord(char): ascii(char)[1:-1] for char in unsafe})
