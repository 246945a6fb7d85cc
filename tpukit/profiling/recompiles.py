"""Find out why a step was compiled again.

The reason is another shape of the batch, another constant in the graph, another operation, or a
tensor that was kept from an earlier step. To find it, the graphs of two steps are compared as HLO
text, without the numbers in the names of operations (such as .3 in %c.3):

    before    %c.3 = f32[] constant(0.1)    %m.4 = f32[8] multiply(%x.1, %b.2)
    after     %c.3 = f32[] constant(0.2)    %m.4 = f32[8] multiply(%x.1, %b.2)
    result    "the constant 0.1 became 0.2", and the line of Python code
"""

import itertools
import linecache
import os
import re
from collections import Counter
from pathlib import Path

from tpukit.essentials.display import explain
from tpukit.profiling.instruments import graph_key, graph_text, record_lines

# Most optimizers create their state in the first step, so the second step has another graph. From
# the third step on, the graph stays the same.
_SETTLED = 3
_MOST_MESSAGES = 5  # limit: a loop that compiles in every step would fill the notebook
# A line of HLO text: "%m.4 = f32[8] multiply(%x.1, %b.2), ...". The groups are the shape, the kind
# of operation, and the rest.
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (\([^)]*\)|\S+) ([\w-]+)\((.*)$")
# The numbers in names and of parameters: one more operation changes all that follow.
_NUMBERS = re.compile(r"(%[A-Za-z_-]+)[\d.]*|(?<=parameter\()\d+")
_SOURCE = re.compile(r'source_file="((?:[^"\\]|\\.)+)" source_line=(\d+)')
# XLA writes a file's name with absl::CEscape: "Ä" is \303\204, one escape per byte of its UTF-8.
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}  # any other escaped character means itself
_NEAR = 50  # lines of a graph in which `_place` looks for a line of Python
# Files in this folder are skipped: a message names the line of user code that called tpukit.
_KIT = f"{Path(__file__).parents[1]}{os.sep}"


