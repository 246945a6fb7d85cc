"""Train a model sharded over all TPU chips of a host, which act as a single core.

Each chip holds a part of every large weight and computes its share of the batch. With 8 chips:

    weight of a layer   (4096, 1024)   each chip holds (512, 1024)
    its bias            (1024,)        each chip holds (128,)
    batch               (32, 1024)     each chip gets (4, 1024)

One process opens all chips (torch_xla's SPMD). Python code sees one core, rank 0 of 1, and tensors
with their whole shapes. The compiler divides tensors and work, and adds the communication between
the chips to the program. tpukit marks the output of every layer as sharded along the batch, so the
compiler gathers weights, as FSDP does. Without these marks, it would gather the activations of
large layers instead.
"""

import functools
import math
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

# Tensors with fewer elements, such as most biases, are not sharded: they would save little memory,
# and need a message in each direction.
_FEWEST = 1024
# If every chip stores more than this share of a model's bytes in full, tpukit prints a line.
_LARGE_SHARE = 0.01


class ShardedTpu(Tpu):
    """The backend that joins all chips to one core, so collectives have nothing to exchange."""

    def __init__(self, chips: int) -> None:
        import numpy
        import torch
        import torch_xla
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        self.rank = 0
        self.world_size = 1
        self.chips = xr.global_runtime_device_count()
        if self.chips != chips:
            raise TpukitRuntimeError(
                f"the process has {self.chips} chips, and the launch needs {chips}",
                fix="stop other programs on the chips, and unset the environment variables that "
                "give a process a part of the chips: TPU_VISIBLE_CHIPS and TPU_PROCESS_BOUNDS",
            )
        self.device = torch_xla.device()
        self.real = torch.float32
        self._mesh = xs.Mesh(numpy.arange(chips), (chips,), ("chips",))
        self._batch_sizes: set[int] = set()  # first dimensions of the sharded batches so far
        # For each optimizer, the ids of the tensors in its state that were marked.
        self._states = weakref.WeakKeyDictionary()
        torch.nn.modules.module.register_module_forward_hook(self._keep_batch_sharded)

    def place(self, tensors: list) -> list:
        """Mark each XLA tensor as sharded over the chips, or as whole, before it is sent to them.

        Returns:
            the large tensors that cannot be sharded, because the number of chips divides none of
            their dimensions.
        """
        # A step returns all tensors with a mark. If a tensor had none before the first step, the
        # second step would need another graph. So small tensors are marked, too.
        whole = []
        for tensor in tensors:
            if tensor.device.type != "xla":
                continue
            axis = None
            if tensor.numel() >= _FEWEST:
                axis = self._longest_axis(tensor.shape)
                if axis is None:
                    whole.append(tensor)
            if not _is_sharded(tensor):
                self._shard(tensor, axis)
        return whole

    def place_model(self, module) -> str:
        for part in module.modules():
            if "FullyShardedData" in type(part).__name__:
                raise InvalidTypeError(
                    'shard="fsdp" shards a plain module, and this one is sharded already',
                    found=f"{type(module).__name__} holds a {type(part).__name__}",
                    fix=f"pass a module without {type(part).__name__}: core.model(module)",
                )
        # By id, because tied weights have two names for one tensor.
        named = {}
        for name, tensor in (*module.named_buffers(), *module.named_parameters()):
            named[id(tensor)] = (name, tensor)
        tensors = [tensor for _, tensor in named.values()]
        whole = [named[id(tensor)] for tensor in self.place(tensors)]
        size = sum(tensor.nbytes for tensor in tensors)
        return _warning_of_whole(whole, size, self.chips)

    def place_state(self, optimizer) -> None:
        import torch

        tensors = []
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        numbers = [id(tensor) for tensor in tensors]
        # The ids change in the first step, which creates the state, and if a checkpoint is loaded.
        if self._states.get(optimizer) != numbers:
            self._states[optimizer] = numbers
            self.place(tensors)

    def _longest_axis(self, shape: tuple) -> int | None:
        """Return the longest dimension that the number of chips divides; None if there is none."""
        axes = [axis for axis, size in enumerate(shape) if size % self.chips == 0]
        return max(axes, key=lambda axis: shape[axis], default=None)

    def _shard(self, tensor, axis: int | None):
        import torch_xla

        # Not torch_xla.distributed.spmd.mark_sharding, because it returns a wrapper of the tensor.
        spec = self._mesh.get_op_sharding(_along(axis, tensor.ndim))
        torch_xla._XLAC._xla_mark_sharding(tensor, spec)
        return tensor

    def _keep_batch_sharded(self, module, inputs, outputs):
        """Mark the output of a layer, and its gradient, as sharded along the batch."""
        import torch
        from torch.utils import _pytree as tree

        def keep(tensor):
            if tensor.device.type != "xla" or tensor.ndim == 0:
                return tensor
            # Mark only tensors whose first dimension has the size of a batch.
            if tensor.shape[0] not in self._batch_sizes or _is_traced(tensor):
                return tensor
            return _marked_copy()(tensor, self._shard)

        if isinstance(outputs, torch.Tensor):
            return keep(outputs)
        return tree.tree_map_only(torch.Tensor, keep, outputs)

    def barrier(self) -> None: ...

    def all_reduce(self, tensor, op: str):
        return self.with_fractions(tensor) if op == "mean" else tensor

    def gather(self, tensor):
        return tensor

    def reduce_scatter(self, tensor):
        return tensor

    def broadcast(self, tensors: list) -> None:
        self.sync()  # sends the tensors that every chip stores in full

    def part_of(self, shape: tuple) -> tuple:
        """Return the shape of each chip's part of a batch, which is divided along dimension 0.

        If the number of chips does not divide this dimension, the result is the whole shape.
        """
        if not shape or shape[0] % self.chips:
            return tuple(shape)
        return (shape[0] // self.chips, *shape[1:])

    def to_device(self, tensors: list) -> list:
        """Send the tensors of a batch; each chip gets its part of each tensor, see `part_of`."""
        import torch_xla
        import torch_xla.distributed.spmd as xs

        specs = []
        for tensor in tensors:
            axis = None
            if self.part_of(tensor.shape) != tuple(tensor.shape):
                axis = 0
                self._batch_sizes.add(len(tensor))
            spec = xs.ShardingSpec(self._mesh, _along(axis, tensor.ndim))
            specs.append(spec.xla_spec(tensor) if tensor.ndim else None)
        devices = [str(self.device) for _ in tensors]
        return torch_xla._XLAC._xla_tensors_from_aten(list(tensors), devices, specs)

    def _copies(self, tensors: list) -> list:
        """Copy tensors to the host; sharded tensors are copied one by one to save memory.

        A sharded tensor is first gathered on a chip.
        """
        copy = super()._copies
        if not any(_is_sharded(tensor) for tensor in tensors):
            return copy(tensors)
        copies = []
        for tensor in tensors:
            copies += copy([tensor])
        return copies

    def memory(self) -> dict[str, int]:
        # torch_xla 2.8 and 2.9 raise "MemoryInfo not supported for SPMD virtual device".
        return {}


class ShardedRuntime(XlaRuntime):
    """Starts one process that opens all chips of a host; `launch(shard="fsdp")` chooses it."""

    name = "xla:sharded"
    backend = ShardedTpu
    is_for_launch = False

    def is_present(self, machine) -> bool:
        return False

    def is_started(self) -> bool:
        return False  # a process has only one XLA runtime, and XlaRuntime reports it

    def core(self, topology: Topology) -> ShardedTpu:
        return ShardedTpu(topology.chips)


def choose_sharded(
    shard: str, choose: Callable[[int | None], Topology], **others: object
) -> Topology:
    """Return the topology of a launch with `shard`: one process with all chips of the host.

    On CPUs, and on a machine with one core, the result is the topology of a launch on one core.
    Such a launch shards nothing.

    Args:
        shard: `shard` of `launch`, "fsdp".
        choose: function that returns the topology of a launch without `shard`, for a number of
            cores, or for all cores if the number is None.
        **others: other arguments of `launch` that choose devices; all must be None.

    Raises:
        InvalidValueError: `shard` is not "fsdp"; the backend cannot shard a model; or one of the
            `others` is not None.
    """
    if shard != "fsdp":
        fix = 'launch(..., shard="fsdp")'
        raise InvalidValueError(f'shard must be "fsdp" or None, got {shard!r}', fix=fix)
    given = {name: value for name, value in others.items() if value is not None}
    if given:
        raise InvalidValueError(
            'with shard="fsdp" all chips of one host are one rank, so a launch always uses all '
            "of them",
            found=", ".join(f"{name}={value!r}" for name, value in given.items()),
            fix=f"leave out {', '.join(given)}",
        )
    # Start from the launch on all cores, and join its cores into one process.
    whole = choose(None)
    runtime = runtimes()[whole.backend]
    if runtime.name == "cpu":
        return choose(1)
    if runtime.sharded is None:
        raise InvalidValueError(
            f"the {whole.backend} backend cannot shard a model over devices",
            found=f"{whole.cores} x {whole.device}",
            fix='pip install xla_cpu_pjrt==0.0.1 and pass backend="xla", for a dry run with '
            'shards; or pass backend="cpu", for a dry run in which one process stores the whole '
            "model",
        )
    if whole.cores == 1:
        return whole
    unit = whole.device
    # With two cores per chip, as on v2 and v3, two cores are threads of one process.
    has_one_core_per_chip = whole.cores == whole.processes
    if has_one_core_per_chip:
        unit = unit.replace(" core", " chip")
    return replace(
        whole,
        backend=runtime.sharded,
        cores=1,
        processes=1,
        chips=whole.cores,
        device=f"{whole.cores} x {unit}",
    )


def how_it_is_cut(topology: Topology) -> str:
    """Return a line that says how a launch with `shard` divides the weights."""
    if topology.chips > 1:
        return f"one process on {topology.device}; the weights are sharded over them"
    if topology.is_dry_run:
        return (
            "one CPU process holds the whole model here; "
            'backend="xla" is a dry run that shards it as TPU chips would'
        )
    return "one chip: there is nothing to shard"


def _along(axis: int | None, axes: int) -> tuple:
    """Return the mesh axis of each dimension: (None, "chips") shards the second of two."""
    names: list[str | None] = [None] * axes
    if axis is not None:
        names[axis] = "chips"
    return tuple(names)


def _is_sharded(tensor) -> bool:
    import torch_xla
    from torch_xla.distributed.spmd import ShardingType

    return torch_xla._XLAC._get_xla_sharding_type(tensor) == ShardingType.TILED


def _is_traced(tensor) -> bool:
    """Return whether a tensor is a placeholder, from torch's tracing or from `torch.func`.

    A placeholder cannot be marked as sharded.
    """
    import torch

    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return is_wrapped or torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


@functools.cache
def _marked_copy() -> Callable:
    """Return a differentiable function that copies a tensor and marks the copy as sharded.

    The backward pass does the same with the gradient. A copy is needed because a view cannot be
    marked.
    """
    import torch

    class MarkedCopy(torch.autograd.Function):
        @staticmethod
        def forward(context, tensor, shard):
            context.shard = shard
            return shard(tensor.clone(), 0)

        @staticmethod
        def backward(context, gradient):
            return context.shard(gradient.clone(), 0), None

    return MarkedCopy.apply


def _warning_of_whole(whole: list[tuple[str, object]], size: int, chips: int) -> str:
    """Return a warning about tensors that every chip stores in full; "" if they are small.

    Args:
        whole: (name, tensor) of each such tensor.
        size: bytes of the whole model.
        chips: the number of chips.
    """
    size_of_whole = sum(tensor.nbytes for _, tensor in whole)
    if size_of_whole <= _LARGE_SHARE * size:
        return ""
    largest_first = sorted(whole, key=lambda pair: pair[1].nbytes, reverse=True)
    # The fix rounds the longest dimension of the largest tensor up to a multiple of the chips.
    _, largest = largest_first[0]
    longest_axis = max(largest.shape, default=1)
    divisible = math.ceil(longest_axis / chips) * chips
    share = f"{size_of_whole / size:.0%}"
    return explain(
        f"{len(whole)} tensors of {human_size(size_of_whole)}, {share} of the model, stay whole on "
        "every chip",
        found=first_few([f"{name} {tuple(tensor.shape)}" for name, tensor in largest_first], 3),
        fix=f"sizes divisible by {chips} chips: {divisible} in place of {longest_axis}",
    )
