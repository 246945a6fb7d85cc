"""Every old notebook there is: migrated, looked at, and where it has small inputs, run; `make migrate`.

    python tests/migrate/table.py [--run] [folder ...]

Without a folder: our own, and those in the folders that TPUKIT_OLD_NOTEBOOKS names, which may not be published here.
The listings of a text file (.txt, .md) count as one notebook.
"""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tpukit.essentials.show import as_text
from tpukit.migrate import migrate
from tpukit.migrate.known_names import dead_part, of_today
from tpukit.migrate.magics import mask

HERE = Path(__file__).parent
LIMIT = 300  # seconds for a notebook; those here took up to 90 on two busy cores
FIXTURES = {path.stem for path in (HERE / "fixtures").glob("*.py")}


def folders():
    """Return where old notebooks are."""
    given = [one for one in sys.argv[1:] if not one.startswith("--")]
    there = given or [HERE / "old", *filter(None, os.environ.get("TPUKIT_OLD_NOTEBOOKS", "").split(os.pathsep))]
    return [Path(one) for one in there]


def old_files(to):
    """Return the notebooks and scripts, with the listings of texts as notebooks."""
    for folder in folders():
        for path in sorted(folder.iterdir()):
            if path.suffix in (".ipynb", ".py"):
                yield path
            elif path.suffix in (".txt", ".md"):
                texts = listings(path.read_text())
                cells = [{"cell_type": "code", "metadata": {}, "source": one, "outputs": []} for one in texts]
                book = to / f"{path.stem}.ipynb"
                book.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 0}))
                yield book


def listings(text):
    """Return the listings of a text: what is fenced, or else the longest runs of its paragraphs that are Python."""
    if fenced := re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        return fenced
    parts, found, at = re.split(r"\n(?:[ \t]*\n)+", text), [], 0
    while at < len(parts):
        end = next((end for end in range(len(parts), at, -1) if parses("\n\n".join(parts[at:end]))), at)
        run = "\n\n".join(parts[at:end])
        found += [run] if re.search(r"^(?!!\[).*([=(]|import )", run, re.DOTALL) else []
        at = max(end, at + 1)
    return found


def sources(path):
    """Return the texts of a file's code cells."""
    if path.suffix == ".py":
        return [path.read_text()]
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def dead_names(texts):
    """Return how often each dead name is written, found by imports with an alias, apart from the kit's way."""
    found, aliases = {}, {}
    trees = []
    for text in texts:
        try:
            trees.append(ast.parse(mask(text)[0]))
        except SyntaxError:
            continue
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                aliases |= {
                    one.asname: one.name for one in node.names if one.asname and one.name.startswith("torch_xla")
                }
    for node in (one for tree in trees for one in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            written = f"{node.value.id}.{node.attr}"
            found[written] = found.get(written, 0) + bool(dead_part(of_today(f"{aliases[node.value.id]}.{node.attr}")))
    return found


def look(path, to):
    """Migrate one file; return what the table says of it."""
    new = to / f"new-{path.name}"
    row = dict.fromkeys(("crashed", "unparsable", "not_idempotent", "unreported_dead_names", "green", "ran"), 0)
    try:
        found = migrate(path, output=new)
    except Exception as error:  # whatever it is, the table says so
        print(f"{path.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return row | {"crashed": 1}
    row["green"] = int(found.green)
    rows = [*found.changes, *found.stops, *found.notes]
    for name, times in dead_names(sources(path)).items():
        row["unreported_dead_names"] += max(0, times - sum(one.old.count(name) > 0 for one in rows))
    if found.written:
        again = migrate(new, check=True)
        row["not_idempotent"] = int(
            bool(again.diffs) or [one.rule for one in again.stops] != [one.rule for one in found.stops]
        )
        row["unparsable"] = sum(not parses(text) for text in sources(new)) > sum(
            not parses(text) for text in sources(path)
        )
        if "--run" in sys.argv and (path.stem in FIXTURES or path.parent == HERE / "old"):
            row["ran"] = int(runs(new, path.stem if path.stem in FIXTURES else "digits"))
    return row


def parses(text):
    """Return whether a cell is Python, magics aside."""
    try:
        ast.parse(mask(text)[0])
    except SyntaxError:
        return text.startswith("%%")
    return True


def runs(path, fixture, limit=LIMIT):
    """Return whether a migrated file runs to its end on two cores, whose weights are equal then."""
    command = [sys.executable, HERE / "run_old.py", path, fixture]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=path.parent, env=environ, text=True, start_new_session=True, **pipes) as process:
        try:
            out, error = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its cores and its loaders too
            out, error = process.communicate()
            error += f"\nit had not ended after {limit} s"
    last = out.splitlines()[-1:] if process.returncode == 0 else []
    said = json.loads(last[0]) if last and last[0].startswith("{") else {}
    good = bool(said.get("launches") and said["weights"] and said["equal"])
    if not good:
        print(f"{path.name}: {said or error[-1500:]}", file=sys.stderr)
    return good


def main():
    """Print the table, and last the sums as a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        rows = {path.name: look(path, Path(folder)) for path in old_files(Path(folder))}
    print(
        as_text(
            [["file", *next(iter(rows.values()))], *([name, *map(int, row.values())] for name, row in rows.items())]
        )
    )
    sums = {name: sum(int(row[name]) for row in rows.values()) for name in next(iter(rows.values()))}
    print(json.dumps({"files": len(rows), **sums}))
    return int(any(sums[name] for name in ("crashed", "unparsable", "not_idempotent", "unreported_dead_names")))


if __name__ == "__main__":
    sys.exit(main())
