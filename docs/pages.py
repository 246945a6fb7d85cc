"""Build the pages: lay out what they are made of, run Sphinx, follow every link. `make docs` calls it."""

import ast
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from links import broken_links
from messages import messages

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]
SOURCE, PAGES = ROOT / "build" / "docs" / "source", ROOT / "build" / "docs" / "html"
# Where what was executed lies, and how each page says so: the best first.
EXECUTED = (
    ("runs/{name}", "*The outputs are those of `make walkthrough`.*"),
    ("runs/exams/{name}", "*The outputs are those of `make exams`.*"),
    ("build/executed/{name}", "*The outputs are those of a test, which runs with the small numbers that stand here.*"),
    ("notebooks/{name}", "*Shown without outputs: open it, and run it, to see them.*"),
)
ROOMS = ["data", "environment", "launcher", "display", "backends"]  # of the essentials
FIRST = ["from_pytorch", "from_others", "from_torch_xla_1x", "jobs", "cheat_sheet", "after_torch_xla"]
KINDS = {"function": "autofunction", "class": "autoclass", "module": "automodule"}


def main() -> int:
    """Build everything; the exit status is Sphinx's, or 1 where a link leads nowhere."""
    shutil.rmtree(SOURCE.parent, ignore_errors=True)
    lay_out()
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", SOURCE, PAGES]
    status = subprocess.run(sphinx, check=False).returncode
    broken = broken_links(PAGES)
    print(
        "\n".join(broken)
        or f"{len(list(PAGES.rglob('*.html')))} pages in {PAGES.relative_to(ROOT)}, every link leads somewhere"
    )
    return status or bool(broken)


def lay_out() -> None:
    """Write what Sphinx reads, laid out as the repository is, so that links between files stay as they are."""
    for name in ("conf.py", "_static"):
        (shutil.copytree if (HERE / name).is_dir() else shutil.copy)(HERE / name, _made(SOURCE / name))
    pages = sorted(HERE.glob("*.md"))
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    there = {*pages, *notebooks}
    for page in pages:
        _made(SOURCE / "docs" / page.name).write_text(_without_dead_links(page.read_text(), page, there))
    for file in notebooks:
        notebook, note = _executed(file)
        notebook["metadata"]["language_info"] = {
            "name": "python",
            "pygments_lexer": "ipython3",
        }  # ! and % are no errors
        cells = [{"cell_type": "markdown", "id": "outputs", "metadata": {}, "source": note}]
        for cell in notebook["cells"]:
            is_set_up = "".join(cell["source"]).startswith("# @title")
            cell["metadata"] = {"tags": ["hide-input"]} if is_set_up else {}
            if cell["cell_type"] == "markdown":
                cell["source"] = _without_dead_links("".join(cell["source"]), file, there)
        notebook["cells"][1:1] = cells
        _made(SOURCE / "notebooks" / file.name).write_text(json.dumps(notebook))
    for room in rooms():
        _made(SOURCE / "api" / f"{room}.md").write_text(page_of_room(room))
    (SOURCE / "messages.md").write_text(page_of_messages())
    (SOURCE / "index.md").write_text(front_page(pages, notebooks))


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _executed(file: Path) -> tuple[dict, str]:
    """Return a notebook, with its outputs where it was executed here, and a note that says by what."""
    found = ((ROOT / place.format(name=file.name), note) for place, note in EXECUTED)
    return next((json.loads(path.read_text()), note) for path, note in found if path.exists())


def _without_dead_links(text: str, file: Path, there: set[Path]) -> str:
    """Keep the words of a link to a file of the repository that has no page here."""

    def kept(link: re.Match) -> str:
        target = link[3].partition("#")[0]
        if re.match(r"[a-z]+:|#", link[3]) or (file.parent / target).resolve() in there:
            return link[0]
        if link[1] and (file.parent / target).exists():
            shutil.copy(file.parent / target, _made(SOURCE / "docs" / Path(target).name))
            return link[0]
        return link[2]

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", kept, text)


def rooms() -> list[str]:
    """Return the rooms that people import from, the essentials first."""
    others = [
        one.parent.name for one in sorted((ROOT / "tpukit").glob("*/__init__.py")) if one.parent.name != "essentials"
    ]
    return [*(f"essentials.{room}" for room in ROOMS), *others]


def public_names(room: str) -> list[str]:
    """Return what a room lists as its own, without importing it."""
    tree = ast.parse((ROOT / "tpukit" / room.replace(".", "/") / "__init__.py").read_text())
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    return sorted(dict.fromkeys(ast.literal_eval(lists[0])), key=str.lower)


