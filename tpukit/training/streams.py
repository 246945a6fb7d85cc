"""Make batches of streams: datasets that can only be read in order, such as webdataset's.

Each process that reads has a share of the stream. With two cores and two loader processes per core,
the samples 0, 1, 2, ... of a plain iterable are divided like this:

    share 0    core 0, process 0    samples 0, 4, 8, ...
    share 1    core 0, process 1    samples 1, 5, 9, ...
    share 2    core 1, process 0    samples 2, 6, 10, ...
    share 3    core 1, process 1    samples 3, 7, 11, ...

When a share ends, it is read again from its start. So an epoch can have the same number of steps on
every core.
"""

import contextlib
import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tpukit.essentials.data import (
    Batches,
    EpochPlan,
    Sent,
    ShardedSampler,
    collate,
    iterate_loader,
    numbered,
    only_iterates,
    random_states,
    refuse_loader,
    refuse_shared,
    restore_random_states,
    seed_host,
    seeded_in_turn,
    send_nested,
)
from tpukit.essentials.display import (
    InvalidTypeError,
    InvalidValueError,
    check_count,
    first_few,
)
from tpukit.training.hugging_face import nodes_of, shards_of


@dataclass(frozen=True)
class StreamSampler(ShardedSampler):
    """The steps of a stream. Its samples have no index, so all positions are 0."""

    def positions(self, done: int = 0, *, epoch: int = 0, seed: int = 0):
        """Return zeros of shape (steps, batch_size), because samples have no index."""
        import numpy

        return numpy.broadcast_to(numpy.int64(0), (self.steps(done), self.batch_size))


class StreamBatches(Batches):
    """Batches of a stream: an epoch is a fixed number of steps, the same on every core.

    The stream is divided into shares, one for each process that reads. When a share ends, it is
    read again from its start, independently of the other shares. An epoch begins at the position
    in the stream where the previous epoch has ended.

    A saved state contains the epoch, and how many of its steps are done. It does not contain the
    position in the stream, because most streams cannot return to a position. A resumed loop has the
    steps that were left in the epoch. It reads the stream from its start, with other random
    numbers.

    Args:
        dataset: an iterable, or a function of (share, shares) that returns the iterable of a share.
        steps: steps per epoch.
        batch_size: samples per core and step.
        rank: the rank of this core.
        world_size: the number of cores.
        workers: loader processes per core; None or 0: the main process reads.
        shuffle, weights, mask, buckets: not supported for a stream.
        shares_process: whether other cores are threads of this process.
        numbers: function that returns a context with this core's own random numbers, for reading
            without loader processes.
        **options: further arguments of `Batches`.

    Raises:
        InvalidTypeError: the dataset has indices; or it is a webdataset pipeline or an iterator,
            for which you must pass a function of (share, shares).
        InvalidValueError: a number is out of range; or shuffle, weights, mask or buckets are set.
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
        shares_process: bool = False,
        numbers: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        **options: object,
    ):
        if shuffle or mask or weights is not None or buckets is not None:
            given = "None" if weights is None else "given"
            raise InvalidValueError(
                "shuffle, mask, weights and buckets are not supported for a stream",
                found=f"shuffle={shuffle}, mask={mask}, buckets={buckets}, weights={given}",
                fix="leave these out; shuffle and pad in the dataset, for example with "
                "webdataset's .shuffle(1000)",
            )
        refuse_loader(dataset, batch_size)
        _check(dataset, steps)
        workers = workers or 0
        # The base class needs a dataset with a length, to check arguments and to make a sampler. So
        # pass a range, as long as an epoch of all cores.
        count = max(1, steps) * max(1, batch_size) * world_size
        own = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
        super().__init__(range(count), workers=workers, **own, **options)
        # A generator in the dataset is copied into every process, so all draw the same numbers.
        if refuse_shared(dataset, world_size=world_size, workers=workers) and rank == 0:
            # The generators cannot be seeded for each batch, because a stream reads ahead.
            print(
                "the stream holds a random generator: each process has a copy of it, so all "
                "draw the same numbers"
            )
        self.dataset = dataset
        self.sampler = StreamSampler(count, batch_size, rank, world_size)
        self._feed = StreamFeed(
            dataset,
            self.sampler,
            transfer=self._transfer,
            workers=workers,
            in_turn=shares_process,
            numbers=numbers,
        )

    def facts(self) -> dict[str, object]:
        """Return the layout and the shards of a Hugging Face stream, without reading a sample.

        Each core takes its share of the same whole stream, so both must be equal on all cores.
        """
        if self._facts is None:
            self._facts = {}
            shards = shards_of(self.dataset)
            if shards:
                checksum = zlib.crc32(repr(shards).encode())
                words = f"{len(shards)} with checksum {checksum}: {first_few(shards, 2)}"
                self._facts = {"shards of the whole stream": words}
        return super().facts()

    def state_dict(self) -> dict:
        """Return the epoch, the number of its steps done, and the seed."""
        return {
            "epoch": self.epoch,
            "steps": self._done // self.samples_per_step,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue the saved epoch with its remaining steps; read the stream from its start.

        The number of cores may differ from that of the saved run.

        Raises:
            InvalidValueError: the state does not belong to a stream.
        """
        if "steps" not in state:
            raise InvalidValueError(
                "the saved state belongs to a map-style dataset, but this dataset is a stream",
                fix="pass the dataset that the state was saved with",
            )
        self.epoch = state["epoch"]
        self._done = state["steps"] * self.samples_per_step
        self._seed = state["seed"]
        if not self.sampler.steps(self._done):  # the state was saved at the end of an epoch
            self._begin_next_epoch()
        # The position in the stream was not saved, so read it from its start.
        self._resumed = True
        self._feed.restart()


