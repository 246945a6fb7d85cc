"""Find changed names, arguments, methods and environment variables of torch_xla in code."""

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
    """A place in a file with a name that has changed.

    Attributes:
        cell: the number of the cell in the notebook, from 1; None in a script.
        line: the number of the line in the cell or the script, from 1.
        kind: the kind of the change, such as "moved"; an anchor in docs/from_torch_xla_1x.md.
        name: the name as the code has it.
        happened: what has changed, and in which version.
        write: the new code, or what to do.
        is_fixable: whether `LintReport.fix` repairs it.
    """

    cell: int | None
    line: int
    kind: str
    name: str
    happened: str
    write: str
    is_fixable: bool = False


class _Found(NamedTuple):
    """A name in the code and the verdict on it.

    Attributes:
        verdict: None if the name has not changed.
        name: the name as the report shows it.
        edits: the edits that repair it, perhaps the same as those of another finding; None if no
            edit is safe.
    """

    verdict: Verdict | None
    name: str
    edits: list[Edit] | None = None


class Checker:
    """The check of pieces that share one namespace; it runs when the object is made.

    Attributes:
        findings: what was found, in no certain order.
        edits: the safe edits of all findings, without duplicates.
    """

    def __init__(self, pieces: list[Piece]):
        self._names = Names(pieces)
        self._fixes = SafeFixes(self._names)
        # A name that the code sets itself works, even if torch_xla no longer has it.
        self._patched = set(map(of_today, self._assigned_names()))
        self.findings: list[NameFinding] = []
        self.edits: set[Edit] = set()
        for piece in pieces:
            self._check(piece)

    def _assigned_names(self) -> Iterator[str]:
        """Yield the names that the code itself sets, as in `xm.get_ordinal = xr.global_ordinal`."""
        for node in self._names.places:
            # Names such as `__version__` do not count: tools read them, and no library defines a
            # function under them.
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and not node.attr.startswith("__"):
                yield self._names.full_name(node)

    def _check(self, piece: Piece) -> None:
        for line, text in piece.shell.items():
            self._check_shell(piece, line, text)
        for line, message in piece.broken.items():
            verdict = Verdict("not-python", message, "correct the line")
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
            case ast.FunctionDef():  # a method of a class whose bases have it under another name
                for base in getattr(self._names.parents[node], "bases", ()):
                    yield from self._of_method(node.name, self._full_name(base))

    # Names

    def _of_name(self, node: ast.Name | ast.Attribute) -> Iterator[_Found]:
        # Of `xm.get_ordinal` only the whole name counts, not the `xm` inside; and a name that is
        # assigned is the user's own.
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
        """Return the full name of a name; "" if it is the user's own.

        If the code does not bind a name, a star import may have bound it. Such a name has a full
        name if a table lists it as an old name of a module that is imported with a star.
        """
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
        # The package torch_tpu adds names to torch that the tables list as invented.
        return full.startswith("torch.") and "torch_tpu" in self._names.bindings

    # Calls, environment variables, methods

    def _of_call(self, node: ast.Call) -> Iterator[_Found]:
        """Yield the findings in the strings of a call.

        The strings are names of attributes or of environment variables, or shell commands.
        """
        match node:
            case ast.Call(func=ast.Name("getattr"), args=[module, ast.Constant(str(leaf)), *_]):
                full = f"{self._names.full_name(module)}.{leaf}"
                yield _Found(self._verdict(full), ast.unparse(node))
        name = ast.unparse(node.func)
        if _ENVIRON.search(name):
            # The keywords of `os.environ.update(XRT_TPU_CONFIG=...)` are names of variables too.
            keywords = [ast.Constant(keyword.arg) for keyword in node.keywords]
            yield from _of_variables(node.func, ast.List([*node.args[:1], *keywords]))
        if _SHELL_CALL.match(name) and node.args:
            for _, shown, verdict in check_shell(" ".join(_strings(node.args[0]))):
                yield _Found(verdict, shown)

    def _arguments(self, node: ast.Call, full: str) -> Iterator[Verdict]:
        """Yield the verdicts on the arguments of a call.

        For `functools.partial(function, ...)`, they are the arguments of `function`.

        Args:
            node: the call.
            full: the full name of the function that is called.
        """
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
        """Yield the verdict on a method by its name and the full name of its class's base."""
        methods = table("libraries", "methods").get(tables.library_name(base), {})
        if name in methods:
            yield _Found(Verdict("library", **methods[name]), name)


def _is_old(rule: dict, text: str) -> bool:
    """Return True if an argument's text is old: in the rule's list "bad", or not in "fine"."""
    if "bad" in rule:
        return text in map(repr, rule["bad"])
    return text not in rule.get("fine", ())


def _strings(node: ast.AST) -> list[str]:
    """Return all strings in an expression: a string, an f-string, a list or a dict of strings."""
    values = [getattr(inner, "value", None) for inner in ast.walk(node)]
    return [value for value in values if isinstance(value, str)]


def _of_variables(place: ast.expr, key: ast.AST) -> Iterator[_Found]:
    """Yield the verdict on each old environment variable at a place such as os.environ.

    Args:
        place: the expression before the key, or the function that is called with it.
        key: the expression with the names of the variables.
    """
    if _ENVIRON.search(dotted(place)):
        for name in variables().keys() & set(_strings(key)):
            yield _Found(Verdict("environment", **variables()[name]), name)
