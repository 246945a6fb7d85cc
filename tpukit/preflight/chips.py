"""What a step can be compiled for: TPUs of one host, with their memory, speed and price."""

from dataclasses import dataclass

from tpukit.cloud import PRICES_OF, Slice, find_slice

GIB = 2**30


@dataclass(frozen=True)
class _Generation:
    """One device of torch_xla: a core of a v2 or v3, a chip of the later ones. From Google Cloud's pages of each TPU.

    The clock is not on them: it is what the peak follows from. A v5e has four units of 128 x 128 multiply-adds:
    4 x 128 x 128 x 2 x 1.5e9 = 197e12; a v6e four of 256 x 256 at 1.75e9 = 918e12.
    """

    cores: int  # devices a chip
    hbm: int  # bytes
    flops: float  # a second, in bfloat16
    bandwidth: float  # bytes of HBM a second
    clock: float  # cycles a second
    topology: dict[int, str]  # by chips, as libtpu names it


_ONE = {1: "1x1", 4: "2x2", 8: "2x4"}
_GENERATIONS = {
    "v2": _Generation(2, 8 * GIB, 22.9e12, 350e9, 0.70e9, {4: "2x2"}),
    "v3": _Generation(2, 16 * GIB, 61.5e12, 450e9, 0.94e9, {4: "2x2"}),
    "v4": _Generation(1, 32 * GIB, 275e12, 1228e9, 1.05e9, {4: "2x2x1"}),
    "v5e": _Generation(1, 16 * GIB, 197e12, 819e9, 1.50e9, _ONE),
    "v5p": _Generation(1, 95 * GIB, 459e12, 2765e9, 1.75e9, {4: "2x2x1"}),
    "v6e": _Generation(1, 32 * GIB, 918e12, 1640e9, 1.75e9, _ONE),
}


@dataclass(frozen=True)
class Chip:
    """A TPU of one host, as `preflight(chip="v5e-8")` names it.

    Attributes:
        name: v3-8 counts cores, v5e-8 counts chips.
        generation: the kind of its chips.
        chips: of it.
        cores: devices that torch_xla sees, each with a worker of its own.
        hbm: bytes of memory a core.
        flops: bfloat16 operations a second and core, at most.
        bandwidth: bytes of memory a second and core, at most.
        clock: cycles a second.
        topology: as libtpu names it.
        bounds: chips of a host as libtpu wants to be told; "" where the topology says it.
        accelerator_type: as Google Cloud names it.
        dollars: about what it costs an hour.
        price_of: where that is from.
    """

    name: str
    generation: str
    chips: int
    cores: int
    hbm: int
    flops: float
    bandwidth: float
    clock: float
    topology: str
    bounds: str
    accelerator_type: str
    dollars: float
    price_of: str = PRICES_OF


def find_chip(name: str | Chip) -> Chip:
    """Return the TPU of that name.

    Raises:
        ValueError: there is none; the message has the nearest name.
    """
    if isinstance(name, Chip):
        return name
    found: Slice = find_slice(name)
    kind = _GENERATIONS[found.generation]
    return Chip(
        name=found.name,
        generation=found.generation,
        chips=found.chips,
        cores=found.chips * kind.cores,
        hbm=kind.hbm,
        flops=kind.flops,
        bandwidth=kind.bandwidth,
        clock=kind.clock,
        topology=f"{found.generation}:{kind.topology[found.chips]}",
        bounds="1,1,1" if found.chips == 1 else "",
        accelerator_type=found.accelerator_type,
        dollars=found.dollars,
    )
