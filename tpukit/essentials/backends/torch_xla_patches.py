"""Patches of torch_xla in XLA:CPU processes of a dry run; listed in docs/in_sync.md.

answer_for_all_processes
    changes     `world_size` and `global_ordinal` of `torch_xla.runtime`; the collectives of
                `torch_xla.core.xla_model`; `torch.distributed.init_process_group("xla")`
    because     gloo joins the processes of a dry run with backend="xla:cpu", and torch_xla sees
                only one in each. Code that uses its collectives would train one model per process,
                without an error.
    versions    torch_xla 2.8 and 2.9; this start-up is tpukit's own, so there is no issue upstream.
    until       backend="xla:cpu" is removed
"""

from collections.abc import Callable

from tpukit.essentials.display import TpukitRuntimeError

# Functions of torch_xla.core.xla_model. In this start-up each would reduce, gather or wait over one
# process, without an error.
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_bucketized", "all_to_all"),
    *("broadcast_master_param", "collective_broadcast", "collective_permute", "mesh_reduce"),
    *("optimizer_step", "reduce_gradients", "reduce_scatter", "reduce_scatter_bucketized"),
    *("rendezvous", "xla_rendezvous"),
)


def answer_for_all_processes(rank: int, world_size: int) -> None:
    """Make torch_xla's own calls return this run's values, or raise, in this process."""
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
