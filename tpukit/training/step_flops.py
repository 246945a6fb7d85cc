"""The floating-point operations of the steps of `fit`, counted in the first step of each shape.

step 1    batches of length 64    counted in the forward pass: 1.9 GFLOP
step 2    batches of length 64    known, so nothing is watched
step 3    batches of length 128   counted: 4.1 GFLOP
"""

import contextlib
from collections.abc import Callable, Iterator

from tpukit.essentials.launcher import Core, FlopCounter
from tpukit.training.index_checks import can_watch


class StepFlops:
    """The FLOPs of all steps so far.

    Args:
        core: this core.
        shapes: how many shapes of steps are expected.
        model: its layers' modes are those of a training when the first step begins.
        loss: as for `fit`.

    Attributes:
        total: of the forward and backward passes of this core; None once a step was not counted.
    """

    def __init__(self, core: Core, *, shapes: int, model, loss: Callable):
        self.total: int | None = 0
        self._core = core
        self._watched = (model, loss)
        self._has_shapes = shapes > 1
        self._known: dict[object, int] = {}  # by the shapes of a step's batches
        self._counter: FlopCounter | None = None  # while a step is counted
        # Preflight takes the FLOPs from the compiler, and its core prints nothing.
        if core.backend.is_recording:
            self.total = None

    @contextlib.contextmanager
    def step(self, batches: tuple) -> Iterator[None]:
        """Add the FLOPs of the step within; `forward` is used within if they are not known yet."""
        if self.total is None:
            yield
            return
        form = _shapes_of(batches) if self._has_shapes else None
        if form not in self._known:
            self._begin()
        yield
        counter = self._counter
        self._counter = None
        if counter is not None:
            self._known[form] = counter.flops
            if counter.problem:
                self._give_up(counter.problem)
            elif not counter.flops:
                self._give_up("the model has no matrix product, convolution or attention")
        if self.total is not None:
            self.total += self._known[form]
            self._core.internal.add_flops(self._known[form])  # for `Core.mfu`

    def _begin(self) -> None:
        problem = _problem(*self._watched, on_cpu=not self._core.backend.traced)
        if problem:
            self._give_up(problem)
        else:
            self._counter = FlopCounter()

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Count the model and the loss within, if this step is counted."""
        if self._counter is None:
            return contextlib.nullcontext()
        return self._counter.counting()

    def _give_up(self, problem: str) -> None:
        self.total = None
        self._core.print(f"FLOP/s and MFU are not known: {problem}")


def _shapes_of(batches: tuple) -> tuple:
    from torch.utils import _pytree as tree

    leaves = tree.tree_leaves(batches)
    return tuple(tuple(leaf.shape) for leaf in leaves if hasattr(leaf, "shape"))


def _problem(model, loss: Callable, *, on_cpu: bool) -> str:
    """Return why the calls of a model or a loss cannot be watched; "" if they can."""
    from torch import nn

    for part in (model, loss):
        if not can_watch(part, on_cpu=False):
            return "calls of a model or a loss of torch.compile are not seen"
        for layer in part.modules() if hasattr(part, "modules") else ():
            # Its fast path on a CPU, in evaluation mode only, rounds otherwise than its functions,
            # which torch takes while calls are watched.
            is_attention = isinstance(layer, nn.MultiheadAttention | nn.TransformerEncoderLayer)
            if on_cpu and is_attention and not layer.training:
                return "on a CPU, attention in evaluation mode is not watched"
    return ""
