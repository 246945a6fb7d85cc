"""Statements that set a TPU up in 2020, and that nothing needs today."""

import re

import libcst as cst

from tpukit.migrate.known_names import PL
from tpukit.migrate.meanings import Meanings
from tpukit.migrate.old_cells import Cell, code
from tpukit.migrate.shell_lines import DEAD_VARIABLES, SETUP, is_setup

_DEAD = "|".join(DEAD_VARIABLES)
_READ = re.compile(rf"environ\[\s*['\"]({_DEAD})['\"]\s*\]|environ\.(?:setdefault|pop)\(\s*['\"]({_DEAD})['\"]")
_ASKED = re.compile(rf"['\"]({_DEAD})['\"]")


def why_not_needed(small: cst.BaseSmallStatement, cell: Cell, cells: list[Cell], meanings: Meanings) -> str:
    """Return why a statement is not needed; "" where it is."""
    text = code(small)
    if is_for_set_up(small, cells):
        return "only the set-up of old read it"
    if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
        name = meanings.full(cell, small.value.func)
        if name == "torch.set_default_tensor_type" and re.search(r"\(['\"]?torch\.FloatTensor['\"]?\)", text):
            return "float32 is the default"
    target = small.targets[0].target if isinstance(small, cst.Assign) else None
    if target is not None and meanings.full(cell, target) == f"{PL}.PerDeviceLoader.__len__":
        return "PerDeviceLoader has a length of its own"
    found = _READ.search(text) or (isinstance(small, cst.Assert) and "environ" in text and _ASKED.search(text))
    if found and not isinstance(small, cst.Return):
        return f"nothing sets or reads {next(filter(None, found.groups()))} today"
    return ""


def is_for_set_up(small: cst.BaseSmallStatement, cells: list[Cell]) -> bool:
    """Return whether a statement sets what only lines read that set a TPU up: VERSION = "nightly"."""
    if not isinstance(small, cst.Assign) or not isinstance(name := small.targets[0].target, cst.Name):
        return False
    lines = [line.strip() for cell in cells for line in cell.source.split("\n")]
    shell = [line for line in lines if line.startswith(("!", "%", "get_ipython()"))]
    reads = [line for line in shell if re.search(rf"[${{]{name.value}\b", line)]  # $VERSION, {VERSION}
    others = [line for line in lines if line not in shell and re.search(rf"\b{name.value}\b", line)]
    sets = all(re.match(rf"#|{name.value}\s*=[^=]", line) for line in others)
    return bool(reads) and sets and all(is_setup(line, names_of_software(cells)) for line in reads)


def names_of_software(cells: list[Cell]) -> set[str]:
    """Return the notebook's variables that hold where a TPU's software is: WHEEL = "torch_xla-1.7.whl"."""
    found = (
        re.match(r"\s*(\w+)\s*=[^=]", line) for cell in cells for line in cell.source.split("\n") if SETUP.search(line)
    )
    return {one[1] for one in found if one}


def without_statement(small: cst.BaseSmallStatement, cells: list[Cell]) -> cst.BaseSmallStatement | None:
    """Return what has to stand in place of a removed statement: `name = None` where something else reads the name."""
    if not isinstance(small, cst.Assign) or not isinstance(name := small.targets[0].target, cst.Name):
        return None
    if is_for_set_up(small, cells):
        return None
    reads = re.compile(rf"\b{name.value}\b")
    others = sum(len(reads.findall(cell.source)) for cell in cells) - len(reads.findall(code(small)))
    return cst.parse_statement(f"{name.value} = None").body[0] if others else None


def is_asked(node: cst.CSTNode) -> bool:
    """Return whether a node reads a variable that nothing sets, which raises."""
    return isinstance(node, cst.Subscript) and bool(
        re.fullmatch(r"(os\.)?environ\[\s*['\"]COLAB_TPU_ADDR['\"]\s*\]", code(node))
    )
