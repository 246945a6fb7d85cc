"""The texts that an expression can stand for, read from the source of a package without running it.

    def refuse(kind, path):
        raise InvalidValueError(f"no such {kind}: {path!r}", fix=f"list the {kind}s")

    def open_pack(path):
        refuse("file", path)

gives one fact, "no such file: {path}". A name in braces is a value that only a run knows.
A constant replaces it only if the function that raises, or a function that calls it directly,
chooses that constant. Values that are printed with `!r` are data and stay in braces. A call
belongs to a function only if the code shows it: by a name of the module, an import, `self`,
an annotation or a constructor. A method of another object of unknown class is not followed,
because many classes have methods of the same name.
"""

import ast
import builtins
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_MOST = 12  # variants of one expression
_DEEPEST = 8  # names that stand for names, calls that return calls: ends circles
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def literal_words(text: str) -> list[str]:
    """Return the words of a text outside of its placeholders."""
    return re.findall(r"[A-Za-z]{2,}", re.sub(r"{[^{}]*}", " ", text))


# The functions of a package, and who calls them


@dataclass(eq=False)
class _Scope:
    """A function, or the top of a module.

    Attributes:
        module: in which it stands.
        node: the function; None for the top of a module.
        owner: the name of the class, if it is a method.
        assigned: the expressions that are assigned to a name.
        bound: all names that are set here, also by loops, `with` and `except`.
    """

    module: "_Module"
    node: _FunctionNode | None
    owner: str = ""
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    bound: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.node.name if self.node else ""

    @property
    def arguments(self) -> list[str]:
        """Return the names of the arguments in their order, without `self`."""
        if self.node is None:
            return []
        given = self.node.args
        names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        return names[1:] if self.owner and names[:1] in (["self"], ["cls"]) else names


class Place(NamedTuple):
    """A node of the source, the function in which it stands, and its file and line."""

    node: ast.AST
    scope: _Scope
    where: str


class _Module:
    """One file: its functions and classes, its imports, and each node with its function."""

    def __init__(self, path: Path, package: Path):
        self.tree = ast.parse(path.read_text())
        relative = path.relative_to(package.parent)
        parts = relative.with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.file = relative.as_posix()
        self.top = _Scope(self, None)
        self.functions: dict[str, _Scope] = {}  # "save" and "Writer.save"
        self.classes: dict[str, ast.ClassDef] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # by the local name: module, name
        self.places = list(self._walk(self.tree, self.top, ""))

    def _walk(self, node: ast.AST, scope: _Scope, owner: str) -> Iterator[Place]:
        for child in ast.iter_child_nodes(node):
            if hasattr(child, "lineno"):
                yield Place(child, scope, f"{self.file}:{child.lineno}")
            self._note_assignment(child, scope)
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                scope.bound.add(child.id)
            if isinstance(child, ast.ExceptHandler) and child.name:
                scope.bound.add(child.name)
            if isinstance(child, ast.ImportFrom) and child.module and not child.level:
                for alias in child.names:
                    self.imported[alias.asname or alias.name] = (child.module, alias.name)
            if isinstance(child, ast.ClassDef):
                self.classes[child.name] = child
                attributes = _Scope(self, None)  # names of a class body are not names of the module
                yield from self._walk(child, attributes, child.name)
            elif isinstance(child, _FunctionNode):
                inner = _Scope(self, child, owner)
                self.functions[f"{owner}.{child.name}" if owner else child.name] = inner
                yield from self._walk(child, inner, "")
            else:
                yield from self._walk(child, scope, owner)

    def _note_assignment(self, node: ast.AST, scope: _Scope) -> None:
        """Remember the expressions that a name stands for in a function."""
        if isinstance(node, ast.NamedExpr):
            scope.assigned.setdefault(node.target.id, []).append(node.value)
        if not isinstance(node, ast.Assign):
            return
        for target in node.targets:
            if isinstance(target, ast.Name):
                scope.assigned.setdefault(target.id, []).append(node.value)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                self._note_parts(target, node.value.elts, scope)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Call):
                positions = range(len(target.elts))
                parts = [
                    ast.Subscript(node.value, ast.Constant(position)) for position in positions
                ]
                self._note_parts(target, parts, scope)

    def _note_parts(self, target: ast.Tuple, values: list[ast.expr], scope: _Scope) -> None:
        for name, value in zip(target.elts, values, strict=False):
            if isinstance(name, ast.Name):
                scope.assigned.setdefault(name.id, []).append(value)