class StreamFeed:
    """Reads a stream's batches, and sends them to the device.

    Args:
        dataset: an iterable, or a function of (share, shares) that returns a share's iterable.
        sampler: the steps of this core.
        transfer: function that sends a list of tensors to the device.
        workers: number of loader processes of this core; 0 for none.
        in_turn: True if other cores are threads of this process. They must then read in turn.
        numbers: function that returns a context with this core's own random numbers, for reading
            without loader processes.
    """

    def __init__(
        self,
        dataset: Iterable | Callable[[int, int], Iterable],
        sampler: StreamSampler,
        *,
        transfer: Callable[[list], list],
        workers: int,
        in_turn: bool,
        numbers: Callable[[], contextlib.AbstractContextManager],
    ):
        self._dataset = dataset
        self._sampler = sampler
        self._transfer = transfer
        self._workers = workers
        self._in_turn = in_turn
        self._numbers = numbers
        self._batches: Iterator[object] | None = None  # of the stream, over all epochs

    def epoch(self, plan: EpochPlan) -> Iterator[Sent]:
        """Return the next batches of the stream, for one epoch.

        Only loader processes prepare batches ahead. If the loop ends early, the prepared batches
        are kept for the next epoch, so no batch is lost.
        """
        # The iterator continues over all epochs. It is made again only after a resume, whose seed
        # differs, so that the samples come in another order.
        if self._batches is None:
            seed = (*plan.seed, plan.done)
            shares = _Shares(
                self._dataset,
                self._sampler,
                workers=self._workers,
                seed=seed,
                in_turn=self._in_turn,
            )
            self._batches = iterate_loader(shares, itertools.count(), self._workers)
        return numbered(plan.samples, (self._next() for _ in plan.samples))

    def arrange(self, tensors: object) -> object:
        """Return a batch unchanged: a loop gets it in the form in which it was sent."""
        return tensors

    def restart(self) -> None:
        """Make the next epoch read the stream from its start, with the seed of that epoch."""
        self._batches = None

    def _next(self) -> object:
        with self._numbers():
            return send_nested(next(self._batches), self._transfer)


