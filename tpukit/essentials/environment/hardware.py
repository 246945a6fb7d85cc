"""The facts about this machine: platform, chips, versions, memory, each with its evidence."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.display import Table, counted, human_size
from tpukit.essentials.environment.chips import GENERATIONS
from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine
from tpukit.essentials.environment.resources import find_cpus, find_memory, read_text

_GOOGLE = "0x1ae0"  # the vendor's number on the PCI bus
# TPU chips have the PCI class 0xff00, "unassigned" (seen for v2 and v5e); 0x12 is the standard
# class of accelerators. Google's other devices have other classes: gVNIC 0x02 (network),
# disks 0x01, board controllers 0x08.
_ACCELERATOR_CLASSES = ("0xff00", "0x12")

_PACKAGES = (
    *("torch", "torch_xla", "torch_tpu", "libtpu", "torchvision"),
    *("tensorflow", "tensorflow-cpu", "tensorflow-tpu"),
)
_ALWAYS_LISTED = ("python", "torch", "torch_xla", "libtpu")  # even if they are not installed

# The first torch release that TorchTPU supports; 2.9 is the last that torch_xla supports.
TORCH_OF_TORCH_TPU = (2, 11)

# The platform is the first one with a variable that is set and not empty. Images that are derived
# from Colab's, such as Kaggle's, may have COLAB_* variables. So Colab is the last.
# KAGGLE_USERNAME is not in the list, because it is a credential that Colab users set, too.
_PLATFORMS = {
    "Kaggle": ("KAGGLE_KERNEL_RUN_TYPE",),
    "Vertex AI": ("CLOUD_ML_JOB_ID", "VERTEX_PRODUCT"),
    "Colab": ("COLAB_RELEASE_TAG", "COLAB_TPU_1VM"),
}


@dataclass(frozen=True, repr=False)
class MachineInfo(Table):
    """The facts about a machine.

    Attributes:
        platform: "Colab", "Kaggle", "Vertex AI", "TPU VM" or "laptop".
        system: operating system and processor, such as "Linux x86_64".
        chips: number of TPU chips.
        generation: the generation of the chips, such as "v5e"; "unknown (0x1ae0:0x00ab)" if tpukit
            does not know it; None without a chip.
        versions: the versions of Python and of packages; None for a package that is not installed.
        memory: memory that this process may use, in bytes; None if the system does not report it.
        cpus: number of processors that this process may use.
        shm: size of /dev/shm in bytes; None if the system has none.
        evidence: the source of each fact, by the name of the field.
    """

    platform: str
    system: str
    chips: int
    generation: str | None
    versions: Mapping[str, str | None]
    memory: int | None
    cpus: int
    shm: int | None
    evidence: Mapping[str, str]

    @classmethod
    def read(cls, machine: Machine = THIS_MACHINE) -> MachineInfo:
        """Read the facts without an import of torch, without network and without a device."""
        chips, chips_evidence = find_chips(machine.pci)
        place, place_evidence = _find_platform(machine.environ, has_chips=bool(chips))
        memory, memory_evidence = find_memory(machine)
        cpus, cpus_evidence = find_cpus(machine)
        shm = _filesystem_size(machine.shm)
        shm_evidence = f"no {machine.shm} here" if shm is None else f"size of {machine.shm}"
        generation = None
        if chips:
            generation, _ = chips[0]  # all chips of a host have the same generation
        return cls(
            platform=place,
            system=machine.system,
            chips=len(chips),
            generation=generation,
            versions=_versions(machine),
            memory=memory,
            cpus=cpus,
            shm=shm,
            evidence={
                "platform": place_evidence,
                "system": "the operating system's own name",
                "chips": chips_evidence,
                "generation": chips_evidence,
                "versions": "package metadata",
                "memory": memory_evidence,
                "cpus": cpus_evidence,
                "shm": shm_evidence,
            },
        )

    @property
    def cores_per_chip(self) -> int:
        """The cores per chip in PyTorch: 2 on v2, v3 and 7x, otherwise 1."""
        name = (self.generation or "").partition("/")[0]  # of "v2/v3", see find_chips
        generation = GENERATIONS.get(name)
        if generation:
            return generation.cores
        return 1

    @property
    def cores(self) -> int:
        """The number of TPU cores of this machine; 0 without a chip."""
        return self.chips * self.cores_per_chip

    @property
    def hardware(self) -> str:
        """The chips in words, such as `4 v3 chips, 8 cores`."""
        if not self.chips:
            return "no TPU chip"
        return f"{counted(self.chips, f'{self.generation} chip')}, {counted(self.cores, 'core')}"

    @property
    def tpu_package(self) -> str:
        """The package that a launch uses for TPU chips: "torch_xla" or "torch_tpu".

        If both are installed, it is the package that supports the installed torch.
        """
        if not self.versions.get("torch_tpu"):
            return "torch_xla"
        torch = self.versions.get("torch") or "0.0"
        is_new = numbers(torch) >= TORCH_OF_TORCH_TPU
        has_torch_xla = bool(self.versions.get("torch_xla"))
        if is_new or not has_torch_xla:
            return "torch_tpu"
        return "torch_xla"

    @property
    def summary(self) -> str:
        """The machine in a line, for error messages."""
        software = "torch_xla not installed"
        if version := self.versions.get(self.tpu_package):
            software = f"{self.tpu_package} {version}"
        place = f"{self.platform} ({self.evidence['platform']})"
        return f"{place}, {self.chips} chips on the PCI bus, {software}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (name, value, evidence) of every fact."""
        versions = [
            (name, version or "not installed", self.evidence["versions"])
            for name, version in self.versions.items()
            if version or name in _ALWAYS_LISTED
        ]
        return [
            ("platform", self.platform, self.evidence["platform"]),
            ("system", self.system, self.evidence["system"]),
            ("chips", self.hardware, self.evidence["chips"]),
            *versions,
            ("memory", human_size(self.memory), self.evidence["memory"]),
            ("/dev/shm", human_size(self.shm), self.evidence["shm"]),
            ("cpus", str(self.cpus), self.evidence["cpus"]),
        ]


