"""A trainer as one file that any machine with Python can run: a worker function, or a script, and what it imports."""

import ast
import inspect
import io
import sys
import types
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tpukit.cloud.notebook_source import notebook_source
from tpukit.essentials.show import NoSuchFile, WrongType, WrongValue

_MOST_BYTES = 10 * 2**20
_OURS = "tpukit"
_OF_A_NOTEBOOK = "from_the_notebook"  # the module of a notebook's function


@dataclass(frozen=True)
class Bundle:
    """A trainer's files.

    Attributes:
        name: of the function or script.
        files: their text, by path; `__main__.py` is what `python name.zip` runs.
        needs: the packages that they import and that are not sent: the machine must have them.
        launches: whether it is a worker function, which is launched on every core, and no script.
    """

    name: str
    files: dict[str, str]
    needs: tuple[str, ...]
    launches: bool

    def to_bytes(self) -> bytes:
        """Return the zip file; the same files give the same bytes."""
        written = io.BytesIO()
        with zipfile.ZipFile(written, "w") as archive:
            for path, text in sorted(self.files.items()):
                entry = zipfile.ZipInfo(path)  # without the time of this moment
                archive.writestr(entry, text.encode(), zipfile.ZIP_DEFLATED, compresslevel=9)
        return written.getvalue()


def make_bundle(trainer: Callable | str | Path) -> Bundle:
    """Collect a worker function, `train`; one of a file, "train.py:train"; or a script, "train.py".

    A function takes a `Core` first and is launched on every core. One of a module brings its file and the modules
    beside it that it imports; one of a notebook, the functions, classes, imports and constants that it uses. A script
    of any framework is run as it is, and needs no tpukit where it runs.

    Raises:
        TypeError: it is none of these, or uses what cannot be sent.
        FileNotFoundError: no such file.
        ValueError: the file has no such function, or it all is larger than 10 MiB.
    """
    if isinstance(trainer, str | Path):
        path, _, function = str(trainer).partition(".py:")
        file = Path(path + ".py") if function else Path(path)
        if file.suffix != ".py" or not file.is_file():
            raise NoSuchFile(f"no such file: {file}", fix='"train.py:train", or "train.py" for a script')
        files = _with_neighbours(file.resolve(), file.resolve().parent)
        if function:
            return _bundle(function, files, file.stem, _defined(file, function))
        files["__main__.py"] = files.pop(file.name)
        return _bundle(file.stem, files, launches=False)
    if not isinstance(trainer, types.FunctionType) or "<" in trainer.__qualname__ or "." in trainer.__qualname__:
        raise WrongType(
            f"a job runs a function of a module or notebook, got {trainer!r}",
            found="a lambda, a method, a partial or a function inside another cannot be imported where it runs",
            fix="define it with def at the top level; what it needs goes through args=",
        )
    module = inspect.getmodule(trainer)
    file = getattr(module, "__file__", None)
    if trainer.__module__ == "__main__" or not file:
        text, folder = notebook_source(trainer), Path(file).resolve().parent if file else Path.cwd()
        files = {f"{_OF_A_NOTEBOOK}.py": text, **_files(_neighbours(text, folder), folder)}
        return _bundle(trainer.__name__, files, _OF_A_NOTEBOOK, trainer.__name__)
    root = Path(file).resolve().parents[module.__name__.count(".") + (Path(file).name == "__init__.py")]
    files = _with_neighbours(Path(file).resolve(), root)
    return _bundle(trainer.__name__, files, module.__name__, trainer.__name__)


def _bundle(name: str, files: dict[str, str], module: str = "", function: str = "", launches: bool = True) -> Bundle:
    if launches:
        files = files | {
            "__main__.py": "import sys\n\nfrom tpukit.cloud.run_trainer import run_trainer\n\n"
            f'if __name__ == "__main__":\n    run_trainer("{module}", "{function}", sys.argv[1:])\n'
        }
    if sum(map(len, files.values())) > _MOST_BYTES:
        raise WrongValue(
            f"the trainer has {len(files)} files of more than 10 MiB in all",
            found=f"{', '.join(sorted(files, key=lambda path: -len(files[path]))[:3])}, ...",
            fix="put what is large into the image, or into a package that it installs",
        )
    sent = {Path(path).parts[0].removesuffix(".py") for path in files}
    imported = {name.partition(".")[0] for text in files.values() for name in _imports(text)}
    needs = sorted(imported - sent - set(sys.stdlib_module_names))
    return Bundle(name.replace("_", "-"), files, tuple(needs), launches)


def _defined(file: Path, function: str) -> str:
    names = [one.name for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef)]
    if function not in names:
        raise WrongValue(
            f"{file} defines no function {function}",
            found=", ".join(names) or "no function at its top level",
            fix=f"{file}:{(names or ['train'])[0]}",
        )
    return function


def _with_neighbours(file: Path, root: Path) -> dict[str, str]:
    """Return the text of a file, and of all files below the same folder that it imports, directly or not."""
    package = file.parent != root  # a module of a package: all of the package
    return _files([file, *((root / file.relative_to(root).parts[0]).rglob("*.py") if package else ())], root)


def _files(first: Iterable[Path], root: Path) -> dict[str, str]:
    files, waiting = {}, [*first]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix()
        if name not in files:
            files[name] = path.read_text()
            waiting += _neighbours(files[name], root)
    return files


def _neighbours(text: str, root: Path) -> list[Path]:
    """Return the files below a folder that a text imports."""
    return [path for module in _imports(text) for path in _found(module.partition(".")[0], root)]


def _found(module: str, root: Path) -> Iterable[Path]:
    if module == _OURS or "site-packages" in root.parts:
        return []
    package = root / module
    if (package / "__init__.py").is_file():
        return package.rglob("*.py")
    return [root / f"{module}.py"] if (root / f"{module}.py").is_file() else []


def _imports(text: str) -> set[str]:
    """Return the modules that a text imports by their full name, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
    return found
