"""`python -m tpukit lint old.ipynb`: old names in notebooks, scripts and folders, in a terminal."""

import argparse
import os
import sys
from pathlib import Path

from tpukit.essentials.show import Explained, counted
from tpukit.migrate.lint_sources import files_in
from tpukit.migrate.linting import lint, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("files", nargs="+", type=Path, metavar="file", help="notebooks, scripts, or folders of them")
    parser.add_argument("--fix", action="store_true", help="write the renames that cannot change a meaning")
    parser.add_argument("--diff", action="store_true", help="print these renames by cell, and write nothing")


def run(given: argparse.Namespace) -> int:
    """Print the findings; return 0 for none, 1 for some, 2 if an input cannot be read. After --fix the rest counts."""
    left_out: list[Path] = []
    findings = []
    files = fixed = unreadable = 0
    try:
        for path in files_in(given.files, left_out):
            try:
                report = lint(path)
                before = len(report.findings)
                if given.fix and not given.diff and report.fix():
                    report = lint(path)
            except Explained as error:
                print(*map(printable, str(error).split("\n")), sep="\n", file=sys.stderr)
                unreadable += 1
                continue
            files += 1
            fixed += before - len(report.findings)
            findings += report.findings
            if text := report.diff() if given.diff else str(report):
                print(text)
        sys.stdout.flush()
    except Explained as error:  # a folder
        print(*map(printable, str(error).split("\n")), sep="\n", file=sys.stderr)
        unreadable += 1
    except BrokenPipeError:  # `| head` has seen enough; Python would complain when it closes the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    fixable = sum(one.is_fixable for one in findings)
    parts = [f"{counted(len(findings), 'finding')} in {counted(files, 'file')}"]
    parts += [f"{fixed} fixed"] * bool(fixed) + [f"{fixable} can be fixed with --fix"] * bool(fixable)
    parts += [f"skipped: {', '.join(map(str, left_out))}"] * bool(left_out)
    print(printable("; ".join(parts)), file=sys.stderr)
    return 2 if unreadable else int(bool(findings))
