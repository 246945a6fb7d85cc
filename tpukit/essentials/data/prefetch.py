"""Prepare batches ahead of the loop: in threads, or in the processes of a DataLoader.

Threads are for sources, which make a batch in a single native call without the GIL. Processes are
for datasets whose samples Python code makes, and for sources that decode JPEG images.

A source writes images into buffers that are used again, because new memory is slow. A buffer is
free when nothing refers to it: neither the loop, nor a tensor or view of it, nor a transfer.
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

# Buffers that are stored for reuse: two batches ahead for each of five threads, the batch in the
# loop, and some spare ones. If a loop stores more batches, as list(batches) does, each gets new
# memory. Otherwise a search would go through all buffers for every batch (9.6 s for 16,000), and
# none would ever be freed.
_KEPT = 16
_AHEAD = 2  # batches per thread
# A DataLoader requests two batches per process. Up to five more are between it and the loop's end.
_REQUESTED = 2
_ON_THEIR_WAY = 5


# Threads


class _Outcome(NamedTuple):
    """The outcome of a call in a thread: a result or an error."""

    result: object
    error: BaseException | None


def run_ahead(calls: Iterable[Callable[[], object]], threads: int) -> Iterator[object]:
    """Run calls in threads, and yield their results in order.

    Up to two calls per thread are started before the loop asks for their results.

    Args:
        calls: functions without arguments.
        threads: number of threads.
    """
    # A queue per result instead of a Future: a Future wakes the other thread several times per
    # result, and each time that thread waits for the GIL. This matters for batches that take less
    # than a millisecond.
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
            if len(running) > _AHEAD * threads:  # enough is requested: wait for the oldest
                yield _result(running.popleft())
        while running:
            yield _result(running.popleft())
    finally:  # also after a `break` in the loop: drop calls that have not begun, end the threads
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
        del call, done, job  # otherwise they would refer to a buffer while the thread waits


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
    """Yield the batches of a dataset, made by a DataLoader with or without processes.

    A loader process seeds its random numbers for each batch with `seed` and the batch's number. So
    a batch does not depend on the process that makes it. With `workers=0` the calling thread makes
    the batches, and seeds each of them in the same way if `in_turn` is True.

    Args:
        dataset: the dataset.
        jobs: (number, samples) per batch. The number is unique in the epoch over all cores.
        workers: number of loader processes; 0 for none.
        seed: the seed of the epoch.
        in_turn: True if other cores are threads of this process, and so use its random generators.
        collate: `collate(items, samples, length)` joins a batch; a job is then (number, samples,
            length). None for torch's `default_collate`.
        generators: random generators in the dataset, which are seeded for each batch with or
            without processes.
    """
    whole = _BatchDataset(dataset, seed, in_turn=in_turn, collate=collate, generators=generators)
    batches = iterate_loader(whole, jobs, workers)
    if workers:
        return _explain_broken_pipes(batches)
    return batches


class _Requested(NamedTuple):
    """A batch that was requested from the loader."""

    samples: object
    buffer: object | None  # the shared array for its images; None to get them as a message


def load_images(
    source: BatchSource, jobs: list, *, workers: int, seed: tuple[int, ...]
) -> Iterator[tuple]:
    """Yield (images, labels) of a source from loader processes.

    Args:
        source: the source.
        jobs: (number, samples) per batch. The number is unique in the epoch over all cores.
        workers: number of loader processes, at least 1.
        seed: the seed of the epoch. A batch is seeded with `seed` and with its own number.
    """
    import torch

    # The processes write the images into shared memory, so no image is copied. This memory is
    # anonymous, so it needs no room in /dev/shm.
    buffers = None
    if _forks(workers):
        _, samples = jobs[0]
        shared = _REQUESTED * workers + _ON_THEIR_WAY
        buffers = Buffers((len(samples), *source.shape), shared=shared)
    requested: deque[_Requested] = deque()  # the loader returns batches in the order of requests

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
            if images is None:  # the process has written them into the buffer
                images = torch.from_numpy(buffer)
            yield images, torch.from_numpy(source.labels[samples])

    return received()


def iterate_loader(dataset: MapDataset, jobs: Iterable, workers: int) -> Iterator[object]:
    """Return an iterator over `dataset[job]` of all jobs, from loader processes.

    Args:
        dataset: a dataset of batches.
        jobs: the jobs; the processes get them in turn.
        workers: number of loader processes; 0 for none.
    """
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=jobs,
        num_workers=workers,
        multiprocessing_context="fork" if _forks(workers) else None,
        # Without a generator of its own, the loader would draw a random number of the caller in
        # each epoch.
        generator=torch.Generator(),
    )
    # `iter` forks the processes, which must happen in the caller's thread. In a generator function,
    # the first `next` would fork them in a thread that may end before they do.
    return iter(loader)


def _forks(workers: int) -> bool:
    return workers > 0 and hasattr(os, "fork")


def _explain_broken_pipes(batches: Iterator[object]) -> Iterator[object]:
    """Yield batches; name an ended loader process if torch only reports a broken connection."""
    with contextlib.suppress(StopIteration):
        while True:
            try:
                batch = next(batches)
            except (ConnectionError, EOFError) as error:
                # With this word torch begins the text of an error that a dataset has raised.
                is_from_dataset = str(error).startswith("Caught ")
                if is_from_dataset:
                    raise
                fact = "DataLoader worker (pid unknown) ended while its batch was on its way"
                raise RuntimeError(f"{fact}: {error}") from error
            yield batch


class _SharedImages:
    """A dataset whose items are a source's batches of images, for loader processes.

    A process writes the images into a shared buffer and returns None, or returns them if there is
    no buffer.
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
    """A dataset whose items are batches of another dataset.

    An error of `__getitem__` gets a note with the number of the sample.

    The arguments are those of `load_samples`.
    """

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
    """uint8 arrays of the same shape, which are used again when nothing refers to them.

    Args:
        shape: the shape of each array.
        shared: the number of arrays in shared memory. Processes that are forked later can write
            into them. With 0, ordinary arrays are made when needed, and up to 16 are reused.
    """

    # In a single thread new arrays would be as fast. Two threads would wait for each other while
    # the operating system allocates the pages.

    def __init__(self, shape: tuple[int, ...], shared: int = 0):
        self._shape = shape
        self._shared = shared
        self._lock = threading.Lock()
        if shared:
            self._arrays = _in_shared_memory(shape, shared)
        else:
            self._arrays = [_new_array(shape, kept=True)]
        self._idle = 0
        # The reference count of an array to which only this object refers.
        self._idle = self._references(0)

    def __getitem__(self, number: int):
        return self._arrays[number]

    def number(self, array) -> int:
        """Return the position of an array among the buffers."""
        return next(number for number, own in enumerate(self._arrays) if own is array)

    def get(self):
        """Return a free array; None if all shared arrays are in use."""
        with self._lock:  # two threads must not get the same array
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
        # Tensors of torch.from_numpy and views of numpy refer to the array, so the count shows that
        # they exist, and no user has to give an array back.
        return sys.getrefcount(self._arrays[number])


def _new_array(shape: tuple[int, ...], *, kept: bool):
    import numpy

    can_map = hasattr(mmap, "MAP_PRIVATE")
    if not kept or not can_map:
        return numpy.empty(shape, numpy.uint8)
    # Mapped memory begins at a page, unlike numpy's, and is filled faster. Arrays that are not
    # reused get numpy's memory, because a process can have only a limited number of maps.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape), flags=flags)
    return numpy.frombuffer(memory, numpy.uint8).reshape(shape)


def _in_shared_memory(shape: tuple[int, ...], count: int) -> list:
    import numpy

    # Anonymous memory, so the size of a container's /dev/shm does not limit it.
    memory = mmap.mmap(-1, count * math.prod(shape))
    return list(numpy.frombuffer(memory, numpy.uint8).reshape(count, *shape))
