"""Split images into two parts with no group in both: as near to the wanted share as whole groups allow."""

from tpukit.essentials.display import InvalidValueError


def split_by_group(groups, valid: float = 0.2, seed: int = 0, stratify=None):
    """Split images into two parts with no group in both; return the images of each, int64, in order.

    Args:
        groups: (N,) int, the group of each image.
        valid: share of the images in the second part, between 0 and 1; met as nearly as whole groups allow.
        seed: decides which groups.
        stratify: (N,) classes, or (N, L) zeros and ones, whose shares are to be the same in both parts as nearly as
            whole groups allow; None looks at the number of images only.

    Raises:
        ValueError: valid is out of range, there is only one group, or `stratify` is of another length or of fractions.
    """
    import numpy

    if isinstance(valid, str) or not 0 < valid < 1:
        raise InvalidValueError(
            f"valid is the share of the images to validate on, between 0 and 1, got {valid!r}", fix="valid=0.2"
        )
    names, numbers = numpy.unique(groups, return_inverse=True)
    if len(names) < 2:
        raise InvalidValueError(
            f"{len(numbers):,} images in one group cannot be split",
            fix="pack(..., groups=...) with the column that says which images belong together",
        )
    order = numpy.random.default_rng(seed).permutation(len(names))
    if len(names) == len(numbers) and numpy.ndim(stratify) == 1:  # images that are their own groups: one in so many
        order = order[numpy.argsort(numpy.asarray(_checked(stratify, len(numbers)))[order], kind="stable")]
        steps = numpy.floor(numpy.arange(len(order) + 1) * valid + 0.5)
        second = numpy.zeros(len(order), bool)
        second[order] = numpy.diff(steps) > 0
        if 0 < second.sum() < len(second):
            return numpy.flatnonzero(~second), numpy.flatnonzero(second)
    kinds = [None] if stratify is None else [None, *_kinds(stratify, len(numbers))]
    # (G, K): the images of each group, of each kind; the first kind is "all".
    counts = numpy.stack([numpy.bincount(numbers, kind, len(names)) for kind in kinds], axis=1)
    chosen = order[_choose(counts[order], valid)]
    second = numpy.isin(numbers, chosen)
    return numpy.flatnonzero(~second), numpy.flatnonzero(second)


def _choose(counts, share: float):
    """Return which groups give the share of all, (G,) bool: at random, but for some that make it exact.

    Kind by kind, the rarest first and the most frequent one last, which then makes up for what the others left over:
    the first groups in their order, up to the share, so that large ones are as likely as small ones; then all choices
    among the groups nearest to that border are tried. A group that is larger than the share is left for where there
    are no others.
    """
    import numpy

    total = counts.sum(axis=0)
    weight = 1 / numpy.maximum(total, 1)  # a rare kind counts as much as a frequent one
    size = counts[:, 0].copy()  # a view of one of a thousand columns is read at a tenth of the speed
    fits = size <= share * total[0]
    kind = (counts[:, 1:] * weight[1:]).argmax(axis=1) if counts.shape[1] > 1 else numpy.zeros(len(counts), int)
    kinds = sorted(numpy.unique(kind).tolist(), key=lambda one: size[kind == one].sum())
    tried = 14 if len(kinds) <= 10 else 8  # groups of which all choices are tried: 16,384, or 256
    if len(counts) <= tried:  # kind by kind, the last of few groups would be taken whatever it holds
        kind[:], kinds = 0, [0]
    chosen, missing = numpy.zeros(len(counts), bool), numpy.zeros(len(total))
    for one in kinds:
        mine = numpy.flatnonzero(kind == one)
        mine = numpy.concatenate([mine[fits[mine]], mine[~fits[mine]]])
        missing = missing + share * counts[mine].sum(axis=0)
        border = int(numpy.searchsorted(size[mine].cumsum(), share * size[mine].sum(), side="right"))
        first = max(0, min(border - tried // 2, len(mine) - tried))
        near = mine[first : first + tried]
        chosen[mine[:first]] = True
        choices = numpy.arange(2 ** len(near))[:, None] >> numpy.arange(len(near)) & 1
        left = missing - counts[mine[:first]].sum(axis=0) - choices @ counts[near]
        far = (numpy.abs(left) * weight).sum(axis=1)
        if one == kinds[-1]:
            groups = chosen.sum() + choices.sum(axis=1)
            far[(groups == 0) | (groups == len(counts))] = numpy.inf
        chosen[near] = choices[far.argmin()]
        missing = left[far.argmin()]
    return chosen


def _checked(stratify, count: int):
    """Return what to stratify by as an array, if it is of these images."""
    import numpy

    values = numpy.asarray(stratify)
    if values.shape[:1] != (count,) or values.ndim > 2:
        raise InvalidValueError(
            f"stratify= has the shape {values.shape}, and there are {count:,} images",
            fix="one class for each image, or a row of zeros and ones",
        )
    return values


def _kinds(stratify, count: int) -> list:
    """Return for each kind which images are of it, as floats: (N,) classes, or (N, L) zeros and ones."""
    import numpy

    values = _checked(stratify, count)
    if values.ndim == 2:
        if not numpy.isin(values, (0, 1)).all():
            raise InvalidValueError(
                "stratify= in columns holds zeros and ones",
                found=values[~numpy.isin(values, (0, 1))][0],
                fix="stratify=(N,) classes, or labels > 0.5",
            )
        return list(values.T.astype(float))
    classes, numbers = numpy.unique(values, return_inverse=True)
    if len(classes) > max(2, count // 2):
        raise InvalidValueError(
            f"stratify= has {len(classes):,} classes for {count:,} images",
            found=classes[:4].tolist(),
            fix="of a quantity, classes of it: numpy.digitize(values, numpy.quantile(values, [0.25, 0.5, 0.75]))",
        )
    return [(numbers == number).astype(float) for number in range(len(classes))]
