"""Operations in place on XLA tensors, checked as PyTorch checks them; those of an optimiser not checked at all.

PyTorch runs each operation in place a second time, on tensors without values, to refuse one that would change the shape
or the dtype of what it writes to. For XLA tensors it does so in Python: two thirds of the time in which a step of a
ResNet-34 with Adam is recorded, and longer than a TPU takes for the step. It can be left out, for a process as a whole;
but then `total += losses` changes the shape of `total` without a word. So it is left out, and done here instead, for
everything but the steps of torch.optim's optimisers, which do the same again and again, and right.
"""

import contextlib
import os
import threading

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree

# PyTorch reads it once in a process, at the first operation in place that it would check. "0" leaves all as it was.
_LEFT_OUT = "TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE"


def in_place_checks() -> contextlib.AbstractContextManager:
    """Have PyTorch leave its check out in this process, and make it in this thread within, but in no optimiser."""
    os.environ.setdefault(_LEFT_OUT, "1")
    return InPlaceChecks() if os.environ[_LEFT_OUT] == "1" else contextlib.nullcontext()


class InPlaceChecks(TorchFunctionMode):
    """Within, in this thread, operations in place raise PyTorch's own errors; those of an optimiser are not checked."""

    def __enter__(self):
        self._thread, self._unchecked = threading.get_ident(), None
        self._hooks = (
            register_optimizer_step_pre_hook(lambda *_: self._begin_optimizer()),
            register_optimizer_step_post_hook(lambda *_: self._end_optimizer()),
        )
        return super().__enter__()

    def __exit__(self, *error):
        self._end_optimizer()
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__[-1] == "_" and _may_fail(func, args, kwargs):
            checked, named = tree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
            func(*checked, **named)
        return func(*args, **kwargs)

    def _begin_optimizer(self) -> None:
        self._end_optimizer()  # a step that raised has not come to its end
        if threading.get_ident() == self._thread:  # hooks are called for the optimisers of all threads
            self._unchecked = torch._C.DisableTorchFunction()
            self._unchecked.__enter__()

    def _end_optimizer(self) -> None:
        if self._unchecked is not None and threading.get_ident() == self._thread:
            self._unchecked.__exit__(None, None, None)
            self._unchecked = None


def _may_fail(func, args: tuple, kwargs: dict) -> bool:
    """Say whether it writes to an XLA tensor what may have another shape or dtype."""
    written = args[0] if args and not func.__name__.endswith("__") else None
    if not isinstance(written, torch.Tensor) or written.device.type != "xla":
        return False
    other = torch.Tensor if written.is_floating_point() else (torch.Tensor, float)
    return any(isinstance(value, other) for value in (*args[1:], *kwargs.values()))


def _without_values(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
