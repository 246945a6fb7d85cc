"""Every error message of tpukit, read from its source: fact, evidence, fix, and who raises it.

`source_texts.py` finds the texts; this module finds the places that raise.
"""

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from source_texts import Place, Sources, literal_words

ROOT = Path(__file__).parents[1]
_MOST = 12  # texts of one argument; the first ones are enough to find an entry


@dataclass(frozen=True)
class Message:
    """One place of the source that raises an error.

    Attributes:
        place: file and line.
        function: the name of the function that raises; empty at the top of a module.
        kind: the class of the error.
        facts: the fact, one text for each case; values of a run stand in braces.
        found: the evidence, in the same form.
        fixes: the fix, in the same form.
    """

    place: str
    function: str
    kind: str
    facts: tuple[str, ...]
    found: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()

    @property
    def subpackage(self) -> str:
        """Return the subpackage, as users import it."""
        parts = Path(self.place.partition(":")[0]).with_suffix("").parts
        if len(parts) < 3:
            return "tpukit"
        depth = 3 if parts[1] == "essentials" else 2
        return ".".join(parts[:depth])


@functools.cache
def messages(package: Path = ROOT / "tpukit") -> list[Message]:
    """Return all messages of a package, in the order of its files and lines."""
    sources = Sources(package)
    kinds = explained(module.tree for module in sources.modules.values())
    found = []
    for module in sources.modules.values():
        raised = (_message(place, kinds, sources) for place in module.places)
        found += filter(None, raised)
    return found


def explained(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of the error classes that carry a fix: `TpukitError` and its subclasses."""
    classes = []
    for tree in trees:
        classes += [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds = {"TpukitError"}
    while True:
        more = {one.name for one in classes if kinds & {ast.unparse(base) for base in one.bases}}
        if more <= kinds:
            return kinds
        kinds |= more


# A failure of a core travels as one of these and becomes a WorkerError.
# The numbers are the positions of its fact and of its fix.
_OF_CORES = {"Failure": (2, None), "Stall": (1, 2)}


def _message(place: Place, kinds: set[str], sources: Sources) -> Message | None:
    """Return the message of a place in the source, if it raises one."""
    call = place.node
    if isinstance(call, ast.Raise):
        return _plain_message(place, kinds, sources)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    name = call.func.id
    options = {one.arg: one.value for one in call.keywords}
    if name in kinds:
        parts = [_argument(call, 0), options.get("found"), options.get("fix")]
    elif name in _OF_CORES and len(call.args) > 2:
        fact_at, fix_at = _OF_CORES[name]
        fix = options.get("fix") if fix_at is None else _argument(call, fix_at)
        parts = [_argument(call, fact_at), options.get("found"), fix]
        name = "WorkerError"
    else:
        return None
    facts, found, fixes = (_with_words(sources.texts(part, place.scope)) for part in parts)
    return Message(place.where, place.scope.name, name, facts, found, fixes)


def _plain_message(place: Place, kinds: set[str], sources: Sources) -> Message | None:
    """Return the message of `raise ValueError("...")` and the like: a fact without a fix."""
    call = place.node.exc
    if not isinstance(call, ast.Call):
        return None
    kind = ast.unparse(call.func)
    if kind in kinds or not kind[:1].isupper():
        return None
    texts = []
    for argument in call.args:
        texts += sources.texts(argument, place.scope)
    return Message(place.where, place.scope.name, kind, _with_words(texts)) if texts else None


def _argument(call: ast.Call, position: int) -> ast.expr | None:
    return call.args[position] if position < len(call.args) else None


def _with_words(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the texts that say something, each once: a bare placeholder does not."""
    stripped = (text.strip() for text in texts)
    return tuple(dict.fromkeys(text for text in stripped if literal_words(text)))[:_MOST]
