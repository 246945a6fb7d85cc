"""What holds for the whole repository: imports, notebooks, the tree in CONTRIBUTING, requirements, docstrings."""

import ast
import copy
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.quoted_numbers import (
    EVIDENCE,
    OTHER_NUMBERS,
    QUOTES,
    unexplained_numbers,
    wrong_quotes,
)
from tested_through import TESTED_THROUGH

from notebooks.outputs import LARGEST, LARGEST_SUM, PARAMETERS, stale_cells, takes

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EACH_NOTEBOOK = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def entries(folder):
    """Return what git would keep of a folder, without asking git: a downloaded archive has none."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split() if line]
    inside = (
        ""
        if folder == ROOT
        else f"{folder.relative_to(ROOT).as_posix()}/"
        if folder.is_relative_to(ROOT)
        else "//"
    )
    # "/data" is one at the top, "/notebooks/data" one in notebooks/
    ignored = [
        line.removeprefix(f"/{inside}")
        for line in ignored
        if line[0] != "/" or line.startswith(f"/{inside}")
    ]
    return [
        path
        for path in sorted(folder.iterdir())
        if (
            path.is_file() or path.is_dir()
        )  # a kernel that runs at this moment may have its sockets here
        and path.name != ".git"
        and not any(fnmatch(path.name, pattern) for pattern in ignored)
    ]


def files(folder=ROOT):
    for path in entries(folder):
        yield from files(path) if path.is_dir() else [path]


# Imports and names


def test_importing_tpukit_loads_nothing_heavy():
    heavy = [
        "torch",
        "torch_xla",
        "torchvision",
        "numpy",
        "pandas",
        "matplotlib",
        "seaborn",
        "ipywidgets",
        "IPython",
    ]
    heavy += ["sklearn", "scipy", "PIL", "pydicom"]
    program = f"import sys, json, tpukit; print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert json.loads(loaded) == []


def test_every_public_name_is_there_and_says_what_it_does():
    import tpukit

    public = {name: getattr(tpukit, name) for name in tpukit.__all__}
    for name, thing in list(public.items()):
        if inspect.isclass(thing):
            own = {key: value for key, value in vars(thing).items() if not key.startswith("_")}
            described = {
                key: value
                for key, value in own.items()
                if callable(value) or isinstance(value, property)
            }
            public |= {f"{name}.{key}": value for key, value in described.items()}
    for name, thing in public.items():
        first = (thing.__doc__ or "").strip().split("\n")[0]
        assert first, f"{name} has no docstring"
        assert not first.startswith(f"{name}("), (
            f"{name} has only the docstring that dataclass makes"
        )
        assert len(first) < 120, f"the first line about {name} is {len(first)} characters"


def test_the_public_api_is_one_screen_and_editors_see_what_python_sees():
    import tpukit

    assert tpukit.__all__ == sorted(tpukit.__all__)
    assert len(tpukit.__all__) <= 43  # what Tab shows: names, and subpackages
    typed = {}
    for node in ast.walk(ast.parse((ROOT / "tpukit/__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            typed |= {alias.name: node.module for alias in node.names}
    subpackages = {name for name, module in typed.items() if module == "tpukit"}
    assert typed.keys() == set(tpukit.__all__)
    assert subpackages == {path.name for path in entries(ROOT / "tpukit") if path.is_dir()}
    for name in typed.keys() - subpackages:
        assert getattr(importlib.import_module(typed[name]), name) is getattr(tpukit, name)


def test_importing_tpukit_loads_few_modules_of_ours():
    program = "import sys, tpukit; print(len([name for name in sys.modules if name.split('.')[0] == 'tpukit']))"
    assert int(subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)) <= 15


def test_the_error_for_an_unknown_name_names_the_subpackage_that_has_it():
    import tpukit

    with pytest.raises(AttributeError, match="it is tpukit.preflight.largest_batch$"):
        tpukit.largest_batch  # noqa: B018


def test_every_package_on_disk_is_installed():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    assert packages == {"find": {"include": ["tpukit*"]}}
    for folder in {path.parent for path in files(ROOT / "tpukit") if path.suffix == ".py"}:
        assert (folder / "__init__.py").exists(), f"{folder} would not be found"


# The layers, from the bottom: a subpackage may import from the layers below its own, by their public API.
LAYERS = [
    {"essentials.display"},
    {"essentials.environment"},
    {"essentials.backends"},
    {"essentials.data"},
    {"essentials.launcher"},
    {"profiling", "datasets", "accelerators", "metrics", "simulator"},
    {"cloud", "migrate", "pe", "preflight", "training"},
]
SUBPACKAGES = set().union(*LAYERS)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
WITHIN_A_LAYER = {("pe", "training"), ("simulator", "profiling"), ("simulator", "accelerators")}


class Import(NamedTuple):
    """One import of our own, wherever in its module it stands."""

    module: str  # that imports
    source: str  # that it imports from
    name: str | None
    is_optional: bool  # it stands in `with optional_subpackage(...)`


def subpackage_of(module):
    """Return the subpackage of "tpukit.essentials.launcher.core" or "tpukit.essentials.launcher"; None for the top."""
    parts = module.split(".")[1:]
    longest_first = (".".join(parts[:2]), ".".join(parts[:1]))
    return next((name for name in longest_first if name in SUBPACKAGES), None)


def is_optional_block(node):
    if not isinstance(node, ast.With):
        return False
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(ast.unparse(call.func) == "optional_subpackage" for call in calls)


def optional_nodes(tree):
    """Return the nodes that stand in `with optional_subpackage(...)`."""
    found = set()
    for node in ast.walk(tree):
        if is_optional_block(node):
            found |= set(ast.walk(node))
    return found


def imports():
    found = []
    for path in files(ROOT / "tpukit"):
        if path.suffix != ".py":
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        optional = optional_nodes(tree)
        for node in ast.walk(tree):
            is_optional = node in optional
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tpukit":
                found += [
                    Import(module, node.module, alias.name, is_optional) for alias in node.names
                ]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("tpukit")]
                found += [Import(module, name, None, is_optional) for name in names]
    return found


def test_the_folder_list_is_the_architecture():
    there = {path.name for path in entries(ROOT / "tpukit")}
    assert there == {"__init__.py", "__main__.py", "py.typed", "essentials"} | {
        name for name in SUBPACKAGES if "." not in name
    }
    assert len(there) <= 14
    assert {path.name for path in entries(ROOT / "tpukit/essentials")} == {"__init__.py"} | {
        name.partition(".")[2] for name in SUBPACKAGES if "." in name
    }


def test_imports_between_subpackages_point_down():
    for module, source, name, is_optional in imports():
        here = subpackage_of(module)
        there = subpackage_of(source) or subpackage_of(f"{source}.{name}")
        if here is None:
            continue  # tpukit/__init__.py and the command line
        assert there is not None, f"{module} imports the top of the package"
        if here != there:
            is_below = LAYER[there] < LAYER[here] or (here, there) in WITHIN_A_LAYER
            # The essentials may use another subpackage where it is there.
            is_asked_for = (
                is_optional
                and here.startswith("essentials.")
                and not there.startswith("essentials.")
            )
            assert is_below or is_asked_for, f"{module} imports {source}"
    assert len(LAYERS) <= 7


def test_the_essentials_state_the_order_of_their_layers():
    below = [
        name.partition(".")[2]
        for names in LAYERS
        for name in names
        if name.startswith("essentials.")
    ]
    assert ", ".join(below) in importlib.import_module("tpukit.essentials").__doc__


def test_what_crosses_a_boundary_is_public():
    for module, source, name, _ in imports():
        here, there = subpackage_of(module), subpackage_of(source)
        if there is not None and here != there and not source.startswith("tpukit.__"):
            assert source == f"tpukit.{there}", f"{module} reaches into {source}"
            listed = importlib.import_module(source).__all__
            assert name in listed, f"{module} takes {name}, which {source} does not list"
            assert not name.startswith("_")


@pytest.mark.parametrize("subpackage", sorted(SUBPACKAGES))
def test_a_subpackage_lists_its_own_and_hides_no_module(subpackage):
    package = importlib.import_module(f"tpukit.{subpackage}")
    assert package.__doc__
    modules = {path.stem for path in files(ROOT / "tpukit" / subpackage.replace(".", "/"))}
    for name in package.__all__:
        thing = getattr(package, name)
        # The module of Core is imported by its full name.
        hides = name in modules and (subpackage, name) != ("essentials.launcher", "core")
        assert inspect.ismodule(thing) == hides, f"{subpackage}.{name} hides a module, or is none"


def test_no_modules_of_a_subpackage_import_each_other_in_a_circle():
    imported_by = {module: set() for module, *_ in imports()}
    for module, source, name, _ in imports():
        for other in (source, f"{source}.{name}"):
            if (
                other in imported_by
                and other != module
                and subpackage_of(other) == subpackage_of(module)
            ):
                imported_by[module].add(other)
    while leaves := [
        name for name, imported in imported_by.items() if not imported & imported_by.keys()
    ]:
        for name in leaves:
            del imported_by[name]
    assert not imported_by, f"in a circle, or importing one: {sorted(imported_by)}"


# Patches of other packages

PATCHED = {"torch", "torch_xla", "torch_tpu", "torchvision"}
NO_PATCH = {
    "accelerators/cuda.py": "a setting that torch documents",
    "training/streams.py": "of a loader process, by the loader's own dataset",
}


def assigned_attributes(tree):
    """Yield the objects of which an attribute is set, by `=` or by setattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    yield target.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield node.args[0]


