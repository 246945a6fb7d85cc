"""`python -m tpukit preflight train.py:train --chip v5e-8`: a preflight in a terminal."""

import argparse
import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

from tpukit.cloud import parse_args
from tpukit.essentials.machine import find_tpu
from tpukit.essentials.show import NoSuchFile, WrongValue
from tpukit.preflight.libtpu import fetch_libtpu
from tpukit.preflight.recording import NoPreflight
from tpukit.preflight.step_report import preflight

TOLD = (NoPreflight,)  # errors whose text is all that is shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "function", help="train.py:train, package.module:train, or notebook.ipynb:train, whose cells up to it are run"
    )
    parser.add_argument("--chip", default="v5e-8", help="such as v5e-1, v5e-8, v6e-8, v3-8 (default: v5e-8)")
    parser.add_argument("--args", default="[]", metavar="JSON", help="what the function takes, as a list: '[3, 0.1]'")
    parser.add_argument("--libtpu", metavar="VERSION", help="0.0.17 for Kaggle, 0.0.21.1 for Colab")
    parser.add_argument("--fetch", action="store_true", help="download libtpu first, if it is not here")
    parser.add_argument("--samples", type=int, help="of an epoch, for what that costs")
    parser.add_argument("--figure", metavar="FILE", help="draw where memory and time go, into a PNG or PDF file")


def run(given: argparse.Namespace) -> int:
    """Print the preflight; the exit status is 1 where the step does not fit."""
    args = parse_args(given.args)
    chip = find_tpu(given.chip)  # before the function's file is run, which may take its time
    function = find_function(given.function)
    if given.fetch:
        fetch_libtpu(given.libtpu)
    found = preflight(function, *args, chip=chip, libtpu=given.libtpu, samples=given.samples)
    print(found)
    if given.figure:
        found.figure().savefig(given.figure)
    return 0 if found.fits else 1


def find_function(name: str) -> Callable:
    """Return the function that "file.py:name", "module:name" or "notebook.ipynb:name" names.

    Raises:
        ValueError: there is none.
        FileNotFoundError: there is no such file.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise WrongValue(f"a function is named file.py:train, got {name!r}", fix="file, colon, name of the function")
    file = Path(place)
    if file.suffix not in (".py", ".ipynb"):
        scope = vars(importlib.import_module(place))
    elif not file.is_file():
        raise NoSuchFile(f"there is no file {place}", fix=f"the path from here, {Path.cwd()}")
    elif file.suffix == ".py":
        scope = _of_a_file(file)
    else:
        scope = _of_a_notebook(file, function)
    found = scope.get(function)
    if not callable(found):
        names = [key for key, value in scope.items() if callable(value) and not key.startswith("_")]
        raise WrongValue(f"{place} has no function {function}", found=f"{', '.join(names[:12])}")
    return found


def _of_a_file(file: Path) -> dict:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, str(file.parent))  # its neighbours, as when it is run
    spec.loader.exec_module(module)
    return vars(module)


def _of_a_notebook(file: Path, function: str) -> dict:
    """Run the code cells up to the one that defines the function, in their order, as "Run before" would."""
    scope: dict = {"__name__": "__main__"}
    sources = ["".join(cell["source"]) for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    cells = ["\n".join("pass" if line[:1] in "%!" and line else line for line in text.splitlines()) for text in sources]
    last = [number for number, text in enumerate(cells) if _defines(text, function)]
    for number, text in enumerate(cells[: last[0] + 1] if last else []):
        exec(compile(text, f"{file.name}, code cell {number + 1}", "exec"), scope)
    return scope


def _defines(text: str, function: str) -> bool:
    try:
        return any(getattr(node, "name", None) == function for node in ast.parse(text).body)
    except SyntaxError:
        return False
