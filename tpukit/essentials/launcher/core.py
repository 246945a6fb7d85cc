"""The view of a run that a worker function has: its rank, its device, and the collectives."""

import contextlib
import copy
import math
import os
import statistics
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tpukit.essentials.backends import Backend, BackendMismatchError
from tpukit.essentials.data import Batches, BatchSource, MapDataset
from tpukit.essentials.display import (
    InvalidTypeError,
    InvalidValueError,
    check_count,
    optional_subpackage,
)
from tpukit.essentials.environment import write_whole
from tpukit.essentials.launcher.core_internal import CoreInternal
from tpukit.essentials.launcher.core_values import averaged_buffers, parameters_of
from tpukit.essentials.launcher.gathering import gather_with_gradient, mean_by_name
from tpukit.essentials.launcher.gradients import GradientAverage
from tpukit.essentials.launcher.tensors import move_module, refuse_scripted, save_tensors

if TYPE_CHECKING:
    import torch

# `core.model` returns a module of the same class as its argument. The type has no bound, because
# type checkers see the result of `torch.compile` as a function.
_Module = TypeVar("_Module")
_REDUCTIONS = ("sum", "mean", "min", "max")


class Core:
    """A core of a run, as the first argument of the worker function.

    Methods whose description says "Collective" must be called on every core, the same number of
    times and in the same order. If a core leaves out such a call, all other cores wait for it.

    Attributes:
        rank: number of this core, 0 to world_size - 1.
        world_size: number of cores in the run.
        hosts: number of hosts in the run. Each host has files of its own.
        device: the `torch.device` of this core.
        chips: number of chips of this core: with `launch(shard=...)` all chips of the host,
            otherwise 1.
        peak_tflops: peak TFLOP/s in bfloat16 of a chip; on v2 and v3, of a core. None if unknown,
            as in a dry run.
        backend: the device and the collectives; see `tpukit.essentials.backends.protocol.Backend`.
        state: an empty namespace, in which the worker function can keep objects. In a
            `tpukit.Session` it lives as long as the session, so a later run finds it.
        internal: for tpukit's own code; it may change in any version.
    """

    hosts = 1
    peak_tflops: float | None = None

    def __init__(self, backend: Backend, send: Callable[[object], None], seed: int = 0):
        self.rank = backend.rank
        self.world_size = backend.world_size
        self.device = backend.device
        self.chips = backend.chips
        self.backend = backend
        self.state = types.SimpleNamespace()
        self.internal = CoreInternal(self, send, seed)
        # One object for all steps: it remembers which parameters of an optimizer get gradients.
        names_of = self.internal.agreement.names_of
        self._average_gradients = GradientAverage(backend, names_of, self.print)
        self.internal.on_abandon.append(self._average_gradients.forget)

    def __repr__(self) -> str:
        return f"core {self.rank} of {self.world_size} on {self.device}"

    @property
    def is_main(self) -> bool:
        """True on core 0, which prints, logs and saves for all cores."""
        return self.rank == 0

    def print(self, *values: object, everywhere: bool = False) -> None:
        """Print a whole line in the notebook, from core 0.

        Args:
            *values: joined by spaces.
            everywhere: print from every core, with its number in front of the line.
        """
        self.internal.output.print(*values, everywhere=everywhere)

    def log(self, step: int | None = None, **values: object) -> None:
        """Record numbers of core 0 for the live curve and `Run.log`.

        Calls on other cores have no effect. A logged tensor stays on the device until tpukit copies
        several of them together: at most four times per second, and at the end of a
        `core.progress` loop. So logging in every step does not make the chip wait. Do not change a
        logged tensor in place.

        Args:
            step: position on the x axis. None for the step of the last call plus 1; the first
                call has step 1.
            **values: by name, numbers (also numpy's) or one-element tensors.

        Raises:
            InvalidTypeError: `step` is not a number, or a value is neither a real number nor a
                one-element tensor.
        """
        self.internal.output.log(step, values)

    def flush(self) -> None:
        """Send the logged rows now; the end of a loop and of the run does this, too."""
        self.internal.output.flush()

    def progress(
        self,
        iterable: Iterable,
        label: str | None = "steps",
        total: int | None = None,
        *,
        start: int = 0,
        unit: str | None = None,
    ) -> Iterator:
        """Yield the items of an iterable, and show core 0's progress in the notebook.

        Loops may be nested: `core.progress(range(epochs), "epochs")` around
        `core.progress(batches, "train")` are two bars, and the second starts again in each epoch.

        Args:
            iterable: anything. For `core.batches(...)` the bar also shows the samples per second of
                all cores.
            label: name of the bar; the same label starts the same bar again. None shows no bar.
            total: number of items, including `start`. None for `start` plus the iterable's length,
                if it has one.
            start: number of items that were done before, in a resumed loop.
            unit: unit of the rate, such as "images". None means "samples" for `core.batches(...)`.
                For any other iterable, None means the label, if it ends with "s", or else "steps".
        """
        return self.internal.output.progress(iterable, label, total, start=start, unit=unit)

    def model(
        self, module: _Module, *, in_place: bool = False, allow_different: Iterable[str] = ()
    ) -> _Module:
        """Return a copy of a module on the device, with rank 0's weights. Collective.

        The notebook's module does not change, even if cores are threads of one process (v2 and v3).
        A tensor with several names, such as an embedding that is also the output layer, remains a
        single tensor. If the loss has parameters or class weights, pass it through `core.model`,
        too.

        BatchNorm layers use the statistics of this core's share of the batch, on every backend.

        Weights and buffers must stay equal on all cores. tpukit compares them after steps 1, 2, 4
        and so on up to 64, then at intervals of at least 100 steps, before `core.save`, and when
        the worker function returns.

        With `launch(shard=...)` the module itself is moved, tensor by tensor, because the host
        may not have the memory for a copy.

        Args:
            module: a `torch.nn.Module`.
            in_place: move the module itself and return it, without a copy, for example
                because a framework has references to the module.
            allow_different: patterns of names (as in `fnmatch`) of weights and buffers that may
                differ between the cores, such as `["*counts"]`. Begin a pattern with "*", because
                tpukit puts "1." before the names of the second model in a training loop of your
                own. A pattern holds for all models of the launch or session.

        Raises:
            OutOfSyncError: the cores pass modules with different layers, shapes or settings.
            InvalidTypeError: the module cannot be copied, or is scripted or traced; with `shard`,
                another library has already sharded the module; `allow_different` is a text.
            InvalidValueError: a lazy layer has no weights yet.
        """
        refuse_scripted(module)
        if isinstance(allow_different, str):  # its letters would be patterns, and "*" is for all
            raise InvalidTypeError(
                "allow_different must be a list of patterns",
                found=f"the text {allow_different!r}",
                fix=f"core.model(model, allow_different=[{allow_different!r}])",
            )
        # Compare before the first weight is sent: with different models the broadcast would hang.
        self.internal.agreement.before_model(module)
        is_here = any(one.device.type == self.device.type for one in module.parameters())
        is_too_large_to_copy = self.chips > 1 and not is_here
        if not (in_place or is_too_large_to_copy):
            module = _copy(module)
        module = move_module(module, self.device)
        self.internal.agreement.add_model(module, allow_different)
        with self.internal.together("model"):
            # With `shard`, a line about large weights that cannot be divided; otherwise "".
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
        `(images, labels)`. Images are (batch_size, 3, H, W) uint8 in [0, 255]. Labels are
        (batch_size, L) float32; class numbers are (batch_size,) int64. A pack with masks gives
        `(images, masks)`, with masks as (batch_size, H, W) int64; with labels as well, it gives
        `(images, {"labels": ..., "masks": ...})`. Normalise and augment on the device.

        *Any other dataset* gives batches with the structure of its items: tuples, dicts, or both.
        The tensors of a batch are sent in a single transfer. A Hugging Face dataset needs
        `dataset.with_format("torch")`. Strings remain in host memory as lists, which `fit` and
        `evaluate` do not support.

        *Samples of varying length* need `buckets=(64, 128, 256)`. Each batch is padded to one of
        these lengths, the same on all cores at each step, so a step is compiled once per length;
        core 0 prints the number of compilations. tpukit adds a bool mask of the positions
        with data, of shape (batch_size, length). If a batch is a mapping, the mask is its item
        "attention_mask"; otherwise the mask is the last item of the batch.
        A sample longer than the largest bucket is an error, unless `tpukit.Buckets` has
        `truncate=True`. `Buckets` also sets the axis, padding value and known lengths. `evaluate`
        and `predict` support such batches if the model returns a row per sample. If it returns a
        row per position, use a single length, `buckets=(256,)`; or, in `evaluate`,
        `keep_outputs=False`.
        Without `shuffle` an epoch is sorted by length. To get the sample numbers with each batch,
        use `for samples, batch in batches.with_samples()`.

        *A dataset that can only be read in order*, such as an IterableDataset, needs `steps=1000`,
        the steps per epoch. Each process that reads has its own share of the samples. When a share
        ends, it is read again. Preferably pass a function that opens share number `share` of
        `shares`: `lambda share, shares: wds.WebDataset(urls[share::shares], nodesplitter=None)`.
        If you pass an iterable, each process reads all samples and uses one of every `shares`. This
        is slow with many processes. The iterable must have the same order in all processes. A
        checkpoint has the epoch and the number of steps; a resumed run reads the stream from its
        start again.

        Args:
            dataset: `PackedImages`, `CachedImages`, or any dataset with a length whose items
                `torch.utils.data.default_collate` can stack. With `steps`: an iterable, or a
                function that opens one.
            batch_size: samples per core and step. With `launch(shard=...)`, samples per step of
                the whole run, a multiple of `core.chips`.
            steps: steps per epoch, only for a dataset that is read in order; otherwise None.
            shuffle: use a new order in each epoch, the same on every core. Otherwise every core
                reads a contiguous part of the dataset, and `core.gather(outputs)[:len(dataset)]`
                has each sample once, in dataset order.
            weights: (N,) numbers of 0 or more, one per sample, as for torch's
                WeightedRandomSampler. Each epoch draws N samples with replacement, in proportion to
                the weights. The draw depends on seed and epoch only, so it is the same for any
                number of cores.
            drop_last: leave out the last samples if they do not fill a step on all cores.
                Otherwise repeated samples fill the step. With `steps` it has no effect, because
                all steps are full.
            mask: add a bool tensor of (batch_size,) to every batch, False for repeated samples.
            buckets: lengths to pad to, or a `tpukit.Buckets`; None for samples of one length.
            seed: seed of the order of samples.
            workers: number of processes per core that make batches. With 0 the training loop's own
                process reads the dataset. None for the number of free processors if the images
                are JPEGs, otherwise 0.
            threads: number of threads that prepare batches of packs and caches if `workers` is 0.

        Returns:
            An iterable of batches with a length; iterate once per epoch.

        Raises:
            InvalidValueError: the dataset is empty or too small for `drop_last`; a number is out
                of range; a sample is longer than the largest bucket; `shuffle`, `weights`, `mask`
                or `buckets` is set for a dataset that is read in order.
            InvalidTypeError: `steps` is missing for a dataset that is read in order, or is set for
                a dataset with a length.
        """
        check_count("batch_size", batch_size)
        if batch_size % self.chips:
            next_multiple = math.ceil(batch_size / self.chips) * self.chips
            raise InvalidValueError(
                'with shard="fsdp", batch_size is for the whole run and must be divisible by '
                f"{self.chips} chips, got {batch_size}",
                fix=f"batch_size={next_multiple}, or another multiple of {self.chips}",
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
            "hosts": self.hosts,
            "send": self.backend.to_device,
            "received": self.backend.note_batch,
            "shares_process": self.backend.shares_process,
            "numbers": self.internal.numbers.own,
        }
        # `steps` means a dataset that is read in order, which has a class of its own.
        if steps is not None:
            with optional_subpackage("core.batches(steps=...)"):
                from tpukit.training import StreamBatches
            stream = StreamBatches(dataset, steps=steps, buckets=buckets, **options)
            return self.internal.agreement.add_batches(stream)
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
        self.internal.agreement.add_batches(batches)
        if buckets is not None:
            self.print(batches.sampler.in_words())  # the lengths, and the number of compilations
        return batches

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Run the training step in the `with` block; on a TPU, compile it as one graph.

        Put the forward pass, the backward pass and the optimizer step of a batch into the block.
        On a TPU they run as one program when the block ends.

        Inside the block each core draws its own random numbers: dropout, noise, augmentation.
        Outside of it, all cores draw the same numbers on the host, so a random split of the data is
        the same on every core. After a call of `core.seed`, the cores draw different numbers
        outside of the block, too.
        """
        return self.internal.step()

    def counting_flops(self) -> contextlib.AbstractContextManager[None]:
        """Count the FLOPs of the forward pass in the `with` block, once.

            with core.step():
                with core.counting_flops():
                    loss = criterion(model(images), labels)
                loss.backward()
                core.optimizer_step(optimizer)

        Afterwards `tflops_per_second` and `mfu` have values. `fit` does not need the block. Use
        the block in every step: the first block counts, and later blocks assign the same number to
        their steps. So all steps must have the same shapes. If an operation cannot be counted, core
        0 prints the reason, and both values remain None. In the block, do not call a model that was
        compiled with `torch.compile`: torch would compile the model a second time.
        """
        return self.internal.counting_flops()

    def sync(self) -> None:
        """Run all operations recorded since the last step.

        Without this call, on a TPU these operations become a part of the next step's graph. The
        changed graph must then be compiled.
        """
        with self.internal.in_graph("step"):
            self.backend.sync()

    def optimizer_step(
        self,
        optimizer,
        *,
        clip: float | None = None,
        average_also: Iterable = (),
        weight=None,
    ) -> None:
        """Average the gradients over the cores, then run the optimizer. Collective.

        Gradients of several calls of `backward` are averaged once, here, and cleared after the
        optimizer's step. If only some cores have a gradient for a parameter, tpukit uses zeros for
        the other cores. If no core has a gradient for a parameter, the parameter does not change.
        Every parameter that requires a gradient takes part in the transfer, so freeze the
        parameters that you do not train: `parameter.requires_grad_(False)`.

        Args:
            optimizer: any optimizer of torch.optim whose `step` needs no closure.
            clip: largest norm of all averaged gradients together; None for no limit. If the norm
                is larger, the gradients are scaled down to it. `clip_grad_norm_` before this call
                would clip each core's own gradients, which is a different result.
            average_also: float tensors, such as buffers and losses. tpukit overwrites each with its
                mean over the cores, in the same transfer as the gradients.
            weight: None if each core's loss is a mean. If each core's loss is a sum, for example
                over tokens, pass the number of this core's summands, as a float32 tensor of shape
                (). tpukit then divides the sum of all cores' gradients by the sum of their weights.
                It also overwrites the tensor with its mean over the cores.

        Raises:
            InvalidValueError: with several cores, parameters are not on the device, or gradients
                are sparse; on a TPU, the cores use different layers.
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
        if clip is not None:  # after the average, so the norm is the same on all cores
            torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), clip)
        with self.internal.agreement.optimizer_step_marked():
            optimizer.step()
        # None and not zeros: a parameter without a gradient is then left alone in the next step.
        optimizer.zero_grad(set_to_none=True)

    def average_gradients(self, optimizer, *, average_also: Iterable = ()) -> None:
        """Average the gradients over the cores, without a step. Collective.

        `optimizer`, `average_also` and the errors are as in `optimizer_step`.
        """
        self.internal.agreement.before_average(optimizer)
        with self.internal.together("optimizer_step"):
            try:
                self._average_gradients(optimizer, average_also)
            except BackendMismatchError as error:
                raise self.internal.agreement.gradients_error(optimizer, error) from error

    def average_buffers(self, module) -> None:
        """Overwrite float buffers with their mean over the cores. Collective.

        Each core's BatchNorm keeps running statistics of the batches it gets. Call this
        before you evaluate or save, so that all cores have the mean.
        """
        with self.internal.together("average_buffers"):
            self.backend.average(averaged_buffers(module)())

    def seed(self, *words: int) -> None:
        """Seed this core's random numbers from the run's seed, `words` and the rank.

        `fit` calls it with the number of each step, so a resumed run draws the same numbers. The
        second `fit` in a launch or session, and every later one, also passes the number of its
        call.

        On v2 and v3 two cores are threads of one process, and share the host's global generators:
        `random`, `numpy.random`, torch on the CPU. Numbers from these generators differ from run to
        run. So make the model in the notebook, and draw from generators of your own. Random numbers
        of the device, and of a dataset in `core.batches`, follow from the seed as on other chips.
        In `core.batches(..., workers=0)`, only one of the two cores reads samples at a time.

        Args:
            *words: whole numbers, such as the step.
        """
        self.internal.numbers.seed(*words)

    def same_seed(self, *words: int) -> None:
        """Seed the host's random numbers the same on every core, even inside a step.

        Use it if the host decides by chance and all cores must decide alike: dropped layers, a
        number of repetitions, a size. Numbers of the device, such as dropout on a TPU, still differ
        between the cores. In a dry run on CPU processes the host is the device, so dropout is equal
        there.

        Args:
            *words: whole numbers, such as the step, the same on every core.
        """
        self.internal.numbers.seed(*words, own=False)

    def all_reduce(self, tensor: "torch.Tensor", op: str = "sum") -> "torch.Tensor":
        """Return the sum, mean, minimum or maximum of a tensor over the cores. Collective.

        No gradient flows back through the result; `gather` has a gradient.

        Args:
            tensor: a tensor of the same shape and dtype on every core.
            op: "sum", "mean", "min" or "max".

        Raises:
            InvalidValueError: `op` is unknown; the tensor is complex and `op` is "min" or "max";
                or, in a dry run, the shapes or dtypes differ between the cores.
        """
        if op not in _REDUCTIONS:
            raise InvalidValueError(
                f"op must be one of {', '.join(map(repr, _REDUCTIONS))}, got {op!r}",
                fix='core.all_reduce(tensor, "mean")',
            )
        if op in ("min", "max") and tensor.is_complex():
            raise InvalidValueError(
                f"all_reduce with op={op!r} is not supported for complex numbers",
                found=f"a tensor of {tensor.dtype}",
                fix=f"core.all_reduce(tensor.abs(), {op!r})",
            )
        with self.internal.together("all_reduce"):
            return self.backend.all_reduce(tensor.detach(), op)

    def mean(self, value) -> Any:
        """Return the mean over the cores of a number, a tensor or a dict. Collective.

        A tensor stays on the device, so this method does not wait for the device. Its mean has no
        gradient. A number becomes a float. A dict is averaged by name, whatever its order, and may
        contain dicts.

        Raises:
            OutOfSyncError: the dicts of the cores have different names or kinds of values.
        """
        import torch

        if isinstance(value, dict):
            with self.internal.together("mean"):
                return mean_by_name(self, value)
        if isinstance(value, torch.Tensor):
            return self.all_reduce(value, "mean")
        # Sent in two parts, because some devices have only float32, which cannot represent
        # 16,777,217. The parts are added in host memory.
        # `high` is the number rounded to the device's type, `low` the error of that.
        high = torch.tensor(float(value), dtype=self.backend.real)
        rest = 0.0
        if high.isfinite():
            rest = float(value) - high.item()
        low = torch.tensor(rest, dtype=self.backend.real)
        (mine,) = self.to_device([torch.stack([high, low])])
        (parts,) = self.to_host([self.gather(mine)])
        return parts.double().view(-1, 2).sum(1).mean().item()

    def gather(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Concatenate the tensors of all cores in order of rank, along axis 0. Collective.

        The gradient flows back to the core that each row came from, as a contrastive loss over
        all cores needs. If the tensor requires a gradient, `backward` is collective, too.

        Args:
            tensor: a tensor of shape (N, ...), with the same shape and dtype on every core; a
                scalar counts as (1,).

        Returns:
            A tensor of shape (world_size * N, ...).
        """
        import torch

        if tensor.ndim == 0:
            tensor = tensor.reshape(1)
        if tensor.requires_grad and torch.is_grad_enabled():
            return gather_with_gradient(self, tensor)
        with self.internal.together("gather"):
            return self.backend.gather(tensor.detach())

    def init_process_group(self) -> None:
        """Create torch.distributed's default process group of the cores. Collective.

        Some layers and metrics average over processes if `torch.distributed.is_initialized()` is
        True. With torch_xla, and in a dry run on CPU processes, it is False until you call this
        method. With CUDA and TorchTPU it is always True.
        """
        with self.internal.together("init_process_group"):
            self.backend.init_process_group()

    def barrier(self) -> None:
        """Wait until every core has called this method. Collective."""
        with self.internal.together("barrier"):
            self.backend.barrier()

    def save(self, value: object, path: str | os.PathLike) -> None:
        """On core 0, copy a value to the CPU and write it with `torch.save`. Collective.

        An interrupted run leaves an earlier file of this name unchanged.
        Call it on every core, not under `if core.is_main`.

        Raises:
            OutOfSyncError: the cores' weights or settings are out of sync. In `fit` they are not
                compared here, because `fit` compares them itself.
            OSError: the file cannot be written.
        """
        with self.internal.in_graph("save"):
            self.backend.sync()
        if not self.internal.in_fit:  # `fit` has compared the cores itself
            with self.internal.together("save"):
                self.internal.agreement.compare_loop("before core.save")
        if self.is_main and not self.backend.is_recording:
            path = Path(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            host = self.to_host(value)
            # `write_whole` writes a second file, and renames it when it is complete.
            with write_whole(path) as file:
                save_tensors(host, file)
        self.barrier()  # so that every core may read the file afterwards

    def to_host(self, value: object) -> Any:
        """Return a value with all its tensors in host memory, in a single transfer.

        The value may have nested dicts, lists and tuples. Tensors in host memory are not copied.
        """
        import torch
        from torch.utils import _pytree as tree

        # All tensors in one list, because each transfer from a TPU has a latency.
        leaves, structure = tree.tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        with self.internal.in_graph("to_host"):
            moved = iter(self.backend.to_cpu(tensors))
        leaves = [next(moved) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tree.tree_unflatten(leaves, structure)

    def to_device(self, tensors: list) -> list:
        """Copy tensors from host memory to this core's device, in a single transfer.

        Args:
            tensors: tensors of any shapes and dtypes, on the CPU.

        Returns:
            the copies, in the same order; if the device is the CPU, the tensors themselves.
        """
        return self.backend.to_device(tensors)

    @property
    def seconds(self) -> float:
        """Seconds since this core started; in a session, since the run began."""
        return time.monotonic() - self.internal.began

    @property
    def step_seconds(self) -> float | None:
        """Median seconds per step on the host, of the last 64 steps; None before the first."""
        if not self.internal.step_seconds:
            return None
        return statistics.median(self.internal.step_seconds)

    @property
    def tflops_per_second(self) -> float | None:
        """TFLOP/s per chip of the last 64 steps; None before they are known.

        In `fit`, and in a loop with `counting_flops`, the value is known after two steps. Each GPU
        counts as a chip, and so does each core of a v2 or v3. The value is a median, so a step that
        compiles hardly changes it. Steps of an evaluation do not count, because their FLOPs are not
        known. The time of a step includes the wait for its batch.
        """
        rates = self.internal.flops_per_second
        if not rates:
            return None
        return statistics.median(rates) / self.chips / 1e12

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1; None without a known peak, as in a dry run.

        It is `tflops_per_second` divided by the chip's peak in bfloat16.
        """
        if self.tflops_per_second is None or self.peak_tflops is None:
            return None
        return self.tflops_per_second / self.peak_tflops


def _copy(module):
    """Copy a module, even if it has computed tensors, as with `torch.nn.utils.weight_norm`."""
    computed = {}  # deepcopy's memo: by id, the copies that it need not make
    for layer in module.modules():
        for value in vars(layer).values():
            if getattr(value, "grad_fn", None) is not None:
                computed[id(value)] = value.detach()  # deepcopy refuses tensors with a history
    try:
        return copy.deepcopy(module, computed)
    except (TypeError, RuntimeError) as error:  # a lock; a list of tensors with a history
        raise InvalidTypeError(
            f"core.model makes a copy, but a part of this {type(module).__name__} cannot be copied",
            found=error,
            fix="core.model(model, in_place=True), which moves the model itself",
        ) from error
