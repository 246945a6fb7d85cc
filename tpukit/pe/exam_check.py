"""What is odd about the exams of a table, all at once, known from the headers: before anything is packed or trained."""

from tpukit.pe.labels import IMAGE, SERIES, STUDY, check_columns

_WIDE = 1.5  # times the usual step from slice to slice: there a slice is missing
_SAME = 0.01  # mm: a place is rounded when it is written


def check_exams(table):
    """Return a row for all that is odd about the exams of a table, with an example and what to do about it.

    Exams are irregular if they have several series, slices at one place, or a gap where a slice is missing. Of a table
    of `index_dicom` it also says which files are of other modalities than CT or no slices, what their headers lack, and
    which series are stored lying, mirrored or upside down. Nothing is changed: an irregular exam is read in the order
    of its positions, by `ExamSequences(..., irregular="keep")` and by a submission, which has to answer it.

    Args:
        table: as `index_dicom` and `index_images` return it; a part of its rows will do.

    Returns:
        A DataFrame with "found", "for instance" and "what to do"; without rows where nothing is odd.

    Raises:
        ValueError: an identifier or the position has no column.
    """
    import pandas as pd

    fix = "the table of pe.index_dicom or pe.index_images"
    check_columns(table, (STUDY, SERIES, IMAGE, "position"), "the table has", fix=fix)
    rows = [[what, evidence, f"{todo}; or keep them as they are"] for what, evidence, todo in find_irregular(table)]
    return pd.DataFrame(rows + table.attrs.get("noticed", []), columns=["found", "for instance", "what to do"])


def find_irregular(table):
    """Yield what is wrong with exams, an example, and what would mend it."""
    import numpy as np
    import pandas as pd

    exam, _ = pd.factorize(table[STUDY], sort=True)
    position = table["position"].to_numpy(np.float64)
    order = np.lexsort((position, exam))  # by exam, then along the body
    exam, position = exam[order], position[order]
    starts = np.searchsorted(exam, np.arange(exam.max(initial=-1) + 2))
    studies, series, images = (table[name].to_numpy()[order] for name in (STUDY, SERIES, IMAGE))
    other = series != series[starts[exam]]
    if other.any():
        row = int(other.argmax())
        evidence = f"{series[starts[exam[row]]]} and {series[row]} in study {studies[row]}"
        yield f"{len(np.unique(exam[other]))} exams have several series", evidence, "keep the rows of one of them"
    steps, within = np.diff(position), exam[1:] == exam[:-1]
    ends = zip(starts[:-1], starts[1:], strict=True)
    # The lower median: where two steps are left, one of them beside a lost slice, the other one is the usual one.
    inside = (steps[start : end - 1] for start, end in ends)
    apart = (of[of > _SAME] for of in inside)
    usual = np.array([np.quantile(of, 0.5, method="lower") if len(of) else 0.0 for of in apart])[exam[1:]]
    for wrong, what, fix in (
        (steps < _SAME, "have slices at equal positions", "leave out the rows of one of them"),
        (steps > np.maximum(_WIDE * usual, _SAME), "lack a slice", "copy its file again, and give it a row"),
    ):
        if (wrong & within).any():
            row = int((wrong & within).argmax())
            evidence = f"{images[row]} at {position[row]:g} and {images[row + 1]} at {position[row + 1]:g}, "
            evidence += f"neighbours in study {studies[row]}, whose slices are {usual[row]:g} apart"
            yield f"{len(np.unique(exam[1:][wrong & within]))} exams {what}", evidence, fix
