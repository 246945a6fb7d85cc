"""What a name stands for: by the imports and assignments of all cells, in the scope in which the name is read.

import torch_xla.core.xla_model as xm     binds xm to torch_xla.core.xla_model
def step(xm): xm.mark_step()              here xm is the parameter, so nothing of torch_xla
"""

import ast
from dataclasses import dataclass, field
from typing import NamedTuple

from tpukit.migrate.name_tables import USUAL

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, *_COMPREHENSIONS)


class Place(NamedTuple):
    """Where a node stands: the number of its piece of code, and its line and column there."""

    piece: int
    line: int
    column: int = 0


@dataclass(eq=False)
class Binding:
    """One way in which a name gets its value: `full` by an import, `value` by an assignment of another name."""

    place: Place
    full: str = ""
    statement: ast.Import | ast.ImportFrom | None = None
    value: ast.expr | None = None
    is_none: bool = False  # `xm = None`, as people write beside an import that may fail
    is_foreign: bool = False  # from another scope, by `global`, `nonlocal` or `:=`


@dataclass(eq=False)
class Scope:
    """The names that a module, a class or a function binds."""

    parent: "Scope | None" = None
    is_class: bool = False
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)


class Meaning(NamedTuple):
    """What a name stands for in full, and the binding of its first part, its head.

    It is certain if every binding of the head says the same, so that a rename cannot change a meaning.
    """

    full: str
    head: str
    binding: Binding | None = None
    is_certain: bool = False


def dotted(node: ast.AST) -> str:
    """Return a name such as torch_xla.core.xla_model; "" for anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


class Names:
    """The scopes of all pieces of a notebook, which share one module scope."""

    def __init__(self):
        self.module = Scope()
        self.parents: dict[ast.AST, ast.AST] = {}
        self.places: dict[ast.AST, Place] = {}
        self.stars: list[tuple[Place, str]] = []  # star imports, and `%run`, which works like one
        self.bound: set[str] = set()
        self.scope_of: dict[ast.AST, Scope] = {}

    def read(self, tree: ast.AST, piece: int) -> None:
        """Read the bindings of one piece."""
        waiting: list[tuple[ast.AST, Scope]] = [(tree, self.module)]
        while waiting:  # no recursion: a sum of a thousand terms is a thousand levels deep
            node, scope = waiting.pop()
            self.scope_of[node] = scope
            line = getattr(node, "lineno", 0)
            self.places[node] = Place(piece, line, getattr(node, "col_offset", 0))
            self._bind(node, scope)
            inner = scope
            if isinstance(node, _SCOPES):
                inner = Scope(scope, is_class=isinstance(node, ast.ClassDef))
            around = [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ())]
            children = list(ast.iter_child_nodes(node))
            self.parents |= dict.fromkeys(children, node)
            waiting += [(one, scope if one in around else inner) for one in reversed(children)]

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        place = self.places[node]
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._bind_import(node, scope, place)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            scope.foreign |= set(node.names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            self._add(scope, node.id, self._assigned(node, place))
        elif isinstance(node, ast.arg | ast.MatchMapping):
            self._add(scope, getattr(node, "arg", None) or getattr(node, "rest", None), Binding(place))
        elif not isinstance(node, ast.alias):  # functions, classes, `except ... as`, patterns
            self._add(scope, getattr(node, "name", None), Binding(place))

    def _bind_import(self, node: ast.Import | ast.ImportFrom, scope: Scope, place: Place) -> None:
        module = "" if getattr(node, "level", 0) else getattr(node, "module", "")
        for one in node.names:
            if isinstance(node, ast.Import):
                full = one.name if one.asname else one.name.partition(".")[0]
                self._add(scope, one.asname or full, Binding(place, full, node))
            elif one.name == "*":
                self.stars.append((place, module))
            else:
                full = f"{module}.{one.name}" if module else ""
                self._add(scope, one.asname or one.name, Binding(place, full, node))

    def _assigned(self, node: ast.Name, place: Place) -> Binding:
        above = self.parents[node]
        if isinstance(above, ast.NamedExpr):
            return Binding(place, is_foreign=True)
        if not isinstance(above, ast.Assign):
            return Binding(place)
        value = above.value
        if isinstance(value, ast.Call) and dotted(value.func).endswith("import_module") and value.args:
            return Binding(place, str(getattr(value.args[0], "value", "")))
        is_none = isinstance(value, ast.Constant) and value.value is None
        return Binding(place, value=value if dotted(value) else None, is_none=is_none)

    def _add(self, scope: Scope, name: str | None, binding: Binding) -> None:
        if not isinstance(name, str):
            return
        self.bound.add(name)
        binding.is_foreign = binding.is_foreign or name in scope.foreign
        for one in {scope, self.module} if binding.is_foreign else {scope}:
            one.bindings.setdefault(name, []).append(binding)

    def scope_that_binds(self, node: ast.AST, name: str) -> Scope | None:
        """Return the scope that a name is read from at a node; None if none binds it."""
        here = scope = self.scope_of[node]
        while scope is not None and (name not in scope.bindings or (scope.is_class and scope is not here)):
            scope = scope.parent
        return scope

    def meaning(self, node: ast.AST, depth: int = 0) -> Meaning | None:
        """Return what a name with dots stands for; None for a name of the user's own."""
        head, _, rest = dotted(node).partition(".")
        tail = f".{rest}" if rest else ""
        if not head or depth > 5:
            return None
        scope = self.scope_that_binds(node, head)
        if scope is None:
            is_usual = head in USUAL and (rest or head == "torch_xla")
            return Meaning(USUAL[head] + tail, head) if is_usual else None
        bindings = scope.bindings[head]
        before = [one for one in bindings if one.place < self.places[node]] or bindings
        binding = max(
            [one for one in before if not (one.is_none or one.is_foreign)] or before, key=lambda one: one.place
        )
        full = binding.full
        if binding.value is not None and dotted(binding.value).partition(".")[0] != head:
            found = self.meaning(binding.value, depth + 1)
            full = found.full if found else ""
        if not full:
            return None
        is_certain = binding.statement is not None and self.is_certain(binding.statement, head)
        return Meaning(full + tail, head, binding, is_certain)

    def is_certain(self, statement: ast.AST, name: str) -> bool:
        """Return whether every binding of a name, in the scope of an import, says the same as that import."""
        scope = self.scope_of[statement]
        bindings = scope.bindings.get(name, [])
        is_same = all(one.statement and not one.is_foreign for one in bindings)
        is_same = is_same and len({one.full for one in bindings}) == 1
        place = self.places[statement]
        later = any(star > place and not module.startswith("torch_xla") for star, module in self.stars)
        return is_same and not scope.is_class and not (later and scope is self.module)