def imported_from(packages, tree):
    """Return the names that imports from these packages give."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                if package in packages:
                    names.add(alias.asname or package)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_other_packages_are_patched_in_the_modules_for_it_only():
    patching = set()
    for path in files(ROOT / "tpukit"):
        if path.suffix == ".py":
            tree = ast.parse(path.read_text())
            names = imported_from(PATCHED, tree)
            for thing in assigned_attributes(tree):
                if ast.unparse(thing).split(".")[0] in names:
                    patching.add(path.relative_to(ROOT / "tpukit").as_posix())
    modules = {name for name in patching if name.endswith("_patches.py")}
    assert len(modules) == 4
    assert patching - modules == NO_PATCH.keys()


def test_every_patch_is_documented_with_its_reason_and_its_end():
    page = (ROOT / "docs/in_sync.md").read_text()
    for path in files(ROOT / "tpukit"):
        if not path.name.endswith("_patches.py"):
            continue
        tree = ast.parse(path.read_text())
        assert f"`{path.relative_to(ROOT).as_posix()}`" in page
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        for name in functions:
            if not name.startswith("_"):
                assert f"`{name}`" in page
                block = ast.get_docstring(tree).split(f"\n{name}\n")[1].split("\n\n")[0]
                words = re.findall(r"^    (\w+) ", block, re.MULTILINE)
                assert words in (
                    ["changes", "because", "upstream", "until"],
                    ["changes", "because", "versions", "until"],
                ), name


# Tests

WITHOUT_A_MODULE = {  # subjects of tests that are no single module
    "accelerators": {"visible_gpus"},  # on machines without a GPU, too
    "essentials/data": {"fixes"},
    "essentials/launcher": {"in_graph", "kernel", "ranks"},
    "essentials/display": {"html_tables"},
    "datasets": {"fixes", "meanings"},
    "pe": {"dicom_collection", "hospital_exports", "robustness"},
    "preflight": {"cut_models"},
    "simulator": {
        "collectives",
        "failures",
        "kit",
        "kit_session",
        "replay",
        "sharded",
        "torch_xla",
    },
    "training": {"early_stopping", "folder_lock", "same_in_fit"},
}


def test_a_module_has_a_test_of_its_name_or_says_through_which_it_is_tested():
    paths = [
        path.relative_to(ROOT / "tpukit").as_posix()
        for path in files(ROOT / "tpukit")
        if path.suffix == ".py"
    ]
    modules = {name for name in paths if not name.endswith("__init__.py")}
    through = {name for names in TESTED_THROUGH.values() for name in names}
    for module in sorted(modules):
        folder, _, name = module.rpartition("/")
        own = ROOT / "tests" / folder / f"test_{name}"
        assert own.exists() != (module in through), (
            f"{module}: a file {own.name}, or a row of TESTED_THROUGH"
        )
    assert through <= modules


def test_a_row_of_tested_through_names_what_its_test_names():
    found = imports()
    home = {}
    for module, source, name, _ in found:
        if "__init__" in module:
            home[module.removesuffix(".__init__"), name] = source
    users = {}
    for module, source, name, _ in found:
        users.setdefault(home.get((source, name), source), set()).add(module)
    for test, modules in TESTED_THROUGH.items():
        words = set(re.findall(r"[\w:]+", (ROOT / "tests" / test).read_text()))
        for path in modules:
            module = "tpukit." + path.removesuffix(".py").replace("/", ".")
            near = {module, *users.get(module, ())} - {
                f"tpukit.{subpackage}.__init__" for subpackage in SUBPACKAGES
            }
            names = set()
            for one in near:
                tree = ast.parse((ROOT / f"{one.replace('.', '/')}.py").read_text())
                names |= {
                    node.name
                    for node in tree.body
                    if isinstance(node, ast.FunctionDef | ast.ClassDef)
                }
                names |= set(
                    re.findall(
                        r'^    name = "(.+)"$', ast.unparse(tree).replace("'", '"'), re.MULTILINE
                    )
                )
                names.add(one.rpartition(".")[2])
            assert names & words, f"{test} names nothing of {module} or of what imports it"


def test_a_folder_of_tests_is_a_subpackage():
    for subpackage in SUBPACKAGES:
        folder = subpackage.replace(".", "/")
        for path in (ROOT / "tests" / folder).glob("test_*.py"):
            name = path.stem.removeprefix("test_")
            there = (ROOT / "tpukit" / folder / f"{name}.py").exists()
            assert there != (name in WITHOUT_A_MODULE.get(folder, ())), path


def test_what_tests_share_is_in_their_folder_of_helpers():
    loose = {path.stem for path in (ROOT / "tests").glob("*.py")}
    assert {name for name in loose if not name.startswith("test_")} == {
        "conftest",
        "tested_through",
    }
    helpers = {path.stem for path in (ROOT / "tests/helpers").glob("*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module]
            assert not helpers & set(modules), f"{path.name}: from helpers import {modules[0]}"


# Documents


def test_every_requirement_says_who_needs_it():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert lines
    for line in lines:
        assert line.startswith("#") or re.search(r"\S  # \S", line), f"no comment: {line}"


def fenced_with(start):
    """Return the fenced block of CONTRIBUTING that has a line with this start."""
    fenced = re.findall(
        r"^```\w*\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (block,) = [block for block in fenced if re.search(start, block, re.MULTILINE)]
    return block


def tree():
    """Return {folder: folders} of CONTRIBUTING's tree: two spaces per level, then a name and its description."""
    found, above = {Path(): []}, []
    for line in fenced_with("^tpukit/").splitlines():
        name = line.split()[0]
        above[(len(line) - len(line.lstrip())) // 2 :] = [name.rstrip("/")]
        found.setdefault(Path(*above[:-1]), []).append(name)
    return found


def test_contributing_lists_the_layers_in_the_order_that_the_tests_enforce():
    assert [
        set(line.split(", ")) for line in fenced_with("^essentials.display").splitlines()
    ] == LAYERS


def test_the_tree_of_contributing_is_the_disk():
    assert set(tree()) == {Path(), Path("tpukit")}
    for folder, names in tree().items():
        on_disk = [
            path.name + "/"
            for path in entries(ROOT / folder)
            if path.is_dir() and path.name[0] != "."
        ]
        assert sorted(names) == sorted(on_disk), f"in {folder}"


def test_every_path_that_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) < 110
    top = "|".join(re.escape(path.name) for path in entries(ROOT) if path.is_dir())
    paths = set(re.findall(rf"`((?:{top})/[\w./]*)`", text))
    assert len(paths) > 12
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_link_of_a_document_leads_somewhere():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)[^)]*\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_changelog_begins_with_this_version():
    import tpukit

    (first, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == tpukit.__version__


def test_every_command_of_the_documents_is_in_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", "docs/evidence.md"):
        named = set(
            re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE)
        )
        assert named <= targets, document