class RecompileMonitor:
    """Find the steps that were compiled again, and the change that caused the compilation.

    Without torch_xla, the monitor does nothing: graphs of `torch.compile` are not watched.

    At first, the monitor compares only the shapes of the batches, in 10 microseconds per step
    (measured). After a compilation with another cause, it computes a hash of the graph of every
    step, which takes 2 ms for a ResNet-34. Each graph with a new hash is compared with the
    previous graph that had a new hash.

        monitor = RecompileMonitor(core.backend)
        for step, batch in enumerate(batches):
            monitor.start_step(batch)
            with core.step():
                loss = ...
                monitor.check_graph(model, loss)
            if message := monitor.end_step(step):
                core.print(message)

    Args:
        backend: the backend of the core.
        settled: number of steps at the beginning in which compilations are expected, 3 by default.
        shapes: number of different batch shapes. The first step with each shape may compile. The
            second step with the shape of the very first batch may compile, too.

    Attributes:
        recompiles: number of unexpected compilations.
    """

    def __init__(self, backend, settled: int = _SETTLED, shapes: int = 1):
        self._backend = backend
        self._settled = settled
        self._shapes_expected = shapes
        self._steps = 0
        self._messages = 0
        self.recompiles = 0
        self._shapes: tuple | None = None  # of the last batch
        self._seen_shapes: set[tuple] = set()
        self._checks_graphs = False
        # By the position of a graph in its step, because a step may be cut into several graphs.
        self._seen_graphs: set[tuple[int, bytes]] = set()
        self._texts: dict[int, str] = {}

    @property
    def compiles(self) -> int:
        """Number of graphs that this process has compiled so far; 0 without a compiler."""
        graphs, _ = self._backend.compiles() or (0, 0.0)
        return graphs

    def expect(self) -> None:
        """Expect a compilation in the next step, so that `end_step` does not report it."""
        self._settled = max(self._settled, self._steps + 1)

    def start_step(self, batch: object) -> None:
        """Begin a step.

        Args:
            batch: the tensors of the step's batch, nested in any way.
        """
        self._compiles_before = self._backend.compiles()
        if self._compiles_before is None:
            return
        self._batch = batch
        self._previous_shapes = self._shapes
        self._shapes = _shapes(batch)
        self._checks = 0
        self._changes: list[str] = []

    def check_graph(self, model, *tensors) -> None:
        """Compare the graph that the step has recorded with the graphs of earlier steps.

        Call this method at the end of the step, before the graph runs. In a dry run on several
        cores, averaging the gradients ends a graph, too, so call this method before it as well.

        Args:
            model: the model, whose parameters, gradients and buffers are in the graph.
            *tensors: other tensors of the graph, such as the loss.
        """
        if not self._checks_graphs:
            return
        parameters = list(model.parameters())
        # The graph contains all operations on which these tensors depend. Gradients must be listed,
        # because the optimizer has not used them yet.
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        tensors = [*tensors, *gradients, *parameters, *model.buffers()]
        position = self._checks
        self._checks += 1
        key = (position, graph_key(tensors))
        # The text of a ResNet-34's graph takes 60 ms, so only new graphs are written as text.
        if key in self._seen_graphs:
            return
        self._seen_graphs.add(key)
        text = graph_text(tensors)
        earlier = self._texts.get(position)
        self._texts[position] = text
        self._changes.append(difference(earlier, text) if earlier else "")

    def end_step(self, step: int) -> str | None:
        """End the step; return a message if the step was compiled again.

        Args:
            step: the number of the step, for the message.

        Returns:
            a message with the reason and the fix; None if the step was not compiled again, if its
            compilation was expected or has no known reason, or after five messages.
        """
        if self._compiles_before is None:
            return None
        graphs, seconds = self._backend.compiles()
        graphs_before, seconds_before = self._compiles_before
        is_known_shape = self._shapes in self._seen_shapes
        self._steps += 1
        # If the first step creates the optimizer's state, the next step with its shape has another
        # graph, so this shape still counts as new. With `settled=1`, there is no such state.
        if self._steps > 1 or self._settled <= 1:
            self._seen_shapes.add(self._shapes)
        batch = self._batch
        self._batch = None  # release the batch's memory
        is_expected = not is_known_shape and len(self._seen_shapes) <= self._shapes_expected
        if graphs == graphs_before or self._steps <= self._settled or is_expected:
            return None
        self.recompiles += graphs - graphs_before
        if self._messages == _MOST_MESSAGES:
            return None
        reason = self._reason() if is_known_shape else self._new_shape(batch)
        if reason is None:
            return None
        self._messages += 1
        if self._messages == _MOST_MESSAGES:
            self._enable_graph_checks(False)
            further = "tpukit.profiling.report(core) counts further compiles"
            reason += f"\n  note:  this is the last of these messages; {further}"
        return f"step {step} compiled again, {seconds - seconds_before:.1f} s: {reason}"

    def _enable_graph_checks(self, wanted: bool) -> None:
        self._checks_graphs = wanted
        record_lines(wanted)

    def _new_shape(self, batch: object) -> str:
        fact = _changed_shapes(batch, self._previous_shapes)
        fix = "batches of one shape: core.batches makes them; in a DataLoader, drop_last=True"
        return explain(fact, fix=fix)

    def _reason(self) -> str | None:
        """Return why a step on a batch of a known shape was compiled again; None if unknown."""
        if not self._checks_graphs:
            # The graph of this step has run already, so only later graphs can be compared.
            self._enable_graph_checks(True)
            again = "if it happens again, the message names the change in the graph"
            return f"the shape of the batch was seen before; {again}"
        if not self._checks:
            fix = "call monitor.check_graph(model, loss) at the end of the step"
            fact = "the shape of the batch was seen before"
            return explain(fact, fix=f"{fix}, which finds the cause")
        if not self._changes:
            known = "the model and the loss are computed as before"
            fix = "compute or keep the tensor in every step; or after the step, from its results"
            fact = f"{known}, so another tensor was computed or kept in this step"
            return explain(fact, fix=fix)
        # An empty text means that there was no earlier graph to compare with.
        return next((change for change in self._changes if change), None)


def difference(before: str, after: str) -> str:
    """Return the first difference between two graphs and its fix as one message."""
    fact, fix = what_differs(before, after)
    return explain(fact, fix=fix)


def what_differs(before: str, after: str) -> tuple[str, str]:
    """Return (the first difference between two graphs, its fix).

    Args:
        before: the earlier graph as HLO text.
        after: the later graph as HLO text. If the texts contain source lines (see `record_lines`),
            the result names the line of Python that recorded the difference.
    """
    old = _operations(before)
    new = _operations(after)
    gone = Counter(old) - Counter(new)
    come = Counter(new) - Counter(old)
    if any(_kind(line) != "constant" for line in come):
        # If a shape changes, constants change with it, such as the divisor of a mean. These are not
        # the cause, so leave them out.
        gone = _without_constants(gone)
        come = _without_constants(come)
    if not gone and not come:
        fact = "the graphs differ only in the order of operations"
        return fact, "call the parts of the model in the same order in every step"
    now = next((line for line in new if line in come), None)
    was = None
    # Only graphs with the same number of operations have an old operation that became the new one.
    if now and len(old) == len(new):
        was = next((line for line in old if line in gone and _kind(line) == _kind(now)), None)
    if was is None:
        first = now or next(line for line in old if line in gone)
        counts = f"the graph has {len(new):,} operations, before {len(old):,}"
        fact = f"{counts}; the first that differs: {_described(first)}"
        fix = f"the same operations in every step: {_INSTEAD_OF_IF}"
        return fact + (_place(after, now) if now else _place(before, first)), fix
    if _kind(now) == "constant":
        fact = f"the constant {_arguments(was)} became {_arguments(now)}"
        reason = "its value is passed to the graph and is not part of it"
        fix = f"torch.tensor([value], device=core.device): {reason}"
    else:
        fact = f"{_described(was)} became {_described(now)}"
        instead = "a mask instead of a slice, padding instead of a cut"
        fix = f"the same shapes and positions in every step: {instead}"
    return fact + _place(after, now), fix


