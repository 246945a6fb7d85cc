"""The findings in the code of a file: names, arguments and methods that are not what they were."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tpukit.migrate import name_tables as tables
from tpukit.migrate.code_pieces import Piece
from tpukit.migrate.name_scopes import Meaning, Names, Place, dotted
from tpukit.migrate.name_tables import Verdict, of_today, table
from tpukit.migrate.safe_fixes import Edit, SafeFixes
from tpukit.migrate.shell_checks import check_shell, on_variable, variables

_LIBRARIES = ("transformers", "pytorch_lightning", "lightning", "accelerate", "ignite")
_SHELL_CALL = re.compile(r"(os|subprocess|get_ipython)\b.*\.(system|popen|getoutput|run|\w*call|Popen|check_output)$")
_ENVIRON = re.compile(r"\benviron(\.(get|setdefault|pop|update))?$|\b(getenv|putenv|unsetenv)$")


@dataclass(frozen=True)
class NameFinding:
    """One finding: in a cell (None in a script) and a line, of a kind that is an anchor on the docs page.

    `name` is as it is written, `happened` has the version, and `--fix` repairs what is fixable.
    """

    cell: int | None
    line: int
    kind: str
    name: str
    happened: str
    write: str
    is_fixable: bool = False


class Checker:
    """Looks through pieces that share their names, for findings and for the edits that fix them."""

    def __init__(self, pieces: list[Piece]):
        self._pieces = pieces
        self._names = Names()
        for number, piece in enumerate(pieces):
            self._names.read(piece.tree, number)
            runs = [line for line, text in piece.shell.items() if re.match(r"\s*%run\b", text)]
            self._names.stars += [(Place(number, line), "%run") for line in runs]
        self.findings: list[NameFinding] = []
        self.edits: dict[Piece, set[Edit]] = {piece: set() for piece in pieces}
        self._patched = {name for node in self._names.parents for name in self._patches(node)}
        self._fixes = SafeFixes(self._names, pieces, self._patched)

    def check(self) -> None:
        """Find everything."""
        for piece in self._pieces:
            for line, text in piece.shell.items():
                for below, shown, verdict in check_shell(text):
                    self._add(piece, line + below, verdict, shown)
            for line, text, message in piece.broken:
                self._add(piece, line, Verdict("not-python", message, "mend the line"), text)
            for node in ast.walk(piece.tree):
                for verdict, name in self._of_node(node):
                    self._add(piece, node.lineno, verdict, name)
                for verdict, name, edits in self._of_names(node, piece):
                    self._add(piece, node.lineno, verdict, name, is_fixable=edits is not None)
                    for home, edit in edits or ():
                        self.edits[home].add(edit)

    def _add(self, piece: Piece, line: int, verdict: Verdict, name: str, *, is_fixable: bool = False) -> None:
        at = piece.fixed_line or line + piece.above
        self.findings.append(NameFinding(piece.cell, at, verdict.kind, name, *verdict[1:], is_fixable))

    # Names

    def _of_names(self, node: ast.AST, piece: Piece) -> Iterator[tuple]:
        """Give (verdict, name, edits) for what a node names; the edits are None if no fix is safe."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names if not getattr(node, "level", 0) else ():
                full = ".".join(filter(None, (getattr(node, "module", ""), alias.name))).removesuffix(".*")
                if verdict := self._verdict(full, node):
                    is_open = verdict.kind != "guarded" and alias.name != "*"
                    yield verdict, full, self._fixes.of_import(node, alias, piece) if is_open else None
        elif self._is_whole_name(node):
            meaning = self._meaning(node)
            above = self._names.parents[node]
            is_called = isinstance(above, ast.Call) and above.func is node
            if not meaning or (is_called and any(self._arguments(above))):
                return
            statement = meaning.binding.statement if meaning.binding else None
            by_name = statement if isinstance(statement, ast.ImportFrom) else None
            if verdict := self._verdict(meaning.full, node, by_name):
                edits = self._fixes.of_use(node, meaning, piece) if verdict.kind != "guarded" else None
                yield verdict, dotted(node), edits

    def _is_whole_name(self, node: ast.AST) -> bool:
        if not dotted(node) or isinstance(self._names.parents[node], ast.Attribute):
            return False
        return isinstance(node.ctx, ast.Load) or getattr(node, "attr", "").startswith("__")

    def _meaning(self, node: ast.AST) -> Meaning | None:
        """Return the meaning of a name; of one that a star import alone can bind, if a table knows it as old."""
        name = dotted(node)
        found = self._names.meaning(node)
        if found or not name or not self._names.stars or name.partition(".")[0] in self._names.bound:
            return found
        old = table("names", "names") | table("api", "_removed") | table("libraries", "names")
        fulls = [f"{module}.{name}" for _, module in self._names.stars]
        return next((Meaning(one, name) for one in fulls if of_today(one) in old or one in old), None)

    def _verdict(self, full: str, node: ast.AST, by_name: ast.AST | None = None) -> Verdict | None:
        """Return the verdict on a name; "guarded" if the code itself looks whether it is there."""
        root, _, rest = full.partition(".")
        is_torch_tpu = full.startswith("torch.tpu") and "torch_tpu" in self._names.bound
        verdict = None
        if root in _LIBRARIES:
            verdict = tables.library_verdict(full)
        elif root in ("torch_xla", "torch_xla_py", "torch") and of_today(full) not in self._patched:
            verdict = None if is_torch_tpu else tables.verdict_on(full)
        if verdict and verdict.kind not in ("changed", "deprecated"):
            leaf = rest.rpartition(".")[2]
            if self._is_guarded(node, leaf) or (by_name and self._is_guarded(by_name, leaf)):
                return verdict._replace(kind="guarded", happened=f"{verdict.happened}; the code looks for it itself")
        return verdict

    def _is_guarded(self, node: ast.AST, leaf: str) -> bool:
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        errors = r"\b(ImportError|ModuleNotFoundError|Exception)\b" if is_import else r"\bAttributeError\b"
        child = node
        while (above := self._names.parents.get(child)) is not None:
            if isinstance(above, ast.FunctionDef | ast.Lambda) and not is_import:
                errors = r"(?!)"  # a handler around a function does not see its calls
            if isinstance(above, ast.Try) and child in above.body:
                caught = [ast.unparse(one.type) if one.type else "Exception AttributeError" for one in above.handlers]
                if re.search(errors, " ".join(caught)):
                    return True
            elif isinstance(above, ast.If | ast.IfExp | ast.BoolOp):
                asks = ast.unparse(above.values[0] if isinstance(above, ast.BoolOp) else above.test)
                if "torch_xla.__version__" in asks or re.search(rf"hasattr\(.*['\"]{leaf}['\"]", asks):
                    return True
            child = above
        return False

    def _patches(self, node: ast.AST) -> Iterator[str]:
        """Give the name that the code sets itself, as `xm.get_ordinal = xr.global_ordinal` does."""
        if isinstance(node, ast.Call) and dotted(node.func) == "setattr" and len(node.args) == 3:
            meaning = self._names.meaning(node.args[0])
            leaf = f".{getattr(node.args[1], 'value', '')}"
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and node.attr[:2] != "__":
            meaning = self._names.meaning(node)
            leaf = ""
        else:
            return
        if meaning:
            yield of_today(meaning.full + leaf)

    # Calls, environment variables, classes

    def _of_node(self, node: ast.AST) -> Iterator[tuple[Verdict, str]]:
        if isinstance(node, ast.Call):
            yield from self._of_call(node)
        elif isinstance(node, ast.Subscript):
            yield from _of_variables(node.value, [node.slice])
        elif isinstance(node, ast.Compare):
            yield from _of_variables(node.comparators[0], [node.left])
        elif isinstance(node, ast.FunctionDef):
            for base in getattr(self._names.parents[node], "bases", ()):
                meaning = self._names.meaning(base)
                methods = table("libraries", "methods").get(tables.library_name(meaning.full), {}) if meaning else {}
                if entry := methods.get(node.name):
                    yield Verdict("library", entry["happened"], entry["write"]), node.name

    def _of_call(self, node: ast.Call) -> Iterator[tuple[Verdict, str]]:
        name = dotted(node.func) or ast.unparse(node.func)
        yield from ((verdict, name) for verdict in self._arguments(node))
        if name == "getattr" and len(node.args) > 1:
            meaning = self._names.meaning(node.args[0])
            full = f"{meaning.full}.{getattr(node.args[1], 'value', '')}" if meaning else ""
            if verdict := self._verdict(full, node):
                has_default = len(node.args) > 2 and verdict.kind not in ("changed", "deprecated")
                yield verdict._replace(kind="guarded") if has_default else verdict, ast.unparse(node)
        yield from _of_variables(node.func, [*node.args[:1], *(ast.Constant(one.arg) for one in node.keywords)])
        if _SHELL_CALL.match(name) and node.args:
            yield from ((verdict, shown) for _, shown, verdict in check_shell(_text_of(node.args[0])))

    def _arguments(self, node: ast.Call) -> Iterator[Verdict]:
        """Give the verdicts on the arguments of a call, through functools.partial too."""
        meaning = self._meaning(node.func)
        args = node.args
        if meaning and meaning.full == "functools.partial" and args:
            meaning = self._names.meaning(args[0])
            args = args[1:]
        given = {one.arg: one.value for one in node.keywords}
        if any(isinstance(one, ast.Starred) for one in args):
            args = []
        full = of_today(meaning.full) if meaning else ""
        is_torch_tpu = full.startswith("torch.") and "torch_tpu" in self._names.bound
        for rule in tables.argument_rules(full) if not is_torch_tpu else ():
            position = rule.get("position", len(args))
            value = given.get(rule["name"], args[position] if position < len(args) else None)
            if value is None:
                continue
            text = ast.unparse(value)
            bad = [repr(one) for one in rule.get("bad", ())]
            if text in bad or (not bad and text not in rule.get("fine", ())):
                yield Verdict(rule["kind"], f"{rule['name']}={text}: {rule['happened']}", rule["write"])


def _text_of(node: ast.expr) -> str:
    """Return the text of a string, an f-string or a list of strings, as a shell gets it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(one) or "X" for one in node.values)
    if isinstance(node, ast.List | ast.Tuple):
        return " ".join(_text_of(one) or "X" for one in node.elts)
    value = getattr(node, "value", "")
    return value if isinstance(value, str) else ""


def _of_variables(place: ast.expr, keys: list[ast.expr]) -> Iterator[tuple[Verdict, str]]:
    """Give a verdict on each environment variable that is read or set at a place such as os.environ."""
    if _ENVIRON.search(dotted(place)):
        inside = [key for one in keys for key in getattr(one, "keys", [one])]
        names = [getattr(one, "value", "") for one in inside]
        yield from ((on_variable(one), one) for one in names if isinstance(one, str) and one in variables())
