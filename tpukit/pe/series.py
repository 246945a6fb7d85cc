"""Read the headers of a folder of DICOM files, and sort the slices of each series along the body.

`find_files` lists the files that may be DICOM. `read_headers` reads them in several processes,
makes one record of `header_type` per slice, and stores the records on disk in chunks of 256 files.
`arrange` returns the order along the body.

The position of a slice along the body is its ImagePositionPatient, projected on the normal of the
slices, in mm. For axial slices that is the coordinate z, from the feet to the head.
"""

import functools
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tpukit.datasets import (
    Names,
    how_many,
    look_at,
    npy,
    run_in_processes,
    whole_number,
    write_file,
)
from tpukit.essentials.data import run_ahead
from tpukit.essentials.display import PathNotFoundError
from tpukit.pe.dicom import (
    OTHER_KINDS,
    NotACTSliceError,
    Scale,
    check_decoder,
    find_scale,
    found_in,
    is_dicom,
    load_pydicom,
    open_dataset,
)
from tpukit.pe.exam_check import SAME, WIDE

# The headers of this many files are stored together; an interrupted process loses at most these.
CHUNK = 256
READ_AHEAD = 4  # threads per process; on a network drive, opening a file takes longer than reading
# Peculiarities of series, in the words in which `pack_dicom` prints and records them.
UNSCALED = "slices without RescaleSlope or RescaleIntercept: 1 and 0, DICOM's defaults, are taken"
UNNAMED = "slices without a Modality: they are treated as CT"
TURNED = "series stored mirrored, upside down or lying: their images are turned"
_SINGLE = "series of a single slice"
_SIZES = "series whose slices differ in size"
NO_ROOM_FOR_AIR = "slices whose values cannot hold air; RescaleIntercept is probably wrong"
SCALES = "series whose slices differ in RescaleSlope or RescaleIntercept"
NO_ORIENTATION = "slices without an orientation: axial slices are assumed"
TILTED = "series with a tilted gantry: the slices are not stacked along their normal"
_NO_PLACE = "slices without a position: they come first, in the order of their InstanceNumber"
_OTHER_ORIENTATION = "slices of another orientation than their series, such as a localizer"
_SAME_PLACE = "slices at the same position as another slice of their series"
_MISSING = "slices are missing between others of their series"
_SPACING = "series whose spacing changes, though their slices are numbered without a gap"
_DESCENDING = "series numbered from the head to the feet, the left or the back: put in order"

# Files with these endings are read as DICOM. Of other files, the first 132 bytes decide.
DICOM_ENDINGS = (".dcm", ".dicom")
_AXIAL_DIRECTIONS = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)  # a row to the left, a column to the back
# HU. A slice whose lowest possible value is higher than this cannot have air, which is -1000 HU.
_HIGHEST_FOR_AIR = -500.0
_TILT = 0.5  # mm; the slices of a series may be shifted this far at right angles to their normal
# Each of the six numbers of an orientation, -1 to 1, may differ this much: scanners round them.
_SAME_ORIENTATION = 0.02
# An image is axial if its normal's component along the body is at least this; 1 is exactly axial.
_AXIAL = 0.7
# Keys: rows and columns exchanged; left and right mirrored; up and down mirrored.
_TURNS = {
    (False, False, False): None,
    (False, True, False): "FLIP_LEFT_RIGHT",
    (False, False, True): "FLIP_TOP_BOTTOM",
    (False, True, True): "ROTATE_180",
    (True, False, False): "TRANSPOSE",
    (True, True, False): "ROTATE_270",
    (True, False, True): "ROTATE_90",
    (True, True, True): "TRANSVERSE",
}
_IDS = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
# pydicom parses only these elements, to save time: a header has hundreds.
_TAGS = [
    *_IDS,
    "Modality",
    "InstanceNumber",
    "Rows",
    "Columns",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "RescaleSlope",
    "RescaleIntercept",
    "PhotometricInterpretation",
    "RescaleType",
    "ImageType",
    "SOPClassUID",
    "PixelRepresentation",
    "BitsStored",
    "NumberOfFrames",
    "ModalityLUTSequence",
]