_INSTEAD_OF_IF = "torch.where instead of if, a tensor [x] for a number that is 0 or 1"


def _without_constants(lines: Counter[str]) -> Counter[str]:
    return Counter(line for line in lines if _kind(line) != "constant")


def _operations(text: str) -> list[str]:
    """Return the operations of a graph, one line each, as `_without_numbers` writes them."""
    lines = map(_without_numbers, text.splitlines())
    return [line for line in lines if _OPERATION.match(line)]


def _without_numbers(line: str) -> str:
    """Remove metadata and numbers from an operation, so that equal operations have equal texts."""
    operation = line.split(", metadata={")[0]
    return _NUMBERS.sub(r"\1", operation)


def _kind(line: str) -> str:
    return _OPERATION.match(line)[2]


def _arguments(line: str) -> str:
    return _OPERATION.match(line)[3].split(")")[0]


def _described(line: str) -> str:
    """Return an operation as a short text: `slice f32[4,5]`, and its attributes in brackets."""
    shape, kind, rest = _OPERATION.match(line).groups()
    without_layout = re.sub(r"{[0-9,]*}", "", shape)
    _, end_of_arguments, attributes = rest.rpartition("), ")
    if end_of_arguments and attributes:
        return f"{kind} {without_layout} ({attributes[:60]})"
    return f"{kind} {without_layout}"


def _place(text: str, line: str) -> str:
    """Return the line of user code that recorded an operation: ", near `loss = ...`", or "".

    If the operation has no line outside of torch and tpukit, the line of one of the next 50
    operations is used.
    """
    import torch

    inside = (str(Path(torch.__file__).parent), _KIT)
    lines = text.splitlines()
    # `line` has no numbers, so look for it among the lines without numbers.
    plain = list(map(_without_numbers, lines))
    start = plain.index(line) if line in plain else len(lines)
    for match in filter(None, map(_SOURCE.search, lines[start : start + _NEAR])):
        file = _file_name(match[1])
        number = int(match[2])
        if not file.startswith(inside):
            code = linecache.getline(file, number).strip()
            return f", near `{code}`" if code else f", near {Path(file).name}:{number}"
    return ""


def _file_name(escaped: str) -> str:
    """Decode the name of a file, which HLO text writes with escapes."""

    def unescaped(escape: re.Match) -> bytes:
        content = escape[1]
        if len(content) == 3:
            return bytes([int(content, 8)])
        return _ESCAPED.get(content, content)

    return os.fsdecode(_ESCAPE.sub(unescaped, escaped.encode()))


def _shapes(batch: object) -> tuple:
    """Return (shape, dtype) of every tensor in a batch."""
    # Most batches are tuples or lists. torch's tree_leaves takes nearly three times as long.
    if type(batch) in (tuple, list):
        return tuple(itertools.chain.from_iterable(map(_shapes, batch)))
    if hasattr(batch, "dtype"):
        return ((batch.shape, batch.dtype),)
    from torch.utils import _pytree as tree

    leaves = tree.tree_leaves(batch)
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves if hasattr(leaf, "dtype"))


def _changed_shapes(batch: object, before: tuple | None) -> str:
    """Describe the tensors of a batch whose shape or dtype differs from the previous step's."""
    from torch.utils import _pytree as tree

    leaves = tree.tree_flatten_with_path(batch)[0]
    named = [(tree.keystr(path), leaf) for path, leaf in leaves if hasattr(leaf, "dtype")]
    if before is None or len(named) != len(before):
        return f"the batch has {len(named)} tensors, before {len(before or ())}"
    changed = []
    for (name, leaf), was in zip(named, before, strict=True):
        if (leaf.shape, leaf.dtype) != was:
            now = _described_tensor(leaf.shape, leaf.dtype)
            changed.append(f"batch{name} is {now}, before {_described_tensor(*was)}")
    return "; ".join(changed[:2]) or "the batch is nested in another way"


def _described_tensor(shape, dtype) -> str:
    return f"{tuple(shape)} {dtype}".replace("torch.", "")