# A shell's word that pip would look up on the index: tpukit, tpukit[simulator], tpukit==0.1.0, tpukit>=0.1.
FROM_THE_INDEX = re.compile(r"tpukit(\[[\w,\s]*\])?([=<>~!]=?.*)?")
INSTALL = re.compile(
    r"\b(?:pip|pipx|uv)3?\s+(?:\w+\s+)?(?:install|download|add|run)\b(?P<words>.*)"
)


def texts_of(path):
    """Yield the text of a file, and each string of a Python file as Python joins its parts."""
    text = path.read_bytes().decode(errors="ignore")
    yield text
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def taken_from_the_index(text):
    """Return the install commands of a text that look tpukit up on a package index by its name."""
    found = []
    for line in text.splitlines():
        command = INSTALL.search(line)
        if command is None or "--no-index" in line:
            continue
        (arguments, *_) = re.split(r"[,;]\s|&&|\s\|\s", command["words"])  # prose may follow
        words = [word.strip("'\"`,.;:()\\") for word in re.split(r"\s+|\\n", arguments)]
        # The quotes around tpukit[simulator] may have lost their partner to the line's own.
        if any(FROM_THE_INDEX.fullmatch(word) or word.startswith("tpukit[") for word in words):
            found.append(line.strip())
    return found


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("pip install tpukit", True),
        ("%pip install -q 'tpukit[simulator]' and backend=\"xla\"", True),
        ("uv pip install --upgrade tpukit==0.1.0", True),
        ("python -m pip install torch tpukit[ray,vertex]`.", True),
        ("pipx install tpukit", True),
        ("uv add tpukit", True),
        ('"!pip install tpukit\\n",', True),
        ("pip install xla_cpu_pjrt==0.0.1", False),
        ("pip install -e '.[simulator]'", False),
        ("pip install --no-deps dist/tpukit-*.whl", False),
        ("pip install --no-index --find-links wheels tpukit", False),
        ("pip install torch_tpu==0.2.0, in a separate environment; or update tpukit", False),
    ],
)
def test_an_install_by_the_name_tpukit_is_recognised(line, is_refused):
    assert bool(taken_from_the_index(line)) == is_refused


