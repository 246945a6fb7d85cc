"""Every collective of torch_xla: how a rank calls it, and what plain torch says it must return.

`call(rank, world)` runs on the device and returns its tensors; `expected(rank, world)` gets them from `given`, which
every rank can work out for all the others.
"""

import torch


def given(rank, *, size=(4, 6), dtype=torch.float32):
    """Return what a rank brings: small whole numbers, so that sums and products are exact in every type."""
    numbers = torch.arange(torch.Size(size).numel()).reshape(size)
    if dtype == torch.bool:
        return (numbers + rank) % 3 == 0
    return ((numbers * 3 + rank * 5) % 4).to(dtype)


def everyone(world, **others):
    return torch.stack([given(rank, **others) for rank in range(world)])


def scale(factor, world):
    """Return the factor, or 1 where there is one rank: torch_xla then returns what came, unscaled."""
    return factor if world > 1 else 1


def halves(world):
    """Return the ranks in two groups, the even and the odd; in one where two would not be of one size."""
    return (
        [list(range(first, world, 2)) for first in range(2)]
        if world % 2 == 0
        else [list(range(world))]
    )


def my_half(rank, world):
    return next(half for half in halves(world) if rank in half)


def _device(tensor):
    return tensor.to("xla")


def _xm():
    import torch_xla.core.xla_model as xm

    return xm


def _all_reduce(op, dtype=torch.float32, by_halves=False, **others):
    def call(rank, world):
        groups = halves(world) if by_halves else None
        return _xm().all_reduce(op, _device(given(rank, dtype=dtype)), groups=groups, **others)

    return call


def _all_reduce_in_place(rank, world):
    tensors = [_device(given(rank)), _device(given(rank, size=(3,))), _device(given(rank, size=()))]
    _xm().all_reduce("sum", tensors, scale=0.5)
    return tensors


def _broadcast(rank, world):
    tensors = [_device(given(rank)), _device(given(rank, size=(2,)))]
    _xm().collective_broadcast(tensors, root_ordinal=world - 1)
    return tensors


def _shift(rank, world):
    pairs = [[source, (source + 1) % world] for source in range(world)]
    return _xm().collective_permute(_device(given(rank)), pairs)


def _send_to_last(rank, world):
    return _xm().collective_permute(_device(given(rank)), [[0, world - 1]])


def _many_in_a_row(rank, world):
    value = _device(given(rank))
    for _ in range(5):
        value = _xm().all_reduce("sum", value) / world
        value = _xm().all_gather(value, dim=0)[:4] + rank
    return value


def _many_expected(rank, world):
    values = everyone(world)
    for _ in range(5):
        mean = values.sum(0) / world
        values = torch.stack([mean + other for other in range(world)])
    return values[rank]


