"""Every message that the kit can raise, read from its source: what `fix:` says, and which function says it."""

import ast
import builtins
import dataclasses
import functools
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OF_CORES = {"Failure": (2, 9), "Stall": (1, 2)}  # which arguments are fact and fix; `WorkerError` tells of them
_DEEPEST = 6  # of names that stand for names
_MOST = 12  # texts of one argument: of several choices inside, the first are enough to be found by


@dataclasses.dataclass(frozen=True)
class Message:
    """One place of the source where something is raised.

    Attributes:
        place: file and line.
        function: that raises it.
        kind: the class of the error.
        facts: what it says, a text for each case; what a run fills in stands in braces.
        found: the evidence, in the same way.
        fixes: what to do, in the same way.
    """

    place: str
    function: str
    kind: str
    facts: tuple[str, ...]
    found: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()

    @property
    def room(self) -> str:
        """The part of the kit that it is in, as people import it."""
        parts = Path(self.place.partition(":")[0]).with_suffix("").parts
        return ".".join(parts[: 3 if parts[1] == "essentials" else 2]) if len(parts) > 2 else "tpukit"


@functools.cache
def messages(package: Path = ROOT / "tpukit") -> list[Message]:
    """Return them all, in the order of the files."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    kinds = explained(trees.values())
    found, package_wide = [], _Source(ast.Module([node for tree in trees.values() for node in tree.body], []))
    for path, tree in trees.items():
        source = _Source(tree, package_wide)
        for function, node in source.walk():
            if not isinstance(node, ast.Call | ast.Raise):
                continue
            place = f"{path.relative_to(package.parent).as_posix()}:{node.lineno}"
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            options = {one.arg: one.value for one in getattr(node, "keywords", ())}
            if name in kinds or name in _OF_CORES and len(node.args) > 2:
                fact, fix = (node.args[at] if at < len(node.args) else None for at in _OF_CORES.get(name, (0, 9)))
                parts = [fact, options.get("found"), fix or options.get("fix")]
                kind = name if name in kinds else "WorkerError"
                found.append(
                    Message(place, source.name(function), kind, *(source.texts(one, function) for one in parts))
                )
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                kind, texts = ast.unparse(node.exc.func), source.texts(ast.Tuple(node.exc.args), function)
                if kind not in kinds and texts and kind[:1].isupper():
                    found.append(Message(place, source.name(function), kind, texts))
    return found


def explained(trees) -> set[str]:
    """Return the names of the classes of errors that carry their fix."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds, before = {"TpukitError"}, set()
    while kinds != before:
        before = set(kinds)
        kinds |= {one.name for one in classes if kinds & {ast.unparse(base) for base in one.bases}}
    return kinds


def _arguments(function: ast.AST | None) -> list[str]:
    given = getattr(function, "args", None)
    return [one.arg for one in (*given.args, *given.kwonlyargs)] if isinstance(given, ast.arguments) else []


