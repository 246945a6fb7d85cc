"""Write the badges and the install cell of all notebooks, and the links in the README.

    python notebooks/headers.py [--check]

The links need the repository's address on GitHub: REPOSITORY=owner/name, or that of
`git remote get-url origin`. Without an address the files get no badges and no links.

    each notebook    the badges of the first cell, and the install cell after it
    README.md        the badges that open notebook 01, and the last columns of the table of notebooks

A second run changes nothing. With --check nothing is written. The address is then the one that the
notebooks have already, and the exit status is 1 if a file has another address or install cell.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The branch is main: neither Colab nor Kaggle says that it takes HEAD.
COLAB = "https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}"
KAGGLE = "https://kaggle.com/kernels/welcome?src=https://github.com/{repository}/blob/main/notebooks/{name}"
BADGES = {
    "Colab": "https://colab.research.google.com/assets/colab-badge.svg",
    "Kaggle": "https://kaggle.com/static/images/open-in-kaggle.svg",
}
FIRST = "01_setup.ipynb"
NAME = r"[\w.-]+/[\w.-]+?"
# Whatever stands before @ stays out: it may be a token.
ORIGIN = rf"(?:https://(?:[^@/]+@)?|ssh://git@|git@)github\.com[/:]({NAME})(?:\.git)?/?"

# Folded on Colab, Kaggle and in JupyterLab, because it is the same in every notebook.
HIDDEN = {"_kg_hide-input": True, "cellView": "form", "jupyter": {"source_hidden": True}}  # sorted, as ruff has it
BOOTSTRAP = (ROOT / "notebooks/first_cell.txt").read_text().rstrip("\n")


def origin() -> str:
    """Return owner/name of the clone's origin on GitHub; "" if there is none.

    A repository around this folder, as on a user's disk, does not count.
    """
    git = ["git", "-C", str(ROOT)]
    try:
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True).stdout.strip()
        url = subprocess.run([*git, "remote", "get-url", "origin"], capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return ""
    found = re.fullmatch(ORIGIN, url)
    is_own = Path(top).resolve() == ROOT.resolve()
    if found and is_own:
        return found[1]
    return ""


def address() -> str:
    """Return owner/name of the repository, as REPOSITORY or the clone's origin has it; "" for none."""
    given = os.environ.get("REPOSITORY", "")
    if given and not re.fullmatch(NAME, given):
        sys.exit(f"REPOSITORY is the owner and the name of a repository on GitHub, got {given!r}\n  fix: owner/name")
    return given or origin()


def written() -> str:
    """Return owner/name that the notebooks have already; "" for none."""
    first = json.loads(min((ROOT / "notebooks").glob("*.ipynb")).read_text())["cells"][0]
    found = re.search(rf"colab\.research\.google\.com/github/({NAME})/blob/", "".join(first["source"]))
    return found[1] if found else ""


def links(name: str, repository: str) -> dict[str, str]:
    """Return the addresses that open a notebook, by platform."""
    return {
        "Colab": COLAB.format(repository=repository, name=name),
        "Kaggle": KAGGLE.format(repository=repository, name=name),
    }


def install_cell(repository: str) -> str:
    """Return the cell that installs tpukit. With an address, it clones that if no wheel is found."""
    if not repository:
        return BOOTSTRAP
    wheel = next(line for line in BOOTSTRAP.splitlines() if "%pip" in line)
    pip = wheel.replace("%pip", '!"{sys.executable}" -m pip')
    clone = f"git clone -q --depth 1 https://github.com/{repository} tpukit-clone"
    # A backslash continues a shell command in IPython.
    lines = [f"{pip} 2> /dev/null", "|| test -d tpukit-clone", f"|| {clone}"]
    return BOOTSTRAP.replace(wheel, " \\\n        ".join(lines))


def notebook(name: str, text: str, repository: str) -> str:
    """Return a notebook's JSON with its badges and its bootstrap cell as they should be."""
    content = json.loads(text)
    header, bootstrap = content["cells"][:2]
    title, *lines = [line for line in "".join(header["source"]).splitlines() if BADGES["Colab"] not in line]
    opens = links(name, repository).items() if repository else ()
    badges = " ".join(f"[![Open in {where}]({BADGES[where]})]({link})" for where, link in opens)
    body = "\n".join(lines).strip("\n")
    header["source"] = "\n\n".join(filter(None, [title, badges, body])).splitlines(True)
    bootstrap["source"] = install_cell(repository).splitlines(True)
    bootstrap["metadata"] = HIDDEN
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def readme(text: str, repository: str) -> str:
    """Return the README with its badges and its table of notebooks; with links if there is an address."""

    def row(found: re.Match) -> str:
        name = found["name"]
        if not repository:
            return found["row"]
        if name:
            cells = [f"[open]({link})" for link in links(name, repository).values()]
        elif "---" in found["row"]:
            cells = ["---", "---"]
        else:
            cells = list(BADGES)
        return f"{found['row']} {' | '.join(cells)} |".replace("| --- | --- |", "|---|---|")

    def badges(found: re.Match) -> str:
        opens = links(FIRST, repository).items() if repository else ()
        added = [f"[![Open in {where}]({BADGES[where]})]({link})" for where, link in opens]
        return " ".join([found["own"], *added])

    head = r"\| group \| notebook \| you learn to \| time \||(?:\|---){4}\|(?=(?:---\|---\|)?\n\|[^|\n]*\| \[)"
    one = r"\|[^|\n]*\| \[[^\]]+\]\(notebooks/(?P<name>\w+\.ipynb)\) \| [^|\n]+ \| [^|\n]+ \|"
    text = re.sub(rf"^(?P<row>{head}|{one})[^\n]*$", row, text, flags=re.MULTILINE)
    return re.sub(r"^(?P<own>\[!\[Python.*?\]\(LICENSE\)).*$", badges, text, flags=re.MULTILINE)


def main() -> None:
    """Write the files that are not as they should be, or only name them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    check = parser.parse_args().check
    repository = written() if check else address()
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    wanted = {path: notebook(path.name, path.read_text(), repository) for path in paths}
    wanted[ROOT / "README.md"] = readme((ROOT / "README.md").read_text(), repository)
    other = [path for path, text in wanted.items() if text != path.read_text()]
    for path in other:
        print(f"{'would change' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(wanted[path])
    if not check and not repository:
        print(
            "no badges, because this clone has no address: run `make headers` after you have pushed to GitHub, "
            "or with REPOSITORY=owner/name"
        )
    sys.exit(bool(other) and check)


if __name__ == "__main__":
    main()
