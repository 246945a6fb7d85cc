"""The two kinds of datasets: map-style, with samples by number, or a source of whole batches."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from tpukit.essentials.display import InvalidTypeError, InvalidValueError, first_few


class MapDataset(Protocol):
    """A map-style dataset: any class with the methods `__len__` and `__getitem__`.

    The sample `dataset[i]` is a tensor, a number, or a tuple or dict of them.
    """

    def __len__(self) -> int: ...  # noqa: D105
    def __getitem__(self, index: int, /) -> Any: ...  # noqa: D105


class BatchSource(Protocol):
    """A dataset that returns whole batches, as `PackedImages` and `CachedImages` do.

    `take(indices, out)` returns (n, height, width, 3) uint8 images. If `out` is not None, it writes
    the images into this array. With masks the images have a fourth channel; see `split_masks`.
    Three attributes are optional:

    - `read_ahead(indices)`, a method that begins to read the samples of the next batch from disk;
    - `in_memory`, true if all images are in memory;
    - `encoding`, "jpeg" if `take` decodes images, so that loader processes are useful.

    Attributes:
        shape: (height, width, 3) of every image; (height, width, 4) with masks.
        labels: (N, L) float32, or (N,) int64 class numbers.
    """

    shape: tuple[int, int, int]
    labels: object

    def __len__(self) -> int: ...  # noqa: D105
    def take(self, indices, /, out=None): ...  # noqa: D102


def as_batch_source(dataset: object) -> BatchSource | None:
    """Return a dataset as a source of whole batches; None if it is not a source.

    A `torch.utils.data.Subset` of a source is a source. So is a ConcatDataset of sources, if their
    images and labels have the same shapes and dtypes.

    A class that overrides `__getitem__`, for a transform or other labels, is a source only if it
    overrides `take` as well, because the inherited `take` would return other samples.
    """
    if _is_subset(dataset):
        inner = None
        if _is_plain_subset(dataset):
            inner = as_batch_source(dataset.dataset)
        if inner is None:
            return None
        return _SourceSubset(inner, dataset.indices)
    if _is_plain_concat(dataset):
        return _join([as_batch_source(part) for part in dataset.datasets])
    has_all = all(hasattr(dataset, name) for name in ("take", "shape", "labels"))
    if has_all and _agrees_with_getitem(dataset, "take"):
        return dataset
    return None


def _join(sources: list[BatchSource | None]) -> BatchSource | None:
    """Return a source that joins several; None if their images or labels have other shapes.

    Raises:
        InvalidValueError: the labels of the sources have different names, so that a label number
            would have two meanings.
    """
    if None in sources or len({_kind(source) for source in sources}) > 1:
        return None
    first, *others = (list(getattr(source, "names", None) or []) for source in sources)
    for other in others:
        if other != first:
            raise InvalidValueError(
                "the joined datasets number their classes or labels differently",
                found=f"{first_few(first, 4) or 'none'}; and {first_few(other, 4) or 'none'}",
                fix="pack the other datasets with the classes of the first: pack(..., "
                "classes=first.classes); if images have several labels, pack all datasets with the "
                "labels in one order: pack(..., labels=names)",
            )
    return _SourceConcat(sources)


def _kind(source: BatchSource) -> tuple:
    """Return what must be equal in joined sources: shapes of images and labels, and a dtype."""
    return tuple(source.shape), source.labels.shape[1:], str(source.labels.dtype)


def reader_ahead(source: BatchSource | None) -> Callable | None:
    """Return a source's method `read_ahead`; None if it has none, or has images in memory."""
    if getattr(source, "in_memory", False):
        return None
    return getattr(source, "read_ahead", None)


def inside(dataset: object) -> list:
    """Return the datasets inside a Subset or ConcatDataset of torch; [] for others."""
    if _is_subset(dataset):
        return [dataset.dataset]
    datasets = getattr(dataset, "datasets", None)
    if isinstance(datasets, list | tuple):
        return list(datasets)
    return []