def machine_info() -> MachineInfo:
    """Return the facts about this machine: platform, TPU chips, versions, memory.

    It imports no torch, uses no network and opens no device.

    Returns:
        A `MachineInfo`, which displays itself as a table with the evidence for each fact.
    """
    return MachineInfo.read()


class _Chip(NamedTuple):
    """A TPU chip on the PCI bus."""

    generation: str
    folder: Path
    pci: str  # vendor and device, such as "0x1ae0:0x0063"


def find_chips(pci: Path) -> tuple[list[tuple[str, Path]], str]:
    """Return (generation, folder) of every TPU chip on the PCI bus, and the evidence.

    All chips of a host have the same generation. So an unknown accelerator of Google counts as a
    TPU chip only if the host has no known chip.

    Args:
        pci: the folder /sys/bus/pci/devices.
    """
    try:
        devices = sorted(pci.iterdir())
    except OSError:
        return [], f"{pci} is not there"
    known = []
    unknown = []
    others = []  # Google's devices that are not accelerators
    for device in devices:
        if read_text(device / "vendor") != _GOOGLE:
            continue
        model = read_text(device / "device")
        name = f"{_GOOGLE}:{model}"
        if generation := _generation(model, device):
            known.append(_Chip(generation, device, name))
        elif read_text(device / "class").startswith(_ACCELERATOR_CLASSES):
            unknown.append(_Chip(f"unknown ({name})", device, name))
        else:
            others.append(name)
    chips = known or unknown
    if not chips:
        seen = f"; {', '.join(others)} is not a TPU" if others else ""
        return [], f"none of {counted(len(devices), 'device')} in {pci} is a TPU{seen}"
    # The evidence: "8 x 0x1ae0:0x0063 in /sys/bus/pci/devices".
    names = Counter(chip.pci for chip in chips)
    seen = ", ".join(f"{count} x {name}" for name, count in names.items())
    return [(chip.generation, chip.folder) for chip in chips], f"{seen} in {pci}"


def _generation(model: str, device: Path) -> str | None:
    """Return the generation of a PCI device; None if it is not a known TPU.

    If the subsystem id does not tell v2 from v3, it is "v2/v3".
    """
    kinds = {name: kind for name, kind in GENERATIONS.items() if kind.pci == model}
    if not kinds:
        return None
    subsystem = read_text(device / "subsystem_device")
    matching = [name for name, kind in kinds.items() if kind.subsystem == subsystem]
    return "/".join(matching or kinds)


def _versions(machine: Machine) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        versions[package] = machine.installed(package)
    versions["libtpu"] = versions["libtpu"] or machine.installed("libtpu-nightly")
    return versions


def _find_platform(environ: Mapping[str, str], has_chips: bool) -> tuple[str, str]:
    for place, variables in _PLATFORMS.items():
        for variable in variables:
            if environ.get(variable):
                return place, f"{variable} is set"
    if has_chips:
        return "TPU VM", "chips on the PCI bus, no variables of a notebook platform"
    return "laptop", "no chips, no variables of a notebook platform"


def _filesystem_size(path: Path) -> int | None:
    if not hasattr(os, "statvfs") or not path.is_dir():
        return None
    statistics = os.statvfs(path)
    return statistics.f_blocks * statistics.f_frsize


def numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (2, 9) for "2.9.0+cpu"."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
