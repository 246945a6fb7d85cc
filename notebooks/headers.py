"""Write what all notebooks share, and every link to them, from the repository's address in pyproject.toml.

    python notebooks/headers.py [--check]

In each notebook: the badges of the first cell, and the bootstrap cell after it. In README.md: the links that open a
notebook on Colab or Kaggle. Run twice it changes nothing. With --check nothing is written; exits with 1 if it would be.
"""

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
COLAB = "https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}"
KAGGLE = "https://kaggle.com/kernels/welcome?src={address}/blob/main/notebooks/{name}"

# Folded on Colab, Kaggle and in JupyterLab: nobody reads it twice.
HIDDEN = {"_kg_hide-input": True, "cellView": "form", "jupyter": {"source_hidden": True}}  # sorted, as ruff has it
BOOTSTRAP = """\
# @title The kit: from this clone, from a dataset attached on Kaggle, or installed { display-mode: "form" }
import pathlib
import sys
from importlib.util import find_spec

here, kaggle = pathlib.Path.cwd(), pathlib.Path("/kaggle/input")
homes = [here, *here.parents, *kaggle.glob("*"), *kaggle.glob("datasets/*/*")]
sys.path[:0] = [str(home) for home in homes if (home / "tpukit/__init__.py").is_file()][:1]
keep = "--no-deps" if find_spec("torch") else ""  # an image's torch is never replaced
if not find_spec("tpukit"):
    !git clone -q --depth 1 ADDRESS kit
    %pip install -q {keep} ./kit
    sys.path.insert(0, "kit")
if not find_spec("array_record") and sys.platform != "win32":  # Kaggle's image has none
    %pip install -q array_record simplejpeg
import tpukit"""


def links(name: str) -> dict[str, str]:
    """Return the addresses that open a notebook, by platform."""
    repository = ADDRESS.removeprefix("https://github.com/")
    return {
        "Colab": COLAB.format(repository=repository, name=name),
        "Kaggle": KAGGLE.format(address=ADDRESS, name=name),
    }


def badges(name: str) -> str:
    """Return the line of badges of a notebook."""
    images = {
        "Colab": "https://colab.research.google.com/assets/colab-badge.svg",
        "Kaggle": "https://kaggle.com/static/images/open-in-kaggle.svg",
    }
    return " ".join(f"[![Open in {where}]({images[where]})]({link})" for where, link in links(name).items())


def notebook(name: str, text: str) -> str:
    """Return a notebook's JSON with its badges and its bootstrap cell as they should be."""
    content = json.loads(text)
    header, bootstrap = content["cells"][:2]
    lines = "".join(header["source"]).splitlines()
    lines = [line for line in lines if "colab-badge.svg" not in line]
    header["source"] = "\n".join([lines[0], "", badges(name), *lines[1:]]).replace("\n\n\n", "\n\n").splitlines(True)
    bootstrap["source"] = BOOTSTRAP.replace("ADDRESS", ADDRESS).splitlines(True)
    bootstrap["metadata"] = HIDDEN
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def readme(text: str) -> str:
    """Return the README with the links of its notebooks as they should be."""

    def link(found: re.Match) -> str:
        where = "Colab" if "colab" in found[0] else "Kaggle"
        return links(found["name"])[where]

    return re.sub(r"https://[\w.]*(?:colab|kaggle)\.[^\s)]*/blob/main/notebooks/(?P<name>\w+\.ipynb)", link, text)


def main() -> None:
    """Write the files that are not as they should be, or only name them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    check = parser.parse_args().check
    wanted = {path: notebook(path.name, path.read_text()) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    wanted[ROOT / "README.md"] = readme((ROOT / "README.md").read_text())
    other = [path for path, text in wanted.items() if text != path.read_text()]
    for path in other:
        print(f"{'would change' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(wanted[path])
    sys.exit(bool(other) and check)


if __name__ == "__main__":
    main()
