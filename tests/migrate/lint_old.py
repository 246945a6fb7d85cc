"""Every old notebook there is, linted and fixed twice; `make lint-old`.

    python tests/migrate/lint_old.py [folder ...]

Without a folder: our own, and those in the folders that TPUKIT_OLD_NOTEBOOKS names, which may not be published here.
Prints a table, and last the sums as a line of JSON. A dead name is found here by another way than the linter's: each
`alias.name` of an `import ... as alias` is looked up with getattr in the installed torch_xla.
"""

import ast
import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tpukit.essentials.display import as_text
from tpukit.migrate import lint
from tpukit.migrate.code_pieces import pieces_of
from tpukit.migrate.lint_sources import LintSource

HERE = Path(__file__).parent
BAD = ("crashed", "unreported", "not_stable", "newly_broken")


def folders():
    given = sys.argv[1:]
    return [
        Path(one)
        for one in given
        or [HERE / "old", *os.environ.get("TPUKIT_OLD_NOTEBOOKS", "").split(os.pathsep)]
        if one
    ]


def old_files():
    for folder in folders():
        yield from sorted(path for path in folder.iterdir() if path.suffix in (".ipynb", ".py"))


def trees(path):
    """Return (cell, tree, line to report) for each piece of code."""
    source = LintSource(path)
    for pieces in pieces_of(source.texts, source.numbers):
        yield from ((piece.cell, piece.tree, piece) for piece in pieces)


def is_dead(module, name):
    """Return whether the installed torch_xla lacks a name; None if the module cannot be imported here."""
    with contextlib.suppress(ImportError):
        return not hasattr(importlib.import_module(module), name)
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return (error.name or "").startswith("torch_xla")
    except ImportError:
        return False
    return False


def dead_names(path):
    """Return the (cell, line) of each dead name."""
    aliases = {}
    found = set()
    pieces = list(trees(path))
    for _, tree, _ in pieces:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                aliases |= {
                    one.asname: one.name
                    for one in node.names
                    if one.asname and one.name.startswith("torch_xla")
                }
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_xla"):
                aliases |= {
                    one.asname or one.name: f"{node.module}.{one.name}" for one in node.names
                }
    for cell, tree, piece in pieces:
        for node in ast.walk(tree):
            is_named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if is_named and node.value.id in aliases and is_dead(aliases[node.value.id], node.attr):
                found.add((cell, piece.fixed_line or node.lineno))
    return found


def look(path, folder):
    """Lint one file, fix a copy of it twice; return its row of the table."""
    row = dict.fromkeys((*BAD, "findings", "fixed", "clean"), 0)
    copy = folder / path.name
    shutil.copy(path, copy)
    try:
        report = lint(copy)
        broken = sum(len(piece.broken) for _, _, piece in trees(copy))
        row["findings"] = len(report.findings)
        row["fixed"] = sum(one.is_fixable for one in report.findings)
        row["unreported"] = len(
            dead_names(copy) - {(one.cell, one.line) for one in report.findings}
        )
        report.fix()
        again = lint(copy)
        row["clean"] = int(not again.findings)
        row["not_stable"] = int(again.fix() or any(one.is_fixable for one in again.findings))
        row["newly_broken"] = int(sum(len(piece.broken) for _, _, piece in trees(copy)) > broken)
    except Exception as error:  # whatever it is, the table shows it
        print(f"{path.name}: {type(error).__name__}: {error}", file=sys.stderr)
        row["crashed"] = 1
    return row


def main():
    """Print the table, and last the sums as a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        rows = {path.name: look(path, Path(folder)) for path in old_files()}
    titles = list(next(iter(rows.values())))
    print(as_text([["file", *titles], *([name, *row.values()] for name, row in rows.items())]))
    sums = {title: sum(row[title] for row in rows.values()) for title in titles}
    print(json.dumps({"files": len(rows), **sums}))
    return int(any(sums[title] for title in BAD))


if __name__ == "__main__":
    sys.exit(main())
