"""Feeds: read a dataset, join batches and send them to the device. `Batches` chooses a feed.

    SourceFeed    a source makes whole batches, in threads or in loader processes
    SampleFeed    a dataset makes samples, and the loop or loader processes join them to batches

Both get an `EpochPlan`, the sample numbers of each step, and return batches on the device:

    EpochPlan.samples    [[3, 0], [2, 1]]                     two steps of two samples
    feed.epoch(plan)     ([3, 0], tensors), ([2, 1], tensors)

`feed.arrange(tensors)` then returns a batch in the form for the loop.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from tpukit.essentials.data.prefetch import Buffers, load_images, load_samples, run_ahead
from tpukit.essentials.data.sources import BatchSource, MapDataset, reader_ahead, split_masks
from tpukit.essentials.display import InvalidValueError


class Sent(NamedTuple):
    """A batch on the device.

    Attributes:
        samples: (batch_size,) int64 array on the host, the numbers of the batch's samples.
        tensors: the tensors as they were sent, before `arrange`, with the structure of the
            dataset's items.
    """

    samples: object
    tensors: object


class EpochPlan(NamedTuple):
    """The samples of this core in the remaining steps of an epoch.

    Attributes:
        samples: (steps, batch_size) int64, the sample numbers.
        is_real: (steps, batch_size) bool, False for padding.
        numbers: a number per batch, unique in the epoch over all cores. In a loader process, the
            random numbers of a batch depend only on `seed` and this number.
        seed: (the seed of `Batches`, epoch).
        done: number of steps of this epoch that are over.
        lengths: with buckets, the length to which each step is padded; otherwise None.
    """

    samples: object
    is_real: object
    numbers: list[int]
    seed: tuple[int, int]
    done: int
    lengths: list[int] | None = None


class Transfer:
    """The transfer of a batch's tensors to the device.

    Args:
        send: a function that copies a list of tensors to the device.

    Attributes:
        check: a function that is called with the tensors before the transfer; None for none.
    """

    def __init__(self, send: Callable[[list], list]):
        self._send = send
        self.check: Callable[[list], object] | None = None

    def __call__(self, tensors: list) -> list:
        """Return the tensors on the device, in the same order."""
        if self.check is not None:
            self.check(tensors)
        return self._send(tensors)


class SourceFeed:
    """The feed of a dataset that makes whole batches of images.

    The host sends uint8 images as (B, H, W, 3), the layout of the source. `arrange` returns a view
    as (B, 3, H, W), so that no memory is moved.

    Args:
        source: the dataset.
        batch_size: number of samples per batch.
        transfer: copies a batch to the device.
        mask: add a (batch_size,) bool tensor, False for padding.
        workers: number of loader processes; 0 for none.
        threads: number of threads that make batches if `workers` is 0.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        batch_size: int,
        transfer: Transfer,
        mask: bool,
        workers: int,
        threads: int,
    ):
        self._source = source
        self._transfer = transfer
        self._mask = mask
        self._workers = workers
        self._threads = threads
        self._buffers = Buffers((batch_size, *source.shape))
        self._read_ahead = reader_ahead(source)

    def epoch(self, plan: EpochPlan) -> Iterator[Sent]:
        """Return an iterator over the batches of a plan, which are made ahead of the loop."""
        steps = range(len(plan.samples))
        if not self._workers:
            calls = (self._gathering(plan, step) for step in steps)
            return numbered(plan.samples, run_ahead(calls, self._threads))
        loaded = load_images(self._source, _jobs(plan), workers=self._workers, seed=plan.seed)
        calls = (
            (lambda step=step: self._send(*next(loaded), plan.is_real[step])) for step in steps
        )
        return numbered(plan.samples, run_ahead(calls, threads=1))

    def arrange(self, tensors: tuple) -> tuple:
        """Convert a batch on the device to images (B, 3, H, W), targets and mask."""
        images, labels, *others = tensors
        return *split_masks(images.permute(0, 3, 1, 2), labels), *others

    def _gathering(self, plan: EpochPlan, step: int) -> Callable[[], tuple]:
        """Return a function that makes a batch, which a thread will call.

        The function mostly reads images, and does not hold the GIL meanwhile.
        """
        import numpy
        import torch

        samples = plan.samples[step]
        # numpy.take is twice as fast as indexing.
        labels = torch.from_numpy(numpy.take(self._source.labels, samples, axis=0))
        following = None
        if self._read_ahead is not None and step + 1 < len(plan.samples):
            following = plan.samples[step + 1]

        def gather() -> tuple:
            if following is not None:
                self._read_ahead(following)  # the disk works while this batch is decoded
            images = self._source.take(samples, out=self._buffers.get())
            return self._send(torch.from_numpy(images), labels, plan.is_real[step])

        return gather

    def _send(self, images, labels, real) -> tuple:
        import torch

        tensors = [images, labels]
        if self._mask:
            tensors.append(torch.from_numpy(real))
        return tuple(self._transfer(tensors))


