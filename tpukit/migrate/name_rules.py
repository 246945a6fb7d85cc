"""Rules for names: written as they are today, or told that they are not there."""

import re

import libcst as cst
from libcst.metadata import ExpressionContext

from tpukit.migrate.book import Book
from tpukit.migrate.known_names import RENAMED, SPAWN, XR, advice, dead_part, moved_module
from tpukit.migrate.meanings import Meaning
from tpukit.migrate.old_cells import Cell, code, dotted
from tpukit.migrate.rows import Row

ADAMW = {"transformers.AdamW", "transformers.optimization.AdamW"}
_NUMPY = {f"numpy.{name}": name for name in ("int", "float", "bool", "object", "str")}


class NameRules(cst.CSTTransformer):
    """Writes names as they are today, and tells of those that are not there."""

    def __init__(self, cell: Cell, book: Book):
        super().__init__()
        self._cell, self._book = cell, book
        self._gone: dict[cst.CSTNode, str] = {}
        self._left: set[cst.CSTNode] = set()  # what is left as it is although there is a rule for it
        self._comments: set[str] = set()  # marks of lines of which a comment remains

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Do not look into what is removed."""
        return node not in self._gone and super().on_visit(node)

    def _tell(self, kind: str, node: cst.CSTNode, rule: str, new: str, fix: str = "", old: str = "") -> None:
        row = Row(kind, self._cell.number, self._cell.line(node), rule, old or code(node).strip(), new, fix)
        self._book.rows.append(row)

    def _full(self, node: cst.CSTNode) -> str:
        return self._book.meanings.full(self._cell, node)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        """Look whether there is such a name at all."""
        if not isinstance(self._cell.parents[node], cst.Attribute):
            self._look(node)

    def visit_Name(self, node: cst.Name) -> None:
        """Look at names that were imported by name."""
        loaded = self._cell.contexts.get(node) is ExpressionContext.LOAD
        if loaded and not isinstance(self._cell.parents.get(node), cst.Attribute):
            self._look(node)

    def _look(self, node: cst.CSTNode) -> None:
        meaning = self._book.meanings.of(self._cell, node)
        inside_import = any(isinstance(one, cst.Import | cst.ImportFrom) for one in self._cell.above_of(node))
        if meaning is None or inside_import or self._cell.contexts.get(node) is ExpressionContext.STORE:
            return
        dead, above = dead_part(meaning.full), self._cell.parents[node]
        called = isinstance(above, cst.Call)
        if meaning.full == SPAWN and not called and not isinstance(above, cst.Assign):
            fix = 'tpukit.launch(tpukit.on_old_rank(fn), *args, backend="xla")'
            self._tell(
                "stop", node, "launch", "handed on, where its arguments are not seen: nprocs=8 raises today", fix
            )
        if not dead or dead in RENAMED or (called and meaning.full == f"{XR}.using_pjrt"):
            return
        if self._guarded(node, dead, meaning):
            self._tell("note", node, "guarded", "not there today: left, since the code looks whether it is")
        else:
            self._tell("stop", node, "dead name", *advice(meaning.full, dead))

    def _guarded(self, node: cst.CSTNode, name: str, meaning: Meaning | None = None) -> bool:
        """Return whether the code itself looks first whether a name is there, or bears that it is not."""
        errors = r"\b(ImportError|ModuleNotFoundError|Exception)\b" if meaning is None else r"\bAttributeError\b"
        leaf, child, called_elsewhere = name.rpartition(".")[2], node, False
        for one in self._cell.above_of(node):
            called_elsewhere = called_elsewhere or isinstance(one, cst.FunctionDef | cst.Lambda)
            if isinstance(one, cst.Try) and child is one.body and not called_elsewhere:
                caught = [code(found.type) if found.type else "Exception" for found in one.handlers]
                borne = any(re.search(errors, found) for found in caught)
            elif isinstance(one, cst.If | cst.IfExp | cst.BooleanOperation):
                asks = code(one.left if isinstance(one, cst.BooleanOperation) else one.test)
                borne = "torch_xla.__version__" in asks or re.search(rf"hasattr\(.*['\"]{leaf}['\"]", asks)
            else:
                borne = False
            if borne:
                return True
            child = one
        imported = meaning and isinstance(meaning.statement, cst.ImportFrom)
        return bool(imported) and meaning.cell is self._cell and self._guarded(meaning.statement, name)

    def leave_Attribute(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:
        """Write a name as it is today."""
        return self._name_of_today(original, updated)

    def leave_Name(self, original: cst.Name, updated: cst.Name) -> cst.BaseExpression:
        """The same, of what was imported by name."""
        loaded = self._cell.contexts.get(original) is ExpressionContext.LOAD
        whole = not isinstance(self._cell.parents.get(original), cst.Attribute | cst.ImportAlias | cst.ImportFrom)
        return self._name_of_today(original, updated) if loaded and whole else updated

    def _name_of_today(self, original: cst.CSTNode, updated: cst.BaseExpression) -> cst.BaseExpression:
        meaning = self._book.meanings.of(self._cell, original)
        above = self._cell.parents[original]
        if meaning is None or original in self._left or isinstance(above, cst.ImportAlias | cst.ImportFrom):
            return updated
        called = isinstance(above, cst.Call) and above.func is original
        if meaning.full in RENAMED:
            rule, module, name, _ = RENAMED[meaning.full]
            if self._guarded(original, meaning.full, meaning):
                self._tell("note", original, "guarded", "left: the code looks itself whether it is there")
                return updated
            new = f"{self._book.alias(module, self._cell, original, meaning)}.{name}"
        elif meaning.full in _NUMPY and isinstance(original, cst.Attribute):
            rule, new, called = "numpy", _NUMPY[meaning.full], False
        elif meaning.full in ADAMW and isinstance(original, cst.Attribute):
            rule, new = "AdamW", f"{self._book.alias('torch', self._cell, original, meaning)}.optim.AdamW"
        elif dotted(original) == meaning.written and (module := moved_module(meaning.written)):
            rule, new, called = "import", module, False
        else:
            return updated
        if not called:
            self._tell("change", original, rule, new)
        return cst.parse_expression(new)