CHECKS = {
    "all_reduce sum": (_all_reduce("sum"), lambda rank, world: everyone(world).sum(0)),
    "all_reduce product": (_all_reduce("mul"), lambda rank, world: everyone(world).prod(0)),
    "all_reduce min": (_all_reduce("min"), lambda rank, world: everyone(world).amin(0)),
    "all_reduce max": (_all_reduce("max"), lambda rank, world: everyone(world).amax(0)),
    "all_reduce and": (
        _all_reduce("and", torch.bool),
        lambda rank, world: everyone(world, dtype=torch.bool).all(0),
    ),
    "all_reduce or": (
        _all_reduce("or", torch.bool),
        lambda rank, world: everyone(world, dtype=torch.bool).any(0),
    ),
    "all_reduce scaled": (
        _all_reduce("sum", scale=0.25),
        lambda rank, world: everyone(world).sum(0) * scale(0.25, world),
    ),
    "all_reduce in groups": (
        _all_reduce("sum", by_halves=True),
        lambda rank, world: everyone(world)[my_half(rank, world)].sum(0),
    ),
    "all_reduce of several": (
        _all_reduce_in_place,
        lambda rank, world: [
            everyone(world, size=size).sum(0) * scale(0.5, world) for size in ((4, 6), (3,), ())
        ],
    ),
    "all_gather": (
        lambda rank, world: _xm().all_gather(_device(given(rank)), dim=0),
        lambda rank, world: torch.cat(list(everyone(world))),
    ),
    "all_gather along another axis": (
        lambda rank, world: _xm().all_gather(_device(given(rank)), dim=1),
        lambda rank, world: torch.cat(list(everyone(world)), dim=1),
    ),
    "all_gather in groups": (
        lambda rank, world: _xm().all_gather(_device(given(rank)), dim=0, groups=halves(world)),
        lambda rank, world: torch.cat(list(everyone(world)[my_half(rank, world)])),
    ),
    "reduce_scatter": (
        lambda rank, world: _xm().reduce_scatter(
            "sum",
            _device(given(rank, size=(2 * world, 3))),
            scale=1.0,
            scatter_dim=0,
            shard_count=world,
        ),
        lambda rank, world: everyone(world, size=(2 * world, 3)).sum(0)[2 * rank : 2 * rank + 2],
    ),
    "reduce_scatter along another axis": (
        lambda rank, world: _xm().reduce_scatter(
            "max",
            _device(given(rank, size=(3, 2 * world))),
            scale=1.0,
            scatter_dim=1,
            shard_count=world,
        ),
        lambda rank, world: everyone(world, size=(3, 2 * world)).amax(0)[
            :, 2 * rank : 2 * rank + 2
        ],
    ),
    "all_to_all": (
        lambda rank, world: _xm().all_to_all(
            _device(given(rank, size=(2 * world, 3))),
            split_dimension=0,
            concat_dimension=1,
            split_count=world,
        ),
        lambda rank, world: torch.cat(
            [part[2 * rank : 2 * rank + 2] for part in everyone(world, size=(2 * world, 3))], dim=1
        ),
    ),
    "collective_permute": (_shift, lambda rank, world: given((rank - 1) % world)),
    "collective_permute to one": (
        _send_to_last,
        lambda rank, world: given(0) if rank == world - 1 else torch.zeros_like(given(0)),
    ),
    "collective_permute where each rank names its own pair": (  # as torch.distributed's send and recv do
        lambda rank, world: _xm().collective_permute(
            _device(given(rank)), [[(rank - 1) % world, rank]]
        ),
        lambda rank, world: given((rank - 1) % world),
    ),
    "broadcast": (_broadcast, lambda rank, world: [given(world - 1), given(world - 1, size=(2,))]),
    "collectives in a row, in one graph": (_many_in_a_row, _many_expected),
    "all_reduce of nothing": (
        lambda rank, world: _xm().all_reduce("sum", _device(torch.zeros(0, 3))),
        lambda rank, world: torch.zeros(0, 3),
    ),
    **{
        f"{op} of {str(dtype).removeprefix('torch.')}": (
            _all_reduce(op, dtype),
            lambda rank, world, fold=fold, dtype=dtype: fold(everyone(world, dtype=dtype)).to(
                dtype
            ),
        )
        for op, fold in (
            ("sum", lambda values: values.sum(0)),
            ("max", lambda values: values.amax(0)),
        )
        for dtype in (
            torch.float64,
            torch.bfloat16,
            torch.float16,
            torch.int8,
            torch.uint8,
            torch.int16,
            torch.int32,
            torch.int64,
        )
    },
    **{
        f"all_gather of {str(dtype).removeprefix('torch.')}": (
            lambda rank, world, dtype=dtype: _xm().all_gather(
                _device(given(rank, dtype=dtype)), dim=0
            ),
            lambda rank, world, dtype=dtype: torch.cat(list(everyone(world, dtype=dtype))),
        )
        for dtype in (torch.bool, torch.bfloat16, torch.int8, torch.int64, torch.complex64)
    },
}


def run_all():
    """Run every check on this core, eight in a graph (a compile each would take most of the time); return what came."""
    import torch_xla
    import torch_xla.runtime as xr

    rank, world = xr.global_ordinal(), xr.world_size()
    came, names = {}, list(CHECKS)
    for start in range(0, len(names), 8):
        tensors = {name: CHECKS[name][0](rank, world) for name in names[start : start + 8]}
        torch_xla.sync()
        for name, some in tensors.items():
            came[name] = [tensor.cpu() for tensor in some] if isinstance(some, list) else some.cpu()
    return came
