"""Check labels, probabilities and groups: the arguments of all measures and figures.

A mistake has the same error in all of them: two columns for one label, nan, a sample without a
group, or logits where probabilities are needed. Only `show_predictions` reads its labels by
`figure_inputs`, because they may be class numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tpukit.essentials.display import InvalidValueError, figure_inputs

if TYPE_CHECKING:
    import numpy as np


class Samples(NamedTuple):
    """The samples of one label, as arrays of shape (N,)."""

    truth: np.ndarray  # float64: 0 or 1
    chances: np.ndarray  # float64: probabilities or scores
    groups: np.ndarray  # int64: the number of each sample's group, from 0


def one_label(labels: Any, probabilities: Any, groups: Any = None) -> Samples:
    """Check and return the samples of one label for a curve, which needs both classes.

    Args:
        labels: (N,) or (N, 1) zeros and ones.
        probabilities: (N,) or (N, 1); any scores without nan, because only their order
            counts.
        groups: (N,) the study or patient of each sample; None if every sample is independent.

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, a probability is nan, a
            sample has no group, or all labels are equal.
    """
    truth, chances = _one_column(labels, probabilities)
    check_yes_or_no(truth)
    refuse_nan(chances)
    if not 0 < truth.sum() < len(truth):
        have = f"{truth.sum():.0f} of {len(truth)} have it"
        raise InvalidValueError(
            f"a curve needs samples with the label and samples without it, but {have}",
            fix="a larger validation set, or another label",
        )
    return Samples(truth, chances, group_numbers(groups, len(truth)))


def one_label_with_threshold(labels: Any, probabilities: Any, threshold: float) -> Samples:
    """Check and return the samples of one label, to compare probabilities with a threshold.

    Args:
        labels: (N,) or (N, 1) zeros and ones.
        probabilities: (N,) or (N, 1); in [0, 1], not logits.
        threshold: in [0, 1].

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, or a probability or the
            threshold is nan or outside [0, 1].
    """
    truth, chances = _one_column(labels, probabilities)
    check_yes_or_no(truth)
    check_probabilities(chances)
    check_threshold(threshold)
    return Samples(truth, chances, group_numbers(None, len(truth)))


def _one_column(labels: Any, probabilities: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and probabilities, (N,) or (N, 1), as (N,); raise for other shapes."""
    truth = as_columns(labels)
    chances = as_columns(probabilities)
    if truth.ndim == chances.ndim == 2 and truth.shape[1] == chances.shape[1] == 1:
        if len(truth) == len(chances):
            return truth[:, 0], chances[:, 0]
        fix = "pass labels and probabilities of the same samples, in the same order"
    # A softmax over two classes has two columns for one label.
    elif truth.shape[1:] == (1,) and chances.shape[1:] == (2,):
        fix = "probabilities[:, 1], the second class of two, whose label is 1"
    else:
        fix = "labels[:, 0] and probabilities[:, 0] for the first label"
    shapes = f"{as_array(labels).shape} and {as_array(probabilities).shape}"
    raise InvalidValueError(
        f"labels and probabilities must have the shapes (N,) and (N,), got {shapes}", fix=fix
    )


def check_yes_or_no(labels: np.ndarray) -> None:
    """Raise InvalidValueError if a label is neither 0 nor 1.

    Common causes: a table has no value for a label, or the predictions were passed first.
    """
    import numpy as np

    wrong = ~np.isin(labels, (0, 1))
    if wrong.any():
        fix = "labels in the first argument, the model's outputs in the second"
        if np.isnan(labels).any():
            fix = "look for missing labels in the table that they come from: table.isna().sum()"
        raise InvalidValueError(
            "labels must be 0 or 1",
            found=f"{wrong.sum()} others, such as {labels[wrong][0]:.4g}",
            fix=fix,
        )


def check_probabilities(chances: np.ndarray) -> None:
    """Raise InvalidValueError if a probability is nan or outside [0, 1], as logits are."""
    refuse_nan(chances)
    if not ((chances >= 0) & (chances <= 1)).all():
        raise InvalidValueError(
            f"probabilities must be in [0, 1], got [{chances.min():.4g}, {chances.max():.4g}]",
            fix="if they are logits, pass torch.sigmoid(logits)",
        )


def check_threshold(threshold: float) -> None:
    """Raise InvalidValueError if a threshold is outside [0, 1]."""
    if not 0 <= threshold <= 1:
        fact = f"a threshold must be a probability, 0 to 1, got {threshold}"
        raise InvalidValueError(fact, fix="threshold=0.5")


def refuse_nan(chances: np.ndarray) -> None:
    """Raise InvalidValueError if a probability or score is nan."""
    import numpy as np

    is_nan = np.isnan(chances)
    if is_nan.any():
        found = f"{is_nan.sum()} of {is_nan.size} are nan"
        raise InvalidValueError(
            "probabilities must not be nan",
            found=found,
            fix="find out in the training why the model returns nan: look at its loss first",
        )


def group_numbers(groups: Any, count: int) -> np.ndarray:
    """Return the number of each sample's group, (N,) int64 from 0.

    Args:
        groups: (N,) names or numbers of the groups. None: each sample is its own group.
        count: N, the number of samples.

    Raises:
        ValueError: `groups` does not have N entries, or a sample has no group (None, nan or an
            empty text). All samples without a group would otherwise count as a single group.
    """
    import numpy as np
    import pandas

    if groups is None:
        return np.arange(count)
    if hasattr(groups, "detach"):
        # Not `as_array`: as floats, large group numbers could become equal.
        groups = groups.detach().cpu().numpy()
    # A list has only a length. An array must have one dimension as well.
    shape = (len(groups), *getattr(groups, "shape", ())[1:])
    if shape != (count,):
        raise InvalidValueError(
            f"groups must be one per sample, ({count},), got {shape}",
            fix="pass the groups of the same samples, in the same order",
        )
    # An empty cell of a table may be read as "". Make it None, which `factorize` numbers -1.
    names = [None if isinstance(name, str) and not name.strip() else name for name in groups]
    # As objects, because pandas would convert large numbers next to None to floats.
    numbers, _ = pandas.factorize(pandas.Series(names, dtype=object))
    missing = np.flatnonzero(numbers < 0)
    if len(missing):
        raise InvalidValueError(
            f"{len(missing)} of {count} samples have no group",
            found=f"the first is sample {missing[0]}",
            fix="give each sample a group; or leave these samples out: "
            "keep = pandas.notna(groups); labels[keep], probabilities[keep], groups[keep]",
        )
    return numbers


def count_groups(truth, groups) -> tuple[int, int]:
    """Return the number of groups with a positive sample, and of groups with a negative sample.

    A group may count in both. A bootstrap needs several groups of each.

    Args:
        truth: (N,) zeros and ones.
        groups: (N,) numbers from 0, without gaps.
    """
    import numpy as np

    return len(np.unique(groups[truth == 1])), len(np.unique(groups[truth == 0]))


def as_array(values: Any) -> np.ndarray:
    """Convert a torch tensor on any device, or values that NumPy accepts, to float64."""
    return figure_inputs.as_array(values).astype(float, copy=False)


def as_columns(values: Any) -> np.ndarray:
    """Convert values to an array (N, L) of float64; values (N,) become (N, 1)."""
    array = as_array(values)
    if array.ndim == 1:
        return array[:, None]
    return array
