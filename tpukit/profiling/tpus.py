"""List the TPUs of single hosts, such as "v5e-8", with their properties."""

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.environment import GENERATIONS

_MOST_CHIPS = 8  # in a host


@dataclass(frozen=True)
class Tpu:
    """The TPU chips of one host.

    The number in a name counts chips for v5e and v6e, and TensorCores for all others: a v5e-8 has
    eight chips, but a v3-8 has four chips with two TensorCores each.

    Attributes:
        name: the usual name, such as "v5e-8".
        generation: the generation, such as "v5e".
        chips: number of chips.
        cores: number of devices that PyTorch sees; each runs the worker function.
        hbm: bytes of device memory (HBM) per core.
        flops: peak of bfloat16 floating-point operations per second and core.
        bandwidth: peak of bytes per second and core, between a core and its memory.
        clock: clock cycles per second.
        topology: the name in libtpu, such as "v5e:2x4".
        accelerator_type: the name in the Cloud TPU API, gcloud and SkyPilot.
        dollars: approximate price of all chips per hour, in US dollars; see PRICES_OF.
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
    accelerator_type: str
    dollars: float


def _tpu(name: str, *, chips: int, shape: str) -> Tpu:
    generation = name.partition("-")[0]
    kind = GENERATIONS[generation]
    return Tpu(
        name,
        generation,
        chips=chips,
        cores=chips * kind.cores,
        hbm=kind.gib * 2**30,
        flops=kind.teraflops * 1e12,
        bandwidth=kind.gigabytes * 1e9,
        clock=kind.gigahertz * 1e9,
        topology=f"{generation}:{shape}",
        accelerator_type=name.replace("v5e", "v5litepod"),
        dollars=chips * kind.dollars,
    )


def _all_tpus() -> dict[str, Tpu]:
    # The number in these names counts TensorCores: a v3-8 has four chips with two each.
    named_by_cores = {"v2-8": "2x2", "v3-8": "2x2", "v4-8": "2x2x1", "v5p-8": "2x2x1"}
    shapes_by_chips = {1: "1x1", 4: "2x2", 8: "2x4"}
    found = {name: _tpu(name, chips=4, shape=shape) for name, shape in named_by_cores.items()}
    for generation in ("v5e", "v6e"):
        for chips, shape in shapes_by_chips.items():
            name = f"{generation}-{chips}"
            found[name] = _tpu(name, chips=chips, shape=shape)
    return found


TPUS = _all_tpus()


def find_tpu(
    name: str | Tpu,
    *,
    among: Collection[str] = tuple(TPUS),
    without: str = "there is no TPU",
) -> Tpu:
    """Return the TPU with a name; the names of Google's tools are accepted as well.

    Args:
        name: a name, such as "v5e-8", "v5litepod-8" or "tpu-v5litepod-8"; or a `Tpu`, which is
            returned.
        among: the accepted names. The default is all known names.
        without: the beginning of the error message if the name is known but not accepted.

    Raises:
        ValueError: the name is not accepted. The message has the most similar accepted name.
    """
    if isinstance(name, Tpu):
        return name
    # Google's tools write "v5litepod-8" or "tpu-v5litepod-8" for a v5e-8.
    known = str(name).strip().lower().removeprefix("tpu-")
    known = known.replace("v5litepod", "v5e").replace("v5lite", "v5e")
    if known in among:
        return TPUS[known]
    # Three reasons: the name is unknown, known but not accepted here, or of several hosts.
    generation, _, size = known.partition("-")
    fact = f"there is no TPU {name!r}"
    if known in TPUS:
        fact = f"{without} {known}"
    if size.isdigit() and int(size) > _MOST_CHIPS and generation in GENERATIONS:
        fact = f"{name} is no TPU of one host; only those are supported here"
        known = f"{generation}-{_MOST_CHIPS}"
    # If no name is similar, recommend Kaggle's machine.
    nearest = difflib.get_close_matches(known, among, n=1) or ["v5e-8"]
    raise InvalidValueError(
        fact,
        found=f"there are {', '.join(among)}",
        fix=f'pass "{nearest[0]}", for example',
    )
