"""A folder of DICOM series becomes a pack: windows as channels, or neighbouring slices, or Hounsfield units."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tpukit.datasets import (
    PackOptions,
    PackSource,
    check_arguments,
    fact,
    npy,
    pack_described,
    row_type,
    share_of,
    whole_number,
    write_file,
)
from tpukit.essentials.display import InvalidValueError, SystemFailureError
from tpukit.pe.ct import WINDOWS
from tpukit.pe.dicom import load_pydicom
from tpukit.pe.dicom_slices import SliceWeight
from tpukit.pe.labels import LABELS, check_columns
from tpukit.pe.missing_images import match_headers
from tpukit.pe.series import (
    arrange,
    find_files,
    header_type,
    read_headers,
    series_numbers,
    without_others,
)

_SHARD_SIZE = 4096  # slices per file
_DEFAULTS = PackOptions()


def pack_dicom(
    folder,
    to,
    labels=None,
    *,
    window: str | tuple[float, float] | None = None,
    crop: str | None = None,
    size: int | Sequence[int] = 256,
    form: str = "jpeg",
    quality: int = 85,
    missing: str = "raise",
    damaged: str | float = "raise",
    progress: str | None = None,
    options: PackOptions = _DEFAULTS,
):
    """Pack a folder of CT series into records, one for each slice, without a copy of the DICOM files in between.

    The headers are read first, in all processes, then every slice once. A series lies in one piece, from the feet to
    the head by ImagePositionPatient; images that are stored mirrored, upside down or lying are turned. Files of another
    modality than CT are left out. What is unusual is printed. Interrupted at any moment, the same call goes on where it
    stopped; when all is packed it only looks whether the files have the names and sizes that were packed.

    A slice of 256 pixels took 18.6 kB as JPEG where it was measured, on phantoms, which are noisier than patients: 33
    GB for the competition's 1,790,594. As int16 it takes 131 kB, 235 GB, and at 128 pixels 33 kB, 59 GB.

    Args:
        folder: whatever is in it and in its sub-folders and ends in .dcm or in nothing, each one slice.
        to: a new or empty folder, or one where the same pack was begun; or several, as for `tpukit.pack`.
        labels: as `read_labels` returns them, or some rows: the ten LABELS, joined by SOPInstanceUID; the images
            without a row are left out, which is said. None packs all slices without labels. As `index_dicom` returns
            them, they say which file each image is and where it lies: no header is read again.
        window: None for the lung, embolism and mediastinal windows as red, green and blue; or one window, by name
            ("lung", "embolism", "mediastinum") or as (level, width) in Hounsfield units, of the slice below, the slice
            itself and the one above. At the end of a series the slice stands for its neighbour.
        crop: None for whole slices; "lungs" cuts every slice of a series to one box around its lungs, see `lung_box`,
            found in 16 slices along the body. A series in which none is found stays whole.
        size: height and width in pixels, by Pillow's bilinear filter; the aspect is not kept. Or several sizes, of
            which the first is taken that fits into one of the folders: `PackedImages.shape` has it.
        form: "jpeg", or "int16" for Hounsfield units: `hounsfield` gives them back on the device.
        quality: of the JPEGs, 1 to 95. The colours are not halved, as they are three images: at 85 that is nearer to
            the original in each than 90 with halved colours, and 10 % larger.
        missing: "raise" if a row has no file, or "drop" such rows and print how many.
        damaged: "raise"; or "skip" to leave out what is no whole slice, and with one window its neighbours, up to a
            tenth of all, or the share that may be left out, as 0.5; `PackedImages.skipped` lists those of them whose header
            is whole.
        progress: as for `tpukit.pack`.
        options: `PackOptions(shard_size, workers)`; the images have no other order and no other window.

    Returns:
        The finished `PackedImages`: (3, size, size) uint8 for each slice, as int16 (2, size, size). Its `rows` are those of
        `labels`, or count the slices in their order; its groups are the studies.

    Raises:
        ValueError: an argument is not as above, none of the files is a CT slice, or more slices are damaged than may
            be left out.
        FileNotFoundError: there is no DICOM file in the folder, or a row has none.
        OSError: a file is damaged, named in the message; or the disk is full.
        FileExistsError: `to` holds another pack, or somebody's files.
        ImportError: pydicom, what it needs to decode these files, or array_record is not installed.
    """
    import numpy

    sizes = [whole_number("size", one, 1) for one in (size if isinstance(size, Sequence) else [size])]
    check_arguments(damaged, options, size=sizes[0])
    options = _own_options(options)
    load_pydicom()
    if form not in ("jpeg", "int16") or missing not in ("raise", "drop") or not 1 <= quality <= 95:
        raise ValueError(
            'form is "jpeg" or "int16", missing is "raise" or "drop", quality is 1 to 95; '
            f"got form={form!r}, missing={missing!r}, quality={quality}"
        )
    if crop not in (None, "lungs"):
        raise ValueError(f'crop is None or "lungs", got {crop!r}')
    if form == "int16" and window is not None:
        raise InvalidValueError('form="int16" stores Hounsfield units, which need no window', fix="leave window out")
    if labels is not None:
        fix = "labels=tpukit.pe.read_labels(path), or some of its rows"
        check_columns(labels, ("SOPInstanceUID", *LABELS), "the labels have", fix=fix)
    placed = _indexed(labels, folder)
    if placed is not None:
        names = sorted(placed)
    else:
        places = [to] if isinstance(to, str | os.PathLike) else to
        inside = tuple(os.path.relpath(place, folder) + os.sep for place in places)
        names = [name for name in find_files(folder) if not name.startswith(inside)]
    settings = {"pixels": sizes[0], "window": _window(window), "form": form}
    if form == "jpeg":
        settings["quality"] = whole_number("quality", quality, 1)
    if crop is not None:
        settings["crop"] = crop
    if labels is not None:
        settings["missing"] = missing

    def look(work: Path) -> PackSource:
        if any(work.parent.glob("*.array_record")):  # a file copied again since changes neither rows nor order
            return replace(source, group_names=json.loads((work / "studies.json").read_text()))
        (work / "rows.npy").unlink(missing_ok=True)  # nothing is packed: files that have changed are arranged anew
        if placed is not None:
            headers, order = _of_index(labels, names, placed)
            return _lay_out(source, names, labels, headers, numpy.arange(len(labels)), order, work)
        headers, others = read_headers(folder, names, work, options.workers, progress)
        _tell_others(folder, names, others, share_of(damaged), len(headers))
        headers, rows = _without_copies(headers), None
        if labels is not None:
            headers, rows = match_headers(headers, labels, missing, folder=folder, call="pack_dicom(...")
        order, noticed = arrange(headers)
        for sentence in noticed:
            print(sentence)
        return _lay_out(source, names, labels, headers, rows, order, work)

    source = PackSource(
        _facts(names, labels),
        [] if labels is None else list(LABELS),
        [],
        [],
        root=os.fspath(folder),
        look=look,
        shuffled=False,
        reader="tpukit.pe.dicom_slices:Slices",
        settings=settings,
        weight=SliceWeight(folder, names, len(names) if labels is None else min(len(names), len(labels))),
    )
    otherwise = [{**settings, "pixels": one} for one in sizes[1:]]
    return pack_described(
        source, to, size=None, damaged=damaged, progress=progress, options=options, otherwise=otherwise
    )


def _own_options(options: PackOptions) -> PackOptions:
    """Return the options with this pack's shard size; ValueError for those that mean nothing here."""
    for name in ("image", "window", "seed"):
        value = getattr(options, name)
        if value != getattr(_DEFAULTS, name):
            raise InvalidValueError(
                f"pack_dicom has no PackOptions({name}=...), got {value!r}",
                found="slices lie in the order of their series, and are taken from DICOM files",
                fix="pack_dicom(..., window=...) selects a CT window" if name == "window" else f"leave {name} out",
            )
    return options if options.shard_size is not None else replace(options, shard_size=_SHARD_SIZE)


