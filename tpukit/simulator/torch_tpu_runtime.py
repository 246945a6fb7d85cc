"""Run TorchTPU itself on CPU processes, with a simulated libtpu."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator

from tpukit.accelerators import TorchTpuRuntime, inside
from tpukit.essentials.backends import Backend, Topology, dry_run_cores
from tpukit.essentials.display import TpukitRuntimeError
from tpukit.simulator.build import find_plugin, library, why_not
from tpukit.simulator.runtime import set_machine
from tpukit.simulator.shapes import environment, meeting_place, torch_tpu_dry_run

# The names inside torch_tpu that this module replaces or reads. `INSIDES` in
# tpukit/accelerators/torch_tpu.py has those that the backend uses.
HARDWARE = (
    "torch_tpu._internal.utils.hardware:_scan_pci_tpus",
    "torch_tpu._internal.utils.hardware:_V4_TOPOLOGY",
    "torch_tpu._internal.utils.hardware:get_tpu_device_name",
)


class SimulatedTorchTpuRuntime(TorchTpuRuntime):
    """A CPU process per simulated v4 chip, with TorchTPU's own graphs and collectives."""

    name = "torch_tpu:simulator"
    dry_run_of = "torch_tpu"
    hardware = "CPU"
    note = "; TorchTPU sees TPU chips of a simulated libtpu"

    def is_present(self, machine) -> bool:
        is_installed = bool(machine.versions.get("torch_tpu"))
        return not machine.chips and is_installed and why_not() is None

    def topology(self, machine, cores: int | None) -> Topology:
        cores = cores or dry_run_cores(machine)
        torch_tpu_dry_run(cores)  # raises for a number that TorchTPU does not know
        return Topology(self.name, "TorchTPU core", cores, processes=cores, is_dry_run=True)

    def load(self, topology: Topology) -> None:
        super().load(topology)
        simulated = str(library())  # compiles on the first call, before the run's time counts
        # torch_tpu reads the variable when it is imported, so setting it later has no effect.
        is_other = os.environ.get("TPU_LIBRARY_PATH") != simulated
        if "torch_tpu" in sys.modules and is_other:
            raise TpukitRuntimeError(
                "this kernel has imported torch_tpu, and its workers would look for real chips",
                found=f"torch_tpu has read TPU_LIBRARY_PATH={os.environ.get('TPU_LIBRARY_PATH')}",
                fix="restart the kernel, and call tpukit.setup() before `import torch`",
            )

    @contextlib.contextmanager
    def meeting_point(self, topology: Topology) -> Iterator[tuple]:
        """Yield the address of the processes, and the variables that describe the machine."""
        shape = torch_tpu_dry_run(topology.cores)
        plugin = find_plugin().library
        with super().meeting_point(topology) as address, meeting_place() as memory:
            machine = environment(shape, library=library(), plugin=plugin, memory=memory)
            machine["TF_CPP_MIN_LOG_LEVEL"] = "1"  # at "0" the plugin logs a line per program
            yield address, machine

    def start(
        self,
        body: Callable[[Backend], None],
        topology: Topology,
        *,
        process: int,
        meeting_point,
    ) -> None:
        import torch

        address, machine = meeting_point
        set_machine(machine)
        show_chips(topology.cores)
        # TorchTPU's flash attention is a kernel in machine code of the chips, which the CPU's
        # plugin cannot run.
        torch.backends.cuda.enable_flash_sdp(False)
        super().start(body, topology, process=process, meeting_point=address)


def show_chips(chips: int) -> None:
    """Make torch_tpu believe that this machine has v4 chips.

    Args:
        chips: the number of chips that torch_tpu's search of the PCI bus returns.
    """
    for place in HARDWARE:
        inside(place)  # raises if this version of torch_tpu does not have it
    hardware = importlib.import_module("torch_tpu._internal.utils.hardware")
    hardware._scan_pci_tpus = lambda: (chips, hardware._V4_TOPOLOGY)
    hardware.get_tpu_device_name = lambda: "TPU v4"
