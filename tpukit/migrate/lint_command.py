"""`python -m tpukit lint old.ipynb`: old names in notebooks, scripts and folders, in a terminal."""

import argparse
import os
import sys
from pathlib import Path

from tpukit.essentials.show import Explained, counted
from tpukit.migrate.lint_sources import files_in
from tpukit.migrate.linting import LintReport, lint, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("files", nargs="+", type=Path, metavar="file", help="notebooks, scripts, or folders of them")
    parser.add_argument("--fix", action="store_true", help="write the renames that cannot change a meaning")
    parser.add_argument("--diff", action="store_true", help="print these renames by cell, and write nothing")


def run(given: argparse.Namespace) -> int:
    """Print the findings; return 0 for none, 1 for some, 2 if an input cannot be read.

    A file that cannot be read does not keep the others from being checked. After `--fix` the findings that are left count.
    """
    try:
        status = _run(given)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; Python would complain when it closes the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(given: argparse.Namespace) -> int:
    left_out: list[Path] = []
    reports: list[LintReport] = []
    unreadable = 0
    fixed = 0
    files = files_in(given.files, left_out)
    while True:
        try:
            path = next(files, None)
            if path is None:
                break
            report = lint(path)
            before = len(report.findings)
            if given.diff:
                _print(report.diff())
            elif given.fix and report.fix():
                report = lint(path)
                fixed += before - len(report.findings)
        except Explained as error:
            print(printable(str(error).replace("\n", "\0")).replace("\\x00", "\n"), file=sys.stderr)
            unreadable += 1
            continue
        reports.append(report)
        if not given.diff:
            _print(str(report))
    print(_summary(reports, fixed, left_out), file=sys.stderr)
    if unreadable:
        return 2
    return int(any(one.findings for one in reports))


def _print(text: str) -> None:
    if text:
        print(text)


def _summary(reports: list[LintReport], fixed: int, left_out: list[Path]) -> str:
    """Return one line: the findings, those that --fix repairs or has repaired, and the folders that were skipped."""
    if not reports:
        text = "no notebooks or scripts were checked"
    else:
        number = sum(len(one.findings) for one in reports)
        text = f"{counted(number, 'finding')} in {counted(len(reports), 'file')}"
    fixable = sum(finding.is_fixable for one in reports for finding in one.findings)
    parts = [text]
    if fixed:
        parts.append(f"{fixed} fixed")
    if fixable:
        parts.append(f"{fixable} can be fixed with --fix")
    if left_out:
        parts.append(f"skipped: {', '.join(str(one) for one in left_out)}")
    return printable("; ".join(parts))
