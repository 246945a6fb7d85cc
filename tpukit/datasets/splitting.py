"""Split images into two parts, or into folds; all images of a group stay together.

Groups are never divided. So the share of a part is only as near to the requested share as whole
groups allow.
"""

from typing import Any, NamedTuple

from tpukit.datasets.label_arrays import is_missing
from tpukit.essentials.display import InvalidValueError, check_count, counted


def split_by_group(groups, valid: float = 0.2, seed: int = 0, stratify=None):
    """Split images into two parts that share no group.

    Args:
        groups: (N,) int, the group of each image.
        valid: the share of the images in the second part, between 0 and 1.
        seed: determines which groups are in the second part.
        stratify: (N,) classes, or (N, L) zeros and ones, whose shares should be the same in both
            parts; None if only the number of images matters.

    Returns:
        The indices of the images in each part, two int64 arrays in ascending order. The share
        of the second part is near to `valid`, but not always the nearest that is possible.

    Raises:
        ValueError: `valid` is out of range; there is only one group; or `stratify` does not have N
            rows, has words for some images only, has several columns with other numbers than 0 and
            1, or, if images share groups, has too many classes.
    """
    import numpy

    if isinstance(valid, str) or not 0 < valid < 1:
        raise InvalidValueError(
            f"valid must be the share of the images to validate on, between 0 and 1, got {valid!r}",
            fix="valid=0.2",
        )
    names, numbers = numpy.unique(groups, return_inverse=True)
    if len(names) < 2:
        raise InvalidValueError(
            f"{counted(len(numbers), 'image')} in one group cannot be split",
            fix="pack(..., groups=...) with the column that says which images belong together",
        )
    order = numpy.random.default_rng(seed).permutation(len(names))
    has_groups = len(names) < len(numbers)
    # Single images with classes can be divided exactly, and without a search.
    if not has_groups and numpy.ndim(stratify) == 1:
        second = _every_nth(_checked(stratify, len(numbers)), order, valid)
        if 0 < second.sum() < len(second):
            return numpy.flatnonzero(~second), numpy.flatnonzero(second)
    counts = _counts(numbers, len(names), stratify)
    chosen = order[_choose(counts[order], valid)]
    second = numpy.isin(numbers, chosen)
    return numpy.flatnonzero(~second), numpy.flatnonzero(second)


def folds_by_group(groups, count: int = 5, seed: int = 0, stratify=None) -> list[tuple]:
    """Divide images into folds that share no group; each fold is the validation part once.

    Groups are assigned to folds one after the other, as by scikit-learn's StratifiedGroupKFold, but
    images may have several labels. The group with the largest share of all images or of a class is
    assigned first. Each group is assigned to the fold with the fewest images of its classes.

    Args:
        groups: (N,) int, the group of each image.
        count: the number of folds, 2 or more.
        seed: determines the order of groups with equal shares.
        stratify: as for `split_by_group`.

    Returns:
        `count` pairs of int64 arrays in ascending order: the indices of the images to train on, and
        of the images to validate on.

    Raises:
        ValueError: there are fewer groups than folds; or `stratify` is not as for
            `split_by_group`, or has too many classes.
    """
    import numpy

    check_count("count", count, least=2)
    names, numbers = numpy.unique(groups, return_inverse=True)
    if len(names) < count:
        raise InvalidValueError(
            f"{len(names):,} groups cannot be divided into {count} folds",
            fix=f"count={max(2, len(names))}, or more groups",
        )
    fold_of = _fold_of_each(_kinds_in_groups(numbers, len(names), stratify), count, seed)[numbers]
    folds = []
    for fold in range(count):
        is_valid = fold_of == fold
        folds.append((numpy.flatnonzero(~is_valid), numpy.flatnonzero(is_valid)))
    return folds


class _KindsInGroups(NamedTuple):
    """The number of images of each kind in each group, as a sparse table sorted by group.

    Kind 0 is "all images"; the other kinds are the classes or labels. A dense table of all groups
    and kinds would take 10 GB for the 1,000 classes of ImageNet.
    """

    group: Any  # (n,) int
    kind: Any  # (n,) int
    images: Any  # (n,) the number of images of this kind in this group


