"""Look up whether a name has changed, in the tables of this folder.

api.json         every name of torch_xla 2.8 and 2.9, and those that 2.2 to 2.9 removed;
                 tools/torch_xla_api.py reads them from the packages
names.json       the important old names of torch_xla, with an explanation and the new code
invented.json    names that language models write, and that no release has had
libraries.json   old names of transformers, Lightning, accelerate and ignite
"""

import difflib
import functools
import importlib.metadata
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# Short names that notebooks use by convention for a module of torch_xla.
USUAL = {
    "xm": "torch_xla.core.xla_model",
    "xmp": "torch_xla.distributed.xla_multiprocessing",
    "xser": "torch_xla.utils.serialization",
    "torch_xla": "torch_xla",
}


class Verdict(NamedTuple):
    """What has changed about a name.

    Attributes:
        kind: the change, such as "moved". docs/from_torch_xla_1x.md has an anchor of this name.
        happened: the change, and its version.
        write: the code to write instead, or what to do.
    """

    kind: str
    happened: str
    write: str


@functools.cache
def table(name: str, part: str = "") -> dict:
    """Return a table of names, or a part of the table.

    Args:
        name: the name of the table's JSON file, without ".json".
        part: a key at the top of the table; "" for the whole table.
    """
    found = json.loads(Path(__file__).with_name(f"{name}.json").read_text())
    return found[part] if part else found


def entry_of(full: str) -> dict:
    """Return the entry of names.json for a name, or an empty entry."""
    return table("names", "names").get(full, {})


def parts_of(full: str) -> list[str]:
    """Return [a.b.c, a.b] for a.b.c: the name, and its prefixes that contain a dot."""
    parts = full.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 1, -1)]


def longest_part(full: str, names: Mapping) -> str:
    """Return the longest name of `parts_of(full)` that is in a table; "" if none is."""
    return next(filter(names.__contains__, parts_of(full)), "")


def is_old_name(full: str) -> bool:
    """Return True if one of the tables lists a name as moved, removed or changed."""
    tables = (table("names", "names"), table("api", "_removed"), table("libraries", "names"))
    return any(full in names or of_today(full) in names for names in tables)


@functools.cache
def _moved_modules() -> dict[str, str]:
    """Return the present path of each module that has moved, by its old path."""
    entries = table("names", "names").items()
    return {name: entry["module"] for name, entry in entries if "module" in entry}


def of_today(full: str) -> str:
    """Return a name with its module's present path, if the module has moved; else the name."""
    moved = _moved_modules()
    part = longest_part(full, moved)
    return moved.get(part, "") + full.removeprefix(part)


def is_in_both_releases(full: str) -> bool:
    """Return True if torch_xla 2.8 and 2.9 both have this module, class or function."""
    modules = table("api")
    module, _, name = full.rpartition(".")
    if full in modules:
        return not modules[full].get("gone_in_2_9")
    return module in modules and name in _names_of(module)


def _names_of(module: str) -> list[str]:
    """Return the names in a module, with those that it imports from another by a star."""
    entry = table("api")[module]
    others = [table("api")[other]["names"] for other in entry.get("all_of", ())]
    return sum(others, entry["names"])


@functools.cache
def _installed() -> str:
    """Return the key in api.json of names that only the installed torch_xla has.

    It is "only_2_8" or "only_2_9", and "" without torch_xla.
    """
    try:
        major, minor = importlib.metadata.version("torch_xla").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f"only_{major}_{minor}"


