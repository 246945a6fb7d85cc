"""What a trainer imports: files of its own, which are sent, and distributions of this machine, which a job must have.

Nothing is asked of a package index by a name that was guessed: anybody may have registered it, and their code would run
with the user's data and account. A requirement is a distribution of this machine that owns the imported file, or what
the user names for a module.
"""

import ast
import functools
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from tpukit.essentials.show import WrongType, WrongValue

KIT = "tpukit"
_OF_THE_KIT = ("torch", "torch_xla", "torchvision", "libtpu")  # its own requirements: they come with its wheel
_INSTALLED = ("site-packages", "dist-packages")
_TENSORFLOW = "tensorflow-tpu==2.19.1"  # plain TensorFlow has no TPU; as in examples/


class Imports:
    """Finds what texts import: Python's own way, from the trainer's folder first, without importing anything.

    Args:
        root: the trainer's folder.
        needs: by module, what to install for it; "" for nothing.
    """

    def __init__(self, root: Path, needs: Mapping[str, str]):
        importlib.invalidate_caches()  # a folder may have been made a moment ago
        others = [path for path in sys.path if path and Path(path).resolve() != Path.cwd()]
        self._root, self._path, self.given = root, [str(root), *others], check_needs(needs)
        self.files: dict[str, Path] = {}  # those that are sent, by their names in the bundle
        self.requirements: set[str] = set()
        self.folders = {str(root)}  # where the trainer's own modules are
        self.uses_kit = False

    def add(self, text: str, where: str) -> list[str]:
        """Add what a text imports; return the names of the files that are new.

        Raises:
            ValueError: nobody knows what brings a module.
        """
        before = set(self.files)
        for module, needed in imported(parse(text, where)):
            if module.partition(".")[0] == KIT:
                self.uses_kit = True
            elif not self.require(module) and needed:
                raise _not_known(module, where)
        return sorted(set(self.files) - before)

    def beside(self, text: str, where: str) -> list[str]:
        """Add the files that a module names and finds by its `__file__`; return their names."""
        tree = ast.parse(text)
        folder = (self.files[where] if where in self.files else self._root / where).parent
        if "__file__" not in [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]:
            return []
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str]
        named = [folder / one for one in texts if re.fullmatch(r"\w[\w./ -]{,200}", one) and (folder / one).exists()]
        found = [
            file for one in named for file in ([one] if one.is_file() else sorted(one.rglob("*"))) if file.is_file()
        ]
        new = {(Path(where).parent / one.relative_to(folder)).as_posix(): one for one in found if ".." not in one.parts}
        new = {name: file for name, file in new.items() if name not in self.files and file.suffix != ".pyc"}
        self.files |= new
        return list(new)

    def require(self, module: str) -> bool:
        """Add what brings a module; return whether it is known, or comes with Python or the kit."""
        top = module.partition(".")[0]
        names = [module[: end.start()] for end in re.finditer(r"[.]|$", module)]
        if given := [self.given[name] for name in reversed(names) if name in self.given]:
            self.requirements |= set(filter(None, given[:1]))
            return True
        first, found = _find(module, self._path)
        owners = _owners(found) if found else []
        if top == "tensorflow" and owners and not owners[0].startswith("tensorflow-tpu"):
            owners = []
        own = list(_own_files(first)) if first else []
        for file, folder in own:
            self.files[file.relative_to(folder).as_posix()] = file
            self.folders.add(str(folder))
        self.requirements |= set(owners)
        in_own_folder = own and (found is first or not _is_installed(_places(found)[0].parent))
        return bool(owners or in_own_folder) or top in (*sys.stdlib_module_names, *_OF_THE_KIT)


def check_needs(needs: Mapping[str, str]) -> Mapping[str, str]:
    """Return what a user names for modules; TypeError or ValueError for what is none."""
    if not isinstance(needs, Mapping) or not all(isinstance(one, str) for pair in needs.items() for one in pair):
        raise WrongType(f"needs is a dict of module and package, got {needs!r}", fix='needs={"cv2": "opencv-python"}')
    for module, package in needs.items():
        if not re.fullmatch(r"\w+([.]\w+)*", module) or not re.fullmatch(r"[A-Za-z0-9][^\n\r\0]*|", package):
            raise WrongValue(
                f"{package!r} is nothing to install for {module!r}", fix="--needs cv2=opencv-python==4.12.0.88"
            )
    return needs