def find_files(folder) -> list[str]:
    """Return the sorted paths, relative to a folder, of all DICOM files below it.

    Files that end in .dcm or .dicom are returned. Other files are returned if their first 132 bytes
    are those of DICOM. The number of all remaining files is printed for each ending. Hidden
    files and folders, __MACOSX and DICOMDIR are ignored. Links to folders are not followed.

    Raises:
        FileNotFoundError: the folder does not exist, or it contains no DICOM file.
        OSError: a folder in it cannot be listed, or a file without such an ending cannot be read.
    """
    folder = os.fspath(folder)
    if not os.path.isdir(folder):
        raise PathNotFoundError(
            f"there is no folder {folder}",
            fix="pass the folder that holds the series",
        )
    names = []
    others = []
    files, links = _all_files(folder)
    for name in files:
        if _is_dicom_file(os.path.join(folder, name)):
            names.append(name)
        else:
            others.append(name)
    _print_left_out(folder, others, links)
    if not names:
        raise PathNotFoundError(
            f"{folder} holds no DICOM file",
            found=sorted(os.listdir(folder))[:4] or "an empty folder",
            fix="pass the folder that holds the series",
        )
    return sorted(names)


def _all_files(folder: str) -> tuple[list[str], list[str]]:
    """Return all files below a folder that are not hidden, and all links to folders."""

    def give_up(error: OSError):
        raise error

    found = []
    links = []
    # Without `onerror`, os.walk would silently skip folders that cannot be listed.
    for inner, folders, files in os.walk(folder, onerror=give_up):
        links += [name for name in folders if os.path.islink(os.path.join(inner, name))]
        folders[:] = sorted(name for name in folders if name[0] != "." and name != "__MACOSX")
        above = "" if inner == folder else os.path.relpath(inner, folder) + os.sep
        found += [above + name for name in files if name[0] != "." and name != "DICOMDIR"]
    return found, links


def _print_left_out(folder: str, others: list[str], links: list[str]) -> None:
    """Print the number of files that are not DICOM, and of links to folders."""
    if others:
        endings = _by_ending(others)
        print(f"left out {len(others):,} files in {folder} that are not DICOM: {endings}")
    if links:
        example = links[0]
        print(f"{len(links)} links to folders in {folder} are not followed, for instance {example}")


def without_ending(name: str) -> str:
    """Return the name of a file without ".dcm" or ".dicom"; any other name does not change.

    Many exports name a file by its identifier, such as "1.2.840.4", whose last part is no ending.
    """
    for ending in DICOM_ENDINGS:
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return name


def _is_dicom_file(path: str) -> bool:
    # The ending first, because it takes time to open a file.
    if path.lower().endswith(DICOM_ENDINGS):
        return True
    return os.path.isfile(path) and is_dicom(path)


def _by_ending(names: list[str]) -> str:
    """Return the counts of the five most frequent endings: "12 .csv, 1 without an ending"."""
    endings = [os.path.splitext(name)[1].lower() or "without an ending" for name in names]
    return ", ".join(f"{count:,} {ending}" for ending, count in Counter(endings).most_common(5))


def header_type(longest: int = 64):
    """Return the numpy dtype of a stored header.

    The fields are:

    - `file`: the number of the file.
    - `study`, `series`, `image`, `syntax`: the identifiers of study, series, image and transfer
      syntax.
    - `number`: the InstanceNumber; 0 if it is missing.
    - `position`: the centre of the first pixel in mm, toward the patient's left, back and head; NaN
      if it is missing.
    - `orientation`: the directions of a row and of a column; NaN if they are missing.
    - `shape`: rows and columns.
    - `scale`: slope and intercept.
    - `airless`: True if the lowest possible value is too high for air.
    - `unscaled`: True if slope or intercept is missing.
    - `unnamed`: True if the modality is missing.

    Args:
        longest: the bytes of the longest identifier. DICOM allows 64, but some tools write more.
    """
    import numpy

    uids = [(name, f"S{longest}") for name in ("study", "series", "image", "syntax")]
    return numpy.dtype(
        [
            ("file", "<i8"),
            *uids,
            ("number", "<i8"),
            ("position", "<f8", 3),
            ("orientation", "<f8", 6),
            ("shape", "<i4", 2),
            ("scale", "<f8", 2),
            ("airless", "?"),
            ("unscaled", "?"),
            ("unnamed", "?"),
        ]
    )


