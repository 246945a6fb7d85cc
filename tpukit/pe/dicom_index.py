"""Find the DICOM file of each image and the image's position along the body, by the headers.

SOPInstanceUID    path                    position    odd (with missing="keep")
1a2b...           train/x/y/0001.dcm      -210.5
3c4d...                                   nan         it has no file
"""

import contextlib
import os
import tempfile
from pathlib import Path

from tpukit.essentials.display import InvalidValueError
from tpukit.pe.dicom import undecodable
from tpukit.pe.labels import IMAGE, SERIES, STUDY
from tpukit.pe.missing_images import as_in_headers, check_missing, match_headers
from tpukit.pe.series import (
    NO_ORIENTATION,
    NO_ROOM_FOR_AIR,
    SCALES,
    TILTED,
    TURNED,
    UNNAMED,
    UNSCALED,
    find_files,
    find_places,
    of_other_kinds,
    read_headers,
    series_numbers,
    without_ending,
    without_other_kinds,
)

_FIELDS = {STUDY: "study", SERIES: "series"}  # the field of a header for each column of the labels
_COPY_AGAIN = "copy them again, if they are slices"
# The advice of `check_exams` for facts of `find_places`. It finds gaps and equal positions itself,
# and does not report other facts.
ADVICE = {
    TURNED: "nothing",
    TILTED: "nothing: positions are along the normal of the slices",
    NO_ORIENTATION: "look at one: slices of another plane would be in a wrong order",
    NO_ROOM_FOR_AIR: "look at one: if its lungs are grey, correct RescaleIntercept",
    SCALES: "look at two of them: the same tissue should have the same Hounsfield units",
    UNSCALED: "look at one: without slope and intercept the greys may mean something else",
    UNNAMED: "look at one: only the numbers of a CT scanner are Hounsfield units",
}


def index_dicom(
    labels,
    folder,
    *,
    missing: str = "raise",
    cache=None,
    workers: int | None = None,
    progress: str | None = None,
):
    """Add three columns to the labels: `path`, `position` along the body, and `number`.

    The header identifies the image of a file, so the names of files do not matter. The position is
    in mm, from the feet to the head, by ImagePositionPatient and not by InstanceNumber. Files
    without a row in the labels, and files of another modality than CT, are ignored, and their
    number is printed. To find unusual series, pass the result to `check_exams`.

    Args:
        labels: the table of `read_labels`, or the competition's test.csv. Only the identifiers of
            study, series and image are necessary.
        folder: the folder that contains the study folders, named train in the competition.
        missing: "raise" for a FileNotFoundError if a row has no file. "drop" to leave such rows out
            and print their number. "keep" to return all rows with one more column, `odd`: the
            problem with the image, or "". Of two files with the same image, the first is used.
        cache: a folder that stores the headers, so that the next call, also after an interruption,
            does not read them again. If files were added or removed, all headers are read again. At
            most 20,000 files are examined for changes. None to read all headers in each call.
        workers: the number of processes that read headers; None for one per CPU.
        progress: as for `pack_dicom`.

    Returns:
        A copy of the labels with a new index and the columns `path` (str), `position` (float) and
        `number` (the InstanceNumber, float; 0 if it is missing), sorted by study, series and
        position. If `odd` names a problem, `path` is "", and `position` and `number` are NaN. If
        you pass this table to `pack_dicom` as `labels`, it does not read the headers again.

    Raises:
        FileNotFoundError: the folder does not exist or contains no DICOM file; or a row (with
            "drop": every row) has no file.
        ValueError: `workers` is below 1; or, except with "keep", two files contain the same image,
            an image has no position, or its file has another study or series than the labels.
        ModuleNotFoundError: pydicom is not installed; or, except with "keep", no installed package
            decodes one of the files.
    """
    import numpy as np

    check_missing(missing, "keep")
    keep = missing == "keep"
    names = find_files(folder)
    with contextlib.ExitStack() as stack:
        work = cache or stack.enter_context(tempfile.TemporaryDirectory())
        headers, others = read_headers(
            folder,
            names,
            Path(work),
            workers=workers,
            progress=progress,
            decoders=not keep,  # `keep` reports compressed files as odd
        )
    noticed = notice_others(folder, names, others)
    headers = headers[headers["image"].argsort(kind="stable")]
    if keep:
        headers = headers[np.unique(headers["image"], return_index=True)[1]]
    else:
        _check_once(headers, names)
    call = "index_dicom(labels, folder"
    headers, rows = match_headers(headers, labels, missing, folder=folder, call=call)
    position, facts = find_places(headers, series_numbers(headers))
    for fact, advice in ADVICE.items():
        if fact in facts:
            count, first = facts[fact]
            noticed.append([f"{count:,} {fact}", f"series {first}", advice])
    paths = [os.path.join(folder, names[file]) for file in headers["file"].tolist()]
    if keep:
        # These headers could not be read. If a file has the name of its image, as in the
        # competition, the reason can be given in the row of the image.
        reasons = {
            without_ending(os.path.basename(names[number])): reason for number, reason in others
        }
        table = _with_odd(_no_file(labels, reasons), rows, headers, position=position, paths=paths)
    else:
        _check_identifiers(labels.iloc[rows], headers, names)
        _check_places(position, headers, names)
        numbers = headers["number"].astype(float)
        table = labels.iloc[rows].assign(path=paths, position=position, number=numbers)
    table = table.sort_values([STUDY, SERIES, "position"], kind="stable").reset_index(drop=True)
    table.attrs["noticed"] = noticed
    return table


