"""A whole notebook while it is rewritten: what its cells share."""

from dataclasses import dataclass, field

import libcst as cst

from tpukit.migrate.kernel_path import KernelPath
from tpukit.migrate.known_names import XR
from tpukit.migrate.loaders import Loaders
from tpukit.migrate.meanings import Meaning, Meanings
from tpukit.migrate.old_cells import Cell
from tpukit.migrate.rows import Row

_OWN_NAMES = {"torch_xla": "torch_xla", XR: "xr", "tpukit": "tpukit", "torch": "torch"}


@dataclass
class Book:
    """A whole notebook while its cells are rewritten.

    Attributes:
        beside: import lines to add, by the statement beside which they belong.
        on_top: the same, by a cell in which nothing imports what they are for.
        lines: by statement, the line that it became.
    """

    cells: list[Cell]
    meanings: Meanings
    path: KernelPath
    loaders: Loaders
    rows: list[Row]
    beside: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    on_top: dict[Cell, list[str]] = field(default_factory=dict)
    lines: dict[cst.CSTNode, cst.SimpleStatementLine] = field(default_factory=dict)
    calls: dict[cst.CSTNode, Cell] = field(default_factory=dict)

    def alias(self, module: str, cell: Cell, at: cst.CSTNode, meaning: Meaning) -> str:
        """Return what a module is called at a node, and have it imported beside what the old name came from."""
        while isinstance(at, cst.Attribute):
            at = at.value
        if name := self.meanings.name_of(module, cell, at):
            return name
        own = _OWN_NAMES[module]
        if own == "xr" and "xr" in self.meanings.bound:
            own = "xla_runtime"
        line = f"import {module}" if own == module else f"import {module} as {own}"
        lines = (
            self.on_top.setdefault(cell, [])
            if meaning.statement is None
            else self.beside.setdefault(meaning.statement, [])
        )
        lines += [line] * (line not in lines)
        return own
