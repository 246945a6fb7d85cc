"""`ParallelLoader`, which works once and hides what its dataset raises, as an `MpDeviceLoader`."""

import libcst as cst
from libcst.metadata import GlobalScope

from tpukit.migrate.known_names import PARALLEL_LOADER
from tpukit.migrate.meanings import Meanings
from tpukit.migrate.old_cells import Cell, by_name, code

_GONE = {"drop_last", "fixed_batch_size"}  # TypeError on 2.9


class Loaders:
    """Which loaders of a notebook can be rewritten: where one is made, and all that is done with it, are seen."""

    def __init__(self, cells: list[Cell], meanings: Meanings):
        self._meanings = meanings
        made: dict[tuple, bool] = {}
        for cell in cells:
            for node in cell.parents:
                if isinstance(node, cst.Call) and self.is_one(cell, node):
                    for target in self._targets(cell, node):
                        key = self._key(cell, target)
                        made[key] = made.get(key, True) and arguments(node) is not None
        used = set()
        for cell in cells:
            for node in cell.parents:
                if isinstance(node, cst.Name | cst.Attribute) and (key := self._key(cell, node)) in made:
                    use = self._use(cell, node)
                    made[key] = made[key] and use != "other"
                    used |= {key} if use == "read" else set()
        self._good = {key for key, good in made.items() if good and key in used}

    def is_one(self, cell: Cell, node: cst.CSTNode) -> bool:
        """Return whether a node is the call that makes a ParallelLoader."""
        return isinstance(node, cst.Call) and self._meanings.full(cell, node.func) == PARALLEL_LOADER

    def is_rewritten(self, cell: Cell, call: cst.Call) -> bool:
        """Return whether this making of a loader, or this `per_device_loader` of one, can be rewritten."""
        if self.is_one(cell, call):
            parent, targets = cell.parents[call], self._targets(cell, call)
            read_at_once = isinstance(parent, cst.Attribute) and parent.attr.value == "per_device_loader"
            bound = bool(targets) and all(self._key(cell, one) in self._good for one in targets)
            if read_at_once and self._is_stepped(cell, cell.parents[parent]):
                return False
            return arguments(call) is not None and (read_at_once or bound)
        made_here = call.func.value
        if self.is_one(cell, made_here):
            return self.is_rewritten(cell, made_here)
        return self._key(cell, made_here) in self._good

    def _targets(self, cell: Cell, call: cst.Call) -> list[cst.CSTNode]:
        parent = cell.parents[call]
        if isinstance(parent, cst.Assign):
            return [one.target for one in parent.targets]
        return [parent.target] if isinstance(parent, cst.AnnAssign) else []

    def _use(self, cell: Cell, node: cst.CSTNode) -> str:
        parent = cell.parents[node]
        if isinstance(parent, cst.AssignTarget | cst.Del | cst.AnnAssign):
            return "bound"
        if isinstance(parent, cst.Attribute) and parent.attr.value == "per_device_loader" and parent.value is node:
            call = cell.parents[parent]
            return "read" if isinstance(call, cst.Call) and not self._is_stepped(cell, call) else "other"
        above = cell.parents[parent] if isinstance(parent, cst.Arg) else None
        if (
            isinstance(parent, cst.For)
            and parent.iter is node
            or (isinstance(above, cst.Call) and code(above.func) == "enumerate")
        ):
            return "read"  # a TypeError of old, with one thing that it can have meant
        return "length" if isinstance(above, cst.Call) and code(above.func) == "len" else "other"

    def _is_stepped(self, cell: Cell, read: cst.CSTNode) -> bool:
        """Return whether batches are asked for one by one, which an MpDeviceLoader has no way for."""
        keys = {self._key(cell, one) for one in self._targets(cell, read)} - {None}
        bound = [node for node in cell.parents if keys and isinstance(node, cst.Name | cst.Attribute)]
        for node in [read, *(node for node in bound if self._key(cell, node) in keys)]:
            parent = cell.parents[node]
            call = cell.parents[parent] if isinstance(parent, cst.Arg) else None
            asked = isinstance(parent, cst.Attribute) and parent.attr.value == "next"
            if asked or (isinstance(call, cst.Call) and code(call.func) == "next"):
                return True
        return False

    def _key(self, cell: Cell, node: cst.CSTNode) -> tuple | None:
        """Return what two uses of one variable have in common, and no others."""
        parent = cell.parents.get(node)
        if (
            isinstance(parent, cst.Attribute)
            and parent.attr is node
            or isinstance(parent, cst.Arg)
            and parent.keyword is node
        ):
            return None
        if isinstance(node, cst.Attribute):
            classes = [one for one in cell.above_of(node) if isinstance(one, cst.ClassDef)]
            return (classes[0] if classes else None, code(node))
        if not isinstance(node, cst.Name) or (scope := cell.scopes.get(node)) is None:
            return None
        scopes = {getattr(one, "scope", None) for one in scope[node.value]}
        own = next((one for one in scopes if one is not None and not isinstance(one, GlobalScope)), None)
        return (own, node.value)


def arguments(call: cst.Call) -> list[cst.Arg] | None:
    """Return what an MpDeviceLoader takes in place of a ParallelLoader's arguments; None where nobody can know."""
    names, found, args = ("loader", "devices"), {}, []
    for place, one in enumerate(call.args):
        name = one.keyword.value if one.keyword else names[place] if place < 2 else ""
        name = "loader" if name == "cpu_loader" else name
        if one.star or not name:  # what came third was a number of the batch's dimension, which nobody gave
            return None
        if name in _GONE:
            continue
        found[name] = one.value
        if name == "devices":
            if not isinstance(one.value, cst.List | cst.Tuple) or len(one.value.elements) != 1:
                return None
            one = one.with_changes(value=one.value.elements[0].value)
        if one.keyword and name in names:
            one = one.with_changes(keyword=cst.Name({"loader": "loader", "devices": "device"}[name]))
        args.append(one)
    if not {"loader", "devices"} <= found.keys():
        return None
    return [*args[:-1], args[-1].with_changes(comma=call.args[-1].comma)]


def several_devices(call: cst.Call) -> bool:
    """Return whether a ParallelLoader is given a list that names not one device."""
    given = by_name(call, ("loader", "devices")).get("devices")
    devices = given and given.value
    several = isinstance(devices, cst.List) and len(devices.elements) != 1
    return several or isinstance(devices, cst.ListComp | cst.BinaryOperation | cst.Call)
