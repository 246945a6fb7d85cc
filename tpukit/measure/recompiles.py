"""Why a step was compiled again: another batch shape, a changed constant in the graph, or a tensor that was kept."""

import itertools
import linecache
import os
import re
from collections import Counter
from pathlib import Path

from tpukit.essentials.show import explain
from tpukit.measure.instruments import graph_key, graph_text, record_lines

# The first step creates the optimiser's state, so the second has another graph; from the third on it is the same.
_SETTLED = 3
_MOST_MESSAGES = 5  # a loop that compiles in every step would fill the notebook
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (\([^)]*\)|\S+) ([\w-]+)\((.*)$")
_NUMBERS = re.compile(r"(%[A-Za-z_-]+)[\d.]*|(?<=parameter\()\d+")  # numbering, which shifts with every added operation
_SOURCE = re.compile(r'source_file="((?:[^"\\]|\\.)+)" source_line=(\d+)')
# XLA writes a file's name with absl::CEscape: "Ä" is \303\204, one escape per byte of its UTF-8.
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}  # any other sign stands for itself
# A message names the line of user code that called tpukit.
_KIT = f"{Path(__file__).parents[1]}{os.sep}"


class RecompileMonitor:
    """Find the steps that were compiled again, and what was different in them; does nothing on a CPU and on CUDA.

    Costs 10 microseconds per step (measured) until a compile is not explained by the shapes of the batch. From then on,
    the graph of every step is identified, which takes 2 ms for a ResNet-34, and a new graph is compared with the one
    before.

        monitor = RecompileMonitor(core.backend)
        for step, batch in enumerate(batches):
            monitor.start_step(batch)
            with core.step():
                loss = ...
                monitor.check_graph(model, loss)
            if message := monitor.end_step(step):
                core.print(message)

    Args:
        backend: the core's backend.
        settled: steps in which compiles are expected.
        shapes: how many shapes of batches are; the first step on each compiles, and nothing is said.

    Attributes:
        recompiles: how many graphs were compiled after that.
    """

    def __init__(self, backend, settled: int = _SETTLED, shapes: int = 1):
        self._backend = backend
        self._settled, self._shapes_expected = settled, shapes
        self._steps = self._messages = 0
        self.recompiles = 0
        self._shapes: tuple | None = None  # of the last batch
        self._seen_shapes: set[tuple] = set()
        self._checks_graphs = False
        # A step may be cut into several graphs: the number in a key is the position of the graph in its step.
        self._seen_graphs: set[tuple[int, bytes]] = set()
        self._texts: dict[int, str] = {}

    @property
    def compiles(self) -> int:
        """All graphs that this process has compiled so far; 0 where nothing is compiled."""
        return (self._backend.compiles() or (0, 0.0))[0]

    def expect(self) -> None:
        """Expect that the next step compiles, too."""
        self._settled = self._steps + 1

    def start_step(self, batch: object) -> None:
        """Begin a step on this batch: tensors, nested in any way."""
        self._compiles_before = self._backend.compiles()
        if self._compiles_before is None:
            return
        self._batch, self._previous_shapes, self._shapes = batch, self._shapes, _shapes(batch)
        self._checks, self._changes = 0, []

    def check_graph(self, model, *tensors) -> None:
        """Compare the graph that the step has recorded for this model, and for tensors such as the loss.

        Call it at the end of the step, before the graph is run. Where something cuts the graph, as the averaging of
        gradients does in a rehearsal on several cores, call it before that as well.
        """
        if not self._checks_graphs:
            return
        parameters = list(model.parameters())
        # A graph is what these tensors depend on; the gradients are named because the optimiser has not used them yet.
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        tensors = [*tensors, *gradients, *parameters, *model.buffers()]
        position, self._checks = self._checks, self._checks + 1
        key = (position, graph_key(tensors))
        if key in self._seen_graphs:  # the text of a graph is made only if it is new
            return
        self._seen_graphs.add(key)
        text, earlier = graph_text(tensors), self._texts.get(position)
        self._texts[position] = text
        self._changes.append(difference(earlier, text) if earlier else "")

    def end_step(self, step: int) -> str | None:
        """End the step; if it was compiled again, return what was different, the first five times."""
        if self._compiles_before is None:
            return None
        graphs, seconds = self._backend.compiles()
        graphs_before, seconds_before = self._compiles_before
        known = self._shapes in self._seen_shapes
        self._seen_shapes.add(self._shapes)
        batch, self._batch = self._batch, None  # so that its memory can be freed
        self._steps += 1
        expected = not known and len(self._seen_shapes) <= self._shapes_expected
        if graphs == graphs_before or self._steps <= self._settled or expected:
            return None
        self.recompiles += graphs - graphs_before
        reason = self._reason(batch, known) if self._messages < _MOST_MESSAGES else None
        if reason is None:
            return None
        self._messages += 1
        if self._messages == _MOST_MESSAGES:
            self._enable_graph_checks(False)
            reason += (
                "\n  note:  this is the last of these messages; tpukit.measure.report(core) counts further compiles"
            )
        return f"step {step} compiled again, {seconds - seconds_before:.1f} s: {reason}"

    def _enable_graph_checks(self, wanted: bool) -> None:
        self._checks_graphs = wanted
        record_lines(wanted)

    def _reason(self, batch: object, known: bool) -> str | None:
        if not known:
            what = _changed_shapes(batch, self._previous_shapes)
            return explain(what, fix="batches of one shape: core.batches makes them; in a DataLoader, drop_last=True")
        if not self._checks_graphs:  # checks start now: the graph of this step has already run
            self._enable_graph_checks(True)
            return "the shape of the batch was seen before; if it happens again, the graph will show what changed"
        if not self._checks:
            return explain(
                "the shape of the batch was seen before",
                fix="call monitor.check_graph(model, loss) at the end of the step, which finds the cause",
            )
        if not self._changes:
            return explain(
                "the model and the loss are computed as before, so another tensor was computed or kept in this step",
                fix="compute or keep it in every step, or after the step, from what the step returns",
            )
        return next((change for change in self._changes if change), None)  # the first graph has none before it


