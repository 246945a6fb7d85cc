"""How well a label is told apart: ROC and precision-recall, with intervals that know which samples belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpukit.essentials.show import WrongValue, counted, figure_inputs, plural

if TYPE_CHECKING:
    import numpy as np
    import pandas

FEW = 5  # positive, or negative, groups; with fewer a bootstrap draws the same ones again and sees no spread
_GRID = 201  # places of a band from 0 to 1


@dataclass(frozen=True)
class Scores:
    """How well one label is told apart, with the middle 95 % of the bootstrap: nan where `too_few` says something.

    Attributes:
        positives, samples: of the label.
        positive_groups, negative_groups: groups with at least one positive sample, and those without.
        auroc, average_precision: of all samples.
        auroc_interval, average_precision_interval: (low, high), (2,) float64.
        recall_band: (2, 201) true positive rate, low and high, at 201 false positive rates from 0 to 1.
        precision_band: (2, 201) precision, low and high, at 201 recalls from 0 to 1.
    """

    positives: int
    samples: int
    positive_groups: int
    negative_groups: int
    auroc: float
    average_precision: float
    auroc_interval: np.ndarray
    average_precision_interval: np.ndarray
    recall_band: np.ndarray
    precision_band: np.ndarray

    def too_few(self, group: str = "sample") -> str:
        """Say which groups are too few to conclude anything from; empty where both kinds are enough."""
        counts = {"positive": self.positive_groups, "negative": self.negative_groups}
        few = {kind: count for kind, count in counts.items() if count < FEW}
        return ", ".join(f"only {counted(count, f'{kind} {group}')}" for kind, count in few.items())


def auroc_table(
    labels: Any,
    probabilities: Any,
    *,
    names: Sequence[str] | None = None,
    groups: Any = None,
    group: str = "group",
    resamples: int = 500,
    seed: int = 0,
) -> pandas.DataFrame:
    """Return a row a label: positives, area under the ROC curve with its 95 % interval, and whether they are enough.

    An area of 0.5 is guessing, 1 perfect. Images of one study are nearly one observation, so pass the studies as
    `groups`: positives are then counted in groups, and the bootstrap draws whole groups. A label with fewer than 5
    positive or negative groups says so in the column "note" and has no interval; one that every sample has, or none,
    has no area.

    Args:
        labels: (N, L) or (N,) zeros and ones.
        probabilities: as `labels`; any scores do, since only their order counts.
        names: of the labels.
        groups: (N,) the study or patient of each sample; None where every sample is independent.
        group: what a group is called: "study".
        resamples: draws of the bootstrap, 1 or more.
        seed: of the bootstrap.

    Raises:
        ValueError: the shapes do not match, a label is neither 0 nor 1, or a probability is nan.
    """
    import numpy as np
    import pandas

    labels, probabilities = _columns(labels), _columns(probabilities)
    names = [str(number) for number in range(labels.shape[1])] if names is None else list(names)
    if labels.shape != probabilities.shape or len(names) != labels.shape[1]:
        raise WrongValue(
            f"labels, probabilities and names are of the same labels, got {labels.shape}, {probabilities.shape} "
            f"and {len(names)} names",
            fix="one name for each column, and one probability for each label",
        )
    check_yes_or_no(labels)
    rows, with_label = [], f"positive {plural(group)}"
    for name, truth, chance in zip(names, labels.T, probabilities.T, strict=True):
        row = {"label": name.replace("_", " "), "positives": int(truth.sum())}
        if 0 < truth.sum() < len(truth):
            found = score(truth, chance, groups, resamples=resamples, seed=seed)
            low, high = found.auroc_interval
            few = found.too_few("sample" if groups is None else group)
            row |= {with_label: found.positive_groups, "AUROC": found.auroc, "from": low, "to": high}
            row["note"] = few and f"{few}: too few to tell"
        else:
            row[with_label] = 0 if groups is None else len(set(np.asarray(groups)[truth == 1].tolist()))
            row |= {"AUROC": np.nan, "from": np.nan, "to": np.nan}
            row["note"] = "in every sample" if truth.sum() else "in no sample"
        rows.append(row)
    table = pandas.DataFrame(rows).set_index("label")
    return table.drop(columns=with_label) if groups is None else table


def score(labels: Any, probabilities: Any, groups: Any = None, *, resamples: int = 500, seed: int = 0) -> Scores:
    """Score one label; takes and raises what `auroc_table` does, of one column that has both classes."""
    import numpy as np
    from sklearn.metrics import average_precision_score, roc_auc_score

    truth, chances, groups = one_label(labels, probabilities, groups)
    with_label, without = count_groups(truth, groups)
    if min(with_label, without) < FEW:
        limits = [np.full(shape, np.nan) for shape in ((2,), (2,), (2, _GRID), (2, _GRID))]
    else:
        place = np.unique(chances, return_inverse=True)[1]  # once: a draw changes weights, not the order
        drawn = [_curve(truth, place, weights) for weights in drawn_weights(truth, groups, resamples, seed)]
        limits = [np.percentile([part[place] for part in drawn], [2.5, 97.5], axis=0) for place in range(4)]
    return Scores(
        int(truth.sum()),
        len(truth),
        with_label,
        without,
        float(roc_auc_score(truth, chances)),
        float(average_precision_score(truth, chances)),
        *limits,
    )


def one_label(labels: Any, probabilities: Any, groups: Any = None) -> tuple:
    """Return (N,) labels, probabilities and groups counted from 0, checked; the arguments are those of `score`."""
    import numpy as np

    truth, chances = _columns(labels)[:, 0], _columns(probabilities)[:, 0]
    groups = np.arange(len(truth)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if not len(truth) == len(chances) == len(groups):
        raise WrongValue(
            f"one label, one probability and one group for each sample, got {len(truth)}, {len(chances)} and "
            f"{len(groups)}",
            fix="pass them of the same samples, in the same order",
        )
    check_yes_or_no(truth)
    if np.isnan(chances).any():
        found = f"{np.isnan(chances).sum()} probabilities that are nan"
        raise WrongValue("probabilities are numbers", found=found, fix="look at the loss first")
    if not 0 < truth.sum() < len(truth):
        raise WrongValue(
            f"curves need samples with the label and without, and {truth.sum():.0f} of {len(truth)} have it",
            fix="a larger validation set, or another label",
        )
    return truth, chances, groups


def check_yes_or_no(labels: np.ndarray) -> None:
    """Raise WrongValue unless all labels are 0 or 1: a probability in their place is a prediction."""
    import numpy as np

    if (wrong := ~np.isin(labels, (0, 1))).any():
        raise WrongValue(
            "labels are 0 or 1",
            found=f"{wrong.sum()} others, such as {labels[wrong][0]:.4g}",
            fix="labels in the first argument, the model's outputs in the second",
        )


def count_groups(truth, groups) -> tuple[int, int]:
    """Return how many groups, counted from 0, have a positive sample, and how many have none."""
    import numpy as np

    positive = len(np.unique(groups[truth == 1]))
    return positive, int(groups.max()) + 1 - positive


def drawn_weights(truth, groups, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield (N,) how often each sample is drawn where whole groups are; a draw of one class alone is repeated."""
    import numpy as np

    random, count = np.random.default_rng(seed), int(groups.max()) + 1
    done = tries = 0
    while done < resamples and tries < 20 * resamples:
        tries += 1
        weights = np.bincount(random.integers(count, size=count), minlength=count)[groups].astype(float)
        positive = weights @ truth
        if 0 < positive < weights.sum():
            done += 1
            yield weights


