"""XLA:CPU processes that rehearse for TPU cores: real graphs and compiles, collectives by gloo."""

from collections.abc import Callable

from tpukit.essentials.backends.cpu import Cpu, CpuRuntime, dry_run_cores
from tpukit.essentials.backends.protocol import Backend, Topology
from tpukit.essentials.backends.xla import TorchXla, import_torch_xla, start_pjrt
from tpukit.essentials.display import Failed

# Of torch_xla.core.xla_model. In this start-up each would reduce, gather or wait over one process, without a word.
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_bucketized", "all_to_all", "broadcast_master_param"),
    *("collective_broadcast", "collective_permute", "mesh_reduce", "optimizer_step", "reduce_gradients"),
    *("reduce_scatter", "reduce_scatter_bucketized", "rendezvous", "xla_rendezvous"),
)


class XlaCpu(TorchXla, Cpu):
    """One XLA:CPU client among `world_size` processes, joined by gloo through host memory.

    Collectives end the graph, which they do not on a TPU; everything else about graphs is as it is there.
    """

    def open_device(self):
        import torch_xla

        return torch_xla.device()


class XlaCpuRuntime(CpuRuntime):
    """One XLA:CPU client per process, started the way a TPU is; the processes meet as plain CPU processes do."""

    name = "xla:cpu"
    backend = XlaCpu
    package = "torch_xla"
    dry_run_of = "xla"
    note = "; gloo joins them, torch_xla's own collectives do not"

    def topology(self, machine, cores: int | None) -> Topology:
        cores = cores or dry_run_cores(machine)
        return Topology(self.name, "XLA:CPU", cores, processes=cores, is_dry_run=True)

    def load(self, topology: Topology) -> None:
        super().load(topology)
        import_torch_xla("CPU")

    def start(self, body: Callable[[Backend], None], topology: Topology, *, process: int, meeting_point) -> None:
        def on_core() -> None:
            body(XlaCpu(rank, topology.world_size, meeting_point))

        (rank,) = topology.ranks(process)
        if topology.world_size > 1:
            correct_torch_xla(rank, topology.world_size)
        start_pjrt("CPU", on_core, topology, process=process)


def correct_torch_xla(rank: int, world_size: int) -> None:
    """Have torch_xla's own calls tell the truth in this process, or refuse; it believes that it is alone.

    A stranger's code would otherwise train one model per process, each on its own, and nobody would notice.
    """
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    def refused(call: str) -> Callable:
        def refuse(*_: object, **__: object) -> None:
            raise Failed(
                f"{call} joins nothing in this rehearsal",
                found=f"{world_size} XLA:CPU processes joined by gloo, of which torch_xla sees one",
                fix=(
                    "core.all_reduce, core.gather, core.optimizer_step; or pip install xla_cpu_pjrt==0.0.1, a "
                    "rehearsal in which torch_xla's own collectives run"
                ),
            )

        return refuse

    xr.world_size, xr.global_ordinal = lambda: world_size, lambda: rank
    for name in _COLLECTIVES:
        setattr(xm, name, refused(f"xm.{name}"))
    join = dist.init_process_group

    def init_process_group(backend=None, *args: object, **options: object):
        if "xla" in str(backend):
            refused('dist.init_process_group("xla")')()
        return join(backend, *args, **options)

    dist.init_process_group = init_process_group
