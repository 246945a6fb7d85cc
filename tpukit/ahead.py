"""Batches prepared ahead of the loop: in threads where one native call does it, in processes where Python must."""

import contextlib
import hashlib
import math
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol


class MapDataset(Protocol):
    """What any dataset is: `len(dataset)` samples, `dataset[i]` a tensor, number, tuple or dict of them."""

    def __len__(self) -> int: ...  # noqa: D105
    def __getitem__(self, index: int) -> object: ...  # noqa: D105


class ImageSource(Protocol):
    """What gives whole batches in one call: `Records` and `Cache`.

    Attributes:
        shape: (height, width, 3) of every image.
        labels: (N, L) float32.
    """

    shape: tuple[int, int, int]
    labels: object

    def __len__(self) -> int: ...  # noqa: D105
    def take(self, indices, out=None): ...  # noqa: D102


def as_source(dataset: object) -> ImageSource | None:
    """Return what gives whole batches, also a `torch.utils.data.Subset` of it; None for any other dataset."""
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        inner = as_source(dataset.dataset)
        return inner and _Part(inner, dataset.indices)
    is_one = all(hasattr(dataset, name) for name in ("take", "shape", "labels"))
    return dataset if is_one else None


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
    source = as_source(dataset)
    if source is not None:
        return _images_in_processes(source, jobs, workers, seed)
    batches = _loaded(_Whole(dataset, seed), jobs, workers)
    return _told_of_deaths(batches) if workers else batches


def _images_in_processes(source: ImageSource, jobs: list, workers: int, seed: tuple[int, ...]) -> Iterator[object]:
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


def processors(cores: int) -> int:
    """Return how many processes each of `cores` may have for its batches: what its machine has left, 16 at most."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(16, mine // cores - 1))


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


class _Part:
    """Some samples of a source, as `torch.utils.data.Subset` names them."""

    def __init__(self, source: ImageSource, indices):
        import numpy

        self._source, self._indices = source, numpy.asarray(indices)
        self.shape, self.labels = source.shape, source.labels[self._indices]
        self.form = getattr(source, "form", None)

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, indices, out=None):
        """Return (n, H, W, 3) uint8 images."""
        return self._source.take(self._indices[indices], out)

    def read_ahead(self, indices) -> None:
        """Ask the system for the images that come next."""
        if hasattr(self._source, "read_ahead"):
            self._source.read_ahead(self._indices[indices])


class _Images:
    """A source asked for whole batches in a process: written into the job's shared buffer, or returned."""

    def __init__(self, source: ImageSource, seed: tuple[int, ...], buffers: Buffers | None):
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


def seed_host(words: tuple[int, ...]) -> int:
    """Seed all that is drawn from on the host, by whole numbers alone; return the one number they came to."""
    import random

    import numpy
    import torch

    word = int.from_bytes(hashlib.blake2b(repr(tuple(map(int, words))).encode(), digest_size=4).digest(), "big")
    random.seed(word)
    numpy.random.seed(word)
    # Not torch.manual_seed: for every device that is not started it keeps a stack trace, half a millisecond a step.
    torch.default_generator.manual_seed(word)
    return word
