"""Findings of `check` and `preflight`: the examined subjects, their states and fixes."""

from dataclasses import dataclass

from tpukit.essentials.display.tables import Table, as_html, counted


@dataclass(frozen=True)
class Finding:
    """One examined subject.

    Attributes:
        name: the subject.
        state: "ok", "info", "warning" or "failure".
        fact: the result of the examination, with its evidence.
        fix: a line of code or a menu item of the platform; "" if no fix is needed.
    """

    name: str
    state: str
    fact: str
    fix: str = ""


class Findings(Table):
    """Findings in order, one per row: the base of `Check` and `Report`.

    A subclass is a dataclass with `findings`, and with `subject`, which begins the title.
    """

    # Only annotations: the subclass decides whether each is a field or a property.
    findings: tuple[Finding, ...]
    subject: str

    @property
    def title(self) -> str:
        """The subject and the number of failures and warnings, as a line."""
        counts = ((len(self.failures), "failure"), (len(self.warnings), "warning"))
        parts = [counted(count, word) for count, word in counts if count]
        outcome = ", ".join(parts) or "all is well"
        return f"{self.subject}: {outcome}"

    @property
    def ok(self) -> bool:
        """True if there is no failure; there may be warnings."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that would make a launch fail, or make it use the wrong device."""
        return self._in_state("failure")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that cost time or may mislead, each with its fix."""
        return self._in_state("warning")

    def _in_state(self, state: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state == state)

    def rows(self, before_fix: str = "fix: ") -> list[tuple[str, str, str]]:
        """Return (state, name, text) of each finding; the text has the fact and the fix.

        Args:
            before_fix: text to put before the fix.
        """
        found = []
        for finding in self.findings:
            text = finding.fact
            if finding.fix:
                text += f"\n{before_fix}{finding.fix}"
            found.append((finding.state, finding.name, text))
        return found

    def _repr_html_(self) -> str:
        return as_html(self.rows("→ "), title=self.title)
