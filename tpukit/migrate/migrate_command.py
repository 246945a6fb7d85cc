"""`python -m tpukit migrate old.ipynb`: old notebooks in a terminal."""

import argparse
import json
import sys
from pathlib import Path

from tpukit.essentials.show import Explained, NoSuchFile, WrongValue
from tpukit.migrate.migrated import migrate
from tpukit.migrate.old_files import files_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("files", nargs="+", type=Path, help="notebooks, scripts, or folders of them")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write to; of several files a folder")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 where something would change"
    )
    parser.add_argument("--diff", action="store_true", help="print the lines that change, and nothing else")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, of several files a list")


def run(given: argparse.Namespace) -> int:
    """Print what became of each file.

    The exit status is 0, 1 where a line is left to a person or with --check where one would change, and 2 where a file
    was refused; one that was does not keep the others from being read.
    """
    status, reports = 0, []
    try:
        files = _files(given)
    except Explained as error:
        print(error, file=sys.stderr)
        return 2
    for file in files:
        try:
            found = migrate(file, output=given.output, check=given.check, force=given.force)
        except Explained as error:
            print(error, file=sys.stderr)
            status = 2
            continue
        reports.append(found.as_dict())
        colours = sys.stdout.isatty()
        if not given.json and (found.diffs or not given.diff):
            print(found.diff(colours=colours) if given.diff else found.as_text(colours=colours))
        status = max(status, int(bool(found.stops or (given.check and found.changes))))
    if given.json:
        print(json.dumps(reports[0] if len(files) == 1 and reports else reports, ensure_ascii=False))
    return status


def _files(given: argparse.Namespace) -> list[Path]:
    files = files_in(given.files)
    if not files:
        raise NoSuchFile(f"no notebook and no script in {given.files[0]}", fix="a folder with files .ipynb or .py")
    if len(files) > 1 and given.output and not given.output.is_dir():
        raise WrongValue(f"{given.output} is no folder, and there are {len(files)} files", fix="--output FOLDER")
    return files