def split_masks(images, labels) -> tuple:
    """Return the images without their mask channel, and their targets.

    Args:
        images: (..., 3, H, W) uint8; or (..., 4, H, W), with the class number of each pixel in the
            fourth channel.
        labels: the labels of the images.

    Returns:
        (images, targets). The images are (..., 3, H, W). Without a fourth channel the targets are
        `labels`. With a fourth channel they are {"labels": labels, "masks": masks}, or only the
        masks if `labels` is empty. Masks are (..., H, W) int64.
    """
    if images.shape[-3] < 4:
        return images, labels
    masks = images[..., 3, :, :].long()  # after the transfer, which had only a byte per pixel
    images = images[..., :3, :, :]
    targets = masks
    if labels.numel():
        targets = {"labels": labels, "masks": masks}
    return images, targets


def reads_many(dataset: object) -> bool:
    """Return whether `__getitems__` of a dataset gives the same samples as its `__getitem__`.

    The methods disagree, for example, if a subclass of torch's Subset overrides only `__getitem__`.
    """
    # Subset itself forwards `__getitems__` to the dataset inside.
    if not _agrees_with_getitem(dataset, "__getitems__"):
        return False
    inner = getattr(dataset, "dataset", None)
    is_forwarded = _is_plain_subset(dataset) and hasattr(inner, "__getitems__")
    if is_forwarded:
        return reads_many(inner)
    return True


def only_iterates(dataset: object) -> bool:
    """Return whether a dataset can only be read in order, without sample numbers.

    Such datasets are iterables, functions that open an iterable, and torch's IterableDataset.
    """
    # An IterableDataset may have a length, and has a `__getitem__` that only raises an error.
    if any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__):
        return True
    if hasattr(dataset, "__getitem__"):
        return False
    return hasattr(dataset, "__iter__") or callable(dataset)


def refuse_loader(dataset: object, batch_size: int) -> None:
    """Raise an error for a DataLoader, a table or a dict, which have no sample `dataset[0]`.

    Args:
        dataset: the dataset.
        batch_size: the batch size in the error's fix, if the loader has no `batch_size`.

    Raises:
        InvalidTypeError: `dataset` is a DataLoader, a table or a dict of columns.
    """
    kind = type(dataset)
    is_table = hasattr(dataset, "iloc")
    # A dict with the keys 0, 1, ... is a usable dataset.
    is_dict_of_columns = isinstance(dataset, Mapping) and 0 not in dataset
    if is_table or is_dict_of_columns:
        raise InvalidTypeError(
            f"a {kind.__name__} holds columns, but core.batches needs samples: dataset[0], "
            "dataset[1]",
            found=first_few(map(repr, dataset), 8),
            fix="for a table, torch.utils.data.TensorDataset("
            "torch.tensor(table[inputs].to_numpy()), torch.tensor(...)); "
            "for a dict of tensors, TensorDataset(*tensors.values())",
        )
    if any(base.__name__.endswith("DataLoader") for base in kind.__mro__):
        size = getattr(dataset, "batch_size", None) or batch_size
        # The samplers of torch that choose samples have a counterpart here.
        of_sampler = "its sampler is not used"
        sampler = getattr(dataset, "sampler", None)
        if hasattr(sampler, "weights"):
            of_sampler = "its WeightedRandomSampler: weights=loader.sampler.weights"
        elif hasattr(sampler, "indices"):
            of_sampler = (
                "its SubsetRandomSampler: "
                "torch.utils.data.Subset(loader.dataset, loader.sampler.indices)"
            )
        raise InvalidTypeError(
            f"a {kind.__name__} makes batches already, but core.batches needs samples, and "
            "makes the batches of each core",
            fix=f"core.batches(loader.dataset, batch_size={size}), where batch_size counts the "
            "samples per core and step; add shuffle= and drop_last= as in the loader, and steps= "
            "if the dataset can only be read in order;\n"
            "the loader's collate_fn is not used: pad with buckets=, and move other changes from "
            "the collate_fn into the dataset's __getitem__;\n"
            f"{of_sampler}",
        )


