"""Launches without progress, and the backends on which a machine without a TPU runs them."""

import pytest

from tpukit import launch

# Plain CPU processes and XLA:CPU: the same worker function, the same answers.
DRY_RUNS = ["cpu", pytest.param("xla:cpu", marks=pytest.mark.xla)]


def quietly(fn, *args, cores=2, **options):
    """Launch a function on two cores, and show nothing."""
    return launch(fn, *args, cores=cores, progress="off", **options)
