"""XLA:CPU processes in place of TPU cores: real graphs and compilations, collectives by gloo."""

from collections.abc import Callable

from tpukit.essentials.backends.cpu import Cpu, CpuRuntime, dry_run_cores
from tpukit.essentials.backends.protocol import Backend, Topology
from tpukit.essentials.backends.xla import TorchXla, import_torch_xla, start_pjrt
from tpukit.essentials.display import TpukitRuntimeError

# Functions of torch_xla.core.xla_model. In this start-up each would reduce, gather or wait over one
# process, without an error.
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_bucketized", "all_to_all"),
    *("broadcast_master_param", "collective_broadcast", "collective_permute", "mesh_reduce"),
    *("optimizer_step", "reduce_gradients", "reduce_scatter", "reduce_scatter_bucketized"),
    *("rendezvous", "xla_rendezvous"),
)


class XlaCpu(TorchXla, Cpu):
    """One XLA:CPU client among `world_size` processes, joined by gloo through host memory.

    Collectives end the graph, which they do not on a TPU. Everything else about graphs is the same.
    """

    def open_device(self):
        import torch_xla

        return torch_xla.device()


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
            correct_torch_xla(rank, topology.world_size)
        start_pjrt("CPU", on_core, topology, process=process)


def correct_torch_xla(rank: int, world_size: int) -> None:
    """Make torch_xla's own calls return this run's values, or raise, in this process.

    torch_xla sees only one process here. Without this, code that uses its collectives would train
    one model per process, without an error.
    """
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    xr.world_size = lambda: world_size
    xr.global_ordinal = lambda: rank
    for name in _COLLECTIVES:
        setattr(xm, name, _refused(f"xm.{name}", world_size))
    join = dist.init_process_group
    refuse = _refused('dist.init_process_group("xla")', world_size)

    def init_process_group(backend=None, *args: object, **options: object):
        if "xla" in str(backend):
            refuse()
        return join(backend, *args, **options)

    dist.init_process_group = init_process_group


def _refused(call: str, world_size: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise TpukitRuntimeError(
            f"{call} does not reach other cores in this dry run",
            found=f"{world_size} XLA:CPU processes joined by gloo, of which torch_xla sees one",
            fix="core.all_reduce, core.gather, core.optimizer_step; or pip install "
            "xla_cpu_pjrt==0.0.1, for a dry run in which torch_xla's own collectives work",
        )

    return refuse
