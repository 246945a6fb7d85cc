"""Rules for statements: what set a TPU up in 2020 becomes a comment, and a block keeps something to run."""

import re

import libcst as cst

from tpukit.migrate.magics import MARK
from tpukit.migrate.name_rules import NameRules
from tpukit.migrate.old_cells import code
from tpukit.migrate.set_up import is_for_set_up, names_of_software, why_not_needed, without_statement
from tpukit.migrate.shell_lines import without_setup


class StatementRules(NameRules):
    """Rewrites statements, and lines for the shell."""

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        """Find what is not needed, so that nothing is said about names in it."""
        if not self._cell.mark_of(node):
            self._find_gone(node)

    def visit_SimpleStatementSuite(self, node: cst.SimpleStatementSuite) -> None:
        """The same, where the statements follow a colon."""
        self._find_gone(node)

    def _find_gone(self, node: cst.CSTNode) -> None:
        for small in node.body:
            if why := why_not_needed(small, self._cell, self._book.cells, self._book.meanings):
                self._gone[small] = why
                self._tell("change", small, "set-up", f"removed: {why}")

    def leave_SimpleStatementSuite(self, original, updated: cst.SimpleStatementSuite) -> cst.SimpleStatementSuite:
        """Take out what is not needed."""
        kept = [new for old, new in zip(original.body, updated.body, strict=True) if old not in self._gone]
        updated = updated.with_changes(body=kept or [cst.Pass()])
        self._book.lines |= dict.fromkeys(original.body, updated)
        return updated

    def leave_SimpleStatementLine(self, original, updated: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
        """Take out what is not needed, and leave a comment in its place."""
        if mark := self._cell.mark_of(original):
            self._shell(original, mark)
            return updated
        gone = [one for one in original.body if one in self._gone]
        if gone:
            body = zip(original.body, updated.body, strict=True) if len(original.body) == len(updated.body) else ()
            stands = [without_statement(old, self._book.cells) if old in gone else new for old, new in body]
            kept = [one for one in stands if one]
            return self._as_comment(updated, code(gone[0]).strip(), kept)
        if text := _shell_text(original):
            new = without_setup(text, names_of_software(self._book.cells))
            if new is None:
                self._tell("change", original, "set-up", "removed: Colab and Kaggle have torch_xla", old=text)
                holder = without_statement(original.body[0], self._book.cells)
                return self._as_comment(updated, text, [holder] if holder else [])
            if new != text:
                self._tell("change", original, "set-up", new, old=text)
                return updated.deep_replace(_shell_string(updated), cst.SimpleString(repr(new)))
        for one in original.body:
            self._book.lines[one] = updated
        return updated

    def _as_comment(self, line: cst.SimpleStatementLine, text: str, kept: list) -> cst.SimpleStatementLine:
        """Return a line of which a comment is left, and where something stays, that with the comment behind it."""
        mark = f"{MARK}9{len(self._cell.kept):04d}"
        parts = [code(one.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)) for one in kept]
        comment = f"# tpukit: not needed: {text.splitlines()[0]}"
        self._cell.kept[mark] = f"{'; '.join(parts)}  {comment}" if kept else comment
        self._comments |= set() if kept else {mark}
        space = cst.TrailingWhitespace(cst.SimpleWhitespace("  "), cst.Comment(f"# {mark}"))
        return line.with_changes(body=[cst.Pass()], trailing_whitespace=space)

    def _shell(self, line: cst.SimpleStatementLine, mark: str) -> None:
        """Take what set a TPU up out of a line for the shell."""
        text = self._cell.kept[mark]
        for_set_up = is_for_set_up(line.body[0], self._book.cells)
        new = None if for_set_up else without_setup(text, names_of_software(self._book.cells))
        if new is None:
            holder = isinstance(line.body[0], cst.Assign) and not for_set_up
            comment = f"# tpukit: not needed: {text.strip().splitlines()[0]}"
            self._cell.kept[mark] = f"{code(line.body[0])}  {comment}" if holder else comment
            self._comments |= set() if holder else {mark}
            self._tell("change", line, "set-up", "removed: Colab and Kaggle have torch_xla", old=text.strip())
        elif new != text:
            self._cell.kept[mark] = new
            self._tell("change", line, "set-up", new.strip(), old=text.strip())

    def leave_IndentedBlock(self, original, updated: cst.IndentedBlock) -> cst.IndentedBlock:
        """Leave a `pass` where only comments are left of a block."""
        marks = [self._cell.mark_of(one) if isinstance(one, cst.SimpleStatementLine) else "" for one in updated.body]
        if marks and all(mark in self._comments for mark in marks):
            self._cell.kept[marks[-1]] = f"pass  {self._cell.kept[marks[-1]]}"
        return updated


def _shell_text(line: cst.SimpleStatementLine) -> str:
    """Return the line for the shell in nbconvert's `get_ipython().system(...)` and its like; "" where there is none."""
    string = _shell_string(line)
    return string.evaluated_value if string else ""


def _shell_string(line: cst.SimpleStatementLine) -> cst.SimpleString | None:
    value = getattr(line.body[0], "value", None) if len(line.body) == 1 else None
    if isinstance(value, cst.Call) and re.fullmatch(
        r"get_ipython\(\)\.(system|getoutput|run_line_magic|magic)|os\.system", code(value.func)
    ):
        last = value.args[-1].value if value.args else None
        return last if isinstance(last, cst.SimpleString) else None
    return None
