"""XLA:CPU processes that rehearse for TPU cores: real graphs and compiles, collectives by gloo."""

import socket
from collections.abc import Callable

from tpukit.backends.cpu import Cpu, rehearsal_cores
from tpukit.backends.protocol import Backend, Runtime, Topology
from tpukit.backends.xla import TorchXla, import_torch_xla, start_pjrt


class XlaCpu(TorchXla, Cpu):
    """One XLA:CPU client among `world_size` processes, joined by gloo through host memory.

    Collectives end the graph, which they do not on a TPU; everything else about graphs is as it is there.
    """

    def open_device(self):
        import torch_xla

        return torch_xla.device()


class XlaCpuRuntime(Runtime):
    """One XLA:CPU client per process, started the way a TPU is.

    Every process believes itself alone in that start-up, so rank and world size come from the launcher.
    """

    name = "xla:cpu"
    backend = XlaCpu
    package = "torch_xla"

    def is_present(self, machine) -> bool:
        return True

    def topology(self, machine, cores: int | None) -> Topology:
        cores = cores or rehearsal_cores(machine)
        return Topology(self.name, "XLA:CPU", cores, processes=cores, rehearsal=True)

    def load(self, topology: Topology) -> None:
        import_torch_xla("CPU")

    def start(
        self, body: Callable[[Backend], None], topology: Topology, *, process: int, listener: socket.socket
    ) -> None:
        def on_core() -> None:
            body(XlaCpu(process, topology.cores, listener))

        start_pjrt("CPU", on_core, process=process, processes=topology.processes)
