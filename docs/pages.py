"""Build the site: write the sources, run Sphinx, and follow every link. `make docs` calls it.

The API reference lists the public names, and only these: every name in a title of
`docs/examples/SUBPACKAGE.md`. A subpackage without such a file has no public names. Other names in
an `__all__` are for tpukit's own subpackages and may change.
"""

import ast
import html
import importlib
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from links import broken_links
from messages import Message, messages

HERE = Path(__file__).parent
ROOT = HERE.parent
SOURCE = ROOT / "build" / "docs" / "source"
PAGES = ROOT / "build" / "docs" / "html"
# The pages of the site by kind. A page that is in no list comes last among the concepts.
START = ["docs/install", "notebooks/00_quickstart", "docs/from_pytorch"]
HOW_TO = [
    "docs/train_with_fit",
    "docs/tpu_sizes",
    "docs/data_forms",
    "docs/checkpoints",
    "docs/resume",
    "docs/log_a_run",
    "docs/cross_validation",
    "docs/segmentation",
    "docs/custom_loss",
    "docs/hugging_face",
    "docs/your_own_exams",
    "docs/export_a_model",
    "docs/sessions",
    "docs/compilation_cache",
    "docs/sharding",
    "docs/several_hosts",
    "docs/jobs",
    "docs/torchtpu",
    "docs/migrating",
    "docs/from_torch_xla_1x",
]
CONCEPTS = [
    "docs/how_it_works",
    "docs/graphs_and_shapes",
    "docs/in_sync",
    "docs/replay",
    "docs/backends",
    "docs/speed",
]
HELP = [
    "messages",
    "docs/symptoms",
    "docs/faq",
    "docs/glossary",
    "docs/security",
    "docs/evidence",
    "docs/style",
]
REFERENCE = ["docs/cheat_sheet", "api/exceptions", "command_line", "docs/supported_versions"]
# Public modules that need a package which tpukit does not require, and so stand in no `__all__`.
OPTIONAL_MODULES = {"training": {"lightning": ["trainer_options"]}}
DIRECTIVES = {"function": "autofunction", "class": "autoclass"}


def main() -> int:
    """Build everything; return Sphinx's status, or 1 if a link is broken."""
    shutil.rmtree(SOURCE.parent, ignore_errors=True)
    write_sources()
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    status = subprocess.run([*sphinx, SOURCE, PAGES], check=False).returncode
    broken = broken_links(PAGES)
    count = len(list(PAGES.rglob("*.html")))
    summary = f"{count} pages in {PAGES.relative_to(ROOT)}, no broken links"
    print("\n".join(broken) or summary)
    return status or bool(broken)


def write_sources() -> None:
    """Write Sphinx's input in the layout of the repository, so that links between files work."""
    shutil.copy(HERE / "conf.py", _with_folder(SOURCE / "conf.py"))
    shutil.copytree(HERE / "_static", SOURCE / "_static")
    pages = sorted(HERE.glob("*.md"))
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    linked = {*pages, *notebooks}
    for page in pages:
        text = _without_dead_links(page.read_text(), page, linked)
        _with_folder(SOURCE / "docs" / page.name).write_text(text)
    for file in notebooks:
        text = json.dumps(_notebook_page(file, linked))
        _with_folder(SOURCE / "notebooks" / file.name).write_text(text)
    _with_folder(SOURCE / "api" / "tpukit.md").write_text(page_of_top_level())
    for subpackage in subpackages():
        (SOURCE / "api" / f"{subpackage}.md").write_text(page_of_subpackage(subpackage))
    (SOURCE / "api" / "exceptions.md").write_text(page_of_exceptions())
    (SOURCE / "messages.md").write_text(page_of_messages())
    (SOURCE / "command_line.md").write_text(page_of_command_line())
    (SOURCE / "index.md").write_text(front_page(kinds_of_pages(pages, notebooks)))