def notice_others(folder, names: list[str], others: list) -> list[list[str]]:
    """Print how many files are not CT slices; return a row on each kind for `check_exams`."""
    noticed = []
    for files, example in of_other_kinds(names, others):
        noticed.append([files, example, "nothing: only slices of CT are read"])
    rest = without_other_kinds(folder, names, others)
    if rest:
        number, reason = rest[0]
        example = f"{names[number]}: {reason}"
        noticed.append([f"{len(rest):,} files cannot be read as CT slices", example, _COPY_AGAIN])
        print(f"{len(rest)} files in {folder} cannot be read as CT slices, for instance {example}")
    return noticed


def _no_file(labels, reasons: dict[str, str]):
    """Return the labels as if no row had a file: without path and position, and with `odd`.

    Args:
        labels: a row per image.
        reasons: for files that are not CT slices, a dict from the name without its ending to the
            reason.
    """
    import numpy as np

    odd = []
    for uid in labels[IMAGE]:
        if uid in reasons:
            odd.append(f"its file cannot be read as a CT slice: {reasons[uid]}")
        else:
            odd.append("it has no file")
    empty = np.full(len(labels), "", object)
    nowhere = np.full(len(labels), np.nan)
    columns = {"path": empty, "position": nowhere, "number": nowhere}
    return labels.assign(**columns, odd=np.array(odd, object))


def _with_odd(table, rows, headers, *, position, paths: list[str]):
    """Fill in the rows that have a file: path, position and number, or the problem in `odd`.

    Args:
        table: the result of `_no_file`.
        rows: (n,) the row of each header in the table.
        headers: (n,) of `header_type`.
        position: (n,) mm; not finite for a slice without a position.
        paths: the path of each header's file.
    """
    import numpy as np

    is_unscaled = headers["unscaled"]
    scaled_series = headers["series"][~is_unscaled]
    syntaxes = np.unique(headers["syntax"])
    compressed = [syntax for syntax in syntaxes if undecodable(syntax.decode())]
    is_compressed = np.isin(headers["syntax"], compressed)
    # If other slices of the series have a scale, DICOM's default would be another one.
    lacks_scale = is_unscaled & np.isin(headers["series"], scaled_series)
    found = table.iloc[rows]
    problems = {  # if several apply, the last of them is reported
        "it has no place in the body": ~np.isfinite(position),
        "it is compressed, and no installed package decodes it": is_compressed,
        "its file says that it is of another study": _is_elsewhere(found, headers, STUDY),
        "its file says that it is of another series": _is_elsewhere(found, headers, SERIES),
        "it lacks RescaleSlope or RescaleIntercept, which others of its series have": lacks_scale,
    }
    odd = np.full(len(rows), "", object)
    for words, wrong in problems.items():
        odd[wrong] = words
    is_odd = odd != ""
    columns = {
        "path": np.where(is_odd, "", np.array(paths, object)),
        "position": np.where(is_odd, np.nan, position),
        "number": np.where(is_odd, np.nan, headers["number"]),
        "odd": odd,
    }
    for name, values in columns.items():
        whole = table[name].to_numpy(copy=True)
        whole[rows] = values
        table = table.assign(**{name: whole})
    return table


def _is_elsewhere(labels, headers, column: str):
    """Return for each row whether labels and headers differ in a column of IDs, (N,) bool."""
    return as_in_headers(labels[column]) != headers[_FIELDS[column]]


def _check_once(headers, names: list[str]) -> None:
    """Raise ValueError if two headers have the same image; the headers are sorted by image."""
    repeats = headers["image"][1:] == headers["image"][:-1]
    if repeats.any():
        first = int(repeats.argmax())
        both = " and ".join(names[file] for file in headers["file"][first : first + 2])
        raise InvalidValueError(f"two files hold the same image: {both}", fix="delete one of them")


def _check_identifiers(labels, headers, names: list[str]) -> None:
    """Raise ValueError if study or series of an image differs between its file and the labels."""
    for column, field in _FIELDS.items():
        differs = _is_elsewhere(labels, headers, column)
        if differs.any():
            first = int(differs.argmax())
            uid = headers[field][first].decode()
            file = names[headers["file"][first]]
            images = f"{int(differs.sum()):,} images"
            raise InvalidValueError(
                f"{images} have another {column} in their file than in the labels",
                found=f"{uid} in {file}, {labels[column].iloc[first]} in the labels",
                fix=f"copy the files again, or correct {column} in the labels",
            )


def _check_places(position, headers, names: list[str]) -> None:
    """Raise ValueError if an image has no position along the body."""
    import numpy as np

    nowhere = np.flatnonzero(~np.isfinite(position))
    if len(nowhere):
        file = names[headers["file"][nowhere[0]]]
        raise InvalidValueError(
            f"{len(nowhere):,} images have no position in the body",
            found=f"{file} lacks ImagePositionPatient, or its orientation differs from its series",
            fix="leave the rows of these images, such as localizers, out of the labels",
        )
