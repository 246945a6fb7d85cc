"""What batches are made from: a dataset that is read sample by sample, or a source of whole batches."""

from collections.abc import Mapping
from typing import Protocol

from tpukit.essentials.display import InvalidTypeError, first_few


class MapDataset(Protocol):
    """Any map-style dataset: `len(dataset)` samples; `dataset[i]` is a tensor, a number, or a tuple or dict of them."""

    def __len__(self) -> int: ...  # noqa: D105
    def __getitem__(self, index: int) -> object: ...  # noqa: D105


class BatchSource(Protocol):
    """A dataset that returns whole batches in one call, as `PackedImages` and `CachedImages` do.

    `take(indices, out)` returns (n, height, width, 3) uint8 images, written into `out` if it is given; with a fourth
    channel, that is their mask, see `split_masks`. Three attributes are optional: `read_ahead(indices)`, called with
    the samples of the next batch; `in_memory`, true where there is nothing to read; and `encoding`, "jpeg" where `take`
    decodes images, so that processors that are free can help.

    Attributes:
        shape: (height, width, 3) of every image.
        labels: (N, L) float32, or (N,) int64 class numbers.
    """

    shape: tuple[int, int, int]
    labels: object

    def __len__(self) -> int: ...  # noqa: D105
    def take(self, indices, out=None): ...  # noqa: D102


def as_batch_source(dataset: object) -> BatchSource | None:
    """Return the dataset as a source of whole batches, or None if it is not one; Subsets of sources are sources.

    A class that has its own `__getitem__`, for a transform or other labels, is none, unless `take` is its own, too:
    `take` of the class above would give other samples.
    """
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        inner = as_batch_source(dataset.dataset) if _is_plain_subset(dataset) else None
        return None if inner is None else _SourceSubset(inner, dataset.indices)
    is_source = all(hasattr(dataset, name) for name in ("take", "shape", "labels"))
    return dataset if is_source and _stands_for_getitem(dataset, "take") else None


def reader_ahead(source: BatchSource | None):
    """Return the source's `read_ahead`; None where it has none, or says by `in_memory` that it has nothing to read."""
    return None if getattr(source, "in_memory", False) else getattr(source, "read_ahead", None)


def inside(dataset: object) -> list:
    """Return what torch's Subset or ConcatDataset reads from; nothing of any other dataset."""
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        return [dataset.dataset]
    datasets = getattr(dataset, "datasets", None)
    return list(datasets) if isinstance(datasets, list | tuple) else []


def split_masks(images, labels) -> tuple:
    """Return images of three channels, and their targets: labels, masks, or a dict of both by these names.

    Args:
        images: (..., 3, H, W) uint8; or (..., 4, H, W), the fourth channel the class number of each pixel.
        labels: of the images; without masks they are the targets, without labels the masks are: (..., H, W) int64.
    """
    if images.shape[-3] < 4:
        return images, labels
    images, masks = images[..., :3, :, :], images[..., 3, :, :].long()  # on the device: a byte a pixel was sent
    return images, {"labels": labels, "masks": masks} if labels.numel() else masks


def reads_many(dataset: object) -> bool:
    """Tell whether `__getitems__` of a dataset gives the same samples as its `__getitem__`.

    torch's Subset passes it on to the dataset inside, and a class made of Subset inherits it, whatever its own
    `__getitem__` does.
    """
    if not _stands_for_getitem(dataset, "__getitems__"):
        return False
    inner = getattr(dataset, "dataset", None)
    return not _is_plain_subset(dataset) or not hasattr(inner, "__getitems__") or reads_many(inner)


def only_iterates(dataset: object) -> bool:
    """Tell whether samples cannot be asked for by number: iterables, functions that open one, torch's IterableDataset.

    That has a `__getitem__` that only raises, and may have a length.
    """
    if any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__):
        return True
    return not hasattr(dataset, "__getitem__") and (hasattr(dataset, "__iter__") or callable(dataset))


def refuse_loader(dataset: object, batch_size: int) -> None:
    """Raise for a DataLoader, as each core needs batches of its own samples, and it has made them; and for columns.

    Raises:
        TypeError: it is one.
    """
    if isinstance(dataset, Mapping) and 0 not in dataset or hasattr(dataset, "iloc"):
        raise InvalidTypeError(
            f"a {type(dataset).__name__} holds columns, and a dataset gives samples: dataset[0], dataset[1]",
            found=first_few(map(repr, dataset), 8),
            fix="of a table, torch.utils.data.TensorDataset(torch.tensor(table[inputs].to_numpy()), torch.tensor(...))"
            "; of a dict of tensors, TensorDataset(*tensors.values())",
        )
    if any(kind.__name__.endswith("DataLoader") for kind in type(dataset).__mro__):
        size = getattr(dataset, "batch_size", None) or batch_size
        raise InvalidTypeError(
            f"a {type(dataset).__name__} holds batches already, and core.batches makes each core's own of samples",
            fix=f"core.batches(loader.dataset, batch_size={size}), samples per core and step, with shuffle= and "
            "drop_last= as the loader has them, and with steps= if its dataset can only be read in order;"
            "\nits collate_fn is not used: buckets= pads, and the dataset does the rest;"
            "\nits sampler is not used: torch.utils.data.Subset(loader.dataset, list(loader.sampler))",
        )


def _stands_for_getitem(dataset: object, method: str) -> bool:
    """Tell whether a method that returns many samples was defined with `__getitem__`, or after it."""
    classes = [next((k for k in type(dataset).__mro__ if name in vars(k)), object) for name in (method, "__getitem__")]
    return issubclass(*classes)


def _is_plain_subset(dataset: object) -> bool:
    from torch.utils.data import Subset  # here, as only what wraps another dataset asks for it

    names = ("__getitem__", "__getitems__")
    return all(getattr(type(dataset), name, None) is getattr(Subset, name, None) for name in names)


class _SourceSubset:
    """Some samples of a source: those that a `torch.utils.data.Subset` names."""

    def __init__(self, source: BatchSource, indices):
        import numpy

        indices = numpy.asarray(indices)
        self._source, self._indices = source, indices if indices.size else indices.astype(int)
        self.shape, self.labels = source.shape, source.labels[self._indices]
        self.encoding = getattr(source, "encoding", None)
        self.in_memory = reader_ahead(source) is None

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, indices, out=None):
        """Return (n, H, W, 3) uint8 images."""
        return self._source.take(self._indices[indices], out)

    def read_ahead(self, indices) -> None:
        """Let the source prepare to read these samples next, if it can."""
        if not self.in_memory:
            self._source.read_ahead(self._indices[indices])
