"""All TPU chips of a host as one core: each holds a part of every weight, and computes its share of the batch.

One process owns the chips (torch_xla's SPMD). Python sees rank 0 of 1 and tensors of their whole shape; the compiler
cuts tensors and work, and puts the exchange between the chips into the program. That is FSDP, since the output of every
layer is marked as cut along the batch: left to itself the compiler gathers activations of large layers, not weights.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace

from tpukit.essentials.backends import Topology, Tpu, XlaRuntime, runtimes
from tpukit.essentials.display import (
    InvalidTypeError,
    InvalidValueError,
    TpukitRuntimeError,
    explain,
    first_few,
    human_size,
)

_FEWEST = 1024  # numbers that are worth cutting: a bias costs a message in each direction, and saves nothing
_MANY = 0.01  # of all bytes: more of them on every chip are worth a line


class ShardedTpu(Tpu):
    """All chips as one core: no collective of its own, since a rank of one has nobody to wait for."""

    def __init__(self, chips: int) -> None:
        import numpy
        import torch
        import torch_xla
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        self.rank, self.world_size, self.chips = 0, 1, xr.global_runtime_device_count()
        if self.chips != chips:
            raise TpukitRuntimeError(
                f"the process has {self.chips} of the {chips} chips that it should have",
                fix="no other program on the chips, and no variable that gives a process a part of them",
            )
        self.device, self.real = torch_xla.device(), torch.float32
        self._mesh = xs.Mesh(numpy.arange(chips), (chips,), ("chips",))
        self._samples: set[int] = set()  # in batches
        self._states = weakref.WeakKeyDictionary()  # the tensors of each optimizer's state, by number
        torch.nn.modules.module.register_module_forward_hook(self._keep_batch_cut)

    def place(self, tensors: list) -> list:
        """Say of every tensor how it lies on the chips, before it is sent; return the large ones that stay whole.

        Also of a small one that it is whole: it comes back from the first step so, which otherwise changed the graph.
        """
        whole = []
        for tensor in (one for one in tensors if one.device.type == "xla"):
            is_large = tensor.numel() >= _FEWEST
            axis = self._longest(tensor.shape) if is_large else None
            if is_large and axis is None:
                whole.append(tensor)
            if not _is_cut(tensor):
                self._cut(tensor, axis)
        return whole

    def place_model(self, module) -> str:
        refused = [type(part).__name__ for part in module.modules() if "FullyShardedData" in type(part).__name__]
        if refused:
            raise InvalidTypeError(
                'shard="fsdp" cuts a plain module, and this one is cut already',
                found=f"{type(module).__name__} holds a {refused[0]}",
                fix="give core.model the module that was wrapped",
            )
        named = {id(one): (name, one) for name, one in (*module.named_buffers(), *module.named_parameters())}
        tensors = [one for _, one in named.values()]
        whole = [named[id(one)] for one in self.place(tensors)]
        return _told(whole, sum(one.nbytes for one in tensors), self.chips)

    def place_state(self, optimizer) -> None:
        import torch

        held = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
        if self._states.get(optimizer) != (numbers := [*map(id, held)]):  # new, or loaded from a checkpoint
            self._states[optimizer] = numbers
            self.place(held)

    def _longest(self, shape: tuple) -> int | None:
        """Return the longest axis that the chips divide; None where there is none."""
        axes = [axis for axis, size in enumerate(shape) if size % self.chips == 0]
        return max(axes, key=lambda axis: shape[axis], default=None)

    def _cut(self, tensor, axis: int | None):
        import torch_xla

        # torch_xla.distributed.spmd.mark_sharding returns another tensor around this one.
        torch_xla._XLAC._xla_mark_sharding(tensor, self._mesh.get_op_sharding(_along(axis, tensor.ndim)))
        return tensor

    def _keep_batch_cut(self, module, inputs, outputs):
        """Have what a layer returns lie on the chips as the batch does, and its gradient, too."""
        import torch
        from torch.utils import _pytree as tree

        def keep(tensor):
            is_batch = tensor.device.type == "xla" and tensor.ndim and tensor.shape[0] in self._samples
            return _kept_cut()(tensor, self._cut) if is_batch and not _is_traced(tensor) else tensor

        return keep(outputs) if isinstance(outputs, torch.Tensor) else tree.tree_map_only(torch.Tensor, keep, outputs)

    def barrier(self) -> None: ...

    def all_reduce(self, tensor, op: str):
        return tensor.to(self.real) if op == "mean" and not tensor.is_floating_point() else tensor

    def gather(self, tensor):
        return tensor

    def reduce_scatter(self, tensor):
        return tensor

    def broadcast(self, tensors: list) -> None:
        self.sync()  # what stays whole is sent now

    def part_of(self, shape: tuple) -> tuple:
        """Return the shape of what each chip gets of a batch: a part along the first axis, where they divide it."""
        divides = bool(shape) and shape[0] % self.chips == 0
        return (shape[0] // self.chips, *shape[1:]) if divides else tuple(shape)

    def to_device(self, tensors: list) -> list:
        """Send a batch, each tensor cut along its first axis on the host: no chip gets the whole."""
        import torch_xla
        import torch_xla.distributed.spmd as xs

        specs = []
        for tensor in tensors:
            is_cut = self.part_of(tensor.shape) != tuple(tensor.shape)
            self._samples |= {len(tensor)} if is_cut else set()
            spec = xs.ShardingSpec(self._mesh, _along(0 if is_cut else None, tensor.ndim))
            specs.append(spec.xla_spec(tensor) if tensor.ndim else None)
        return torch_xla._XLAC._xla_tensors_from_aten(list(tensors), [str(self.device)] * len(tensors), specs)

    def _copies(self, tensors: list) -> list:
        """Bring what is cut one after the other: each chip holds all of a tensor for as long as that takes."""
        copy = super()._copies
        return [copy([one])[0] for one in tensors] if any(map(_is_cut, tensors)) else copy(tensors)

    def memory(self) -> dict[str, int]:
        return {}  # "MemoryInfo not supported for SPMD virtual device", torch_xla 2.8 and 2.9


class ShardedRuntime(XlaRuntime):
    """One process that has all chips of a host; launch takes it for `shard`."""

    name = "xla:sharded"
    backend = ShardedTpu
    is_for_launch = False

    def is_present(self, machine) -> bool:
        return False

    def is_started(self) -> bool:
        return False  # XlaRuntime tells of the one runtime there is

    def core(self, topology: Topology) -> ShardedTpu:
        return ShardedTpu(topology.chips)


def choose_sharded(shard: str, choose: Callable[[int | None], Topology], **others: object) -> Topology:
    """Lay out a run of one process that has all chips; where one device is all there is, a run on that.

    `choose` lays out an ordinary run of so many cores.

    Raises:
        ValueError: there is no such `shard`, this backend cannot, or one of the `others` chooses devices as well.
    """
    if shard != "fsdp":
        raise InvalidValueError(f'shard is "fsdp" or None, got {shard!r}', fix='launch(..., shard="fsdp")')
    if given := [f"{name}={value!r}" for name, value in others.items() if value is not None]:
        raise InvalidValueError(
            'with shard="fsdp" all chips of one host are one rank, so nothing chooses among them',
            found=", ".join(given),
            fix=f"leave out {', '.join(name for name, value in others.items() if value is not None)}",
        )
    whole = choose(None)
    runtime = runtimes()[whole.backend]
    if runtime.name == "cpu":
        return choose(1)
    if runtime.sharded is None:
        raise InvalidValueError(
            f"the {whole.backend} backend cannot cut a model over devices",
            found=f"{whole.cores} x {whole.device}",
            fix="pip install 'tpukit[simulator]' and backend=\"xla\"; without shard a rehearsal holds the whole model",
        )
    if whole.cores == 1:
        return whole
    unit = whole.device.replace(" core", " chip") if whole.cores == whole.processes else whole.device
    device = f"{whole.cores} x {unit}"
    return replace(whole, backend=runtime.sharded, cores=1, processes=1, chips=whole.cores, device=device)


def how_it_is_cut(topology: Topology) -> str:
    """Say in one line what a launch with `shard` cuts."""
    if topology.chips > 1:
        return f"one process on {topology.device}; weights are cut over them"
    if topology.is_dry_run:
        return 'one CPU process holds the whole model here; backend="xla" rehearses how it is cut'
    return "one chip: there is nothing to cut"


def _along(axis: int | None, axes: int) -> tuple:
    return tuple("chips" if one == axis else None for one in range(axes))


def _is_cut(tensor) -> bool:
    import torch_xla
    from torch_xla.distributed.spmd import ShardingType

    return torch_xla._XLAC._get_xla_sharding_type(tensor) == ShardingType.TILED


def _is_traced(tensor) -> bool:
    """Say whether a tensor only stands for one, in a trace of torch's own or in `torch.func`: it cannot be marked."""
    import torch

    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return is_wrapped or torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


@functools.cache
def _kept_cut() -> Callable:
    """Return the function that marks a copy of a tensor, and in backward its gradient: a view could not be marked."""
    import torch

    class KeptCut(torch.autograd.Function):
        @staticmethod
        def forward(context, tensor, cut):
            context.cut = cut
            return cut(tensor.clone(), 0)

        @staticmethod
        def backward(context, gradient):
            return context.cut(gradient.clone(), 0), None

    return KeptCut.apply


def _told(whole: list[tuple[str, object]], size: int, chips: int) -> str:
    """Return a line about what every chip holds all of; "" where that is little."""
    on_each = sum(one.nbytes for _, one in whole)
    if on_each <= _MANY * size:
        return ""
    whole = sorted(whole, key=lambda pair: -pair[1].nbytes)
    longest = max(whole[0][1].shape, default=1)
    return explain(
        f"{len(whole)} tensors of {human_size(on_each)}, {on_each / size:.0%}, stay whole on every chip",
        found=first_few([f"{name} {tuple(one.shape)}" for name, one in whole], 3),
        fix=f"sizes that {chips} chips divide: {-(-longest // chips) * chips} in place of {longest}",
    )