def test_no_text_advises_to_install_tpukit_from_the_index():
    """Nobody owns the name on the package index, so whoever takes it would run code on a reader's machine."""
    for path in files():
        if path == Path(__file__):
            continue
        for text in texts_of(path):
            assert not taken_from_the_index(text), (
                f"{path.relative_to(ROOT)}: {taken_from_the_index(text)}"
            )
        # An extra is named as `.[simulator]` in a clone, but by pyproject.toml itself.
        if path.name not in ("pyproject.toml", "CHANGELOG.md"):
            extras = re.search(r"tpukit\[[a-z, ]+\]", path.read_bytes().decode(errors="ignore"))
            assert not extras, f"{path.relative_to(ROOT)}: {extras[0]}"


def test_no_path_of_somebodys_machine_is_in_the_repository():
    somewhere = re.compile(rb"(?<![\w.])/(?:home|work|root|Users)/\w+")
    for path in files():
        found = somewhere.search(path.read_bytes())
        assert not found, f"{path.relative_to(ROOT)}: {found[0].decode()}"


LINKED = {  # projects of others, linked on purpose
    "Lightning-AI/pytorch-lightning",
    "RSNA/AI-Challenge-Data",
    "google/array_record",
    "karpathy/nanoGPT",
    "pytorch/xla",
    "satyajitghana/ProjektDepth",
}


