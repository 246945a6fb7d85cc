"""The promises of the pages: an example per public name, an entry per message, scripts that run."""

import ast
import doctest
import importlib.util
import inspect
import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import conf
import links
import pages
import pytest
from messages import explained, messages

ROOT = Path(__file__).parents[1]

PAGES = sorted((ROOT / "docs").glob("*.md"))
# Functions that pass on the words of another error, so they have no facts of their own.
PASSED_ON = {
    "run_hangs": "the words of the watchdog's `Stall`, which has entries",
    "outcome": "an OutOfSyncError, which has entries, becomes the WorkerError",
    "_read_by_number": "an error of the user's dataset",
    "_read_stream": "the same",
    "read_one": "the same",
    "__getitem__": "the error from packing the file",
    "watch": "the reply of the cloud",
}


def words(text):
    return re.findall(r"[A-Za-z]{2,}", re.sub(r"{[^{}]*}", " ", text))


@pytest.mark.parametrize("subpackage", pages.subpackages())
def test_every_public_name_has_an_example(subpackage):
    names = pages.public_names(subpackage)
    assert len(names) == len(set(names))
    assert set(names) <= set(pages.exported_names(subpackage))
    for example in pages.examples(subpackage):
        assert not [name for name in example.names if not re.search(rf"\b{name}\b", example.code)]
        parsed = doctest.DocTestParser().get_examples(example.code)
        assert any(line.want for line in parsed), example.code
        shows_only_existence = r"^>>> _ =|callable\(|hasattr\("
        assert not re.search(shows_only_existence, example.code, re.MULTILINE)


def test_a_public_name_has_one_page():
    names = [name for subpackage in pages.subpackages() for name in pages.public_names(subpackage)]
    assert not [name for name in set(names) if names.count(name) > 1]


def test_every_name_of_the_top_level_is_public():
    import tpukit

    public = {name for one in pages.subpackages() for name in pages.public_names(one)}
    modules = {name for name in tpukit.__all__ if inspect.ismodule(getattr(tpukit, name))}
    assert set(tpukit.__all__) <= public | modules


def source_of(path):
    """Return the text of a file; of a notebook, the cells without their outputs."""
    if path.suffix != ".ipynb":
        return path.read_text()
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])


def used_names():
    """Return (file, module, name) for each name that notebooks, documents and examples use."""
    files = [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("*.md"), *ROOT.glob("examples/*.py")]
    files += [path for path in ROOT.glob("docs/*.md") if path.stem not in ("evidence", "glossary")]
    found = set()
    for path in files:
        if path.name == "CHANGELOG.md":
            continue  # has old names
        text = source_of(path)
        attribute = r"(?<!from )\btpukit\.((?:essentials\.)?\w+)\.(\w+)\b"
        for module, name in re.findall(attribute, text):
            found.add((path.name, module, name))
        for module, names in re.findall(r"from tpukit\.([\w.]+) import ([\w, ]+)", text):
            found |= {(path.name, module, name.split()[0]) for name in names.split(", ")}
    return found


INTERNAL_ON_PURPOSE = {
    ("15_run_it_as_a_job.ipynb", "accelerators", "launch_on_host"),  # two hosts without Ray
}


def test_names_that_the_documents_use_are_public():
    folders = {path.parent for path in (ROOT / "tpukit").rglob("__init__.py")}
    exported = {".".join(path.relative_to(ROOT / "tpukit").parts) for path in folders}
    public = {one: {*pages.public_names(one)} for one in pages.subpackages()}
    for subpackage, modules in pages.OPTIONAL_MODULES.items():
        public[subpackage] |= modules.keys()
        public |= {f"{subpackage}.{name}": {*names} for name, names in modules.items()}
    internal = set()
    for file, module, name in used_names():
        is_subpackage = f"{module}.{name}" in exported
        parent, _, last = module.rpartition(".")
        is_of_public_module = last in public.get(parent, ())  # schedules.cosine
        if name not in public.get(module, ()) and not is_subpackage and not is_of_public_module:
            internal.add((file, module, name))
    assert internal == INTERNAL_ON_PURPOSE


