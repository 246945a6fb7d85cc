"""What became of a file: its changes, and what is left to do; `migrate` makes it."""

import difflib
import html
import importlib.util
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tpukit.essentials.machine import write_whole
from tpukit.essentials.show import NotInstalled, Table, WrongValue, as_html, as_text, counted, explain
from tpukit.migrate.old_files import OldFile, first_cell
from tpukit.migrate.rows import Row

_TPU = re.compile(
    r"torch_?xla|pytorch[-_/]xla|tpu-pytorch|tpu_cores|COLAB_TPU_ADDR|cloud-tpu-client|\bXLA\b|\bxmp?\.\w"
)
_IMPORTS_KIT = re.compile(r"^\s*import tpukit\b", re.MULTILINE)
_COLOURS = {"-": "\033[31m", "+": "\033[32m", "@": "\033[36m"}


@dataclass(frozen=True)
class Migrated(Table):
    """A file, rewritten.

    Attributes:
        file: the old file.
        written: the new one; None where nothing was written.
        found: a row for each change, note and stop, in the order of the file.
        diffs: by cell, as it is told, the lines of a unified diff.
        has_tpu: False for a file without torch_xla, which is left alone.
    """

    file: Path
    written: Path | None
    found: tuple[Row, ...]
    diffs: dict[str, list[str]]
    has_tpu: bool = True

    @property
    def changes(self) -> list[Row]:
        """The places that were rewritten."""
        return [row for row in self.found if row.kind == "change"]

    @property
    def notes(self) -> list[Row]:
        """What runs, and may not mean what it meant."""
        return [row for row in self.found if row.kind == "note"]

    @property
    def stops(self) -> list[Row]:
        """What does not run until a person has decided what was meant."""
        return [row for row in self.found if row.kind == "stop"]

    @property
    def green(self) -> bool:
        """True where nothing is left to do by hand."""
        return not self.stops

    @property
    def title(self) -> str:
        """The outcome in one line."""
        if not self.has_tpu:
            return f"{self.file.name}: no torch_xla in it, left alone"
        if not self.found:
            return f"{self.file.name}: nothing to change"
        counts = [(self.changes, "change"), (self.notes, "note"), (self.stops, "stop")]
        to = f" -> {self.written.name}" if self.written else ""
        return f"{self.file.name}{to}: " + ", ".join(counted(len(rows), word) for rows, word in counts if rows)

    def rows(self) -> list[tuple[str, ...]]:
        """Return (rule, count), then a row for each stop and note: what, where, and what to do or to know."""
        rules = [
            (rule, counted(number, "change")) for rule, number in Counter(row.rule for row in self.changes).items()
        ]
        left = [(row.kind, f"{row.place}: `{_short(row.old)}`\n{row.new}" + f"\nfix: {row.fix}" * bool(row.fix))
                for row in [*self.stops, *self.notes]]  # fmt: skip
        return [*rules, *left]

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self, *, colours: bool = False) -> str:
        """Return all of it as text: the title, the diff by cell, the table, and what is left to do."""
        parts = [
            self.title,
            self.diff(colours=colours),
            as_text([row for row in self.rows() if row[0] not in ("stop", "note")]),
        ]
        for row in self.notes:
            parts.append(f"note, {row.place}: {_short(row.old)}\n  {row.new}")
        for row in self.stops:
            parts.append(explain(f"stop, {row.place}: {_short(row.old)}", found=row.new, fix=row.fix))
        if self.stops:
            verb = "need" if len(self.stops) > 1 else "needs"
            parts.append(f"{counted(len(self.stops), 'line')} {verb} you; the rest is done")
        elif any(row.rule == "launch" for row in self.changes):
            parts.append("to try it without a TPU: pip install xla_cpu_pjrt==0.0.1, then run the new file")
        return "\n\n".join(part for part in parts if part)

    def diff(self, *, colours: bool = False) -> str:
        """Return the lines that changed, cell by cell."""
        lines = [line for name, cell in self.diffs.items() for line in [name, *cell]]
        if colours:
            lines = [f"{_COLOURS[line[0]]}{line}\033[0m" if line[:1] in _COLOURS else line for line in lines]
        return "\n".join(lines)

    def as_dict(self) -> dict:
        """Return it as JSON has it."""
        kinds = {
            f"{kind}s": [row.as_dict() for row in self.found if row.kind == kind] for kind in ("change", "note", "stop")
        }
        return {"file": str(self.file), "written": self.written and str(self.written), **kinds, "green": self.green}

    def _repr_html_(self) -> str:
        folded = "".join(
            f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(chr(10).join(lines))}</pre></details>"
            for name, lines in self.diffs.items()
        )
        return as_html(self.rows(), title=self.title) + folded


