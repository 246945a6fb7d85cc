"""Split images into two parts, or into folds, with no group in two of them.

The shares are as near as whole groups allow.
"""

from typing import Any, NamedTuple

from tpukit.essentials.display import InvalidValueError, check_count


def split_by_group(groups, valid: float = 0.2, seed: int = 0, stratify=None):
    """Split images into two parts that share no group.

    Args:
        groups: (N,) int, the group of each image.
        valid: the share of the images in the second part, between 0 and 1.
        seed: decides the groups that are chosen.
        stratify: (N,) classes, or (N, L) zeros and ones, whose shares should be the same in both
            parts; None looks at the number of images only.

    Returns:
        The images of each part, int64, in order. The shares are as near as whole groups allow.

    Raises:
        ValueError: `valid` is out of range, there is only one group, or `stratify` has another
            length or holds fractions.
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
            f"{len(numbers):,} images in one group cannot be split",
            fix="pack(..., groups=...) with the column that says which images belong together",
        )
    order = numpy.random.default_rng(seed).permutation(len(names))
    has_groups = len(names) < len(numbers)
    if not has_groups and numpy.ndim(stratify) == 1:
        second = _every_nth(_checked(stratify, len(numbers)), order, valid)
        if 0 < second.sum() < len(second):
            return numpy.flatnonzero(~second), numpy.flatnonzero(second)
    counts = _counts(numbers, len(names), stratify)
    chosen = order[_choose(counts[order], valid)]
    second = numpy.isin(numbers, chosen)
    return numpy.flatnonzero(~second), numpy.flatnonzero(second)


def folds_by_group(groups, count: int = 5, seed: int = 0, stratify=None) -> list[tuple]:
    """Divide images into folds. Each fold is the validation part once.

    Groups are placed one after the other, the largest first, each into the fold that has the fewest
    images of the same kinds, as scikit-learn's StratifiedGroupKFold does. This works for several
    labels per image, too.

    Args:
        groups: (N,) int, the group of each image.
        count: the number of folds, 2 or more.
        seed: decides the order of groups of one size.
        stratify: as for `split_by_group`.

    Returns:
        `count` pairs of int64 arrays: the images to train on, and those to validate on, in order.

    Raises:
        ValueError: there are fewer groups than folds, or `stratify` has another length or holds
            fractions.
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
    """The kinds of images in each group, sorted by the groups; the first kind is "all".

    A table of all groups and kinds would take 10 GB for the 1,000 classes of ImageNet.
    """

    group: Any  # (n,) int
    kind: Any  # (n,) int
    images: Any  # (n,) the number of images of this kind in this group


def _fold_of_each(found: _KindsInGroups, count: int, seed: int):
    """Return the fold of each group, (G,) int.

    Args:
        found: the images of each group, of each kind.
        count: the number of folds.
        seed: decides the order of groups of one size.
    """
    import numpy

    totals = numpy.bincount(found.kind, found.images)
    # A rare kind counts as much as a frequent one.
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
        # The sum of squares over all folds, which is least if they are equal, grows by this.
        fold = int((held[:, kinds] @ shares[part]).argmin())
        held[fold, kinds] += shares[part]
        fold_of[group] = fold
    return fold_of