class _Header(NamedTuple):
    """The fields of `header_type` after `file`, in its order."""

    study: bytes
    series: bytes
    image: bytes
    syntax: bytes
    number: int
    position: list[float]
    orientation: list[float]
    shape: tuple[int, int]
    scale: tuple[float, float]
    airless: bool
    unscaled: bool
    unnamed: bool


def read_headers(
    folder,
    names: list[str],
    work: Path,
    workers: int | None,
    progress: str | None,
    *,
    decoders: bool = True,
):
    """Read the headers of DICOM files; reuse those that an earlier call has stored in `work`.

    Args:
        folder: the folder with the files.
        names: the paths of the files, relative to the folder, as `find_files` returns them.
        work: the folder to store headers in, one file per chunk; a later call reuses them.
        workers: the number of processes; None for one per CPU.
        progress: as for `launch`.
        decoders: True to check that an installed package decodes each transfer syntax.

    Returns:
        The headers, (N,) of dtype `header_type`; and a list with [number of the file, reason] for
        each file that is damaged or is not a CT slice.

    Raises:
        ModuleNotFoundError: pydicom, or a decoder that these files need, is not installed.
        OSError: a file cannot be read, as on a network drive that disconnected.
    """
    import numpy

    load_pydicom()
    chunks = range(math.ceil(len(names) / CHUNK))
    work.mkdir(parents=True, exist_ok=True)
    # The chunks of an earlier call are valid only for the same files.
    _forget_changed(folder, names, work)
    workers = how_many(len(chunks), whole_number("workers", workers, 1))
    run_in_processes(
        _read_chunks,
        [[str(folder), str(work), len(names), rank, workers] for rank in range(workers)],
        label="read headers",
        total=len(names),
        done=lambda: min(len(names), CHUNK * len(list(work.glob("headers-*.json")))),
        folder=work,
        progress=progress,
    )
    headers = numpy.concatenate([numpy.load(_chunk_file(work, chunk, "npy")) for chunk in chunks])
    others = []
    for chunk in chunks:
        others += json.loads(_chunk_file(work, chunk, "json").read_text())
    if decoders:
        # One file of each transfer syntax is enough to find a missing decoder, before hours of
        # packing.
        syntaxes, first = numpy.unique(headers["syntax"], return_index=True)
        for syntax, file in zip(syntaxes, headers["file"][first], strict=True):
            check_decoder(syntax.decode(), os.path.join(folder, names[file]))
    return headers, others


