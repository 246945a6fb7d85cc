"""Count the floating-point operations (FLOPs) of a training step, from the shapes of its calls.

    F.linear(x, weight)    x (32, 784), weight (10, 784)    forward 2 x 32 x 784 x 10 = 0.5 MFLOP
                                                            forward and backward 3 x that

tpukit intercepts the calls of torch in the forward pass of a single step. It repeats each matrix
product, convolution and attention on meta tensors, which have shapes and no values, and applies the
formulas of `torch.utils.flop_counter`. The device does no additional work, no code of the user runs
twice, and later steps are not intercepted.

The backward pass of a product has two products of the same size: one gives the gradient of the
weight, the other that of the input. So a step counts 3 x the forward pass, as in PaLM
(arXiv:2204.02311, appendix B). A forward pass that activation checkpointing repeats is not counted.
A layer with a frozen weight counts 2 x if a gradient flows through it to its input, else 1 x.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator

# The functions that contain matrix products, by name: as functions, methods and operators.
_WITH_PRODUCTS = {
    *("mm", "bmm", "matmul", "__matmul__", "__rmatmul__", "addmm", "addmm_", "baddbmm", "baddbmm_"),
    *("addbmm", "addbmm_", "einsum", "tensordot", "inner", "chain_matmul", "multi_dot", "linear"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
    *("conv_transpose3d", "conv_tbc", "scaled_dot_product_attention"),
    *("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell"),
    *("gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "linalg_matmul", "linalg_multi_dot"),
}
_FORWARD = 1
_WITH_ONE_GRADIENT = 2  # of the input or of the weight
_WITH_BOTH_GRADIENTS = 3


class FlopCounter:
    """The FLOPs of the calls within `counting`.

    Attributes:
        flops: FLOPs of the forward and the backward pass of all calls so far.
        problem: the reason why a call could not be counted; "" if all calls were counted.
    """

    def __init__(self):
        self.flops = 0
        self.problem = ""

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls in the `with` block; set `problem` if that fails."""
        with _call_mode()(self):
            yield

    def add(self, function, args: tuple, kwargs: dict) -> None:
        """Add the FLOPs of a call, if it computes a matrix product."""
        name = getattr(function, "__name__", "")
        if name not in _WITH_PRODUCTS or self.problem:
            return
        try:
            self.flops += _passes(args, kwargs) * _forward_flops(function, args, kwargs)
        # A call that cannot be counted must not end the user's training.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            self.problem = f"{name} cannot be counted: {reason}"


def _passes(args: tuple, kwargs: dict) -> int:
    """Return how often a call's product is computed in the forward and backward pass together."""
    import torch
    from torch.utils import _pytree as tree

    is_checkpointed = not torch.is_grad_enabled() and _in_checkpoint()
    if not torch.is_grad_enabled() and not is_checkpointed:
        return _FORWARD
    factors = []
    for leaf in tree.tree_leaves((args, kwargs)):
        # A vector is a bias, whose gradient is a sum and no product.
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim > 1:
            factors.append(leaf)
    # In a checkpointed block without gradients, `requires_grad` of an activation is False although
    # the second pass computes its gradient.
    if not is_checkpointed and not any(factor.requires_grad for factor in factors):
        return _FORWARD
    for factor in factors:
        if isinstance(factor, torch.nn.Parameter) and not factor.requires_grad:
            return _WITH_ONE_GRADIENT
    # Also for the first layer, whose input needs no gradient: the definition is 3 x forward.
    return _WITH_BOTH_GRADIENTS


def _in_checkpoint() -> bool:
    """Return whether the calling code is in a checkpointed block.

    Such a block runs a second time in the backward pass. In the first pass, torch_xla's checkpoint
    and torch's checkpoint with `use_reentrant=True` run it without gradients.
    """
    frame = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if file.endswith(("torch/utils/checkpoint.py", "torch_xla/utils/checkpoint.py")):
            return True
        frame = frame.f_back
    return False


def _forward_flops(function, args: tuple, kwargs: dict) -> int:
    import torch
    from torch.utils import _pytree as tree

    def on_meta(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout is not torch.strided:
            raise ValueError("its FLOPs depend on the values of a sparse tensor")
        # Autocast would convert the types of the real call; the FLOPs do not depend on them.
        dtype = torch.float32 if leaf.is_floating_point() else leaf.dtype
        return torch.empty(leaf.shape, dtype=dtype, device="meta")

    # The call runs again on meta tensors, which computes shapes only and takes no device time.
    args, kwargs = tree.tree_map(on_meta, (args, kwargs))
    with torch.no_grad(), _operation_mode()() as operations:
        function(*args, **kwargs)
    return operations.flops


# The modes derive from classes of torch, which this module must not import at its start. They are
# cached, because a new class per count would stay in memory until the garbage collector runs.
@functools.cache
def _call_mode() -> type:
    from torch.overrides import TorchFunctionMode

    class CallMode(TorchFunctionMode):
        """Passes each call of a torch function to a counter, then makes the call."""

        def __init__(self, counter: FlopCounter):
            super().__init__()
            self._counter = counter

        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            self._counter.add(function, args, kwargs)
            return function(*args, **kwargs)

    return CallMode


@functools.cache
def _operation_mode() -> type:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    # FlopCounterMode does the same per module, with hooks for all threads of the process.
    class OperationMode(TorchDispatchMode):
        """Adds up the FLOPs of the operations of a call."""

        def __init__(self):
            super().__init__()
            self.flops = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            result = function(*args, **kwargs)
            formula = flop_registry.get(function._overloadpacket)
            if formula is not None:
                self.flops += formula(*args, **kwargs, out_val=result)
            return result

    return OperationMode
