"""Check the challenge's rules of consistency, and change answers that break them.

A probability above 0.5 is a yes. `make_consistent` moves an answer just across 0.5 and no further.
An exam with a positive image that is also a negative exam has two consistent versions:

                          before    negative version    positive version
    positive image        0.6       0.5                 0.6
    negative_exam         0.7       0.7                 0.5
    central_pe            0.4       0.4                 0.500001

The result is the version with the smaller loss against the answers before the change.
"""

from tpukit.pe.challenge import (
    EXAM_WEIGHTS,
    IMAGE_WEIGHT,
    WEIGHTS,
    Exams,
    exams_of,
    image_share,
    log_loss,
)
from tpukit.pe.labels import EXAM_LABELS, LABELS, STUDY
from tpukit.pe.rules import AGES, LOCATIONS, NO_EMBOLUS, RATIOS, RULES, broken_rules

_NO = 0.5  # the largest probability that counts as a no
_YES = 0.5 + 1e-6  # just above 0.5, so that the change to a yes costs little


def broken_by(exams: Exams) -> dict:
    """Return, for each rule of `RULES`, whether each exam breaks it, (E,) bool."""
    yes = dict(zip(EXAM_LABELS, (exams.answers > 0.5).T, strict=True))
    return broken_rules(yes, exams.sums(exams.images > 0.5) > 0)


def check_consistency(table):
    """Find the exams whose answers contradict each other; return them with the broken rules.

    Args:
        table: a table of probabilities or labels, one row per image; see `challenge_loss`.

    Returns:
        A DataFrame with one row per exam and broken rule, in the order of the exams. Its columns
        are `StudyInstanceUID`, `rule`, and `says`, the text of the rule. It is empty if no rule is
        broken.

    Raises:
        ValueError: as for `challenge_loss`.
    """
    import pandas as pd

    exams = exams_of(table)
    parts = []
    for rule, broken in broken_by(exams).items():
        columns = {STUDY: exams.studies[broken], "rule": rule, "says": RULES[rule]}
        parts.append(pd.DataFrame(columns))
    found = pd.concat(parts)
    order = pd.Categorical(found[STUDY], categories=exams.studies, ordered=True)
    return found.iloc[order.argsort(kind="stable")].reset_index(drop=True)


def make_consistent(table):
    """Return a copy of a table in which no exam breaks a rule, at the smallest cost in score.

    For each exam that breaks a rule, there are two candidates: the nearest version without an
    embolus, and the nearest version with one. In both, an answer that must change becomes
    0.5, which is a no, or 0.500001, a yes. `make_consistent` computes the loss of both as if the
    original answers were true, and chooses the version with the smaller loss, like the published
    solution of the challenge's winner. Exams that break no rule do not change.

    Args:
        table: a table of probabilities, one row per image; see `challenge_loss`.

    Returns:
        A copy of the table with consistent answers.

    Raises:
        ValueError: as for `challenge_loss`.
    """
    import numpy as np

    exams = exams_of(table)
    is_broken = np.any(list(broken_by(exams).values()), axis=0)
    negative = _negative(exams)
    positive = _positive(exams)
    is_negative_cheaper = _cost(exams, negative) <= _cost(exams, positive)
    # The masks of exams become masks of images by `exams.exam`, the exam of each image.
    answers = exams.answers
    images = exams.images
    for version, chosen in (
        (negative, is_broken & is_negative_cheaper),
        (positive, is_broken & ~is_negative_cheaper),
    ):
        answers = np.where(chosen[:, None], version.answers, answers)
        images = np.where(chosen[exams.exam], version.images, images)
    return table.assign(**dict(zip(LABELS, [images, *answers[exams.exam].T], strict=True)))


def _cost(exams: Exams, version: Exams):
    """Return the loss that a version adds per exam, (E,), if the original answers were true."""
    answers = log_loss(exams.answers, version.answers) - log_loss(exams.answers, exams.answers)
    images = log_loss(exams.images, version.images) - log_loss(exams.images, exams.images)
    return answers @ WEIGHTS + IMAGE_WEIGHT * image_share(exams) * exams.sums(images)


def _negative(exams: Exams) -> Exams:
    """Return the nearest version in which no exam has an embolus."""
    import numpy as np

    answers = exams.answers.copy()
    _none_of(answers, RATIOS + LOCATIONS + AGES)
    _exactly_one(answers, NO_EMBOLUS)
    images = np.minimum(exams.images, _NO)
    return Exams(exams.studies, answers, images=images, exam=exams.exam)


def _positive(exams: Exams) -> Exams:
    """Return the nearest version in which all exams have an embolus."""
    import numpy as np

    answers = exams.answers.copy()
    _none_of(answers, NO_EMBOLUS)
    _exactly_one(answers, RATIOS)
    has_both_ages = (_part(answers, AGES) > 0.5).all(axis=1)
    _move_cheapest(answers, AGES, has_both_ages, to=_NO)
    has_no_location = (_part(answers, LOCATIONS) <= 0.5).all(axis=1)
    _move_cheapest(answers, LOCATIONS, has_no_location, to=_YES)
    # At least one image must be positive. To raise the image with the highest probability costs
    # the least.
    images = exams.images.copy()
    # Sorted by exam, then by probability, so the last image of each exam has the highest one.
    order = np.lexsort((images, exams.exam))
    highest = order[np.cumsum(exams.counts()) - 1]
    images[highest] = np.maximum(images[highest], _YES)
    return Exams(exams.studies, answers, images=images, exam=exams.exam)


def _columns(names) -> list[int]:
    return [EXAM_LABELS.index(name) for name in names]


def _part(answers, names):
    return answers[:, _columns(names)]


def _none_of(answers, names) -> None:
    answers[:, _columns(names)] = _part(answers, names).clip(max=_NO)


def _exactly_one(answers, names) -> None:
    is_yes = _part(answers, names) > 0.5
    _move_cheapest(answers, names, is_yes.all(axis=1), to=_NO)
    _move_cheapest(answers, names, ~is_yes.any(axis=1), to=_YES)


def _move_cheapest(answers, names, exams, *, to: float) -> None:
    """In each chosen exam, set one of several answers to a value: the answer that costs least.

    Args:
        answers: (E, 9), changed in place.
        names: the names of the answers to choose from.
        exams: (E,) bool, True for the exams to change.
        to: the new value of the answer.
    """
    import numpy as np

    part = _part(answers, names)
    weights = np.array([EXAM_WEIGHTS[name] for name in names])
    # The loss that the new value would add if the old answer were the truth.
    cost = (log_loss(part, np.full_like(part, to)) - log_loss(part, part)) * weights
    column = np.array(_columns(names))[cost.argmin(axis=1)]
    answers[exams, column[exams]] = to
