"""One cell's Python, rewritten: each name by what it stands for, each statement by what it was for."""

import re
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import ExpressionContext

from tpukit.migrate import call_rules
from tpukit.migrate.kernel_path import KernelPath
from tpukit.migrate.known_names import (
    PARALLEL_LOADER,
    RENAMED,
    SPAWN,
    STARTS_THE_RUNTIME,
    XM,
    XR,
    advice,
    dead_part,
    moved_module,
    of_today,
)
from tpukit.migrate.loaders import Loaders, arguments, several_devices
from tpukit.migrate.magics import MARK
from tpukit.migrate.meanings import Meaning, Meanings
from tpukit.migrate.old_cells import Cell, code, dotted
from tpukit.migrate.rows import Row
from tpukit.migrate.set_up import is_asked, why_not_needed, without_statement
from tpukit.migrate.shell_lines import without_setup

ADAMW = {"transformers.AdamW", "transformers.optimization.AdamW"}
_NUMPY = {f"numpy.{name}": name for name in ("int", "float", "bool", "object", "str")}
_DATA_PARALLEL = "torch_xla.distributed.data_parallel.DataParallel"
_DEVICES = f"{XM}.get_xla_supported_devices"
_OWN_NAMES = {"torch_xla": "torch_xla", XR: "xr", "tpukit": "tpukit", "torch": "torch"}
_IN_THE_KERNEL = (
    "it starts the runtime in the kernel, and the launch after it is refused",
    "delete it, or move it into the worker function",
)


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
        lines = self.on_top.setdefault(cell, []) if meaning.statement is None else self.beside.setdefault(meaning.statement, [])
        lines += [line] * (line not in lines)
        return own


