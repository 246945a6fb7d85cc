"""XLA:CPU processes in place of TPU cores: real graphs and compilations, collectives by gloo."""

from collections.abc import Callable

from tpukit.essentials.backends.cpu import Cpu, CpuRuntime, dry_run_cores
from tpukit.essentials.backends.protocol import Backend, Topology
from tpukit.essentials.backends.torch_xla_patches import answer_for_all_processes
from tpukit.essentials.backends.xla import TorchXla, import_torch_xla, start_pjrt


class XlaCpu(TorchXla, Cpu):
    """One XLA:CPU client among `world_size` processes, joined by gloo through host memory.

    Collectives end the graph, which they do not on a TPU. Everything else about graphs is the same.
    """

    def open_device(self):
        import torch_xla

        return torch_xla.device()

    def broadcast(self, tensors: list) -> None:
        super().broadcast(tensors)
        # As on a TPU. torch_xla writes a counter that is 0, as BatchNorm's, into the next graph,
        # so the first evaluation would have another graph than all later ones.
        self.wait()  # not `sync`, which the report would count as a step


class XlaCpuRuntime(CpuRuntime):
    """One XLA:CPU client per process, started as a TPU is, and joined as CPU processes are."""

    name = "xla:cpu"
    backend = XlaCpu
    package = "torch_xla"
    dry_run_of = "xla"
    note = "; gloo joins them, torch_xla's own collectives do not"

    def topology(self, machine, cores: int | None) -> Topology:
        cores = cores or dry_run_cores(machine)
        return Topology(self.name, "XLA:CPU", cores=cores, processes=cores, is_dry_run=True)

    def load(self, topology: Topology) -> None:
        super().load(topology)
        import_torch_xla("CPU")

    def start(
        self,
        body: Callable[[Backend], None],
        topology: Topology,
        *,
        process: int,
        meeting_point,
    ) -> None:
        (rank,) = topology.ranks(process)

        def on_core() -> None:
            body(XlaCpu(rank, topology.world_size, meeting_point))

        if topology.world_size > 1:
            answer_for_all_processes(rank, topology.world_size)
        start_pjrt("CPU", on_core, topology, process=process)
