"""Findings: what was examined, its state, and what to do about it. The runtime check and the report consist of them."""

from dataclasses import dataclass

from tpukit.essentials.display.tables import Table, as_html, counted


@dataclass(frozen=True)
class Finding:
    """One thing that was examined. `fix` says what to do, in the words of the platform; empty where all is well."""

    name: str
    state: str  # ok, info, warning or failure
    fact: str
    fix: str = ""


class Findings(Table):
    """Findings in order, with one row for each: the base of `Check` and `Report`.

    A subclass is a dataclass with two fields: `findings`, and `subject`, which says what was examined and begins the
    title.
    """

    findings: tuple[Finding, ...]
    subject: str

    @property
    def title(self) -> str:
        """The outcome in one line."""
        counts = [(len(self.failures), "failure"), (len(self.warnings), "warning")]
        outcome = ", ".join(counted(n, word) for n, word in counts if n) or "all is well"
        return f"{self.subject}: {outcome}"

    @property
    def ok(self) -> bool:
        """True if there is no failure; there may be warnings."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that would make a launch fail, or run on the wrong device."""
        return self._in_state("failure")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that cost time or may mislead, each with its fix."""
        return self._in_state("warning")

    def _in_state(self, state: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state == state)

    def rows(self, before_fix: str = "fix: ") -> list[tuple[str, str, str]]:
        """Return (state, name, fact and fix) of every finding; `before_fix` introduces the fix."""
        return [
            (finding.state, finding.name, finding.fact + (f"\n{before_fix}{finding.fix}" if finding.fix else ""))
            for finding in self.findings
        ]

    def _repr_html_(self) -> str:
        return as_html(self.rows("→ "), title=self.title)
