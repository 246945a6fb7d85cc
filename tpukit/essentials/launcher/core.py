"""The view of a run that a worker function has: its rank, its device, and the collectives."""

import contextlib
import copy
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tpukit.essentials.backends import Backend, BackendMismatchError
from tpukit.essentials.data import Batches, BatchSource, MapDataset
from tpukit.essentials.display import InvalidTypeError, InvalidValueError, optional_subpackage
from tpukit.essentials.environment import write_whole
from tpukit.essentials.launcher import messages
from tpukit.essentials.launcher.agreement import Agreement
from tpukit.essentials.launcher.core_values import averaged_places, parameters_of
from tpukit.essentials.launcher.gradients import GradientAverage
from tpukit.essentials.launcher.notebook_output import NotebookOutput
from tpukit.essentials.launcher.random_numbers import RandomNumbers
from tpukit.essentials.launcher.tensors import save_tensors

_REDUCTIONS = ("sum", "mean", "min", "max")
_STEPS_IN_MEDIAN = 64  # steps that compiled are rare among so many


class Core(NotebookOutput):
    """The view of a run from a core; `launch` makes it and passes it to the worker function.

    Methods whose description says "Collective" must be called on every core, the same number of
    times and in the same order. A core that leaves out a call makes the others wait.

    Attributes:
        rank: number of this core, 0 to world_size - 1.
        world_size: number of cores in the run.
        hosts: number of hosts in the run; each has its own files.
        device: the `torch.device` of this core.
        chips: number of chips that are this core together, with `launch(shard=...)`; otherwise 1.
        backend: the device and the collectives; see `tpukit.essentials.backends.protocol.Backend`.
        waiting: the collective that this core is in; None for none.
        activity: a counter of progress; a core whose counter does not change hangs.
        ends_between_steps: True while SIGTERM only sets `end_requested`.
        end_requested: True once SIGTERM has arrived; see `finishing_steps`.
        seed_of_launch: the seed of all random numbers of the run.
        numbers: the random numbers; see `tpukit.essentials.launcher.random_numbers`.
        agreement: checks that the cores are in sync; see `tpukit.essentials.launcher.agreement`.
        in_fit: True while `fit` trains, which compares the cores itself.
        open_steps: number of `step` blocks that the worker function is in.
    """

    hosts = 1

    def __init__(self, backend: Backend, send: Callable[[object], None], seed: int = 0):
        super().__init__(backend.rank, send)
        self.world_size = backend.world_size
        self.device = backend.device
        self.chips = backend.chips
        self.backend = backend
        self.waiting: str | None = None
        self.ends_between_steps = False
        self.end_requested = False
        self.seed_of_launch = seed
        self.agreement = Agreement(self)
        self.in_fit = False
        self.numbers = RandomNumbers(self)
        self.open_steps = 0
        self._began = time.monotonic()
        # Called in every step; it keeps the pattern of gradients of each optimizer.
        self._average_gradients = GradientAverage(backend, self.agreement.names_of, self.print)
        self._step_seconds: deque[float] = deque(maxlen=_STEPS_IN_MEDIAN)

    def __repr__(self) -> str:
        return f"core {self.rank} of {self.world_size} on {self.device}"

    def model(self, module, *, in_place: bool = False, allow_different: Iterable[str] = ()):
        """Return a copy of a module on the device, with rank 0's weights. Collective.

        It is a copy, so the notebook's module stays as it was, also if cores are threads of one
        process (v2 and v3). A tensor with several names, such as an embedding that is also the
        output layer, stays the same tensor. A loss with parameters or class weights needs it, too.

        BatchNorm layers use the statistics of this core's share of the batch, as on chips.

        Weights and buffers must stay equal on all cores. tpukit compares them after the first
        step, then ever more rarely, before `core.save`, and when the worker function returns.

        With `launch(shard=...)` the module itself is moved, tensor by tensor, because the host
        may not have the memory for a copy.

        Args:
            module: a `torch.nn.Module`.
            in_place: move the module itself and return it, for a framework that refers to it.
            allow_different: patterns of names (as in `fnmatch`) of weights and buffers that may
                differ between the cores, such as `["*.counts"]`.

        Raises:
            OutOfSyncError: the cores pass different modules.
            InvalidTypeError: the module cannot be copied; with `shard`, another library has
                sharded it already.
            InvalidValueError: a lazy layer has no weights yet.
        """
        # Before the first weight is sent: different models would make the broadcast hang or fail.
        self.agreement.before_model(module)
        is_here = any(one.device.type == self.device.type for one in module.parameters())
        is_too_large_to_copy = self.chips > 1 and not is_here
        if not (in_place or is_too_large_to_copy):
            module = _copy(module)
        module = _move(module, self.device)
        self.agreement.add_model(module, allow_different)
        with self._together("model"):
            notice = self.backend.place_model(module)
            if notice:
                self.print(notice)
            self.backend.broadcast([*module.parameters(), *module.buffers()])
        return module

    def batches(
        self,
        dataset: MapDataset | BatchSource | Iterable | Callable[[int, int], Iterable],
        *,
        batch_size: int,
        steps: int | None = None,
        shuffle: bool = False,
        weights: Sequence[float] | object | None = None,
        drop_last: bool = False,
        mask: bool = False,
        buckets: Sequence[int] | object | None = None,
        seed: int = 0,
        workers: int | None = None,
        threads: int = 1,
    ) -> Batches:
        """Return this core's batches of a dataset, on the device, prepared ahead.

        All batches have the same shape, so a step is compiled once.

        *Images.* `PackedImages`, `CachedImages` and a `torch.utils.data.Subset` of them give
        `(images, labels)`: uint8 of (batch_size, 3, H, W) in [0, 255], and float32 of
        (batch_size, L) or, for classes, int64 of (batch_size,). With masks it is `(images, masks)`
        with int64 of (batch_size, H, W), or both as {"labels": ..., "masks": ...}. Normalise and
        augment on the device.

        *Any other dataset* gives batches nested as its items are: tuples, dicts, or both. Their
        tensors are sent in a single transfer. Hugging Face's need `dataset.with_format("torch")`.
        Strings stay in host memory as lists; `fit` and `evaluate` refuse them.

        *Samples of varying length* need `buckets=(64, 128, 256)`. Each batch is padded to one of
        these lengths, the same on all cores at each step, so a step is compiled once per length;
        core 0 prints how often. A mask of the positions with data is added, (batch_size, length):
        as "attention_mask" in mappings, otherwise as a last part. `tpukit.Buckets` sets the axis,
        the padding value, known lengths, and whether longer samples are cut; without it they are
        an error. `evaluate` and `predict` take such batches if the model returns a row per
        sample. Outputs with a row per position need one length, `buckets=(256,)`, or
        `keep_outputs=False`. Without `shuffle` an epoch is in the order of length, and
        `Batches.current` has the sample numbers of a batch.

        *A dataset that can only be read in order*, such as an IterableDataset, needs `steps=1000`,
        the steps per epoch. Each process that reads has its own share, which starts again when it
        ends. The best form is a function of (share, shares) that opens a share in each process:
        `lambda share, shares: wds.WebDataset(urls[share::shares], nodesplitter=None, ...)`.
        Each process reads a plain iterable completely and keeps every shares-th sample; that is
        slow with many processes, and needs the same order in all of them. A checkpoint keeps the
        epoch and the number of steps; a resumed run reads the stream from its start again.

        Args:
            dataset: `PackedImages`, `CachedImages`, or any dataset with a length whose items
                `torch.utils.data.default_collate` can stack; with `steps` an iterable, or a
                function that opens it.
            batch_size: samples per core and step; with `launch(shard=...)` of the whole run, a
                multiple of `core.chips`.
            steps: steps per epoch, only for a dataset that is read in order.
            shuffle: use a new order in each epoch, the same on every core. Otherwise every core
                has one stretch, and `core.gather(outputs)[:len(dataset)]` is each sample once, in
                dataset order.
            weights: (N,) numbers from 0 on, one per sample, as for torch's WeightedRandomSampler.
                Each epoch draws N samples with replacement, in proportion to the weights. The
                draw depends on seed and epoch only, so it is the same for any number of cores.
            drop_last: leave out samples that do not fill a step; otherwise samples are repeated.
            mask: add a bool tensor of (batch_size,) to every batch, False for repeated samples.
            buckets: lengths to pad to, or a `tpukit.Buckets`.
            seed: seed of the order.
            workers: processes per core that make batches. None for as many as the machine has
                free processors if the records hold JPEG, and for 0 otherwise, which reads the
                dataset in the training loop.
            threads: threads that gather the batches of a source if no process does.

        Returns:
            An iterable of batches with a length; iterate once per epoch.

        Raises:
            InvalidValueError: the dataset is empty or too small for `drop_last`; a number is out
                of range; a sample is longer than the largest bucket; `shuffle`, `weights`, `mask`
                or `buckets` is set for a dataset that is read in order.
            InvalidTypeError: `steps` is missing for a dataset that is read in order, or set for
                another.
        """
        if batch_size % self.chips:
            next_multiple = math.ceil(batch_size / self.chips) * self.chips
            raise InvalidValueError(
                f'batch_size is of the whole run with shard="fsdp", and {self.chips} chips do not divide {batch_size}',
                fix=f"{next_multiple}, or another multiple of {self.chips}",
            )
        options = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "weights": weights,
            "mask": mask,
            "seed": seed,
            "workers": workers,
            "rank": self.rank,
            "world_size": self.world_size,
            "send": self.backend.to_device,
            "shares_process": self.backend.shares_process,
            "numbers": self.numbers.own,
        }
        if steps is not None:
            with optional_subpackage("core.batches(steps=...)"):
                from tpukit.training import StreamBatches
            stream = StreamBatches(dataset, steps=steps, buckets=buckets, **options)
            return self.agreement.add_batches(stream)
        if buckets is not None and not hasattr(buckets, "lengths"):
            with optional_subpackage("core.batches(buckets=...)"):
                from tpukit.training import Buckets
            buckets = Buckets(buckets)
        batches = Batches(
            dataset,
            drop_last=drop_last,
            buckets=buckets,
            threads=threads,
            **options,
        )
        self.agreement.add_batches(batches)
        if buckets is not None:
            self.print(batches.sampler.in_words())
        return batches

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run the training step inside the `with` block; on a TPU, compile it as one graph.

        Put the forward pass, the backward pass and the optimizer step of a batch into the block.
        On a TPU they run as one program when the block ends.

        Inside the block each core draws its own random numbers: dropout, noise, augmentation.
        Outside of it, all cores draw the same numbers on the host, so a random split of the data is
        the same on every core. After a call of `seed`, they differ outside as well.
        """
        began = time.monotonic()
        traced = self.backend.traced
        self.doing = "tracing" if traced else None
        self.open_steps += 1
        if self.backend.shares_process and not self.numbers.seeded:
            self.seed()  # another core uses the host's numbers, too, so they cannot be put back
        try:
            with self.numbers.own():
                yield
            self.doing = "running" if traced else None
            self.sync()
        finally:
            self.doing = None
            self.open_steps -= 1
        self._count_step(began)
        if not self.open_steps:
            self.agreement.end_of_step()

    def sync(self) -> None:
        """Run all operations recorded since the last step.

        Otherwise a TPU makes them a part of the next step's graph, which is then compiled again.
        """
        with self._in_graph("step"):
            self.backend.sync()

    @contextlib.contextmanager
    def replayed_step(self) -> Iterator[None]:
        """Wrap the replay of a captured step; `fit` uses this in place of `step`."""
        began = time.monotonic()
        self.doing = "running"
        try:
            with self._in_graph("step"):
                yield
        finally:
            self.doing = None
        self._count_step(began)
        if self.backend.after_sync:
            self.backend.after_sync()

    def _count_step(self, began: float) -> None:
        self.activity += 1
        self._step_seconds.append(time.monotonic() - began)

    def optimizer_step(
        self,
        optimizer,
        *,
        clip: float | None = None,
        average_also: Iterable = (),
        weight=None,
    ) -> None:
        """Average the gradients over the cores, step, and clear them. Collective.

        Gradients of several calls of `backward` are averaged once, here. A core without a
        gradient for a parameter counts as zero; a parameter without one on all cores is left
        alone. A gradient or zeros are sent for every parameter that requires a gradient, so freeze
        the parameters that you do not train: `parameter.requires_grad_(False)`.

        Args:
            optimizer: any optimizer of torch.optim.
            clip: largest norm of all averaged gradients together. Longer ones are scaled down on
                the device. `clip_grad_norm_` before this call would clip each core's own
                gradients, which is a different result.
            average_also: float tensors, such as buffers and losses, to overwrite with their mean
                over the cores in the same message.
            weight: float32 tensor, (); this core's weight, if the gradients are those of a sum,
                as over tokens. They are divided by the weight of all cores. It is overwritten
                with its mean over the cores.

        Raises:
            InvalidValueError: with several cores, parameters are not on the device, or gradients
                are sparse.
            OutOfSyncError: the cores train different parameters.
        """
        import torch

        if weight is not None:
            average_also = [*average_also, weight]
        self.average_gradients(optimizer, average_also=average_also)
        if weight is not None:
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    # The mean of sums by the mean of weights is the sum by the summed weight.
                    parameter.grad.div_(weight)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), clip)
        with self.agreement.own_step():
            optimizer.step()
        # None and not zeros: a parameter without a gradient is then left alone in the next step.
        optimizer.zero_grad(set_to_none=True)

    def average_gradients(self, optimizer, *, average_also: Iterable = ()) -> None:
        """Average the gradients over the cores, as `optimizer_step` does. Collective."""
        self.agreement.before_average(optimizer)
        with self._together("optimizer_step"):
            try:
                self._average_gradients(optimizer, average_also)
            except BackendMismatchError as error:
                raise self.agreement.gradients_error(optimizer, error) from error

    def average_buffers(self, module) -> None:
        """Overwrite float buffers with their mean over the cores. Collective.

        Each core's BatchNorm keeps running statistics of the batches it gets. Call this
        before you evaluate or save, so that all cores have the mean.
        """
        with self._together("average_buffers"):
            self.backend.average(averaged_places(module)())

    def seed(self, *words: int) -> None:
        """Seed this core's random numbers by the run's seed, these numbers and the rank.

        `fit` calls it with the number of each step, so a resumed run draws the same numbers. A
        second call of `fit` in a launch passes the number of the calls before it as well.

        On v2 and v3 two cores are threads of one process. Numbers that the device or a dataset in
        `core.batches` draws are each core's own there, too; without `workers=` the cores read in
        turn. All other numbers of the host (`random`, `numpy.random`, torch on the CPU) come from
        generators that both cores share, and differ from run to run. So make the model in the
        notebook, and draw from generators of your own.
        """
        self.numbers.seed(*words)

    def same_seed(self, *words: int) -> None:
        """Seed the host's random numbers the same on every core, within steps as well.

        Use it if the host decides by chance and all cores must decide alike: dropped layers, a
        number of repetitions, a size. Numbers of the device, such as dropout on a TPU, stay each
        core's own. In a dry run on CPU processes the host is the device, so dropout is equal there.
        """
        self.numbers.seed(*words, own=False)

    @contextlib.contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """Let SIGTERM set `end_requested` and not interrupt; `fit` then ends its step and saves.

        The kernel waits for core 0 to do that, also after an interrupt; `signals` says how long.
        """
        self.ends_between_steps = True
        self._send(messages.FinishesSteps(self.rank))
        try:
            yield
        finally:
            self.ends_between_steps = False

    def all_reduce(self, tensor, op: str = "sum"):
        """Return the sum, mean, minimum or maximum of a tensor over the cores. Collective.

        Args:
            tensor: of the same shape and dtype on every core.
            op: "sum", "mean", "min" or "max".

        Raises:
            InvalidValueError: `op` is none of these, or the tensors differ.
        """
        if op not in _REDUCTIONS:
            raise InvalidValueError(
                f"all_reduce has no op={op!r}",
                fix=f"op is one of {', '.join(map(repr, _REDUCTIONS))}",
            )
        with self._together("all_reduce"):
            return self.backend.all_reduce(tensor.detach(), op)

    def mean(self, value):
        """Return the mean over the cores of a number, a tensor, or a dict of them. Collective.

        A tensor stays on the device, so this does not wait for it; a number becomes a float.
        """
        import torch

        if isinstance(value, dict):
            return {name: self.mean(part) for name, part in value.items()}
        if isinstance(value, torch.Tensor):
            return self.all_reduce(value, "mean")
        # Sent in two parts, because float32, the only type of some devices, cannot hold
        # 16,777,217. They are added in host memory.
        high = torch.tensor(float(value), dtype=self.backend.real)
        rest = 0.0
        if high.isfinite():
            rest = float(value) - high.item()
        low = torch.tensor(rest, dtype=self.backend.real)
        (mine,) = self.to_device([torch.stack([high, low])])
        (parts,) = self.to_host([self.gather(mine)])
        return parts.double().view(-1, 2).sum(1).mean().item()

    def gather(self, tensor):
        """Return the tensors of all cores along the first axis, in order of rank. Collective.

        The gradient flows back to the core that each row came from, as a contrastive loss over
        all cores needs. In that case backward is collective, too.

        Args:
            tensor: of shape (N, ...), the same on every core; a scalar counts as (1,).

        Returns:
            A tensor of shape (world_size * N, ...).
        """
        import torch

        if tensor.ndim == 0:
            tensor = tensor.reshape(1)
        if tensor.requires_grad and torch.is_grad_enabled():
            return _with_gradient(self, tensor)
        with self._together("gather"):
            return self.backend.gather(tensor.detach())

    def init_process_group(self) -> None:
        """Join the cores in torch.distributed's default group as well. Collective.

        Layers and metrics that average by themselves ask `torch.distributed.is_initialized()`,
        which is otherwise False on chips and in a dry run. On CUDA and TorchTPU it is True anyway.
        """
        with self._together("init_process_group"):
            self.backend.init_process_group()

    def barrier(self) -> None:
        """Wait until every core has come here. Collective."""
        with self._together("barrier"):
            self.backend.barrier()

    def save(self, value: object, path: str | os.PathLike) -> None:
        """Write a value with `torch.save` from core 0, its tensors on the CPU. Collective.

        The file gets its name only when it is complete, so a run that is cut off leaves the old
        file. Call it on every core, not under `if core.is_main`.

        Raises:
            OutOfSyncError: the cores of a loop of your own are out of sync.
            OSError: the file cannot be written.
        """
        with self._in_graph("save"):
            self.backend.sync()
        if not self.in_fit:
            with self._together("save"):
                self.agreement.compare_loop("before core.save")
        if self.is_main and not self.backend.is_recording:
            path = Path(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            host = self.to_host(value)
            # It writes another file, and renames it when it is complete.
            with write_whole(path) as file:
                save_tensors(host, file)
        self.barrier()  # so that every core may read the file afterwards

    def to_host(self, value: object) -> object:
        """Return a value with all its tensors in host memory, in a single transfer.

        It goes through nested dicts, lists and tuples. Tensors in host memory are not copied.
        """
        import torch
        from torch.utils import _pytree as tree

        leaves, structure = tree.tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        with self._in_graph("to_host"):
            moved = iter(self.backend.to_cpu(tensors))
        leaves = [next(moved) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tree.tree_unflatten(leaves, structure)

    def snapshot(self, value: object) -> object:
        """Return `to_host` of a value as it is now; tensors in host memory are copied, too."""
        import torch
        from torch.utils import _pytree as tree

        def cloned(tensor):
            return tensor.clone() if tensor.is_cpu else tensor

        return self.to_host(tree.tree_map_only(torch.Tensor, cloned, value))

    def to_device(self, tensors: list) -> list:
        """Copy tensors from host memory to this core's device, in a single transfer.

        Args:
            tensors: of any shapes and dtypes, on the CPU.

        Returns:
            the copies, in the same order.
        """
        return self.backend.to_device(tensors)

    @property
    def seconds(self) -> float:
        """Seconds since this core started."""
        return time.monotonic() - self._began

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of the host per step, over the last 64; None before the first step."""
        if not self._step_seconds:
            return None
        return statistics.median(self._step_seconds)

    @contextlib.contextmanager
    def _together(self, name: str) -> Iterator[None]:
        """Mark a collective: an exception within it was most likely caused by another core."""
        outer = self.waiting
        self.waiting = outer or name  # the user called the outermost
        try:
            yield
        except BaseException as error:
            # For the report of the failure, because it may be caught, or raised from another.
            error.waiting = self.waiting
            raise
        finally:
            self.waiting = outer
        self.activity += 1

    def _in_graph(self, name: str) -> contextlib.AbstractContextManager:
        """Mark a wait for the device, which contains collectives if they are part of the graph."""
        if self.backend.in_graph and self.waiting is None:
            return self._together(name)
        return contextlib.nullcontext()


