"""Feeds: the ways of a dataset to the device, of which `Batches` chooses one.

    SourceFeed    a source makes whole batches, in threads or in loader processes
    SampleFeed    a dataset makes samples, which are joined here, in the loop or in loader processes

Both turn a plan of an epoch, which is arithmetic, into batches on the device:

    EpochPlan.samples    [[3, 0], [2, 1]]                     two steps of two samples
    feed.epoch(plan)     ([3, 0], tensors), ([2, 1], tensors)

`feed.arrange(tensors)` then returns a batch in the form that a loop gets.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from tpukit.essentials.data.prefetch import Buffers, load_images, load_samples, run_ahead
from tpukit.essentials.data.sources import BatchSource, MapDataset, reader_ahead, split_masks


class Sent(NamedTuple):
    """A batch on the device.

    Attributes:
        samples: (batch_size,) int64 on the host, the numbers of its samples.
        tensors: as they were sent, before `arrange`; nested as the dataset's items are.
    """

    samples: object
    tensors: object


class EpochPlan(NamedTuple):
    """The samples of this core in the steps of an epoch that are left.

    Attributes:
        samples: (steps, batch_size) int64.
        is_real: (steps, batch_size) bool, False for padding.
        numbers: the numbers of the batches, unique over all cores; they seed the loader processes.
        seed: (seed, epoch).
        done: steps of this epoch that are over.
        lengths: the lengths of the samples in each step, with buckets.
    """

    samples: object
    is_real: object
    numbers: list[int]
    seed: tuple[int, int]
    done: int
    lengths: list[int] | None = None


class Transfer:
    """The transfer of a batch's tensors to the device. While `check` is set, it gets them before.

    Args:
        send: takes the tensors of a batch, and returns them on the device.
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
    """Batches that a source makes as a whole.

    The host sends uint8 images as (B, H, W, 3), as the source has them. `arrange` turns them on the
    device, which is a view.

    Args:
        source: the dataset.
        batch_size: samples per batch.
        transfer: to the device.
        mask: add a bool tensor, False for padding.
        workers: loader processes; 0 for none.
        threads: number of threads that make batches without loader processes.
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
        """Return the batches of a plan; they are made ahead of the loop."""
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
        """Return a batch as a loop gets it: images as (B, 3, H, W), targets, and the mask."""
        images, labels, *others = tensors
        return *split_masks(images.permute(0, 3, 1, 2), labels), *others

    def _gathering(self, plan: EpochPlan, step: int) -> Callable[[], tuple]:
        """Return the call that makes a batch in a thread.

        The call does little besides reading the images, which does not hold the GIL.
        """
        import numpy
        import torch

        samples = plan.samples[step]
        # numpy.take, because indexing takes twice as long.
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
    """Batches that are joined from the samples of a dataset.

    Args:
        dataset: the dataset.
        transfer: to the device.
        mask: add a bool tensor, False for padding.
        workers: loader processes; 0 for none.
        buckets: `tpukit.Buckets`, for samples of several lengths.
        shares_process: other cores are threads of this process, and share its random numbers.
        numbers: opens a context in which the dataset is called without loader processes.
        generators: in the dataset, seeded for each batch.
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
        """Return the batches of a plan; with loader processes they are made ahead of the loop."""
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
        # The dataset is called in this process and may draw its random numbers. A thread would draw
        # them at any moment of the step, so each batch is made when the loop asks for it.
        return numbered(plan.samples, (self._with_own_numbers(call) for call in calls))

    def arrange(self, tensors: object) -> object:
        """Return a batch as a loop gets it: as it was sent."""
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
    """Yield the samples of each step with its batch.

    Neither `zip` nor a variable here, because both would hold a batch while the next one is made.
    If the loop has released it too, its buffer is filled next, while it is still in the
    processor's cache.
    """
    for numbers in samples:
        yield Sent(numbers, next(batches))


def send_nested(batch: object, transfer: Callable[[list], list]) -> object:
    """Send all tensors of a batch to the device in a single transfer, and return it with them."""
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
        return {**batch, "mask": real}
    if isinstance(batch, list | tuple):
        return (*batch, real)
    return (batch, real)


def _with_dicts(batch: object) -> object:
    """Return a batch in which other kinds of mappings are dicts."""
    from torch.utils import _pytree as tree

    def convert(leaf: object) -> object:
        if isinstance(leaf, Mapping):
            return {key: _with_dicts(value) for key, value in leaf.items()}
        return leaf

    return tree.tree_map(convert, batch)
