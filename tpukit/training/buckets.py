"""Make batches of a few fixed lengths from samples of many lengths: text, audio, time series."""

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from tpukit.essentials.data import MapDataset, ShardedSampler, collate, seeded_in_turn
from tpukit.essentials.display import InvalidValueError


@dataclass(frozen=True)
class Buckets:
    """The lengths that samples are padded to. In each step, all cores pad to the same length.

    A TPU compiles a step once per length. With several lengths, short samples need not be padded
    to the length of the longest sample.

    Args:
        lengths: the lengths of batches, such as (64, 128, 256).
        pad: the parts of a sample to pad, each with its fill value. If samples are mappings, by
            key: `{"input_ids": 0, "attention_mask": 0, "labels": -100}`. If they are tuples, by
            position: `{0: 0, 1: -100}`. Other parts are stacked unchanged. None: pad the first part
            of a tuple, or a sample that is a single tensor, with 0. Mappings need `pad`.
        axis: the dimension to pad: 0 for (length,) and (length, features), -1 for sound of shape
            (channels, length).
        sizes: the length of every sample, before truncation. None: every core reads every sample
            once to measure its length. If this takes long, compute `sizes` in the notebook.
        truncate: True cuts the end of samples that are longer than the largest length. False
            raises an error for such a sample.

    Raises:
        ValueError: the lengths are not whole numbers above 0 in ascending order.
    """

    lengths: tuple[int, ...]
    pad: Mapping | None = None
    axis: int = 0
    sizes: Sequence[int] | None = field(default=None, repr=False)
    truncate: bool = False

    def __post_init__(self):
        lengths = (self.lengths,)
        if isinstance(self.lengths, Sequence):
            lengths = tuple(self.lengths)
        # Check the types before the order, because a text among numbers could not be sorted.
        are_lengths = bool(lengths) and all(map(_is_length, lengths))
        if not are_lengths or list(lengths) != sorted(set(lengths)):
            raise InvalidValueError(
                f"buckets must be lengths in ascending order, at least 1, got {self.lengths!r}",
                fix="buckets=(64, 128, 256)",
            )
        object.__setattr__(self, "lengths", tuple(map(int, lengths)))

    def sampler(self, plain: ShardedSampler, dataset: MapDataset) -> "BucketSampler":
        """Return a sampler with the samples of `plain`, grouped into steps by their lengths."""
        return BucketSampler(**vars(plain), bucket_of=self.measure(dataset), lengths=self.lengths)

    def measure(self, dataset: MapDataset):
        """Return for every sample the index of its bucket in `lengths`: (N,) int64.

        Raises:
            ValueError: a sample is longer than the largest length, or `self.sizes` belongs to
                another dataset.
        """
        import numpy

        sizes = self.sizes
        if sizes is None:
            # Restore the random generators afterwards: measuring must not change the training.
            with seeded_in_turn((0,)):
                sizes = [self._size(dataset[sample], sample) for sample in range(len(dataset))]
        sizes = numpy.asarray(sizes)
        if sizes.shape != (len(dataset),):
            raise InvalidValueError(
                "sizes must hold the length of every sample: "
                f"{len(dataset)} numbers, got {tuple(sizes.shape)}",
                fix="sizes=[len(text) for text in dataset]",
            )
        if not self.truncate and sizes.max() > self.lengths[-1]:
            sample = int(sizes.argmax())
            size = int(sizes.max())
            count = (sizes > self.lengths[-1]).sum()
            others = f" ({count} samples are longer)" if count > 1 else ""
            more = ", ".join(map(str, (*self.lengths, size)))
            raise InvalidValueError(
                f"sample {sample} has length {size}, and the largest "
                f"bucket is {self.lengths[-1]}{others}",
                fix=f"buckets=({more}), or cut long samples: "
                f"tpukit.Buckets({self.lengths}, truncate=True)",
            )
        # The smallest length that is long enough; the largest for samples to truncate.
        return numpy.minimum(numpy.searchsorted(self.lengths, sizes), len(self.lengths) - 1)

    def collate(self, items: list, samples: list[int], length: int) -> object:
        """Return items as a batch of this length, with a mask of the positions that are data.

        The mask is (B, length). If items are mappings, the batch gets the entry "attention_mask",
        int64, with 1 for data and 0 for padding; an entry of this name in the items is kept. For
        all other items, the mask is the last part of the batch: bool, True for data.

        Args:
            items: the samples of the batch.
            samples: their indices in the dataset.
            length: the length to pad to.

        Raises:
            ValueError: an item is longer than `length`, because its length has changed or its entry
                in `sizes` is wrong.
        """
        import torch

        padded = []
        sizes = []
        for item, sample in zip(items, samples, strict=True):
            item, size = self._padded(item, sample, length)
            padded.append(item)
            sizes.append(size)
        batch = collate(padded, samples)
        # (length,) positions are compared with (B, 1) sizes: True where a position has data.
        mask = torch.arange(length) < torch.tensor(sizes)[:, None]
        if isinstance(batch, Mapping):
            return batch if "attention_mask" in batch else {**batch, "attention_mask": mask.long()}
        if isinstance(batch, list | tuple):
            return (*batch, mask)
        return batch, mask

    def _size(self, item: object, sample: int) -> int:
        """Return the length of an item: the length of its longest padded part."""
        return max(part.shape[self.axis] for part, _ in self._parts(item, sample).values())

    def _padded(self, item: object, sample: int, length: int) -> tuple:
        """Return an item padded to `length`, and the original length of its first padded part."""
        import torch

        parts = self._parts(item, sample)
        limit = self.lengths[-1] if self.truncate else math.inf
        first = min(next(part.shape[self.axis] for part, _ in parts.values()), length)
        for key, (part, value) in parts.items():
            axis = self.axis % part.ndim
            size = part.shape[self.axis]
            if size > limit:
                part = part.narrow(axis, 0, limit)
                size = limit
            if size > length:
                raise InvalidValueError(
                    f"sample {sample} does not fit into a batch of "
                    f"length {length}: it has length {size}",
                    found="the dataset has changed the length, or sizes= has a wrong length",
                    fix=(
                        "pass the lengths of the samples as the dataset returns them; a dataset "
                        "that crops at random must crop to one length"
                    ),
                )
            shape = list(part.shape)
            shape[axis] = length - size
            parts[key] = torch.cat([part, part.new_full(shape, value)], dim=axis)
        if isinstance(item, Mapping):
            return {**item, **parts}, first
        # Without `pad`, a list of numbers is one part, and not a tuple of parts.
        if isinstance(item, list | tuple) and not (self.pad is None and _is_numbers(item)):
            return tuple(parts.get(place, part) for place, part in enumerate(item)), first
        return parts[0], first

    def _parts(self, item: object, sample: int) -> dict:
        """Return {key: (tensor, fill value)} of the parts of an item that are padded.

        Raises:
            ValueError: `pad` is missing; the item has no part that `pad` names; or a part has no
                dimension `axis`.
        """
        import torch

        if isinstance(item, Mapping):
            named = self.pad
            found = item
        elif isinstance(item, list | tuple) and not (self.pad is None and _is_numbers(item)):
            named = self.pad or {0: 0}
            found = dict(enumerate(item))
        else:
            named = self.pad or {0: 0}
            found = {0: item}
        if not named or not set(named) <= found.keys():
            # For the fix: all parts of this sample that have a length.
            given = "no pad is given"
            if named:
                given = f"pad has {min(set(named) - found.keys(), key=str)!r}"
            values = ", ".join(f"{key!r}: 0" for key, part in found.items() if _has_length(part))
            raise InvalidValueError(
                "pad= must name the parts of a sample that vary in length, and their fill values",
                found=f"{given}; the parts of sample {sample} are {', '.join(map(repr, found))}",
                fix=(
                    "keep only the keys of pad= whose parts vary in length: "
                    f"tpukit.Buckets({self.lengths}, pad={{{values}}})"
                ),
            )
        parts = {key: (torch.as_tensor(found[key]), value) for key, value in named.items()}
        for key, (part, value) in parts.items():
            _check_fill_value(key, part, value)
            if not -part.ndim <= self.axis < part.ndim:
                raise InvalidValueError(
                    f"the part {key!r} of sample {sample} has no axis {self.axis} to pad: "
                    f"its shape is {tuple(part.shape)}",
                    fix=f"leave {key!r} out of pad=, or pass another axis=",
                )
        return parts


