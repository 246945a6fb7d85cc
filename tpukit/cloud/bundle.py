"""A trainer as one file that any machine with Python can run: a worker function, or a script, and what it imports."""

import ast
import functools
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpukit.cloud.contents import NOT_DEFINED, NOTEBOOK, contents, module_names
from tpukit.cloud.kit_wheel import NAME, kit_wheel, zipped
from tpukit.cloud.notebook_source import notebook_source
from tpukit.cloud.requirements import Imports, parse
from tpukit.essentials.show import NoSuchFile, SystemFailed, WrongType, WrongValue

_MOST_BYTES = 10 * 2**20
_SECONDS_TO_IMPORT = 600
_CONTENTS, _START = (Path(__file__).with_name(name) for name in ("contents.py", "job_start.py"))


@dataclass(frozen=True)
class Bundle:
    """A trainer's files.

    Attributes:
        name: of the function or script.
        contents: the bytes of each file, by path; `__main__.py` is what `python name.zip` runs, `tpukit.json` says what
            the bundle is and which Python and packages it was made with.
        needs: the packages that it imports and that are not sent, with the versions of this machine.
        launches: whether it is a worker function, which is launched on every core, and no script.
        tried: how far it was run on this machine, in an interpreter of its own.
    """

    name: str
    contents: dict[str, bytes]
    needs: tuple[str, ...]
    launches: bool
    tried: str

    @property
    def files(self) -> dict[str, str]:
        """The text of what is Python, by path, to read it."""
        return {path: _text(content, path) for path, content in self.contents.items() if path.endswith(".py")}

    def to_bytes(self) -> bytes:
        """Return the zip file; the same files give the same bytes."""
        return zipped(dict(sorted(self.contents.items())))

    def save(self, path: str | Path) -> Path:
        """Write the zip file, and never over another: a folder of data often has a train.zip.

        Raises:
            ValueError: a file with another content has this name.
        """
        path, content = Path(path), self.to_bytes()
        try:
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            if not path.is_file() or path.read_bytes() != content:
                raise WrongValue(
                    f"{path} is there already, and is not this bundle", fix=f"another name, or delete {path} first"
                ) from None
        return path


def make_bundle(trainer: Callable | str | Path, *, needs: Mapping[str, str] | None = None) -> Bundle:
    """Collect a worker function, `train`; one of a file, "train.py:train"; or a script, "train.py".

    A function takes a `Core` first and is launched on every core. One of a module brings its file and the modules
    beside it that it imports; one of a notebook, the functions, classes, imports and constants that it uses. A script
    of any framework is run as it is, and needs no tpukit where it runs. A module that uses `__file__` brings the files
    beside it that it names.

    What a function is made of is compared with what the bundle makes of it, in an interpreter that has neither the
    notebook nor its folder; so a bundle is what runs here, or there is none.

    Args:
        trainer: one of these.
        needs: what to install for a module that this machine does not have: {"cv2": "opencv-python==4.12.0.88"}.

    Raises:
        TypeError: it is none of these, or uses what cannot be sent.
        FileNotFoundError: no such file.
        ValueError: the file has no such function; it all is larger than 10 MiB; nobody knows what brings a module; or
            the bundle is another function than the notebook's.
    """
    if isinstance(trainer, str | Path):
        return _of_a_file(str(trainer), needs or {})
    if not isinstance(trainer, types.FunctionType) or "<" in trainer.__qualname__ or "." in trainer.__qualname__:
        raise WrongType(
            f"a job runs a function of a module or notebook, got {trainer!r}",
            found="a lambda, a method, a partial or a function inside another cannot be imported where it runs",
            fix="define it with def at the top level; what it needs goes through args=",
        )
    _check_plain(trainer.__name__, inspect.iscoroutinefunction(trainer))
    module = inspect.getmodule(trainer)
    file = getattr(module, "__file__", None)
    if trainer.__module__ == "__main__" or not file:
        folder = Path(file).resolve().parent if file else Path.cwd()
        own = {f"{NOTEBOOK}.py": notebook_source(trainer).encode()}
        return _bundle(own, Imports(folder, needs or {}), NOTEBOOK, trainer.__name__, trainer)
    root = Path(file).resolve().parents[module.__name__.count(".") + (Path(file).name == "__init__.py")]
    imports = Imports(root, needs or {})
    imports.add(f"import {module.__name__}", f"{module.__name__}")
    return _bundle({}, imports, module.__name__, trainer.__name__, trainer)


def _of_a_file(given: str, needs: Mapping[str, str]) -> Bundle:
    place, _, function = given.partition(".py:")
    file = Path(place + ".py") if function else Path(place)
    if given.partition(":")[0].endswith(".ipynb"):
        raise WrongValue(
            f"{given}: a function of a notebook is sent from its kernel, which knows what its cells have made",
            fix="in the notebook: tpukit.cloud.vertex.job(train, ...); or put the function into train.py",
        )
    if file.suffix != ".py" or not file.is_file():
        raise NoSuchFile(f"no such file: {file}", fix='"train.py:train", or "train.py" for a script')
    own = {file.name: file.read_bytes()}
    tree = parse(_text(own[file.name], str(file)), str(file))
    if function:
        _check_defined(tree, file, function)
    return _bundle(own, Imports(file.resolve().parent, needs), file.stem, function)


