"""Launches without progress, and the backends on which a machine without a TPU runs them."""

import psutil
import pytest
import torch

from tpukit import launch

# Plain CPU processes and XLA:CPU: the same worker function, the same answers.
DRY_RUNS = ["cpu", pytest.param("xla:cpu", marks=pytest.mark.xla)]


# The dtypes of tensors that every collective takes.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def children():
    """Return the living processes below this one."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    ]


def quietly(fn, *args, cores=2, **options):
    """Launch a function on two cores, and show nothing."""
    return launch(fn, *args, cores=cores, progress="off", **options)
