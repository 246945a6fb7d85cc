"""PyTorch's check of operations in place, made short where nothing can be wrong.

PyTorch runs each operation in place on an XLA tensor a second time, on tensors without values, to refuse one that would
change the shape or the dtype of what it writes to. It does that in Python, 0.1 ms for each: half of the time in which a
step of a ResNet-34 with Adam is recorded (`benchmarks/recording.py`), and longer than a TPU takes for the step. An
optimiser's operations are of tensors of one shape and one dtype. These are answered at once here; for all others
PyTorch's own function is called, as ever.

TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE=1 would be as quick, and leaves out what it should not: `total += losses`
then changes the shape of `total`, `x.split([1, 5])` drops values, and `x.split(-1)` never returns.
"""

import functools
import warnings
from collections.abc import Callable

# With a tensor of no dimensions, such as a number that PyTorch has made a tensor, these give what they write to.
_WITH_NUMBERS = ("add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor")
_OF_ONE_KIND = ("addcmul_", "addcdiv_", "lerp_.Scalar", "lerp_.Tensor")


@functools.cache
def shorten_checks() -> object:
    """Do so in this process, for good; return what keeps it."""
    import torch
    from torch._decomp import meta_table

    kept = torch.library.Library("aten", "IMPL", "Meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a function of PyTorch's is replaced, which it says
        for name in (*_WITH_NUMBERS, *_OF_ONE_KIND):
            operation, _, overload = name.partition(".")
            whole = meta_table.get(getattr(getattr(torch.ops.aten, operation), overload or "default"))
            if whole is not None:
                kept.impl(name, _shortened(whole, numbers=name in _WITH_NUMBERS), allow_override=True)
    return kept


def _shortened(whole: Callable, *, numbers: bool) -> Callable:
    import torch

    def check(written, *args, **kwargs):
        if written.is_floating_point() and all(is_right(value, written) for value in (*args, *kwargs.values())):
            return written
        return whole(written, *args, **kwargs)

    def is_right(value, written) -> bool:
        if not isinstance(value, torch.Tensor):
            return type(value) in (int, float)
        if value.shape == written.shape and value.dtype == written.dtype:
            return True
        return numbers and value.ndim == 0 and not value.is_complex()

    return check
