"""Renames that cannot change a meaning, in torch_xla 2.8 and 2.9.

    import torch_xla.core.xla_model as xm             import torch_xla
                                                      import torch_xla.core.xla_model as xm
    rank = xm.get_ordinal()                           rank = torch_xla.runtime.global_ordinal()

Only two plain cases are fixed: a dotted name whose root can only be one module (`Names.is_plain`),
and names imported at the top level from a module that has moved. For all other cases, the linter
only gives advice. A fix adds no name but `torch_xla`, because a new alias could hide another name.
"""

import ast
import re
from typing import NamedTuple

from tpukit.migrate.code_pieces import Piece
from tpukit.migrate.name_scopes import Binding, Names, dotted
from tpukit.migrate.name_tables import entry_of, is_in_both_releases, of_today

# Nothing is fixed inside these. The handler of a `try` may expect the AttributeError of the old
# name, so a fix could change which branch runs. And Python 3.11 gives wrong positions inside an
# f-string.
_NOT_INSIDE = ast.Try | ast.TryStar | ast.JoinedStr


class Edit(NamedTuple):
    """A replacement in a `Piece` of code: `new` takes the place of `piece.text[start:end]`."""

    piece: Piece
    start: int
    end: int
    new: str


class SafeFixes:
    """Find the edits that repair a finding.

    The methods return None if no edit is safe. Two findings may have the same edit.
    """

    def __init__(self, names: Names):
        self._names = names

    def of_use(self, node: ast.AST) -> list[Edit] | None:
        """Return the edits for one use of a name, such as `xm.get_ordinal`."""
        binding = self._names.binding(node)
        if binding is None or binding.statement is None:
            return None
        new = self._new_name(node)
        if not new or not self._names.is_plain(binding.name) or not self._is_plain_text(node):
            return None
        piece = self._piece(node)
        if binding.full == "torch_xla":  # the root is torch_xla itself, perhaps under an alias
            return [Edit(piece, *piece.span(node), new.replace("torch_xla", binding.name, 1))]
        added = self._import_of_torch_xla(binding)
        return None if added is None else [*added, Edit(piece, *piece.span(node), new)]

    def _new_name(self, node: ast.AST) -> str:
        """Return the new name if it means the same as the old one in this use; "" otherwise."""
        entry = entry_of(self._names.full_name(node))
        above = self._names.parents[node]
        # Some functions took other arguments, so only a call without arguments is certain.
        is_bare_call = isinstance(above, ast.Call) and not above.args and not above.keywords
        has_same_meaning = is_bare_call or entry.get("call") == "any"
        return entry.get("rename", "") if has_same_meaning else ""

    def _is_plain_text(self, node: ast.AST) -> bool:
        """Return True if the text of a node is its name alone, in code that may be replaced."""
        piece = self._piece(node)
        start, end = piece.span(node)
        is_protected = any(self._names.around(node, _NOT_INSIDE))
        return piece.is_fixable and not is_protected and piece.text[start:end] == dotted(node)

    def _import_of_torch_xla(self, binding: Binding) -> list[Edit] | None:
        """Return the edit that imports torch_xla above the import of a binding.

        The result is [] if the code imports torch_xla before it, and None if no edit is safe.
        """
        known = self._names.bindings.get("torch_xla", [])
        if known and not self._names.is_plain("torch_xla"):
            return None
        if any(one.place < binding.place for one in known):
            return []
        if binding.place.column:  # other code comes before the import on its line
            return None
        piece = self._piece(binding.statement)
        start, _ = piece.span(binding.statement)
        line_end = "\r\n" if "\r\n" in piece.text else "\n"
        return [Edit(piece, start, start, f"import torch_xla{line_end}")]

    def of_import(self, statement: ast.Import | ast.ImportFrom) -> list[Edit] | None:
        """Return the edit for `from old.module import names`; None if no edit is safe."""
        piece = self._piece(statement)
        is_at_top = isinstance(self._names.parents[statement], ast.Module)
        start, end = piece.span(statement)
        written = re.match(r"from[ \t]+([\w.]+)", piece.text[start:end])
        if not written or not is_at_top or not piece.is_fixable:
            return None
        new = of_today(written[1])
        is_same = all(is_in_both_releases(f"{new}.{alias.name}") for alias in statement.names)
        if not is_same or not entry_of(written[1]).get("safe"):
            return None
        return [Edit(piece, start + written.start(1), start + written.end(1), new)]

    def _piece(self, node: ast.AST) -> Piece:
        return self._names.pieces[self._names.places[node].piece]
