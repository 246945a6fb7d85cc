"""Batches of datasets that can only be read in order: each process reads its own share."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tpukit.essentials.data import (
    Batches,
    ShardedSampler,
    collate,
    host_numbers,
    iterate_loader,
    only_iterates,
    put_back,
    refuse_loader,
    refuse_shared,
    seed_host,
    seeded_in_turn,
)
from tpukit.essentials.display import InvalidTypeError, InvalidValueError, check_count


@dataclass(frozen=True)
class StreamSampler(ShardedSampler):
    """The steps of a stream, whose samples have no index: all are 0 here."""

    def positions(self, done: int = 0, *, epoch: int = 0, seed: int = 0):
        """Return (steps, batch_size) zeros."""
        import numpy

        return numpy.broadcast_to(numpy.int64(0), (self.steps(done), self.batch_size))


class StreamBatches(Batches):
    """Batches of a stream: an epoch is a fixed number of steps, equal on all cores.

    There is a share for each core, or for each of its loader processes. When a share ends, it
    starts again, independently of the others. An epoch continues in the stream after the end of the
    epoch before.

    A state holds the epoch and its finished steps, but no position in the stream, because a stream
    cannot return to one. A resumed loop has the remaining steps, and reads the stream from its
    start, with other random numbers.

    Raises:
        TypeError: the dataset is not an iterable dataset, or it must be made anew for each share.
        ValueError: a number is out of range, or the stream is to be shuffled, masked or put into buckets.
    """

    has_numbers = False

    def __init__(
        self,
        dataset: Iterable | Callable[[int, int], Iterable],
        *,
        steps: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int | None = None,
        shuffle: bool = False,
        weights=None,
        mask: bool = False,
        buckets=None,
        **options: object,
    ):
        if shuffle or mask or weights is not None or buckets is not None:
            raise InvalidValueError(
                "a stream comes in its own order, in full batches of one shape",
                found=(
                    f"shuffle={shuffle}, mask={mask}, buckets={buckets}, "
                    f"weights={None if weights is None else 'given'}"
                ),
                fix="leave these out; shuffle and pad in the dataset, webdataset's .shuffle(1000), for example",
            )
        refuse_loader(dataset, batch_size)
        _check(dataset, steps)
        numbers = range(
            max(1, steps) * max(1, batch_size) * world_size
        )  # as if the samples had these
        options |= {"rank": rank, "world_size": world_size, "workers": workers or 0}
        super().__init__(numbers, batch_size=batch_size, **options)
        refuse_shared(dataset, rank=rank, world_size=world_size, workers=workers or 0)
        self.sampler = StreamSampler(len(numbers), batch_size, rank, world_size)
        self.dataset, self._batches = dataset, None

    def _prepare(self, positions, samples) -> Iterator[object]:
        if self._batches is None:
            seed = self._seed, self.epoch, self._done // self.samples_per_step
            shares = _Shares(
                self.dataset, self.sampler, self._workers, seed, in_turn=self._shares_process
            )
            self._batches = iterate_loader(shares, itertools.count(), self._workers)
        # Nothing ahead of the loop but what loader processes hold: a loop that ends early loses no batch.
        return (
            self._with_own_numbers(lambda: self._finish(next(self._batches), None)) for _ in samples
        )

    def state_dict(self) -> dict:
        """Return the epoch and the number of its finished steps."""
        return {
            "epoch": self.epoch,
            "steps": self._done // self.samples_per_step,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue in that epoch with the remaining steps, on any number of cores.

        Raises:
            ValueError: the state does not belong to a stream.
        """
        if "steps" not in state:
            raise InvalidValueError(
                "the saved state belongs to a map-style dataset, but this dataset is a stream",
                fix="pass the dataset that the state was saved with",
            )
        self.epoch, self._done, self._seed = (
            state["epoch"],
            state["steps"] * self.samples_per_step,
            state["seed"],
        )
        if not self.sampler.steps(self._done):
            self.epoch, self._done = self.epoch + 1, 0
        self._resumed, self._batches = True, None