def _blank(node: ast.expr) -> str:
    """Return what stands for something that a run fills in: its plainest name, in braces."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len":
        return "{n}"
    named = [getattr(one, "attr", getattr(one, "id", "")) for one in ast.walk(node)]
    plain = [name for name in named if name and not hasattr(builtins, name) and not hasattr(str, name)]
    return f"{{{next((name for name in plain if name != 'self' and not name.startswith('__')), '...')}}}"


def _first(call: ast.Call) -> ast.expr | None:
    return call.args[0] if call.args else None


class _Source:
    """One module: who is inside of which function, and what a name may stand for there."""

    def __init__(self, tree: ast.Module, package: "_Source | None" = None):
        self.tree, self.package = tree, package or self
        self.functions, self.calls, self.assigned = {}, {}, {}
        for function, node in self.walk():
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                self.calls.setdefault(name, []).append((node, function))

    def walk(self, node: ast.AST | None = None, function: ast.AST | None = None):
        for child in ast.iter_child_nodes(node or self.tree):
            yield function, child
            yield from self.walk(child, child if isinstance(child, ast.FunctionDef | ast.ClassDef) else function)

    def name(self, function: ast.AST | None) -> str:
        return getattr(function, "name", "")

    def texts(self, node: ast.AST | None, function: ast.AST | None, depth: int = 0) -> tuple[str, ...]:
        """Return what an expression may say."""
        texts = (text.strip() for text in self._texts(node, function, depth))
        return tuple(dict.fromkeys(text for text in texts if any(map(str.isalpha, text))))[:_MOST]

    def _texts(self, node, function, depth):
        def inside(part):
            return list(self._texts(part, function, depth + 1)) if depth < _DEEPEST else []

        if isinstance(node, ast.Constant):
            return [] if node.value is None else [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            parts = [[one.value] if isinstance(one, ast.Constant) else self._filled(one, inside) for one in node.values]
            return map("".join, itertools.islice(itertools.product(*parts), _MOST))
        if isinstance(node, ast.IfExp):
            return [*inside(node.body), *inside(node.orelse)]
        if isinstance(node, ast.BoolOp):
            return list(itertools.chain.from_iterable(map(inside, node.values)))
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Mult):  # a text, or none
                return [*inside(node.left), ""]
            return map("".join, itertools.islice(itertools.product(inside(node.left), inside(node.right)), _MOST))
        if isinstance(node, ast.Tuple | ast.List):
            return list(itertools.chain.from_iterable(map(inside, node.elts)))
        if isinstance(node, ast.Dict):
            return list(itertools.chain.from_iterable(map(inside, node.values)))
        if isinstance(node, ast.Subscript):
            return inside(node.value)
        if isinstance(node, ast.Name):
            values = self._values(node.id, function) if depth < _DEEPEST else ()
            texts = [text for value, scope in values for text in self._texts(value, scope, depth + 1)]
            return texts or [f"{{{node.id}}}"]
        if isinstance(node, ast.Call):
            return (self._said_by(node, inside, depth + 1) if depth < _DEEPEST else None) or [_blank(node)]
        return [] if node is None else [_blank(node)]

    def _filled(self, part: ast.FormattedValue, inside):
        """Return what is filled in: a text that the function chose, or a value in braces."""
        chosen = inside(part.value) if isinstance(part.value, ast.IfExp | ast.BinOp | ast.Name | ast.Subscript) else []
        texts = [text for text in chosen if any(map(str.isalpha, re.sub(r"{[^{}]*}", "", text)))]
        return texts or [_blank(part.value)]

    def _values(self, name, function):
        yield from ((value, function) for value in self._assigned(function).get(name, ()))
        yield from ((value, None) for value in self._assigned(None).get(name, ()))
        taken = [one for one in _arguments(function) if one != "self"]
        if name not in _arguments(function):
            return
        module = self if function.name.startswith("_") else self.package
        for call, scope in module.calls.get(function.name, ()):
            yield from ((one.value, scope) for one in call.keywords if one.arg == name)
            yield from ((value, scope) for value in (call.args[taken.index(name) :][:1] if name in taken else ()))

    def _assigned(self, function):
        """Return what a function, or the module, assigns, by name."""
        if function not in self.assigned:
            values = self.assigned[function] = {}
            for node in self.tree.body if function is None else ast.walk(function):
                if isinstance(node, ast.NamedExpr):
                    values.setdefault(node.target.id, []).append(node.value)
                if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple) and isinstance(node.iter, ast.Call):
                    maker = self.functions.get(getattr(node.iter.func, "id", ""))
                    made = [one.value for one in ast.walk(maker) if isinstance(one, ast.Yield)] if maker else []
                    for index, one in enumerate(node.target.elts):
                        told = [value.elts[index] for value in made if isinstance(value, ast.Tuple)]
                        values.setdefault(getattr(one, "id", ""), []).extend(told)
                for target in node.targets if isinstance(node, ast.Assign) else ():
                    pairs = [(target, node.value)]
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        pairs = zip(target.elts, node.value.elts, strict=False)
                    for one, value in pairs:
                        if isinstance(one, ast.Name):
                            values.setdefault(one.id, []).append(value)
        return self.assigned[function]

    def _said_by(self, call, inside, depth):
        """Return what a function of the same module returns, and what a method of a text makes of it."""
        if isinstance(call.func, ast.Attribute) and call.func.attr in (
            "join",
            "format",
            "get",
            "removesuffix",
            "replace",
        ):
            return inside(call.func.value) + [text for one in call.args for text in inside(one)]
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if name == "explain":
            return inside(_first(call))
        function = self.functions.get(name) or (
            None if hasattr(str, name) or name[:1] == "_" else self.package.functions.get(name)
        )
        returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)] if function else []
        return [text for value in returned for text in self.texts(value, function, depth)]
