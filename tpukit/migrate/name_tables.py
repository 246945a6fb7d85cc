"""What became of a name, from the tables in this folder.

api.json has every name of torch_xla 2.8 and 2.9, and those that 2.2 to 2.9 removed, as tools/torch_xla_api.py reads
them from the packages. names.json has a sentence for the important ones, invented.json what language models write,
libraries.json the names of transformers, Lightning, accelerate and ignite.
"""

import difflib
import functools
import importlib.metadata
import json
import re
from pathlib import Path
from typing import NamedTuple

# The meaning of these in a notebook that does not import them: helper files of Kaggle did.
USUAL = {
    "xm": "torch_xla.core.xla_model",
    "xmp": "torch_xla.distributed.xla_multiprocessing",
    "xser": "torch_xla.utils.serialization",
    "torch_xla": "torch_xla",
}


class Verdict(NamedTuple):
    """What happened to a name, and what to write; `kind` is the anchor on the docs page."""

    kind: str
    happened: str
    write: str


@functools.cache
def table(name: str, part: str = "") -> dict:
    """Return one of the tables, or a part of it."""
    found = json.loads(Path(__file__).with_name(f"{name}.json").read_text())
    return found[part] if part else found


def entry_of(full: str) -> dict:
    """Return the entry of names.json for a name; an empty one if it has none."""
    return table("names", "names").get(full, {})


def parts_of(full: str) -> list[str]:
    """Return the names that a name begins with, the longest first: a.b.c, a.b."""
    parts = full.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 1, -1)]


def of_today(full: str) -> str:
    """Return a name with the place that its module has today."""
    for part in parts_of(full):
        if new := entry_of(part).get("module"):
            return new + full.removeprefix(part)
    return full


def is_in_both_releases(full: str) -> bool:
    """Return whether 2.8 and 2.9 both have a module, or a name at the top of one."""
    api = table("api")
    module, _, name = full.rpartition(".")
    if full in api:
        return not api[full].get("gone_in_2_9")
    return module in api and name in _names_of(module)


def _names_of(module: str) -> list[str]:
    entry = table("api")[module]
    return sum((table("api")[one]["names"] for one in entry.get("all_of", ())), entry["names"])


@functools.cache
def _installed() -> str:
    """Return the column of api.json for the installed torch_xla."""
    try:
        return "only_" + "_".join(importlib.metadata.version("torch_xla").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


def dead_part(full: str) -> str:
    """Return a name up to the piece that torch_xla does not have; "" if it has all. Classes are not looked into."""
    api = table("api")
    place, *parts = full.split(".")
    if place == "torch_xla_py":  # the package's first name, of 2019
        return full
    if place == "torch" and parts[:1] in (["xla"], ["tpu"]):
        return full
    if place != "torch_xla":
        return ""
    for number, part in enumerate(parts, start=1):
        below = api["_modules"].get(f"{place}.{part}", f"{place}.{part}")
        if below in api and not (api[below].get("gone_in_2_9") and _installed() != "only_2_8"):
            place = below
        elif part in _names_of(place) or part in api[place].get(_installed(), ()):
            return ""
        else:
            return ".".join(["torch_xla", *parts[:number]])
    return ""


def verdict_on(full: str) -> Verdict | None:
    """Return what happened to a name of torch_xla; None if it is as it was."""
    today = of_today(full)
    dead = dead_part(full)
    moved = next((entry_of(one) for one in parts_of(full) if "module" in entry_of(one)), None)
    for name in (full, today, dead):
        if entry_of(name).get("happened") and "module" not in entry_of(name):
            return Verdict(*(entry_of(name)[key] for key in Verdict._fields))
    if not dead:
        return None
    if moved and not dead_part(today):
        return Verdict("moved", moved["happened"], today)
    return _invented(full, dead) or _removed(dead)


def _invented(full: str, dead: str) -> Verdict | None:
    names = table("invented", "names")
    below = [name for name in names if name.startswith(f"{dead}.")]
    for name in (full, dead, *parts_of(full), *below[:1]):
        if name in names:
            happened = ": ".join(filter(None, ("no release has had it", names[name].get("note"))))
            return Verdict("invented", happened, names[name]["right"])
    return None


def _removed(dead: str) -> Verdict:
    """Return the verdict on a name that only the packages know."""
    api = table("api")
    module, _, name = dead.rpartition(".")
    since = next((api["_removed"][one] for one in parts_of(dead) if one in api["_removed"]), "")
    happened = f"removed in torch_xla {since}" if since else "in no release of torch_xla from 2.1 to 2.9"
    public = [one for one in api if not re.search(r"(^|\.)_", one) and name in api[one]["names"]]
    if public:
        return Verdict("moved", happened, f"{min(public, key=len)}.{name}")
    others = [one["right"] for key, one in table("invented", "names").items() if key.endswith(f".{name}")]
    near = difflib.get_close_matches(name, api.get(module, {}).get("names", ()), 1)
    if others or (near and not since):
        return Verdict("invented", happened, others[0] if others else f"perhaps {module}.{near[0]}")
    return Verdict("removed", happened, "nothing replaces it: write out the lines that need it")


def library_name(full: str) -> str:
    """Return a name as libraries.json has it: Lightning is one package under two names."""
    return re.sub(r"^lightning\.(pytorch\.)?", "pytorch_lightning.", full)


def library_verdict(full: str) -> Verdict | None:
    """Return what happened to a name of another library; None if the table does not have it."""
    names = table("libraries", "names")
    for name in parts_of(library_name(full)):
        if name in names:
            return Verdict("library", names[name]["happened"], names[name]["write"])
    return None


def argument_rules(full: str) -> list[dict]:
    """Return the rules for the arguments of a function."""
    own = [{"kind": entry_of(full)["kind"], **rule} for rule in entry_of(full).get("arguments", ())]
    others = table("libraries", "arguments").get(library_name(full), ())
    return own + [{"kind": "library", **rule} for rule in others]
