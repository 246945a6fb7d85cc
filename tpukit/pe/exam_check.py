"""Find irregular exams in a table, before anything is packed or trained.

Positions along the body in mm, in an exam whose usual step is 1.25 mm:

    0.0   1.25   1.25   2.5   5.0
               ^            ^
               equal        a slice is missing: the step is more than 1.5 times the usual step
"""

from collections.abc import Iterator
from typing import NamedTuple

from tpukit.pe.labels import IMAGE, SERIES, STUDY, check_columns

WIDE = 1.5  # if a step is longer than this many usual steps, a slice is missing
SAME = 0.01  # mm; positions that differ by less are equal, because files have rounded positions


class Irregularity(NamedTuple):
    """A kind of irregularity in the exams of a table."""

    found: str  # the number of exams and the irregularity, in words
    evidence: str  # an example
    fix: str  # the advice


class _Exams(NamedTuple):
    """The rows of a table, sorted by exam and along the body."""

    number: object  # (N,) the number of each row's exam, from 0
    starts: object  # (E + 1,) the first row of each exam, then N
    position: object  # (N,) float64
    number_in_exam: object  # (N,) float64, the InstanceNumber; NaN if the table has none
    study: object  # (N,) StudyInstanceUID
    series: object  # (N,) SeriesInstanceUID
    image: object  # (N,) SOPInstanceUID


def check_exams(table):
    """Return a table of the irregularities of exams, with examples and advice.

    An exam is irregular if it has several series, slices at equal positions, or a gap because a
    slice is missing. It is also irregular if the spacing changes although the slices are numbered
    without a gap. For a table of `index_dicom` or `read_exams`, the result also has facts of all
    files of the folder, such as other modalities, incomplete headers, and series stored mirrored.

    A submission must have answers for irregular exams too. `ExamSequences(..., irregular="keep")`
    uses the slices of these exams in the order of their positions.

    Args:
        table: the table of `index_dicom`, `index_images` or `read_exams`, or some of its rows. It
            is not changed.

    Returns:
        A DataFrame with the columns "found", "for instance" and "what to do"; empty if nothing was
        found.

    Raises:
        ValueError: the table lacks the column of an identifier or of the position.
    """
    import pandas as pd

    fix = "the table of pe.index_dicom or pe.index_images"
    check_columns(table, (STUDY, SERIES, IMAGE, "position"), "the table has", fix=fix)
    rows = []
    for found, evidence, fix in find_irregular(table):
        rows.append([found, evidence, f"{fix}; or keep them as they are"])
    rows += table.attrs.get("noticed", [])
    return pd.DataFrame(rows, columns=["found", "for instance", "what to do"])


def find_irregular(table) -> Iterator[Irregularity]:
    """Yield the irregularities of exams: several series, equal positions, gaps, uneven steps."""
    import numpy as np

    exams = _sort(table)
    yield from _several_series(exams)
    steps = np.diff(exams.position)
    is_within = exams.number[1:] == exams.number[:-1]
    usual = _usual_steps(exams, steps)
    is_equal = steps < SAME
    is_wide = steps > np.maximum(WIDE * usual, SAME)
    # A scanner may change the spacing within an exam. Then InstanceNumber has no gap.
    is_next = abs(np.diff(exams.number_in_exam)) == 1
    for wrong, fact, fix in (
        (is_equal, "have slices at equal positions", "keep the row of one of these slices"),
        (is_wide & ~is_next, "lack a slice", "copy its file again, and give it a row"),
        (is_wide & is_next, "change their spacing", "leave them out, if steps must be equal"),
    ):
        # Without the steps from one exam to the next.
        rows = np.flatnonzero(wrong & is_within)
        if len(rows):
            count = len(np.unique(exams.number[rows]))
            evidence = _describe(exams, rows[0], usual[rows[0]])
            yield Irregularity(f"{count} exams {fact}", evidence, fix)


def _sort(table) -> _Exams:
    import numpy as np
    import pandas as pd

    exam, _ = pd.factorize(table[STUDY], sort=True)
    position = table["position"].to_numpy(np.float64)
    number_in_exam = np.full(len(table), np.nan)
    if "number" in table:
        number_in_exam = table["number"].to_numpy(np.float64)
    order = np.lexsort((position, exam))
    number = exam[order]
    return _Exams(
        number=number,
        # + 2, so that `starts` also has the end of the last exam.
        starts=np.searchsorted(number, np.arange(number.max(initial=-1) + 2)),
        position=position[order],
        number_in_exam=number_in_exam[order],
        study=table[STUDY].to_numpy()[order],
        series=table[SERIES].to_numpy()[order],
        image=table[IMAGE].to_numpy()[order],
    )


def _several_series(exams: _Exams) -> Iterator[Irregularity]:
    import numpy as np

    # For each row, the series of the first row of its exam.
    first_series = exams.series[exams.starts[exams.number]]
    rows = np.flatnonzero(exams.series != first_series)
    if len(rows):
        row = rows[0]
        both = f"{first_series[row]} and {exams.series[row]}"
        yield Irregularity(
            f"{len(np.unique(exams.number[rows]))} exams have several series",
            f"{both} in study {exams.study[row]}",
            "keep the rows of one of them",
        )


def _usual_steps(exams: _Exams, steps):
    """Return each step's usual value in its exam, (N - 1,) mm; 0 if all positions are equal."""
    import numpy as np

    usual = []
    for start, end in zip(exams.starts[:-1], exams.starts[1:], strict=True):
        apart = steps[start : end - 1]
        apart = apart[apart > SAME]
        # The lower median: of two steps, the larger may be a gap.
        usual.append(np.quantile(apart, 0.5, method="lower") if len(apart) else 0.0)
    return np.array(usual)[exams.number[1:]]


def _describe(exams: _Exams, row: int, usual: float) -> str:
    """Return a text with the positions of the slice in this row and of the next slice."""
    first = f"{exams.image[row]} at {exams.position[row]:g}"
    second = f"{exams.image[row + 1]} at {exams.position[row + 1]:g}"
    step = f"whose slices are {usual:g} apart"
    return f"{first} and {second}, next to each other in study {exams.study[row]}, {step}"
