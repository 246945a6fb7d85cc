"""Describe machines with TPU chips for the simulator, and the environment that torch_xla needs."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.display import InvalidValueError
from tpukit.profiling import find_tpu

# One host of v5e chips has at most eight.
_MOST_CORES = 8


@dataclass(frozen=True)
class Shape:
    """A machine with TPU chips.

    torch_xla starts a process per chip, and in it a thread per core of the chip.

    Attributes:
        name: the name of the machine in messages, such as "kaggle v5e-8".
        generation: the kind of chip, such as "v5e".
        chips: the number of chips of the machine.
        cores: the number of cores per chip: 2 on v2 and v3, otherwise 1.
        environ: the environment variables that the image of such a machine sets.
    """

    name: str
    generation: str
    chips: int
    cores: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)


def dry_run(cores: int) -> Shape:
    """Return a machine of v5e chips, each with one core.

    Args:
        cores: the number of chips, 1 to 8; Google's machines have 1, 4 or 8.

    Raises:
        ValueError: the number is not 1 to 8.
    """
    if not 1 <= cores <= _MOST_CORES:
        fact = f"the simulator has 1 to 8 cores, got {cores}"
        raise InvalidValueError(fact, fix="pass a number from 1 to 8")
    # The arrangement of the chips in x, y and z; torch_xla derives each chip's place from it.
    bounds = {4: "2,2,1", 6: "2,3,1", 8: "2,4,1"}.get(cores, f"{cores},1,1")
    environ = _image(f"v5litepod-{cores}", bounds)
    return Shape(f"dry run of {cores}", "v5e", chips=cores, environ=environ)


def torch_tpu_dry_run(cores: int) -> Shape:
    """Return a machine of v4 chips for TorchTPU, which treats a chip as a single core.

    Args:
        cores: the number of chips: 1, 2, 4 or 8.

    Raises:
        ValueError: the number is not 1, 2, 4 or 8.
    """
    bounds = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}.get(cores)
    if bounds is None:
        fact = f"TorchTPU runs on 1, 2, 4 or 8 chips, got {cores}"
        raise InvalidValueError(fact, fix="pass one of these numbers")
    # The number in the name of a v4 machine counts TensorCores, of which a chip has two.
    environ = _image(f"v4-{2 * cores}", bounds)
    return Shape(f"TorchTPU on {cores}", "v4", chips=cores, environ=environ)


def _image(accelerator: str, bounds: str, **others: str) -> dict[str, str]:
    """Return the environment variables that the image of a TPU machine sets.

    Args:
        accelerator: Google Cloud's name of the machine, such as "v5litepod-8".
        bounds: the number of chips along x, y and z, such as "2,4,1".
        others: the variables that only this image sets.
    """
    return {
        "TPU_ACCELERATOR_TYPE": accelerator,
        "TPU_CHIPS_PER_HOST_BOUNDS": bounds,
        "TPU_HOST_BOUNDS": "1,1,1",
        # With this, torch_xla reads the variables below instead of asking a metadata server, which
        # only Google Cloud has.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        **others,
    }


# The variables of Colab and Kaggle, from their images and from lists that users have published
# (August 2026). They contain errors: Colab's one chip has the bounds of four chips, and Kaggle's
# "local" is not an address.
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
    """Return the machine of an image; the last word of its name is Google's name of the TPU."""
    tpu = find_tpu(name.split()[-1])
    cores_per_chip = tpu.cores // tpu.chips
    return Shape(name, tpu.generation, chips=tpu.chips, cores=cores_per_chip, environ=environ)


SHAPES = {name: _shape(name, environ) for name, environ in _IMAGES.items()}


def environment(shape: Shape, *, library: Path, plugin: Path, memory: str) -> dict[str, str]:
    """Return the environment variables by which torch_xla's workers find a simulated machine.

    Before a run uses the `memory` of another run, all workers of the other run must have ended.
    torch_xla sets other variables for each worker (TPU_PROCESS_BOUNDS, CLOUD_TPU_TASK_ID and so
    on), which must not be set already.

    Args:
        shape: the machine.
        library: the path of the simulated libtpu.
        plugin: the path of the PJRT plugin for the CPU.
        memory: the path of the file through which the processes communicate, from
            `meeting_place`; "" for a single process.
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

    The path is the value of SIMULATOR_MEMORY. Forks inherit the open file, so they keep it after
    this process has closed it.

    The system frees the file when no process uses it any more, even if the processes are killed.
    A file in /dev/shm would remain then. Its size would also be limited to that of /dev/shm, 64 MB
    in a container.
    """
    file = os.memfd_create("tpukit-simulator")
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