class Sources:
    """All modules of a package: `texts` returns the texts that an expression can stand for."""

    def __init__(self, package: Path):
        files = (_Module(path, package) for path in sorted(package.rglob("*.py")))
        self.modules = {module.name: module for module in files}
        self.callers: dict[_Scope, list[tuple[ast.Call, _Scope]]] = {}
        for module in self.modules.values():
            for place in module.places:
                if isinstance(place.node, ast.Call):
                    self._note_call(place.node, place.scope)
                if isinstance(place.node, ast.For):
                    self._note_loop(place.node, place.scope)

    def _note_call(self, call: ast.Call, scope: _Scope) -> None:
        called = self.called(call, scope)
        if called is not None:
            self.callers.setdefault(called, []).append((call, scope))

    def called(self, call: ast.Call, scope: _Scope, depth: int = 0) -> _Scope | None:
        """Return the function of this package that a call certainly calls, or None."""
        if isinstance(call.func, ast.Name):
            module, name = self._origin(call.func.id, scope.module)
            return module.functions.get(name)
        is_method = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
        if not is_method or depth > _DEEPEST:
            return None
        class_name = self._class_of(call.func.value.id, scope, depth)
        return self._method(class_name, call.func.attr, scope.module) if class_name else None

    def _origin(self, name: str, module: _Module) -> tuple[_Module, str]:
        """Return the module that defines a name, and its name there: follows `from ... import`."""
        for _ in range(_DEEPEST):
            source, original = module.imported.get(name, ("", name))
            if name in module.functions or name in module.classes or source not in self.modules:
                break
            module = self.modules[source]
            name = original
        return module, name

    def _method(self, class_name: str, method: str, module: _Module) -> _Scope | None:
        """Return a method of a class, or of the classes that it inherits from."""
        module, class_name = self._origin(class_name, module)
        if class_name not in module.classes:
            return None
        if found := module.functions.get(f"{class_name}.{method}"):
            return found
        for base in module.classes[class_name].bases:
            if isinstance(base, ast.Name) and (found := self._method(base.id, method, module)):
                return found
        return None

    def _class_of(self, name: str, scope: _Scope, depth: int) -> str:
        """Return the class of a variable, if an annotation or its only assignment shows it."""
        if name in ("self", "cls"):
            return scope.owner
        if scope.node is None:
            return ""
        given = scope.node.args
        for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            if argument.arg == name and argument.annotation is not None:
                return ast.unparse(argument.annotation).strip("'")
        match scope.assigned.get(name):
            case [ast.Call() as call]:
                called = self.called(call, scope, depth + 1)
                if called and called.node.returns:
                    return ast.unparse(called.node.returns)
                return getattr(call.func, "id", "")
        return ""

    def _note_loop(self, loop: ast.For, scope: _Scope) -> None:
        """For `for fact, fix in problems()`, note the texts that `problems` yields."""
        if not isinstance(loop.target, ast.Tuple) or not isinstance(loop.iter, ast.Call):
            return
        generator = self.called(loop.iter, scope)
        if generator is None:
            return
        yielded = [node.value for node in ast.walk(generator.node) if isinstance(node, ast.Yield)]
        for value in yielded:
            if not isinstance(value, ast.Tuple):
                continue
            for name, part in zip(loop.target.elts, value.elts, strict=False):
                if isinstance(name, ast.Name):
                    scope.assigned.setdefault(name.id, []).append(part)

    # The texts of an expression

    def texts(
        self, node: ast.AST | None, scope: _Scope, depth: int = 0, of_caller: bool = False
    ) -> list[str]:
        """Return the texts that an expression can stand for.

        Args:
            node: the expression.
            scope: the function in which it stands.
            depth: how many names and calls have been followed so far.
            of_caller: the expression is of a direct caller, whose arguments are not followed.
        """
        if node is None or depth > _DEEPEST:
            return []

        def inside(part: ast.AST | None) -> list[str]:
            return self.texts(part, scope, depth + 1, of_caller)

        match node:
            case ast.Constant():
                return [] if node.value is None else [str(node.value)]
            case ast.JoinedStr():
                return _joined([self._piece(part, scope, depth, of_caller) for part in node.values])
            case ast.BinOp(op=ast.Mult()):  # a text, or none
                return [*inside(node.left), ""]
            case ast.BinOp(op=ast.Add()):
                return _joined([inside(node.left), inside(node.right)])
            case ast.IfExp():
                return [*inside(node.body), *inside(node.orelse)]
            case ast.BoolOp() | ast.Dict():
                return _each(inside, node.values)
            case ast.Tuple() | ast.List():
                return _each(inside, node.elts)
            case ast.Subscript(
                value=ast.Name() | ast.Call(), slice=ast.Constant(value=int(position))
            ):
                return self._of_returned(node.value, position, scope, depth) or [_blank(node)]
            case ast.Subscript(value=ast.Name() | ast.Dict()):
                return self._of_table(node.value, scope, inside) or [_blank(node)]
            case ast.Name():
                return self._of_name(node.id, scope, depth, of_caller) or [_blank(node)]
            case ast.Call():
                return self._of_call(node, scope, inside, depth) or [_blank(node)]
        return [_blank(node)]

    def _piece(self, part: ast.expr, scope: _Scope, depth: int, of_caller: bool) -> list[str]:
        """Return the texts of one part of an f-string."""
        if isinstance(part, ast.Constant):
            return [part.value]
        is_data = part.conversion == ord("r") or part.format_spec is not None
        chosen = []
        if not is_data and isinstance(part.value, ast.IfExp | ast.BinOp | ast.Name | ast.Subscript):
            chosen = self.texts(part.value, scope, depth + 1, of_caller)
        if not any(literal_words(text) for text in chosen):
            return [_blank(part.value)]
        return chosen

    def _of_name(self, name: str, scope: _Scope, depth: int, of_caller: bool) -> list[str]:
        local = scope.assigned.get(name, [])
        found = self._each_text(local, scope, depth + 1, of_caller)
        if name in scope.arguments:
            return found if of_caller else [*found, *self._of_argument(name, scope, depth)]
        if scope.node is not None and name not in scope.bound:
            top = scope.module.top
            return self._each_text(top.assigned.get(name, []), top, depth + 1, of_caller)
        return found

    def _of_argument(self, name: str, scope: _Scope, depth: int) -> list[str]:
        """Return the texts that direct callers pass for an argument; numbers and bytes are data."""
        position = scope.arguments.index(name)
        found = []
        for call, caller in self.callers.get(scope, []):
            by_name = [one.value for one in call.keywords if one.arg == name]
            for value in by_name or call.args[position : position + 1]:
                texts = self.texts(value, caller, depth + 1, of_caller=True)
                is_text = not isinstance(value, ast.Constant) or isinstance(value.value, str)
                for text in texts:
                    found.append(text if is_text and literal_words(text) else f"{{{name}}}")
        return list(dict.fromkeys(found))

    def _of_table(self, table: ast.Name | ast.Dict, scope: _Scope, inside) -> list[str]:
        """Return the texts of `WORDS[kind]` for a dict of texts; an item of a list is data."""
        tables = [table]
        if isinstance(table, ast.Name):
            owner = scope if table.id in {*scope.bound, *scope.arguments} else scope.module.top
            tables = owner.assigned.get(table.id, [])
        return _each(inside, [one for one in tables if isinstance(one, ast.Dict)])

    def _of_returned(
        self, node: ast.Name | ast.Call, position: int, scope: _Scope, depth: int
    ) -> list[str]:
        """Return the texts at a position of the tuples that a function returns, as in `f()[1]`."""
        calls = [node] if isinstance(node, ast.Call) else scope.assigned.get(node.id, [])
        found = []
        for call in calls:
            called = self.called(call, scope) if isinstance(call, ast.Call) else None
            tuples = [one for one in _returned(called) if isinstance(one, ast.Tuple)]
            for one in tuples:
                if position < len(one.elts):
                    found += self.texts(one.elts[position], called, depth + 1, of_caller=True)
        return found

    def _of_call(self, call: ast.Call, scope: _Scope, inside, depth: int) -> list[str]:
        """Return the texts that a function of the package returns, or a method of a text."""
        method = getattr(call.func, "attr", "")
        if method == "get" and isinstance(call.func.value, ast.Name | ast.Dict):
            found = self._of_table(call.func.value, scope, inside)
            return [*found, *_each(inside, call.args[1:])] if found else []
        if method in ("join", "format"):
            return [*inside(call.func.value), *_each(inside, call.args)]
        if method in ("removesuffix", "replace"):
            return inside(call.func.value)
        if getattr(call.func, "id", "") == "explain":
            return _each(inside, call.args[:1])
        called = self.called(call, scope)
        if called is None:
            return []
        return self._each_text(_returned(called), called, depth + 1, of_caller=True)

    def _each_text(self, values, scope: _Scope, depth: int, of_caller: bool) -> list[str]:
        found = []
        for value in values:
            found += self.texts(value, scope, depth, of_caller)
        return found


def _returned(called: _Scope | None) -> list[ast.expr | None]:
    nodes = ast.walk(called.node) if called else ()
    return [node.value for node in nodes if isinstance(node, ast.Return)]


def _joined(parts: list[list[str]]) -> list[str]:
    return ["".join(texts) for texts in itertools.islice(itertools.product(*parts), _MOST)]


def _each(texts, values: Iterable[ast.AST]) -> list[str]:
    return list(itertools.chain.from_iterable(map(texts, values)))


def _blank(node: ast.AST) -> str:
    """Return a name in braces: `{path}` for `str(self.path)`, `{n}` for `len(files)`."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len":
        return "{n}"
    for part in ast.walk(node):
        name = getattr(part, "attr", getattr(part, "id", ""))
        is_plain = name and name != "self" and not name.startswith("__")
        if is_plain and not hasattr(builtins, name) and not hasattr(str, name):
            return f"{{{name}}}"
    return "{...}"