def migrate(
    path: str | os.PathLike, *, output: str | os.PathLike | None = None, check: bool = False, force: bool = False
) -> Migrated:
    """Rewrite an old notebook or script to run today, into a new file beside it: `old.ipynb`, `old.tpukit.ipynb`.

    The old file is never touched. What only a person can decide is a stop, with its line and a fix.

    Args:
        path: the notebook or script.
        output: where to write to instead.
        check: write nothing.
        force: write over what is there.

    Raises:
        NotInstalled: LibCST is not here.
        NoSuchFile: the file is not there.
        WrongValue: it is no notebook and no script; or another file is where the new one would go.
    """
    if importlib.util.find_spec("libcst") is None:
        fix = "pip install libcst, which the extra tpukit[migrate] asks for"
        raise NotInstalled("old code is read and rewritten by LibCST, which is not installed", fix=fix)
    from tpukit.migrate.notebook_text import rewritten
    from tpukit.migrate.old_cells import Cell
    from tpukit.migrate.old_notes import once_a_file

    file = OldFile(Path(path))
    if not _TPU.search("\n".join(file.texts)):
        return Migrated(file.path, None, (), {}, has_tpu=False)
    found: list[Row] = []
    texts = rewritten([Cell(text, at) for text, at in zip(file.texts, file.numbers, strict=True)], found)
    order = {"stop": 0, "note": 1, "change": 2}
    found = sorted(found, key=lambda row: (row.cell or 0, row.line, order[row.kind]))
    found = once_a_file(list(dict.fromkeys(found)))
    if texts == file.texts:
        return Migrated(file.path, None, tuple(found), {})
    new = file.with_texts(texts, kit_before=_place_of_kit(file, texts, found))
    written = None if check else _write(new, file.path, Path(output) if output else None, force=force)
    return Migrated(file.path, written, tuple(found), _diffs(file, texts))


def _place_of_kit(file: OldFile, texts: list[str], found: list[Row]) -> int | None:
    """Return before which cell the kit's own goes: that of the old set-up, or the first, if it has to."""
    needs = [number for number, text in zip(file.numbers, texts, strict=True) if _IMPORTS_KIT.search(text)]
    head = first_cell().split("\n")[0]
    has = any(text.startswith(head) or _IMPORTS_KIT.search(text) for text in file.texts)
    if has or not needs or needs == [None]:
        return None
    old = [row.cell for row in found if row.rule == "set-up" and row.kind == "change" and row.old[:1] in "!%"]
    return min([*old[:1], *needs[:1]] if old else file.numbers)


def _write(text: str, old: Path, output: Path | None, *, force: bool) -> Path:
    name = f"{old.stem.removesuffix('.tpukit')}.tpukit{old.suffix}"
    to = old.with_name(name) if output is None else output / name if output.is_dir() else output
    if not to.parent.is_dir():
        raise WrongValue(f"there is no folder {to.parent} to write to", fix=f"mkdir -p {to.parent}")
    if to.exists():
        same = to.samefile(old)
        if not same and to.read_bytes() == text.encode():
            return to
        if same or not force:
            fix = "output=... or --output FILE, for another place"
            fix += "" if same else "; force=True or --force writes over it"
            raise WrongValue(f"{to} is there already, and is not what would be written", fix=fix)
    with write_whole(to) as file:
        file.write(text.encode())
    return to


def _diffs(file: OldFile, texts: list[str]) -> dict[str, list[str]]:
    diffs = {}
    for number, old, new in zip(file.numbers, file.texts, texts, strict=True):
        if old != new:
            name = file.path.name if number is None else f"cell {number}"
            lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=1, lineterm="")
            diffs[name] = list(lines)[2:]  # without the names of two files
    return diffs


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) < 90 else f"{text[:87]}..."
