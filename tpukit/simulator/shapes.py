"""Describe machines with TPU chips for the simulator, and the environment that torch_xla needs."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.display import InvalidValueError
from tpukit.profiling import find_tpu

# As one host of a v5e has at most.
_MOST_CORES = 8


@dataclass(frozen=True)
class Shape:
    """A machine with TPU chips.

    torch_xla starts a process per chip, with one device thread per core of it.

    Attributes:
        chips: number of chips of the machine.
        cores: number of cores per chip; 2 on v2 and v3.
        environ: the environment variables that the image of such a machine sets.
    """

    name: str
    generation: str
    chips: int
    cores: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)


def dry_run(cores: int) -> Shape:
    """Return a machine of 1 to 8 v5e chips with one core each; Google builds none with 3, 5 or 7.

    Raises:
        ValueError: the number is not 1 to 8.
    """
    if not 1 <= cores <= _MOST_CORES:
        fact = f"the simulator has 1 to 8 cores, got {cores}"
        raise InvalidValueError(fact, fix="pass a number from 1 to 8")
    bounds = {4: "2,2,1", 6: "2,3,1", 8: "2,4,1"}.get(cores, f"{cores},1,1")
    environ = _image(f"v5litepod-{cores}", bounds)
    return Shape(f"dry run of {cores}", "v5e", chips=cores, environ=environ)


def torch_tpu_dry_run(cores: int) -> Shape:
    """Return a machine of v4 chips for TorchTPU, which treats a chip as a single core.

    Raises:
        ValueError: the number is not 1, 2, 4 or 8.
    """
    bounds = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}.get(cores)
    if bounds is None:
        fact = f"TorchTPU runs on 1, 2, 4 or 8 chips, got {cores}"
        raise InvalidValueError(fact, fix="pass one of these numbers")
    # The name of a v4 machine counts TensorCores, two per chip.
    environ = _image(f"v4-{2 * cores}", bounds)
    return Shape(f"TorchTPU on {cores}", "v4", chips=cores, environ=environ)


def _image(accelerator: str, bounds: str, **others: str) -> dict[str, str]:
    return {
        "TPU_ACCELERATOR_TYPE": accelerator,
        "TPU_CHIPS_PER_HOST_BOUNDS": bounds,
        "TPU_HOST_BOUNDS": "1,1,1",
        # torch_xla reads these variables instead of a metadata server, which is not here.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        **others,
    }


# Colab's and Kaggle's variables by their images and by users' dumps, August 2026. Colab's one chip
# advertises the bounds of four, and Kaggle's address is not an address.
_KAGGLE = {"TPU_PROCESS_ADDRESSES": "local", "ISTPUVM": "1"}
_COLAB = {"COLAB_TPU_1VM": "1"}
_IMAGES = {
    "colab v5e-1": _image("v5e-1", "2,2,1", **_COLAB),
    "colab v6e-1": _image("v6e-1", "2,2,1", **_COLAB),
    "kaggle v5e-8": _image("v5litepod-8", "2,4,1", **_KAGGLE),
    "v3-8": _image("v3-8", "2,2,1"),
    "v4-8": _image("v4-8", "2,2,1"),
}


def _shape(name: str, environ: Mapping[str, str]) -> Shape:
    tpu = find_tpu(name.split()[-1])
    cores_per_chip = tpu.cores // tpu.chips
    return Shape(name, tpu.generation, chips=tpu.chips, cores=cores_per_chip, environ=environ)


SHAPES = {name: _shape(name, environ) for name, environ in _IMAGES.items()}


def environment(shape: Shape, *, library: Path, plugin: Path, memory: str) -> dict[str, str]:
    """Return the variables with which torch_xla's workers see this machine.

    They hold for the workers of one run at a time: those of the run before must have ended.
    torch_xla sets other variables for each worker (TPU_PROCESS_BOUNDS, CLOUD_TPU_TASK_ID and so
    on), which must not be set already.

    Args:
        shape: the machine.
        library: the simulated libtpu.
        plugin: the PJRT plugin for the CPU.
        memory: through which the processes communicate, from `meeting_place`.
    """
    return {
        **shape.environ,
        "PJRT_DEVICE": "TPU",
        "TPU_LIBRARY_PATH": str(library),
        "SIMULATOR_PLUGIN": str(plugin),
        "SIMULATOR_MEMORY": memory,
        "SIMULATOR_CHIPS": str(shape.chips),
        "SIMULATOR_CORES": str(shape.cores),
    }


@contextlib.contextmanager
def meeting_place() -> Iterator[str]:
    """Yield the path of a file in memory that this process and its forks share.

    The path is for SIMULATOR_MEMORY. Forks inherit the open file, so this process may close it.

    The system frees the file when the last process that has it open ends, also when all of them are
    killed. A file in /dev/shm would be left behind in that case, and is limited to the size of
    /dev/shm, 64 MB in a container.
    """
    file = os.memfd_create("tpukit-simulator")
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
