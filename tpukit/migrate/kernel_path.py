"""What the notebook's kernel runs itself, and whether a launch comes after it."""

import libcst as cst

from tpukit.migrate.known_names import LAUNCHES, SPAWN
from tpukit.migrate.meanings import Meanings
from tpukit.migrate.old_cells import OF_SAMPLER, OF_SPAWN, Cell, by_name, code, dotted


class KernelPath:
    """The calls that the kernel makes, in functions that it calls by name as well.

    Attributes:
        later: by call whether a launch may come after it; without the calls that only workers make.
        direct: the calls that stand in no function.
        launches: every launch of the notebook, wherever it stands.
    """

    def __init__(self, cells: list[Cell], meanings: Meanings):
        self._meanings = meanings
        self.later: dict[cst.Call, bool] = {}
        self.direct: set[cst.Call] = set()
        self.launches: list[tuple[Cell, cst.Call]] = []
        self._functions: dict[str, tuple[Cell, cst.FunctionDef]] = {}
        self._made: dict[str, str] = {}  # by variable the class of the notebook that it was made of
        self._class_of: dict[cst.FunctionDef, str] = {}
        self._running: list[cst.FunctionDef] = []
        self._seen: dict[tuple[cst.FunctionDef, bool], bool] = {}  # whether a body launches, by what comes after it
        every = [*cells, *(inner for cell in cells for inner in cell.inner.values() if inner.tree)]
        for cell in every:
            self._note(cell)
        later = False
        for cell in reversed(cells):
            later = self._follow(cell, cell.tree, later) or later

    def counts_cores(self, cell: Cell, call: cst.Call) -> bool:
        """Return whether a sampler's number of replicas is that of the launch, in a function that only workers run."""
        if not dotted(call.func).endswith("DistributedSampler") or call in self.later or not cell.inside_function(call):
            return False
        given = by_name(call, OF_SAMPLER).get("num_replicas")
        spawns = [by_name(one, OF_SPAWN) for of, one in self.launches if self._meanings.full(of, one.func) == SPAWN]
        counts = {code(one["nprocs"].value) for one in spawns if "nprocs" in one}
        return given is not None and counts == {code(given.value)} != {"1"}

    def _note(self, cell: Cell) -> None:
        for node, parent in cell.parents.items():
            if isinstance(node, cst.FunctionDef):
                block = cell.parents.get(parent)
                of = f"{block.name.value}." if isinstance(block, cst.ClassDef) else ""
                self._functions[of + node.name.value], self._class_of[node] = (cell, node), of.rstrip(".")
            elif isinstance(node, cst.Call) and self._meanings.full(cell, node.func) in LAUNCHES:
                self.launches.append((cell, node))
            elif isinstance(node, cst.Assign) and isinstance(node.value, cst.Call):
                targets = filter(None, (dotted(one.target) for one in node.targets))
                self._made |= dict.fromkeys(targets, dotted(node.value.func))

    def _follow(self, cell: Cell, node: cst.CSTNode, later: bool) -> bool:
        """Go through what a node runs, last things first; return whether it launches."""
        if isinstance(node, cst.FunctionDef | cst.Lambda):  # defaults and decorators run where it stands
            here = [*getattr(node, "decorators", ()), node.params]
            launches = [self._once(cell, one, later) for one in reversed(here)]
            return any(launches)
        if isinstance(node, cst.If):
            body = self._follow(cell, node.body, later)
            other = self._follow(cell, node.orelse, later) if node.orelse else False
            return self._follow(cell, node.test, later or body or other) or body or other
        if isinstance(node, cst.For | cst.While) and self._once(cell, node, later):
            self._once(cell, node, True)  # what stands after a launch in a loop comes before the next
            return True
        if isinstance(node, cst.Call):
            return self._call(cell, node, later)
        return self._once(cell, node, later)

    def _once(self, cell: Cell, node: cst.CSTNode, later: bool) -> bool:
        launches = False
        for child in reversed(node.children):
            launches = self._follow(cell, child, later or launches) or launches
        return launches

    def _call(self, cell: Cell, node: cst.Call, later: bool) -> bool:
        self.later[node] = self.later.get(node, False) or later
        if not self._running:
            self.direct.add(node)
        launches = any(one is node for _, one in self.launches)
        if node in cell.inner:
            inner = cell.inner[node]
            launches = bool(inner.tree) and self._follow(inner, inner.tree, later)
        for of, function in self._called(node):
            key = (function, later or launches)
            if function not in self._running and key not in self._seen:
                self._running.append(function)
                self._seen[key] = self._follow(of, function.body, later or launches)
                self._running.pop()
            launches = self._seen.get(key, False) or launches
        return self._once(cell, node, later or launches) or launches

    def _called(self, node: cst.Call) -> list[tuple[Cell, cst.FunctionDef]]:
        """Return the notebook's own functions that a call runs: by name, of a class, of an object made of one."""
        name = dotted(node.func)
        of, _, method = name.rpartition(".")
        made = self._class_of[self._running[-1]] if of == "self" and self._running else self._made.get(of, of)
        names = [name, f"{name}.__init__", *([f"{made}.{method}"] if of else [])]
        return [self._functions[one] for one in dict.fromkeys(names) if one in self._functions]