def test_the_reference_shows_types_and_public_names_only():
    page = pages.page_of_top_level()
    assert ".. autofunction:: tpukit.launch\n" in page
    assert ".. autoclass:: tpukit.Core\n" in page
    written = [page, *map(pages.page_of_subpackage, pages.subpackages())]
    listed = re.findall(r"\.\. auto\w+:: tpukit\.([\w.]+)", "\n".join(written))
    names = [one.rpartition(".")[2] for one in listed]
    assert "write_whole" not in names  # other subpackages import it, users do not
    assert len(listed) == len(set(listed))
    assert conf.autodoc_typehints == "signature"


def test_the_page_of_exceptions_lists_those_of_the_subpackages():
    rows = re.findall(r"^\| `(\w+)` \|", pages.page_of_exceptions(), re.MULTILINE)
    assert {"WorkerError", "OutOfSyncError", "CloudError", "PreflightError"} <= set(rows)
    assert "InvalidValueError" not in rows  # users catch ValueError


def has_simulator():
    from tpukit.simulator import why_not

    return why_not() is None and importlib.util.find_spec("torch_xla") is not None


def has_compiler():
    from tpukit.preflight.libtpu import LibtpuNotFoundError, find_libtpu

    try:
        return has_simulator() and find_libtpu().is_file()
    except LibtpuNotFoundError:
        return False


# Which machine can run those examples of a subpackage that are marked to be skipped.
RUNS_ALL = {"preflight": has_compiler}


# A fork per subpackage, so that torch is imported only once.
EXAMPLES = """
import doctest, os, sys
import torch._dynamo
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
for folder in sys.argv[1:]:
    if os.fork():
        _, status = os.wait()
        print(folder, os.waitstatus_to_exitcode(status))
        continue
    os.chdir(folder)
    # With weights of this machine pe.resnet34() would print another line.
    os.environ["TORCH_HOME"] = folder
    output = os.open(f"{folder}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    options = {"module_relative": False, "optionflags": flags, "encoding": "utf-8"}
    sys.exit(doctest.testfile("examples.txt", **options).failed > 0)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run all examples; return, by subpackage, the exit status and the output."""
    folders = {}
    for subpackage in pages.subpackages():
        folders[subpackage] = tmp_path_factory.mktemp(subpackage)
        code = "\n".join(one.code for one in pages.examples(subpackage))
        if RUNS_ALL.get(subpackage, bool)():
            code = code.replace("  # doctest: +SKIP", "")
        (folders[subpackage] / "examples.txt").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "ignore", "-u", "-c", EXAMPLES, *folders.values()]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ended = dict(line.split() for line in done.stdout.splitlines())
    outcome = {}
    for subpackage, folder in folders.items():
        outcome[subpackage] = (ended[str(folder)], Path(f"{folder}.txt").read_text())
    return outcome


@pytest.mark.parametrize("subpackage", pages.subpackages())
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks CPU processes")
def test_the_examples_of_a_subpackage_run(subpackage, ran):
    status, output = ran[subpackage]
    assert status == "0", output[-6000:]


def test_every_message_that_can_be_raised_has_an_entry():
    entries = messages()
    without = [
        one for one in entries if not any(len(words(text)) > 1 for text in (*one.facts, *one.found))
    ]
    assert {one.function for one in without} <= PASSED_ON.keys()
    places = {one.place for one in entries}
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "tpukit").rglob("*.py")}
    kinds = explained(trees.values())
    assert len(kinds) > 10
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in kinds
            ):
                assert f"{path.relative_to(ROOT).as_posix()}:{node.lineno}" in places


@pytest.fixture
def package_of(tmp_path):
    """Return a function that writes modules of a package and returns its messages, by function."""

    def written(**modules):
        package = tmp_path / "_".join(modules) / "tpukit"
        package.mkdir(parents=True)
        for name, text in modules.items():
            (package / f"{name}.py").write_text(text)
        return {one.function: one for one in messages(package)}

    return written


