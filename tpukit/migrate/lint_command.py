"""`python -m tpukit lint old.ipynb` finds old names in notebooks, scripts and folders."""

import argparse
import os
import sys
from pathlib import Path

from tpukit.essentials.display import TpukitError, counted
from tpukit.migrate.lint_sources import files_in
from tpukit.migrate.linting import lint, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "Example: python -m tpukit lint old.ipynb --diff"
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="file", help="notebooks, scripts, or folders")
    add("--fix", action="store_true", help="write the renames that cannot change a meaning")
    add("--diff", action="store_true", help="print these renames by cell, and write nothing")


def run(given: argparse.Namespace) -> int:
    """Print the findings of each file and a summary, and return the exit status.

    The status is 0 without findings, 1 with findings, and 2 if an input cannot be read. With
    --fix, only the findings that remain count.
    """
    skipped: list[Path] = []
    errors: list[TpukitError] = []
    findings = []
    files = 0
    try:
        for path in files_in(given.files, skipped=skipped, errors=errors):
            try:
                report = lint(path)
                if given.fix and not given.diff and report.fix():
                    report = lint(path)
            except TpukitError as error:
                errors.append(error)
                continue
            files += 1
            findings += report.findings
            text = report.diff() if given.diff else str(report)
            print(text, end="\n" if text else "")
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has closed the output, and Python would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    fixable = sum(finding.is_fixable for finding in findings)
    summary = f"{counted(len(findings), 'finding')} in {counted(files, 'file')}"
    summary += f"; {fixable} can be fixed with --fix"
    if skipped:
        summary += f"; skipped: {', '.join(map(str, skipped))}"
    for line in "\n".join([*map(str, errors), summary]).split("\n"):
        print(printable(line), file=sys.stderr)
    return 2 if errors else int(bool(findings))
