"""What a worker sees: its rank, its device, and the few things that cores do together."""

import contextlib
import copy
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


class Core(NotebookOutput):
    """One core's view of a run; `launch` makes it and hands it to the worker function.

    Every core must call what says "together" the same number of times, in the same order.

    Attributes:
        rank: this core's number, 0 to world_size - 1.
        world_size: cores in the run.
        hosts: hosts in the run; each has files of its own.
        device: where this core's tensors live.
        chips: that are this core together, with launch's `shard`; otherwise 1.
        backend: what runs the device and the collectives; see `tpukit.essentials.backends.protocol.Backend`.
        waiting: the collective this core is in, None outside of one.
        activity: progress counter; unchanged means stalled.
        ends_between_steps: True while SIGTERM does not interrupt the worker function but only sets `end_requested`.
        end_requested: True once SIGTERM has arrived; see `finishing_steps`.
        seed_of_launch: what all random numbers of the run come from.
        numbers: whose the random numbers are; see `tpukit.essentials.launcher.random_numbers`.
        agreement: checks that the cores are in sync; see `tpukit.essentials.launcher.agreement`.
        in_fit: True while `fit` trains, which compares at moments of its own.
        open_steps: how many `step` blocks the worker function is in, one within the other.
    """

    hosts = 1

    def __init__(self, backend: Backend, send: Callable[[object], None], seed: int = 0):
        super().__init__(backend.rank, send)
        self.world_size = backend.world_size
        self.device, self.chips = backend.device, backend.chips
        self.backend = backend
        self.waiting: str | None = None
        self.ends_between_steps = self.end_requested = False
        self.seed_of_launch, self._began = seed, time.monotonic()
        self.agreement, self.in_fit = Agreement(self), False
        self._average_gradients = GradientAverage(backend, self.agreement.names_of, self.print)
        self.numbers, self.open_steps = RandomNumbers(self), 0
        self._steps: deque[float] = deque(maxlen=64)  # seconds of the last ones; those that compiled are rare in it

    def __repr__(self) -> str:
        return f"core {self.rank} of {self.world_size} on {self.device}"

    def model(self, module, *, in_place: bool = False, allow_different: Iterable[str] = ()):
        """Return a copy of a module on the device, on every core with rank 0's weights and buffers, together.

        A copy: the notebook's own stays what it was, also where cores are threads of one process (v2 and v3).
        Its BatchNorm layers use the statistics of this core's share of the batch, as they do on chips. Weights and
        buffers that have several names, such as an embedding that is also the output layer, stay one. A loss that has
        parameters, or weights of classes, goes through here as well. With `in_place` the module itself is moved: for a
        framework that holds on to it.

        Its weights and buffers stay the same on every core, which is compared after the first step, after each epoch,
        before a save and at the end. `allow_different=["*.counts"]` names those that may differ, as `fnmatch` has it.

        With launch's `shard` it is no copy but the module itself, whose tensors leave the host one after the other: a
        model that no chip can hold would take the host twice.

        Raises:
            OutOfSyncError: the cores call it with different models.
            TypeError: the module cannot be copied; with `shard`, it has been cut by another library.
        """
        self.agreement.before_model(module)
        is_here = any(one.device.type == self.device.type for one in module.parameters())
        in_place = in_place or (self.chips > 1 and not is_here)
        module = _move(module if in_place else _copy(module), self.device)
        self.agreement.add_model(module, allow_different)
        with self._together("model"):
            if told := self.backend.place_model(module):
                self.print(told)
            self.backend.broadcast([*module.parameters(), *module.buffers()])
        return module

    def batches(
        self,
        dataset: MapDataset | BatchSource | Iterable | Callable[[int, int], Iterable],
        *,
        batch_size: int,
        steps: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        mask: bool = False,
        buckets: Sequence[int] | object | None = None,
        seed: int = 0,
        workers: int | None = None,
        threads: int = 1,
    ) -> Batches:
        """Make this core's batches of a dataset, on the device, every one of the same shape, prepared ahead.

        `PackedImages` and a `CachedImages`, and a `torch.utils.data.Subset` of one, give `(images, labels)`:
        (batch_size, 3, H, W) uint8 in [0, 255] and (batch_size, L) float32, or (batch_size,) int64 of classes; with
        masks `(images, masks)`, (batch_size, H, W) int64, or both as {"labels": ..., "masks": ...}. Normalise and
        augment on the device.

        Any other dataset gives batches nested as its items are: tuples, dicts, and dicts in tuples, whose tensors are
        sent in one transfer: text, sound, tables. Hugging Face's: `dataset.with_format("torch")`. Strings stay in host
        memory, as lists; `fit` and `evaluate` refuse them.

        Samples of varying length need `buckets=(64, 128, 256)`: each batch is padded to one of these lengths, at a step
        the same on all cores, so a step is compiled once for each; core 0 says how often. A mask of the positions that
        hold data comes along, (batch_size, length): "attention_mask" in mappings, a last part otherwise. What is padded
        and with what, the axis, lengths known beforehand, and whether longer samples are cut, says `tpukit.Buckets`;
        a sample longer than the largest is an error otherwise. `evaluate` and `predict` take such batches, too, where
        the model returns one row for each sample, as a classifier does. What has a row for each position can only be
        joined at one length, `buckets=(256,)`, or not be kept, `keep_outputs=False`. An epoch in order then is in
        order of length, and `Batches.current` says which samples a batch has.

        A dataset that can only be read in order, as an IterableDataset, needs `steps=1000`, the steps of an epoch. Each
        process that reads has a share of its own, which starts over where it ends; epochs follow each other in it.
        Best is a function of (share, shares) that opens it, called in each process:
        `lambda share, shares: wds.WebDataset(urls[share::shares], nodesplitter=None, workersplitter=None)...`
        A plain iterable is read whole in each process, which keeps every shares-th sample: that is slow where many
        read, and it must have the same order in all of them. A checkpoint keeps the epoch and the steps done; a resumed
        run reads the stream from its start again.

        Args:
            dataset: `PackedImages`, a `CachedImages`, or anything with a length whose items `torch.utils.data.default_collate`
                can stack; with `steps` an iterable, or a function that opens one.
            batch_size: samples a core and step; with launch's `shard` of the whole run, and `core.chips` divides it.
            steps: of an epoch, for a dataset that is read in order.
            shuffle: a new order each epoch, the same on every core. In order, every core has one stretch, and
                `core.gather(outputs)[:len(dataset)]` is each sample once, in dataset order.
            drop_last: leave out the samples that do not fill a step; otherwise samples are repeated to fill it.
            mask: add a (batch_size,) bool tensor to every batch, False for such repeated samples.
            buckets: the lengths that samples of varying length are padded to, or a `tpukit.Buckets`.
            seed: decides the order.
            workers: processes a core that make batches. None: for records that hold JPEG, as many as the machine has
                processors left; for any other dataset 0, which calls it in the training loop.
            threads: that gather a source's batches where no process does.

        Raises:
            ValueError: the dataset is empty, or too small for `drop_last`, or a number is out of range; a sample is
                longer than the largest bucket; a stream is to be shuffled, masked or put into buckets.
            TypeError: `steps` is missing for a dataset that is read in order, or given for another.
        """
        if self.chips > 1 and batch_size % self.chips:
            raise InvalidValueError(
                f'batch_size is of the whole run with shard="fsdp", and {self.chips} chips do not divide {batch_size}',
                fix=f"{-(-batch_size // self.chips) * self.chips}, or another multiple of {self.chips}",
            )
        options = {"batch_size": batch_size, "rank": self.rank, "world_size": self.world_size, "seed": seed}
        options |= {"workers": workers, "send": self.backend.to_device, "shares_process": self.backend.shares_process}
        options["numbers"] = self.numbers.own
        if steps is not None:
            with optional_subpackage("core.batches(steps=...)"):
                from tpukit.training import StreamBatches
            options |= {"steps": steps, "shuffle": shuffle, "mask": mask, "buckets": buckets}
            return self.agreement.add_batches(StreamBatches(dataset, **options))
        if buckets is not None and not hasattr(buckets, "lengths"):
            with optional_subpackage("core.batches(buckets=...)"):
                from tpukit.training import Buckets
            buckets = Buckets(buckets)
        options |= {"shuffle": shuffle, "drop_last": drop_last, "mask": mask, "buckets": buckets, "threads": threads}
        batches = self.agreement.add_batches(Batches(dataset, **options))
        if buckets is not None:
            self.print(batches.sampler.in_words())
        return batches

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Wrap one step: on a TPU, all of it becomes one compiled graph and one dispatch.

        Random numbers in it are this core's own: dropout, noise, augmentation. Outside of steps all cores draw the same
        on the host, as for a split of the data, unless `seed` was called.
        """
        began = time.monotonic()
        traced = self.backend.traced
        self.doing = "tracing" if traced else None
        self.open_steps += 1
        if self.backend.shares_process and not self.numbers.seeded:
            self.seed()  # the host's are another core's as well, and cannot be put back
        try:
            with self.numbers.own():
                yield
            self.doing = "running" if traced else None
            self.sync()
        finally:
            self.doing = None
            self.open_steps -= 1
        self.activity += 1
        self._steps.append(time.monotonic() - began)
        if not self.open_steps:
            self.agreement.end_of_step()

    def sync(self) -> None:
        """Run what was recorded since the last step, which on a TPU would become part of the next one's graph."""
        with self._in_graph("step"):
            self.backend.sync()

    @contextlib.contextmanager
    def replayed_step(self) -> Iterator[None]:
        """Wrap the run of a program that an earlier step has recorded; `fit` does so where it may."""
        began = time.monotonic()
        self.doing = "running"
        try:
            with self._in_graph("step"):
                yield
        finally:
            self.doing = None
        self.activity += 1
        self._steps.append(time.monotonic() - began)
        if self.backend.after_sync:
            self.backend.after_sync()

    def optimizer_step(self, optimizer, *, clip: float | None = None, average_also: Iterable = ()) -> None:
        """Average the gradients over the cores, step, and clear them, together.

        Gradients that were added up over several calls of `backward` are averaged once, here. A core that has none for
        some parameter counts as zero there; a parameter for which no core has one is left alone. Both are sent, so
        freeze what is not trained: `parameter.requires_grad_(False)`.

        Args:
            optimizer: any of torch.optim's.
            clip: the largest norm of all averaged gradients together; longer ones are shortened to it, on the device.
                `clip_grad_norm_` before this call would shorten each core's own, which is something else.
            average_also: float tensors, overwritten with their mean over the cores in the same message: buffers, losses.

        Raises:
            ValueError: on several cores, where parameters are not on the device, or gradients are sparse.
        """
        import torch

        self.average_gradients(optimizer, average_also=average_also)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), clip)
        with self.agreement.own_step():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def average_gradients(self, optimizer, *, average_also: Iterable = ()) -> None:
        """Average the gradients over the cores, together, as `optimizer_step` does before it steps."""
        self.agreement.before_average(optimizer)
        with self._together("optimizer_step"):
            try:
                self._average_gradients(optimizer, average_also)
            except BackendMismatchError as error:
                raise self.agreement.gradients_error(optimizer, error) from error

    def average_buffers(self, module) -> None:
        """Give every core the mean of the cores' float buffers, together.

        After it BatchNorm's running statistics, which each core keeps of its own share, are those of the whole batch
        in their mean; call it before evaluating or saving.
        """
        with self._together("average_buffers"):
            self.backend.average(averaged_places(module)())

    def seed(self, *words: int) -> None:
        """Make the random numbers from here on depend on the run's seed, these numbers and the rank alone.

        `fit` calls it with the number of each step, so that a step draws the same whether or not a run was resumed.

        On v2 and v3 two cores are threads of one process. What is drawn on the device, and what a dataset draws in
        `core.batches`, is each core's own there, too: without `workers=` they read in turn. What else the worker
        function draws on the host (`random`, `numpy.random`, torch on the CPU, as a new model's weights) comes from
        generators that the two share, and differs from run to run: make the model in the notebook, and draw from
        generators of your own.
        """
        self.numbers.seed(*words)

    def same_seed(self, *words: int) -> None:
        """Make the host's random numbers from here on the same on every core, in steps as well.

        For what the host decides by chance and all cores have to do alike: layers that are dropped, a number of
        repetitions, a size. What is drawn on the device, as dropout on a TPU, stays each core's own; on CPU processes
        the host is the device, so there dropout is the same on every core, too.
        """
        self.numbers.seed(*words, own=False)

    @contextlib.contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """Put SIGTERM off to the end of a step: within, look at `end_requested` between steps, save, and raise.

        The kernel waits for core 0 to do so, also when the cell is interrupted; for how long, see `signals`.
        """
        self.ends_between_steps = True
        self._send(messages.FinishesSteps(self.rank))
        try:
            yield
        finally:
            self.ends_between_steps = False

    def all_reduce(self, tensor, op: str = "sum"):
        """Return the "sum", "mean", "min" or "max" of a tensor over the cores, together; same shape on each.

        Raises:
            ValueError: for any other `op`.
        """
        if op not in ("sum", "mean", "min", "max"):
            raise ValueError(f"all_reduce knows sum, mean, min and max, got {op!r}")
        with self._together("all_reduce"):
            return self.backend.all_reduce(tensor.detach(), op)

    def mean(self, value):
        """Return the mean over the cores of a number, a tensor, or a dict of them, together.

        A tensor stays on the device, so that asking for it costs no wait; a number comes back as a float.
        """
        import torch

        if isinstance(value, dict):
            return {name: self.mean(part) for name, part in value.items()}
        if isinstance(value, torch.Tensor):
            return self.all_reduce(value, "mean")
        # In two parts where a device has only float32, which holds no 16,777,217; added up in host memory.
        high = torch.tensor(float(value), dtype=self.backend.real)
        low = torch.tensor(float(value) - high.item() if high.isfinite() else 0.0, dtype=self.backend.real)
        (parts,) = self.to_host([self.gather(*self.to_device([torch.stack([high, low])]))])
        return parts.double().view(-1, 2).sum(1).mean().item()

    def gather(self, tensor):
        """Return the `(N, ...)` tensors of all cores as one `(world_size * N, ...)`, in order of rank, together.

        A scalar counts as `(1,)`. The shape must be the same on every core. The gradient flows through it, to the core
        that each row came from, as a contrastive loss over all cores needs: then backward is "together", too.
        """
        import torch

        tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            return _with_gradient(self, tensor)
        with self._together("gather"):
            return self.backend.gather(tensor.detach())

    def init_process_group(self) -> None:
        """Join the cores in torch.distributed's default group as well, together, for code that averages by itself.

        Without it `torch.distributed.is_initialized()` is False, on chips and in the rehearsal for them: layers and
        metrics that ask for it keep each core's own. On CUDA and TorchTPU the cores are joined there anyway.
        """
        with self._together("init_process_group"):
            self.backend.init_process_group()

    def barrier(self) -> None:
        """Wait until every core is here, together."""
        with self._together("barrier"):
            self.backend.barrier()

    def save(self, value: object, path: str | os.PathLike) -> None:
        """Write `torch.save` of a value from core 0, its tensors on the CPU, together.

        The file appears under its name only when it is complete: a run cut off leaves the old one.
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
            with write_whole(path) as file:
                save_tensors(host, file)
        self.barrier()

    def to_host(self, value: object) -> object:
        """Bring every tensor of nested dicts, lists and tuples into host memory, in one transfer."""
        import torch
        from torch.utils import _pytree as tree

        leaves, structure = tree.tree_flatten(value)
        with self._in_graph("to_host"):
            moved = iter(self.backend.to_cpu([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
        leaves = [next(moved) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tree.tree_unflatten(leaves, structure)

    def snapshot(self, value: object) -> object:
        """Return `to_host` of a value as it is now: what is in host memory already is copied, as Adam's `step`."""
        import torch
        from torch.utils import _pytree as tree

        return self.to_host(tree.tree_map_only(torch.Tensor, lambda t: t.clone() if t.is_cpu else t, value))

    def to_device(self, tensors: list) -> list:
        """Return tensors in host memory on the device, in one transfer."""
        return self.backend.to_device(tensors)

    @property
    def seconds(self) -> float:
        """Seconds since this core started."""
        return time.monotonic() - self._began

    @property
    def step_seconds(self) -> float | None:
        """Seconds that the host takes for a step, the median of the last ones; None before the first."""
        return statistics.median(self._steps) if self._steps else None

    @contextlib.contextmanager
    def _together(self, name: str) -> Iterator[None]:
        """Mark that this core waits for the others: an error in here is most likely another core's doing."""
        outer, self.waiting = self.waiting, self.waiting or name  # what the user called
        try:
            yield
        except BaseException as error:
            error.waiting = self.waiting  # for the failure's report: it may be caught, or raised from another
            raise
        finally:
            self.waiting = outer
        self.activity += 1

    def _in_graph(self, name: str) -> contextlib.AbstractContextManager:
        """Mark the same where collectives are part of the graph, and this is where the graph is waited for."""
        return self._together(name) if self.backend.in_graph and self.waiting is None else contextlib.nullcontext()


def _with_gradient(core: Core, tensor):
    """Gather a tensor so that backward brings each core the sum of all cores' gradients for its own rows."""
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
    """Copy a module, also one that holds what it has computed, as `torch.nn.utils.weight_norm` its weight."""
    held = [value for part in module.modules() for value in vars(part).values()]
    results = {id(one): one.detach() for one in held if getattr(one, "grad_fn", None) is not None}
    try:
        return copy.deepcopy(module, results)
    except TypeError as error:  # of a lock, an open file
        raise InvalidTypeError(
            f"core.model makes a copy, and this {type(module).__name__} holds what cannot be copied",
            found=error,
            fix="core.model(model, in_place=True), which moves the model itself",
        ) from error


def _move(module, device):
    """Move a module to a device; a tensor that lies in several places of it stays one.

    On XLA `Module.to` makes a new tensor for each of these places, which then train apart.
    """
    places: dict[int, list[tuple[dict, str]]] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                places.setdefault(id(tensor), []).append((tensors, name))
    module = module.to(device)
    for (first, name), *others in places.values():
        for tensors, other in others:
            tensors[other] = first[name]
    return module
