"""Find everything unusual about the exams of a table, before anything is packed or trained.

Positions along the body, of an exam with the usual step 1.25 mm:

    0.0   1.25   1.25   2.5   5.0
               ^            ^
               equal        a slice is missing: the step is more than 1.5 times the usual one
"""

from collections.abc import Iterator
from typing import NamedTuple

from tpukit.pe.labels import IMAGE, SERIES, STUDY, check_columns

_WIDE = 1.5  # times the usual step between slices
_SAME = 0.01  # mm: positions are rounded when they are written


class Irregularity(NamedTuple):
    """A kind of irregularity, and the exams of a table that have it."""

    found: str
    evidence: str
    fix: str


class _Exams(NamedTuple):
    """The rows of a table, sorted by exam and along the body."""

    number: object  # (N,) the exam of each row, from 0
    starts: object  # (E + 1,) the first row of each exam, then N
    position: object  # (N,) float64
    number_in_exam: object  # (N,) float64 InstanceNumber, NaN if the table has none
    study: object  # (N,) identifiers
    series: object
    image: object


def check_exams(table):
    """Return a table of everything unusual about exams, with an example and advice.

    Exams are irregular if they have several series, slices at equal positions, a gap because a
    slice is missing, or a spacing that changes, although the slices are numbered without a gap. For
    a table of `index_dicom` the result also lists files of other modalities than CT, files that are
    not slices, incomplete headers, and series that are stored lying, mirrored or upside down.

    The table is not changed. `ExamSequences(..., irregular="keep")` reads irregular exams in the
    order of their positions; a submission must contain answers for them.

    Args:
        table: as `index_dicom` and `index_images` return it, or some of its rows.

    Returns:
        A DataFrame with "found", "for instance" and "what to do"; empty if nothing is unusual.

    Raises:
        ValueError: the column of an identifier or of the position is missing.
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
    """Yield the irregularities of exams: several series, equal positions, gaps, other spacing."""
    import numpy as np

    exams = _sort(table)
    yield from _several_series(exams)
    steps = np.diff(exams.position)
    is_within = exams.number[1:] == exams.number[:-1]
    usual = _usual_steps(exams, steps)
    is_equal = steps < _SAME
    is_wide = steps > np.maximum(_WIDE * usual, _SAME)
    # A scanner may change the spacing within an exam: then the numbers of the slices have no gap.
    is_next = abs(np.diff(exams.number_in_exam)) == 1
    for wrong, fact, fix in (
        (is_equal, "have slices at equal positions", "leave out the rows of one of them"),
        (is_wide & ~is_next, "lack a slice", "copy its file again, and give it a row"),
        (is_wide & is_next, "change their spacing", "nothing, if your network allows for it"),
    ):
        # A step from one exam to the next is none.
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
    order = np.lexsort((position, exam))
    number = exam[order]
    return _Exams(
        number=number,
        # Also one after the last exam, so that each has an end.
        starts=np.searchsorted(number, np.arange(number.max(initial=-1) + 2)),
        position=position[order],
        number_in_exam=_numbers(table)[order],
        study=table[STUDY].to_numpy()[order],
        series=table[SERIES].to_numpy()[order],
        image=table[IMAGE].to_numpy()[order],
    )


def _numbers(table):
    """Return (N,) float64 InstanceNumber of each row; NaN if the table has no column "number"."""
    import numpy as np

    if "number" not in table:
        return np.full(len(table), np.nan)
    return table["number"].to_numpy(np.float64)


def _several_series(exams: _Exams) -> Iterator[Irregularity]:
    import numpy as np

    # The series of the first row of each row's exam.
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
    """Return (N - 1,) the usual step of the exam of each step, 0 if all its positions are equal."""
    import numpy as np

    usual = []
    for start, end in zip(exams.starts[:-1], exams.starts[1:], strict=True):
        apart = steps[start : end - 1]
        apart = apart[apart > _SAME]
        # The lower median: of two steps, the larger may be a gap.
        usual.append(np.quantile(apart, 0.5, method="lower") if len(apart) else 0.0)
    return np.array(usual)[exams.number[1:]]


def _describe(exams: _Exams, row: int, usual: float) -> str:
    """Return in words the positions of two slices, that of this row and the next."""
    first = f"{exams.image[row]} at {exams.position[row]:g}"
    second = f"{exams.image[row + 1]} at {exams.position[row + 1]:g}"
    step = f"whose slices are {usual:g} apart"
    return f"{first} and {second}, next to each other in study {exams.study[row]}, {step}"
