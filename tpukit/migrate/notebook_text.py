"""The cells of a file, rewritten together: names are what all cells say, and imports come where the old ones were."""

from collections.abc import Sequence

import libcst as cst

from tpukit.migrate.book import Book
from tpukit.migrate.import_rules import ImportRules
from tpukit.migrate.kernel_path import KernelPath
from tpukit.migrate.loaders import Loaders
from tpukit.migrate.magics import FILES, SHELLS, unmask
from tpukit.migrate.meanings import Meanings
from tpukit.migrate.old_calls import OldCalls
from tpukit.migrate.old_cells import Cell
from tpukit.migrate.old_notes import notes
from tpukit.migrate.rows import Row
from tpukit.migrate.shell_lines import logical_lines, without_setup
from tpukit.migrate.statement_rules import StatementRules


class Rewriting(OldCalls, ImportRules, StatementRules):
    """Rewrites one cell by all rules and tells of it in the book's rows; what it leaves is left as it was written."""


def rewritten(cells: list[Cell], rows: list[Row]) -> list[str]:
    """Return the text of each cell as it is today; what was done, and what is left to do, is added to `rows`."""
    readable = [one for one in cells if one.tree]
    every = [one for cell in readable for one in (cell, *(inner for inner in cell.inner.values() if inner.tree))]
    meanings = Meanings(every)
    book = Book(every, meanings, KernelPath(readable, meanings), Loaders(every, meanings), rows)
    for cell in cells:
        if cell.broken and _is_meant_as_python(cell):
            fix = "mend the line, and migrate again; the cell is left as it is"
            rows.append(
                Row(
                    "stop",
                    cell.number,
                    cell.told(cell.broken.line),
                    "no Python",
                    cell.broken.text,
                    cell.broken.message,
                    fix,
                )
            )
    trees = {cell: cell.tree.visit(Rewriting(cell, book)) for cell in every}
    insides = [inner for cell in cells for inner in cell.inner.values()]
    rows += notes([*cells, *insides], book)
    texts: dict[Cell, str] = {}
    for cell in [*insides, *cells]:
        texts[cell] = _text(cell, trees.get(cell), book, texts)
    return [cell.as_it_was(texts[cell]) for cell in cells]


def _is_meant_as_python(cell: Cell) -> bool:
    """Return whether a cell that is no Python should be: it has no magic, or one that is known to run its body."""
    return cell.magic[0] in ("", "time", "timeit", "capture", "prun")


def _text(cell: Cell, tree: cst.Module | None, book: Book, texts: dict[Cell, str]) -> str:
    kind, rest = cell.magic
    if tree is not None:
        return unmask(tree.visit(_Finish(cell, book, texts)).code, cell.kept)
    if kind in FILES and rest.split()[-1:] and rest.split()[-1].endswith(".py"):
        inside = cell.file_inside()
        head = cell.source[: len(cell.source) - len(inside.source)]
        return head + rewritten([inside], book.rows)[0]
    if kind in SHELLS:
        return _shell(cell, book.rows)
    return cell.source


def _shell(cell: Cell, rows: list[Row]) -> str:
    out, number = [], 1
    for line in logical_lines(cell.source):
        new, old = without_setup(line), line.strip()
        if new is None:  # a block of the shell may not be empty: `:` does nothing
            indent = line[: len(line) - len(line.lstrip())]
            new = f"{indent}{':  ' if indent else ''}# tpukit: not needed: {old.splitlines()[0]}\n"
        elif new != line:
            new = new.rstrip("\n") + "\n" * line.endswith("\n")
        if new != line:
            told = "removed: Colab and Kaggle have torch_xla" if "# tpukit" in new else new.strip()
            rows.append(Row("change", cell.number, cell.told(number), "set-up", old, told))
        out.append(new)
        number += line.count("\n")
    text = "".join(out)
    return text if cell.source.endswith("\n") else text.removesuffix("\n")


class _Finish(cst.CSTTransformer):
    """Adds the imports that rewritten lines need, and puts back the cells that stand in strings."""

    def __init__(self, cell: Cell, book: Book, texts: dict[Cell, str]):
        super().__init__()
        self._cell, self._texts, self._calls = cell, texts, book.calls
        self._on_top = book.on_top.get(cell, [])
        self._after: dict[cst.CSTNode, list[str]] = {}
        above: set[str] = set()
        for statement, line in book.lines.items():
            emptied = isinstance(statement, cst.ImportFrom) and isinstance(line.body[0], cst.Pass)
            new = book.beside.get(statement, [])
            if statement in cell.parents and isinstance(cell.parents[cell.parents[statement]], cst.Module):
                new = [one for one in new if one not in above]  # once is enough, for what stands in no block
                above |= {*new}
            if new or emptied:
                self._after.setdefault(line, []).extend(new)

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        """Put back a cell that stood in a string."""
        if original not in self._calls:
            return updated
        inner = self._calls[original]
        text = self._texts[inner]
        if text == inner.source:
            return updated
        last = updated.args[-1].with_changes(value=cst.SimpleString(repr(text.split("\n", 1)[1])))
        return updated.with_changes(args=[*updated.args[:-1], last])

    def leave_SimpleStatementLine(self, original, updated: cst.SimpleStatementLine):
        """Add what is to be imported beside this."""
        if original not in self._after:
            return updated
        new = [cst.parse_statement(line) for line in dict.fromkeys(self._after[original])]
        if len(original.body) > 1:  # what follows in the line may need them
            return cst.FlattenSentinel([*new, updated.with_changes(body=_without_pass(updated.body) or updated.body)])
        if isinstance(original.body[0], cst.Pass):  # an import of which nothing is left
            new[:1] = [
                one.with_changes(leading_lines=updated.leading_lines, trailing_whitespace=updated.trailing_whitespace)
                for one in new[:1]
            ]
            return cst.FlattenSentinel(new) if new else cst.RemoveFromParent()
        return cst.FlattenSentinel([updated, *new])

    def leave_SimpleStatementSuite(self, original, updated: cst.SimpleStatementSuite) -> cst.SimpleStatementSuite:
        """Add what is to be imported beside this, where it stands behind a colon."""
        new = [cst.parse_statement(line).body[0] for line in dict.fromkeys(self._after.get(original, []))]
        return updated.with_changes(body=[*new, *_without_pass(updated.body)]) if new else updated

    def leave_Module(self, original, updated: cst.Module) -> cst.Module:
        """Add what nothing in this cell imports, below its docstring and what is imported from the future."""
        place = 0
        for number, line in enumerate(updated.body):
            small = line.body[0] if isinstance(line, cst.SimpleStatementLine) and line.body else None
            docstring = isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString)
            future = isinstance(small, cst.ImportFrom) and getattr(small.module, "value", "") == "__future__"
            place = number + 1 if (docstring and number == 0) or future else place
        new = [cst.parse_statement(line) for line in dict.fromkeys(self._on_top)]
        return updated.with_changes(body=[*updated.body[:place], *new, *updated.body[place:]])


def _without_pass(body: Sequence[cst.BaseSmallStatement]) -> list[cst.BaseSmallStatement]:
    """Return the statements of a line without what stands for an import of which nothing is left."""
    return [one for one in body if not isinstance(one, cst.Pass)]
