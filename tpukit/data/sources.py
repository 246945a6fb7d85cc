"""What a loop can iterate: a dataset read sample by sample, or a source that gives whole batches in one call."""

from typing import Protocol


class MapDataset(Protocol):
    """What any dataset is: `len(dataset)` samples, `dataset[i]` a tensor, number, tuple or dict of them."""

    def __len__(self) -> int: ...  # noqa: D105
    def __getitem__(self, index: int) -> object: ...  # noqa: D105


class BatchSource(Protocol):
    """What gives whole batches in one call: `Records` and `Cache`.

    Attributes:
        shape: (height, width, 3) of every image.
        labels: (N, L) float32.
    """

    shape: tuple[int, int, int]
    labels: object

    def __len__(self) -> int: ...  # noqa: D105
    def take(self, indices, out=None): ...  # noqa: D102


def as_batch_source(dataset: object) -> BatchSource | None:
    """Return what gives whole batches, also a `torch.utils.data.Subset` of it; None for any other dataset."""
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        inner = as_batch_source(dataset.dataset)
        return inner and _Part(inner, dataset.indices)
    is_one = all(hasattr(dataset, name) for name in ("take", "shape", "labels"))
    return dataset if is_one else None


class _Part:
    """Some samples of a source, as `torch.utils.data.Subset` names them."""

    def __init__(self, source: BatchSource, indices):
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