def _kinds_in_groups(numbers, groups: int, stratify) -> _KindsInGroups:
    """Return the images of each group of each kind, without the kinds that a group has not."""
    import numpy

    if numpy.ndim(stratify) != 1:
        counts = _counts(numbers, groups, stratify)
        found = numpy.nonzero(counts)
        return _KindsInGroups(*found, counts[found])
    classes, count = _classes(_checked(stratify, len(numbers)))
    of_all = numbers * (count + 1)
    pairs, images = numpy.unique(
        numpy.concatenate([of_all, of_all + 1 + classes]), return_counts=True
    )
    return _KindsInGroups(pairs // (count + 1), pairs % (count + 1), images)


def _counts(numbers, groups: int, stratify):
    """Return the images of each group, of each kind, (G, K); the first kind is "all"."""
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
    # Floats, because the product of matrices in `_choose` is fast for them.
    found = numpy.bincount(
        numbers * count + classes, numpy.ones(len(numbers)), minlength=groups * count
    )
    return numpy.concatenate([total, found.reshape(groups, count)], axis=1)


def _every_nth(classes, order, share: float):
    """Return the images of the second part, (N,) bool: every nth of each class in random order.

    With a share of 0.25 they are images 2, 6, 10, ... of the images that are sorted by class.
    """
    import numpy

    by_class = order[numpy.argsort(classes[order], kind="stable")]
    steps = numpy.floor(numpy.arange(len(order) + 1) * share + 0.5)
    second = numpy.zeros(len(order), bool)
    second[by_class] = numpy.diff(steps) > 0
    return second


def _choose(counts, share: float):
    """Return the groups that give the share of all images, (G,) bool, mostly at random.

    It chooses kind by kind, the rarest first. Within a kind the first groups in their random order
    are taken, up to the share, so that large groups are as likely as small ones. Then all choices
    among the 14 groups nearest to that border are tried, and the nearest to the share is kept. The
    most frequent kind comes last, because it can make up for the error of the others. A group that
    is larger than the share is taken only if there are no others.

    Args:
        counts: (G, K), the images of each group in its random order, of each kind; the first kind
            is "all".
        share: the share of the images.
    """
    import numpy

    total = counts.sum(axis=0)
    weight = 1 / numpy.maximum(total, 1)  # a rare kind counts as much as a frequent kind
    size = counts[:, 0].copy()  # a column of a thousand is read at a tenth of the speed
    fits = size <= share * total[0]
    kind_of = numpy.zeros(len(counts), int)
    if counts.shape[1] > 1:
        kind_of = (counts[:, 1:] * weight[1:]).argmax(axis=1)
    kinds = sorted(numpy.unique(kind_of).tolist(), key=lambda kind: size[kind_of == kind].sum())
    # The groups of which all choices are tried: 2^14 = 16,384 choices, or 256 with many kinds.
    tried = 14 if len(kinds) <= 10 else 8
    if len(counts) <= tried:
        # All choices of all groups can be tried. Kind by kind, the last would be taken blindly.
        kind_of[:] = 0
        kinds = [0]
    chosen = numpy.zeros(len(counts), bool)
    missing = numpy.zeros(len(total))  # images that are still to be chosen, of each kind
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
    """Return `stratify` as an array; ValueError if it has another length than the images."""
    import numpy

    values = numpy.asarray(stratify)
    if values.shape[:1] != (count,) or values.ndim > 2:
        raise InvalidValueError(
            f"stratify= has the shape {values.shape}, and there are {count:,} images",
            fix="one class for each image, or a row of zeros and ones",
        )
    return values


def _check_zeros_and_ones(values) -> None:
    """Raise ValueError if labels in several columns hold other numbers than 0 and 1."""
    import numpy

    is_wrong = ~numpy.isin(values, (0, 1))
    if is_wrong.any():
        raise InvalidValueError(
            "stratify= with several columns must hold zeros and ones",
            found=values[is_wrong][0],
            fix="stratify=(N,) classes, or labels > 0.5",
        )


def _classes(values) -> tuple:
    """Return the class of each image as (N,) int, and the number of classes."""
    import numpy

    classes, numbers = numpy.unique(values, return_inverse=True)
    if len(classes) > max(2, len(values) // 2):
        raise InvalidValueError(
            f"stratify= has {len(classes):,} classes for {len(values):,} images",
            found=classes[:4].tolist(),
            fix="for a quantity, make classes of it: numpy.digitize(values, "
            "numpy.quantile(values, [0.25, 0.5, 0.75]))",
        )
    return numbers, len(classes)
