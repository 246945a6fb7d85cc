"""Rules for calls: what each is today, or why only a person can know."""

import re
from functools import partial

import libcst as cst
from libcst.metadata import ExpressionContext

from tpukit.migrate import call_rules
from tpukit.migrate.known_names import PARALLEL_LOADER, RENAMED, SPAWN, STARTS_THE_RUNTIME, XM, XR, advice, dead_part
from tpukit.migrate.loaders import arguments, several_devices
from tpukit.migrate.meanings import Meaning
from tpukit.migrate.name_rules import ADAMW, NameRules
from tpukit.migrate.old_cells import OF_SAMPLER, by_name, code
from tpukit.migrate.set_up import is_asked

_DATA_PARALLEL = "torch_xla.distributed.data_parallel.DataParallel"
_DEVICES = f"{XM}.get_xla_supported_devices"
_OF_A_DEVICE = {"torch.device", "torch.set_default_device", "torch.autocast", "torch.amp.autocast"}
_IN_THE_KERNEL = (
    "it starts the runtime in the kernel, and the launch after it is refused",
    "delete it, or move it into the worker function",
)


class OldCalls(NameRules):
    """Rewrites calls."""

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
        if meaning is None:
            self._look_at_text(original)
            return updated
        new, rule = self._by_rule(original, updated, full, meaning)
        if isinstance(new, str):
            self._tell("stop", original, rule, new, "write out what is meant, by hand")
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
            kit = partial(self._book.alias, "tpukit", self._cell, original.func, meaning)
            return call_rules.launch(updated, kit), "launch"
        if full == PARALLEL_LOADER:
            return self._make_loader(original, updated), "loader"
        if full in ADAMW and any(one.star for one in original.args):
            self._tell("note", original, "AdamW", "eps was 1e-6 and weight_decay 0.0 where its arguments lack them")
        elif full in ADAMW or (full == "torch.optim.AdamW" and "correct_bias" in code(original)):
            return call_rules.adamw(updated), "AdamW"
        if full.endswith(".Trainer") and full.split(".")[0] in ("pytorch_lightning", "lightning"):
            return call_rules.trainer(updated), "Lightning"
        if full.startswith("torch.optim.lr_scheduler."):
            return call_rules.scheduler(updated), "scheduler"
        if full == _DATA_PARALLEL:
            return (
                "a thread for each device of the process, which has one: write a worker function, launch it",
                "device",
            )
        self._look_at_device(original, full)
        return None, ""

    def _look_at_device(self, call: cst.Call, full: str) -> None:
        """Tell of "tpu" where torch asks for a device."""
        first = full in _OF_A_DEVICE or (isinstance(call.func, cst.Attribute) and call.func.attr.value == "to")
        names = {None} if first else set()
        names |= {"device"} if first or full.startswith("torch.") else set()
        asked = [code(one.value) for one in call.args if (one.keyword and one.keyword.value) in names]
        if any(re.match(r"['\"]tpu\b", one) for one in asked) and "torch_tpu" not in self._book.meanings.bound:
            self._tell("stop", call, "dead name", *advice('torch.device("tpu")', 'torch.device("tpu")'))

    def _look_at_text(self, original: cst.Call) -> None:
        """Tell of names in the text of a getattr, and of "tpu" in calls of what nobody imported."""
        args = original.args
        if code(original.func) == "getattr" and len(args) > 1 and isinstance(args[1].value, cst.SimpleString):
            full = f"{self._full(args[0].value)}.{args[1].value.evaluated_value}"
            if full.startswith("torch_xla.") and (dead := dead_part(full)):
                kind = ("note", "guarded") if len(args) > 2 else ("stop", "dead name")
                self._tell(kind[0], original, kind[1], *advice(full, dead))
        self._look_at_device(original, "")

    def _count_cores(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        of, launch = self._book.path.launches[0]
        at = original.func  # imported beside what the launch came from
        alias = self._book.alias(XR, self._cell, at, self._book.meanings.of(of, launch.func))
        old = by_name(updated, OF_SAMPLER)["num_replicas"]
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
            self._tell(
                "note", original, "loader", "left, since it is not seen where the loader is made: it works, once"
            )
        return updated

    def visit_Subscript(self, node: cst.Subscript) -> None:
        """Find reads of variables that nothing sets any more."""
        if is_asked(node) and self._cell.contexts.get(node) is ExpressionContext.LOAD:
            self._tell("stop", node, "set-up", "nothing sets it today: KeyError", "tpukit.host().chips, or delete it")


def _number(call: cst.Call) -> str:
    """Return the number of the device that a call asks for; "" for none, and for the first of the process."""
    given = by_name(call, ("n",))
    numbers = [code(given[name].value) for name in ("n", "index") if name in given]
    return "".join(one for one in numbers if one not in ("None", "0"))