class SampleFeed:
    """The feed of a map-style dataset, which makes batches of samples.

    Args:
        dataset: the dataset.
        transfer: copies a batch to the device.
        mask: add a (batch_size,) bool tensor, False for padding.
        workers: number of loader processes; 0 for none.
        buckets: `tpukit.Buckets`, for samples of several lengths; None for a single length.
        shares_process: True if other cores are threads of this process, which share its random
            generators.
        numbers: a function that returns a context manager. If `workers` is 0, samples are read in
            this context, so that each core draws its own random numbers.
        generators: the random generators in the dataset, which are seeded for each batch.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        transfer: Transfer,
        mask: bool,
        workers: int,
        buckets: object,
        shares_process: bool,
        numbers: Callable[[], contextlib.AbstractContextManager],
        generators: list,
    ):
        self._dataset = dataset
        self._transfer = transfer
        self._mask = mask
        self._workers = workers
        self._buckets = buckets
        self._shares_process = shares_process
        self._numbers = numbers
        self._generators = generators

    def epoch(self, plan: EpochPlan) -> Iterator[Sent]:
        """Return an iterator over the batches of a plan.

        Loader processes make batches ahead of the loop. Without loader processes, each batch is
        made when the loop asks for it.
        """
        loaded = load_samples(
            self._dataset,
            _jobs(plan),
            workers=self._workers,
            seed=plan.seed,
            in_turn=self._shares_process,
            collate=None if self._buckets is None else self._buckets.collate,
            generators=self._generators,
        )
        masks = iter(plan.is_real)
        calls = ((lambda real=real: self._send(next(loaded), real)) for real in masks)
        if self._workers:
            return numbered(plan.samples, run_ahead(calls, threads=1))
        # The dataset may draw random numbers of this process. A thread would draw them at an
        # arbitrary moment of the step, so results would differ from run to run.
        return numbered(plan.samples, (self._with_own_numbers(call) for call in calls))

    def arrange(self, tensors: object) -> object:
        """Return the batch unchanged."""
        return tensors

    def _with_own_numbers(self, call: Callable[[], object]) -> object:
        with self._numbers():
            return call()

    def _send(self, batch: object, real) -> object:
        import torch

        if self._mask:
            batch = _with_mask(batch, torch.from_numpy(real))
        return send_nested(batch, self._transfer)


def numbered(samples: Iterable, batches: Iterator[object]) -> Iterator[Sent]:
    """Yield each batch with the numbers of its samples."""
    # Not `zip` and no local variable, because they would refer to a batch while the next is made.
    # If the loop has released the batch, too, the next batch reuses its buffer, while this is still
    # in the processor's cache.
    for numbers in samples:
        yield Sent(numbers, next(batches))


def send_nested(batch: object, transfer: Callable[[list], list]) -> object:
    """Return a nested batch with its tensors on the device, sent in a single transfer."""
    import torch
    from torch.utils import _pytree as tree

    leaves, structure = tree.tree_flatten(batch)
    # pytree cannot open some mappings, such as Hugging Face's BatchEncoding.
    if any(isinstance(leaf, Mapping) for leaf in leaves):
        leaves, structure = tree.tree_flatten(_with_dicts(batch))
    sent = iter(transfer([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
    leaves = [next(sent) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree.tree_unflatten(leaves, structure)


def _jobs(plan: EpochPlan) -> list[tuple]:
    """Return (number, samples) of each step; with buckets (number, samples, length)."""
    if plan.lengths is None:
        return list(zip(plan.numbers, plan.samples, strict=True))
    return list(zip(plan.numbers, plan.samples, plan.lengths, strict=True))


def _with_mask(batch: object, real) -> object:
    if isinstance(batch, Mapping):
        if "mask" in batch:
            raise InvalidValueError(
                'mask=True adds the entry "mask" to a batch, and the samples have one already',
                fix='rename the entry in __getitem__, for example to "masks"; or pass mask=False',
            )
        return {**batch, "mask": real}
    if isinstance(batch, list | tuple):
        return (*batch, real)
    return (batch, real)


def _with_dicts(batch: object) -> object:
    """Return a batch in which all mappings are plain dicts."""
    from torch.utils import _pytree as tree

    def convert(leaf: object) -> object:
        if isinstance(leaf, Mapping):
            return {key: _with_dicts(value) for key, value in leaf.items()}
        return leaf

    return tree.tree_map(convert, batch)