class Rewriting(cst.CSTTransformer):
    """Rewrites one cell and tells of it in the book's rows; what it leaves is left as it was written."""

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

    # Names

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
        dead = dead_part(meaning.full)
        called = isinstance(self._cell.parents[node], cst.Call)
        if not dead or dead in RENAMED or (called and meaning.full == f"{XR}.using_pjrt"):
            return
        if self._guarded(node, dead, meaning):
            self._tell("note", node, "guarded", "not there today: left, since the code looks whether it is")
        else:
            self._tell("stop", node, "dead name", *advice(meaning.full, dead))

    def _guarded(self, node: cst.CSTNode, name: str, meaning: Meaning | None = None) -> bool:
        """Return whether the code itself looks first whether a name is there, or bears that it is not."""
        errors = r"\b(ImportError|ModuleNotFoundError)\b" if meaning is None else r"\bAttributeError\b"
        leaf, child, called_elsewhere = name.rpartition(".")[2], node, False
        for one in self._cell.above_of(node):
            called_elsewhere = called_elsewhere or isinstance(one, cst.FunctionDef | cst.Lambda)
            if isinstance(one, cst.Try) and child is one.body and not called_elsewhere:
                if any(found.type and re.search(errors, code(found.type)) for found in one.handlers):
                    return True
            asks = getattr(one, "left" if isinstance(one, cst.BooleanOperation) else "test", None)
            if asks is not None and isinstance(one, cst.If | cst.IfExp | cst.BooleanOperation):
                if "torch_xla.__version__" in code(asks) or re.search(rf"hasattr\(.*['\"]{leaf}['\"]", code(asks)):
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

    # Calls

    def visit_Call(self, node: cst.Call) -> None:
        """Decide what stays as it is, before the name is rewritten."""
        full, later = self._full(node.func), self._book.path.later.get(node)
        if full in (f"{XM}.xla_device", f"{XR}.xla_device", "torch_xla.device") and _number(node):
            fix = "tpukit.launch_each for one model per core, tpukit.launch for one model on all"
            self._stop(node, "device", "a process has one device, number 0: another raises IndexError", fix)
        elif full in STARTS_THE_RUNTIME and later and not self._prints(node, full):
            self._stop(node, "kernel", *_IN_THE_KERNEL)
        elif full in STARTS_THE_RUNTIME and later is False:
            why = "in the kernel it starts the runtime: a launch after it, in a second run of its cell too, is refused"
            self._tell("note", node, "kernel", why)

    def _prints(self, node: cst.Call, full: str) -> bool:
        return full == f"{XM}.master_print" and node in self._book.path.direct

    def _stop(self, node: cst.Call, rule: str, why: str, fix: str) -> None:
        self._left.add(node.func)
        self._tell("stop", node, rule, why, fix)

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        """Apply the rule for a call."""
        if original in self._cell.inner:
            self._book.calls[updated] = self._cell.inner[original]
            return updated
        full, meaning = self._full(original.func), self._book.meanings.of(self._cell, original.func)
        if isinstance(original.func, cst.Attribute) and original.func.attr.value == "per_device_loader":
            return self._read_loader(original, updated)
        if self._book.path.counts_cores(self._cell, original):
            return self._count_cores(original, updated)
        new, rule = self._by_rule(original, updated, full, meaning) if meaning else self._by_text(original, updated)
        if isinstance(new, str):
            fix = "write out what is meant, by hand"
            self._tell("stop", original, rule, new, fix)
            return updated
        if new is not None:
            self._tell("change", original, rule, code(new))
            return new
        return updated

    def _by_rule(self, original: cst.Call, updated: cst.Call, full: str, meaning: Meaning):
        """Return what a call is today, or why nobody can know, and the rule; None where there is nothing to do."""
        if full in RENAMED and original.func not in self._left and code(updated.func) != code(original.func):
            rule, _, _, drops = RENAMED[full]
            return updated.with_changes(args=() if drops else updated.args), rule
        if full == f"{XR}.using_pjrt":
            return cst.Name("True"), "runtime"
        if self._prints(original, full) and self._book.path.later.get(original):
            return updated.with_changes(func=cst.Name("print")), "print"
        if full == _DEVICES:
            return self._devices(original, updated), "runtime"
        if full == SPAWN:
            return call_rules.launch(updated, self._book.alias("tpukit", self._cell, original.func, meaning)), "launch"
        if full == PARALLEL_LOADER:
            return self._make_loader(original, updated), "loader"
        if full in ADAMW and any(one.star for one in original.args):
            self._tell("note", original, "AdamW", "eps was 1e-6 and weight_decay 0.0 where its arguments lack them")
        elif full in ADAMW or (full == "torch.optim.AdamW" and "correct_bias" in code(original)):
            return call_rules.adamw(updated), "AdamW"
        if full.endswith(".Trainer") and full.split(".")[0] in ("pytorch_lightning", "lightning"):
            return call_rules.trainer(updated), "Lightning"
        if full == _DATA_PARALLEL:
            return "a thread for each device of the process, which has one: write a worker function, launch it", "device"
        if full == "torch.device" and re.match(r"['\"]tpu\b", code(original.args[0].value) if original.args else ""):
            if "torch_tpu" not in self._book.meanings.bound:
                self._tell("stop", original, "dead name", *advice('torch.device("tpu")', 'torch.device("tpu")'))
        return None, ""

    def _by_text(self, original: cst.Call, updated: cst.Call):
        """Do the same for calls of no imported name: getattr, and what nbconvert makes of lines for the shell."""
        name, args = code(original.func), original.args
        if name == "getattr" and len(args) > 1 and isinstance(args[1].value, cst.SimpleString):
            full = f"{self._full(args[0].value)}.{args[1].value.evaluated_value}"
            if full.startswith("torch_xla.") and (dead := dead_part(full)):
                kind = ("note", "guarded") if len(args) > 2 else ("stop", "dead name")
                self._tell(kind[0], original, kind[1], *advice(full, dead))
        return None, ""

    def _count_cores(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        of, launch = self._book.path.launches[0]
        at = original.func  # imported beside what the launch came from
        alias = self._book.alias(XR, self._cell, at, self._book.meanings.of(of, launch.func))
        (old,) = [one for one in updated.args if one.keyword and one.keyword.value == "num_replicas"]
        self._tell("change", original, "replicas", f"num_replicas={alias}.world_size()")
        return updated.deep_replace(old, old.with_changes(value=cst.parse_expression(f"{alias}.world_size()")))

    def _devices(self, original: cst.Call, updated: cst.Call) -> cst.Call | str | None:
        above = self._cell.parents[original]
        if isinstance(above, cst.For | cst.CompFor | cst.Index):
            return "a process has one device, so there is nothing to spread over: write a worker function, launch it"
        args = [one for one in updated.args if one.keyword and one.keyword.value == "max_devices"]
        if len(args) == len(updated.args):
            return None
        self._tell("note", original, "runtime", "the devices of this process: one, not eight")
        return updated.with_changes(args=args)

    def _make_loader(self, original: cst.Call, updated: cst.Call) -> cst.Call | str | None:
        if self._book.loaders.is_rewritten(self._cell, original):
            func, name = updated.func, cst.Name("MpDeviceLoader")
            named = isinstance(func, cst.Attribute)
            new = func.with_changes(attr=name) if named else self._beside_import(original, name)
            return updated.with_changes(func=new, args=arguments(updated))
        if several_devices(original):
            return "several devices, and a process has one: write a worker function, launch it"
        self._tell("note", original, "loader", "left: it works, once, and hides what the dataset raises")
        return None

    def _beside_import(self, original: cst.Call, name: cst.Name) -> cst.Name:
        """Have MpDeviceLoader imported where ParallelLoader was imported by name."""
        meaning = self._book.meanings.of(self._cell, original.func)
        line = f"from {meaning.full.rpartition('.')[0]} import {name.value}"
        lines = self._book.beside.setdefault(meaning.statement, [])
        lines += [line] * (line not in lines and name.value not in self._book.meanings.bound)
        return name

    def _read_loader(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        if self._book.loaders.is_rewritten(self._cell, original):
            self._tell("change", original, "loader", code(updated.func.value))
            return updated.func.value
        if not self._book.loaders.is_one(self._cell, original.func.value):
            self._tell("note", original, "loader", "left, since it is not seen where the loader is made: it works, once")
        return updated

    def visit_Subscript(self, node: cst.Subscript) -> None:
        """Find reads of variables that nothing sets any more."""
        if is_asked(node) and self._cell.contexts.get(node) is ExpressionContext.LOAD:
            self._tell("stop", node, "set-up", "nothing sets it today: KeyError", "tpukit.host().chips, or delete it")

    # Imports

    def leave_Import(self, original: cst.Import, updated: cst.Import) -> cst.Import:
        """Write modules that have moved where they are today."""
        names = []
        for old, new in zip(original.names, updated.names, strict=True):
            name = dotted(old.name)
            if module := moved_module(name):
                self._tell("change", original, "import", module, old=name)
                new = new.with_changes(name=cst.parse_expression(module))
            elif dead := name.startswith("torch_xla") and dead_part(name):
                self._dead_import(original, name, dead)
            names.append(new)
        return updated.with_changes(names=names)

    def leave_ImportFrom(self, original: cst.ImportFrom, updated: cst.ImportFrom):
        """Take out of an import what is gone, and import beside it what takes its place."""
        module = dotted(original.module) if original.module and not original.relative else ""
        new_module = moved_module(module)
        if new_module:
            self._tell("change", original, "import", new_module, old=module)
            updated = updated.with_changes(module=cst.parse_expression(new_module))
        if isinstance(original.names, cst.ImportStar):
            if module.startswith("torch_xla") and (dead := dead_part(of_today(module))):
                self._dead_import(original, module, dead)
            return updated
        gone = {new for old, new in zip(original.names, updated.names, strict=True) if self._goes(original, module, old)}
        if not gone:
            return updated
        names = call_rules.without(updated.names, gone)
        if not names:
            return cst.Pass()  # until what takes its place is known
        return updated.with_changes(names=[*names[:-1], names[-1].with_changes(comma=updated.names[-1].comma)])

    def _goes(self, statement: cst.ImportFrom, module: str, one: cst.ImportAlias) -> bool:
        """Return whether a name goes from an import; import what takes its place, or tell that nothing does."""
        name = f"{module}.{one.name.value}"
        own = one.asname.name.value if one.asname else one.name.value
        full, lines = of_today(name), self._book.beside.setdefault(statement, [])
        if name in ADAMW or moved_module(name):
            new = "torch.optim.AdamW" if name in ADAMW else moved_module(name)
            above, _, leaf = new.rpartition(".")
            lines.append(f"from {above} import {leaf}" + f" as {own}" * (own != leaf))
            self._tell("change", statement, "AdamW" if name in ADAMW else "import", lines[-1], old=name)
            return True
        dead = full.startswith("torch") and dead_part(full)
        if not dead:
            return False
        if full not in RENAMED or self._guarded(statement, full):
            self._dead_import(statement, full, dead)
            return False
        left = [call for call, later in self._book.path.later.items() if later and code(call.func) == own]
        if left:  # a call of it stays as it is
            self._tell("stop", statement, "dead name", *advice(full, dead), old=name)
            return False
        first = one.name
        self._tell("change", statement, RENAMED[full][0], f"{RENAMED[full][1]}.{RENAMED[full][2]}", old=name)
        self._book.alias(RENAMED[full][1], self._cell, first, Meaning(name, statement, self._cell))
        return True

    def _dead_import(self, statement: cst.CSTNode, name: str, dead: str) -> None:
        if self._guarded(statement, dead):
            self._tell("note", statement, "guarded", "not there today: left, since the code bears that", old=name)
        else:
            self._tell("stop", statement, "dead name", *advice(name, dead), old=name)

    # Statements

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        """Find what is not needed, so that nothing is said about names in it."""
        self._find_gone(node)

    def visit_SimpleStatementSuite(self, node: cst.SimpleStatementSuite) -> None:
        """The same, where the statements follow a colon."""
        self._find_gone(node)

    def _find_gone(self, node: cst.CSTNode) -> None:
        for small in node.body:
            if why := why_not_needed(small, self._cell, self._book.meanings):
                self._gone[small] = why
                self._tell("change", small, "set-up", f"removed: {why}")

    def leave_SimpleStatementSuite(self, original, updated: cst.SimpleStatementSuite) -> cst.SimpleStatementSuite:
        """Take out what is not needed."""
        kept = [new for old, new in zip(original.body, updated.body, strict=True) if old not in self._gone]
        return updated.with_changes(body=kept or [cst.Pass()])

    def leave_SimpleStatementLine(self, original, updated: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
        """Take out what is not needed, and leave a comment in its place."""
        if mark := self._cell.mark_of(original):
            self._shell(original, mark)
            return updated
        gone = [one for one in original.body if one in self._gone]
        if gone:
            body = zip(original.body, updated.body, strict=True) if len(original.body) == len(updated.body) else ()
            stands = [without_statement(old, self._book.cells) if old in gone else new for old, new in body]
            kept = [one for one in stands if one]
            if kept:
                kept[-1] = kept[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            return self._as_comment(updated, code(gone[0]).strip(), kept)
        if text := _shell_text(original):
            new = without_setup(text)
            if new is None:
                self._tell("change", original, "set-up", "removed: Colab and Kaggle have torch_xla", old=text)
                holder = without_statement(original.body[0], self._book.cells)
                return self._as_comment(updated, text, [holder] if holder else [])
            if new != text:
                self._tell("change", original, "set-up", new, old=text)
                return updated.deep_replace(_shell_string(updated), cst.SimpleString(repr(new)))
        for one in original.body:
            self._book.lines[one] = updated
        return updated

    def _as_comment(self, line: cst.SimpleStatementLine, text: str, kept: list) -> cst.SimpleStatementLine:
        """Return a line of which a comment is left, and where something stays, that with the comment behind it."""
        mark = f"{MARK}9{len(self._cell.kept):04d}"
        comment = f"# tpukit: not needed: {text.splitlines()[0]}"
        self._cell.kept[mark] = f"{code(line.with_changes(body=kept, leading_lines=[], trailing_whitespace=cst.TrailingWhitespace(newline=cst.Newline('')))).strip()}  {comment}" if kept else comment
        self._comments |= set() if kept else {mark}
        space = cst.TrailingWhitespace(cst.SimpleWhitespace("  "), cst.Comment(f"# {mark}"))
        return line.with_changes(body=[cst.Pass()], trailing_whitespace=space)

    def _shell(self, line: cst.SimpleStatementLine, mark: str) -> None:
        """Take what set a TPU up out of a line for the shell."""
        text = self._cell.kept[mark]
        new = without_setup(text)
        if new is None:
            holder = isinstance(line.body[0], cst.Assign)
            comment = f"# tpukit: not needed: {text.strip().splitlines()[0]}"
            self._cell.kept[mark] = f"{code(line.body[0])}  {comment}" if holder else comment
            self._comments |= set() if holder else {mark}
            self._tell("change", line, "set-up", "removed: Colab and Kaggle have torch_xla", old=text.strip())
        elif new != text:
            self._cell.kept[mark] = new
            self._tell("change", line, "set-up", new.strip(), old=text.strip())

    def leave_IndentedBlock(self, original, updated: cst.IndentedBlock) -> cst.IndentedBlock:
        """Leave a `pass` where only comments are left of a block."""
        marks = [self._cell.mark_of(one) if isinstance(one, cst.SimpleStatementLine) else "" for one in updated.body]
        if marks and all(mark in self._comments for mark in marks):
            self._cell.kept[marks[-1]] = f"pass  {self._cell.kept[marks[-1]]}"
        return updated


def _number(call: cst.Call) -> str:
    """Return the number of the device that a call asks for; "" for none, and for the first of the process."""
    given = [code(one.value) for one in call.args[:1] if not (one.keyword and one.keyword.value == "devkind")]
    given += [code(one.value) for one in call.args[1:] if one.keyword and one.keyword.value in ("n", "index")]
    return "".join(one for one in given if one not in ("None", "0"))


def _shell_text(line: cst.SimpleStatementLine) -> str:
    """Return the line for the shell in nbconvert's `get_ipython().system(...)` and its like; "" where there is none."""
    string = _shell_string(line)
    return string.evaluated_value if string else ""


def _shell_string(line: cst.SimpleStatementLine) -> cst.SimpleString | None:
    value = getattr(line.body[0], "value", None) if len(line.body) == 1 else None
    if isinstance(value, cst.Call) and re.fullmatch(r"get_ipython\(\)\.(system|getoutput|run_line_magic|magic)", code(value.func)):
        last = value.args[-1].value if value.args else None
        return last if isinstance(last, cst.SimpleString) else None
    return None