def _with_folder(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _notebook_page(file: Path, linked: set[Path]) -> dict:
    """Return a notebook as a page, with the outputs that `make outputs` has stored in it."""
    notebook = json.loads(file.read_text())
    # Pygments takes "!" and "%" for errors in plain Python.
    notebook["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        cell["metadata"] = {"tags": ["hide-input"]} if source.startswith("# @title") else {}
        if cell["cell_type"] == "markdown":
            cell["source"] = _without_dead_links(source, file, linked)
    return notebook


def _without_dead_links(text: str, file: Path, linked: set[Path]) -> str:
    """Replace a link to a file that has no page by its words; copy pictures."""

    def replaced(link: re.Match) -> str:
        bang, words, address = link.groups()
        target = address.partition("#")[0]
        path = file.parent / target
        if re.match(r"[a-z]+:|#", address) or path.resolve() in linked:
            return link[0]
        if bang and path.exists():
            shutil.copy(path, _with_folder(SOURCE / "docs" / path.name))
            return link[0]
        return words

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replaced, text)


# The API reference


def subpackages() -> list[str]:
    """Return the subpackages that have public names, the essentials first."""
    names = sorted(path.stem for path in (HERE / "examples").glob("*.md"))
    return sorted(names, key=lambda name: not name.startswith("essentials."))


def exported_names(subpackage: str) -> list[str]:
    """Return `__all__` of a subpackage without importing it: its public and internal names."""
    path = ROOT / "tpukit" / subpackage.replace(".", "/") / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    return []


class Example(NamedTuple):
    """One example: its public names, the text above it (may be empty), a doctest session."""

    names: list[str]
    text: str
    code: str


def examples(subpackage: str) -> list[Example]:
    """Return the examples of a subpackage; each continues the session of the previous example."""
    text = (HERE / "examples" / f"{subpackage}.md").read_text()
    pattern = r"^## (.+?)\n(.*?)^```pycon\n(.*?)^```"
    found = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    return [Example(names.split(", "), words.strip(), code) for names, words, code in found]


def public_names(subpackage: str) -> list[str]:
    """Return the public names of a subpackage: those in the titles of its examples."""
    names = []
    for example in examples(subpackage):
        names += example.names
    return names


def page_of_top_level() -> str:
    """Write the reference of the names that `import tpukit` offers."""
    import tpukit

    lines = [
        "# tpukit",
        "",
        "Names of the top level: `import tpukit`, then `tpukit.launch(...)`.",
        "",
    ]
    for subpackage in subpackages():
        exported = [name for name in public_names(subpackage) if name in tpukit.__all__]
        names = [name for name in exported if not inspect.ismodule(getattr(tpukit, name))]
        if not names:
            continue
        lines += [f"## {', '.join(names)}", ""]
        lines += [f"Examples: [tpukit.{subpackage}]({subpackage}.md)", ""]
        for name in names:
            lines += _reference(f"tpukit.{name}", getattr(tpukit, name))
    return "\n".join(lines)


def page_of_subpackage(subpackage: str) -> str:
    """Write the examples of a subpackage, each above the reference of its names."""
    import tpukit

    module = importlib.import_module(f"tpukit.{subpackage}")
    lines = [f"# tpukit.{subpackage}", "", inspect.getdoc(module), ""]
    lines += ["The examples of this page are one session, in this order.", ""]
    for names, text, code in examples(subpackage):
        lines += [f"## {', '.join(names)}", ""]
        if text:
            lines += [text, ""]
        lines += ["```pycon", code.rstrip(), "```", ""]
        for name in names:
            value = getattr(module, name)
            if value is getattr(tpukit, name, None):
                lines += [f"[tpukit.{name}](tpukit.md): arguments and types.", ""]
            else:
                lines += _reference(f"tpukit.{subpackage}.{name}", value)
    for name, functions in OPTIONAL_MODULES.get(subpackage, {}).items():
        lines += [f"## {name}", ""]
        optional = importlib.import_module(f"tpukit.{subpackage}.{name}")
        for function in functions:
            place = f"tpukit.{subpackage}.{name}.{function}"
            lines += _reference(place, getattr(optional, function))
    return "\n".join(lines)


def _reference(place: str, value) -> list[str]:
    """Return the lines for one name: its signature with types and its docstring."""
    if inspect.ismodule(value):
        lines = [f"`{place}` is a module.", ""]
        for name in value.__all__ if hasattr(value, "__all__") else _functions(value):
            lines += _reference(f"{place}.{name}", getattr(value, name))
        return lines
    for kind, directive in DIRECTIVES.items():
        if getattr(inspect, f"is{kind}")(value):
            members = ["   :members:"] if kind == "class" else []
            return ["```{eval-rst}", f".. {directive}:: {place}", *members, "```", ""]
    data = ["```{eval-rst}", f".. py:data:: {place}", "   :no-typesetting:", "```", ""]
    return [*data, f"`{place}` is a value of type `{type(value).__name__}`.", ""]


def _functions(module) -> list[str]:
    """Return the functions that a module defines, in their order."""
    functions = [value for value in vars(module).values() if inspect.isfunction(value)]
    own = [value for value in functions if value.__module__ == module.__name__]
    return [value.__name__ for value in own if not value.__name__.startswith("_")]


def page_of_exceptions() -> str:
    """Write a table of the exceptions: base, first line of the docstring, subpackage."""
    from tpukit.essentials.display import TpukitError

    lines = ["# Exceptions", ""]
    lines += ["Every error of tpukit is a `TpukitError` with the fields `fact`, `found` and `fix`,"]
    lines += ["or a built-in exception with these fields.", ""]
    lines += ["| exception | base | meaning | subpackage |", "|---|---|---|---|"]
    for subpackage, error in _exceptions():
        if error.__module__ == TpukitError.__module__ and error is not TpukitError:
            continue  # also a built-in exception, by whose name users catch it
        meaning = inspect.getdoc(error).splitlines()[0]
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        lines += [f"| `{error.__name__}` | {bases} | {meaning} | `tpukit.{subpackage}` |"]
    return "\n".join([*lines, ""])


def _exceptions() -> list[tuple[str, type]]:
    """Return the exceptions that a subpackage exports, with the subpackage."""
    found = {}
    for path in sorted((ROOT / "tpukit").rglob("__init__.py")):
        subpackage = ".".join(path.parent.relative_to(ROOT / "tpukit").parts)
        if not subpackage:
            continue
        module = importlib.import_module(f"tpukit.{subpackage}")
        for name in exported_names(subpackage):
            value = getattr(module, name)
            if inspect.isclass(value) and issubclass(value, BaseException):
                found.setdefault(value, subpackage)
    return sorted(
        ((where, error) for error, where in found.items()), key=lambda row: row[1].__name__
    )


# Other pages


def page_of_messages() -> str:
    """Write an entry for every error message of tpukit, by subpackage."""
    lines = ["# Troubleshooting by message", ""]
    lines += ["Paste an error message, or its line that begins with `found:`. The best matches"]
    lines += ["come first. A name in braces is a value of your run.", "", "```{raw} html"]
    lines += ['<textarea id="message" aria-label="the message"></textarea>']
    lines += ['<div id="message-answers"></div>', "```", ""]
    by_subpackage: dict[str, list[Message]] = {}
    for message in messages():
        if message.facts:
            by_subpackage.setdefault(message.subpackage, []).append(message)
    for subpackage, found in sorted(by_subpackage.items()):
        lines += [f"## {subpackage}", "", "```{raw} html"]
        for message in found:
            lines += _entry(message)
        lines += ["```", ""]
    return "\n".join(lines)


def _entry(message: Message) -> list[str]:
    def code(text: str) -> str:
        return f"<code>{html.escape(' '.join(text.split()))}</code>"

    facts = html.escape(" ".join(message.facts), quote=True)
    lines = [f'<div data-fact="{facts}" class="admonition">']
    lines += [f'<p class="admonition-title">{code(message.facts[0])}</p>']
    lines += [f"<p>or {code(fact)}</p>" for fact in message.facts[1:]]
    lines += [f"<p>found: {code(text)}</p>" for text in message.found[:3]]
    lines += [f"<p><strong>fix:</strong> {code(text)}</p>" for text in message.fixes[:6]]
    origin = f" from <code>{message.function}</code>" if message.function else ""
    return [*lines, f"<p><small>{message.kind}{origin}</small></p></div>"]


def page_of_command_line() -> str:
    """Write the help of the command line, and of each of its commands."""
    overview = _help_of()
    commands = re.findall(r"^    (\w+)(?= |$)", overview, re.MULTILINE)
    lines = ["# Command line", "", "```text", overview.rstrip(), "```", ""]
    for command in commands:
        lines += [f"## {command}", "", "```text", _help_of(command).rstrip(), "```", ""]
    return "\n".join(lines)


def _help_of(*command: str) -> str:
    """Return the help that the command line prints."""
    program = [sys.executable, "-m", "tpukit", *command, "--help"]
    environ = {**os.environ, "COLUMNS": "95", "PYTHONPATH": str(ROOT)}
    return subprocess.run(program, env=environ, capture_output=True, text=True, check=True).stdout


def kinds_of_pages(pages: list[Path], notebooks: list[Path]) -> dict[str, list[str]]:
    """Return the pages of the site by kind, in the order of the navigation."""
    api = ["api/tpukit", *(f"api/{name}" for name in subpackages())]
    kinds = {
        "Start": START,
        "Notebooks": [f"notebooks/{file.stem}" for file in notebooks],
        "How-to": HOW_TO,
        "Concepts": CONCEPTS,
        "Reference": [*REFERENCE, *api],
        "Help": HELP,
    }
    kinds["Notebooks"] = [name for name in kinds["Notebooks"] if name not in START]
    listed = set(itertools.chain.from_iterable(kinds.values()))
    others = [f"docs/{page.stem}" for page in pages if f"docs/{page.stem}" not in listed]
    return {**kinds, "Concepts": [*CONCEPTS, *others]}


def front_page(kinds: dict[str, list[str]]) -> str:
    """Write the first page: what, why and how, and the kinds of pages."""
    lines = [(HERE / "home.txt").read_text()]
    for caption, names in kinds.items():
        options = [f":caption: {caption}", ":maxdepth: 1", ":hidden:"]
        lines += ["```{toctree}", *options, "", *names, "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
