"""Batches of a fixed shape per core, prepared ahead of the training step.

An epoch has three stages. The first is arithmetic, so every core knows the samples of all cores:

    sampler         computes the samples of this core in each step     (steps, batch_size)
    feed            reads the samples, joins them, sends them to the device ahead of the loop
    `arrange`       returns a view with the shape that the loop expects

When a `Batches` object is made, it chooses its feed: a `SourceFeed` or a `SampleFeed`.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tpukit.essentials.data.feeds import EpochPlan, SampleFeed, Sent, SourceFeed, Transfer
from tpukit.essentials.data.fingerprint import fingerprint
from tpukit.essentials.data.identities import different_parts, identity
from tpukit.essentials.data.sampler import ShardedSampler, sample_shares
from tpukit.essentials.data.shared_state import refuse_shared
from tpukit.essentials.data.sources import (
    BatchSource,
    MapDataset,
    as_batch_source,
    only_iterates,
    refuse_loader,
)
from tpukit.essentials.display import (
    InvalidTypeError,
    InvalidValueError,
    check_count,
    check_flag,
    first_few,
)
from tpukit.essentials.environment import cpus

_MOST_WORKERS = 16  # loader processes per core, if the user does not set `workers`


class Batches:
    """An iterable over this core's batches; each new loop is the next epoch.

    All cores have the same number of batches, and every batch has `batch_size` samples. So a step
    is compiled only once, and no core waits for a core that has finished. With `buckets` the shape
    may differ between steps, but in each step it is the same on all cores.

    Args:
        dataset: a map-style dataset, or a source of whole batches.
        batch_size: number of samples per core and step.
        rank: the number of this core.
        world_size: the number of cores.
        hosts: the number of machines; each has the same number of these cores.
        shuffle: use a new order in each epoch.
        weights: one number per sample; None for none. An epoch draws as many samples as the dataset
            has, with replacement, each with a probability in proportion to its weight. The order is
            then random, also without `shuffle`.
        drop_last: leave out the last samples if they do not fill a step; otherwise padding repeats
            some samples.
        mask: add to each batch a (batch_size,) bool tensor, False for padding. It is the item
            "mask" of a dict, otherwise the last item of a tuple.
        buckets: `tpukit.Buckets`, for samples of several lengths; None for a single length.
        seed: the seed of the order; 0 or more. Loader processes also seed the random numbers of
            each batch with it.
        workers: number of loader processes. None means 0. But if a source decodes JPEG images, None
            means `processors // cores - 1` of this machine, at most 16.
        threads: number of threads that prepare the batches of a source.
        send: a function that copies a list of tensors to the device; None to leave them on the
            host.
        received: a function that is called with each batch before the loop gets it.
        shares_process: True if other cores are threads of this process, which share its random
            generators.
        numbers: a function that returns a context manager. If `workers` is 0, samples are read in
            this context, so that each core draws its own random numbers.

    Attributes:
        dataset: the dataset, as it was passed.
        sampler: the `ShardedSampler`, which computes the samples of this core.
        epoch: number of the current epoch; after a whole loop, the number of the next epoch.
        wait_seconds: seconds that loops have waited for batches; in a session, in this run.
        requested_at: `time.perf_counter()` of the last request for a batch; 0 before the first.

    Raises:
        InvalidTypeError: the dataset is a DataLoader, or can only be read in order; or an argument
            has the wrong type.
        InvalidValueError: an argument is out of range, the dataset is empty or too small, or the
            cores would share its open files, random generators or threads.
    """

    has_numbers = True  # whether samples have numbers; those of a stream have none
    # Lightning treats an object with the attribute `sampler` as a DataLoader, and reads this one.
    batch_sampler = None

    def __init__(
        self,
        dataset: MapDataset | BatchSource,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        hosts: int = 1,
        shuffle: bool = False,
        weights=None,
        drop_last: bool = False,
        mask: bool = False,
        buckets=None,
        seed: int = 0,
        workers: int | None = None,
        threads: int = 1,
        send: Callable[[list], list] | None = None,
        received: Callable[[object], None] | None = None,
        shares_process: bool = False,
        numbers: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        _check_arguments(
            {"batch_size": batch_size, "seed": seed, "workers": workers, "threads": threads},
            {"shuffle": shuffle, "drop_last": drop_last, "mask": mask},
        )
        _check_dataset(dataset, batch_size)
        shares = None
        if weights is not None:
            _check_no_buckets(buckets)
            shares = sample_shares(weights, len(dataset))
        self.sampler = ShardedSampler(
            len(dataset),
            int(batch_size),
            rank=rank,
            world_size=world_size,
            shuffle=shuffle or shares is not None,
            drop_last=drop_last,
            shares=shares,
        )
        _check_steps(self.sampler)
        source = as_batch_source(dataset)
        if workers is None:
            # Processes are worth their start only for decoding. Threads can read a cache in memory.
            decodes = getattr(source, "encoding", None) == "jpeg"
            workers = _spare_processors(world_size // hosts) if decodes else 0
        generators = refuse_shared(dataset, world_size=world_size, workers=workers)
        self.dataset = dataset
        self.buckets = buckets
        if buckets is not None:
            if source is not None:
                raise InvalidValueError(
                    "buckets= is not supported for PackedImages and CachedImages, whose images "
                    "all have the same size",
                    fix="leave out buckets=",
                )
            self.sampler = buckets.sampler(self.sampler, dataset)
        self._seed = int(seed)  # `torch.load(weights_only=True)` loads no number of numpy
        self._received = received or (lambda batch: None)
        self._transfer = Transfer(send or (lambda tensors: tensors))
        made = {"transfer": self._transfer, "mask": mask, "workers": workers}
        if source is not None:
            self._feed = SourceFeed(source, batch_size=batch_size, threads=threads, **made)
        else:
            self._feed = SampleFeed(
                dataset,
                buckets=buckets,
                shares_process=shares_process,
                numbers=numbers,
                generators=generators,
                **made,
            )
        self.epoch = 0
        self.wait_seconds = 0.0
        self.requested_at = 0.0
        self._facts: dict[str, object] | None = None
        self._identity: dict[str, object] | None = None
        self._done = 0  # samples of this epoch that the loops of all cores have received
        self._resumed = False

    def __len__(self) -> int:
        return self.sampler.steps()

    @property
    def shapes(self) -> int:
        """The number of different shapes of batches; a step is compiled once for each."""
        if self.buckets is None:
            return 1
        return len(self.sampler.shapes())

    @property
    def samples_per_step(self) -> int:
        """The number of samples that all cores together see in a step."""
        return self.sampler.samples_per_step

    # Iteration

    def __iter__(self) -> Iterator[Any]:
        # `map`, because the frame of a generator would refer to a batch while the next is made.
        yield from map(self._arranged, self.epoch_as_sent())

    def with_samples(self) -> Iterator[tuple]:
        """Yield (sample numbers, batch) for each batch of the next epoch.

        The numbers are a (batch_size,) int64 array on the host.
        """
        yield from map(self._numbered, self.epoch_as_sent())

    def _arranged(self, sent: Sent) -> object:
        return self.arrange(sent.tensors)

    def _numbered(self, sent: Sent) -> tuple:
        return sent.samples, self.arrange(sent.tensors)

    def epoch_as_sent(self) -> Iterator[Sent]:
        """Yield the batches of the next epoch on the device, without calling `arrange`."""
        if not self._resumed:
            self.end_epoch()  # after a `break`, the previous loop has not ended its epoch
        self.identity()  # before the first sample is read, because reading may fill caches
        if self.sampler.world_size > 1:
            self.facts()
        plan = self._plan()
        batches = self._feed.epoch(plan)
        for _ in plan.samples:
            began = time.perf_counter()
            self.requested_at = began
            sent = next(batches)
            self.wait_seconds += time.perf_counter() - began
            # Before the loop's body, so that `state_dict` in the body counts this batch.
            self._done += self.samples_per_step
            self._resumed = False  # only now, so that a loop whose first batch fails can run again
            self._received(sent.tensors)
            yield sent
            # If the loop has released the batch, too, its buffer is free for the next batch, while
            # it is still in the processor's cache.
            del sent
        batches.close()
        self._begin_next_epoch()

    def end_epoch(self) -> None:
        """End an epoch that a loop left early, so the next loop begins the next epoch."""
        if self._done:
            self._begin_next_epoch()

    def _begin_next_epoch(self) -> None:
        self.epoch += 1
        self._done = 0

    def indices(self, epoch: int) -> list[list[int]]:
        """Return the sample numbers of this core in an epoch, a list per batch."""
        positions = self.sampler.positions(epoch=epoch, seed=self._seed)
        return self.sampler.samples(positions, epoch=epoch, seed=self._seed).tolist()

    # Facts to compare between cores, and the state for a checkpoint

    @property
    def layout(self) -> dict[str, object]:
        """A dict of the settings that divide the dataset; it must be equal on all cores."""
        # The seed, too, because a loaded checkpoint may have changed it.
        return {
            "seed of core.batches": self._seed,
            "batch_size": self.sampler.batch_size,
            "steps": self.sampler.steps(),
            "shuffle": self.sampler.shuffle,
            "weights of samples": self.sampler.weights_checksum,
            "drop_last": self.sampler.drop_last,
        }

    def facts(self) -> dict[str, object]:
        """Return the batches' layout and the dataset's fingerprint, without reading a sample.

        Both must be equal on all cores.
        """
        if self._facts is None:
            self._facts = fingerprint(self.dataset) if self.has_numbers else {}
            if self.buckets is not None:
                self._facts["lengths of samples"] = self.sampler.checksum()
        return self.layout | self._facts

    def identity(self) -> dict[str, object]:
        """Return the facts by which a checkpoint recognises its dataset.

        The dict is empty for an iterable dataset. This method reads no sample.
        """
        if self._identity is None:
            self._identity = identity(self.dataset) if self.has_numbers else {}
            weights = self.sampler.weights_checksum
            if weights is not None:
                self._identity["weights of samples"] = weights
        return self._identity

    def check_identity(self, saved: Mapping[str, object], kind: str = "dataset") -> None:
        """Raise an InvalidValueError if a checkpoint belongs to another dataset.

        Args:
            saved: the `identity` in the checkpoint.
            kind: the name of the dataset in the message, such as "dataset for evaluation".
        """
        different = different_parts(saved, self.identity())
        if different:
            raise InvalidValueError(
                f"the saved state belongs to another {kind}",
                found="different: " + first_few(different, 4),
                fix="pass the dataset that the state was saved with, or use another folder for "
                "the checkpoints of this run",
            )

    def state_dict(self) -> dict:
        """Return the position in the data and the dataset's identity, for a checkpoint.

        The position counts only batches that the loop has received, not batches that are prepared.
        """
        sampler = self.sampler
        layout = {
            "cores": sampler.world_size,
            "batch_size": sampler.batch_size,
            "drop_last": sampler.drop_last,
        }
        if self.buckets is not None:
            layout["shuffle"] = sampler.shuffle
            layout["buckets"] = list(sampler.lengths)
            layout["lengths"] = sampler.checksum()
        elif sampler.shuffle:
            # A shuffled epoch can be resumed with other cores and another batch size.
            layout = {"shuffle": True}
        return {
            "epoch": self.epoch,
            "samples": self._done,
            "seed": self._seed,
            "count": sampler.count,
            "layout": layout,
            "dataset": self.identity(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue at a saved position: the next loop yields the rest of that epoch.

        If the state was saved after the epoch's last batch, the next loop is the next epoch. The
        seed of the saved run replaces the `seed` of this object.

        If the state is from the middle of an epoch, `shuffle` and the buckets must be those of the
        saved run. Without `shuffle`, or with buckets, the number of cores, the batch size and
        `drop_last` must be equal, too.

        Args:
            state: the result of `state_dict`.

        Raises:
            InvalidValueError: the state belongs to another dataset; or it was saved in the middle
                of an epoch that this run would divide in another way. The description above says
                which settings must be the same.
        """
        if "steps" in state:  # only the state of a stream has this key
            raise InvalidValueError(
                "the saved state belongs to an iterable dataset, but this dataset is map-style",
                fix="pass the dataset that the state was saved with",
            )
        count = self.sampler.count
        if state["count"] != count:
            raise InvalidValueError(
                f"the saved state belongs to a dataset of {state['count']:,} samples, but this "
                f"dataset has {count:,}",
                fix="pass the dataset that the state was saved with, or start without the state",
            )
        self.check_identity(state.get("dataset", self.identity()))
        saved = state["layout"]
        here = self.state_dict()["layout"]
        # Between two epochs every division of the next epoch is possible. Within an epoch, without
        # `shuffle`, each core has read the beginning of its own part. With buckets and other
        # settings, the steps would contain other samples.
        is_within_epoch = 0 < state["samples"] < state["count"]
        if is_within_epoch and saved != here:
            raise InvalidValueError(
                f"the saved state is {state['samples']} samples after the start of an epoch, and "
                "this run would divide the epoch in another way",
                found=f"saved with {_in_words(saved)}; here {_in_words(here)}",
                fix="use the settings of the saved run; within an epoch, cores and batch size may "
                "change only if both runs have shuffle=True and no buckets",
            )
        self.epoch = state["epoch"]
        self._done = state["samples"]
        self._seed = state["seed"]
        if not self.sampler.steps(self._done):  # the state was saved after the epoch's last batch
            self._begin_next_epoch()
        self._resumed = True

    # The stages of an epoch

    def _plan(self) -> EpochPlan:
        """Return the plan of this epoch's remaining steps, without reading data."""
        here = {"epoch": self.epoch, "seed": self._seed}
        positions = self.sampler.positions(self._done, **here)
        lengths = None
        if self.buckets is not None:
            lengths = self.sampler.step_lengths(self._done, **here)
        return EpochPlan(
            samples=self.sampler.samples(positions, **here),
            is_real=positions < self.sampler.count,
            # A batch's first position serves as its number, because it is unique over all cores.
            numbers=positions[:, 0].tolist(),
            seed=(self._seed, self.epoch),
            done=self._done // self.samples_per_step,
            lengths=lengths,
        )

    @contextlib.contextmanager
    def checking(self, check: Callable[[list], object]) -> Iterator[None]:
        """In the block, call `check` with the tensors of each batch before they are sent."""
        self._transfer.check = check
        try:
            yield
        finally:
            self._transfer.check = None

    def arrange(self, tensors: object) -> object:
        """Return a sent batch in the form that a loop gets: images as a view, (B, 3, H, W)."""
        return self._feed.arrange(tensors)


