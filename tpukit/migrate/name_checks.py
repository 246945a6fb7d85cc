"""The findings in the code of a file: names, arguments and methods that have changed."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tpukit.migrate import name_tables as tables
from tpukit.migrate.code_pieces import Piece
from tpukit.migrate.name_scopes import Names, dotted
from tpukit.migrate.name_tables import Verdict, of_today, table
from tpukit.migrate.safe_fixes import Edit, SafeFixes
from tpukit.migrate.shell_checks import check_shell, variables

# os.system(...), subprocess.check_call([...]), get_ipython().system(...).
_SHELL_CALL = re.compile(
    r"(os|subprocess|get_ipython)\b.*"
    r"\.(system|popen|getoutput|run|\w*call|Popen|check_output)$"
)
# os.environ[...], os.environ.get(...), os.getenv(...).
_ENVIRON = re.compile(r"\benviron(\.(get|setdefault|pop|update))?$|\b(getenv|putenv|unsetenv)$")


@dataclass(frozen=True)
class NameFinding:
    """A finding: its cell (None in a script), its line, and its kind, an anchor on the docs page.

    `name` is the name in the code, `happened` describes the change and its version, and `write` is
    the new code.
    """

    cell: int | None
    line: int
    kind: str
    name: str
    happened: str
    write: str
    is_fixable: bool = False


class _Found(NamedTuple):
    """The verdict on a name in the code; `edits` is None if no fix is safe."""

    verdict: Verdict | None
    name: str
    edits: list[Edit] | None = None


class Checker:
    """Collects the findings in pieces that share their names, and the edits that fix them."""

    def __init__(self, pieces: list[Piece]):
        self._names = Names(pieces)
        self._fixes = SafeFixes(self._names)
        self._patched = set(map(of_today, self._assigned_names()))
        self.findings: list[NameFinding] = []
        self.edits: set[Edit] = set()
        for piece in pieces:
            self._check(piece)

    def _assigned_names(self) -> Iterator[str]:
        """Return the names that the code itself sets, as `xm.get_ordinal = xr.global_ordinal`."""
        for node in self._names.places:
            # A dunder such as `__version__` is read by tools, and no library's own function.
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and not node.attr.startswith("__"):
                yield self._names.full_name(node)

    def _check(self, piece: Piece) -> None:
        for line, text in piece.shell.items():
            self._check_shell(piece, line, text)
        for line, message in piece.broken.items():
            verdict = Verdict("not-python", message, "mend the line")
            self._add(piece, line, _Found(verdict, piece.lines[line - 1].strip()[:100]))
        for node in ast.walk(piece.tree):
            for found in self._of_node(node):
                self._add(piece, node.lineno, found)

    def _check_shell(self, piece: Piece, line: int, text: str) -> None:
        for below, shown, verdict in check_shell(text):
            self._add(piece, line + below, _Found(verdict, shown))

    def _add(self, piece: Piece, line: int, found: _Found) -> None:
        if found.verdict is None:
            return
        kind, happened, write = found.verdict
        place = (piece.cell, piece.fixed_line or line)
        is_fixable = found.edits is not None
        self.findings.append(NameFinding(*place, kind, found.name, happened, write, is_fixable))
        self.edits.update(found.edits or ())

    def _of_node(self, node: ast.AST) -> Iterator[_Found]:
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases, level=0):
                for alias in aliases:
                    module = getattr(node, "module", "")
                    full = f"{module}.{alias.name}".removeprefix(".").removesuffix(".*")
                    yield _Found(self._verdict(full), full, self._fixes.of_import(node))
            case ast.Name() | ast.Attribute():
                yield from self._of_name(node)
            case ast.Call():
                yield from self._of_call(node)
            case ast.Subscript(value=place, slice=key):
                yield from _of_variables(place, key)
            case ast.Compare(left=key, comparators=[place, *_]):
                yield from _of_variables(place, key)
            case ast.FunctionDef():
                for base in getattr(self._names.parents[node], "bases", ()):
                    yield from self._of_method(node.name, self._full_name(base))

    # Names

    def _of_name(self, node: ast.Name | ast.Attribute) -> Iterator[_Found]:
        above = self._names.parents[node]
        is_read = isinstance(node.ctx, ast.Load) or getattr(node, "attr", "").startswith("__")
        if not is_read or isinstance(above, ast.Attribute):
            return
        full = self._full_name(node)
        if not full:
            return
        old_arguments = []
        if isinstance(above, ast.Call) and above.func is node:
            old_arguments = list(self._arguments(above, full))
        for verdict in old_arguments:
            yield _Found(verdict, dotted(node))
        if not old_arguments:
            yield _Found(self._verdict(full), dotted(node), self._fixes.of_use(node))

    def _full_name(self, node: ast.AST) -> str:
        """Return the full name of a name; for a star import, only if a table lists it as old."""
        name = dotted(node)
        known = self._names.full_name(node)
        if known or not name or name.partition(".")[0] in self._names.bindings:
            return known
        # `from torch_xla.core.xla_model import *` binds names that only the tables know.
        starred = [f"{module}.{name}" for module in self._names.stars]
        return next(filter(tables.is_old_name, starred), "")

    def _verdict(self, full: str) -> Verdict | None:
        """Return the verdict on a name; None if it has not changed, or the code sets it itself."""
        if of_today(full) in self._patched or self._is_of_torch_tpu(full):
            return None
        return tables.library_verdict(full) or tables.verdict_on(full)

    def _is_of_torch_tpu(self, full: str) -> bool:
        # TorchTPU, another package, adds names to torch.
        return full.startswith("torch.") and "torch_tpu" in self._names.bindings

    # Calls, environment variables, methods

    def _of_call(self, node: ast.Call) -> Iterator[_Found]:
        match node:
            case ast.Call(func=ast.Name("getattr"), args=[module, ast.Constant(str(leaf)), *_]):
                full = f"{self._names.full_name(module)}.{leaf}"
                yield _Found(self._verdict(full), ast.unparse(node))
        name = ast.unparse(node.func)
        if _ENVIRON.search(name):
            keywords = [ast.Constant(keyword.arg) for keyword in node.keywords]
            yield from _of_variables(node.func, ast.List([*node.args[:1], *keywords]))
        if _SHELL_CALL.match(name) and node.args:
            for _, shown, verdict in check_shell(" ".join(_strings(node.args[0]))):
                yield _Found(verdict, shown)

    def _arguments(self, node: ast.Call, full: str) -> Iterator[Verdict]:
        """Give the verdicts on the arguments of a call, through functools.partial too."""
        args = node.args
        if full == "functools.partial" and args:
            full = self._names.full_name(args[0])
            args = args[1:]
        if self._is_of_torch_tpu(full):
            return
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        # After `*args` the position of an argument is unknown.
        if not any(isinstance(value, ast.Starred) for value in args):
            given |= dict(enumerate(args))
        for rule in tables.argument_rules(of_today(full)):
            value = given.get(rule["name"]) or given.get(rule.get("position", ""))
            if value is None:
                continue
            text = ast.unparse(value)
            if _is_old(rule, text):
                happened = f"{rule['name']}={text}: {rule['happened']}"
                yield Verdict(rule["kind"], happened, rule["write"])

    def _of_method(self, name: str, base: str) -> Iterator[_Found]:
        methods = table("libraries", "methods").get(tables.library_name(base), {})
        if name in methods:
            yield _Found(Verdict("library", **methods[name]), name)


def _is_old(rule: dict, text: str) -> bool:
    """Return whether a rule lists the text of an argument as bad, or does not list it as good."""
    if "bad" in rule:
        return text in map(repr, rule["bad"])
    return text not in rule.get("fine", ())


def _strings(node: ast.AST) -> list[str]:
    """Return all strings in an expression: a string, an f-string, a list or a dict of strings."""
    values = [getattr(inner, "value", None) for inner in ast.walk(node)]
    return [value for value in values if isinstance(value, str)]


def _of_variables(place: ast.expr, key: ast.AST) -> Iterator[_Found]:
    """Give the verdict on each old environment variable at a place such as os.environ."""
    if _ENVIRON.search(dotted(place)):
        for name in variables().keys() & set(_strings(key)):
            yield _Found(Verdict("environment", **variables()[name]), name)
