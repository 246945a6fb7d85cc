"""What this machine is: platform, TPU chips, versions and memory, each fact with its evidence."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpukit.essentials.display import Table, counted, human_size
from tpukit.essentials.environment.chips import GENERATIONS
from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine
from tpukit.essentials.environment.resources import find_cpus, find_memory, read_text

_GOOGLE = "0x1ae0"
# TPU chips have the PCI class 0xff00, "unassigned" (seen for v2 and v5e); 0x12 is the standard class for accelerators.
# Google's other devices have other classes: gVNIC 0x02 (network), disks 0x01, board controllers 0x08.
_ACCELERATOR_CLASSES = ("0xff00", "0x12")

_PACKAGES = (
    *("torch", "torch_xla", "torch_tpu", "libtpu", "torchvision"),
    *("tensorflow", "tensorflow-cpu", "tensorflow-tpu"),
)

TORCH_OF_TORCH_TPU = (2, 11)  # its first; 2.9 is the last that torch_xla is for

# The first match wins. KAGGLE_USERNAME is a credential that Colab users set too, and every image derived from Colab's
# (Kaggle's is one) may have COLAB_*, so Kaggle and Vertex AI come before Colab. Some variables exist but are empty.
_PLATFORMS = {
    "Kaggle": ("KAGGLE_KERNEL_RUN_TYPE",),
    "Vertex AI": ("CLOUD_ML_JOB_ID", "VERTEX_PRODUCT"),
    "Colab": ("COLAB_RELEASE_TAG", "COLAB_TPU_1VM"),
}


@dataclass(frozen=True, repr=False)
class MachineInfo(Table):
    """What this machine is. `evidence` says for each field where the fact comes from."""

    platform: str  # Colab, Kaggle, Vertex AI, TPU VM or laptop
    system: str  # operating system and processor, as in "Linux x86_64"
    chips: int
    generation: str | None  # "v5e"; "unknown (0x1ae0:0x00ab)" for a chip newer than this list; None without a chip
    versions: Mapping[str, str | None]  # "python" and packages; None where not installed
    memory: int | None  # bytes that this process may use; None where the system does not tell
    cpus: int  # processors that this process may use
    shm: int | None  # bytes of /dev/shm; None where there is none
    evidence: Mapping[str, str]

    @classmethod
    def read(cls, machine: Machine = THIS_MACHINE) -> MachineInfo:
        """Find the facts about a machine, without importing torch, using the network or opening a device."""
        chips, chips_evidence = find_chips(machine.pci)
        place, place_evidence = _find_platform(machine.environ, bool(chips))
        memory, memory_evidence = find_memory(machine)
        cpus, cpus_evidence = find_cpus(machine)
        versions = {"python": platform.python_version()} | {name: machine.installed(name) for name in _PACKAGES}
        versions["libtpu"] = versions["libtpu"] or machine.installed("libtpu-nightly")
        shm = _filesystem_size(machine.shm)
        return cls(
            platform=place,
            system=machine.system,
            chips=len(chips),
            generation=chips[0][0] if chips else None,
            versions=versions,
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
                "shm": f"size of {machine.shm}" if shm is not None else f"no {machine.shm} here",
            },
        )

    @property
    def cores_per_chip(self) -> int:
        """The cores of a chip that torch_xla sees as separate devices: 2 on v2, v3 and 7x, otherwise 1."""
        kind = GENERATIONS.get((self.generation or "").partition("/")[0])  # v2/v3: see find_chips
        return kind.cores if kind else 1

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
        """What drives TPU chips here, "torch_xla" or "torch_tpu": of both, the one that the installed torch is for."""
        torch, torch_tpu, torch_xla = (self.versions.get(name) for name in ("torch", "torch_tpu", "torch_xla"))
        is_new = numbers(torch or "0.0") >= TORCH_OF_TORCH_TPU
        return "torch_tpu" if torch_tpu and (is_new or not torch_xla) else "torch_xla"

    @property
    def summary(self) -> str:
        """The machine in one line, for error messages."""
        version = self.versions.get(self.tpu_package)
        software = f"{self.tpu_package} {version}" if version else "torch_xla not installed"
        return f"{self.platform} ({self.evidence['platform']}), {self.chips} chips on the PCI bus, {software}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (name, value, evidence) of every fact."""
        always = ("python", "torch", "torch_xla", "libtpu")
        versions = [
            (name, version or "not installed", self.evidence["versions"])
            for name, version in self.versions.items()
            if version or name in always
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
    """Describe this machine, without importing torch, using the network or opening a device."""
    return MachineInfo.read()


def find_chips(pci: Path) -> tuple[list[tuple[str, Path]], str]:
    """Return (generation, folder) of every TPU chip on the PCI bus, and what was found there."""
    try:
        devices = sorted(pci.iterdir())
    except OSError:
        return [], f"{pci} is not there"
    known, unknown, cards = [], [], []
    for device in devices:
        if read_text(device / "vendor") != _GOOGLE:
            continue
        model = read_text(device / "device")
        name = f"{_GOOGLE}:{model}"
        if kinds := {one: kind.subsystem for one, kind in GENERATIONS.items() if kind.pci == model}:
            subsystem = read_text(device / "subsystem_device")  # where it cannot be read, a v2 or v3 is a "v2/v3"
            known.append(("/".join([one for one in kinds if kinds[one] == subsystem] or kinds), device, name))
        elif read_text(device / "class").startswith(_ACCELERATOR_CLASSES):
            unknown.append((f"unknown ({name})", device, name))
        else:
            cards.append(name)
    # All chips of a host are of one kind, so beside known chips an unknown accelerator is not a TPU.
    chips = known or unknown
    if not chips:
        seen = f"; {', '.join(cards)} is not a TPU" if cards else ""
        return [], f"none of {counted(len(devices), 'device')} in {pci} is a TPU{seen}"
    names = Counter(name for *_, name in chips)
    seen = ", ".join(f"{n} x {name}" for name, n in names.items())
    return [(generation, device) for generation, device, _ in chips], f"{seen} in {pci}"


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
    """Return the first two numbers of a version, by which releases are compared."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