def _check_dataset(dataset: object, batch_size: int) -> None:
    """Raise an error for a dataset without numbered samples, and for an empty dataset."""
    refuse_loader(dataset, batch_size)
    if only_iterates(dataset):
        raise InvalidTypeError(
            f"a {type(dataset).__name__} can only be read in order, so samples cannot be chosen "
            "by their index",
            fix="pass steps=, the number of steps per epoch, to read the dataset in order: "
            f"core.batches(dataset, steps=1000, batch_size={batch_size})",
        )
    if len(dataset) == 0:
        raise InvalidValueError(
            "the dataset is empty: its length is 0",
            fix="check the arguments of the dataset, such as its path and its fold",
        )


def _check_arguments(counts: Mapping[str, object], flags: Mapping[str, object]) -> None:
    """Raise an error for an argument of a wrong type, such as text in place of a number."""
    for name, value in counts.items():
        if value is not None:
            check_count(name, value, least=0 if name in ("seed", "workers") else 1)
    for name, value in flags.items():
        check_flag(name, value)


def _check_no_buckets(buckets) -> None:
    if buckets is not None:
        raise InvalidValueError(
            "weights= and buckets= cannot be combined: weights repeat some samples of an epoch, "
            "but buckets need each sample once",
            fix="leave out weights=; or leave out buckets=, and pad all samples to one length in "
            "the dataset",
        )


def _check_steps(sampler: ShardedSampler) -> None:
    """Raise an error if an epoch has no step."""
    if sampler.steps():
        return
    cores = sampler.world_size
    fix = "drop_last=False"
    if sampler.count >= cores:
        fix = f"batch_size={sampler.count // cores}, or {fix}"
    raise InvalidValueError(
        f"{sampler.count} samples do not fill one batch of {sampler.batch_size} on each of "
        f"{cores} cores",
        fix=fix,
    )


def _in_words(layout: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in layout.items())


def _spare_processors(cores: int) -> int:
    """Return the default number of loader processes per core, at most 16.

    The processors of this machine are divided among its cores. One processor of each core runs the
    training loop, and each of its other processors runs a loader process.
    """
    return max(0, min(_MOST_WORKERS, cpus() // cores - 1))
