"""Prepare batches ahead of the loop: in threads, or in the processes of a DataLoader.

Threads are for batches that a single native call makes without the GIL, as a source does. Processes
are for datasets whose samples are made in Python.

A source's images are written into buffers that are used again, because new memory is slow. A buffer
is free when nothing refers to it: neither the loop, nor a tensor or view of it, nor a transfer.
"""

import contextlib
import math
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import NamedTuple

from tpukit.essentials.data.collating import collate
from tpukit.essentials.data.seeding import seed_generators, seed_host, seeded_in_turn
from tpukit.essentials.data.sources import BatchSource, MapDataset, reads_many

# Two ahead for each of five threads, the loop's own, and spare ones. If a loop holds more batches,
# as list(batches) does, the system provides them. If they were kept, all would be examined for
# every batch (9.6 s for 16,000), and never be freed.
_KEPT = 16
_AHEAD = 2  # batches per thread
# A loader requests two batches per process; five more are on their way to the loop or in its hands.
_REQUESTED = 2
_ON_THEIR_WAY = 5


# Threads


class _Outcome(NamedTuple):
    """The outcome of a call in a thread: a result or an error."""

    result: object
    error: BaseException | None


def run_ahead(calls: Iterable[Callable[[], object]], threads: int) -> Iterator[object]:
    """Yield the results of calls in order; background threads make them, two ahead per thread."""
    # A queue per result, not a Future: a Future wakes the other thread several times per result,
    # and each time that thread waits for the GIL. It matters for batches of under a millisecond.
    todo = SimpleQueue()
    running = deque()
    workers = []
    for number in range(threads):
        name = f"batches_{number}"
        workers.append(threading.Thread(target=_run, args=(todo,), name=name, daemon=True))
    for worker in workers:
        worker.start()
    try:
        for call in calls:
            done = SimpleQueue()
            running.append(done)
            todo.put((call, done))
            if len(running) > _AHEAD * threads:
                yield _result(running.popleft())
        while running:
            yield _result(running.popleft())
    finally:  # also if the loop ends early: calls that have not begun are dropped
        with contextlib.suppress(Empty):
            while True:
                todo.get_nowait()
        for _ in workers:
            todo.put(None)
        for worker in workers:
            worker.join()


def _run(todo: SimpleQueue) -> None:
    """Run calls until None arrives; put the outcome of each into its own queue."""
    while (job := todo.get()) is not None:
        call, done = job
        try:
            done.put(_Outcome(call(), error=None))
        except BaseException as error:  # raised in the loop, when its result is due
            done.put(_Outcome(None, error=error))
        del call, done, job  # a buffer is used again once nothing refers to it


def _result(done: SimpleQueue) -> object:
    result, error = done.get()
    if error is not None:
        raise error
    return result


# Processes


def load_samples(
    dataset: MapDataset,
    jobs: list,
    *,
    workers: int,
    seed: tuple[int, ...],
    in_turn: bool = False,
    collate: Callable[[list, list[int], int], object] | None = None,
    generators: list | None = None,
) -> Iterator[object]:
    """Yield the batches of a dataset from the processes of a DataLoader.

    A batch of a process is seeded with `seed` and its number, so it is the same whichever process
    makes it. Without processes it is made in the caller's thread, and draws the caller's random
    numbers; if threads share the process (`in_turn`), each batch is seeded there too.

    Args:
        dataset: the dataset.
        jobs: (number, samples) per batch. The number is unique in the epoch over all cores.
        workers: loader processes; 0 for none.
        seed: the seed of the epoch.
        in_turn: other cores are threads of this process.
        collate: `collate(items, samples, length)` joins a batch instead of torch's
            `default_collate`; a job is then (number, samples, length).
        generators: in the dataset, seeded for each batch with or without processes.
    """
    whole = _BatchDataset(dataset, seed, in_turn=in_turn, collate=collate, generators=generators)
    batches = iterate_loader(whole, jobs, workers)
    if workers:
        return _explain_broken_pipes(batches)
    return batches


class _Requested(NamedTuple):
    """A batch that the loader has been asked for."""

    samples: object
    buffer: object | None  # the array that its images are written into


def load_images(
    source: BatchSource, jobs: list, *, workers: int, seed: tuple[int, ...]
) -> Iterator[tuple]:
    """Yield (images, labels) of a source from processes that write into shared memory.

    So the images are not copied, and /dev/shm is not used.

    Args:
        source: the source.
        jobs: (number, samples) per batch. The number is unique in the epoch over all cores.
        workers: loader processes, at least 1.
        seed: the seed of the epoch; a batch is seeded with it and its number.
    """
    import torch

    buffers = None
    if _forks(workers):
        _, samples = jobs[0]
        shared = _REQUESTED * workers + _ON_THEIR_WAY
        buffers = Buffers((len(samples), *source.shape), shared=shared)
    requested: deque[_Requested] = deque()

    def requests() -> Iterator[tuple]:
        for number, samples in jobs:
            buffer = None
            place = None
            if buffers is not None:
                buffer = buffers.get()
            if buffer is not None:
                place = buffers.number(buffer)
            requested.append(_Requested(samples, buffer))
            yield number, samples, place

    images_of_batches = iterate_loader(_SharedImages(source, seed, buffers), requests(), workers)
    loaded = _explain_broken_pipes(images_of_batches)

    def received() -> Iterator[tuple]:
        for images in loaded:
            samples, buffer = requested.popleft()
            if images is None:
                images = torch.from_numpy(buffer)
            yield images, torch.from_numpy(source.labels[samples])

    return received()