def test_no_address_on_github_was_made_up():
    """Beside LINKED there is one at most: that of this repository, which `make headers` writes."""
    written = re.search(r"/github/([\w.-]+/[\w.-]+)/blob/", source(load(NOTEBOOKS[0])["cells"][0]))
    own = {"notebooks", "README.md"} if written else set()
    for path in files():
        text = path.read_bytes().decode(errors="ignore")
        for found in re.findall(r"(?:\bgithub\.com[/:]|/github/)([\w-]+/[\w.-]+)", text):
            found = found.removesuffix(".git").rstrip(".")
            ours = written and found == written[1] and path.relative_to(ROOT).parts[0] in own
            assert found in LINKED or ours, f"{path.relative_to(ROOT)}: {found}"


def test_workflows_are_yaml_and_call_what_the_makefile_has():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert {"name", "jobs", True} <= workflow.keys()  # "on" is YAML for true
        for job in workflow["jobs"].values():
            commands |= {step["run"].split("\n")[0] for step in job["steps"] if "run" in step}
    named = {command.split()[1] for command in commands if command.startswith("make ")}
    assert {"test", "docs", "headers"} <= named
    assert named <= targets


def test_read_the_docs_and_github_pages_publish_the_folder_that_make_docs_writes(tmp_path):
    yaml = pytest.importorskip("yaml")
    pages = re.search(r"^PAGES = ROOT / (.+)$", (ROOT / "docs/pages.py").read_text(), re.MULTILINE)[
        1
    ]
    folder = "/".join(re.findall(r'"(.+?)"', pages))
    workflow = yaml.safe_load((ROOT / ".github/workflows/pages.yml").read_text())
    steps = workflow["jobs"]["pages"]["steps"]
    (upload,) = [one for one in steps if "upload-pages-artifact" in one.get("uses", "")]
    assert upload["with"]["path"] == folder
    make, *copying = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())["build"]["commands"]
    assert [one["run"] for one in steps if "run" in one] == [make] == ["make docs TORCH=cpu"]
    # The other commands, with pages that are there already.
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "index.html").write_text("the site")
    environ = {**os.environ, "READTHEDOCS_OUTPUT": str(tmp_path / "published")}
    for command in copying:
        subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=environ, check=True)
    assert (tmp_path / "published/html/index.html").read_text() == "the site"


