from dataclasses import dataclass

import pytest

from tpukit.essentials.display.findings import Finding, Findings

FINE = Finding("fork", "ok", "possible")
SLOW = Finding("data", "warning", "the loop waits half of the time", "`tpukit.pack(dataset)` once")
WRONG = Finding(
    "PJRT_DEVICE",
    "failure",
    "CPU, although 8 chips are here",
    '`os.environ["PJRT_DEVICE"] = "TPU"`',
)


@dataclass(frozen=True, repr=False)
class Inspection(Findings):
    subject: str
    findings: tuple[Finding, ...]


@pytest.mark.parametrize(
    ("findings", "outcome"),
    [
        ((), "all is well"),
        ((FINE, FINE), "all is well"),
        ((FINE, SLOW), "1 warning"),
        ((SLOW, FINE, SLOW), "2 warnings"),
        ((SLOW, WRONG), "1 failure, 1 warning"),
        ((WRONG, WRONG, SLOW, SLOW), "2 failures, 2 warnings"),
    ],
)
def test_the_title_counts_what_needs_attention(findings, outcome):
    assert Inspection("this machine", findings).title == f"this machine: {outcome}"


def test_failures_and_warnings_are_told_apart_and_keep_their_order():
    outcome = Inspection("this machine", (SLOW, WRONG, FINE, WRONG))
    assert outcome.failures == (WRONG, WRONG)
    assert outcome.warnings == (SLOW,)


def test_each_finding_is_a_row_and_its_fix_stands_below_its_fact():
    outcome = Inspection("this machine", (FINE, WRONG))
    title, empty, fine, wrong, fix = str(outcome).splitlines()
    assert (title, empty) == ("this machine: 1 failure", "")
    assert fine.split("  ")[0] == "ok"
    assert wrong.index("CPU, although") == fix.index("fix: `os.environ")
    assert repr(outcome) == str(outcome)


def test_a_notebook_shows_the_same_rows_with_an_arrow_before_each_fix():
    html = Inspection("this machine", (FINE, SLOW, WRONG))._repr_html_()
    assert html.count("<tr") == 3
    assert html.count("→") == 2
    assert "fix:" not in html
    assert "PJRT_DEVICE&quot;] = &quot;TPU&quot;</code>" in html
