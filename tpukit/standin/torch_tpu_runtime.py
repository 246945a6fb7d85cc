"""The rehearsal behind TorchTPU itself: CPU processes with a stand-in for libtpu, in which it sees TPU chips."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator

from tpukit.essentials.backends import Backend, Topology, rehearsal_cores
from tpukit.essentials.show import Failed
from tpukit.runtimes import TorchTpuRuntime, inside
from tpukit.standin.build import find_plugin, library, why_not
from tpukit.standin.runtime import play
from tpukit.standin.shapes import environment, torch_tpu_rehearsal
from tpukit.standin.shared_memory import meeting_place

# What this changes inside torch_tpu; INSIDES of the backend are what it uses.
HARDWARE = tuple(
    f"torch_tpu._internal.utils.hardware:{name}" for name in ("_scan_pci_tpus", "_V4_TOPOLOGY", "get_tpu_device_name")
)


class TorchTpuStandInRuntime(TorchTpuRuntime):
    """One process per stand-in for a v4 chip. The class for chips runs, with TorchTPU's own graphs and collectives."""

    name = "torch_tpu:standin"
    hardware = "CPU"
    note = "; TorchTPU sees TPU chips, played by a stand-in for libtpu"

    def is_present(self, machine) -> bool:
        return not machine.chips and bool(machine.versions.get("torch_tpu")) and why_not() is None

    def topology(self, machine, cores: int | None) -> Topology:
        cores = cores or rehearsal_cores(machine)
        torch_tpu_rehearsal(cores)  # raises for a number that it does not play
        return Topology(self.name, "TorchTPU core", cores, processes=cores, rehearsal=True)

    def load(self, topology: Topology) -> None:
        super().load(topology)
        ours = str(library())  # compiled here, before the run's time is counted
        if "torch_tpu" in sys.modules and os.environ.get("TPU_LIBRARY_PATH") != ours:
            raise Failed(
                "this kernel has imported torch_tpu, and its workers would look for real chips",
                found=f"TPU_LIBRARY_PATH={os.environ.get('TPU_LIBRARY_PATH')}, which torch_tpu has read",
                fix="restart the kernel, and call tpukit.prepare() before `import torch`",
            )

    @contextlib.contextmanager
    def meeting_point(self, topology: Topology) -> Iterator[tuple]:
        """Yield where the processes meet, and the variables that make TorchTPU see the machine."""
        machine = torch_tpu_rehearsal(topology.cores)
        with super().meeting_point(topology) as address, meeting_place() as memory:
            played = environment(machine, library=library(), plugin=find_plugin().library, memory=memory)
            yield address, played | {"TF_CPP_MIN_LOG_LEVEL": "1"}  # the plugin has a line for each program otherwise

    def start(self, body: Callable[[Backend], None], topology: Topology, *, process: int, meeting_point) -> None:
        import torch

        address, machine = meeting_point
        play(machine)
        show_chips(topology.cores)
        torch.backends.cuda.enable_flash_sdp(False)  # else attention is a kernel in the chips' own code
        super().start(body, topology, process=process, meeting_point=address)


def show_chips(chips: int) -> None:
    """Have torch_tpu find so many v4 chips where it looks for them, on the PCI bus and in /dev/vfio."""
    for place in HARDWARE:
        inside(place)
    hardware = importlib.import_module("torch_tpu._internal.utils.hardware")
    hardware._scan_pci_tpus = lambda: (chips, hardware._V4_TOPOLOGY)
    hardware.get_tpu_device_name = lambda: "TPU v4"