def test_the_citation_names_this_version():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    import tpukit

    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == tpukit.__version__


def test_what_a_run_writes_is_ignored_and_no_file_of_the_repository_is():
    tried = [
        "notebooks/data/04-phantoms/x.jpg",
        "notebooks/runs/04/x.pt",
        "runs/exams/06_exams_and_submission.html",
        "data/x",
        "dist/x.whl",
    ]
    lines = (ROOT / ".gitignore").read_text().split()
    for path in tried:
        parts = path.split("/")
        heads = {"/" + "/".join(parts[: n + 1]) + "/" for n in range(len(parts))}
        assert any(
            line in heads if line[0] == "/" else line.rstrip("/") in parts for line in lines
        ), path
    assert (ROOT / "tpukit/essentials/data") in entries(ROOT / "tpukit/essentials")


# Notebooks


def load(path):
    return json.loads(path.read_text())


def source(cell):
    return "".join(cell["source"])


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def tags(cell):
    return cell["metadata"].get("tags", [])


def parsed(cell):
    """Return the syntax tree of a cell's Python; lines for IPython (%, !) become comments."""
    return ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", source(cell), flags=re.MULTILINE))


def test_there_are_notebooks_and_their_numbers_are_the_reading_order():
    assert NOTEBOOKS
    numbers = [path.name.partition("_")[0] for path in NOTEBOOKS]
    assert numbers == [f"{number:02}" for number in range(len(numbers))]


@EACH_NOTEBOOK
def test_a_notebook_has_no_metadata_of_the_program_that_wrote_it(path):
    notebook = load(path)
    # The accelerator is asked for in the file, so that Colab and Kaggle open it with one.
    assert notebook["metadata"].keys() <= {
        "kernelspec",
        "language_info",
        "accelerator",
        "colab",
        "kaggle",
        "tpukit",
    }
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert notebook["metadata"].get("language_info", {}).keys() <= {"name"}
    for cell in notebook["cells"]:
        assert cell["metadata"].keys() <= {
            "tags",
            "cellView",
            "jupyter",
            "_kg_hide-input",
            "tpukit",
        }
        assert set(tags(cell)) <= {"parameters", "exercise", "check"}


@EACH_NOTEBOOK
def test_the_outputs_of_a_notebook_are_those_of_its_cells(path):
    cells = code_cells(load(path))
    stale = stale_cells(load(path))
    number = path.stem.partition("_")[0]
    assert not stale, f"make outputs ONLY={number}; changed after its output was stored: {stale[0]}"
    assert cells[0]["outputs"] == [], "the install cell prints a folder of this machine"


@EACH_NOTEBOOK
def test_the_numbers_that_a_text_quotes_are_those_of_the_output(path):
    assert wrong_quotes(load(path), QUOTES.get(path.stem, [])) == []


@EACH_NOTEBOOK
def test_every_decimal_number_of_a_text_is_a_quote_or_has_another_source(path):
    notebook = load(path)
    others = OTHER_NUMBERS.get(path.stem, {})
    assert unexplained_numbers(notebook, QUOTES.get(path.stem, []), others) == []
    texts = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert [number for number in others if number not in texts] == []
    evidence = (ROOT / "docs/evidence.md").read_text()
    assert [one for one in others if others[one] == EVIDENCE and one not in evidence] == []


@pytest.mark.parametrize("name", QUOTES)
def test_a_quoted_number_that_changes_in_an_output_or_in_the_text_is_found(name):
    notebook = load(ROOT / "notebooks" / f"{name}.ipynb")
    for quote in QUOTES[name]:
        for kind in ("markdown", "code"):
            changed = copy.deepcopy(notebook)
            for cell in changed["cells"]:
                change_digits(cell, kind)
            assert len(wrong_quotes(changed, [quote])) >= 1, (kind, quote)


def change_digits(cell, kind):
    """Change each digit that follows a digit or a point: in the texts, or in the outputs."""
    if kind == "markdown" and cell["cell_type"] == kind:
        cell["source"] = [other_digits(line) for line in cell["source"]]
    for output in cell.get("outputs", []) if kind == "code" else []:
        output["text"] = [other_digits(line) for line in output.get("text", [])]
        plain = output.get("data", {}).get("text/plain", [])
        output["data"] = {"text/plain": [other_digits(line) for line in plain]}


def other_digits(text):
    return re.sub(r"(?<=[\d.])\d", lambda digit: str((int(digit[0]) + 5) % 10), text)