class Example(NamedTuple):
    """One example: the names that it is for, what is said above it, if anything, and a doctest session."""

    names: list[str]
    said: str
    code: str


def examples(room: str) -> list[Example]:
    """Return the examples of a room; each goes on where the one before ended."""
    text = (HERE / "examples" / f"{room}.md").read_text()
    found = re.findall(r"^## (.+?)\n(.*?)^```pycon\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [Example(names.split(", "), said.strip(), code) for names, said, code in found]


def page_of_room(room: str) -> str:
    """Write the page: the examples, each above the names that it is for."""
    import importlib
    import inspect

    module = importlib.import_module(f"tpukit.{room}")
    lines = [f"# tpukit.{room}", "", inspect.getdoc(module), ""]
    lines += ["The examples of this page are one session: each goes on where the one before it ended.", ""]
    for names, said, code in examples(room):
        lines += [f"## {', '.join(names)}", "", *[said, ""] * bool(said), "```pycon", code.rstrip(), "```", ""]
        for name in names:
            value = getattr(module, name)
            place = f"tpukit.{room}.{name}"
            kind = next((k for k in KINDS if getattr(inspect, f"is{k}")(value)), None)
            if kind is None or value.__doc__ is None or value is dict:
                lines += [
                    "```{eval-rst}",
                    f".. py:data:: {place}",
                    "   :no-typesetting:",
                    "```",
                    "",
                    f"`{name}` is a value.",
                    "",
                ]
                continue
            if kind == "module":
                lines += [f"`{value.__name__}`: {(inspect.getdoc(value) or '').splitlines()[0]}", ""]
                continue
            body = ["   :members:"] * (kind == "class") + ["   :no-index:"] * (room != home(name))
            lines += ["```{eval-rst}", f".. {KINDS[kind]}:: {place}", *body, "```", ""]
    return "\n".join(lines)


def home(name: str) -> str:
    """Return the first room that lists a name."""
    return next(room for room in rooms() if name in public_names(room))


def page_of_messages() -> str:
    """Write an entry for every message that the kit can raise, by room."""
    lines = [
        "# Troubleshooting by message",
        "",
        "Paste a message, or the line that begins with `found:`; the nearest entries come first.",
    ]
    lines += ["What a run fills in stands in braces.", "", "```{raw} html"]
    lines += ['<textarea id="message" aria-label="the message"></textarea><div id="message-answers"></div>', "```", ""]
    by_room = {}
    for one in messages():
        by_room.setdefault(one.room, []).append(one)
    for room, found in sorted(by_room.items()):
        lines += [f"## {room}", "", "```{raw} html"]
        lines += [line for one in found if one.facts for line in _entry(one)]
        lines += ["```", ""]
    return "\n".join(lines)


def _entry(one) -> list[str]:
    def code(text):
        return f"<code>{html.escape(' '.join(text.split()))}</code>"

    said = html.escape(" ".join(one.facts), quote=True)
    lines = [f'<div data-fact="{said}" class="admonition"><p class="admonition-title">{code(one.facts[0])}</p>']
    lines += [f"<p>or {code(fact)}</p>" for fact in one.facts[1:]]
    lines += [f"<p>found: {code(text)}</p>" for text in one.found[:3]]
    lines += [f"<p><strong>fix:</strong> {code(text)}</p>" for text in one.fixes[:6]]
    who = f" from <code>{one.function}</code>" if one.function else ""
    return [*lines, f"<p><small>{one.kind}{who}</small></p></div>"]


def front_page(pages: list[Path], notebooks: list[Path]) -> str:
    """Write where to begin, and the order of the pages."""
    first = [f"docs/{name}" for name in FIRST]
    others = [f"docs/{page.stem}" for page in pages if page.stem not in FIRST]
    parts = {
        "Start here": [*first, "messages"],
        "Notebooks": [f"notebooks/{file.stem}" for file in notebooks],
        "By room": [f"api/{room}" for room in rooms()],
        "What is known": others,
    }
    readme = (ROOT / "README.md").read_text()
    lines = ["# tpukit", "", readme.split("\n\n")[1], ""]
    lines += [
        "- Something failed: [paste the message](messages.md).",
        "- New here: [from PyTorch to tpukit](docs/from_pytorch.md), or notebook [01](notebooks/01_setup.ipynb).",
        "",
    ]
    for caption, entries in parts.items():
        lines += ["```{toctree}", f":caption: {caption}", ":maxdepth: 1", "", *entries, "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