class _OwnNumbers:
    """A sequence of the host's random numbers that continues over several blocks.

    Code between the blocks may draw random numbers: the two sequences do not affect each other.
    """

    def __init__(self, seed: tuple[int, ...]):
        self._seed = seed
        self._state = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Draw numbers of this sequence in the block; then restore the generators' states.

        Only one thread of a process at a time runs such a block.
        """
        with seeded_in_turn(self._seed):
            if self._state:
                restore_random_states(self._state)
            yield
            self._state = random_states()


class _Shares:
    """A dataset whose items are the next batches of a share, for torch's DataLoader.

    Each loader process opens its own share at its first batch, and then continues in it. If reading
    raises an error or is interrupted, the next batch opens the share again.
    """

    def __init__(
        self,
        dataset: Iterable | Callable[[int, int], Iterable],
        sampler: StreamSampler,
        *,
        workers: int,
        seed: tuple[int, ...],
        in_turn: bool,
    ):
        self.dataset = dataset
        self.sampler = sampler
        self.workers = workers
        self.seed = seed
        self.in_turn = in_turn
        self._samples: Iterator | None = None
        # A share of a plain iterable reads the whole iterable and skips the samples of the other
        # shares. If the iterable shuffles, all shares must see the same order. So all draw the same
        # random numbers; each still draws them for every sample.
        self._numbers = None if callable(dataset) else _OwnNumbers(seed)

    def __getitem__(self, number: int) -> object:
        if self._numbers:
            with self._numbers.used():
                return self._next()
        # Two cores are threads of this process and share its random generators. So each batch is
        # read with its own seed, by one thread at a time.
        if self.in_turn and not self.workers:
            with seeded_in_turn((*self.seed, self.sampler.rank, number)):
                return self._next()
        return self._next()

    def _next(self) -> object:
        if self._samples is None:
            self._samples = self._endless()
        try:
            # `_endless` never ends, so every batch is full.
            samples = list(itertools.islice(self._samples, self.sampler.batch_size))
        except BaseException:
            self._samples = None  # a generator ends with its first error, so open the share again
            raise
        return collate(samples)

    @functools.cached_property
    def _worker(self) -> int | None:
        """The number of this loader process; None if there is none."""
        return _leave_loader()

    def _endless(self) -> Iterator:
        """Yield the samples of a share again and again."""
        worker = self._worker
        # Without loader processes, the core itself reads, as one process.
        per_core = max(1, self.workers)
        share = self.sampler.rank * per_core + (worker or 0)
        shares = self.sampler.world_size * per_core
        if worker is not None and not self._numbers:
            seed_host((*self.seed, share))
        while True:
            is_empty = True
            for sample in self._open(share, shares):
                is_empty = False
                yield sample
            if is_empty:  # without this error, an empty share would loop forever
                raise InvalidValueError(
                    f"share {share} of {shares} of the stream holds no sample, so a core would "
                    "have nothing to do",
                    found=f"{self.sampler.world_size} cores, with {per_core} reading processes "
                    "per core",
                    fix="fewer workers=, or more shards: at least one for each share",
                )

    def _open(self, share: int, shares: int) -> Iterable:
        if callable(self.dataset):
            return self.dataset(share, shares)
        return itertools.islice(iter(self.dataset), share, None, shares)


def _leave_loader() -> int | None:
    """Return the number of this loader process, and hide it; None outside of loader processes.

    Some datasets, such as webdataset's pipelines, divide their samples among the processes of a
    loader that they see. They would divide a share once more, and leave out most of its samples.
    """
    from torch.utils.data import _utils, get_worker_info

    info = get_worker_info()
    # torch has no API for this: `get_worker_info` returns this global variable.
    _utils.worker._worker_info = None
    return info and info.id


def _check(dataset: object, steps: int) -> None:
    """Raise for a dataset with numbered samples, or one that cannot be divided into shares."""
    kind = type(dataset).__name__
    if not only_iterates(dataset):
        raise InvalidTypeError(
            f"steps= is for a dataset that can only be read in order, but a {kind} has indices",
            fix="leave out steps=; for shorter epochs: fit(..., steps_per_epoch=...)",
        )
    if type(dataset).__module__.split(".")[0] == "webdataset":
        raise InvalidTypeError(
            "a webdataset pipeline divides its shards among processes by itself, but not among "
            "the cores of a launch",
            found="one pipeline for all cores",
            fix="a function that opens a share of the shards: "
            "core.batches(lambda share, shares: wds.WebDataset("
            "urls[share::shares], nodesplitter=None, workersplitter=None)..., "
            "steps=..., batch_size=...)",
        )
    nodes = nodes_of(dataset)
    if nodes > 1:
        raise InvalidValueError(
            "the stream is a core's share already, and core.batches would divide it once more",
            found=f"split_dataset_by_node with world_size={nodes}",
            fix="core.batches(stream, ...) with the whole stream; "
            "or a function that opens a share: "
            "core.batches(lambda share, shares: split_dataset_by_node(stream, share, shares), ...)",
        )
    # A generator or another iterator cannot start again.
    if hasattr(dataset, "__next__"):
        raise InvalidTypeError(
            f"a {kind} can be read only once, but a stream must start again after its end",
            fix="pass a function that makes a new one for share number `share` of `shares`: "
            "core.batches(lambda share, shares: ..., steps=..., batch_size=...)",
        )
    check_count("steps", steps)
