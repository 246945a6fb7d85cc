"""Patches of torch_xla in XLA:CPU processes of a dry run; listed in docs/in_sync.md.

answer_for_all_processes
    changes     `world_size` and `global_ordinal` of `torch_xla.runtime`; the collectives of
                `torch_xla.core.xla_model`; `torch.distributed.init_process_group("xla")`
    because     in a dry run with backend="xla:cpu", gloo connects the processes. torch_xla does not
                know that, and its collectives would work in each process alone. So code that uses
                them would train a separate model per process, without an error.
    versions    torch_xla 2.8 and 2.9; this start-up is tpukit's own, so there is no issue upstream.
    until       backend="xla:cpu" is removed
"""

from collections.abc import Callable

from tpukit.essentials.display import TpukitRuntimeError

# Functions of torch_xla.core.xla_model that communicate. Here each would reduce, gather or wait in
# one process alone.
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_bucketized", "all_to_all"),
    *("broadcast_master_param", "collective_broadcast", "collective_permute", "mesh_reduce"),
    *("optimizer_step", "reduce_gradients", "reduce_scatter", "reduce_scatter_bucketized"),
    *("rendezvous", "xla_rendezvous"),
)


def answer_for_all_processes(rank: int, world_size: int) -> None:
    """Patch torch_xla: report the run's rank and world size, and raise errors in collectives.

    Call it in a dry run on several XLA:CPU processes. torch_xla does not connect these processes,
    so a collective of torch_xla would not reach the other cores.
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

    # Groups of other backends, such as gloo, work here.
    def init_process_group(backend=None, *args: object, **options: object):
        if "xla" in str(backend):
            refuse()
        return join(backend, *args, **options)

    dist.init_process_group = init_process_group


def _refused(call: str, world_size: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise TpukitRuntimeError(
            f"{call} does not reach other cores in this dry run",
            found=f"{world_size} XLA:CPU processes, connected by gloo and not by torch_xla",
            fix="use core.all_reduce, core.gather, core.optimizer_step instead; or pip install "
            "xla_cpu_pjrt==0.0.1, for a dry run in which torch_xla's own collectives work",
        )

    return refuse
