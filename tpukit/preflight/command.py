"""`python -m tpukit preflight train.py:train --chip v5e-8`: a preflight in a terminal."""

import argparse
import ast
import importlib
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

from tpukit.essentials.show import NoSuchFile, NotInstalled, WrongValue
from tpukit.measure import find_tpu
from tpukit.preflight.libtpu import fetch_libtpu
from tpukit.preflight.step_report import preflight


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "function", help="train.py:train, package.module:train, or notebook.ipynb:train, whose cells up to it are run"
    )
    parser.add_argument("--chip", default="v5e-8", help="such as v5e-1, v5e-8, v6e-8, v3-8 (default: v5e-8)")
    parser.add_argument("--shard", choices=["fsdp"], help="for a model that one chip cannot hold: as in launch")
    parser.add_argument("--args", default="[]", metavar="JSON", help="what the function takes, as a list: '[3, 0.1]'")
    parser.add_argument("--libtpu", metavar="VERSION", help="0.0.17 for Kaggle, 0.0.21.1 for Colab")
    parser.add_argument("--fetch", action="store_true", help="download libtpu first, if it is not here")
    parser.add_argument("--samples", type=int, help="of an epoch, for what that costs")
    parser.add_argument(
        "--keep", metavar="FOLDER", help="leave the compiled step there, for launch(keep_compiles=FOLDER)"
    )
    parser.add_argument("--figure", metavar="FILE", help="draw where memory and time go, into a PNG or PDF file")


def run(given: argparse.Namespace) -> int:
    """Print the preflight; the exit status is 1 where the step does not fit."""
    chip = find_tpu(given.chip)  # before the function's file is run, which may take its time
    function = find_function(given.function)
    if given.fetch:
        fetch_libtpu(given.libtpu)
    options = {"libtpu": given.libtpu, "samples": given.samples, "shard": given.shard, "keep": given.keep}
    found = preflight(function, *given.args, chip=chip, **options)
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
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        text = (error.text or "").strip()
        raise WrongValue(f"{file} is no Python: {error.msg}", found=f"line {error.lineno}: {text}") from error
    return vars(module)


def _of_a_notebook(file: Path, function: str) -> dict:
    """Run the code cells up to the last that defines the function, as "Run before" would; %, %% and ! are IPython's."""
    shell = _shell()
    sources = ["".join(cell["source"]) for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    texts = [shell.transform_cell(text) for text in sources]
    defining = [number for number, text in enumerate(texts, start=1) if _defines(text, function)]
    if len(defining) > 1:
        print(f"{file.name} defines {function} in code cells {', '.join(map(str, defining))}: the last is meant")
    for number, text in enumerate(texts[: defining[-1]] if defining else [], start=1):
        try:
            with shell.builtin_trap:  # get_ipython, display
                exec(compile(text, f"{file.name}, code cell {number}", "exec"), shell.user_ns)
        except Exception as error:
            raise WrongValue(
                f"code cell {number} of {file.name} does not run: {type(error).__name__}: {error}",
                found=sources[number - 1].splitlines()[0] if sources[number - 1] else "",
                fix=f"make the notebook run up to {function}, or save the function as a file: train.py:{function}",
            ) from error
    return shell.user_ns


def _shell():
    """Return a shell of its own, which keeps no history and is nobody's `get_ipython()`."""
    try:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config
    except ImportError as error:
        raise NotInstalled("cells are read by IPython, which is not here", fix="pip install ipython") from error
    with tempfile.TemporaryDirectory() as folder:  # for its profile
        no_history = Config(HistoryManager={"enabled": False})
        module = types.ModuleType("notebook")  # IPython puts it into sys.modules, where __main__ is this command
        shell = InteractiveShell(ipython_dir=folder, config=no_history, user_module=module)
    shell.user_ns["__name__"] = "__main__"
    return shell


def _defines(text: str, function: str) -> bool:
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return function in [getattr(node, "name", None) for node in body] + [getattr(one, "id", None) for one in targets]
