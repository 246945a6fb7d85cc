"""Launches without progress, and the backends on which a machine without a TPU runs them."""

import contextlib
import gc

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
    """Return the living processes below this one, without Python's tracker of shared memory.

    Python starts the tracker with the first process of multiprocessing, and it lives as long as this process.
    """
    gc.collect()  # the loader processes of a loop that another test has left
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_tracker = any("resource_tracker" in word for word in child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not is_tracker:
                found.append(child)
    return found


def quietly(fn, *args, cores=2, **options):
    """Launch a function on two cores, and show nothing."""
    return launch(fn, *args, cores=cores, progress="off", **options)
