"""Machines with TPU chips as the stand-in plays them, and the environment that makes torch_xla see one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.show import WrongValue
from tpukit.measure import find_tpu


@dataclass(frozen=True)
class Shape:
    """A machine with TPU chips. torch_xla starts one process a chip, with one device thread a core of it."""

    name: str
    generation: str
    chips: int
    cores: int = 1  # of a chip: two on a v2 or v3
    environ: Mapping[str, str] = field(default_factory=dict)  # what the machine's own image sets


def rehearsal(cores: int) -> Shape:
    """Return a machine of 1 to 8 v5e chips, one core each; with 3, 5 or 7 it is one that Google does not build."""
    if not 1 <= cores <= 8:
        raise WrongValue(f"the stand-in plays 1 to 8 cores, got {cores}", fix="pass a number from 1 to 8")
    bounds = {4: "2,2,1", 6: "2,3,1", 8: "2,4,1"}.get(cores, f"{cores},1,1")
    return Shape(f"rehearsal of {cores}", "v5e", cores, environ=_image(f"v5litepod-{cores}", bounds))


def torch_tpu_rehearsal(cores: int) -> Shape:
    """Return a machine of v4 chips for TorchTPU, to which a chip is one core; of 1, 2, 4 or 8, as it knows them."""
    bounds = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}.get(cores)
    if bounds is None:
        raise WrongValue(f"TorchTPU runs on 1, 2, 4 or 8 chips, got {cores}", fix="pass one of these numbers")
    return Shape(f"TorchTPU on {cores}", "v4", cores, environ=_image(f"v4-{2 * cores}", bounds))


def _image(accelerator: str, bounds: str, **others: str) -> dict[str, str]:
    # TPU_SKIP_MDS_QUERY: torch_xla asks these variables instead of a metadata server, which is not here.
    return {
        "TPU_ACCELERATOR_TYPE": accelerator,
        "TPU_CHIPS_PER_HOST_BOUNDS": bounds,
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        **others,
    }


# By name. Colab's and Kaggle's variables as their images and users' dumps had them in August 2026: Colab's one chip
# advertises the bounds of four, and Kaggle's address is none.
_KAGGLE = {"TPU_PROCESS_ADDRESSES": "local", "ISTPUVM": "1"}
_COLAB = {"COLAB_TPU_1VM": "1"}
_IMAGES = {
    "colab v5e-1": _image("v5e-1", "2,2,1", **_COLAB),
    "colab v6e-1": _image("v6e-1", "2,2,1", **_COLAB),
    "kaggle v5e-8": _image("v5litepod-8", "2,4,1", **_KAGGLE),
    "v3-8": _image("v3-8", "2,2,1"),
    "v4-8": _image("v4-8", "2,2,1"),
}
SHAPES = {
    name: Shape(name, tpu.generation, tpu.chips, tpu.cores // tpu.chips, environ)
    for name, environ in _IMAGES.items()
    for tpu in [find_tpu(name.split()[-1])]
}


def environment(shape: Shape, *, library: Path, plugin: Path, memory: str) -> dict[str, str]:
    """Return the variables that make torch_xla see this machine, for the environment its workers start with.

    They hold for workers of one run at a time: those of the run before must have ended. What torch_xla sets for each
    worker (TPU_PROCESS_BOUNDS, CLOUD_TPU_TASK_ID and so on) is not among them, and must not be set already. `memory` is
    where the processes meet, from `shared_memory.meeting_place`.
    """
    return {
        **shape.environ,
        "PJRT_DEVICE": "TPU",
        "TPU_LIBRARY_PATH": str(library),
        "STANDIN_PLUGIN": str(plugin),
        "STANDIN_MEMORY": memory,
        "STANDIN_CHIPS": str(shape.chips),
        "STANDIN_CORES": str(shape.cores),
    }
