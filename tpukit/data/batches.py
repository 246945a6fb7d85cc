"""Batches of one fixed shape, each core its own share, prepared ahead of the step that takes them."""

import time
from collections.abc import Callable, Iterator

from tpukit.data.prefetch import Buffers, in_processes, in_threads
from tpukit.data.sampler import ShardedSampler
from tpukit.data.sources import BatchSource, MapDataset, as_batch_source
from tpukit.machine.resources import cpus


class Batches:
    """An iterable over one epoch's batches for one core; iterate again for the next epoch.

    Every core gets the same number of batches and every batch has `batch_size` samples, so nothing compiles twice
    and no core waits for another that has finished.

    Attributes:
        dataset: what was given.
        epoch: the epoch that is read, or comes next.
        waited: seconds the loop has waited for batches, since this was made.
        current: (batch_size,) int64, which samples the last batch held.
    """

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
        seed: int = 0,
        workers: int | None = None,
        threads: int = 1,
        send: Callable[[list], list] | None = None,
    ):
        count = len(dataset)
        self.sampler = self.share = ShardedSampler(count, batch_size, rank, world_size, shuffle, drop_last)
        if batch_size < 1:
            raise ValueError(f"batch_size is the samples a core and step, at least 1, got {batch_size}")
        if count == 0:
            raise ValueError(
                "the dataset is empty: its length is 0\n  fix:   check the path, and the fold it was made from"
            )
        if not self.share.steps():
            raise ValueError(
                f"{count} samples do not fill one batch of {batch_size} on each of {world_size} cores\n"
                f"  fix:   batch_size={max(1, count // world_size)}, or drop_last=False"
            )
        if threads < 1 or (workers or 0) < 0:
            raise ValueError(f"batches take 1 thread or more and 0 workers or more, got {threads} and {workers}")
        self.dataset, self._source = dataset, as_batch_source(dataset)
        if workers is None:
            workers = _spare_processors(world_size) if getattr(self._source, "form", None) == "jpeg" else 0
        self._mask, self._seed, self._workers, self._threads = mask, seed, workers, threads
        self._send = send or (lambda tensors: tensors)
        self._buffers = Buffers((batch_size, *self._source.shape)) if self._source is not None else None
        self.epoch, self.waited, self.current = 0, 0.0, None
        self._done = 0  # samples of the epoch that the loop has been given, on all cores
        self._resumed = False

    def __len__(self) -> int:
        return self.share.steps()

    @property
    def samples_per_step(self) -> int:
        """Samples that all cores together take in one step."""
        return self.share.samples_per_step

    def __iter__(self) -> Iterator[object]:
        if not self._resumed:  # the last loop may have been left early
            self.end_epoch()
        self._resumed = False
        positions = self.share.positions(self._done)
        samples = self.share.samples(positions, epoch=self.epoch, seed=self._seed)
        prepared = self._prepare(positions, samples)
        for mine in samples:
            began = time.perf_counter()
            batch = next(prepared)
            self.waited += time.perf_counter() - began
            self.current = mine
            self._done += self.samples_per_step
            yield self._shaped(batch)
        prepared.close()
        self.epoch, self._done = self.epoch + 1, 0

    def indices(self, epoch: int) -> list[list[int]]:
        """Say which samples this core sees in an epoch, batch by batch."""
        return self.share.samples(self.share.positions(), epoch=epoch, seed=self._seed).tolist()

    # ---- where in the data a run is ----------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Return how far the loop has come: batches it was given count, batches prepared ahead do not."""
        return {"epoch": self.epoch, "samples": self._done, "seed": self._seed, "count": self.share.count}

    def end_epoch(self) -> None:
        """Count an epoch that was left early as over."""
        if self._done:
            self.epoch, self._done = self.epoch + 1, 0

    def load_state_dict(self, state: dict) -> None:
        """Go on where a state was saved: the next loop gives the rest of that epoch, in the same order.

        Shuffled, the number of cores and the batch size may be others than they were.

        Raises:
            ValueError: the state is of a dataset of another length, or, in order, of another number of samples a step.
        """
        if state["count"] != self.share.count:
            raise ValueError(
                f"the state is of a dataset of {state['count']:,} samples, this one has {self.share.count:,}\n"
                "  fix:   make the same dataset again, or start without the state"
            )
        if not self.share.shuffle and state["samples"] % self.samples_per_step:
            raise ValueError(
                f"the state is {state['samples']} samples into an epoch in order, which is no multiple of the "
                f"{self.samples_per_step} a step of all cores now takes\n"
                "  fix:   as many cores and as large a batch as when it was saved, or shuffle=True"
            )
        self.epoch, self._done, self._seed = state["epoch"], state["samples"], state["seed"]
        if not self.share.steps(self._done):
            self.epoch, self._done = self.epoch + 1, 0
        self._resumed = True

    # ---- making them -------------------------------------------------------------------------------------------

    def _prepare(self, positions, samples) -> Iterator[object]:
        """Yield the batches, on the device, with their masks if asked for."""
        real = positions < self.share.count
        steps = range(len(samples))
        if self._source is not None and not self._workers:
            calls = ((lambda step=step: self._finish(self._gather(samples, step), real[step])) for step in steps)
            return in_threads(calls, self._threads)
        dataset = self.dataset if self._source is None else self._source
        jobs = list(zip(positions[:, 0].tolist(), samples, strict=True))
        made = in_processes(dataset, jobs, self._workers, (self._seed, self.epoch))
        finished = ((lambda step=step: self._finish(next(made), real[step])) for step in steps)
        # A dataset that is called in this process draws this thread's random numbers: no thread, the same numbers.
        return in_threads(finished, 1) if self._workers else (call() for call in finished)

    def _gather(self, samples, step: int) -> tuple:
        import torch

        if step + 1 < len(samples) and hasattr(self._source, "read_ahead"):
            self._source.read_ahead(samples[step + 1])
        images = self._source.take(samples[step], out=self._buffers.get())
        return torch.from_numpy(images), torch.from_numpy(self._source.labels[samples[step]])

    def _finish(self, batch: object, real) -> object:
        """Add the mask and send all tensors to the device, in one transfer."""
        import torch
        from torch.utils import _pytree as tree

        if self._mask:
            batch = _with_mask(batch, torch.from_numpy(real))
        leaves, form = tree.tree_flatten(batch)
        sent = iter(self._send([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
        return tree.tree_unflatten([next(sent) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form)

    def _shaped(self, batch: object) -> object:
        """Turn a source's images into (B, 3, H, W), a view: on the device, where it is free."""
        if self._source is None:
            return batch
        images, *others = batch
        return images.permute(0, 3, 1, 2), *others


def _with_mask(batch: object, real) -> object:
    if isinstance(batch, dict):
        return {**batch, "mask": real}
    return (*batch, real) if isinstance(batch, list | tuple) else (batch, real)


def _spare_processors(world_size: int) -> int:
    """Return how many processes each core may have for its batches: what the machine has left, 16 at most."""
    return max(0, min(16, cpus() // world_size - 1))
