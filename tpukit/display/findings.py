"""Findings: what was looked at, how it is, and what to do; the runtime check and the report are made of them."""

from dataclasses import dataclass

from tpukit.display import tables


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `fix` is what to do, in the words of the platform; empty where all is well."""

    name: str
    state: str  # ok, warning or failure
    fact: str
    fix: str = ""


class Findings:
    """Several findings in order, as a table: text when printed, HTML in a notebook.

    What derives from it has `findings`, and a `subject` that begins the title: what was looked at.
    """

    findings: tuple[Finding, ...]
    subject: str

    @property
    def title(self) -> str:
        """The outcome in one line."""
        counts = [(len(self.failures), "failure"), (len(self.warnings), "warning")]
        outcome = ", ".join(f"{n} {word}{'s' * (n > 1)}" for n, word in counts if n) or "all is well"
        return f"{self.subject}: {outcome}"

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that would make a launch fail, or run on the wrong device."""
        return self._in_state("failure")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that cost time, or may mislead; each with what to do."""
        return self._in_state("warning")

    def _in_state(self, state: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state == state)

    def _rows(self, arrow: str) -> list[tuple[str, str, str]]:
        return [
            (finding.state, finding.name, finding.fact + (f"\n{arrow}{finding.fix}" if finding.fix else ""))
            for finding in self.findings
        ]

    def __str__(self) -> str:
        return f"{self.title}\n\n{tables.as_text(self._rows('fix: '))}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return tables.as_html(self._rows("→ "), title=self.title)