def _curve(truth, place, weights) -> tuple:
    """Return the area under the ROC curve, the average precision, and both curves at places from 0 to 1.

    `place` is the rank of each score, from 0; equal ones have the same.
    """
    import numpy as np

    _, positive, negative = above_each(truth, place, weights)
    recall, false = positive / positive[-1], negative / negative[-1]
    precision = positive / (positive + negative)
    area = np.trapezoid if hasattr(np, "trapezoid") else np.trapz  # numpy 1
    at, from_zero = np.linspace(0, 1, _GRID), lambda values: np.concatenate([[0.0], values])
    average = float((np.diff(from_zero(recall)) * precision).sum())
    roc = np.interp(at, from_zero(false), from_zero(recall))
    reached = np.searchsorted(recall, at - 1e-9)  # the first threshold that has this recall
    return float(area(from_zero(recall), from_zero(false))), average, roc, precision[reached]


def above_each(truth, place, weights) -> tuple:
    """Return the places that occur, from the highest down, and the weight of positives and negatives from each up."""
    import numpy as np

    weight, hits = np.bincount(place, weights), np.bincount(place, weights * truth)
    there = np.flatnonzero(weight)[::-1]
    return there, hits[there].cumsum(), (weight - hits)[there].cumsum()


def as_array(values: Any) -> np.ndarray:
    """Return a torch tensor on any device, or anything numpy takes, as an array of float64."""
    return figure_inputs.as_array(values).astype(float, copy=False)


def _columns(values: Any) -> np.ndarray:
    """Return (N, L), of (N,) as one column."""
    array = as_array(values)
    return array[:, None] if array.ndim == 1 else array