def _fold_of_each(found: _KindsInGroups, count: int, seed: int):
    """Return the fold of each group, (G,) int.

    Args:
        found: the number of images of each kind in each group.
        count: the number of folds.
        seed: determines the order of groups with equal shares.
    """
    import numpy

    totals = numpy.bincount(found.kind, found.images)
    # Shares instead of numbers, so that a rare kind counts as much as a frequent one.
    shares = found.images / totals[found.kind]
    begins = numpy.flatnonzero(numpy.diff(found.group, prepend=-1))
    largest = numpy.maximum.reduceat(shares, begins)
    order = numpy.random.default_rng(seed).permutation(len(begins))
    order = order[numpy.argsort(-largest[order], kind="stable")]
    ends = [*begins.tolist()[1:], len(shares)]
    fold_of = numpy.empty(len(begins), int)
    held = numpy.zeros((count, len(totals)))
    for group in order.tolist():
        part = slice(begins[group], ends[group])
        kinds = found.kind[part]
        # The sum over folds and kinds of held**2 is smallest if all folds are equal. Twice this dot
        # product is what the group adds to that sum, apart from a term that is equal for all folds.
        fold = int((held[:, kinds] @ shares[part]).argmin())
        held[fold, kinds] += shares[part]
        fold_of[group] = fold
    return fold_of


