"""The headers of a folder of DICOM files: read in several processes, and put in the order of the body."""

import functools
import json
import os
from pathlib import Path

from tpukit.essentials.data import run_ahead
from tpukit.essentials.show import NoSuchFile
from tpukit.packs import Names, how_many, look_at, npy, run_in_processes, write_file
from tpukit.pe.dicom import OTHER_MODALITY, NotACTSlice, check_decoder, find_scale, found_in, load_pydicom

CHUNK = 256  # files whose headers are kept together; at most so many are read again after an interruption
READ_AHEAD = 4  # threads per process: on a network drive opening a file takes longer than reading its header
_ENDINGS = (".dcm", ".dicom")
UNSCALED = "slices without RescaleSlope or RescaleIntercept: 1 and 0, DICOM's defaults, are taken"
UNNAMED = "slices without a Modality: they are taken for CT"
TURNED = "series stored mirrored, upside down or lying: their images are turned"
_SAME_ORIENTATION = 0.02  # of each of six numbers from -1 to 1: a scanner writes them with small differences
_TURNS = {  # rows and columns exchanged; then left and right; then up and down
    (False, False, False): None,
    (False, True, False): "FLIP_LEFT_RIGHT",
    (False, False, True): "FLIP_TOP_BOTTOM",
    (False, True, True): "ROTATE_180",
    (True, False, False): "TRANSPOSE",
    (True, True, False): "ROTATE_270",
    (True, False, True): "ROTATE_90",
    (True, True, True): "TRANSVERSE",
}
_TAGS = ["Modality", "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "InstanceNumber", "Rows", "Columns"]
_TAGS += ["ImagePositionPatient", "ImageOrientationPatient", "RescaleSlope", "RescaleIntercept"]


def find_files(folder) -> list[str]:
    """Return the files of a folder that may be DICOM, .dcm or without an ending, in the order of names; there are some.

    A folder in it that cannot be listed is an error, too.
    """

    def give_up(error: OSError):
        raise error

    folder, names, links = os.fspath(folder), [], []
    if not os.path.isdir(folder):
        raise NoSuchFile(f"there is no folder {folder}", fix="pass the folder that holds the series")
    for inner, folders, files in os.walk(folder, onerror=give_up):
        links += [name for name in folders if os.path.islink(os.path.join(inner, name))]
        folders[:] = sorted(name for name in folders if name[0] != "." and name != "__MACOSX")
        above = "" if inner == folder else os.path.relpath(inner, folder) + os.sep
        names += [above + name for name in files if _may_be_dicom(name)]
    if links:
        print(f"{len(links)} links to folders in {folder} are not followed, for instance {links[0]}")
    if not names:
        inside = sorted(os.listdir(folder))[:4] or "an empty folder"
        raise NoSuchFile(f"{folder} holds no DICOM file", found=inside, fix="pass the folder that holds the series")
    return sorted(names)


def _may_be_dicom(name: str) -> bool:
    ending = os.path.splitext(name)[1].lower()
    # A file named by its UID alone has dots, and so seems to have an ending: digits.
    return name[0] != "." and name != "DICOMDIR" and (ending in (*_ENDINGS, "") or ending[1:].isdigit())


def header_type():
    """Return the dtype of what is kept of a header; NaN for a place that is not given.

    `file` is the number of the file, `position` is in mm from the patient's right, front and feet to the centre of the
    first pixel, `orientation` holds the directions of a row and of a column. `unscaled` and `unnamed` lack the
    slope or the intercept, and the modality.
    """
    import numpy

    uids = [(name, "S64") for name in ("study", "series", "image", "syntax")]
    numbers = [("number", "<i8"), ("position", "<f8", 3), ("orientation", "<f8", 6), ("shape", "<i4", 2)]
    return numpy.dtype([("file", "<i8"), *uids, *numbers, ("unscaled", "?"), ("unnamed", "?")])


def read_headers(
    folder, names: list[str], work: Path, workers: int | None, progress: str | None, *, decoders: bool = True
):
    """Read the headers of files, but for those that an earlier call left in `work`.

    `decoders` asks whether what is installed decodes all of them.

    Returns:
        (N,) of `header_type`, and a list of [number of the file, why] of those that are no CT slices. One that is
        damaged counts as such, too; one that is not DICOM, by name and content, does not.

    Raises:
        ImportError: pydicom is not installed, or what decodes one of the files.
    """
    import numpy

    load_pydicom()
    chunks = range(-(-len(names) // CHUNK))
    write_file(work / "files", Names.encode(names))
    _forget_changed(folder, names, work)
    workers = how_many(len(chunks), workers)
    run_in_processes(
        "tpukit.pe.series:_work",
        [[str(folder), str(work), len(names), rank, workers] for rank in range(workers)],
        label="read headers",
        total=len(names),
        done=lambda: min(len(names), CHUNK * len(list(work.glob("headers-*.json")))),
        folder=work,
        progress=progress,
    )
    parts = [numpy.load(_kept(work, chunk, "npy")) for chunk in chunks]
    others = [other for chunk in chunks for other in json.loads(_kept(work, chunk, "json").read_text())]
    headers = numpy.concatenate(parts)
    if decoders:
        for syntax, first in zip(*numpy.unique(headers["syntax"], return_index=True), strict=True):
            check_decoder(syntax.decode(), os.path.join(folder, names[headers["file"][first]]))
    return headers, others


def _forget_changed(folder, names: list[str], work: Path) -> None:
    """Remove the headers of files that are no longer the ones that were read."""
    import numpy

    now, looks = look_at(names, os.fspath(folder)), work / "looks-of-headers.npy"
    if looks.exists():
        for chunk in numpy.unique(now["row"][now != numpy.load(looks)] // CHUNK).tolist():
            _kept(work, chunk, "json").unlink(missing_ok=True)
    write_file(looks, npy(now))


def _kept(work: Path, chunk: int, ending: str) -> Path:
    return work / f"headers-{chunk:06d}.{ending}"


def _work(job: list) -> None:
    """Read every `workers`th chunk, in one of the processes; the list of others is written last."""
    import numpy
    import pydicom

    folder, work, count, rank, workers = job
    names = Names(Path(work) / "files")
    for chunk in range(rank, -(-count // CHUNK), workers):
        kept = _kept(Path(work), chunk, "json")
        if kept.exists() and kept.read_bytes() == b"[]":  # else a damaged file may have been copied again since
            continue
        mine = range(chunk * CHUNK, min((chunk + 1) * CHUNK, count))
        with pydicom.config.disable_value_validation():  # the competition's identifiers are not what the standard wants
            reads = (functools.partial(_read_header, os.path.join(folder, names[number])) for number in mine)
            read = list(zip(mine, run_ahead(reads, READ_AHEAD), strict=True))
        headers = [(number, *header) for number, header in read if isinstance(header, tuple)]
        others = [[number, why] for number, why in read if isinstance(why, str)]
        write_file(_kept(Path(work), chunk, "npy"), npy(numpy.array(headers, header_type())))
        write_file(kept, json.dumps(others).encode())


def _read_header(path: str) -> tuple | str | None:
    """Return what is kept of one header, or why it is no CT slice; None of what is not DICOM, by name and content."""
    import pydicom

    try:
        file = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=_TAGS)
        _, missing = find_scale(file, path)
        uids = [str(file[name].value).encode() for name in _TAGS[1:4]]
        position, orientation = (
            [float(number) for number in file.get(name) or [float("nan")] * count]
            for name, count in (("ImagePositionPatient", 3), ("ImageOrientationPatient", 6))
        )
        if (len(position), len(orientation)) != (3, 6):
            return "its ImagePositionPatient or ImageOrientationPatient is not complete"
        shape = int(file.Rows), int(file.Columns)
        syntax = str(file.file_meta.TransferSyntaxUID).encode()
        number = int(file.get("InstanceNumber") or 0)
    except OSError:
        raise
    except pydicom.errors.InvalidDicomError:
        ours = path.lower().endswith(_ENDINGS)
        return f"not a DICOM file ({os.path.getsize(path):,} bytes)" if ours else None
    except NotACTSlice as error:
        return found_in(error)
    except Exception as error:  # whatever pydicom raises for a damaged header
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return *uids, syntax, number, position, orientation, shape, bool(missing), not file.get("Modality")


def without_others(folder, names: list[str], others: list) -> list:
    """Say which files another kind of scanner made, and return the rest of those that are no CT slices."""
    for fact in of_other_modalities(names, others):
        print(f"left out {fact[0]} in {folder}, for instance {fact[1]}: only CT has Hounsfield units")
    return [other for other in others if not other[1].startswith(OTHER_MODALITY)]


def of_other_modalities(names: list[str], others: list) -> list[tuple[str, str]]:
    """Return how many files there are of each modality but CT, in words, and an example."""
    found = {}
    for number, why in others:
        if why.startswith(OTHER_MODALITY):
            found.setdefault(why, []).append(names[number])
    return [(f"{len(files):,} files of {why}", files[0]) for why, files in found.items()]


def arrange(headers) -> tuple:
    """Order slices by series, and along the body in each; return the order, and sentences on what was noticed.

    Along the body is along the normal of the slices, from the feet to the head where they are axial, whichever way they
    were numbered or the patient lay. Slices without a place, or of another orientation than most of their series, come
    first, in the order of their numbers.
    """
    import numpy

    _, series = numpy.unique(headers["series"], return_inverse=True)
    along, noticed = find_places(headers, series)
    order = numpy.lexsort((headers["number"], along, series))
    return order, [f"{count:,} {what}; series {first}" for what, (count, first) in noticed.items()]


def find_places(headers, series) -> tuple:
    """Return the (N,) places along the body in mm, -inf where there is none; and what to notice, of which series first.

    `series` is the number of each header's series.
    """
    import numpy

    along, noticed = numpy.full(len(headers), -numpy.inf), {}
    for member in numpy.split(numpy.argsort(series, kind="stable"), numpy.bincount(series).cumsum()[:-1]):
        along[member], found = _along_body(headers[member])
        for what, count in found.items():
            if count:
                before, first = noticed.get(what, (0, headers["series"][member[0]].decode()))
                noticed[what] = before + int(count), first
    return along, noticed


def _along_body(slices) -> tuple:
    """Return each slice's place along the body in mm, -inf where there is none, for one series; and what to notice."""
    import numpy

    place = numpy.full(len(slices), -numpy.inf)
    given = numpy.isfinite(slices["position"]).all(1) & numpy.isfinite(slices["orientation"]).all(1)
    unscaled = sum(slices["unscaled"])
    noticed = {
        "series of a single slice": len(slices) == 1,
        "series whose slices differ in size": len(numpy.unique(slices["shape"], axis=0)) > 1,
        UNSCALED: unscaled,
        UNNAMED: sum(slices["unnamed"]),
        "slices without a place: they are in the order of their InstanceNumber, before the others": sum(~given),
    }
    if not given.any():
        return place, noticed
    directions = _usual_orientation(slices["orientation"][given])
    same = (abs(slices["orientation"][given] - directions) < _SAME_ORIENTATION).all(1)
    mine = numpy.flatnonzero(given)[same]
    normal = numpy.cross(directions[:3], directions[3:])
    normal *= numpy.sign(normal[abs(normal).argmax()])  # to the left, the back or the head, as DICOM's axes
    place[mine] = slices["position"][mine] @ normal
    noticed["slices of another orientation than their series, such as a localizer"] = (~same).sum()
    noticed[TURNED] = turn(directions) is not None
    return place, noticed | _steps(place[mine], slices["number"][mine])


def _steps(place, number) -> dict:
    """Return what to notice about the steps from slice to slice of one series."""
    import numpy

    steps = numpy.diff(numpy.sort(place))
    apart = steps > 0.01  # mm; a place is rounded when it is written
    if not apart.any():
        return {"slices at the place of another one of their series": len(steps)}
    usual = numpy.quantile(steps[apart], 0.5, method="lower")  # as in exam_check
    wide = steps[steps > 1.5 * usual]
    descending = numpy.ptp(number) > 0 and numpy.corrcoef(place, number)[0, 1] < 0
    return {
        "slices at the place of another one of their series": (~apart).sum(),
        "slices are missing between others of their series": (numpy.round(wide / usual) - 1).sum(),
        "series numbered from the head to the feet, from the left or from the back: put in order": descending,
    }


def _usual_orientation(orientations):
    """Return the (6,) directions that most of (N, 6) have, whichever digits they were rounded to."""
    import numpy

    _, which, counts = numpy.unique(orientations.round(2), axis=0, return_inverse=True, return_counts=True)
    return orientations[which.reshape(-1) == counts.argmax()].mean(0)


def turn(orientation) -> str | None:
    """Return which of Pillow's transpositions puts an axial image of this orientation upright; None where it is.

    Upright is as radiologists look: the patient's back below, the left side on the right. A patient who lies on the
    belly or on a side, or feet first, may be stored otherwise, and left and right are labels. Other planes stay as they
    are.
    """
    (left, back), (down_left, down_back) = orientation[:2], orientation[3:5]  # of a row; of a column
    if abs(left * down_back - back * down_left) < 0.7:  # of 1 where the slice is across the body
        return None
    lying = abs(back) + abs(down_left) > abs(left) + abs(down_back)
    across, down = (down_left, back) if lying else (left, down_back)
    return _TURNS[lying, across < 0, down < 0]