class _OwnNumbers:
    """A sequence of the host's random numbers that other draws do not change."""

    def __init__(self, seed: tuple[int, ...]):
        self._seed, self._state = seed, None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Draw from this sequence in the block, one thread at a time; then restore the other one."""
        with seeded_in_turn(self._seed):
            if self._state:
                put_back(self._state)
            yield
            self._state = host_numbers()


class _Shares:
    """The dataset of a loader's processes; each process opens its own share and continues in it."""

    def __init__(
        self, dataset, sampler: StreamSampler, workers: int, seed: tuple[int, ...], *, in_turn: bool
    ):
        self.dataset, self.sampler, self.workers, self.seed, self.in_turn = (
            dataset,
            sampler,
            workers,
            seed,
            in_turn,
        )
        self._samples: Iterator | None = None
        # Each share reads all of such a stream and keeps its part of it. So that all are parts of one order, all draw
        # the same numbers; a sample has its own, as each draws for all samples.
        self._numbers = None if callable(dataset) else _OwnNumbers(seed)

    def __getitem__(self, number: int) -> object:
        if self._numbers:
            with self._numbers.used():
                return self._next()
        if self.in_turn and not self.workers:
            with seeded_in_turn((*self.seed, self.sampler.rank, number)):
                return self._next()
        return self._next()

    def _next(self) -> object:
        self._samples = self._samples or self._endless(_leave_loader())
        return collate(list(itertools.islice(self._samples, self.sampler.batch_size)))

    def _endless(self, worker: int | None) -> Iterator:
        each = max(1, self.workers)
        share, shares = self.sampler.rank * each + (worker or 0), self.sampler.world_size * each
        if worker is not None and not self._numbers:
            seed_host((*self.seed, share))
        while True:
            is_empty = True
            for sample in self._open(share, shares):
                is_empty = False
                yield sample
            if is_empty:
                raise InvalidValueError(
                    f"share {share} of {shares} of the stream holds no sample, so a core would have nothing to do",
                    found=f"{self.sampler.world_size} cores, each with {each} reading processes",
                    fix="fewer workers=, or more shards: at least one for each share",
                )

    def _open(self, share: int, shares: int) -> Iterable:
        if callable(self.dataset):
            return self.dataset(share, shares)
        return itertools.islice(iter(self.dataset), share, None, shares)


def _leave_loader() -> int | None:
    """Return the number of this loader process, or None, and hide the loader from datasets.

    Datasets and webdataset's pipelines that see a loader would divide the share once more, and
    leave out most of it.
    """
    from torch.utils.data import _utils, get_worker_info

    info = get_worker_info()
    _utils.worker._worker_info = None
    return info and info.id


def _check(dataset: object, steps: int) -> None:
    if not only_iterates(dataset):
        raise InvalidTypeError(
            "steps= is for a dataset that can only be read in order, but a "
            f"{type(dataset).__name__} has indices",
            fix="leave out steps=; for shorter epochs fit(steps_per_epoch=...)",
        )
    if type(dataset).__module__.split(".")[0] == "webdataset":
        raise InvalidTypeError(
            "a webdataset pipeline divides its shards among processes by itself, but not among "
            "the cores of a launch",
            found="one pipeline for all cores",
            fix=(
                "a function that opens a share of the shards: core.batches(lambda share, shares: wds.WebDataset("
                "urls[share::shares], nodesplitter=None, workersplitter=None)..., steps=..., batch_size=...)"
            ),
        )
    if hasattr(dataset, "__next__"):
        raise InvalidTypeError(
            f"a {type(dataset).__name__} can be read only once, but a stream starts again when "
            "it ends",
            fix="pass a function that makes it: core.batches(lambda share, shares: ..., "
            "steps=..., batch_size=...)",
        )
    check_count("steps", steps)
