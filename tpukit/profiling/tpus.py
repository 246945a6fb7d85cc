"""Know the TPUs of a host by the names that people use, and the facts of each."""

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.environment import GENERATIONS

_MOST_CHIPS = 8  # of a host


@dataclass(frozen=True)
class Tpu:
    """A TPU of a host.

    Its name counts chips for v5e and v6e, and TensorCores for the others: a v3-8 has four chips.

    Attributes:
        name: such as "v5e-8".
        generation: such as "v5e".
        chips: chips of the host.
        cores: devices that PyTorch sees, each with its own worker.
        hbm: bytes of memory per core.
        flops: the peak of bfloat16 operations per second and core.
        bandwidth: the peak of bytes of memory per second and core.
        clock: cycles per second.
        topology: libtpu's name, such as "v5e:2x4".
        accelerator_type: the name in the Cloud TPU API, gcloud and SkyPilot.
        dollars: approximate price of all chips per hour; see PRICES_OF.
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
    """Return the TPU of a name, which may have the form of Google's tools.

    Args:
        name: such as "v5e-8", "v5litepod-8" or "tpu-v5litepod-8".
        among: the names to accept.
        without: the beginning of the error if a known TPU is not accepted.

    Raises:
        ValueError: the name is not accepted; the message has the nearest.
    """
    if isinstance(name, Tpu):
        return name
    known = str(name).strip().lower().removeprefix("tpu-")
    known = known.replace("v5litepod", "v5e").replace("v5lite", "v5e")
    if known in among:
        return TPUS[known]
    generation, _, size = known.partition("-")
    fact = f"there is no TPU {name!r}"
    if known in TPUS:
        fact = f"{without} {known}"
    if size.isdigit() and int(size) > _MOST_CHIPS and generation in GENERATIONS:
        fact = f"{name} is no TPU of one host, and tpukit works with those only"
    # The machine of Kaggle, if the name is like none.
    nearest = difflib.get_close_matches(known, among, n=1) or ["v5e-8"]
    raise InvalidValueError(
        fact,
        found=f"there are {', '.join(among)}",
        fix=f'pass "{nearest[0]}", for example',
    )
