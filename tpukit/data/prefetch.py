"""Batches prepared ahead of the loop: in threads where one native call does it, in processes where Python must."""

import contextlib
import math
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from tpukit.data.seeding import seed_host
from tpukit.data.sources import BatchSource, MapDataset, as_batch_source


def in_threads(calls: Iterable[Callable[[], object]], threads: int) -> Iterator[object]:
    """Run the calls in background threads, two batches ahead of each, and yield what they return, in order."""
    running: deque[Future] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="batches") as pool:
        try:
            for call in calls:
                running.append(pool.submit(call))
                if len(running) > 2 * threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:  # a loop that was left early
            for future in running:
                future.cancel()


def in_processes(dataset: MapDataset, jobs: list, workers: int, seed: tuple[int, ...]) -> Iterator[object]:
    """Yield the batches of a dataset through torch's DataLoader; with 0 workers they are made in the caller's thread.

    A job is the samples of one batch, behind a number that is no other batch's of this epoch, on any core.
    """
    source = as_batch_source(dataset)
    if source is not None:
        return _images_in_processes(source, jobs, workers, seed)
    batches = _loaded(_Whole(dataset, seed), jobs, workers)
    return _told_of_deaths(batches) if workers else batches


def _images_in_processes(source: BatchSource, jobs: list, workers: int, seed: tuple[int, ...]) -> Iterator[object]:
    """Yield a source's batches from processes that write into memory we share: copied by nobody, /dev/shm unused."""
    # What the loader has asked for, what waits in front of the loop, and what the loop holds.
    buffers = Buffers((len(jobs[0][1]), *source.shape), shared=2 * workers + 5) if _forks(workers) else None
    asked: deque[tuple] = deque()

    def ask() -> Iterator[tuple]:
        for number, samples in jobs:
            buffer = buffers and buffers.get()
            asked.append((samples, buffer))
            yield number, samples, None if buffer is None else buffers.number(buffer)

    made = _told_of_deaths(_loaded(_Images(source, seed, buffers), ask(), workers))

    def received() -> Iterator[tuple]:
        import torch

        for images in made:
            samples, buffer = asked.popleft()
            yield (torch.from_numpy(buffer) if images is None else images), torch.from_numpy(source.labels[samples])

    return received()


def _loaded(dataset: MapDataset, jobs: Iterable[tuple], workers: int) -> Iterator[object]:
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=jobs,
        num_workers=workers,
        multiprocessing_context="fork" if _forks(workers) else None,
        generator=torch.Generator(),  # without one, each epoch would draw a number of the caller's
    )
    return iter(loader)  # here and now: processes end with the thread that forked them


def _forks(workers: int) -> bool:
    return workers > 0 and hasattr(os, "fork")


def _told_of_deaths(batches: Iterator[object]) -> Iterator[object]:
    """Say it was a process that ended where torch, which looks a moment too early, only sees a broken connection."""
    with contextlib.suppress(StopIteration):
        while True:
            try:
                batch = next(batches)
            except (ConnectionError, EOFError) as error:
                if str(error).startswith("Caught "):  # the dataset's own, from one of the processes
                    raise
                raise RuntimeError(
                    f"DataLoader worker (pid unknown) ended while its batch was on its way: {error}"
                ) from error
            yield batch


class Buffers:
    """Arrays of one shape, each used again once nobody holds it.

    A fresh array would be as good for one thread; two would wait for each other while the system hands out its pages.

    Args:
        shape: of each.
        shared: make so many at once, and no more, in memory that processes forked later write into; 0: as needed.
    """

    def __init__(self, shape: tuple[int, ...], shared: int = 0):
        self._shape, self._shared, self._lock = shape, shared, threading.Lock()
        self._arrays = _in_shared_memory(shape, shared) if shared else [_fresh(shape)]
        self._idle = 0
        self._idle = self._references(0)

    def __getitem__(self, number: int):
        return self._arrays[number]

    def number(self, array) -> int:
        """Return which of the arrays this is."""
        return next(number for number, one in enumerate(self._arrays) if one is array)

    def get(self):
        """Return a uint8 array that no tensor, no view and no other thread holds; None if all shared ones are held."""
        with self._lock:
            for number in range(len(self._arrays)):
                if self._references(number) <= self._idle:
                    return self._arrays[number]
            if self._shared:
                return None
            self._arrays.append(_fresh(self._shape))
            return self._arrays[-1]

    def _references(self, number: int) -> int:
        return sys.getrefcount(self._arrays[number])


def _fresh(shape: tuple[int, ...]):
    import numpy

    return numpy.empty(shape, numpy.uint8)


def _in_shared_memory(shape: tuple[int, ...], count: int) -> list:
    import numpy

    memory = mmap.mmap(-1, count * math.prod(shape))  # of no file: what a container gives /dev/shm is no limit
    return list(numpy.frombuffer(memory, numpy.uint8).reshape(count, *shape))


class _Images:
    """A source asked for whole batches in a process: written into the job's shared buffer, or returned."""

    def __init__(self, source: BatchSource, seed: tuple[int, ...], buffers: Buffers | None):
        self.source, self.seed, self.buffers = source, seed, buffers

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, job: tuple):
        import torch

        number, samples, buffer = job
        seed_host((*self.seed, number))
        out = None if buffer is None else self.buffers[buffer]
        images = self.source.take(samples, out=out)
        return None if images is out else torch.from_numpy(images)


class _Whole:
    """A dataset asked for whole batches, whose errors say which sample it was, also from a DataLoader's process."""

    def __init__(self, dataset: MapDataset, seed: tuple[int, ...]):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, job: tuple):
        from torch.utils.data import default_collate, get_worker_info

        number, samples = job
        if get_worker_info() is not None:
            seed_host((*self.seed, number))
        samples = samples.tolist()
        if hasattr(self.dataset, "__getitems__"):
            return default_collate(self.dataset.__getitems__(samples))
        return default_collate([self._one(sample) for sample in samples])

    def _one(self, sample: int) -> object:
        with _naming(sample):
            return self.dataset[sample]


@contextlib.contextmanager
def _naming(sample: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"sample {sample} of the dataset")
        raise