def _check_fill_value(key: object, part, value: float) -> None:
    """Raise if the dtype of a part cannot represent the fill value."""
    import torch

    kept = torch.tensor(value).to(part.dtype).item()
    if part.is_floating_point():
        # Rounding, as of 0.1, and nan are allowed. Only an overflow to infinity is an error.
        is_changed = math.isfinite(kept) != math.isfinite(value)
    else:
        is_changed = kept != value
    if is_changed:
        raise InvalidValueError(
            f"pad= gives {key!r} the fill value {value}, which {part.dtype} cannot represent: "
            f"it would become {kept}",
            fix=(
                f"another fill value in pad=; or let the dataset return {key!r} in a wider dtype, "
                "such as torch.int64"
            ),
        )


@dataclass(frozen=True, eq=False)
class BucketSampler(ShardedSampler):
    """Groups the samples of an epoch so that in a step all cores have about the same length.

    The samples of an epoch are those of a `ShardedSampler`, sorted by bucket and cut into steps:

        lengths of the samples    3 3 4 4 4 | 7 8 8
        steps of two              3 3,  4 4,  4 7,  8 8

    If the last samples of a bucket do not fill a step, the step is completed with samples of the
    next larger bucket. So only the last step needs padding samples, and `drop_last` leaves out
    less than a step.

    With `shuffle`, the steps are then shuffled. But one step of every length always comes first, in
    descending order of length. So all graphs are compiled early, and a lack of memory raises an
    error at once.

    Attributes:
        bucket_of: (count,) int64, for every sample the index of its bucket.
        lengths: the lengths of the buckets.
    """

    bucket_of: object = field(default=None, repr=False)
    lengths: tuple[int, ...] = ()
    # Compare by identity: a dataclass's own methods cannot compare or hash the array `bucket_of`.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def positions(self, done: int = 0, *, epoch: int = 0, seed: int = 0):
        """Return this core's positions in the epoch, (steps, batch_size) int64.

        Positions below `count`, the number of samples, are samples; all others are padding.
        """
        positions, _ = _arranged(self, epoch, seed)
        steps = positions.reshape(-1, self.world_size, self.batch_size)[:, self.rank]
        return steps[done // self.samples_per_step :][: self.steps(done)]

    def step_lengths(self, done: int = 0, *, epoch: int = 0, seed: int = 0) -> list[int]:
        """Return the padded length of each remaining step, after `done` samples of the epoch."""
        _, buckets = _arranged(self, epoch, seed)
        left = buckets[done // self.samples_per_step :][: self.steps(done)]
        return [self.lengths[bucket] for bucket in left]

    def shapes(self) -> list[int]:
        """Return the lengths of the batches in the first epoch, each once, in ascending order."""
        return sorted(set(self.step_lengths()))

    def places(self, step: int):
        """Yield (rows, places) of a step: which rows of its outputs go to which rows of the result.

        Padding rows are left out. A sample's row in the result is its position in the dataset. But
        if `self.limit` ends the epoch early, the steps fill the rows of the result in order.
        """
        import numpy

        steps = _arranged(self, 0, 0)[0]
        rows = numpy.flatnonzero(steps[step] < self.count)
        before = int((steps[:step] < self.count).sum())
        yield rows, (steps[step][rows] if self.limit is None else slice(before, before + len(rows)))

    def seen(self) -> int:
        """Return how many samples an epoch has besides padding, if epochs are not shuffled."""
        return int((_arranged(self, 0, 0)[0][: self.steps()] < self.count).sum())

    def in_words(self) -> str:
        """Return a line about the lengths of the batches and the number of graphs to compile."""
        lengths = self.shapes()
        shapes = "one shape, so one graph"
        if len(lengths) > 1:
            shapes = f"{len(lengths)} shapes, so {len(lengths)} graphs"
        return (
            f"batches of length {', '.join(map(str, lengths))}: "
            f"{shapes} of each step will be compiled"
        )

    def checksum(self) -> int:
        """Return a checksum of all samples' buckets, to compare two samplers."""
        return zlib.crc32(self.bucket_of.tobytes())


@functools.lru_cache(maxsize=2)  # several methods need it in every epoch
def _arranged(sampler: BucketSampler, epoch: int, seed: int) -> tuple:
    """Return the positions of all cores in an epoch, and the bucket of each step.

    The positions are (steps, samples_per_step) int64, and the buckets are (steps,) int64.
    """
    import numpy

    plain = ShardedSampler(
        sampler.count,
        sampler.batch_size,
        rank=0,
        world_size=sampler.world_size,
        shuffle=False,
        drop_last=sampler.drop_last,
    )
    count = plain.steps()
    positions = numpy.arange(count * sampler.samples_per_step)
    # The bucket of the sample at each position of the epoch.
    buckets = sampler.bucket_of[sampler.samples(positions, epoch=epoch, seed=seed)]
    buckets[sampler.count :] = len(sampler.lengths)  # padding comes last
    # A stable sort keeps the shuffled order of the samples within a bucket.
    steps = positions[numpy.argsort(buckets, kind="stable")].reshape(count, -1)
    # The bucket of a step is the largest of its samples' buckets; padding does not count.
    real = numpy.where(buckets == len(sampler.lengths), -1, buckets)
    of_step = real[steps].max(axis=1)
    order = numpy.arange(count)
    if sampler.shuffle:
        order = numpy.random.default_rng((seed, epoch, 1)).permutation(count)
    # Move one step of every length to the front, the longest first.
    _, first = numpy.unique(of_step[order], return_index=True)
    order = numpy.concatenate([order[first[::-1]], numpy.delete(order, first)])
    return steps[order], of_step[order]


def _is_length(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value > 0


def _is_numbers(item: object) -> bool:
    return all(isinstance(part, int | float) for part in item)


def _has_length(part: object) -> bool:
    return len(getattr(part, "shape", ())) > 0 or (isinstance(part, list | tuple) and len(part) > 0)
