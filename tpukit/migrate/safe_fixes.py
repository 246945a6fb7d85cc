"""Renames that cannot change a meaning: the same function under its name of today, in torch_xla 2.8 and 2.9.

    import torch_xla.core.xla_model as xm             import torch_xla
                                                      import torch_xla.core.xla_model as xm
    rank = xm.get_ordinal()                           rank = torch_xla.runtime.global_ordinal()

    from torch_xla.core.xla_model import get_ordinal  from torch_xla.runtime import global_ordinal as get_ordinal

`torch_xla` is the only name that is ever added: no new alias such as `xr` can hide another.
"""

import ast
import re
import sys
from typing import NamedTuple

from tpukit.migrate.code_pieces import Piece
from tpukit.migrate.name_scopes import Meaning, Names, dotted
from tpukit.migrate.name_tables import entry_of, is_in_both_releases, of_today, parts_of

_WRONG_IN_F_STRINGS = sys.version_info < (3, 12)  # the positions that Python 3.11 gives inside an f-string


class Edit(NamedTuple):
    """A replacement in the text of a piece."""

    start: int
    end: int
    new: str


Edits = list[tuple[Piece, Edit]]


class SafeFixes:
    """The edits of a finding; None if no edit is safe, an empty list if that of the import is enough."""

    def __init__(self, names: Names, pieces: list[Piece], patched: set[str]):
        self._names = names
        self._pieces = pieces
        self._patched = patched
        self._uses: dict[tuple[ast.AST, str], list[ast.Name]] = {}
        for node in names.parents:
            is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            meaning = names.meaning(node) if is_read else None
            if meaning and meaning.binding:
                self._uses.setdefault((meaning.binding.statement, node.id), []).append(node)

    def of_use(self, node: ast.AST, meaning: Meaning, piece: Piece) -> Edits | None:
        """Return the edits for a name that is read."""
        if not meaning.is_certain or not piece.is_fixable:
            return None
        if self._is_repaired_by_import(node, meaning):
            return []
        new = self._new_name(node, meaning.full)
        if not new or isinstance(node, ast.Name) or not self._is_plain_text(node, piece):
            return None
        if meaning.binding.full == "torch_xla":
            return [(piece, Edit(*piece.span(node), new.replace("torch_xla", meaning.head, 1)))]
        added = self._import_beside(node, meaning)
        return None if added is None else [*added, (piece, Edit(*piece.span(node), new))]

    def _is_repaired_by_import(self, node: ast.AST, meaning: Meaning) -> bool:
        statement = meaning.binding.statement
        is_changed_there = isinstance(node, ast.Name) or of_today(meaning.full) != meaning.full
        if meaning.binding.full == "torch_xla" or not is_changed_there:
            return False
        alias = next(one for one in statement.names if meaning.head in (one.asname, one.name))
        return self.of_import(statement, alias, self._pieces[meaning.binding.place.piece]) is not None

    def _new_name(self, node: ast.AST, full: str) -> str:
        """Return the full name of today, if this use of the old one means the same; "" otherwise."""
        today = of_today(full)
        entry = entry_of(today)
        if today in self._patched:
            return ""
        if "rename" in entry:
            return entry["rename"] if entry["call"] == "any" or self._is_bare_call(node) else ""
        is_same = any(entry_of(one).get("safe") for one in parts_of(full)) and is_in_both_releases(today)
        return today if is_same else ""

    def _is_bare_call(self, node: ast.AST) -> bool:
        above = self._names.parents[node]
        return isinstance(above, ast.Call) and above.func is node and not above.args and not above.keywords

    def _is_plain_text(self, node: ast.AST, piece: Piece) -> bool:
        """Return whether the text of a node is its name and nothing else: no bracket, comment or line end."""
        above = node
        while _WRONG_IN_F_STRINGS and (above := self._names.parents.get(above)) is not None:
            if isinstance(above, ast.JoinedStr):
                return False
        start, end = piece.span(node)
        return piece.text[start:end] == dotted(node)

    def _import_beside(self, node: ast.AST, meaning: Meaning) -> Edits | None:
        """Return the edit that imports torch_xla: none if it is imported by then, None if it could hide a name."""
        statement = meaning.binding.statement
        home = self._pieces[meaning.binding.place.piece]
        scope = self._names.scope_that_binds(node, "torch_xla")
        is_free = "torch_xla" not in self._names.bound
        for one in scope.bindings["torch_xla"] if scope else ():
            if one.full != "torch_xla" or one.statement is None or one.is_foreign:
                return None
            is_plain = isinstance(self._names.parents[one.statement], ast.Module | ast.FunctionDef)
            if is_plain and one.place < self._names.places[node]:  # it has run by then
                return []
            is_free = scope is self._names.scope_of[statement]
        if not is_free or not home.is_fixable:
            return None
        start, _ = home.span(statement)
        return [(home, Edit(start, start, f"import torch_xla{_between(home, statement)}"))]

    def of_import(self, statement: ast.Import | ast.ImportFrom, alias: ast.alias, piece: Piece) -> Edits | None:
        """Return the edits for a name or a module that is imported."""
        new = self._new_place(statement, alias) if piece.is_fixable else ""
        if not new:
            return None
        if isinstance(statement, ast.ImportFrom):
            return self._of_from_import(statement, piece)
        start, _ = piece.span(alias)
        end = start + len(alias.name)
        return [(piece, Edit(start, end, new))] if piece.text[start:end] == alias.name else None

    def _new_place(self, statement: ast.AST, alias: ast.alias) -> str:
        """Return the full name of today of what is imported; "" if that is not safe to write."""
        is_from = isinstance(statement, ast.ImportFrom)
        full = f"{statement.module}.{alias.name}" if is_from else alias.name
        own = alias.asname or (alias.name if is_from else alias.name.partition(".")[0])
        today = of_today(full)
        if today in self._patched or not self._names.is_certain(statement, own):
            return ""
        uses = self._uses.get((statement, own), [])
        entry = entry_of(today)
        if is_from and "rename" in entry:
            is_same = entry["call"] == "any" or all(self._is_bare_call(one) for one in uses)
            return entry["rename"] if is_same else ""
        new = self._new_name(statement, full)
        is_module = "module" in entry_of(full) and (is_from or alias.asname)
        if is_module and not all(self._is_read_from(today, one) for one in uses):
            return ""
        return new

    def _is_read_from(self, module: str, use: ast.Name) -> bool:
        above = self._names.parents[use]
        return isinstance(above, ast.Attribute) and is_in_both_releases(f"{module}.{above.attr}")

    def _of_from_import(self, statement: ast.ImportFrom, piece: Piece) -> Edits | None:
        start, end = piece.span(statement)
        text = piece.text[start:end]
        head = re.match(r"from\s+([\w.]+)\s", text)
        if not head or head[1] != statement.module:
            return None
        groups: dict[str, list[str]] = {}
        edits: Edits = []
        for alias in statement.names:
            new = self._new_place(statement, alias) or f"{statement.module}.{alias.name}"
            module, _, name = new.rpartition(".")
            own = alias.asname or alias.name
            written = name if name == own else f"{name} as {own}"
            groups.setdefault(module, []).append(written)
            edits.append((piece, Edit(*piece.span(alias), written)))
        if len(groups) == 1:  # the names stay where they are, and the comments between them
            module = next(iter(groups))
            return [*edits, (piece, Edit(start + head.start(1), start + head.end(1), module))]
        if re.search(r"[#\r\n\\]", text):
            return None
        lines = [f"from {module} import {', '.join(names)}" for module, names in groups.items()]
        return [(piece, Edit(start, end, _between(piece, statement).join(lines)))]


def _between(piece: Piece, statement: ast.AST) -> str:
    """Return the text between two statements: a line end and the indent, or "; " if others share the line."""
    begin = piece.offset(statement.lineno, 0)
    before = piece.text[begin : piece.span(statement)[0]]
    if before.strip():
        return "; "
    return ("\r\n" if "\r\n" in piece.text else "\n") + before