def _window(window) -> list[float] | None:
    """Return level and width, None for the three windows."""
    if window is None:
        return None
    try:
        level, width = map(float, WINDOWS.get(window, window) if isinstance(window, str) else window)
    except (TypeError, ValueError):
        level = width = 0
    if not width > 0:
        raise ValueError(f"window is one of {', '.join(WINDOWS)}, or (level, width) in HU, got {window!r}")
    return [level, width]


def _facts(names: list[str], labels) -> dict:
    """Return what tells this source from others."""
    files = "\0".join(names).encode(errors="surrogateescape")
    facts = {"files": fact(f"{len(names):,} files, {names[0]} to {names[-1]}", files), "labels": fact("no labels", b"")}
    if labels is not None:
        values = "\0".join(labels["SOPInstanceUID"]).encode() + labels[list(LABELS)].to_numpy("float32").tobytes()
        facts["labels"] = fact(f"labels of {len(labels):,} images", values)
    return facts


def _indexed(labels, folder) -> list[str] | None:
    """Return the names in the folder of an index's images; None where the labels say nothing of files in it."""
    start = os.path.join(os.fspath(folder), "")
    if labels is None or not {"path", "position", "SeriesInstanceUID", "StudyInstanceUID"} <= {*labels.columns}:
        return None
    paths = labels["path"].tolist()
    if labels["position"].isna().any() or not all(isinstance(path, str) and path.startswith(start) for path in paths):
        return None
    return [path[len(start) :] for path in paths]


