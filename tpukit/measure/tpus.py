"""The TPUs of one host by the names people say, and what each has."""

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from tpukit.essentials.machine import GENERATIONS
from tpukit.essentials.show import WrongValue


@dataclass(frozen=True)
class Tpu:
    """A TPU of one host. Its name counts chips for v5e and v6e, TensorCores for the others: a v3-8 has four chips."""

    name: str
    generation: str
    chips: int
    cores: int  # devices that PyTorch sees, each with a worker of its own
    hbm: int  # bytes of memory a core
    flops: float  # bfloat16 operations a second and core, at most
    bandwidth: float  # bytes of memory a second and core, at most
    clock: float  # cycles a second
    topology: str  # as libtpu names it
    accelerator_type: str  # as the Cloud TPU API, gcloud and SkyPilot name it
    dollars: float  # about what its chips cost an hour; see PRICES_OF


def _tpu(name: str, chips: int, shape: str) -> Tpu:
    generation = name.partition("-")[0]
    kind = GENERATIONS[generation]
    return Tpu(
        name,
        generation,
        chips,
        cores=chips * kind.cores,
        hbm=kind.gib * 2**30,
        flops=kind.teraflops * 1e12,
        bandwidth=kind.gigabytes * 1e9,
        clock=kind.gigahertz * 1e9,
        topology=f"{generation}:{shape}",
        accelerator_type=name.replace("v5e", "v5litepod"),
        dollars=chips * kind.dollars,
    )


_BY_TENSOR_CORES = {"v2-8": "2x2", "v3-8": "2x2", "v4-8": "2x2x1", "v5p-8": "2x2x1"}
_BY_CHIPS = {1: "1x1", 4: "2x2", 8: "2x4"}
TPUS = {name: _tpu(name, 4, shape) for name, shape in _BY_TENSOR_CORES.items()} | {
    f"{kind}-{chips}": _tpu(f"{kind}-{chips}", chips, shape)
    for kind in ("v5e", "v6e")
    for chips, shape in _BY_CHIPS.items()
}


def find_tpu(name: str | Tpu, *, among: Collection[str] = tuple(TPUS), without: str = "there is no TPU") -> Tpu:
    """Return the TPU of that name, also as Google's tools write it: v5litepod-8, tpu-v5litepod-8.

    Raises:
        ValueError: there is none among these; the message has the nearest. `without` says who has none.
    """
    if isinstance(name, Tpu):
        return name
    known = str(name).strip().lower().removeprefix("tpu-").replace("v5litepod", "v5e").replace("v5lite", "v5e")
    if known in among:
        return TPUS[known]
    generation, _, size = known.partition("-")
    why = f"{without} {known}" if known in TPUS else f"there is no TPU {name!r}"
    if size.isdigit() and int(size) > 8 and generation in GENERATIONS:
        why = f"{name} is no TPU of one host, and this kit works with those"
    near = difflib.get_close_matches(known, among, 1) or ["v5e-8"]
    raise WrongValue(f"{why}", found=f"there are {', '.join(among)}", fix=f'pass "{near[0]}", for example')
