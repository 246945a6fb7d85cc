"""The one table of TPUs: what a chip of each generation has, and the TPUs of one host by the names people say."""

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from tpukit.essentials.show import WrongValue

# Compute Engine's list price of a chip for an hour on demand in the US, as SkyPilot's catalogue v8 had it in November
# 2026. Other regions cost up to a fifth more, spot less; Vertex AI bills by its own list.
PRICES_OF = "Compute Engine's list prices in the US, November 2026"


@dataclass(frozen=True)
class Generation:
    """A kind of chip: PCI ids as torch_xla, tpu_info and torch_tpu have them, figures from Google Cloud's page of each.

    A v2's speed is not on its page, but in "A Domain Specific Supercomputer for Training ..." (2020). The clock is on
    none: it is what the peak follows from. A v5e has four units of 128 x 128 multiply-adds:
    4 x 128 x 128 x 2 x 1.5e9 = 197e12; a v6e four of 256 x 256 at 1.75e9 = 918e12.
    """

    pci: str  # device; v2 and v3 share one and differ in their subsystem
    subsystem: str
    tensor_cores: int  # of a chip
    cores: int  # of a chip, as PyTorch sees it: the two TensorCores of a v4 or v5p work as one
    gib: int = 0  # of HBM, a core, as the next three
    teraflops: float = 0  # a second, in bfloat16, at most
    gigabytes: float = 0  # of HBM a second, at most
    gigahertz: float = 0
    dollars: float = 0  # of a chip, an hour; see PRICES_OF


GENERATIONS = {
    "v2": Generation("0x0027", "0x004e", 2, 2, 8, 22.9, 350, 0.70, 1.125),
    "v3": Generation("0x0027", "0x004f", 2, 2, 16, 61.5, 450, 0.94, 2.00),
    "v4": Generation("0x005e", "", 2, 1, 32, 275, 1228, 1.05, 3.22),
    "v5e": Generation("0x0063", "", 1, 1, 16, 197, 819, 1.50, 1.20),
    "v5p": Generation("0x0062", "", 2, 1, 95, 459, 2765, 1.75, 4.20),
    "v6e": Generation("0x006f", "", 1, 1, 32, 918, 1640, 1.75, 2.70),
    "7x": Generation("0x0076", "", 2, 2),  # recognised, but no TPU below: torch_xla up to 2.9 does not know it
}


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
    accelerator_type: str  # as the Cloud TPU API, gcloud, SkyPilot and dstack name it
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
