"""Write tpukit/migrate/api.json: every name at the top of every module of torch_xla, by release.

    python tools/torch_xla_api.py <folder of torch_xla 2.8> <folder of torch_xla 2.9> [2.1=<folder>
    2.2=<folder> ...]

Older releases, in their order, give the names that a release removed. The packages are read, not
imported. `torch_xla` and `torch_xla._XLAC` are compiled in part: their names in the table came from
dir() on 2.9.0, and are kept.
"""

import ast
import itertools
import json
import sys
import warnings
from pathlib import Path

TABLE = Path(__file__).parents[1] / "tpukit/migrate/api.json"
KEPT = ("_about", "_modules", "_removed", "torch_xla", "torch_xla._XLAC")


def names_of(folder: Path) -> dict[str, set[str]]:
    """Return the names at the top of each module of a package, imported names included."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = ["torch_xla", *path.relative_to(folder).with_suffix("").parts]
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        # torch_xla 2.8 has "\\_" in what is no raw string
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_text())
        found[module] = {name for name in _bound(tree.body) if name != "__all__"}
    return found


def _bound(body: list[ast.stmt]):
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (
                one.asname or one.name.partition(".")[0] for one in node.names if one.name != "*"
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for one in ast.walk(target):
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                        yield one.id
        else:
            for part in ("body", "orelse", "finalbody", "handlers"):
                inner = getattr(node, part, None) or []
                for one in inner:
                    yield from _bound(one.body if isinstance(one, ast.ExceptHandler) else [one])


def removed(releases: dict[str, dict[str, set[str]]], kept: dict) -> dict[str, str]:
    """Return the public names that the last release lacks, with the first release without each."""
    order = list(releases)
    last = releases[order[-1]]
    found: dict[str, str] = {}
    for release, following in itertools.pairwise(order):
        for module, names in releases[release].items():
            if kept.get(module, {}).get("all_of"):
                continue  # a star import gives it the names of another module
            if module not in last:
                gone = {module} - releases[following].keys()
            else:
                left = releases[following].get(module, set()) | last[module]
                gone = {f"{module}.{name}" for name in names - left}
            found |= dict.fromkeys(gone, following)
    return {name: found[name] for name in sorted(found) if "._" not in name}


def main() -> None:
    """Write the table anew."""
    old, new = (names_of(Path(one)) for one in sys.argv[1:3])
    kept = json.loads(TABLE.read_text())
    if older := [one.split("=", 1) for one in sys.argv[3:]]:
        releases = {release: names_of(Path(folder)) for release, folder in older}
        kept["_removed"] = removed({**releases, "2.8": old, "2.9": new}, kept)
    table = {name: kept[name] for name in KEPT}
    for module in sorted(old | new):
        if module not in table:
            both = (old.get(module, set()), new.get(module, set()))
            entry = {"names": sorted(both[0] & both[1])}
            only = {"only_2_8": sorted(both[0] - both[1]), "only_2_9": sorted(both[1] - both[0])}
            entry |= {name: names for name, names in only.items() if names}
            if module not in new:
                entry["gone_in_2_9"] = True
            table[module] = entry | {
                name: kept[module][name] for name in ("all_of",) if name in kept.get(module, {})
            }
    TABLE.write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
