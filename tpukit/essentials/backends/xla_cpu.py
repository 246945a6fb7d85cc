"""XLA:CPU processes instead of TPU cores: real graphs and compilations, collectives of gloo."""

from collections.abc import Callable

from tpukit.essentials.backends.cpu import Cpu, CpuRuntime, dry_run_cores
from tpukit.essentials.backends.protocol import Backend, Topology
from tpukit.essentials.backends.torch_xla_patches import answer_for_all_processes
from tpukit.essentials.backends.xla import TorchXla, import_torch_xla, start_pjrt


class XlaCpu(TorchXla, Cpu):
    """A core that is an XLA:CPU client in a process of its own; gloo connects the processes.

    A collective goes through host memory, so it ends the graph, unlike on a TPU. Otherwise graphs
    behave as on a TPU.
    """

    def open_device(self):
        import torch_xla

        return torch_xla.device()

    def broadcast(self, tensors: list) -> None:
        super().broadcast(tensors)
        # Run the graph here, as on a TPU. Otherwise torch_xla would write a counter that is 0, as
        # BatchNorm has, as a constant into the next graph, and the first evaluation would have
        # another graph than later ones. `wait`, because the report counts `sync` as a step.
        self.wait()


class XlaCpuRuntime(CpuRuntime):
    """The dry run with an XLA:CPU client per process.

    The processes start in the same way as on a TPU. gloo performs the collectives.
    """

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