def _kinds_in_groups(numbers, groups: int, stratify) -> _KindsInGroups:
    """Return the number of images of each kind in each group, without the zeros."""
    import numpy

    if numpy.ndim(stratify) != 1:
        counts = _counts(numbers, groups, stratify)
        found = numpy.nonzero(counts)
        return _KindsInGroups(*found, counts[found])
    classes, count = _classes(_checked(stratify, len(numbers)))
    # One integer per pair of group and kind; kind 0 is "all", and class k is kind k + 1.
    of_all = numbers * (count + 1)
    pairs, images = numpy.unique(
        numpy.concatenate([of_all, of_all + 1 + classes]), return_counts=True
    )
    return _KindsInGroups(pairs // (count + 1), pairs % (count + 1), images)


def _counts(numbers, groups: int, stratify):
    """Return the number of images of each kind in each group, (G, K); kind 0 is "all"."""
    import numpy

    total = numpy.bincount(numbers, minlength=groups)[:, None]
    if stratify is None:
        return total
    values = _checked(stratify, len(numbers))
    if values.ndim == 2:
        _check_zeros_and_ones(values)
        columns = [numpy.bincount(numbers, label, groups) for label in values.T.astype(float)]
        return numpy.stack([total[:, 0], *columns], axis=1)
    classes, count = _classes(values)
    # Weights of 1.0 make the counts floats, for which the matrix product in `_choose` is fast.
    found = numpy.bincount(
        numbers * count + classes, numpy.ones(len(numbers)), minlength=groups * count
    )
    return numpy.concatenate([total, found.reshape(groups, count)], axis=1)


def _every_nth(classes, order, share: float):
    """Return whether each image is in the second part, (N,) bool: every nth of each class.

    With a share of 0.25, the second part has the images at positions 1, 5, 9, ... (from 0) of
    `order` after a stable sort by class.
    """
    import numpy

    by_class = order[numpy.argsort(classes[order], kind="stable")]
    steps = numpy.floor(numpy.arange(len(order) + 1) * share + 0.5)
    second = numpy.zeros(len(order), bool)
    second[by_class] = numpy.diff(steps) > 0
    return second


def _choose(counts, share: float):
    """Choose groups, mostly at random, that together have a share of the images; return (G,) bool.

    Each group belongs to the kind of which it has the largest share. Kinds are handled one after
    the other, the rarest first. Of each kind:

    1. Choose the first groups in their random order, up to the share of the images. So large groups
       are as likely to be chosen as small ones.
    2. Try all choices among the 14 groups nearest to that border, and use the one nearest to the
       share.

    The most frequent kind is last, because it can compensate the errors of the other kinds. Groups
    larger than the share are the last of their kind, so only step 2 can choose them.

    Args:
        counts: (G, K), the number of images of each kind in each group, groups in random order;
            kind 0 is "all".
        share: the share of the images, between 0 and 1.
    """
    import numpy

    total = counts.sum(axis=0)
    weight = 1 / numpy.maximum(total, 1)  # a rare kind counts as much as a frequent kind
    size = counts[:, 0].copy()  # contiguous; of 1,000 columns, one is read ten times as slowly
    fits = size <= share * total[0]
    kind_of = numpy.zeros(len(counts), int)
    if counts.shape[1] > 1:
        kind_of = (counts[:, 1:] * weight[1:]).argmax(axis=1)
    kinds = sorted(numpy.unique(kind_of).tolist(), key=lambda kind: size[kind_of == kind].sum())
    # The groups of which all choices are tried: 2^14 = 16,384 choices, or 256 with many kinds.
    tried = 14 if len(kinds) <= 10 else 8
    if len(counts) <= tried:
        # With so few groups, try all choices of all groups at once, as if there were one kind.
        kind_of[:] = 0
        kinds = [0]
    chosen = numpy.zeros(len(counts), bool)
    missing = numpy.zeros(len(total))  # the number of images of each kind still to be chosen
    for kind in kinds:
        groups = numpy.flatnonzero(kind_of == kind)
        groups = numpy.concatenate([groups[fits[groups]], groups[~fits[groups]]])
        missing = missing + share * counts[groups].sum(axis=0)
        border = int(
            numpy.searchsorted(size[groups].cumsum(), share * size[groups].sum(), side="right")
        )
        first = max(0, min(border - tried // 2, len(groups) - tried))
        near = groups[first : first + tried]
        chosen[groups[:first]] = True
        choices = _all_choices(len(near))
        left = missing - counts[groups[:first]].sum(axis=0) - choices @ counts[near]
        error = (numpy.abs(left) * weight).sum(axis=1)
        if kind == kinds[-1]:  # neither part may be empty
            chosen_groups = chosen.sum() + choices.sum(axis=1)
            error[(chosen_groups == 0) | (chosen_groups == len(counts))] = numpy.inf
        best = error.argmin()
        chosen[near] = choices[best]
        missing = left[best]
    return chosen


def _all_choices(count: int):
    """Return all choices among `count` groups, (2^count, count) of 0 and 1."""
    import numpy

    numbers = numpy.arange(2**count)[:, None]
    return numbers >> numpy.arange(count) & 1


def _checked(stratify, count: int):
    """Return `stratify` as an array; ValueError for another length, or a missing word."""
    import numpy

    values = numpy.asarray(stratify)
    if values.shape[:1] != (count,) or values.ndim > 2:
        raise InvalidValueError(
            f"stratify= has the shape {values.shape}, and there are {count:,} images",
            fix="one class for each image, or a row of zeros and ones",
        )
    # numpy cannot sort words and None. In an array of numbers, NaN is a class of its own.
    if values.dtype == object and any(map(is_missing, values.flat)):
        raise InvalidValueError(
            "stratify= has missing values",
            found=f"{sum(map(is_missing, values.flat)):,} of {count:,}",
            fix='give these images a class of their own: column.fillna("unknown")',
        )
    return values


def _check_zeros_and_ones(values) -> None:
    """Raise ValueError if labels in several columns have other numbers than 0 and 1."""
    import numpy

    is_wrong = ~numpy.isin(values, (0, 1))
    if is_wrong.any():
        raise InvalidValueError(
            "stratify= with several columns must hold zeros and ones",
            found=values[is_wrong][0],
            fix="pass one class per image, (N,); or, for probabilities: stratify=labels > 0.5",
        )


def _classes(values) -> tuple:
    """Return the class number of each image, (N,) int, and the number of classes.

    Raises:
        ValueError: there are more classes than half of the images, as with a quantity.
    """
    import numpy

    classes, numbers = numpy.unique(values, return_inverse=True)
    # With one or two images per class, there is nothing to divide evenly.
    if len(classes) > max(2, len(values) // 2):
        raise InvalidValueError(
            f"stratify= has {len(classes):,} classes for {len(values):,} images",
            found=classes[:4].tolist(),
            fix="for a quantity, make classes of it: numpy.digitize(values, "
            "numpy.quantile(values, [0.25, 0.5, 0.75]))",
        )
    return numbers, len(classes)