FILLED = {
    "data, printed with !r": (
        "def f(kind='file'): raise ValueError(f'no such thing: {kind!r}')\nf('folder')",
        ["no such thing: {kind}"],
    ),
    "a default": ("def f(kind='file'): raise ValueError(f'no such {kind}')", ["no such {kind}"]),
    "a choice": (
        "def f(path):\n  kind = 'file' if path else 'folder'\n"
        "  raise ValueError(f'no such {kind} as {path}')",
        ["no such file as {path}", "no such folder as {path}"],
    ),
    "a choice in place": (
        "def f(path): raise ValueError(f\"no such {'file' if path else 'folder'} as {path}\")",
        ["no such file as {path}", "no such folder as {path}"],
    ),
    "a choice of a caller": (
        "def f(kind): raise ValueError(f'no such {kind}')\ndef g(): f('file')\ndef h(x): f(kind=x)",
        ["no such file", "no such {kind}"],
    ),
    "not of a caller's caller": (
        "def f(kind): raise ValueError(f'no such {kind}')\ndef g(x): f(x)\ndef h(): g('file')",
        ["no such {kind}"],
    ),
    "a method of another object": (
        "class A:\n  def f(self, kind): raise ValueError(f'no such {kind}')\n"
        "def g(image): image.f('PNG')",
        ["no such {kind}"],
    ),
    "a method of the same object": (
        "class A:\n  def f(self, kind): raise ValueError(f'no such {kind}')\n"
        "  def g(self): self.f('file')",
        ["no such file"],
    ),
    "a function of the same name in a class": (
        "class A:\n  def f(self, kind): pass\n  def g(self): self.f('file')\n"
        "def f(kind): raise ValueError(f'no such {kind}')",
        ["no such {kind}"],
    ),
    "an item of a list": (
        "def f(command): raise ValueError(f'{command[0]} is not installed')\n"
        "def g(): f(['sky', 'jobs'])",
        ["{command} is not installed"],
    ),
    "bytes, numbers": (
        "def f(n): raise ValueError(f'found {n} rows')\nf(b'abc')\nf(3)",
        ["found {n} rows"],
    ),
    "a table of texts": (
        "WORDS = {1: 'file', 2: 'folder'}\ndef f(n): raise ValueError(f'no such {WORDS[n]}')",
        ["no such file", "no such folder"],
    ),
    "only a placeholder": ("def f(error): raise ValueError(f'{error}: {error}')", None),
}


@pytest.mark.parametrize("case", FILLED)
def test_a_placeholder_is_filled_only_with_what_the_function_or_its_callers_choose(
    case, package_of
):
    text, titles = FILLED[case]
    found = package_of(module=text)
    if titles is None:
        assert found["f"].facts == ()
    else:
        assert sorted(found["f"].facts) == sorted(titles)


def test_a_function_of_the_same_name_in_another_module_fills_nothing(package_of):
    raising = "def save(kind): raise ValueError(f'{kind} cannot be saved')"
    other = "def save(path): pass\ndef write(): save('PNG')"
    importing = "from tpukit.first import save\ndef write(): save('a step')"
    assert package_of(first=raising, second=other)["save"].facts == ("{kind} cannot be saved",)
    assert package_of(first=raising, second=other, third=importing)["save"].facts == (
        "a step cannot be saved",
    )


def texts_of(tree):
    """Return every word of the texts in a module."""
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return set(words(" ".join(text for text in constants if isinstance(text, str))))