def _agrees_with_getitem(dataset: object, method: str) -> bool:
    """Return whether a method for many samples fits the dataset's `__getitem__`.

    It does if the class that defines the method is the class that defines `__getitem__`, or is
    derived from it. Otherwise `__getitem__` was overridden without the method.
    """
    definer_of_method = _definer(dataset, method)
    definer_of_getitem = _definer(dataset, "__getitem__")
    return issubclass(definer_of_method, definer_of_getitem)


def _definer(dataset: object, method: str) -> type:
    return next((kind for kind in type(dataset).__mro__ if method in vars(kind)), object)


def _is_subset(dataset: object) -> bool:
    return hasattr(dataset, "dataset") and hasattr(dataset, "indices")


def _is_plain_subset(dataset: object) -> bool:
    """Return whether a dataset reads samples by the methods of torch's Subset."""
    from torch.utils.data import Subset

    return _has_methods_of(dataset, Subset)


def _has_methods_of(dataset: object, kind: type) -> bool:
    """Return whether a dataset reads samples by the methods of a class of torch."""
    names = ("__getitem__", "__getitems__")
    return all(getattr(type(dataset), name, None) is getattr(kind, name, None) for name in names)


def _is_plain_concat(dataset: object) -> bool:
    """Return whether a dataset is a ConcatDataset of torch, and does not override its methods."""
    if not isinstance(getattr(dataset, "datasets", None), list):
        return False
    from torch.utils.data import ConcatDataset

    return isinstance(dataset, ConcatDataset) and _has_methods_of(dataset, ConcatDataset)


class _SourceConcat:
    """A `torch.utils.data.ConcatDataset` of sources, as a source.

    Each source reads its images of a batch in one call.
    """

    def __init__(self, sources: list[BatchSource]):
        import numpy

        first = sources[0]
        self._sources = sources
        self._ends = numpy.cumsum([len(source) for source in sources])
        self.shape = first.shape
        self.names = getattr(first, "names", None)
        self.labels = numpy.concatenate([source.labels for source in sources])
        encodings = [getattr(source, "encoding", None) for source in sources]
        self.encoding = "jpeg" if "jpeg" in encodings else encodings[0]
        self.in_memory = all(reader_ahead(source) is None for source in sources)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, indices, out=None):
        """Return (n, H, W, 3) uint8 images, with one copy more per image than a single source."""
        import numpy

        if out is None:
            out = numpy.empty((len(indices), *self.shape), numpy.uint8)
        for source, places, numbers in self._divided(indices):
            out[places] = source.take(numbers)
        return out

    def read_ahead(self, indices) -> None:
        """Call `read_ahead` of each source that has it, with its samples of the next batch."""
        for source, _, numbers in self._divided(indices):
            prepare = reader_ahead(source)
            if prepare is not None:
                prepare(numbers)

    def _divided(self, indices) -> Iterator[tuple]:
        """Yield for each source (source, its positions in the batch, its own sample numbers)."""
        import numpy

        indices = numpy.asarray(indices)
        of_source = numpy.searchsorted(self._ends, indices, side="right")
        for number, source in enumerate(self._sources):
            places = numpy.flatnonzero(of_source == number)
            if len(places):
                yield source, places, indices[places] - (self._ends[number] - len(source))


class _SourceSubset:
    """A `torch.utils.data.Subset` of a source, as a source."""

    def __init__(self, source: BatchSource, indices):
        import numpy

        indices = numpy.asarray(indices)
        if not indices.size:
            indices = indices.astype(int)  # numpy makes floats of an empty list
        self._source = source
        self._indices = indices
        self.shape = source.shape
        self.names = getattr(source, "names", None)
        self.labels = source.labels[indices]
        self.encoding = getattr(source, "encoding", None)
        self.in_memory = reader_ahead(source) is None

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, indices, out=None):
        """Return (n, H, W, 3) uint8 images."""
        return self._source.take(self._indices[indices], out)

    def read_ahead(self, indices) -> None:
        """Call `read_ahead` of the source for the next batch, if the source has this method."""
        if not self.in_memory:
            self._source.read_ahead(self._indices[indices])
