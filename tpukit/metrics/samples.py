"""Check the labels, probabilities and groups that measures and figures are given.

Every measure and every figure of this subpackage reads its arguments here, so that all of them
report the same mistakes: two columns for a label, logits in place of probabilities, nan, and
samples without a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tpukit.essentials.display import InvalidValueError, figure_inputs

if TYPE_CHECKING:
    import numpy as np


class Samples(NamedTuple):
    """The samples of a label, as arrays of shape (N,)."""

    truth: np.ndarray  # 0 or 1
    chances: np.ndarray
    groups: np.ndarray  # numbers from 0


def one_label(labels: Any, probabilities: Any, groups: Any = None) -> Samples:
    """Check the samples of a label that some samples have and others lack.

    Args:
        labels: (N,) or (N, 1) zeros and ones.
        probabilities: as `labels`; any scores without nan, since only their order counts.
        groups: (N,) the study or patient of each sample; None if every sample is independent.

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, a probability is nan, a
            sample has no group, or all labels are equal.
    """
    truth, chances = _one_column(labels, probabilities)
    check_yes_or_no(truth)
    _refuse_nan(chances)
    if not 0 < truth.sum() < len(truth):
        have = f"{truth.sum():.0f} of {len(truth)} have it"
        raise InvalidValueError(
            f"curves need samples with the label and without, and {have}",
            fix="a larger validation set, or another label",
        )
    return Samples(truth, chances, group_numbers(groups, len(truth)))


def one_label_with_threshold(labels: Any, probabilities: Any, threshold: float) -> Samples:
    """Check the samples of a label whose probabilities are compared with a threshold.

    Args:
        labels: (N,) or (N, 1) zeros and ones.
        probabilities: as `labels`, in [0, 1], because a threshold has no meaning for logits.
        threshold: in [0, 1].

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, or a probability or the
            threshold is outside [0, 1].
    """
    truth, chances = _one_column(labels, probabilities)
    check_yes_or_no(truth)
    check_probabilities(chances)
    check_threshold(threshold)
    return Samples(truth, chances, group_numbers(None, len(truth)))


def _one_column(labels: Any, probabilities: Any) -> tuple[np.ndarray, np.ndarray]:
    # (N,) and (N, 1) are the same label.
    truth = as_columns(labels)
    chances = as_columns(probabilities)
    if truth.ndim == chances.ndim == 2 and truth.shape[1] == chances.shape[1] == 1:
        if len(truth) == len(chances):
            return truth[:, 0], chances[:, 0]
        fix = "pass them of the same samples, in the same order"
    elif truth.shape[1:] == (1,) and chances.shape[1:] == (2,):
        fix = "probabilities[:, 1], the second class of two, whose label is 1"
    else:
        fix = "labels[:, 0] and probabilities[:, 0] for the first label"
    shapes = f"{as_array(labels).shape} and {as_array(probabilities).shape}"
    raise InvalidValueError(
        f"one label needs labels (N,) and probabilities (N,), got {shapes}", fix=fix
    )


def check_yes_or_no(labels: np.ndarray) -> None:
    """Raise InvalidValueError if a label is neither 0 nor 1: it may be a prediction."""
    import numpy as np

    wrong = ~np.isin(labels, (0, 1))
    if wrong.any():
        raise InvalidValueError(
            "labels must be 0 or 1",
            found=f"{wrong.sum()} others, such as {labels[wrong][0]:.4g}",
            fix="labels in the first argument, the model's outputs in the second",
        )


def check_probabilities(chances: np.ndarray) -> None:
    """Raise InvalidValueError if a value is nan, or outside [0, 1] as a logit is."""
    _refuse_nan(chances)
    if not ((chances >= 0) & (chances <= 1)).all():
        raise InvalidValueError(
            f"probabilities lie in [0, 1], got [{chances.min():.4g}, {chances.max():.4g}]",
            fix="if they are logits, pass torch.sigmoid(logits)",
        )


def check_threshold(threshold: float) -> None:
    """Raise InvalidValueError if a threshold is outside [0, 1]."""
    if not 0 <= threshold <= 1:
        fact = f"a threshold must be a probability, 0 to 1, got {threshold}"
        raise InvalidValueError(fact, fix="threshold=0.5")


def _refuse_nan(chances: np.ndarray) -> None:
    import numpy as np

    is_nan = np.isnan(chances)
    if is_nan.any():
        found = f"{is_nan.sum()} of {is_nan.size} are nan"
        raise InvalidValueError(
            "probabilities must be numbers", found=found, fix="look at the loss first"
        )


def group_numbers(groups: Any, count: int) -> np.ndarray:
    """Return the number of each sample's group, (N,) from 0.

    With `groups=None` each sample is its own group.

    Raises:
        ValueError: there is not one group per sample, or a sample has none. Otherwise all samples
            without a patient would count as a single patient.
    """
    import numpy as np
    import pandas

    if groups is None:
        return np.arange(count)
    if hasattr(groups, "detach"):
        groups = groups.detach().cpu().numpy()  # not as float, which would join large numbers
    shape = (len(groups), *getattr(groups, "shape", ())[1:])
    if shape != (count,):
        raise InvalidValueError(
            f"groups must be one per sample, ({count},), got {shape}",
            fix="pass them of the same samples, in the same order",
        )
    # An empty text in a table is no name, and `factorize` numbers None with -1.
    names = [None if isinstance(name, str) and not name.strip() else name for name in groups]
    numbers, _ = pandas.factorize(pandas.Series(names, dtype=object))
    missing = np.flatnonzero(numbers < 0)
    if len(missing):
        raise InvalidValueError(
            f"{len(missing)} of {count} samples have no group",
            found=f"the first is sample {missing[0]}",
            fix="name a group for each; or leave these samples out: groups.notna() of pandas",
        )
    return numbers


def count_groups(truth, groups) -> tuple[int, int]:
    """Return the numbers of groups with a positive sample, and of groups with a negative one.

    A bootstrap of groups needs some of each; a group may have both.

    Args:
        truth: (N,) zeros and ones.
        groups: (N,) numbers from 0, without gaps.
    """
    import numpy as np

    return len(np.unique(groups[truth == 1])), len(np.unique(groups[truth == 0]))


def as_array(values: Any) -> np.ndarray:
    """Return a torch tensor on any device, or anything numpy takes, as an array of float64."""
    return figure_inputs.as_array(values).astype(float, copy=False)


def as_columns(values: Any) -> np.ndarray:
    """Return an array (N, L); (N,) becomes one column."""
    array = as_array(values)
    if array.ndim == 1:
        return array[:, None]
    return array
