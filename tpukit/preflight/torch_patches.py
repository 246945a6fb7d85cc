"""Patches of torch in the process that records a step; each is listed in docs/in_sync.md.

That process records one step and ends. No value that it computes is a result.

check_torch_save
    changes     `torch.serialization._open_zipfile_writer`
    because     torch 2.8 and 2.9 open the file of `torch.save` in C++, without an audit event, so
                the guard of files would not see it
    upstream    none; audit events are optional for extensions (PEP 578)
    until       torch raises the audit event "open"

leave_large_tensors_empty
    changes     `torch.Tensor.normal_` and `torch.Tensor.uniform_`
    because     the random weights of a large model would take minutes and much memory
    upstream    none; `torch.device("meta")` needs changes in the user's code
    until       a step can be recorded without weights
"""

from collections.abc import Callable

_LARGE = 2**24  # elements; from this size on, 64 MiB of float32, a tensor is not filled


def check_torch_save(check: Callable[[object], None]) -> None:
    """Call a function with the file of each `torch.save`, before the file is opened.

    Other modules may have imported `torch.save` under any name, so the function that `torch.save`
    calls is patched.

    Args:
        check: a function that gets the path or file object, and raises an error to refuse it.
    """
    import torch.serialization

    opened = torch.serialization._open_zipfile_writer

    def open_checked(name_or_buffer):
        check(name_or_buffer)
        return opened(name_or_buffer)

    torch.serialization._open_zipfile_writer = open_checked


def leave_large_tensors_empty() -> None:
    """From now on, do not fill large tensors with random numbers in this process.

    Linux provides memory at the first write, so tensors without a write take no space. The values
    do not matter, because no value from the simulated device is a result. Tensors of
    `torch.nn.init.trunc_normal_` still take space, because it computes with all their numbers.
    """
    import torch

    def unless_large(fill: Callable) -> Callable:
        def filled(tensor, *args, **options):
            if tensor.numel() >= _LARGE:
                return tensor
            return fill(tensor, *args, **options)

        return filled

    for name in ("normal_", "uniform_"):
        setattr(torch.Tensor, name, unless_large(getattr(torch.Tensor, name)))
