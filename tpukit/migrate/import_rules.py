"""Rules for imports: what is gone goes, and what takes its place is imported beside it."""

import libcst as cst

from tpukit.migrate import call_rules
from tpukit.migrate.known_names import RENAMED, advice, dead_part, moved_module, of_today
from tpukit.migrate.meanings import Meaning
from tpukit.migrate.name_rules import ADAMW, NameRules
from tpukit.migrate.old_cells import code, dotted


class ImportRules(NameRules):
    """Rewrites imports."""

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
        gone = {
            new for old, new in zip(original.names, updated.names, strict=True) if self._goes(original, module, old)
        }
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
            self._tell(
                "note",
                statement,
                "guarded",
                "not there today: left, since the code bears that, and goes its other way",
                old=name,
            )
        else:
            self._tell("stop", statement, "dead name", *advice(name, dead), old=name)
