"""What is told of a file: a row for each change, note and stop."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One place of a file.

    Attributes:
        kind: "change", "note" or "stop".
        cell: its number from 1, Markdown counted; None in a script.
        line: in the old cell, from 1, magics counted.
        rule: which rule it is a case of.
        old: what is written there.
        new: what is written now, or what to know about it.
        fix: of a stop, what to do.
    """

    kind: str
    cell: int | None
    line: int
    rule: str
    old: str
    new: str
    fix: str = ""

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return f"line {self.line}" if self.cell is None else f"cell {self.cell}, line {self.line}"

    def as_dict(self) -> dict:
        """Return it as JSON has it."""
        new = "; ".join(filter(None, (self.new, self.fix)))
        return {"cell": self.cell, "line": self.line, "rule": self.rule, "old": self.old, "new": new}
