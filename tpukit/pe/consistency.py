"""Answers that do not contradict each other: the rules of the challenge, checked, and kept at the least cost.

Above 0.5 is yes.
"""

from tpukit.pe.challenge import EXAM_WEIGHTS, IMAGE_WEIGHT, STUDY, WEIGHTS, Exams, exams_of, image_share, log_loss
from tpukit.pe.labels import EXAM_LABELS, LABELS
from tpukit.pe.rules import AGES, LOCATIONS, NO_EMBOLUS, RATIOS, RULES, broken_rules

_NO, _YES = 0.5, 0.5 + 1e-6  # the nearest values that count as no and as yes


def broken_by(exams: Exams) -> dict:
    """Return for each of `RULES` the (E,) bool of the exams that break it."""
    yes = dict(zip(EXAM_LABELS, (exams.answers > 0.5).T, strict=True))
    return broken_rules(yes, exams.sums(exams.images > 0.5) > 0)


def check_consistency(table):
    """Return the rules that exams break: a DataFrame with `StudyInstanceUID`, `rule` and what it says; empty if none.

    Args:
        table: a row for each image, with probabilities or labels; see `challenge.exams_of`, also for what is raised.
    """
    import pandas as pd

    exams = exams_of(table)
    found = [
        pd.DataFrame({STUDY: exams.studies[broken], "rule": rule, "says": RULES[rule]})
        for rule, broken in broken_by(exams).items()
    ]
    order = pd.Categorical(pd.concat(found)[STUDY], categories=exams.studies, ordered=True)
    return pd.concat(found).iloc[order.argsort(kind="stable")].reset_index(drop=True)


def make_consistent(table):
    """Return the table with the exams that break a rule changed as little as the challenge's score allows.

    For each such exam there is a nearest version in which all is negative, and a nearest one in which an embolus is
    present: each answer stays, or moves just across 0.5. Kept is the one that would cost less in the score if the
    answers were the truth. The published first place does the same (see the notebook); exams that break no rule stay as
    they are.

    Args:
        table: a row for each image with probabilities; see `challenge.exams_of`, also for what is raised.
    """
    import numpy as np

    exams = exams_of(table)
    broken = np.any(list(broken_by(exams).values()), axis=0)
    answers, images = exams.answers, exams.images
    negative, positive = _negative(exams), _positive(exams)
    is_cheaper = _cost(exams, negative) <= _cost(exams, positive)
    for version, chosen in ((negative, broken & is_cheaper), (positive, broken & ~is_cheaper)):
        answers = np.where(chosen[:, None], version.answers, answers)
        images = np.where(chosen[exams.exam], version.images, images)
    return table.assign(**dict(zip(LABELS, [images, *answers[exams.exam].T], strict=True)))


def _cost(exams: Exams, version: Exams):
    """Return what a version costs each exam in the score, if the answers before it were the truth."""
    cost = (log_loss(exams.answers, version.answers) - log_loss(exams.answers, exams.answers)) @ WEIGHTS
    images = log_loss(exams.images, version.images) - log_loss(exams.images, exams.images)
    return cost + IMAGE_WEIGHT * image_share(exams) * exams.sums(images)


def _negative(exams: Exams) -> Exams:
    import numpy as np

    answers = exams.answers.copy()
    _none_of(answers, RATIOS + LOCATIONS + AGES)
    _exactly_one(answers, NO_EMBOLUS)
    return Exams(exams.studies, answers, np.minimum(exams.images, _NO), exams.exam)


def _positive(exams: Exams) -> Exams:
    import numpy as np

    answers = exams.answers.copy()
    _none_of(answers, NO_EMBOLUS)
    _exactly_one(answers, RATIOS)
    _move_one(answers, AGES, (_part(answers, AGES) > 0.5).all(axis=1), _NO)
    _move_one(answers, LOCATIONS, (_part(answers, LOCATIONS) <= 0.5).all(axis=1), _YES)
    # Raising the highest image costs the least.
    images = exams.images.copy()
    order = np.lexsort((images, exams.exam))
    highest = order[np.cumsum(exams.counts()) - 1]
    images[highest] = np.maximum(images[highest], _YES)
    return Exams(exams.studies, answers, images, exams.exam)


def _columns(names) -> list[int]:
    return [EXAM_LABELS.index(name) for name in names]


def _part(answers, names):
    return answers[:, _columns(names)]


def _none_of(answers, names) -> None:
    answers[:, _columns(names)] = _part(answers, names).clip(max=_NO)


def _exactly_one(answers, names) -> None:
    yes = _part(answers, names) > 0.5
    _move_one(answers, names, yes.all(axis=1), _NO)
    _move_one(answers, names, ~yes.any(axis=1), _YES)


def _move_one(answers, names, exams, to: float) -> None:
    """Set that one of some answers to a value for which it costs the least, in some exams."""
    import numpy as np

    part = _part(answers, names)
    weights = np.array([EXAM_WEIGHTS[name] for name in names])
    cost = (log_loss(part, np.full_like(part, to)) - log_loss(part, part)) * weights
    column = np.array(_columns(names))[cost.argmin(axis=1)]
    answers[exams, column[exams]] = to
