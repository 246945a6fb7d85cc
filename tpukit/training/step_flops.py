"""Count the floating-point operations of `fit`, in the first step with each batch shape.

step 1    batches of length 64    counted during the forward pass: 1.9 GFLOP
step 2    batches of length 64    known: 1.9 GFLOP, without counting
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
        shapes: number of expected batch shapes.
        model: the model of the steps.
        loss: the loss of `fit`.

    Attributes:
        total: FLOPs of this core's forward and backward passes so far. None after a step whose
            operations could not be counted.
    """

    def __init__(self, core: Core, *, shapes: int, model, loss: Callable):
        self.total: int | None = 0
        self._core = core
        self._watched = (model, loss)
        self._has_shapes = shapes > 1
        self._known: dict[object, int] = {}  # by the shapes of a step's batches
        self._counter: FlopCounter | None = None  # while a step is counted
        # Preflight (`is_recording`) reads the FLOPs from the compiler.
        if core.backend.is_recording:
            self.total = None

    @contextlib.contextmanager
    def step(self, batches: tuple) -> Iterator[None]:
        """Add the FLOPs of the step in the block to `total`.

        Operations are counted in the first step of each batch shape; later steps of this shape add
        the same FLOPs. In every step, call the model and the loss in a `with` block of `forward()`.
        """
        if self.total is None:
            yield
            return
        # Without buckets, all steps have the same shapes, so they need not be read.
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
        problem = _problem(*self._watched, is_xla=self._core.backend.traced)
        if problem:
            self._give_up(problem)
        else:
            self._counter = FlopCounter()

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Count the operations of model and loss in the block, if this step is counted."""
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


def _problem(model, loss: Callable, *, is_xla: bool) -> str:
    """Return why the operations of a model or a loss cannot be counted; "" if they can be."""
    from torch import nn

    for part in (model, loss):
        if not can_watch(part, on_cpu=False):
            return "operations of a model or a loss of torch.compile cannot be counted"
        for layer in part.modules() if hasattr(part, "modules") else ():
            # In evaluation mode on CPU and CUDA, torch computes attention by a fused fast path.
            # While calls are watched, it uses single functions, which round differently.
            is_attention = isinstance(layer, nn.MultiheadAttention | nn.TransformerEncoderLayer)
            if not is_xla and is_attention and not layer.training:
                return "operations of attention in evaluation mode can be counted on XLA only"
    return ""