def imported_by(tree):
    """Return the names that a module imports from the package, and the names of those modules."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tpukit"):
            found |= {alias.name for alias in node.names} | {node.module.rpartition(".")[2]}
    return found


def with_imports(path, taken):
    """Return a module and all modules that it imports, directly or through others."""
    found, new = set(), {path}
    while new:
        found |= new
        names = set().union(*(taken[one] for one in new))
        new = {one for one in taken if one.stem in names or one.parent.name in names} - found
    return found


def test_no_title_holds_text_that_its_source_does_not_put_there():
    """Each word of a title is in the module that raises, in its imports or its importers."""
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "tpukit").rglob("*.py")}
    held = {path: texts_of(tree) for path, tree in trees.items()}
    taken = {path: imported_by(tree) for path, tree in trees.items()}
    foreign = []
    for entry in messages():
        path = ROOT / entry.place.partition(":")[0]
        near = with_imports(path, taken) | {one for one in trees if entry.function in taken[one]}
        known = set().union(*(held[one] for one in near))
        foreign += [(entry.place, fact) for fact in entry.facts if not set(words(fact)) <= known]
    assert not foreign


def test_a_title_has_words():
    assert not [(one.place, fact) for one in messages() for fact in one.facts if not words(fact)]


def test_a_message_that_somebody_got_fits_its_entry():
    import torch

    from tpukit.essentials.data import Batches

    with pytest.raises(ValueError, match="dataset is empty") as error:
        Batches(torch.zeros(0), batch_size=2)
    fitting = [one for one in messages() if error.value.fact in one.facts]
    assert [(one.subpackage, one.kind, one.fixes) for one in fitting] == [
        ("tpukit.essentials.data", "InvalidValueError", (error.value.fix,))
    ]


def test_the_two_scripts_of_the_page_from_pytorch_run():
    (diff,) = re.findall(
        r"^```diff\n(.*?)^```",
        (ROOT / "docs/from_pytorch.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    for sign in "-+":
        lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign)]
        said = io.StringIO()
        with redirect_stdout(said):
            exec("\n".join(lines), {"__name__": "__main__"})
        loss = float(re.search(r"(\d\.\d+(e-\d+)?)\D*$", said.getvalue())[1])
        assert loss < 0.2, sign


# How-to pages whose code runs as it stands, each with a package that it needs.
COMPLETE = {
    "cross_validation": "torch",
    "custom_loss": "torch",
    "export_a_model": "torch",
    "hugging_face": "transformers",
    "log_a_run": "tensorboard",
    "resume": "torch",
    "segmentation": "pandas",
}


@pytest.mark.parametrize("name", COMPLETE)
def test_the_code_of_a_how_to_page_runs(name, tmp_path):
    package = COMPLETE[name]
    pytest.importorskip(package, reason=f"the page needs {package}: pip install {package}")
    text = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "page.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_page_has_one_place_in_the_navigation():
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    kinds = pages.kinds_of_pages(PAGES, notebooks)
    listed = [name for names in kinds.values() for name in names]
    assert len(listed) == len(set(listed))
    written = {f"docs/{page.stem}" for page in PAGES} | {
        f"notebooks/{one.stem}" for one in notebooks
    }
    assert written <= set(listed)
    assert {name for name in listed if name.startswith("docs/")} <= written


def test_the_page_of_the_command_line_has_every_command():
    import tpukit.__main__

    page = pages.page_of_command_line()
    for command in ("check", "info", *tpukit.__main__._COMMANDS):
        assert f"## {command}\n" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_the_kit_on_a_page_are_there(page):
    import tpukit
    from tpukit.essentials.launcher import Core

    text = page.read_text()
    for whole in set(re.findall(r"`tpukit((?:\.[a-zA-Z_]+)+)\(", text)):
        value = tpukit
        for name in whole[1:].split("."):
            value = getattr(value, name)
    for name in set(re.findall(r"`core\.([a-z_]+)\(", text)):
        assert callable(getattr(Core, name))


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "one.html").write_text(
        '<a href="two.html#there">a</a><a href="two.html#gone">b</a><a href="three.html">c</a>'
        '<a href="https://a b">d</a><a href="https://pypi.org/project/torch/">e</a><img src="gone.png">'
    )
    (tmp_path / "two.html").write_text('<h1 id="there">a</h1>')
    assert [line.split(": ")[1].split()[0] for line in links.broken_links(tmp_path)] == [
        "two.html#gone",
        "three.html",
        "https://a",
        "gone.png",
    ]


@pytest.mark.only_soak  # make docs does it
@pytest.mark.skipif(
    importlib.util.find_spec("myst_nb") is None,
    reason="needs Sphinx and myst-nb: pip install '.[docs]'",
)
def test_the_pages_are_built_without_a_warning():
    done = subprocess.run([sys.executable, ROOT / "docs/pages.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
