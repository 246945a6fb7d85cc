"""Batches of one fixed shape for each core, prepared ahead of the step that takes them."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from tpukit.essentials.data.fingerprint import fingerprint
from tpukit.essentials.data.prefetch import Buffers, load_batches, run_ahead
from tpukit.essentials.data.sampler import ShardedSampler
from tpukit.essentials.data.shared_state import refuse_shared
from tpukit.essentials.data.sources import (
    BatchSource,
    MapDataset,
    as_batch_source,
    only_iterates,
    reader_ahead,
    refuse_loader,
    split_masks,
)
from tpukit.essentials.display import InvalidTypeError, InvalidValueError
from tpukit.essentials.environment import cpus


class Batches:
    """An iterable over one core's batches of one epoch; each new loop over it is the next epoch.

    All cores have the same number of batches, and every batch has `batch_size` samples: nothing is compiled twice, and
    no core waits for one that has finished. With `buckets` they have a few shapes, at a step the same on every core.

    Attributes:
        dataset: the dataset, as it was passed.
        sampler: which samples this core sees.
        epoch: the current epoch, or the next one between two loops.
        wait_seconds: seconds that loops have waited for batches, in total.
        current: (batch_size,) int64, the samples of the last batch.
        drawn: when a batch was last asked for, by `time.perf_counter`; 0 before.
    """

    has_numbers = True  # its samples have; a stream's have none
    batch_sampler = None  # what has a sampler is taken for a DataLoader by Lightning, which then looks for this one

    def __init__(
        self,
        dataset: MapDataset | BatchSource,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        mask: bool = False,
        buckets=None,
        seed: int = 0,
        workers: int | None = None,
        threads: int = 1,
        send: Callable[[list], list] | None = None,
        shares_process: bool = False,
        numbers: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        refuse_loader(dataset, batch_size)
        if only_iterates(dataset):
            raise InvalidTypeError(
                f"a {type(dataset).__name__} can only be read in order, so its samples cannot be dealt out by number",
                fix=f"core.batches(dataset, steps=1000, batch_size={batch_size}): the steps of an epoch",
            )
        count = len(dataset)
        self.sampler = ShardedSampler(count, batch_size, rank, world_size, shuffle, drop_last)
        if batch_size < 1:
            raise InvalidValueError(
                f"batch_size is the number of samples per core and step, at least 1, got {batch_size}",
                fix="batch_size=1",
            )
        if count == 0:
            raise InvalidValueError(
                "the dataset is empty: its length is 0", fix="check the path and the fold that it was made from"
            )
        if not self.sampler.steps():
            raise InvalidValueError(
                f"{count} samples do not fill one batch of {batch_size} on each of {world_size} cores",
                fix=f"batch_size={max(1, count // world_size)}, or drop_last=False",
            )
        refuse_shared(dataset, rank=rank, world_size=world_size, workers=workers or 0)
        if threads < 1 or (workers or 0) < 0:
            raise InvalidValueError(
                f"threads is 1 or more and workers 0 or more, got threads={threads}, workers={workers}",
                fix="threads=1, workers=0",
            )
        self.dataset, self._source = dataset, as_batch_source(dataset)
        self.buckets = buckets
        if buckets is not None:
            if self._source is not None:
                raise InvalidValueError("the images of records and caches have one size", fix="leave out buckets=")
            self.sampler = buckets.sampler(self.sampler, dataset)
        if workers is None:  # only decoding is worth processes; a cache in memory is read by threads
            workers = _spare_processors(world_size) if getattr(self._source, "encoding", None) == "jpeg" else 0
        self._mask, self._seed, self._workers, self._threads = mask, seed, workers, threads
        self._shares_process = shares_process  # with other cores, and so the host's random numbers
        self._numbers = numbers  # in which the dataset is called, where no process of a loader does
        self._send = send or (lambda tensors: tensors)
        self._buffers = Buffers((batch_size, *self._source.shape)) if self._source is not None else None
        self._read_ahead = reader_ahead(self._source)
        self.epoch, self.wait_seconds, self.current, self.drawn = 0, 0.0, None, 0.0
        self._facts: dict[str, object] | None = None
        self._done = 0  # samples of this epoch that the loops of all cores have received
        self._resumed = False

    def __len__(self) -> int:
        return self.sampler.steps()

    @property
    def shapes(self) -> int:
        """How many shapes the batches have, and so how often a step is compiled: 1 without buckets."""
        return 1 if self.buckets is None else len(self.sampler.shapes())

    @property
    def samples_per_step(self) -> int:
        """The samples that all cores together see in one step."""
        return self.sampler.samples_per_step

    def __iter__(self) -> Iterator[object]:
        yield from map(self.arrange, self.epoch_as_sent())  # which holds no batch while it waits for the next

    def epoch_as_sent(self) -> Iterator[object]:
        """Yield the batches of an epoch before `arrange`."""
        if not self._resumed:  # the last loop may have ended early
            self.end_epoch()
        self._resumed = False
        if self.sampler.world_size > 1:
            self.facts()  # before it is read, which may change what it holds
        positions = self.sampler.positions(self._done, epoch=self.epoch, seed=self._seed)
        samples = self.sampler.samples(positions, epoch=self.epoch, seed=self._seed)
        prepared = self._prepare(positions, samples)
        for mine in samples:
            self.drawn = began = time.perf_counter()
            batch = next(prepared)
            self.wait_seconds += time.perf_counter() - began
            self.current = mine
            self._done += self.samples_per_step  # before the loop's body: a state saved there includes this batch
            yield batch
            del batch  # where the loop has let go of it, too, its buffer is filled next, still in the processor's cache
        prepared.close()
        self.epoch, self._done = self.epoch + 1, 0

    def indices(self, epoch: int) -> list[list[int]]:
        """Return the samples that this core sees in an epoch, batch by batch."""
        positions = self.sampler.positions(epoch=epoch, seed=self._seed)
        return self.sampler.samples(positions, epoch=epoch, seed=self._seed).tolist()

    @property
    def layout(self) -> dict[str, object]:
        """How the dataset is dealt out, which has to be the same on every core, as short values by name."""
        sampler, seed = self.sampler, self._seed  # which a checkpoint brings along
        found = {"seed of core.batches": seed, "batch_size": sampler.batch_size, "steps": sampler.steps()}
        return found | {"shuffle": sampler.shuffle, "drop_last": sampler.drop_last}

    def facts(self) -> dict[str, object]:
        """Return the layout, and what else has to be the same on every core; no sample is read for it."""
        if self._facts is None:
            self._facts = fingerprint(self.dataset) if self.has_numbers else {}
            if self.buckets is not None:
                self._facts["lengths of samples"] = self.sampler.checksum()
        return self.layout | self._facts

    def state_dict(self) -> dict:
        """Return the position in the data; batches that are prepared but not yet received do not count."""
        sampler, done = self.sampler, {"epoch": self.epoch, "samples": self._done, "seed": self._seed}
        layout = {"cores": sampler.world_size, "batch_size": sampler.batch_size, "drop_last": sampler.drop_last}
        if self.buckets is not None:
            layout |= {"shuffle": sampler.shuffle, "buckets": list(sampler.lengths), "lengths": sampler.checksum()}
        elif sampler.shuffle:
            layout = {"shuffle": True}
        return {**done, "count": sampler.count, "layout": layout}

    def end_epoch(self) -> None:
        """End an epoch that was left early: the next loop begins the next one."""
        if self._done:
            self.epoch, self._done = self.epoch + 1, 0

    def load_state_dict(self, state: dict) -> None:
        """Continue where the state was saved: the next loop yields the rest of that epoch, in the same order.

        If the samples are shuffled, the number of cores and the batch size may differ from those of the saved run. In
        order each core has a part of its own, of which it has seen the beginning; other cores would repeat samples.
        With buckets all of this has to be the same in either case, since other steps would be made of the samples.

        Raises:
            ValueError: the state belongs to a dataset of another length; or it was saved within an epoch in order, and
                the number of cores, the batch size or the order has changed.
        """
        if "steps" in state:
            raise InvalidValueError("the state is of a stream, this dataset has a length", fix="the same dataset")
        if state["count"] != self.sampler.count:
            raise InvalidValueError(
                f"the state is of a dataset of {state['count']:,} samples, this one has {self.sampler.count:,}",
                fix="pass the dataset that the state was saved with, or start without the state",
            )
        saved, here = state["layout"], self.state_dict()["layout"]
        if 0 < state["samples"] < state["count"] and saved != here:
            raise InvalidValueError(
                f"the state is {state['samples']} samples into an epoch that was divided in another way",
                found=f"saved with {_in_words(saved)}; here {_in_words(here)}",
                fix="the same values as when it was saved; with shuffle=True from the start, and no buckets, cores and "
                "batch size may change",
            )
        self.epoch, self._done, self._seed = state["epoch"], state["samples"], state["seed"]
        if not self.sampler.steps(self._done):  # saved after the last batch: what remains is the next epoch
            self.epoch, self._done = self.epoch + 1, 0
        self._resumed = True

    def _prepare(self, positions, samples) -> Iterator[object]:
        """Yield the batches, on the device, with their masks if wanted."""
        real = positions < self.sampler.count
        steps = range(len(samples))
        if self._source is not None and not self._workers:
            calls = (self._request(samples, step, real[step]) for step in steps)
            return run_ahead(calls, self._threads)
        dataset = self.dataset if self._source is None else self._source
        jobs = list(zip(positions[:, 0].tolist(), samples, strict=True))
        seed, collate = (self._seed, self.epoch), None
        if self.buckets is not None:
            lengths = self.sampler.step_lengths(self._done, epoch=self.epoch, seed=self._seed)
            jobs = [(*job, length) for job, length in zip(jobs, lengths, strict=True)]
            collate = self.buckets.collate
        loaded = load_batches(dataset, jobs, self._workers, seed, in_turn=self._shares_process, collate=collate)
        finished = ((lambda step=step: self._finish(next(loaded), real[step])) for step in steps)
        # Without workers the dataset is called in this process and may draw its random numbers. A thread would draw
        # them at any moment of the step; so each batch is made when the loop asks for it.
        return run_ahead(finished, 1) if self._workers else (self._with_own_numbers(call) for call in finished)

    def _with_own_numbers(self, call: Callable[[], object]) -> object:
        with self._numbers():
            return call()

    def _request(self, samples, step: int, real) -> Callable[[], tuple]:
        """Return what a thread shall do for a batch of a source: little beside the images, which need no GIL."""
        import numpy
        import torch

        # numpy.take: indexing takes twice as long.
        labels = torch.from_numpy(numpy.take(self._source.labels, samples[step], axis=0))
        others = (labels, torch.from_numpy(real)) if self._mask else (labels,)
        following = samples[step + 1] if self._read_ahead is not None and step + 1 < len(samples) else None

        def gather() -> tuple:
            if following is not None:
                self._read_ahead(following)  # the disk works while this batch is decoded
            images = self._source.take(samples[step], out=self._buffers.get())
            return tuple(self._send([torch.from_numpy(images), *others]))

        return gather

    def _finish(self, batch: object, real) -> object:
        """Add the mask, and send all tensors to the device in one transfer."""
        import torch
        from torch.utils import _pytree as tree

        if self._mask:
            batch = _with_mask(batch, torch.from_numpy(real))
        leaves, structure = tree.tree_flatten(batch)
        if any(isinstance(leaf, Mapping) for leaf in leaves):  # Hugging Face's BatchEncoding, which pytree cannot open
            leaves, structure = tree.tree_flatten(_with_dicts(batch))
        sent = iter(self._send([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
        leaves = [next(sent) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tree.tree_unflatten(leaves, structure)

    def arrange(self, batch: object) -> object:
        """Return a batch as a loop gets it, a source's images as (B, 3, H, W): a view, which costs nothing."""
        if self._source is None:
            return batch
        images, labels, *others = batch
        return *split_masks(images.permute(0, 3, 1, 2), labels), *others


def _with_mask(batch: object, real) -> object:
    if isinstance(batch, Mapping):
        return {**batch, "mask": real}
    return (*batch, real) if isinstance(batch, list | tuple) else (batch, real)


def _in_words(layout: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in layout.items())


def _with_dicts(batch: object) -> object:
    """Return a batch whose mappings of other kinds are dicts."""
    from torch.utils import _pytree as tree

    def convert(leaf: object) -> object:
        return {key: _with_dicts(value) for key, value in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return tree.tree_map(convert, batch)


def _spare_processors(world_size: int) -> int:
    """Return how many processes each core may use for its batches: the free processors, shared evenly, 16 at most."""
    return max(0, min(16, cpus() // world_size - 1))