def _with_gradient(core: Core, tensor):
    """Gather a tensor; backward gives each core the sum of all cores' gradients for its rows."""
    import torch

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(context, mine):
            with core._together("gather"):
                return core.backend.gather(mine.detach())

        @staticmethod
        def backward(context, gradient):
            with core._together("gather's backward"):
                return core.backend.reduce_scatter(gradient.contiguous())

    return Gather.apply(tensor)


def _copy(module):
    """Copy a module, also if it has computed tensors, as `torch.nn.utils.weight_norm` does."""
    computed = {}
    for layer in module.modules():
        for value in vars(layer).values():
            if getattr(value, "grad_fn", None) is not None:
                computed[id(value)] = value.detach()  # deepcopy refuses tensors with a history
    try:
        return copy.deepcopy(module, computed)
    except TypeError as error:  # a lock, an open file
        raise InvalidTypeError(
            f"core.model makes a copy, and a part of this {type(module).__name__} cannot be copied",
            found=error,
            fix="core.model(model, in_place=True), which moves the model itself",
        ) from error


def _move(module, device):
    """Move a module to a device; a tensor with several names stays a single tensor.

    On XLA `Module.to` makes a tensor per name, and these are then trained separately.
    """
    places: dict[int, list[tuple[dict, str]]] = {}
    for layer in module.modules():
        for tensors in (layer._parameters, layer._buffers):
            for name, tensor in tensors.items():
                places.setdefault(id(tensor), []).append((tensors, name))
    module = module.to(device)
    for (first_tensors, first_name), *others in places.values():
        for tensors, name in others:
            tensors[name] = first_tensors[first_name]
    return module
