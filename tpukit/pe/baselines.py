"""Answers for exams without a network that reads along the body: baselines to compare with."""

from tpukit.pe.challenge import IMAGE, STUDY
from tpukit.pe.labels import EXAM_LABELS, LABELS, check_yes_or_no


def pool_slices(table, probabilities):
    """Return exam answers from a network for single images: the mean over the slices of an exam.

    Args:
        table: a row per image, with StudyInstanceUID and SOPInstanceUID.
        probabilities: (N, 10) of the `LABELS`, in the order of the table.

    Returns:
        A table as of `ExamSequences.table`.
    """
    import numpy as np

    values = np.asarray(probabilities, np.float64)
    answers = table[[STUDY, IMAGE]].reset_index(drop=True)
    answers = answers.assign(**dict(zip(LABELS, values.T, strict=True)))
    names = list(EXAM_LABELS)
    answers[names] = answers.groupby(STUDY)[names].transform("mean")
    return answers


def position_prior(labels, table, bins: int = 20):
    """Return answers without any image: the frequency of each label in other exams.

    An image gets the frequency at its height in the body. Emboli lie at certain heights, so the
    height alone gives some information.

    Args:
        labels: the labels of the exams to learn from: StudyInstanceUID, `position` and the
            `LABELS`.
        table: the table of the exams to answer for: StudyInstanceUID, SOPInstanceUID and
            `position`.
        bins: number of heights, from the lowest slice of an exam to the highest.

    Returns:
        A table as of `ExamSequences.table`.
    """
    import numpy as np

    check_yes_or_no(labels, LABELS)
    known = _height_bins(labels, bins)
    present = labels[LABELS[0]]
    count = np.bincount(known, minlength=bins)
    positive = np.bincount(known, weights=present, minlength=bins)
    # With one more image of the mean frequency, a height without images has the mean.
    frequency = (positive + present.mean()) / (count + 1)
    exams = labels.groupby(STUDY)[list(EXAM_LABELS)].first()
    # With half an exam more with each label, and half without, no frequency is 0 or 1: those
    # answers would have an infinite loss when they are wrong.
    of_exams = (exams.sum() + 0.5) / (len(exams) + 1)
    answers = table[[STUDY, IMAGE]].reset_index(drop=True)
    return answers.assign(**{LABELS[0]: frequency[_height_bins(table, bins)]}, **of_exams)


def _height_bins(table, bins: int):
    """Return (N,) the bin of each slice by its height in the exam, from 0 for the lowest."""
    import numpy as np

    heights = table.groupby(STUDY)["position"]
    low = heights.transform("min")
    span = heights.transform("max") - low
    shares = ((table["position"] - low) / span.where(span > 0, 1)).to_numpy()
    inner_edges = np.linspace(0, 1, bins + 1)[1:-1]
    return np.searchsorted(inner_edges, shares)
