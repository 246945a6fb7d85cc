"""Carry tensors of any dtype through collectives that know only some of them.

gloo and NCCL have no int16, no wide unsigned numbers, no complex numbers and no float8 (torch 2.8
and 2.9: "Invalid scalar type"). TPUs have them, so a dry run must have them too.

    gather      [-1000, 24] int16    travels as 4 bytes
    all_reduce  [-1000, 24] int16    travels as int32, and becomes int16 again
"""


def as_bits(tensor):
    """Return a contiguous tensor in a dtype that gloo can copy; the same memory."""
    import torch

    if tensor.dtype in _carried():
        return tensor
    return tensor.resolve_conj().view(torch.uint8)


def as_numbers(tensor, op: str):
    """Return a tensor in a dtype that gloo can reduce. Complex numbers become pairs.

    Args:
        op: "sum", "mean", "min" or "max".
    """
    import torch

    if tensor.dtype in _carried():
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype == torch.uint64:
        return tensor.view(torch.int64) ^ _flipped(op)
    return tensor.to(_wider(tensor.dtype))


def from_numbers(numbers, dtype, op: str):
    """Return the result of a collective on `as_numbers(tensor, op)` in the tensor's own dtype."""
    import torch

    if numbers.dtype == dtype:
        return numbers
    if dtype.is_complex:
        return torch.view_as_complex(numbers)
    if dtype == torch.uint64:
        return (numbers ^ _flipped(op)).view(dtype)
    return numbers.to(dtype)


def _carried() -> tuple:
    """Return the dtypes that gloo and NCCL have."""
    import torch

    whole = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
    return (*whole, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _flipped(op: str) -> int:
    """Return the bits to flip, so that unsigned numbers have the same order as signed ones."""
    return -(2**63) if op in ("min", "max") else 0


def _wider(dtype):
    """Return a dtype that gloo has, and that holds every number of another one."""
    import torch

    if dtype.is_floating_point:
        return torch.float32
    return torch.int64 if dtype == torch.uint32 else torch.int32
