"""Convert tensors of any dtype for collectives that support only some dtypes.

gloo and NCCL do not support int16, uint16 to uint64, complex numbers and float8 (torch 2.8 and
2.9: "Invalid scalar type"). TPUs support them, so a dry run must support them, too.

    gather      [-1000, 24] int16    sent as 4 bytes
    all_reduce  [-1000, 24] int16    sent as int32, and converted back to int16
"""

import math


def as_bits(tensor):
    """Return a view of a contiguous tensor, in a dtype that gloo can copy."""
    import torch

    if tensor.dtype in _carried():
        return tensor
    return tensor.resolve_conj().view(torch.uint8)


def as_numbers(tensor, op: str):
    """Return a tensor in a dtype that gloo can reduce. Complex numbers become pairs.

    For "min" and "max" of float tensors the result has one more axis at the front, of length 2:
    the numbers, in which 0 replaces NaN; and a flag per number, which is nonzero for NaN.

    Args:
        tensor: a tensor of any dtype.
        op: "sum", "mean", "min" or "max".
    """
    import torch

    if tensor.is_floating_point() and op in ("min", "max"):
        # gloo's result depends on the rank of the core that has a NaN. So the NaNs travel as flags.
        wide = tensor if tensor.dtype in _carried() else tensor.to(torch.float32)
        flag = 1 if op == "max" else -1
        flags = torch.zeros_like(wide).masked_fill(wide.isnan(), flag)
        return torch.stack([wide.masked_fill(wide.isnan(), 0), flags])
    if tensor.dtype in _carried():
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype == torch.uint64:
        return tensor.view(torch.int64) ^ _flipped(op)
    return tensor.to(_wider(tensor.dtype))


def from_numbers(numbers, dtype, op: str):
    """Convert the result of a collective on `as_numbers(tensor, op)` back to the tensor's dtype.

    Args:
        numbers: the result.
        dtype: the dtype of the tensor before `as_numbers`.
        op: the same as in `as_numbers`.
    """
    import torch

    if dtype.is_floating_point and op in ("min", "max"):
        numbers, flags = numbers
        numbers = numbers.masked_fill(flags != 0, math.nan)
    if numbers.dtype == dtype:
        return numbers
    if dtype.is_complex:
        return torch.view_as_complex(numbers)
    if dtype == torch.uint64:
        return (numbers ^ _flipped(op)).view(dtype)
    return numbers.to(dtype)


def _carried() -> tuple:
    """Return the dtypes that gloo and NCCL support."""
    import torch

    whole = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
    return (*whole, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _flipped(op: str) -> int:
    """Return the bits to flip, so that uint64 numbers keep their order when read as int64."""
    return -(2**63) if op in ("min", "max") else 0


def _wider(dtype):
    """Return a dtype that gloo supports and that can represent every number of `dtype`."""
    import torch

    if dtype.is_floating_point:
        return torch.float32
    return torch.int64 if dtype == torch.uint32 else torch.int32