def _forget_changed(folder, names: list[str], work: Path) -> None:
    """Remove the chunks of files that have changed since their headers were read.

    Of more than 20,000 files, at most 20,000 are compared, evenly spread; see `look_at`.
    """
    import numpy

    encoded = Names.encode(names)
    file = work / "files"
    if not file.exists() or file.read_bytes() != encoded:
        # The list of files is another one, so the numbers in the chunks are those of other files.
        for other in [*work.glob("headers-*"), *work.glob("looks-of-headers.npy")]:
            other.unlink()
        write_file(file, encoded)
    looks = look_at(names, os.fspath(folder))
    looks_file = work / "looks-of-headers.npy"
    if looks_file.exists():
        changed = looks["row"][looks != numpy.load(looks_file)]  # `row` is the number of the file
        for chunk in numpy.unique(changed // CHUNK).tolist():
            _chunk_file(work, chunk, "json").unlink(missing_ok=True)
    write_file(looks_file, npy(looks))


def _chunk_file(work: Path, chunk: int, ending: str) -> Path:
    return work / f"headers-{chunk:06d}.{ending}"


def _read_chunks(job: list) -> None:
    """Read the chunks of one process, and store them; `run_in_processes` calls it.

    The process of rank r reads the chunks r, r + workers, r + 2 * workers and so on. Of each chunk
    it writes the headers first, then the list of other files, which marks a complete chunk.
    """
    import numpy
    import pydicom

    folder, work, count, rank, workers = job
    work = Path(work)
    names = Names(work / "files")
    for chunk in range(rank, math.ceil(count / CHUNK), workers):
        done = _chunk_file(work, chunk, "json")
        # A chunk with files that are not CT slices is read again: the user may have replaced them.
        if done.exists() and done.read_bytes() == b"[]":
            continue
        numbers = range(chunk * CHUNK, min((chunk + 1) * CHUNK, count))
        paths = [os.path.join(folder, names[number]) for number in numbers]
        # The identifiers of the RSNA competition's files are not valid by the standard.
        with pydicom.config.disable_value_validation():
            reads = [functools.partial(_read_header, path) for path in paths]
            results = list(zip(numbers, run_ahead(reads, READ_AHEAD), strict=True))
        headers = [(number, *read) for number, read in results if isinstance(read, _Header)]
        others = [[number, reason] for number, reason in results if isinstance(reason, str)]
        longest = 64  # the standard's limit for identifiers; some exports have longer ones
        for header in headers:
            longest = max(longest, *map(len, header[1:5]))
        stored = numpy.array(headers, header_type(longest))
        write_file(_chunk_file(work, chunk, "npy"), npy(stored))
        write_file(done, json.dumps(others).encode())


def _read_header(path: str) -> _Header | str:
    """Return the header of a file, or the reason why the file is not a CT slice.

    Raises:
        ModuleNotFoundError: pydicom is not installed.
        OSError: the file cannot be read, as on a network drive that disconnected.
    """
    import pydicom

    try:
        file = open_dataset(path, stop_before_pixels=True, specific_tags=_TAGS)
        scale, missing = find_scale(file, path)
        position = _numbers(file, "ImagePositionPatient", count=3)
        orientation = _numbers(file, "ImageOrientationPatient", count=6)
        if len(position) != 3 or len(orientation) != 6:
            return "its ImagePositionPatient or ImageOrientationPatient is not complete"
        return _Header(
            *[str(file[name].value).encode() for name in _IDS],
            syntax=str(file.file_meta.TransferSyntaxUID).encode(),
            number=int(file.get("InstanceNumber") or 0),
            position=position,
            orientation=orientation,
            shape=(int(file.Rows), int(file.Columns)),
            scale=(scale.slope, scale.intercept),
            airless=_lowest(scale) > _HIGHEST_FOR_AIR,
            unscaled=bool(missing),
            unnamed=not file.get("Modality"),
        )
    except OSError:
        if os.path.islink(path) and not os.path.exists(path):
            return "a symbolic link to a file that does not exist"
        raise  # as from a network drive; the file is not damaged
    except pydicom.errors.InvalidDicomError:
        return f"not a DICOM file ({os.path.getsize(path):,} bytes)"
    except NotACTSliceError as error:
        return found_in(error)
    except Exception as error:  # pydicom raises many types for a damaged header
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _lowest(scale: Scale) -> float:
    """Return the lowest value in Hounsfield units that the pixels of a slice can have."""
    if scale.table is not None:
        return min(scale.table.entries)
    if scale.signed:
        return -math.inf
    return scale.intercept


def _numbers(file, name: str, *, count: int) -> list[float]:
    """Return the numbers of a DICOM element; `count` times NaN if it is missing or empty."""
    return [float(number) for number in file.get(name) or [math.nan] * count]


def without_other_kinds(folder, names: list[str], others: list) -> list:
    """Print the number of files of `OTHER_KINDS`; return the entries of the remaining files.

    The remaining files are damaged, are incomplete, are not DICOM, or have several frames.

    Args:
        folder: the folder, for the text.
        names: the paths of all files.
        others: the list that `read_headers` returns.
    """
    for files, example in of_other_kinds(names, others):
        reason = "only slices of CT have Hounsfield units"
        print(f"left out {files} in {folder}, for instance {example}: {reason}")
    return [other for other in others if not other[1].startswith(OTHER_KINDS)]


def of_other_kinds(names: list[str], others: list) -> list[tuple[str, str]]:
    """Return a pair of texts for each of `OTHER_KINDS` that occurs: count and example."""
    found = {}
    for number, reason in others:
        if reason.startswith(OTHER_KINDS):
            found.setdefault(reason, []).append(names[number])
    return [(f"{len(files):,} files of {kind}", files[0]) for kind, files in found.items()]


def without_copies(headers):
    """Return one header per image, and print the number of files with a second copy of an image."""
    import numpy

    _, first = numpy.unique(headers["image"], return_index=True)
    copies = len(headers) - len(first)
    if copies:
        print(f"files left out, because another file has the same image: {copies:,}")
    return headers[numpy.sort(first)]


def series_numbers(headers):
    """Return the number of each header's series, from 0.

    A series is identified by study and series together, because some anonymisers give all series
    the same SeriesInstanceUID.
    """
    import numpy

    study = numpy.unique(headers["study"], return_inverse=True)[1]
    uids, series = numpy.unique(headers["series"], return_inverse=True)
    # One integer per pair, because numpy sorts integers many times as fast as pairs of texts.
    return numpy.unique(study * len(uids) + series, return_inverse=True)[1]


def arrange(headers) -> tuple:
    """Sort slices by series, and within each series along the body.

    The order does not depend on how the patient lay. InstanceNumber decides only between slices at
    equal positions. Slices without a position, or with another orientation than most slices of the
    series, come first in the series, sorted by InstanceNumber.

    Args:
        headers: (N,) of `header_type`.

    Returns:
        The order, (N,) indices of headers; and sentences about anything unusual.
    """
    import numpy

    series = series_numbers(headers)
    along, noticed = find_places(headers, series)
    order = numpy.lexsort((headers["number"], along, series))
    sentences = [f"{count:,} {fact}; series {first}" for fact, (count, first) in noticed.items()]
    return order, sentences


def find_places(headers, series) -> tuple:
    """Return the position of each slice along the body, and the facts that are unusual.

    Args:
        headers: (N,) of `header_type`.
        series: (N,) the number of each header's series, from 0.

    Returns:
        The positions, (N,) in mm; -inf for a slice without a position, or with another orientation
        than most slices of its series. Also a dict: for each unusual fact, the number of its
        occurrences and the first series that has it.
    """
    import numpy

    along = numpy.full(len(headers), -numpy.inf)
    noticed = {}
    ends = numpy.bincount(series).cumsum()[:-1]
    for rows in numpy.split(numpy.argsort(series, kind="stable"), ends):
        along[rows], found = _along_body(headers[rows])
        for fact, count in found.items():
            if count:
                name = headers["series"][rows[0]].decode()
                before, first = noticed.get(fact, (0, name))
                noticed[fact] = (before + int(count), first)
    return along, noticed


def _along_body(slices) -> tuple:
    """Return the positions of the slices of one series in mm, and the count of each fact."""
    import numpy

    place = numpy.full(len(slices), -numpy.inf)
    has_orientation = numpy.isfinite(slices["orientation"]).all(1)
    orientations = numpy.where(has_orientation[:, None], slices["orientation"], _AXIAL_DIRECTIONS)
    has_place = numpy.isfinite(slices["position"]).all(1)
    noticed = {
        _SINGLE: len(slices) == 1,
        _SIZES: len(numpy.unique(slices["shape"], axis=0)) > 1,
        UNSCALED: sum(slices["unscaled"]),
        UNNAMED: sum(slices["unnamed"]),
        NO_ROOM_FOR_AIR: sum(slices["airless"]),
        SCALES: len(numpy.unique(slices["scale"], axis=0)) > 1,
        NO_ORIENTATION: sum(has_place & ~has_orientation),
        _NO_PLACE: sum(~has_place),
    }
    if not has_place.any():
        return place, noticed
    directions = _usual_orientation(orientations[has_place])
    is_usual = (abs(orientations[has_place] - directions) < _SAME_ORIENTATION).all(1)
    rows = numpy.flatnonzero(has_place)[is_usual]
    normal = numpy.cross(directions[:3], directions[3:])
    # The sign of the largest component decides, so that the normal points to the left, the back or
    # the head, as the axes of DICOM do.
    normal *= numpy.sign(normal[abs(normal).argmax()])
    place[rows] = slices["position"][rows] @ normal
    noticed[_OTHER_ORIENTATION] = (~is_usual).sum()
    noticed[TURNED] = turn(directions) is not None
    noticed[TILTED] = _is_tilted(slices["position"][rows], normal)
    return place, noticed | _steps(place[rows], slices["number"][rows])


def _is_tilted(positions, normal) -> bool:
    """Return whether the slices at positions (N, 3) are stacked in another direction than normal.

    On a scanner with a tilted gantry, the slices are stacked along the table and not along their
    normal. The first and the last slice are compared.
    """
    import numpy

    along = positions @ normal
    path = positions[along.argmax()] - positions[along.argmin()]
    return bool(numpy.linalg.norm(path - (path @ normal) * normal) > _TILT)


def _steps(place, number) -> dict:
    """Return the number of occurrences of each fact about the steps between slices.

    Args:
        place: (N,) the positions of the slices of a series, in mm.
        number: (N,) their InstanceNumber.
    """
    import numpy

    steps = numpy.diff(numpy.sort(place))
    is_step = steps > SAME
    if not is_step.any():
        return {_SAME_PLACE: len(steps)}
    usual = numpy.quantile(steps[is_step], 0.5, method="lower")  # as in exam_check
    wide = steps[steps > WIDE * usual]
    has_numbers = numpy.ptp(number) > 0
    # If the numbers have no gap, the scanner has changed its spacing, and no slice is missing.
    is_numbered_through = (numpy.diff(numpy.sort(number)) == 1).all()
    missing = (numpy.round(wide / usual) - 1).sum()
    return {
        _SAME_PLACE: (~is_step).sum(),
        _MISSING: 0 if is_numbered_through else missing,
        _SPACING: is_numbered_through and missing > 0,
        _DESCENDING: has_numbers and numpy.corrcoef(place, number)[0, 1] < 0,
    }


def _usual_orientation(orientations):
    """Return the most frequent of (N, 6) orientations, as the (6,) mean of nearly equal ones."""
    import numpy

    rounded = orientations.round(2)
    kinds, counts = numpy.unique(rounded, axis=0, return_counts=True)
    is_most_frequent = (rounded == kinds[counts.argmax()]).all(1)
    return orientations[is_most_frequent].mean(0)


def turn(orientation) -> str | None:
    """Return the Pillow transposition that turns an axial image upright; None if it is upright.

    Upright is the view of radiologists: the patient's back is at the bottom, and the patient's left
    on the right side of the image. If a patient lies on the belly or on a side, or feet first, the
    image in the file may be mirrored or turned. Labels name left and right, so such images must be
    turned. For images of other planes the result is None.

    Args:
        orientation: (6,) the directions of a row and of a column, each as (left, back, head).
    """
    row_left, row_back = orientation[:2]
    column_left, column_back = orientation[3:5]
    # The component of the normal along the body: the cross product's third number.
    if abs(row_left * column_back - row_back * column_left) < _AXIAL:
        return None
    is_lying = abs(row_back) + abs(column_left) > abs(row_left) + abs(column_back)
    if is_lying:
        return _TURNS[True, column_left < 0, row_back < 0]
    return _TURNS[False, row_left < 0, column_back < 0]