def _of_index(labels, names: list[str], placed: list[str]):
    """Return headers as far as an index holds them, of its files in its own order, and the order of the body."""
    import numpy

    columns = {"study": "StudyInstanceUID", "series": "SeriesInstanceUID"}
    longest = max(int(labels[column].str.len().max()) for column in columns.values())
    headers = numpy.zeros(len(labels), header_type(longest))
    number = {name: file for file, name in enumerate(names)}
    headers["file"] = [number[name] for name in placed]
    for field, column in columns.items():
        headers[field] = labels[column].to_numpy()
    return headers, numpy.lexsort((labels["position"].to_numpy(), series_numbers(headers)))


def _lay_out(source, names, labels, headers, table_rows, order, work) -> PackSource:
    """Return the source with its rows and names; what a slice's neighbours are is noted."""
    import numpy

    headers = headers[order]
    numbers = numpy.arange(len(headers)) if table_rows is None else table_rows[order]
    studies, groups = numpy.unique(headers["study"], return_inverse=True)
    rows = numpy.zeros(len(headers), row_type(len(source.label_names)))
    rows["row"], rows["group"] = numbers, groups
    if labels is not None:
        rows["labels"] = labels[list(LABELS)].to_numpy("float32")[numbers]
    # By the number of a row: its file, and the rows of the slices below and above it.
    above, below = numpy.roll(numbers, -1), numpy.roll(numbers, 1)
    series = series_numbers(headers)
    last = numpy.append(series[1:] != series[:-1], True)
    above[last], below[numpy.roll(last, 1)] = numbers[last], numbers[numpy.roll(last, 1)]
    neighbours = numpy.zeros((numbers.max() + 1, 2), numpy.int64)
    neighbours[numbers] = numpy.stack([below, above], axis=1)
    write_file(work / "neighbours.npy", npy(neighbours))
    if "crop" in source.settings:  # and where its series lies in the order of all rows
        stops = numpy.flatnonzero(last) + 1
        lengths = numpy.diff(stops, prepend=0)
        places = numpy.zeros_like(neighbours)
        places[numbers] = numpy.repeat(numpy.stack([stops - lengths, stops], axis=1), lengths, axis=0)
        write_file(work / "order.npy", npy(numbers))
        write_file(work / "series.npy", npy(places))
    ordered = [""] * (numbers.max() + 1)
    for number, file in zip(numbers.tolist(), headers["file"].tolist(), strict=True):
        ordered[number] = names[file]
    group_names = [study.decode() for study in studies]
    write_file(work / "studies.json", json.dumps(group_names).encode())
    return replace(source, rows=rows, names=tuple(ordered), group_names=group_names)


def _tell_others(folder, names, others, share: float, slices: int) -> None:
    """Say which files are no CT slices, or raise."""
    if slices:
        others = without_others(folder, names, others)
    if slices and not others:
        return
    number, why = others[0] if others else (0, "not a DICOM file")
    found = f"for instance {os.path.join(folder, names[number])}: {why}"
    if not slices:
        raise InvalidValueError(
            f"none of the {len(names):,} files in {folder} is a CT slice",
            found=found,
            fix="pass the folder that holds series of CT",
        )
    if len(others) / len(names) > share:
        lost = len(others) / len(names)
        enough = '"skip"' if lost <= share_of("skip") else math.ceil(100 * lost) / 100
        raise SystemFailureError(
            f"{len(others):,} of {len(names):,} files in {folder} are no CT slices",
            found=found,
            fix=f"copy them again or remove them; or pack_dicom(..., damaged={enough}) leaves them out",
        )
    print(f"left out {len(others):,} of {len(names):,} files that are no CT slices, {found}")


def _without_copies(headers):
    """Leave out the later ones of several files of the same image."""
    import numpy

    _, first = numpy.unique(headers["image"], return_index=True)
    if len(first) < len(headers):
        print(f"left out {len(headers) - len(first):,} files of images that another file holds already")
    return headers[numpy.sort(first)]