@EACH_NOTEBOOK
def test_the_time_in_a_header_is_that_of_the_run_that_made_the_outputs(path):
    measured = load(path)["metadata"].get("tpukit")
    if not measured or path.stem in PARAMETERS:
        pytest.skip("not measured with the notebook's own parameters")
    assert f"**Takes** {takes(path.stem, measured['processor_seconds'])}" in source(
        load(path)["cells"][0]
    )


@EACH_NOTEBOOK
def test_the_time_in_the_readme_is_that_of_the_header(path):
    (line,) = re.findall(r"\*\*Takes\*\* ([^;\n]+)", source(load(path)["cells"][0]))
    minutes = re.search(r"\d+", line)
    expected = minutes[0] if minutes else "1"
    (row,) = re.findall(
        rf"\(notebooks/{path.name}\).*\| (\d+) min \|", (ROOT / "README.md").read_text()
    )
    assert row == expected


def stored_texts(path):
    """Return all outputs of a notebook as one text, without pictures."""
    texts = []
    for cell in code_cells(load(path)):
        for output in cell["outputs"]:
            parts = [output.get("text", ""), *output.get("traceback", [])]
            parts += [text for kind, text in output.get("data", {}).items() if kind != "image/png"]
            texts += ["".join(part) for part in parts]
    return "\n".join(texts)


MACHINE_PATH = r"(?<![\w.])/(?:tmp|var/folders|home|work|root|Users)/\w+"
DATE = r"\b20[2-9]\d-[01]\d-[0-3]\d|\b20[2-9]\d[01]\d[0-3]\d\b"


@EACH_NOTEBOOK
def test_the_outputs_of_a_notebook_have_no_path_of_a_machine_and_no_date(path):
    text = stored_texts(path)
    assert re.findall(MACHINE_PATH, text) == []
    assert re.findall(DATE, text) == []


@EACH_NOTEBOOK
def test_the_outputs_of_a_notebook_are_of_kinds_that_github_displays(path):
    for cell in code_cells(load(path)):
        for output in cell["outputs"]:
            kinds = output.get("data", {}).keys()
            assert kinds <= {"text/plain", "text/html", "image/png"}
            if "text/html" in kinds:
                assert not re.search(r"<(script|svg|img)", "".join(output["data"]["text/html"]))


def test_notebooks_with_their_outputs_are_small():
    sizes = {path.stem: path.stat().st_size for path in NOTEBOOKS}
    assert {name: size for name, size in sizes.items() if size > LARGEST} == {}
    assert sum(sizes.values()) <= LARGEST_SUM


@EACH_NOTEBOOK
def test_a_notebook_has_the_five_parts_in_order(path):
    cells = load(path)["cells"]
    header = source(cells[0])
    assert cells[0]["cell_type"] == "markdown"
    assert header.startswith("# ")
    badges = [line for line in header.splitlines() if "colab.research.google.com" in line]
    assert len(badges) <= 1, "before the repository has an address there are none"
    assert all("kaggle.com/" in line for line in badges), "both badges stand on one line"
    for word in ("You need", "You get", "Takes"):
        assert word in header
    # Bootstrap, parameters, look, run: by the place of each.
    code = [index for index, cell in enumerate(cells) if cell["cell_type"] == "code"]
    parameters = next(index for index, cell in enumerate(cells) if "parameters" in tags(cell))
    assert code[:2] == [code[0], parameters], (
        "the first code cell is the bootstrap, the second the parameters"
    )
    headings = [
        (index, source(cell)) for index, cell in enumerate(cells) if cell["cell_type"] == "markdown"
    ]
    look = [index for index, text in headings if re.search(r"^## Look\b", text, re.MULTILINE)]
    run = [index for index, text in headings if re.search(r"^## Run\b", text, re.MULTILINE)]
    assert [len(look), len(run)] == [1, 1], (
        "one heading that begins with '## Look', one with '## Run'"
    )
    assert parameters < look[0] < run[0]


