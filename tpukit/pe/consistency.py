"""Answers without contradictions: the rules of the challenge, checked and enforced.

A probability above 0.5 is a yes. To enforce the rules, an answer moves just across 0.5 and no
further. For an exam with a positive image and these answers:

                          before    negative version    positive version
    positive image        0.6       0.5                 0.6
    negative_exam         0.7       0.7                 0.5
    central_pe            0.4       0.4                 0.500001

The version with the smaller loss is kept; the answers before the change are taken as the truth.
"""

from tpukit.pe.challenge import (
    EXAM_WEIGHTS,
    IMAGE_WEIGHT,
    STUDY,
    WEIGHTS,
    Exams,
    exams_of,
    image_share,
    log_loss,
)
from tpukit.pe.labels import EXAM_LABELS, LABELS
from tpukit.pe.rules import AGES, LOCATIONS, NO_EMBOLUS, RATIOS, RULES, broken_rules

_NO = 0.5  # the largest probability that counts as no
_YES = 0.5 + 1e-6  # a yes that costs little


def broken_by(exams: Exams) -> dict:
    """Return for each of `RULES` the (E,) bool of the exams that break it."""
    # One array of (E,) per label.
    yes = dict(zip(EXAM_LABELS, (exams.answers > 0.5).T, strict=True))
    return broken_rules(yes, exams.sums(exams.images > 0.5) > 0)


def check_consistency(table):
    """Return the rules that exams break.

    Args:
        table: a row per image, with probabilities or labels; see `challenge_loss`.

    Returns:
        A DataFrame with `StudyInstanceUID`, `rule` and the text of the rule as `says`, in the order
        of the exams; empty if no rule is broken.

    Raises:
        ValueError: see `challenge_loss`.
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
    """Return the table without contradictions, changed as little as the challenge's score allows.

    Each exam that breaks a rule has a nearest version in which all is negative, and a nearest one
    with an embolus. Each answer stays, or moves just across 0.5. The version with the
    smaller loss against the unchanged answers is kept. The published first place does the same.
    Exams that break no rule do not change.

    Args:
        table: a row per image with probabilities; see `challenge_loss`.

    Returns:
        A copy of the table with changed answers.

    Raises:
        ValueError: see `challenge_loss`.
    """
    import numpy as np

    exams = exams_of(table)
    is_broken = np.any(list(broken_by(exams).values()), axis=0)
    negative = _negative(exams)
    positive = _positive(exams)
    is_negative_cheaper = _cost(exams, negative) <= _cost(exams, positive)
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
    """Return (E,) the loss of a version if the answers before the change were the truth."""
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
    # The image with the highest probability costs the least to raise.
    images = exams.images.copy()
    # By exam, then by probability: the last of each exam is its highest.
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
    """In some exams, set the one of several answers to a value that costs the least.

    Args:
        answers: (E, 9), changed in place.
        names: the names of the answers to choose from.
        exams: (E,) bool, the exams to change.
        to: the new value.
    """
    import numpy as np

    part = _part(answers, names)
    weights = np.array([EXAM_WEIGHTS[name] for name in names])
    # What the new value adds to the loss if the old answer were the truth.
    cost = (log_loss(part, np.full_like(part, to)) - log_loss(part, part)) * weights
    column = np.array(_columns(names))[cost.argmin(axis=1)]
    answers[exams, column[exams]] = to
