"""Find the full name behind a short one, by the import or assignment that gave it its value.

    import torch_xla.core.xla_model as xm     binds xm to torch_xla.core.xla_model
    def step(xm): xm.mark_step()              here xm is the parameter, so nothing of torch_xla

For a report, a likely meaning is enough: `full_name` follows scopes and assignments. A fix needs a
certain meaning: `is_plain` accepts a root, such as xm in xm.mark_step, only if nothing in any scope
could give the root another value.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tpukit.migrate.code_pieces import Piece
from tpukit.migrate.name_tables import USUAL

_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | _COMPREHENSIONS
_MOST_ALIASES = 5  # assignments to follow: x = y and y = x would never end


class Place(NamedTuple):
    """The position of a node: the index of its piece of code, and its line and column there."""

    piece: int
    line: int
    column: int


@dataclass(eq=False)
class Binding:
    """A statement that gives a name its value.

    Attributes:
        name: the name.
        full: for an import, the full name of the imported object; else "".
        statement: for an import, its node; else None.
        value: for an assignment, the expression on its right; else None.
        scope: the function or class around the statement; None at the top level.
        place: the position of the statement.
    """

    name: str
    full: str = ""
    statement: ast.Import | ast.ImportFrom | None = None
    value: ast.expr | None = None
    scope: ast.AST | None = None
    place: Place = Place(0, 0, 0)

    @property
    def is_none(self) -> bool:
        """True if the value is the constant None."""
        return isinstance(self.value, ast.Constant) and self.value.value is None


def dotted(node: ast.AST) -> str:
    """Return the text of a name such as torch_xla.core.xla_model; "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return ""
    before = dotted(node.value)
    return before and f"{before}.{node.attr}"


def _usual_name(root: str, *, is_dotted: bool) -> str:
    """Return the module that a name usually means if nothing binds it; "" for other names.

    Helper files on Kaggle import these names, so a notebook may use them without an import.

    Args:
        root: the first part of a name.
        is_dotted: whether other parts follow; the name alone may be anything.
    """
    if is_dotted or root == "torch_xla":
        return USUAL.get(root, "")
    return ""


