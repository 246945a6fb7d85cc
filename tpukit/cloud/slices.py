"""The TPUs that a job can ask for: what each cloud service calls them, and what they cost."""

import difflib
from dataclasses import dataclass

# Compute Engine's list price of a chip for an hour on demand in the US, as SkyPilot's catalogue v8 had it in November
# 2026. Other regions cost up to a fifth more, spot less; Vertex AI bills by its own list.
PRICES_OF = "Compute Engine's list prices in the US, November 2026"
_DOLLARS = {"v2": 1.125, "v3": 2.00, "v4": 3.22, "v5e": 1.20, "v5p": 4.20, "v6e": 2.70}
_RUNTIMES = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}  # the others share one


@dataclass(frozen=True)
class Slice:
    """A TPU on one host.

    Attributes:
        name: as people say it: v3-8 counts cores, v5e-8 counts chips.
        chips: of it.
        machine: the `machineSpec` of Vertex AI; empty where Vertex AI trains on none.
    """

    name: str
    chips: int
    machine: dict

    @property
    def generation(self) -> str:
        """The kind of its chips, such as v5e."""
        return self.name.partition("-")[0]

    @property
    def accelerator_type(self) -> str:
        """Its name in the Cloud TPU API, gcloud, SkyPilot and dstack."""
        return self.name.replace("v5e", "v5litepod")

    @property
    def runtime_version(self) -> str:
        """The image that its machine starts with; SkyPilot's default for a v5e is that of a v5p."""
        return _RUNTIMES.get(self.generation, "tpu-ubuntu2204-base")

    @property
    def dollars(self) -> float:
        """About what its chips cost an hour; see `PRICES_OF`."""
        return self.chips * _DOLLARS[self.generation]


def _named_by_chips(generation: str, machine: str) -> dict[str, Slice]:
    shapes = {1: "1x1", 4: "2x2", 8: "2x4"}
    return {
        f"{generation}-{chips}": Slice(
            f"{generation}-{chips}", chips, {"machineType": machine.format(chips), "tpuTopology": shape}
        )
        for chips, shape in shapes.items()
    }


def _of_eight_cores(name: str) -> Slice:
    accelerator = f"TPU_{name.partition('-')[0].upper()}"
    return Slice(name, 4, {"machineType": "cloud-tpu", "acceleratorType": accelerator, "acceleratorCount": 8})


# One host each: no public page shows what several hosts of a Vertex AI job see of each other. The SDK takes any words
# for machine type and topology and leaves the refusal to the service, minutes later.
SLICES = {
    "v2-8": _of_eight_cores("v2-8"),
    "v3-8": _of_eight_cores("v3-8"),
    "v4-8": Slice("v4-8", 4, {}),
    **_named_by_chips("v5e", "ct5lp-hightpu-{}t"),
    "v5p-8": Slice("v5p-8", 4, {}),
    **_named_by_chips("v6e", "ct6e-standard-{}t"),
}


def find_slice(chip: str, *, for_vertex: bool = False) -> Slice:
    """Return the TPU of that name, also as Google's tools write it: v5litepod-8, tpu-v5litepod-8.

    Raises:
        ValueError: there is none.
    """
    known = {name: one for name, one in SLICES.items() if one.machine or not for_vertex}
    name = str(chip).strip().lower().removeprefix("tpu-").replace("v5litepod", "v5e").replace("v5lite", "v5e")
    if name in known:
        return known[name]
    generation, _, size = name.partition("-")
    why = f"there is no TPU {chip!r}"
    if name in SLICES:
        why = f"Vertex AI trains on no {name}"
    elif size.isdigit() and int(size) > 8 and any(one.generation == generation for one in known.values()):
        why = f"{chip} is no TPU of one host, and this kit sends jobs to one host"
    near = difflib.get_close_matches(name, known, 1) or ["v5e-8"]
    raise ValueError(f'{why}\n  found: there are {", ".join(known)}\n  fix:   chip="{near[0]}"')
