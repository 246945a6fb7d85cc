"""Batches prepared ahead of the loop: in threads where one native call makes them, in processes where Python does."""

import contextlib
import math
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue

from tpukit.essentials.data.collating import collate
from tpukit.essentials.data.seeding import seed_host, seeded_in_turn
from tpukit.essentials.data.sources import BatchSource, MapDataset, as_batch_source, reads_many

# Two ahead for each of five threads, and the loop's own. A loop that holds more, as list(batches) does, has them from
# the system: kept, they would be looked through for every batch (9.6 s for 16,000) and never be given back.
_KEPT = 16


def run_ahead(calls: Iterable[Callable[[], object]], threads: int) -> Iterator[object]:
    """Run the calls in background threads, two ahead per thread, and yield their results in order."""
    # A queue for each result, not a Future: a Future wakes the other thread several times for one result, and each time
    # that thread waits for the GIL, which is felt where a batch takes less than a millisecond.
    todo, running = SimpleQueue(), deque()
    workers = [threading.Thread(target=_run, args=(todo,), name=f"batches_{n}", daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for call in calls:
            running.append(SimpleQueue())
            todo.put((call, running[-1]))
            if len(running) > 2 * threads:
                yield _result(running.popleft())
        while running:
            yield _result(running.popleft())
    finally:  # also when the loop ends early: what has not begun is not waited for
        with contextlib.suppress(Empty):
            while True:
                todo.get_nowait()
        for _ in workers:
            todo.put(None)
        for worker in workers:
            worker.join()


def _run(todo: SimpleQueue) -> None:
    """Run calls until None comes, each into its own queue: (result, None) or (None, error)."""
    while (job := todo.get()) is not None:
        call, done = job
        try:
            done.put((call(), None))
        except BaseException as error:  # raised where the result is due
            done.put((None, error))
        del call, done, job  # a buffer that nothing refers to is used again


def _result(done: SimpleQueue) -> object:
    result, error = done.get()
    if error is not None:
        raise error
    return result


def load_batches(
    dataset: MapDataset,
    jobs: list,
    workers: int,
    seed: tuple[int, ...],
    *,
    in_turn: bool = False,
    collate: Callable[[list, list[int], int], object] | None = None,
) -> Iterator[object]:
    """Yield the batches of a dataset, made by the processes of a DataLoader; with 0 workers, in the caller's thread.

    A job is (number, samples) of one batch. Its number is unique in the epoch over all cores: together with `seed` it
    seeds the batch, so the batch is the same whichever process makes it. In the caller's thread a batch draws on from
    whatever the caller has drawn; unless `in_turn`, where threads share the process, and each batch is seeded as well.

    `collate(items, samples, length)` makes a batch in place of torch's `default_collate`; a job then holds the length.
    """
    source = as_batch_source(dataset)
    if source is not None:
        return _load_images(source, jobs, workers, seed)
    batches = iterate_loader(_BatchDataset(dataset, seed, in_turn, collate), jobs, workers)
    return _explain_broken_pipes(batches) if workers else batches


def _load_images(source: BatchSource, jobs: list, workers: int, seed: tuple[int, ...]) -> Iterator[object]:
    """Yield a source's batches from processes that write into shared memory: without a copy, and without /dev/shm."""
    # 2 batches per worker are requested by the loader; 5 more are on their way to the loop or in its hands.
    buffers = Buffers((len(jobs[0][1]), *source.shape), shared=2 * workers + 5) if _forks(workers) else None
    requested: deque[tuple] = deque()

    def requests() -> Iterator[tuple]:
        for number, samples in jobs:
            buffer = buffers and buffers.get()
            requested.append((samples, buffer))
            yield number, samples, None if buffer is None else buffers.number(buffer)

    loaded = _explain_broken_pipes(iterate_loader(_SharedImages(source, seed, buffers), requests(), workers))

    def received() -> Iterator[tuple]:
        import torch

        for images in loaded:
            samples, buffer = requested.popleft()
            yield (torch.from_numpy(buffer) if images is None else images), torch.from_numpy(source.labels[samples])

    return received()


def iterate_loader(dataset: MapDataset, jobs: Iterable, workers: int) -> Iterator[object]:
    """Yield what the dataset returns for each job, in their order, from processes that take turns."""
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=jobs,
        num_workers=workers,
        multiprocessing_context="fork" if _forks(workers) else None,
        generator=torch.Generator(),  # without it, each epoch would draw one of the caller's random numbers
    )
    return iter(loader)  # not in a generator: the processes must be forked by a thread that outlives them


def _forks(workers: int) -> bool:
    return workers > 0 and hasattr(os, "fork")


def _explain_broken_pipes(batches: Iterator[object]) -> Iterator[object]:
    """Raise the error of an ended worker process where torch checks it too early and only sees a broken connection."""
    with contextlib.suppress(StopIteration):
        while True:
            try:
                batch = next(batches)
            except (ConnectionError, EOFError) as error:
                if str(error).startswith("Caught "):  # an error that the dataset itself raised in a worker process
                    raise
                raise RuntimeError(
                    f"DataLoader worker (pid unknown) ended while its batch was on its way: {error}"
                ) from error
            yield batch


class Buffers:
    """uint8 arrays of one shape, each of which is reused as soon as nothing refers to it.

    With a single thread, new arrays would be as fast; two threads would wait for each other while the system allocates
    the pages.

    Args:
        shape: the shape of each array.
        shared: how many arrays to make, at once, in memory that processes forked later can write into; 0 makes
            ordinary arrays, as many as are needed, and keeps up to 16.
    """

    def __init__(self, shape: tuple[int, ...], shared: int = 0):
        self._shape, self._shared, self._lock = shape, shared, threading.Lock()
        self._arrays = _in_shared_memory(shape, shared) if shared else [_new_array(shape, kept=True)]
        self._idle = 0
        self._idle = self._references(0)  # the reference count of an array that only this object holds

    def __getitem__(self, number: int):
        return self._arrays[number]

    def number(self, array) -> int:
        """Return the position of this array among the buffers."""
        return next(number for number, one in enumerate(self._arrays) if one is array)

    def get(self):
        """Return an array that no tensor, view or other thread refers to; None if all shared arrays are in use."""
        with self._lock:  # two threads must not find the same array
            for number in range(len(self._arrays)):
                if self._references(number) <= self._idle:
                    return self._arrays[number]
            if self._shared:
                return None
            array = _new_array(self._shape, kept=len(self._arrays) < _KEPT)
            if len(self._arrays) < _KEPT:
                self._arrays.append(array)
            return array

    def _references(self, number: int) -> int:
        # A tensor made by torch.from_numpy and a numpy view both refer to the array, so no one has to give it back.
        return sys.getrefcount(self._arrays[number])


def _new_array(shape: tuple[int, ...], *, kept: bool):
    import numpy

    if not (kept and hasattr(mmap, "MAP_PRIVATE")):
        return numpy.empty(shape, numpy.uint8)
    # It begins with a page, which numpy's do not, and is filled faster. The system has only so many maps for a process.
    memory = mmap.mmap(-1, math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return numpy.frombuffer(memory, numpy.uint8).reshape(shape)


def _in_shared_memory(shape: tuple[int, ...], count: int) -> list:
    import numpy

    memory = mmap.mmap(-1, count * math.prod(shape))  # anonymous: the size of a container's /dev/shm does not limit it
    return list(numpy.frombuffer(memory, numpy.uint8).reshape(count, *shape))


class _SharedImages:
    """A source as a dataset of batches, for worker processes: written into a shared buffer, or returned without one."""

    def __init__(self, source: BatchSource, seed: tuple[int, ...], buffers: Buffers | None):
        self.source, self.seed, self.buffers = source, seed, buffers

    def __getitem__(self, job: tuple):
        import torch

        number, samples, buffer = job
        seed_host((*self.seed, number))
        out = None if buffer is None else self.buffers[buffer]
        images = self.source.take(samples, out=out)
        return None if images is out else torch.from_numpy(images)


class _BatchDataset:
    """A dataset as a dataset of batches; an error names its sample, also if a worker process raised it."""

    def __init__(self, dataset: MapDataset, seed: tuple[int, ...], in_turn: bool = False, collate=None):
        self.dataset, self.seed, self.in_turn, self.collate = dataset, seed, in_turn, collate

    def __getitem__(self, job: tuple):
        from torch.utils.data import get_worker_info

        number, samples, *length = job
        if get_worker_info() is not None:
            seed_host((*self.seed, number))
        elif self.in_turn:
            with seeded_in_turn((*self.seed, number)):
                return self._collate(samples.tolist(), *length)
        return self._collate(samples.tolist(), *length)

    def _collate(self, samples: list[int], length: int | None = None) -> object:
        if hasattr(self.dataset, "__getitems__") and reads_many(self.dataset):
            items = self.dataset.__getitems__(samples)
        else:
            items = [self._read(sample) for sample in samples]
        return collate(items, samples) if length is None else self.collate(items, samples, length)

    def _read(self, sample: int) -> object:
        try:
            return self.dataset[sample]
        except Exception as error:
            error.add_note(f"sample {sample} of the dataset")
            raise
