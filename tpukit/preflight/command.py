"""Run a preflight in a terminal: `python -m tpukit preflight train.py:train --chip v5e-8`."""

import argparse
import ast
import contextlib
import importlib
import importlib.util
import symtable
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, NotInstalledError, PathNotFoundError
from tpukit.essentials.environment import load_notebook
from tpukit.preflight.libtpu import fetch_libtpu
from tpukit.preflight.step_report import preflight
from tpukit.profiling import find_tpu

_MOST_NAMES = 12  # an error lists at most this many functions of a file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.usage = "python -m tpukit preflight [options] function"
    parser.epilog = "Example: python -m tpukit preflight train.py:train --chip v5e-8"
    add = parser.add_argument
    function = "train.py:train, package.module:train, or notebook.ipynb:train"
    add("function", help=f"{function}, of which the cells up to the function are run")
    chips = "such as v5e-1, v5e-8, v6e-8, v3-8 (default: v5e-8)"
    add("--chip", default="v5e-8", help=chips)
    shard = "split a model that is too large for one chip over all chips, as launch(shard=...)"
    add("--shard", choices=["fsdp"], help=shard)
    arguments = "arguments of the function, as a list: '[3, 0.1]'"
    add("--args", default="[]", metavar="JSON", help=arguments)
    add("--libtpu", metavar="VERSION", help="0.0.17 for Kaggle, 0.0.21.1 for Colab")
    add("--fetch", action="store_true", help="download libtpu first, if it is not here")
    add("--samples", type=int, help="samples per epoch, for the cost of an epoch")
    keep = "write the compiled step into this folder, for launch(compile_cache=FOLDER)"
    add("--keep", metavar="FOLDER", help=keep)
    figure = "draw the memory and the time of the step into a PNG or PDF file"
    add("--figure", metavar="FILE", help=figure)


def run(given: argparse.Namespace) -> int:
    """Print the preflight; return the exit status, 1 if the step needs too much memory."""
    chip = find_tpu(given.chip)  # checked before the function's file runs, which may take a while
    function = find_function(given.function)
    if given.fetch:
        fetch_libtpu(given.libtpu)
    found = preflight(
        function,
        *given.args,
        chip=chip,
        libtpu=given.libtpu,
        samples=given.samples,
        shard=given.shard,
        keep=given.keep,
    )
    print(found)
    if given.figure:
        found.figure().savefig(given.figure)
    return 0 if found.fits else 1


def find_function(name: str) -> Callable:
    """Find the function with a name such as "file.py:train", "module:train" or "file.ipynb:train".

    Python files and modules are imported. In a notebook, the code cells up to the last one that
    defines or imports the function are run.

    Raises:
        ValueError: the function or module does not exist; a .py file, or one that it imports, is
            not valid Python; or one of these cells raises an error. Other errors of a .py file or
            module pass through.
        FileNotFoundError: the file does not exist.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        fact = f"the function must have the form file.py:train, got {name!r}"
        raise InvalidValueError(fact, fix="write FILE:FUNCTION")
    scope = _scope(place, function)
    found = scope.get(function)
    if not callable(found):
        names = [key for key in scope if callable(scope[key]) and not key.startswith("_")]
        raise _no_function(place, function, names)
    return found


def _no_function(place: object, function: str, names: list[str]) -> InvalidValueError:
    fix = f"define {function} in {place}"
    if names:
        fix = f"for example: {place}:{names[-1]}"
    return InvalidValueError(
        f"{place} has no function {function}",
        found=", ".join(names[:_MOST_NAMES]) or "it defines no function",
        fix=fix,
    )


def _scope(place: str, function: str) -> dict:
    """Return the names that a module, a Python file or a notebook defines."""
    file = Path(place)
    if file.suffix not in (".py", ".ipynb"):
        return _scope_of_module(place)
    if not file.is_file():
        raise PathNotFoundError(
            f"there is no file {place}", fix=f"pass a path relative to {Path.cwd()}"
        )
    sys.path.insert(0, str(file.parent))  # so that it can import files of its folder
    if file.suffix == ".py":
        return _scope_of_file(file)
    return _scope_of_notebook(file, function)


def _scope_of_module(name: str) -> dict:
    fact = f"there is no module {name}"
    fix = "name a module that Python can import from here, or a file: train.py:train"
    if name.startswith("."):  # such as "./train", which Python would take for a relative import
        raise InvalidValueError(fact, fix=fix)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If `error.name` is another module, `name` exists, but imports a module that is missing.
        is_missing = name == error.name or name.startswith(f"{error.name}.")
        if not is_missing:
            raise
        raise InvalidValueError(fact, fix=fix) from error
    return vars(module)


def _scope_of_file(file: Path) -> dict:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        line = (error.text or "").strip()
        place = error.filename or file  # another file, if the function's file imports it
        fact = f"{place} is not valid Python: {error.msg}"
        raise InvalidValueError(fact, found=f"line {error.lineno}: {line}") from error
    return vars(module)


def _scope_of_notebook(file: Path, function: str) -> dict:
    """Run the code cells of a notebook up to the last cell that defines or imports the function.

    IPython translates lines with %, %% and ! as in Jupyter.
    """
    shell = _shell()
    of_ipython = dict(shell.user_ns)  # names that no cell has defined, such as `exit`
    cells = load_notebook(file)["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    texts = [shell.transform_cell(source) for source in sources]
    defining = [number for number, text in enumerate(texts, start=1) if _defines(text, function)]
    if len(defining) > 1:
        numbers = ", ".join(map(str, defining))
        print(f"{file.name} defines {function} in code cells {numbers}: the last one is used")
    if not defining:
        raise _no_function(file, function, _functions_in(texts))
    for number, text in enumerate(texts[: defining[-1]], start=1):
        try:
            with shell.builtin_trap:  # defines get_ipython and display
                exec(compile(text, f"{file.name}, code cell {number}", "exec"), shell.user_ns)
        except Exception as error:
            lines = sources[number - 1].splitlines()
            save = f"save the function as a file: train.py:{function}"
            raise InvalidValueError(
                f"code cell {number} of {file.name} does not run: {type(error).__name__}: {error}",
                found=lines[0] if lines else "",
                fix=f"make the notebook run up to {function}, or {save}",
            ) from error
    names = shell.user_ns
    return {name: names[name] for name in names if of_ipython.get(name) is not names[name]}


def _shell():
    """Return an IPython shell without a history, separate from the shell of this process."""
    try:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config
    except ImportError as error:
        fact = "a notebook's cells are read by IPython, which is not installed"
        raise NotInstalledError(fact, fix="pip install ipython") from error
    with tempfile.TemporaryDirectory() as folder:  # for the shell's profile
        no_history = Config(HistoryManager={"enabled": False})
        # A module of another name, because IPython adds it to sys.modules, where __main__ is this
        # command.
        module = types.ModuleType("notebook")
        shell = InteractiveShell(ipython_dir=folder, config=no_history, user_module=module)
    shell.user_ns["__name__"] = "__main__"
    return shell


def _functions_in(texts: list[str]) -> list[str]:
    """Return the names of the functions that code defines outside of blocks."""
    names = []
    for text in texts:
        with contextlib.suppress(SyntaxError):
            body = ast.parse(text).body
            names += [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return names


def _defines(text: str, name: str) -> bool:
    """Return whether code defines, assigns or imports a name; False if it is not valid Python."""
    with contextlib.suppress(SyntaxError, KeyError):  # KeyError: the name does not occur
        symbol = symtable.symtable(text, "cell", "exec").lookup(name)
        return symbol.is_assigned() or symbol.is_imported()
    return False
