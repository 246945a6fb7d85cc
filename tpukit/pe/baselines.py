"""Answers to exams without a network that reads along the body: what its score has to beat."""

from tpukit.pe.challenge import IMAGE, STUDY
from tpukit.pe.labels import EXAM_LABELS, LABELS, check_yes_or_no


def pool_slices(table, probabilities):
    """Return the answers of a network that sees single images: of an exam, the mean over its slices.

    Args:
        table: a row for each image, with StudyInstanceUID and SOPInstanceUID.
        probabilities: (N, 10) of the `LABELS`, in the order of the table.

    Returns:
        As `ExamSequences.table` does.
    """
    import numpy as np

    values = np.asarray(probabilities, np.float64)
    answers = table[[STUDY, IMAGE]].reset_index(drop=True)
    answers = answers.assign(**dict(zip(LABELS, values.T, strict=True)))
    answers[list(EXAM_LABELS)] = answers.groupby(STUDY)[list(EXAM_LABELS)].transform("mean")
    return answers


def position_prior(labels, table, bins: int = 20):
    """Return the answers of somebody who sees no image at all: how often each label is 1 elsewhere, at that height.

    What a network has to beat: emboli lie at certain heights of the body, and that alone is worth something.

    Args:
        labels: of exams to learn from: StudyInstanceUID, `position` and the `LABELS`.
        table: of exams to answer for: StudyInstanceUID, SOPInstanceUID and `position`.
        bins: heights that are told apart, from the lowest slice of an exam to the highest.

    Returns:
        As `ExamSequences.table` does.
    """
    import numpy as np

    check_yes_or_no(labels, LABELS)
    heights, here = (np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], _share_of_height(of)) for of in (labels, table))
    count = np.bincount(heights, minlength=bins)
    positive = np.bincount(heights, weights=labels[LABELS[0]], minlength=bins)
    frequency = (positive + labels[LABELS[0]].mean()) / (count + 1)  # a height nobody was seen at has the mean
    exams = labels.groupby(STUDY)[list(EXAM_LABELS)].first()
    # Half an exam with each label and half one without: never seen is not impossible, which would cost infinitely much.
    exams = (exams.sum() + 0.5) / (len(exams) + 1)
    answers = table[[STUDY, IMAGE]].reset_index(drop=True)
    return answers.assign(**{LABELS[0]: frequency[here]}, **exams)


def _share_of_height(table):
    """Return how high in its exam each slice lies, 0 for the lowest and 1 for the highest."""
    heights = table.groupby(STUDY)["position"]
    low, high = heights.transform("min"), heights.transform("max")
    return ((table["position"] - low) / (high - low).where(high > low, 1)).to_numpy()
