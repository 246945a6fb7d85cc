"""Why a step compiled again: the shape of a batch, a constant in the graph, or a tensor that was kept."""

import itertools
import linecache
import re
from collections import Counter
from pathlib import Path

_SETTLED = 3  # steps: the first creates the optimiser's state, so the second is another graph; from the third on, one
_LINES = 5  # told; a loop whose every step compiles would fill the notebook
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (\([^)]*\)|\S+) ([\w-]+)\((.*)$")
_NUMBERS = re.compile(r"(%[A-Za-z_-]+)[\d.]*|(?<=parameter\()\d+")  # they shift as soon as one operation is added
_SOURCE = re.compile(r'source_file="([^"]+)" source_line=(\d+)')
_HOME = str(Path(__file__).parents[1])  # the kit: errors blame the line of whoever called it


class RecompileMonitor:
    """Say which step compiled again, and what was different in it; on a CPU and on CUDA it does nothing.

    Costs 10 microseconds a step (measured), until the shapes of a batch do not explain a compile. From then on the
    graph of every step is identified, in 2 ms for a ResNet-34, and where it is new, compared with the one before.

        watch = RecompileMonitor(core.backend)
        for step, batch in enumerate(batches):
            watch.before(batch)
            with core.step():
                loss = ...
                watch.recorded(model, loss)
            if told := watch.after(step):
                core.print(told)

    Attributes:
        recompiles: graphs compiled in steps after the loop had settled.
    """

    def __init__(self, backend, settled: int = _SETTLED):
        self._backend = backend
        self._settled = settled
        self._steps = self._told = 0
        self.recompiles = 0
        self._shapes: tuple | None = None  # of the last batch
        self._seen: set[tuple] = set()
        self._armed = False
        self._keys: set[tuple[int, bytes]] = set()
        self._texts: dict[int, str] = {}  # of the newest graph, by its place among those of one step

    @property
    def compiles(self) -> int:
        """Graphs that this process has compiled so far, for whatever; 0 where nothing is compiled."""
        return (self._backend.compiles() or (0, 0.0))[0]

    def before(self, batch: object) -> None:
        """Begin a step on this batch, any nest of tensors."""
        self._then = self._backend.compiles()
        if self._then is None:
            return
        self._batch, self._before, self._shapes = batch, self._shapes, _shapes(batch)
        self._looks, self._changes = 0, []

    def recorded(self, model, *tensors) -> None:
        """Look at what the step has recorded, for this model and for tensors such as the loss, before it is run.

        Call it last thing in the step. Where something cuts the graph, as gradients do that are averaged in a rehearsal
        on several cores, call it before that as well.
        """
        if not self._armed:
            return
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        tensors = [*tensors, *gradients, *parameters, *model.buffers()]
        place, self._looks = self._looks, self._looks + 1
        key = (place, self._backend.graph_key(tensors))
        if key in self._keys:
            return
        self._keys.add(key)
        text, earlier = self._backend.graph_text(tensors), self._texts.get(place)
        self._texts[place] = text
        self._changes.append(difference(earlier, text) if earlier else "")

    def after(self, step: int) -> str | None:
        """End the step; say what was different if it compiled, after the first steps and the first few times."""
        if self._then is None:
            return None
        graphs, seconds = self._backend.compiles()
        known = self._shapes in self._seen
        self._seen.add(self._shapes)
        batch, self._batch = self._batch, None  # not kept from being freed
        self._steps += 1
        if graphs == self._then[0] or self._steps <= self._settled:
            return None
        self.recompiles += graphs - self._then[0]
        reason = self._reason(batch, known) if self._told < _LINES else None
        if reason is None:
            return None
        self._told += 1
        if self._told == _LINES:
            self._arm(False)
            reason += "\n  note:  no more of these will be told; core.report() counts them"
        return f"step {step} compiled again, {seconds - self._then[1]:.1f} s: {reason}"

    def _arm(self, wanted: bool) -> None:
        self._armed = wanted
        self._backend.record_lines(wanted)

    def _reason(self, batch: object, known: bool) -> str | None:
        if not known:
            what = _changed_shapes(batch, self._before)
            return f"{what}\n  fix:   batches of one shape: core.batches makes them; in a loader, drop_last=True"
        if not self._armed:
            self._arm(True)
            return "the batch has a shape seen before; should it happen again, the graph will say what changed"
        if not self._looks:
            return "the batch has a shape seen before\n  fix:   watch.recorded(model, loss) in the step finds out more"
        if not self._changes:
            return (
                "the model and the loss are computed as before, so another tensor was computed or kept in this step\n"
                "  fix:   do so in every step, or after it, from what the step returns"
            )
        return next((change for change in self._changes if change), None)  # none: the first that was looked at


def difference(before: str, after: str) -> str:
    """Say in a line what is different in a graph, and where it was written; both are HLO text."""
    old, new = (_operations(text) for text in (before, after))
    gone, come = Counter(old), Counter(new)
    gone, come = gone - come, come - gone
    if any(_kind(line) != "constant" for line in come):  # a mean's divisor changes with the shape: not the cause
        gone, come = (Counter(line for line in lines if _kind(line) != "constant") for lines in (gone, come))
    now = next((line for line in new if line in come), None)
    was = next((line for line in old if line in gone and now and _kind(line) == _kind(now)), None)
    if was and len(old) == len(new) and _kind(now) == "constant":
        what, fix = (
            f"the constant {_arguments(was)} became {_arguments(now)}",
            "torch.tensor([value], device=core.device) is sent to the graph and is no part of it",
        )
    elif was and len(old) == len(new):
        what, fix = (
            f"{_described(was)} became {_described(now)}",
            "the same shapes and positions in every step: a mask in place of a slice, padding in place of a cut",
        )
    elif gone or come:
        first = now or next(line for line in old if line in gone)
        what = f"the graph has {len(new):,} operations, it had {len(old):,}; the first that differs: "
        what, fix = (
            what + _described(first),
            "the same operations in every step: torch.where in place of if, a tensor [x] where a number may be 0 or 1",
        )
    else:
        return "the graph is the same but for the order of its operations\n  fix:   one order of the model's parts"
    return f"{what}{_place(after, now) if now else _place(before, first)}\n  fix:   {fix}"


def _operations(text: str) -> list[str]:
    """Return the lines of a graph, in order, without what says nothing about the computation."""
    lines = [line.split(", metadata={")[0] for line in text.splitlines()]
    return [_NUMBERS.sub(r"\1", line) for line in lines if _OPERATION.match(line)]


def _kind(line: str) -> str:
    return _OPERATION.match(line)[2]


def _arguments(line: str) -> str:
    return _OPERATION.match(line)[3].split(")")[0]


def _described(line: str) -> str:
    """Write an operation as `slice f32[4,5]`, with the attributes that make it what it is."""
    shape, kind, rest = _OPERATION.match(line).groups()
    attributes = rest.rpartition("), ")[2] if "), " in rest else ""
    return f"{kind} {re.sub(r'{[0-9,]*}', '', shape)}" + (f" ({attributes[:60]})" if attributes else "")


def _place(text: str, line: str) -> str:
    """Say which line of Python an operation came from: torch's own functions are passed over for what comes after."""
    import torch

    inside = (str(Path(torch.__file__).parent), _HOME)
    lines = text.splitlines()
    same = (_NUMBERS.sub(r"\1", other.split(", metadata={")[0]) == line for other in lines)
    start = next((number for number, found in enumerate(same) if found), len(lines))
    for match in (_SOURCE.search(other) for other in lines[start : start + 50]):
        if match and not match[1].startswith(inside):
            file, number = match[1], int(match[2])
            code = linecache.getline(file, number).strip()
            return f", near `{code}`" if code else f", near {Path(file).name}:{number}"
    return ""


def _shapes(batch: object) -> tuple:
    """Return (shape, dtype) of every tensor in a batch."""
    if type(batch) in (tuple, list):  # as most are; torch's tree_leaves takes nearly three times as long
        return tuple(itertools.chain.from_iterable(map(_shapes, batch)))
    if hasattr(batch, "dtype"):
        return ((batch.shape, batch.dtype),)
    from torch.utils import _pytree as tree

    return tuple((leaf.shape, leaf.dtype) for leaf in tree.tree_leaves(batch) if hasattr(leaf, "dtype"))


def _changed_shapes(batch: object, before: tuple | None) -> str:
    """Say which tensors of a batch are not as they were the step before."""
    from torch.utils import _pytree as tree

    leaves = tree.tree_flatten_with_path(batch)[0]
    named = [(tree.keystr(path), leaf) for path, leaf in leaves if hasattr(leaf, "dtype")]
    if before is None or len(named) != len(before):
        return f"the batch has {len(named)} tensors, it had {len(before or ())}"
    changed = [
        f"batch{name} is {_form(leaf.shape, leaf.dtype)}, it was {_form(*was)}"
        for (name, leaf), was in zip(named, before, strict=True)
        if (leaf.shape, leaf.dtype) != was
    ]
    return "; ".join(changed[:2]) or "the batch is nested in another way"


def _form(shape, dtype) -> str:
    return f"{tuple(shape)} {dtype}".replace("torch.", "")