def difference(before: str, after: str) -> str:
    """Return what `what_differs` does as a message."""
    what, fix = what_differs(before, after)
    return explain(what, fix=fix)


def what_differs(before: str, after: str) -> tuple[str, str]:
    """Return what differs between two graphs, given as HLO text, with the line of Python that wrote it; and the fix."""
    old, new = (_operations(text) for text in (before, after))
    gone, come = Counter(old), Counter(new)
    gone, come = gone - come, come - gone
    if any(_kind(line) != "constant" for line in come):  # a mean's divisor changes with the shape and is not the cause
        gone, come = (Counter(line for line in lines if _kind(line) != "constant") for lines in (gone, come))
    now = next((line for line in new if line in come), None)
    was = next((line for line in old if line in gone and now and _kind(line) == _kind(now)), None)
    if was and len(old) == len(new) and _kind(now) == "constant":
        what = f"the constant {_arguments(was)} became {_arguments(now)}"
        fix = "torch.tensor([value], device=core.device): its value is passed to the graph and is not part of it"
    elif was and len(old) == len(new):
        what = f"{_described(was)} became {_described(now)}"
        fix = "the same shapes and positions in every step: a mask instead of a slice, padding instead of a cut"
    elif gone or come:
        first = now or next(line for line in old if line in gone)
        counts = f"the graph has {len(new):,} operations, before {len(old):,}"
        what = f"{counts}; the first that differs: {_described(first)}"
        fix = "the same operations in every step: torch.where instead of if, a tensor [x] for a number that is 0 or 1"
    else:
        return "the graphs differ only in the order of operations", "call the parts of the model in one order"
    return f"{what}{_place(after, now) if now else _place(before, first)}", fix


def _operations(text: str) -> list[str]:
    """Return the operations of a graph, in order, without metadata and numbering."""
    lines = [line.split(", metadata={")[0] for line in text.splitlines()]
    return [_NUMBERS.sub(r"\1", line) for line in lines if _OPERATION.match(line)]


def _kind(line: str) -> str:
    return _OPERATION.match(line)[2]


def _arguments(line: str) -> str:
    return _OPERATION.match(line)[3].split(")")[0]


def _described(line: str) -> str:
    """Write an operation as `slice f32[4,5]`, with its attributes."""
    shape, kind, rest = _OPERATION.match(line).groups()
    attributes = rest.rpartition("), ")[2] if "), " in rest else ""
    return f"{kind} {re.sub(r'{[0-9,]*}', '', shape)}" + (f" ({attributes[:60]})" if attributes else "")


def _place(text: str, line: str) -> str:
    """Return the line of Python an operation came from; lines inside torch and tpukit are skipped."""
    import torch

    inside = (str(Path(torch.__file__).parent), _KIT)
    lines = text.splitlines()
    same = (_NUMBERS.sub(r"\1", other.split(", metadata={")[0]) == line for other in lines)
    start = next((number for number, found in enumerate(same) if found), len(lines))
    for match in filter(None, map(_SOURCE.search, lines[start : start + 50])):
        file = _file_name(match[1])
        number = int(match[2])
        if not file.startswith(inside):
            code = linecache.getline(file, number).strip()
            return f", near `{code}`" if code else f", near {Path(file).name}:{number}"
    return ""


def _file_name(escaped: str) -> str:
    """Return the name of a file that HLO text writes with escapes."""

    def sign(escape: re.Match) -> bytes:
        content = escape[1]
        return bytes([int(content, 8)]) if len(content) == 3 else _ESCAPED.get(content, content)

    return os.fsdecode(_ESCAPE.sub(sign, escaped.encode()))


def _shapes(batch: object) -> tuple:
    """Return (shape, dtype) of every tensor in a batch."""
    if type(batch) in (tuple, list):  # as most are; torch's tree_leaves takes nearly three times as long
        return tuple(itertools.chain.from_iterable(map(_shapes, batch)))
    if hasattr(batch, "dtype"):
        return ((batch.shape, batch.dtype),)
    from torch.utils import _pytree as tree

    return tuple((leaf.shape, leaf.dtype) for leaf in tree.tree_leaves(batch) if hasattr(leaf, "dtype"))


def _changed_shapes(batch: object, before: tuple | None) -> str:
    """Describe which tensors of a batch differ in shape or dtype from those of the previous step."""
    from torch.utils import _pytree as tree

    leaves = tree.tree_flatten_with_path(batch)[0]
    named = [(tree.keystr(path), leaf) for path, leaf in leaves if hasattr(leaf, "dtype")]
    if before is None or len(named) != len(before):
        return f"the batch has {len(named)} tensors, before {len(before or ())}"
    changed = [
        f"batch{name} is {_described_tensor(leaf.shape, leaf.dtype)}, before {_described_tensor(*was)}"
        for (name, leaf), was in zip(named, before, strict=True)
        if (leaf.shape, leaf.dtype) != was
    ]
    return "; ".join(changed[:2]) or "the batch is nested in another way"


def _described_tensor(shape, dtype) -> str:
    return f"{tuple(shape)} {dtype}".replace("torch.", "")
