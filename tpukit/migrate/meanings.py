"""What a name of a notebook stands for: by the imports of all its cells, and not where it is the notebook's own."""

from dataclasses import dataclass

import libcst as cst
from libcst.metadata import Assignment, GlobalScope, ImportAssignment

from tpukit.migrate.known_names import PARALLEL_LOADER, RENAMED, SPAWN, STARTS_THE_RUNTIME, USUAL, of_today
from tpukit.migrate.old_cells import Cell, code, dotted


@dataclass(frozen=True)
class Meaning:
    """What a name stands for.

    Attributes:
        written: the name in full, as the import has it.
        statement: the import or assignment that says so, and its cell; None where no import of the notebook does.
    """

    written: str
    statement: cst.CSTNode | None = None
    cell: Cell | None = None

    @property
    def full(self) -> str:
        """The name in full, with the module that it is in today."""
        return of_today(self.written)


class Meanings:
    """What the names of a notebook stand for; `cells` in their order."""

    def __init__(self, cells: list[Cell]):
        self._order = {cell: number for number, cell in enumerate(cells)}
        self._global: dict[str, list[tuple[Cell, object]]] = {}
        self._stars: list[tuple[Cell, cst.ImportFrom]] = []
        for cell in cells:
            for scope in {one for one in cell.scopes.values() if isinstance(one, GlobalScope)}:
                for one in scope.assignments:
                    if isinstance(one, Assignment):
                        self._global.setdefault(one.name.partition(".")[0], []).append((cell, one))
            stars = [one for one in cell.parents if isinstance(one, cst.ImportFrom)]
            self._stars += [(cell, one) for one in stars if isinstance(one.names, cst.ImportStar) and one.module]
        self.bound = {name for cell in cells for name in _all_names(cell)}

    def of(self, cell: Cell, node: cst.CSTNode) -> Meaning | None:
        """Return what a name with dots stands for; None for the notebook's own, and for what nobody imported."""
        name = dotted(node)
        while isinstance(node, cst.Attribute):
            node = node.value
        return self.look_up(cell, node, name) if name else None

    def full(self, cell: Cell, node: cst.CSTNode) -> str:
        """Return the name in full, of today; "" for the notebook's own."""
        found = self.of(cell, node)
        return found.full if found else ""

    def look_up(self, cell: Cell, at: cst.CSTNode, name: str) -> Meaning | None:
        """Return what a name would stand for at a node of a cell."""
        head, _, rest = name.partition(".")
        scope = cell.scopes.get(at)
        here = [one for one in (scope[head] if scope is not None else ()) if isinstance(one, Assignment)]
        if any(not isinstance(one.scope, GlobalScope) for one in here):
            found = [(cell, one) for one in here]
        else:
            there = self._global.get(head, [])
            number, line = self._order[cell], cell.positions[at].start.line
            before = [(of, one) for of, one in there if (self._order[of], _line(of, one)) <= (number, line)]
            found = before or there
            found = [(of, one) for of, one in found if of is found[-1][0]]  # the last cell that binds it
        meanings = [self._meaning(of, one, head) for of, one in sorted(found, key=lambda one: _line(*one))]
        known = [one for one in meanings if one]
        if found:
            # `xm = None` beside an import is what somebody does where the import fails.
            found_one = known[-1] if known else None
        elif head in USUAL and (rest or head == "torch_xla"):
            found_one = Meaning(USUAL[head])
        else:
            found_one = self._from_star(head)
        return found_one and Meaning(
            ".".join(filter(None, (found_one.written, rest))), found_one.statement, found_one.cell
        )

    def name_of(self, module: str, cell: Cell, at: cst.CSTNode) -> str:
        """Return what a module is called at a node of a cell; "" where it is not imported by then."""
        own = {name for name, found in self._global.items() if any(self._names(module, *one, name) for one in found)}
        for name in sorted(own | {module.rpartition(".")[2], "xr"}):
            found = self.look_up(cell, at, name)
            if found is None or found.full != module or found.statement is None:
                continue
            there = self._order[found.cell], found.cell.positions[found.statement].start.line
            if there < (self._order[cell], cell.positions[at].start.line) or cell.inside_function(at):
                return name
        return ""

    def _names(self, module: str, cell: Cell, assignment: Assignment, name: str) -> bool:
        found = self._meaning(cell, assignment, name)
        return found is not None and found.full == module

    def _meaning(self, cell: Cell, assignment: Assignment, head: str) -> Meaning | None:
        node = assignment.node
        if isinstance(assignment, ImportAssignment):
            for one in node.names:
                own = one.asname.name.value if one.asname else dotted(one.name).partition(".")[0]
                if own == head and isinstance(node, cst.Import):
                    return Meaning(dotted(one.name) if one.asname else own, node, cell)
                if own == head and node.module and not node.relative:
                    return Meaning(f"{dotted(node.module)}.{one.name.value}", node, cell)
            return None
        target = cell.parents.get(node)  # xm = torch_xla.core.xla_model, or importlib's way to say it
        value = cell.parents[target].value if isinstance(target, cst.AssignTarget) else None
        if isinstance(value, cst.Call) and code(value.func).endswith("import_module") and value.args:
            name = value.args[0].value
            written = name.evaluated_value if isinstance(name, cst.SimpleString) else ""
            return Meaning(written, cell.parents[target], cell) if written else None
        if isinstance(value, cst.Attribute) and not dotted(value).startswith(f"{head}."):
            found = self.of(cell, value)
            if found and found.written.startswith("torch_xla") and found.full not in RENAMED:
                return Meaning(found.written, cell.parents[target], cell)
        return None

    def _from_star(self, name: str) -> Meaning | None:
        for cell, node in self._stars:
            written = f"{dotted(node.module)}.{name}"
            # Other names of a star are unknown to us, not dead.
            if written in {*RENAMED, *STARTS_THE_RUNTIME, SPAWN, PARALLEL_LOADER}:
                return Meaning(written, node, cell)
        return None


def _line(cell: Cell, assignment: Assignment) -> int:
    return cell.positions[assignment.node].start.line


def _all_names(cell: Cell) -> set[str]:
    return {one.name for scope in {*cell.scopes.values()} if scope for one in scope.assignments}