def parse(text: str, where: str) -> ast.Module:
    """Return the tree of a file's text; ValueError with its line for one that Python does not read."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise WrongValue(
            f"Python does not read {where}: {error.msg}",
            found=f"line {error.lineno}: {(error.text or '').strip()}",
            fix=f"python -m py_compile {where}, until it is silent",
        ) from error


def imported(tree: ast.AST, needed: bool = True) -> Iterator[tuple[str, bool]]:
    """Yield (module, whether the text fails without it): of `from a import b`, a.b, which may be a name in a."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, needed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}".removesuffix(".*"), needed) for alias in node.names)
        elif isinstance(node, ast.If) and re.search(r"\bTYPE_CHECKING$", ast.unparse(node.test)):
            for other in node.orelse:  # what is below is for checkers of types, and never runs
                yield from imported(ast.Module([other], []), needed)
        else:
            yield from imported(node, needed and not _may_fail(node))


def _may_fail(node: ast.AST) -> bool:
    """Say whether a statement goes on where an import in it fails."""
    caught = [ast.unparse(one.type) if one.type else "Exception" for one in getattr(node, "handlers", ())]
    caught += [ast.unparse(one) for one in getattr(node, "items", ()) if "suppress(" in ast.unparse(one)]
    return any(re.search(r"\b(ImportError|ModuleNotFoundError|(Base)?Exception)\b", one) for one in caught)


def _find(module: str, path: Iterable[str]) -> tuple[ModuleSpec | None, ModuleSpec | None]:
    """Return where the first and the last part of a dotted name are that is a module."""
    first = last = None
    for part in module.split("."):
        found = PathFinder.find_spec(part, list(path))
        if found is None and last is None and part not in sys.stdlib_module_names:
            found = _of_other_finders(part)
        if found is None:
            break
        first, last = first or found, found
        path = list(found.submodule_search_locations or ())
        if not path:
            break
    return first, last


def _of_other_finders(module: str) -> ModuleSpec | None:
    """Return what finds a package that was installed to be edited: such a one is no entry of the path."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):  # __main__ has none
        return None


def _places(spec: ModuleSpec) -> list[Path]:
    """Return where a module is: its file, or the folders of a package without one."""
    file = spec.origin if spec.origin and spec.has_location else None
    return [Path(one).resolve() for one in ([file] if file else spec.submodule_search_locations or ())]


def _own_files(spec: ModuleSpec) -> Iterator[tuple[Path, Path]]:
    """Yield (file, the folder that it is imported from) of a module or a package that nobody has installed."""
    for place in _places(spec):
        folder = place.parent if place.name == "__init__.py" else place
        if not _is_installed(folder.parent):
            files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder] if folder.suffix == ".py" else []
            yield from ((file, folder.parent) for file in files)


@functools.lru_cache(256)
def _is_installed(folder: Path) -> bool:
    """Say whether a folder is of the standard library, or one that packages are installed into."""
    installed = not set(_INSTALLED).isdisjoint(folder.parts) or any(folder.glob("*.dist-info"))
    return installed or folder.is_relative_to(Path(ast.__file__).resolve().parent)


def _owners(spec: ModuleSpec) -> list[str]:
    """Return the installed distributions that own a module's file, with their versions, or where they came from."""
    found = []
    for file in _places(spec):
        for folder in [one for one in file.parents if any(one.glob("*.dist-info"))][:1] if file.is_file() else ():
            line = f"{file.relative_to(folder).as_posix()},"
            for package in metadata.distributions(path=[str(folder)]):
                if f"\n{line}" in f"\n{package.read_text('RECORD') or ''}":
                    found += filter(None, [_requirement(package)])
    return sorted(found)


def _requirement(package: metadata.Distribution) -> str | None:
    """Return what installs a distribution again; None for one of this machine's disk: an index may have another's."""
    name = re.sub("[-_.]+", "-", package.metadata["Name"])  # 2.8 is torch_xla, 2.9 torch-xla
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    if "vcs_info" in origin:
        return f"{name} @ {origin['vcs_info']['vcs']}+{origin['url']}@{origin['vcs_info']['commit_id']}"
    if origin:
        return f"{name} @ {origin['url']}" if origin["url"].startswith("https://") else None
    return f"{name}=={package.version.partition('+')[0]}"  # 2.9.0+cpu is a build of 2.9.0


def _not_known(module: str, where: str) -> WrongValue:
    top = module.partition(".")[0]
    package = _TENSORFLOW if top in ("tensorflow", "keras") else "PACKAGE==VERSION"
    return WrongValue(
        f"{where} imports {module}, and no installed package of this machine has it, nor a folder beside {where}",
        found="a name is never guessed: on an index it may be anybody's",
        fix=f"install it here; or name what brings it, nothing where it runs without: --needs {top}={package}, "
        f'needs={{"{top}": "{package}"}}',
    )
