"""Baselines for exam networks: pooled answers of slices, and answers without any image."""

from tpukit.pe.labels import EXAM_LABELS, IMAGE, LABELS, STUDY, check_yes_or_no


def pool_slices(table, probabilities):
    """Predict each exam label as the mean of its probabilities over the exam's images.

    Args:
        table: a table with one row per image, with StudyInstanceUID and SOPInstanceUID.
        probabilities: (N, 10), the probabilities of the `LABELS` for each row of the table.

    Returns:
        A table of probabilities, as from `ExamSequences.table`. The image label is unchanged.
    """
    import numpy as np

    values = np.asarray(probabilities, np.float64)
    answers = table[[STUDY, IMAGE]].reset_index(drop=True)
    answers = answers.assign(**dict(zip(LABELS, values.T, strict=True)))
    names = list(EXAM_LABELS)
    answers[names] = answers.groupby(STUDY)[names].transform("mean")
    return answers


def position_prior(labels, table, bins: int = 20):
    """Predict labels without looking at images: use the frequency of each label in other exams.

    For the image label, use the frequency of emboli at the height of the image in the body. Emboli
    are more frequent at certain heights, so the height alone gives some information.

    Args:
        labels: a table of labelled exams, in which the frequencies are counted. Its columns are
            StudyInstanceUID, `position` and the `LABELS`.
        table: a table of the exams to predict: StudyInstanceUID, SOPInstanceUID and `position`.
        bins: the number of bins for the height, from the lowest slice of an exam to the highest.

    Returns:
        A table of probabilities, as from `ExamSequences.table`.
    """
    import numpy as np

    check_yes_or_no(labels, LABELS)
    known = _height_bins(labels, bins)
    present = labels[LABELS[0]]
    count = np.bincount(known, minlength=bins)
    positive = np.bincount(known, weights=present, minlength=bins)
    # Add one image with the mean frequency to each bin, so that a bin without images gets the mean.
    frequency = (positive + present.mean()) / (count + 1)
    exams = labels.groupby(STUDY)[list(EXAM_LABELS)].first()
    # Add half an exam with each label and half an exam without. So no frequency is 0 or 1, which
    # would have an infinite loss when it is wrong.
    of_exams = (exams.sum() + 0.5) / (len(exams) + 1)
    answers = table[[STUDY, IMAGE]].reset_index(drop=True)
    return answers.assign(**{LABELS[0]: frequency[_height_bins(table, bins)]}, **of_exams)


def _height_bins(table, bins: int):
    """Return the bin of each slice by its height in its exam, (N,) int; 0 is the lowest."""
    import numpy as np

    heights = table.groupby(STUDY)["position"]
    low = heights.transform("min")
    span = heights.transform("max") - low
    shares = ((table["position"] - low) / span.where(span > 0, 1)).to_numpy()
    inner_edges = np.linspace(0, 1, bins + 1)[1:-1]
    return np.searchsorted(inner_edges, shares)
