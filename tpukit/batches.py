"""Batches of one fixed shape from any map-style dataset, each core its own share, on the core's device."""

from collections.abc import Iterator, Sequence
from typing import Protocol


class MapDataset(Protocol):
    """What `batches` reads: `len(dataset)` samples, `dataset[i]` a tensor, number, tuple or dict of them."""

    def __len__(self) -> int: ...  # noqa: D105
    def __getitem__(self, index: int) -> object: ...  # noqa: D105


class Batches:
    """An iterable over one epoch's batches for one core; iterate again for the next epoch.

    Every core gets the same number of batches and every batch has `batch_size` samples, so nothing compiles twice
    and no core waits for another that has finished.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: object = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        workers: int = 0,
    ):
        count = len(dataset)
        together = batch_size * world_size
        if batch_size < 1:
            raise ValueError(f"batch_size is the samples a core and step, at least 1, got {batch_size}")
        if count == 0:
            raise ValueError(
                "the dataset is empty: its length is 0\n  fix:   check the path, and the fold it was made from"
            )
        if drop_last and count < together:
            raise ValueError(
                f"{count} samples do not fill one batch of {batch_size} on each of {world_size} cores\n"
                f"  fix:   batch_size={max(1, count // world_size)}, or drop_last=False"
            )
        self.dataset, self.batch_size, self.rank, self.world_size = dataset, batch_size, rank, world_size
        self.device, self.shuffle, self.drop_last, self.seed, self.workers = device, shuffle, drop_last, seed, workers
        self.epoch = 0
        self._steps = count // together if drop_last else -(-count // together)

    def __len__(self) -> int:
        return self._steps

    @property
    def samples_per_step(self) -> int:
        """Samples that all cores together take in one step."""
        return self.batch_size * self.world_size

    def __iter__(self) -> Iterator[object]:
        from torch.utils.data import DataLoader

        shares = self.indices(self.epoch)
        self.epoch += 1
        context = "fork" if self.workers else None
        dataset = self.dataset if hasattr(self.dataset, "__getitems__") else _Numbered(self.dataset)
        loader = DataLoader(dataset, batch_sampler=shares, num_workers=self.workers, multiprocessing_context=context)
        for batch in loader:
            yield _to_device(batch, self.device)

    def indices(self, epoch: int) -> list[Sequence[int]]:
        """Say which samples this core sees in an epoch, batch by batch.

        Shuffled, step `i` of all cores together is samples `i * n` to `(i + 1) * n` of one permutation that depends
        on seed and epoch alone: two cores with batch B see what one sees with 2 B. In order, core 0 has the first
        stretch, core 1 the next, and the padding is at the very end: `core.gather(outputs)[:len(dataset)]` is
        every sample exactly once, in dataset order.
        """
        import numpy

        count, total = len(self.dataset), self._steps * self.samples_per_step
        if self.shuffle:
            order = numpy.resize(numpy.random.default_rng((self.seed, epoch)).permutation(count), total)
            mine = order.reshape(self._steps, self.world_size, self.batch_size)[:, self.rank]
        else:
            order = numpy.minimum(numpy.arange(total), count - 1)
            mine = order.reshape(self.world_size, self._steps, self.batch_size)[self.rank]
        return mine.tolist()


class _Numbered:
    """A dataset whose errors say which sample it was, also from a DataLoader's process."""

    def __init__(self, dataset: MapDataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> object:
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"sample {index} of the dataset")
            raise


def _to_device(batch: object, device: object) -> object:
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: _to_device(part, device) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_to_device(part, device) for part in batch)
    return batch  # strings: names of files
