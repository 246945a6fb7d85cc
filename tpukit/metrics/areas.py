"""Measure how well a label is predicted: areas under the ROC and precision-recall curves.

Every measure has an interval from a bootstrap, which draws the samples again with replacement:

    samples              a  b  c  d  e
    a draw               a  a  c  d  d
    weights in the draw  2  0  1  2  0

A draw only changes the weights of the samples, so the probabilities are sorted only once. If
samples belong to groups, such as the images of a study, the bootstrap draws whole groups: the
samples of a group are nearly a single observation, and drawing them one by one would make the
interval too narrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tpukit.essentials.display import (
    InvalidValueError,
    counted,
    figure_inputs,
    names_in_order,
    plural,
)
from tpukit.metrics.samples import (
    as_columns,
    check_yes_or_no,
    count_groups,
    group_numbers,
    one_label,
    refuse_nan,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas

# With fewer positive or negative groups, there is no interval: a bootstrap would draw the same few
# groups again and again, and its spread would be too small.
FEW = 5
_GRID = 201  # points of a band from 0 to 1, in steps of 0.005
_PERCENTILES = (2.5, 97.5)  # of the draws: the limits of a 95 % interval


@dataclass(frozen=True)
class Scores:
    """The measures of a label, with 95 % intervals from a bootstrap.

    The intervals and bands are nan if there are too few groups, see `too_few`.

    Attributes:
        positives: number of samples with the label.
        samples: number of all samples.
        groups: number of groups.
        positive_groups: number of groups with a positive sample.
        negative_groups: number of groups with a negative sample.
        auroc: area under the ROC curve of all samples.
        average_precision: average precision of all samples.
        auroc_interval, average_precision_interval: (low, high), (2,) float64.
        recall_band: (2, 201) float64: low and high true positive rate, at 201 false positive rates
            from 0 to 1.
        precision_band: (2, 201) float64: low and high precision, at 201 recalls from 0 to 1.
    """

    positives: int
    samples: int
    groups: int
    positive_groups: int
    negative_groups: int
    auroc: float
    average_precision: float
    auroc_interval: np.ndarray
    average_precision_interval: np.ndarray
    recall_band: np.ndarray
    precision_band: np.ndarray

    def too_few(self, group: str = "sample") -> str:
        """Return a text if there are too few groups for an interval: "only 3 positive studies".

        The text is "" if there are at least 5 positive and 5 negative groups.

        Args:
            group: what each group is, such as "study".
        """
        parts = []
        if self.positive_groups < FEW:
            parts.append(f"only {counted(self.positive_groups, f'positive {group}')}")
        if self.negative_groups < FEW:
            parts.append(f"only {counted(self.negative_groups, f'negative {group}')}")
        return ", ".join(parts)


def auroc_table(
    labels: Any,
    probabilities: Any,
    *,
    names: Sequence[str] | Mapping | None = None,
    groups: Any = None,
    group: str = "group",
    resamples: int = 500,
    seed: int = 0,
) -> pandas.DataFrame:
    """Return a table with a row per label: positives, and AUROC with its 95 % interval.

    An AUROC of 0.5 is guessing, and 1 is perfect. Images of a study are nearly a single
    observation, so pass the studies as `groups`: the bootstrap then draws whole groups, and the
    table also has the number of positive groups. A label with fewer than 5 positive or fewer than 5
    negative groups has no interval, and the column "note" gives the reason. There is no AUROC for a
    label that is 1 in all samples, or 0 in all samples.

    Args:
        labels: (N, L) or (N,) zeros and ones.
        probabilities: the same shape as `labels`; any scores are accepted, because only their order
            counts.
        names: the names of the L labels, as for `show_batch`. None: 0 to L - 1.
        groups: (N,) the study or patient of each sample; None if every sample is independent.
        group: what each group is, such as "study"; the table uses this word.
        resamples: number of draws of the bootstrap, 1 or more.
        seed: the seed of the bootstrap.

    Returns:
        a table whose index is the label, with spaces for underscores. Its columns are "positives",
        "AUROC", "from", "to" and "note". "from" and "to" are the limits of the interval. With
        `groups`, it also has "positive groups", or "positive studies" for group="study".

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, or a probability is nan.
    """
    import pandas

    labels = as_columns(labels)
    probabilities = as_columns(probabilities)
    # Without names, the labels are numbered.
    names = names_in_order(range(labels.shape[1]) if names is None else names, "names")
    if labels.shape != probabilities.shape or len(names) != labels.shape[1]:
        shapes = f"{labels.shape}, {probabilities.shape} and {len(names)} names"
        raise InvalidValueError(
            f"labels and probabilities must have equal shapes, and a name per column, got {shapes}",
            fix="labels (N, L), probabilities (N, L) and L names",
        )
    check_yes_or_no(labels)
    refuse_nan(probabilities)
    if groups is not None:
        groups = group_numbers(groups, len(labels))
    rows = []
    for name, truth, chances in zip(names, labels.T, probabilities.T, strict=True):
        row = {"label": name.replace("_", " "), "positives": int(truth.sum())}
        # Without both classes, a label has no ROC curve.
        if 0 < truth.sum() < len(truth):
            found = score(truth, chances, groups, resamples=resamples, seed=seed)
            row |= _measured(found, group="sample" if groups is None else group)
        else:
            row |= _unmeasured(truth, groups)
        rows.append(row)
    table = pandas.DataFrame(rows).set_index("label")
    if groups is None:
        return table.drop(columns="groups")
    return table.rename(columns={"groups": f"positive {plural(group)}"})


def _measured(found: Scores, *, group: str) -> dict[str, object]:
    """Return the columns of a label that has both classes."""
    low, high = found.auroc_interval
    few = found.too_few(group)
    return {
        "groups": found.positive_groups,
        "AUROC": found.auroc,
        "from": low,
        "to": high,
        "note": f"{few}: too few to tell" if few else "",
    }


def _unmeasured(truth: np.ndarray, groups: Any) -> dict[str, object]:
    """Return the columns of a label that all samples have, or that no sample has."""
    import numpy as np

    positive_groups = set()
    if groups is not None:
        positive_groups = set(np.asarray(groups)[truth == 1].tolist())
    return {
        "groups": len(positive_groups),
        "AUROC": np.nan,
        "from": np.nan,
        "to": np.nan,
        "note": "in every sample" if truth.sum() else "in no sample",
    }


def score(
    labels: Any,
    probabilities: Any,
    groups: Any = None,
    *,
    resamples: int = 500,
    seed: int = 0,
) -> Scores:
    """Return the measures of one label, with intervals from a bootstrap.

    Args:
        labels: (N,) or (N, 1) zeros and ones; both must occur.
        probabilities, groups, resamples, seed: as for `auroc_table`.

    Raises:
        ValueError: as `auroc_table`, or all labels are equal.
    """
    import numpy as np
    from sklearn.metrics import average_precision_score, roc_auc_score

    truth, chances, numbers = one_label(labels, probabilities, groups)
    # Only the order counts. A draw changes the weights of the samples and not their order, so sort
    # them once.
    rank = np.unique(chances, return_inverse=True)[1]
    positive, negative = count_groups(truth, numbers)
    if min(positive, negative) < FEW:
        shapes = ((2,), (2,), (2, _GRID), (2, _GRID))
        intervals = [np.full(shape, np.nan) for shape in shapes]
    else:
        draws = drawn_weights(truth, numbers, resamples, seed=seed)
        curves = [_curve(truth, rank, weights) for weights in draws]
        measures = zip(*curves, strict=True)
        intervals = [np.percentile(values, _PERCENTILES, axis=0) for values in measures]
    area, average, recall, precision = intervals
    return Scores(
        positives=int(truth.sum()),
        samples=len(truth),
        groups=int(numbers.max()) + 1,
        positive_groups=positive,
        negative_groups=negative,
        auroc=float(roc_auc_score(truth, rank)),
        average_precision=float(average_precision_score(truth, rank)),
        auroc_interval=area,
        average_precision_interval=average,
        recall_band=recall,
        precision_band=precision,
    )


def drawn_weights(truth, groups, resamples: int, *, seed: int) -> Iterator[np.ndarray]:
    """Draw whole groups; for each draw, yield how often each sample was drawn.

    A draw in which all samples have the same class has no curve, and is replaced by another draw.

    Args:
        truth: (N,) zeros and ones; both must occur.
        groups: (N,) numbers of the groups, from 0.
        resamples: number of draws, 1 or more.
        seed: the seed of the draws.

    Yields:
        (N,) float64.

    Raises:
        InvalidValueError: `resamples` is less than 1.
    """
    import numpy as np

    figure_inputs.at_least_one(resamples=resamples)
    random = np.random.default_rng(seed)
    count = int(groups.max()) + 1
    done = 0
    # At least half of all draws contain both classes, so the loop ends.
    while done < resamples:
        # Draw as many groups as there are, with replacement.
        drawn_groups = random.integers(count, size=count)
        times_drawn = np.bincount(drawn_groups, minlength=count)
        weights = times_drawn[groups].astype(float)
        positive = weights @ truth
        if 0 < positive < weights.sum():
            done += 1
            yield weights


class _Curve(NamedTuple):
    """The measures of a draw, in the order of the intervals of `Scores`."""

    auroc: float
    average_precision: float
    recall: np.ndarray  # (201,) at false positive rates from 0 to 1
    precision: np.ndarray  # (201,) at recalls from 0 to 1


def _curve(truth, rank, weights) -> _Curve:
    """Return the measures of weighted samples.

    Args:
        truth: (N,) zeros and ones.
        rank: (N,) the rank of each probability, from 0; equal probabilities have the same rank.
        weights: (N,) the number of times that each sample counts.
    """
    import numpy as np

    counts = above_each(truth, rank, weights)
    recall = counts.positive / counts.positive[-1]
    false_rate = counts.negative / counts.negative[-1]
    precision = counts.positive / (counts.positive + counts.negative)
    recall_from_0 = np.concatenate([[0.0], recall])
    false_rate_from_0 = np.concatenate([[0.0], false_rate])
    # numpy 1 has only trapz; numpy 2 calls it trapezoid.
    area = np.trapezoid if hasattr(np, "trapezoid") else np.trapz
    grid = np.linspace(0, 1, _GRID)
    # Subtract a rounding error: a point of the grid may be slightly above an equal recall.
    first_with_recall = np.searchsorted(recall, grid - 1e-9)
    return _Curve(
        auroc=float(area(recall_from_0, false_rate_from_0)),
        average_precision=float((np.diff(recall_from_0) * precision).sum()),
        recall=np.interp(grid, false_rate_from_0, recall_from_0),
        precision=precision[first_with_recall],
    )


class Thresholds(NamedTuple):
    """The total weights of the samples at or above each rank."""

    rank: np.ndarray  # the ranks that occur, from the highest down
    positive: np.ndarray  # total weight of the positive samples
    negative: np.ndarray  # total weight of the negative samples


def above_each(truth, rank, weights) -> Thresholds:
    """Sum the weights at or above each rank, separately for positives and negatives.

    Args:
        truth: (N,) zeros and ones.
        rank: (N,) the rank of each probability, from 0.
        weights: (N,) the number of times that each sample counts.
    """
    import numpy as np

    # Sums of weights by rank; `flatnonzero` leaves out the ranks that a draw does not contain.
    weight = np.bincount(rank, weights)
    positive = np.bincount(rank, weights * truth)
    negative = weight - positive
    ranks = np.flatnonzero(weight)[::-1]
    return Thresholds(ranks, positive[ranks].cumsum(), negative[ranks].cumsum())


def middle_95(values) -> tuple[float, float]:
    """Return the limits (low, high) of the middle 95 % of the draws of a bootstrap."""
    import numpy as np

    low, high = np.percentile(values, _PERCENTILES).tolist()
    return low, high


def sensitivity_text(sensitivity: float, interval: tuple[float, float] | None) -> str:
    """Return a text with a sensitivity and its interval: "sensitivity 0.84 (0.71 to 1.00)"."""
    text = f"sensitivity {sensitivity:.2f}"
    if interval:
        low, high = interval
        text += f" ({low:.2f} to {high:.2f})"
    return text