def test_badges_bootstrap_cells_and_links_are_what_make_headers_writes():
    checked = subprocess.run(
        [sys.executable, ROOT / "notebooks" / "headers.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@EACH_NOTEBOOK
def test_a_notebook_ends_with_an_exercise_three_links_and_the_next_notebook(path):
    last = load(path)["cells"][-1]
    assert last["cell_type"] == "markdown"
    text = source(last)
    assert text.startswith("## Go on")
    assert "**Predict, then try.**" in text
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len([target for target in targets if target.startswith("https://")]) >= 3, targets
    assert re.search(r"^Next: \[.+\]\(\S+\.ipynb\)", text, re.MULTILINE)


@EACH_NOTEBOOK
def test_a_notebook_explains_at_least_four_words_for_each_line_of_code(path):
    # Four, because each argument of a call of `fit` has a line of its own.
    cells = load(path)["cells"]
    prose = " ".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")
    prose = re.sub(r"\]\([^)]*\)", "]", prose)  # an address is no word
    code = [
        line
        for cell in code_cells(load(path))[1:]
        for line in source(cell).splitlines()
        if line.strip()
    ]
    words = re.findall(r"[A-Za-z][\w'.-]*", prose)
    assert len(words) >= 4 * len(code), (
        f"{len(words)} words, {len(code)} lines: {len(words) / len(code):.1f} a line"
    )


def blocks(text):
    """Return the blocks of a text: what stands between pictures, tables, code and headings; and each folded answer."""
    text = re.sub(
        r"\]\([^)]*\)", "]", re.sub(r"^```.*?^```", "|", text, flags=re.MULTILINE | re.DOTALL)
    )
    return re.split(r"^(?:\||\[?!\[|#).*$|^</?details>|^- \*\*You need", text, flags=re.MULTILINE)


@EACH_NOTEBOOK
def test_no_text_of_a_notebook_is_longer_than_ninety_words_without_a_picture_a_table_or_code(path):
    cells = load(path)["cells"]
    text = "\n".join(
        source(cell) if cell["cell_type"] == "markdown" else "| code" for cell in cells
    )
    for block in blocks(text):
        words = re.findall(r"[A-Za-z][\w'.-]*", block)
        assert len(words) <= 90, f"{len(words)} words: {block.strip()[:80]}"


@EACH_NOTEBOOK
def test_a_notebook_has_an_exercise_to_write_its_check_and_a_folded_answer(path):
    cells = load(path)["cells"]
    exercises = [place for place, cell in enumerate(cells) if "exercise" in tags(cell)]
    assert exercises
    for place in exercises:
        task, exercise, check, answer = cells[place - 1 : place + 3]
        assert re.search(r"^### Your turn", source(task), re.MULTILINE)
        assert "check" in tags(check)
        assert re.match(
            r"<details>.*^```python$.*^```$.*</details>", source(answer), re.MULTILINE | re.DOTALL
        )
        assert source(exercise) not in source(answer)


@EACH_NOTEBOOK
def test_links_inside_the_repository_lead_somewhere(path):
    cells = [source(cell) for cell in load(path)["cells"] if cell["cell_type"] == "markdown"]
    inside = [target for text in cells for target in re.findall(r"\]\(([^)#:]+)\)", text)]
    assert not [target for target in inside if not (path.parent / target).exists()]


@EACH_NOTEBOOK
def test_one_cell_holds_the_parameters_as_literals(path):
    (cell,) = [cell for cell in load(path)["cells"] if "parameters" in tags(cell)]
    for statement in ast.parse(source(cell)).body:
        assert isinstance(statement, ast.Assign), ast.unparse(statement)
        ast.literal_eval(statement.value)  # raises where it is anything but a literal


@EACH_NOTEBOOK
def test_cells_are_short(path):
    for cell in code_cells(load(path)):
        # A training function stays in one cell, with the arguments of fit in sight, and so does a model.
        is_whole = "tpukit.fit(" in source(cell) or "(nn.Module)" in source(cell)
        longest = 40 if is_whole else 25
        assert len(source(cell).splitlines()) <= longest, source(cell)


@EACH_NOTEBOOK
def test_a_figure_that_a_notebook_draws_itself_says_in_words_what_it_shows(path):
    for cell in code_cells(load(path)):
        text = source(cell)
        assert text.count("plt.subplots(") == text.count("tpukit.style_figure("), text
        assert not re.search(r"plt\.(figure|show|close)\(", text), (
            "tpukit.style_figure(figure, alt) shows it, once"
        )


@EACH_NOTEBOOK
def test_torch_xla_is_imported_only_inside_functions(path):
    def outside_functions(node):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield child
                yield from outside_functions(child)

    for cell in code_cells(load(path)):
        for node in outside_functions(parsed(cell)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [
                    getattr(node, "module", None) or ""
                ]
                assert not any(module.split(".")[0] == "torch_xla" for module in modules), (
                    ast.unparse(node)
                )