class Names:
    """The bindings and the uses of names in pieces of code that share one namespace.

    Attributes:
        pieces: the pieces, in the order of the file.
        parents: the parent of each node.
        places: the position of each node.
        bindings: the bindings of each name.
        uses: the nodes in which the code reads a name, by the name.
        stars: the modules of star imports; "" for each %run and for each unreadable line, which
            may bind any name too.
    """

    def __init__(self, pieces: list[Piece]):
        self.pieces = pieces
        self.parents: dict[ast.AST, ast.AST] = {}
        self.places: dict[ast.AST, Place] = {}
        self.bindings: dict[str, list[Binding]] = {}
        self.uses: dict[str, list[ast.Name]] = {}
        self.stars: list[str] = []
        for number, piece in enumerate(pieces):
            runs = re.findall(r"(?m)^\s*%run\b", "\n".join(piece.shell.values()))
            self.stars += ["" for _ in (*runs, *piece.broken)]
            for node in ast.walk(piece.tree):
                # `_read` needs the nodes around this one. They are known already, because ast.walk
                # yields a parent before its children.
                self.parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
                line = getattr(node, "lineno", 0)
                self.places[node] = Place(number, line, getattr(node, "col_offset", 0))
                self._read(node)
        self.stars += [star.full.removesuffix(".*") for star in self.bindings.get("*", ())]

    def _read(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self.uses.setdefault(node.id, []).append(node)
        for binding in _bindings(node, self.parents.get(node)):
            binding.scope = next(self.around(node, _FUNCTIONS | ast.ClassDef), None)
            binding.place = self.places[node]
            self.bindings.setdefault(binding.name, []).append(binding)

    def around(self, node: ast.AST, kinds: object) -> Iterator[ast.AST]:
        """Yield the nodes of some kinds that contain a node, the innermost first."""
        while (node := self.parents.get(node)) is not None:
            if isinstance(node, kinds):
                yield node

    def full_name(self, node: ast.AST, depth: int = 0) -> str:
        """Return the full name that a dotted name means; "" for the user's own names.

        Args:
            node: the name.
            depth: the number of assignments, such as `xm = m`, that were followed so far.
        """
        root, dot, rest = dotted(node).partition(".")
        binding = self.binding(node)
        if binding is None:
            full = _usual_name(root, is_dotted=bool(rest))
        elif binding.value and depth < _MOST_ALIASES:
            full = self.full_name(binding.value, depth + 1)
        else:
            full = binding.full
        return full and f"{full}{dot}{rest}"

    def binding(self, node: ast.AST) -> Binding | None:
        """Return the binding of the first part of a name, `a` of `a.b.c`; None if there is none.

        If several scopes bind this part, the innermost scope counts. Of several bindings in this
        scope, the last one before `node` counts; if none is before `node`, the last one after it.
        """
        root = dotted(node).partition(".")[0]
        everywhere = self.bindings.get(root, [])
        candidates = self._in_innermost_scope(node, everywhere)
        if not candidates:
            # An import in another function may bind a name that is `global` there.
            candidates = [binding for binding in everywhere if binding.full]
        # `xm = None` follows an import that failed, so it says nothing about the module.
        with_value = [binding for binding in candidates if not binding.is_none]
        candidates = with_value or candidates
        before = [binding for binding in candidates if binding.place < self.places[node]]
        # The cells of a notebook may run in any order, so a later binding is better than none.
        return max(before or candidates, key=lambda binding: binding.place, default=None)

    def _in_innermost_scope(self, node: ast.AST, bindings: list[Binding]) -> list[Binding]:
        """Return the bindings in the innermost scope around a node that has any."""
        # Classes do not count, because a method does not see the names of its class.
        scopes = [*self.around(node, _FUNCTIONS), None]  # None is the top level
        for scope in scopes:
            here = [binding for binding in bindings if binding.scope is scope]
            if here:
                return here
        return []

    def is_plain(self, root: str) -> bool:
        """Return True if a name without a dot, `root`, means the same module everywhere.

        Every binding of `root` must be the same import, at the top level. The code may only read
        names of the module: it must not assign to one, pass the module on, or list its names.
        """
        bindings = self.bindings.get(root, ())
        is_one_module = len({one.full for one in bindings}) == 1
        is_certain = is_one_module and not self.stars and all(map(self._is_at_top, bindings))
        # A use such as `f(xm)` passes the module on, and `xm.x = 1` patches it.
        return is_certain and all(map(self._is_read_from, self.uses.get(root, ())))

    def _is_at_top(self, binding: Binding) -> bool:
        above = self.parents.get(binding.statement)
        return isinstance(above, ast.Module) and self.pieces[binding.place.piece].is_fixable

    def _is_read_from(self, use: ast.Name) -> bool:
        """Return True if a use of a root only reads a name from it, as `xm.get_ordinal`."""
        node = use
        while isinstance(above := self.parents[node], ast.Attribute):
            node = above
        return node is not use and isinstance(node.ctx, ast.Load)


def _bindings(node: ast.AST, above: ast.AST | None) -> Iterator[Binding]:
    """Yield the bindings that a node makes itself, without those of its children.

    Args:
        node: any node.
        above: its parent, which has the value that a name is assigned.
    """
    match node:
        case ast.Import(names=aliases):
            for alias in aliases:
                root = alias.name.partition(".")[0]
                full = root
                if alias.asname:
                    full = alias.name
                yield Binding(alias.asname or root, full, node)
        case ast.ImportFrom(names=aliases, level=level, module=module):
            for alias in aliases:
                full = ""  # of a relative import: the user's own module
                if level == 0:
                    full = f"{module}.{alias.name}"
                yield Binding(alias.asname or alias.name, full, node)
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield _assignment(name, above)
        case ast.arg(arg=str(name)) | ast.MatchMapping(rest=str(name)):
            yield Binding(name)
        case ast.alias():
            return
        case ast.AST(name=str(name)):  # functions, classes, `except ... as`, patterns
            yield Binding(name)


def _assignment(name: str, statement: ast.AST | None) -> Binding:
    """Return the binding of a name that a statement assigns or deletes."""
    match statement:
        case ast.Assign(value=ast.Call(func, [ast.Constant(str(full)), *_])):
            # xm = importlib.import_module("torch_xla.core.xla_model")
            is_import = dotted(func).endswith("import_module")
            return Binding(name, full if is_import else "")
        case ast.Assign(value=value):
            return Binding(name, value=value)
    return Binding(name)
