"""What batches are made from: a dataset that is read sample by sample, or a source of whole batches."""

from typing import Protocol


class MapDataset(Protocol):
    """Any map-style dataset: `len(dataset)` samples; `dataset[i]` is a tensor, a number, or a tuple or dict of them."""

    def __len__(self) -> int: ...  # noqa: D105
    def __getitem__(self, index: int) -> object: ...  # noqa: D105


class BatchSource(Protocol):
    """A dataset that returns whole batches in one call, as `Records` and `Cache` do.

    `take(indices, out)` returns (n, height, width, 3) uint8 images, written into `out` if it is given. Two attributes
    are optional: `read_ahead(indices)`, called with the samples of the next batch, and `encoding`, "jpeg" where `take`
    decodes images, so that processors that are free can help.

    Attributes:
        shape: (height, width, 3) of every image.
        labels: (N, L) float32.
    """

    shape: tuple[int, int, int]
    labels: object

    def __len__(self) -> int: ...  # noqa: D105
    def take(self, indices, out=None): ...  # noqa: D102


def as_batch_source(dataset: object) -> BatchSource | None:
    """Return the dataset as a source of whole batches, or None if it is not one; Subsets of sources are sources."""
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        inner = as_batch_source(dataset.dataset)
        return inner and _SourceSubset(inner, dataset.indices)
    is_source = all(hasattr(dataset, name) for name in ("take", "shape", "labels"))
    return dataset if is_source else None


class _SourceSubset:
    """Some samples of a source: those that a `torch.utils.data.Subset` names."""

    def __init__(self, source: BatchSource, indices):
        import numpy

        self._source, self._indices = source, numpy.asarray(indices)
        self.shape, self.labels = source.shape, source.labels[self._indices]
        self.encoding = getattr(source, "encoding", None)

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, indices, out=None):
        """Return (n, H, W, 3) uint8 images."""
        return self._source.take(self._indices[indices], out)

    def read_ahead(self, indices) -> None:
        """Let the source prepare to read these samples next, if it can."""
        if hasattr(self._source, "read_ahead"):
            self._source.read_ahead(self._indices[indices])