def dead_part(full: str) -> str:
    """Return a name up to its first part that torch_xla lacks; "" if no part is missing.

    If torch_xla 2.8 or 2.9 is installed, a part is missing if that release lacks it. If neither is
    installed, a part is missing if 2.8 or 2.9 lacks it. Attributes of classes are not checked.
    """
    if re.match(r"torch_xla_py\b|torch\.(xla|tpu)\b", full):
        return full  # the package's name of 2019, and modules that torch never had
    api = table("api")
    known, *parts = full.split(".")
    place = known
    # Go down through the modules. The first part that is no module is a name of the last one, and
    # the parts after it belong to a class or a function.
    for part in parts if known == "torch_xla" else ():
        known = f"{known}.{part}"
        module = api["_modules"].get(f"{place}.{part}", f"{place}.{part}")
        has_gone = api.get(module, {}).get("gone_in_2_9") and _installed() != "only_2_8"
        if module not in api or has_gone:
            names = [*_names_of(place), *api[place].get(_installed(), ())]
            return "" if part in names else known
        place = module
    return ""


def verdict_on(full: str) -> Verdict | None:
    """Return the change of a name of torch_xla; None if it has not changed."""
    today = of_today(full)
    dead = dead_part(full)
    # An entry that was written by hand explains more than what the other tables can tell. The
    # entry of a module that has moved says nothing about the name in it.
    for name in (full, today, dead):
        entry = entry_of(name)
        if "happened" in entry and "module" not in entry:
            return Verdict(entry["kind"], entry["happened"], entry["write"])
    if not dead:
        return None
    if today != full and not dead_part(today):
        moved = entry_of(longest_part(full, _moved_modules()))
        return Verdict("moved", moved["happened"], today)
    return _invented(full, dead) or _removed(dead)


def _invented(full: str, dead: str) -> Verdict | None:
    """Return the verdict on a name that no release has had, if the table lists it.

    Args:
        full: the name.
        dead: its part up to the first one that torch_xla does not have.
    """
    names = table("invented", "names")
    below = [name for name in names if name.startswith(f"{dead}.")]
    name = longest_part(full, names) or "".join(below[:1])
    if not name:
        return None
    happened = ": ".join(["no release has had it", *filter(None, [names[name].get("note")])])
    return Verdict("invented", happened, names[name]["right"])


def _removed(dead: str) -> Verdict:
    """Return the verdict on a name that no table explains.

    The verdict proposes the first of these that exists: the same name in another module, the
    replacement of an invented name with the same last part, or a similar name in the same module.
    """
    api = table("api")
    module, _, name = dead.rpartition(".")
    part = longest_part(dead, api["_removed"])
    happened = "in no release of torch_xla from 2.1 to 2.9"
    if part:
        happened = f"removed in torch_xla {api['_removed'][part]}"
    public = [place for place in api if not re.search(r"(^|\.)_", place)]
    homes = [place for place in public if name in api[place]["names"]]
    if homes:
        return Verdict("moved", happened, f"{min(homes, key=len)}.{name}")
    for key, entry in table("invented", "names").items():
        if key.endswith(f".{name}"):
            return Verdict("invented", happened, entry["right"])
    near = difflib.get_close_matches(name, api.get(module, {}).get("names", ()), n=1)
    if near and not part:
        return Verdict("invented", happened, f"perhaps {module}.{near[0]}")
    return Verdict("removed", happened, "nothing replaces it: rewrite the lines that need it")


def library_name(full: str) -> str:
    """Return a name as libraries.json has it: `lightning` becomes `pytorch_lightning`."""
    return re.sub(r"^lightning\.(pytorch\.)?", "pytorch_lightning.", full)


def library_verdict(full: str) -> Verdict | None:
    """Return the change of a name of another library; None if the table does not list it."""
    names = table("libraries", "names")
    name = longest_part(library_name(full), names)
    return Verdict("library", **names[name]) if name else None


def argument_rules(full: str) -> list[dict]:
    """Return the rules for a function's arguments; each rule has a `kind` as in `Verdict`."""
    kind = entry_of(full).get("kind")
    own = [{"kind": kind, **rule} for rule in entry_of(full).get("arguments", ())]
    others = table("libraries", "arguments").get(library_name(full), ())
    return own + [{"kind": "library", **rule} for rule in others]