def iterate_loader(dataset: MapDataset, jobs: Iterable, workers: int) -> Iterator[object]:
    """Yield `dataset[job]` for each job, in order, from loader processes that take turns."""
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=jobs,
        num_workers=workers,
        multiprocessing_context="fork" if _forks(workers) else None,
        # Without a generator, each epoch would draw one of the caller's random numbers.
        generator=torch.Generator(),
    )
    # This is no generator function, because a thread that outlives the processes must fork them.
    return iter(loader)


def _forks(workers: int) -> bool:
    return workers > 0 and hasattr(os, "fork")


def _explain_broken_pipes(batches: Iterator[object]) -> Iterator[object]:
    """Raise the error of an ended loader process if torch only sees a broken connection."""
    with contextlib.suppress(StopIteration):
        while True:
            try:
                batch = next(batches)
            except (ConnectionError, EOFError) as error:
                is_from_dataset = str(error).startswith("Caught ")
                if is_from_dataset:
                    raise
                fact = "DataLoader worker (pid unknown) ended while its batch was on its way"
                raise RuntimeError(f"{fact}: {error}") from error
            yield batch


class _SharedImages:
    """A source as a dataset of batches, for loader processes.

    The images are written into a shared buffer, or returned if there is none.
    """

    def __init__(self, source: BatchSource, seed: tuple[int, ...], buffers: "Buffers | None"):
        self.source = source
        self.seed = seed
        self.buffers = buffers

    def __getitem__(self, job: tuple):
        import torch

        number, samples, place = job
        seed_host((*self.seed, number))
        out = None if place is None else self.buffers[place]
        images = self.source.take(samples, out=out)
        if images is out:
            return None
        return torch.from_numpy(images)


class _BatchDataset:
    """A dataset as a dataset of batches. An error names its sample, also from a loader process."""

    def __init__(
        self,
        dataset: MapDataset,
        seed: tuple[int, ...],
        *,
        in_turn: bool = False,
        collate: Callable | None = None,
        generators: list | None = None,
    ):
        self.dataset = dataset
        self.generators = generators or []
        self.seed = seed
        self.in_turn = in_turn
        self.collate = collate

    def __getitem__(self, job: tuple):
        from torch.utils.data import get_worker_info

        number, samples, *length = job
        seed = (*self.seed, number)
        if get_worker_info() is not None:
            seed_host(seed)
        elif self.in_turn:
            with seeded_in_turn(seed):
                seed_generators(self.generators, seed)
                return self._collate(samples.tolist(), *length)
        seed_generators(self.generators, seed)
        return self._collate(samples.tolist(), *length)

    def _collate(self, samples: list[int], length: int | None = None) -> object:
        if hasattr(self.dataset, "__getitems__") and reads_many(self.dataset):
            items = self.dataset.__getitems__(samples)
        else:
            items = [self._read(sample) for sample in samples]
        if length is None:
            return collate(items, samples)
        return self.collate(items, samples, length)

    def _read(self, sample: int) -> object:
        try:
            return self.dataset[sample]
        except Exception as error:
            error.add_note(f"sample {sample} of the dataset")
            raise


# Buffers


class Buffers:
    """uint8 arrays of one shape, each of which is used again as soon as nothing refers to it.

    For a single thread, new arrays would be as fast. Two threads would wait for each other while
    the system allocates the pages.

    Args:
        shape: the shape of each array.
        shared: the number of arrays in memory that processes forked later can write into, all made
            at once; 0 makes ordinary arrays, as many as needed, and keeps up to 16.
    """

    def __init__(self, shape: tuple[int, ...], shared: int = 0):
        self._shape = shape
        self._shared = shared
        self._lock = threading.Lock()
        if shared:
            self._arrays = _in_shared_memory(shape, shared)
        else:
            self._arrays = [_new_array(shape, kept=True)]
        self._idle = 0
        self._idle = self._references(0)  # of an array that only this object refers to

    def __getitem__(self, number: int):
        return self._arrays[number]

    def number(self, array) -> int:
        """Return the position of an array among the buffers."""
        return next(number for number, own in enumerate(self._arrays) if own is array)

    def get(self):
        """Return a free array; None if all shared arrays are in use."""
        with self._lock:  # two threads must not find the same array
            for number in range(len(self._arrays)):
                if self._references(number) <= self._idle:
                    return self._arrays[number]
            if self._shared:
                return None
            is_kept = len(self._arrays) < _KEPT
            array = _new_array(self._shape, kept=is_kept)
            if is_kept:
                self._arrays.append(array)
            return array

    def _references(self, number: int) -> int:
        # A tensor of torch.from_numpy and a numpy view refer to the array, so no call has to return
        # it.
        return sys.getrefcount(self._arrays[number])


def _new_array(shape: tuple[int, ...], *, kept: bool):
    import numpy

    can_map = hasattr(mmap, "MAP_PRIVATE")
    if not kept or not can_map:
        return numpy.empty(shape, numpy.uint8)
    # A map begins at a page, which numpy's memory does not, and is filled faster. The system has
    # only a limited number of maps per process.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape), flags=flags)
    return numpy.frombuffer(memory, numpy.uint8).reshape(shape)


def _in_shared_memory(shape: tuple[int, ...], count: int) -> list:
    import numpy

    # Anonymous memory, so the size of a container's /dev/shm does not limit it.
    memory = mmap.mmap(-1, count * math.prod(shape))
    return list(numpy.frombuffer(memory, numpy.uint8).reshape(count, *shape))
