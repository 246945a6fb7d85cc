"""Find the full name behind a short one: the import or the assignment that gave it its value.

    import torch_xla.core.xla_model as xm     binds xm to torch_xla.core.xla_model
    def step(xm): xm.mark_step()              here xm is the parameter, so nothing of torch_xla

For a report, a likely meaning is enough: `full_name` follows scopes and assignments. A fix needs a
certain meaning: `is_plain` accepts a root only if nothing in any scope could give it another value.
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
_MOST_ALIASES = 5  # x = y and y = x would never end


class Place(NamedTuple):
    """The position of a node: the number of its piece of code, and its line and column there."""

    piece: int
    line: int
    column: int


@dataclass(eq=False)
class Binding:
    """A value of a name: `full` from an import `statement`, or the `value` of an assignment."""

    name: str
    full: str = ""
    statement: ast.Import | ast.ImportFrom | None = None
    value: ast.expr | None = None
    scope: ast.AST | None = None  # None for the top level
    place: Place = Place(0, 0, 0)

    @property
    def is_none(self) -> bool:
        """Whether the value is the constant None."""
        return isinstance(self.value, ast.Constant) and self.value.value is None


def dotted(node: ast.AST) -> str:
    """Return a name such as torch_xla.core.xla_model; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return ""
    before = dotted(node.value)
    return before and f"{before}.{node.attr}"


def _usual_name(root: str, *, is_dotted: bool) -> str:
    """Return the module that a name usually stands for if nothing binds it; "" for other names.

    Helper files of Kaggle import these names, so a notebook may use them at once.
    """
    if is_dotted or root == "torch_xla":
        return USUAL.get(root, "")
    return ""


class Names:
    """The bindings and the uses of names in pieces of code that share their names."""

    def __init__(self, pieces: list[Piece]):
        self.pieces = pieces
        self.parents: dict[ast.AST, ast.AST] = {}
        self.places: dict[ast.AST, Place] = {}
        self.bindings: dict[str, list[Binding]] = {}
        self.uses: dict[str, list[ast.Name]] = {}
        self.stars: list[str] = []  # modules of star imports; "" for %run and unreadable lines
        for number, piece in enumerate(pieces):
            runs = re.findall(r"(?m)^\s*%run\b", "\n".join(piece.shell.values()))
            self.stars += ["" for _ in (*runs, *piece.broken)]
            for node in ast.walk(piece.tree):
                # Before `_read`, which looks at the nodes around. ast.walk comes to parents first.
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
        """Give the nodes of some kinds around a node, the innermost first."""
        while (node := self.parents.get(node)) is not None:
            if isinstance(node, kinds):
                yield node

    def full_name(self, node: ast.AST, depth: int = 0) -> str:
        """Return the full name that a dotted name stands for; "" for the user's own names."""
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
        """Return the last binding of a name's root before it, in the innermost scope with any."""
        root = dotted(node).partition(".")[0]
        everywhere = self.bindings.get(root, [])
        candidates = self._in_innermost_scope(node, everywhere)
        if not candidates:
            # An import in another function may be `global`.
            candidates = [binding for binding in everywhere if binding.full]
        # `xm = None` follows an import that failed, so it says nothing about the module.
        with_value = [binding for binding in candidates if not binding.is_none]
        candidates = with_value or candidates
        before = [binding for binding in candidates if binding.place < self.places[node]]
        # In a notebook a cell may run before one that stands above it, so a later binding is better
        # than none.
        return max(before or candidates, key=lambda binding: binding.place, default=None)

    def _in_innermost_scope(self, node: ast.AST, bindings: list[Binding]) -> list[Binding]:
        # Without classes: a method does not see the names of its class.
        scopes = [*self.around(node, _FUNCTIONS), None]  # None is the top level
        for scope in scopes:
            here = [binding for binding in bindings if binding.scope is scope]
            if here:
                return here
        return []

    def is_plain(self, root: str) -> bool:
        """Return whether a root can only be a certain module, wherever the code reads it.

        Every binding is the same import at the top level, and the code uses the root only to read
        names from it. So nothing assigns to it, patches it, passes it on or lists its names.
        """
        bindings = self.bindings.get(root, ())
        is_one_module = len({one.full for one in bindings}) == 1
        is_certain = is_one_module and not self.stars and all(map(self._is_at_top, bindings))
        # A use such as `f(xm)` hands the module on, and `xm.x = 1` patches it.
        return is_certain and all(map(self._is_read_from, self.uses.get(root, ())))

    def _is_at_top(self, binding: Binding) -> bool:
        above = self.parents.get(binding.statement)
        return isinstance(above, ast.Module) and self.pieces[binding.place.piece].is_fixable

    def _is_read_from(self, use: ast.Name) -> bool:
        node = use
        while isinstance(above := self.parents[node], ast.Attribute):
            node = above
        return node is not use and isinstance(node.ctx, ast.Load)


def _bindings(node: ast.AST, above: ast.AST | None) -> Iterator[Binding]:
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
    match statement:
        case ast.Assign(value=ast.Call(func, [ast.Constant(str(full)), *_])):
            is_import = dotted(func).endswith("import_module")
            return Binding(name, full if is_import else "")
        case ast.Assign(value=value):
            return Binding(name, value=value)
    return Binding(name)