def _bundle(
    own: dict[str, bytes], imports: Imports, module: str, function: str, trainer: Callable | None = None
) -> Bundle:
    name, files, waiting = function or module, dict(own), list(own) + list(imports.files)
    while waiting:
        path = waiting.pop()
        if path not in files:
            _check_size({one: file.stat().st_size for one, file in imports.files.items()})  # before it is read
            files[path] = imports.files[path].read_bytes()
        if path.endswith(".py"):
            text = _text(files[path], path)
            waiting += imports.add(text, path)
            waiting += imports.beside(text, path)
    _check_size({path: len(content) for path, content in files.items()})
    if function:
        for one in ("torch", "torch_xla"):  # what the kit itself imports where it launches
            imports.require(one)
    needed = tuple(sorted(imports.requirements))
    python = "{}.{}".format(*sys.version_info)
    about = {"trainer": name, "module": module, "function": function, "python": python, "needs": needed}
    files |= {"__main__.py": _START.read_bytes(), "tpukit.json": json.dumps(about, indent=1).encode()}
    tried = "its imports were found" if not function else _try(files, imports, module, function, trainer)
    if function or imports.uses_kit:
        files[NAME] = kit_wheel()
    return Bundle(name.replace("_", "-"), files, needed, bool(function), tried)


def _try(files: dict[str, bytes], imports: Imports, module: str, function: str, trainer: Callable | None) -> str:
    """Import a function in an interpreter of its own, and compare it with the notebook's; return how far that went."""
    kit = str(Path(__file__).parents[2])
    places = [path for path in sys.path if path and str(Path(path).resolve()) not in {*imports.folders, os.getcwd()}]
    told = _imported(tuple(sorted(files.items())), module, function, (kit, *places))
    if "error" in told:
        missing = (told["module"] or "").partition(".")[0]
        if missing and missing in {one.partition(".")[0] for one in imports.given}:
            return f"not imported: {missing} is not installed here"
        raise WrongValue(
            f"{function} cannot be imported where it has neither this notebook nor its folder: {told['error']}",
            found=told["where"] or "it ended before its end",
            fix=f"make {told['where'].partition(',')[0] or 'the trainer'} one that `python` imports in an empty folder",
        )
    rows = told["rows"]
    open_names = [name.rpartition(".")[2] for name, row in rows.items() if row == NOT_DEFINED]
    if open_names:
        raise WrongValue(
            f"{function} uses {', '.join(open_names)}, which nothing defines",
            fix=f"define or import {open_names[0]} where {function} is; or pass it through args=",
        )
    if trainer:
        _compare(contents(trainer, module_names(files)), rows, function)
    return "imported in an interpreter of its own" + (", and compared" if trainer else "")


def _compare(here: dict[str, str], there: dict[str, str], function: str) -> None:
    """Raise ValueError where the notebook's function and the bundle's are not the same."""
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            shown = [(rows.get(name) or "nothing") for rows in (here, there)]
            code = all(one.startswith("a function, ") for one in shown)
            raise WrongValue(
                f"{function} would not be the same in the job: {name} is another",
                found="its code"
                if code
                else f"in the notebook {shown[0][:200]}, made again from its source {shown[1][:200]}",
                fix="run the cells that make it again, in their order; or write the value where it is used",
            )


@functools.lru_cache(16)
def _imported(files: tuple[tuple[str, bytes], ...], module: str, function: str, places: tuple[str, ...]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        sent, empty, to = (Path(folder, name) for name in ("sent", "empty", "told.json"))
        empty.mkdir()
        for path, content in files:
            (sent / path).parent.mkdir(parents=True, exist_ok=True)
            (sent / path).write_bytes(content)
        # -P: the folder of contents.py, which is this room, is not where modules are looked for
        command = [sys.executable, "-P", _CONTENTS, sent, module, function, to]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        options = {"cwd": empty, "env": environ, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            done = subprocess.run(command, timeout=_SECONDS_TO_IMPORT, **options)
        except subprocess.TimeoutExpired:
            return {"error": f"it was not imported after {_SECONDS_TO_IMPORT} s", "where": "", "module": None}
        if to.exists():
            return json.loads(to.read_text())
        return {"error": f"exit status {done.returncode}: {done.stderr.strip()[-300:]}", "where": "", "module": None}


def _check_size(sizes: dict[str, int]) -> None:
    if sum(sizes.values()) > _MOST_BYTES:
        raise WrongValue(
            f"the trainer has {len(sizes)} files of more than 10 MiB in all",
            found=f"{', '.join(sorted(sizes, key=lambda path: -sizes[path])[:3])}, ...",
            fix="put what is large into the image, or into a bucket whose path comes through args=",
        )


def _check_defined(tree: ast.Module, file: Path, function: str) -> None:
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    names = [one.id for node in tree.body for one in ast.walk(node) if isinstance(one, ast.Name)]
    names += [alias.asname or alias.name for node in tree.body for alias in getattr(node, "names", ())]
    if function not in functions and function not in names:
        raise WrongValue(
            f"{file} defines no function {function}",
            found=", ".join(functions) or "no function at its top level",
            fix=f"{file}:{next(iter(functions), 'train')}",
        )
    _check_plain(function, isinstance(functions.get(function), ast.AsyncFunctionDef))


def _check_plain(function: str, is_async: bool) -> None:
    if is_async:
        raise WrongType(
            f"{function} is an async def, and a core runs a plain function",
            fix=f"def {function}(core, ...): return asyncio.run(...)",
        )


def _text(content: bytes, path: str) -> str:
    """Return the text of a file as Python reads it: its encoding stands in the file."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise SystemFailed(f"{path} is no text that Python reads: {error}", fix=f"save {path} as UTF-8") from error
