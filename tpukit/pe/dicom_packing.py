"""Pack a folder of CT series: three windows as channels, neighbouring slices, or Hounsfield units.

    scans/a/1.dcm, 2.dcm, ...     headers -> order along the body -> rows of the pack
    scans/b/1.dcm, ...            pixels  -> one JPEG or int16 image per slice, read once

The headers determine the rows of the pack: the slices of each series, their order from the feet to
the head, and the labels of each slice. To read all headers takes minutes. So `_SliceSource.find`
does it after the folder of the pack has been chosen, and stores the results there for a later call.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tpukit.datasets import (
    PackOptions,
    PackSource,
    check_arguments,
    fact,
    npy,
    pack_described,
    row_type,
    rows_of,
    share_of,
    whole_number,
    write_file,
)
from tpukit.essentials.display import InvalidValueError, SystemFailureError
from tpukit.pe.ct import WINDOWS
from tpukit.pe.dicom import load_pydicom
from tpukit.pe.dicom_slices import Slices, bytes_at_most, sample_bytes
from tpukit.pe.labels import LABELS, check_columns
from tpukit.pe.missing_images import match_headers
from tpukit.pe.series import (
    arrange,
    find_files,
    header_type,
    read_headers,
    without_copies,
    without_other_kinds,
)

_SHARD_SIZE = 4096  # slices per file
_DEFAULTS = PackOptions()
_QUALITY = 85  # of the JPEGs


def pack_dicom(
    folder,
    to,
    labels=None,
    *,
    window: str | tuple[float, float] | None = None,
    crop: str | None = None,
    size: int | Sequence[int] = 256,
    form: str = "jpeg",
    missing: str = "raise",
    damaged: str | float = "raise",
    progress: str | None = None,
    columns: Sequence[str] = LABELS,
    options: PackOptions = _DEFAULTS,
):
    """Pack a folder of CT series, one image per slice, without another copy of the DICOM files.

    `pack_dicom` reads the headers, then every slice once. In the pack, slices of a series follow
    each other from the feet to the head, by ImagePositionPatient. Images that are stored mirrored,
    upside down or lying are turned. Intact files of other kinds, such as MR and localizers, are
    left out. If the call is interrupted, the same call continues. If everything is packed, the call
    only compares the names and sizes of the files.

    A JPEG of 256 pixels takes 18.6 kB, measured on phantoms, which are noisier than patients. For
    the 1,790,594 slices of the RSNA competition that is 33 GB. An int16 image takes 131 kB, or
    235 GB for all slices; at 128 pixels 33 kB, or 59 GB.

    Args:
        folder: a folder. The slices are all files in it and in its sub-folders whose names end in
            .dcm or .dicom, and all other files whose first bytes are those of DICOM.
        to: a new or empty folder, or one in which the same pack was begun; or several folders, as
            for `tpukit.pack`.
        labels: the table of `read_labels` or `read_exams`, or some of its rows, joined by
            SOPInstanceUID; None to pack all slices without labels. Images without a row are left
            out. The headers are not read again if the table is from `index_dicom` or `read_exams`,
            because it then has the file and position of each image.
        window: None for the lung, embolism and mediastinal windows of a slice as red, green and
            blue. Or one window: a name ("lung", "embolism", "mediastinum") or (level, width) in
            Hounsfield units. Then the channels are the slice below, the slice itself and the slice
            above, among the slices to pack. At the ends, the slice itself replaces the missing one.
        crop: None for whole slices; "lungs" to cut all slices of a series to one box around the
            lungs. `lung_box` finds the box in 16 slices along the body, which are read once more. A
            series without a box is not cut.
        size: height and width in pixels. Slices are resized by Pillow's bilinear filter; those that
            are not square change their aspect ratio. Or several sizes: `pack_dicom` uses the first
            for which one of the folders has enough space; see `PackedImages.shape`.
        form: "jpeg"; or "int16" to store Hounsfield units, which `hounsfield` restores on the
            device.
        missing: "raise" for a FileNotFoundError if a row has no file, or "drop" to leave out such
            rows and print their number.
        damaged: "raise" for an OSError at the first damaged slice. "skip" to leave out damaged
            slices, up to a tenth of all; with one window, the slices next to them are left out too.
            Or the share that may be left out, such as 0.5. `PackedImages.skipped` lists the slices
            that were left out, except those with a damaged header.
        progress: as for `tpukit.pack`.
        columns: the names of the label columns of `labels`; () if the table has no labels.
        options: `PackOptions(shard_size, workers, quality)`; the other options are not supported.
            `quality` is the JPEG quality, 1 to 95; None for 85. Colours are not subsampled,
            because they are three separate images. A file of quality 85 without subsampling is
            nearer to the original than one of quality 90 with subsampling, and 10 % larger.

    Returns:
        The finished `PackedImages`: (3, size, size) uint8 per slice; with int16 (2, size, size),
        the low and the high bytes. Its `rows[i]` is the row of image i in `labels`, or i without
        labels. Its groups are the studies.

    Raises:
        ValueError: an argument is not as above, none of the files is a CT slice, or too many slices
            are damaged.
        FileNotFoundError: there is no DICOM file in the folder, or a row has no file.
        DiskFullError: the disk is too small for the pack.
        OSError: a file is damaged, not DICOM, or an enhanced CT; or the disk becomes full.
        FileExistsError: `to` contains another pack, or other files.
        ModuleNotFoundError: pydicom, a decoder that these files need, or array_record is not
            installed.
    """
    sizes = list(size) if isinstance(size, Sequence) and len(size) else [size]
    sizes = [whole_number("size", pixels, 1) for pixels in sizes]
    columns = list(columns)  # a generator could be used only once, as for the folders
    places = [to] if isinstance(to, str | os.PathLike) else list(to)
    check_arguments(damaged, options, size=sizes[0])
    options = _own_options(options)
    load_pydicom()
    quality = options.quality or _QUALITY
    _check_form(form, quality=quality, missing=missing, crop=crop, window=window)
    if labels is not None:
        fix = "labels=tpukit.pe.read_labels(path), or some of its rows"
        if "exam" in labels.columns:
            fix = 'pack_dicom(..., columns=["embolus"]), with the names of your labels'
        check_columns(labels, ("SOPInstanceUID", *columns), "the labels have", fix=fix)
        if not len(labels):
            raise InvalidValueError("the labels have no rows", fix="for all slices: labels=None")
    indexed = _indexed(labels, folder)
    if indexed is not None:
        names = sorted(indexed)
    else:
        names = _files_outside(folder, places)
    settings = {"pixels": sizes[0], "window": _window(window), "form": form}
    # Only settings that have an effect, so that calls which differ in another one share a pack.
    if form == "jpeg":
        settings["quality"] = int(quality)
    if crop is not None:
        settings["crop"] = crop
    if labels is not None:
        settings["missing"] = missing
    slices = _SliceSource(
        folder=folder,
        names=names,
        labels=labels,
        columns=columns,
        indexed=indexed,
        settings=settings,
        share=share_of(damaged),
        workers=options.workers,
        progress=progress,
    )
    return pack_described(
        slices.source(),
        places,
        [{**settings, "pixels": pixels} for pixels in sizes],
        size=None,
        damaged=damaged,
        progress=progress,
        options=options,
    )


def _own_options(options: PackOptions) -> PackOptions:
    """Return the options with this pack's shard size; ValueError for unsupported options."""
    for name in ("image", "window", "mode", "resize", "seed"):
        value = getattr(options, name)
        if value == getattr(_DEFAULTS, name):
            continue
        fix = f"leave {name} out"
        if name == "window":
            fix = "pack_dicom(..., window=...) selects a CT window"
        raise InvalidValueError(
            f"pack_dicom does not support PackOptions({name}=...), got {value!r}",
            found="pack_dicom itself determines the order of the slices and how they are read",
            fix=fix,
        )
    if options.shard_size is None:
        return replace(options, shard_size=_SHARD_SIZE)
    return options


def _check_form(form: str, *, quality: int, missing: str, crop: str | None, window) -> None:
    """Raise ValueError for settings that do not exist or do not belong together."""
    if form not in ("jpeg", "int16"):
        raise ValueError(f'form must be "jpeg" or "int16", got {form!r}')
    if missing not in ("raise", "drop"):
        raise ValueError(f'missing must be "raise" or "drop", got {missing!r}')
    if not 1 <= quality <= 95:
        raise ValueError(f"quality must be from 1 to 95, got {quality}")
    if crop not in (None, "lungs"):
        raise ValueError(f'crop must be None or "lungs", got {crop!r}')
    if form == "int16" and window is not None:
        raise InvalidValueError(
            'form="int16" stores Hounsfield units, which need no window', fix="leave window out"
        )


def _files_outside(folder, places: list) -> list[str]:
    """Return the DICOM files of the folder, without the files of packs at places inside it."""
    packs = tuple(os.path.relpath(place, folder) + os.sep for place in places)
    return [name for name in find_files(folder) if not name.startswith(packs)]


def _window(window) -> list[float] | None:
    """Return [level, width] of one window; None for the three windows."""
    if window is None:
        return None
    level_and_width = WINDOWS.get(window, window) if isinstance(window, str) else window
    try:
        level, width = map(float, level_and_width)
    except (TypeError, ValueError):
        level = width = 0
    if not width > 0:
        raise ValueError(
            f"window must be one of {', '.join(WINDOWS)}, or (level, width) in HU, got {window!r}"
        )
    return [level, width]


def _indexed(labels, folder) -> list[str] | None:
    """Return the paths in a table of `index_dicom` or `read_exams`, relative to the folder.

    None for another table, or if a row has no position or a file outside this folder.
    """
    columns = {"path", "position", "SeriesInstanceUID", "StudyInstanceUID"}
    if labels is None or not columns <= {*labels.columns} or labels["position"].isna().any():
        return None
    start = os.path.join(os.fspath(folder), "")
    names = []
    for path in labels["path"].tolist():
        if not isinstance(path, str) or not path.startswith(start):
            return None
        names.append(path[len(start) :])
    return names


@dataclass(frozen=True)
class _SliceSource:
    """The slices to pack, as `EncodedSource`; `find` finds their rows.

    Attributes:
        folder: the folder of the DICOM files.
        names: the paths of the files, relative to the folder.
        labels, columns: as for `pack_dicom`.
        indexed: the file of each row of the labels; None if the headers must be read.
        settings: the entries of the plan of the pack.
        share: the share of the files that may be damaged.
        workers, progress: as for `read_headers`.
    """

    folder: object
    names: list[str]
    labels: object
    columns: list[str]
    indexed: list[str] | None
    settings: Mapping
    share: float
    workers: int | None
    progress: str | None
    reader = Slices
    bytes_at_most = staticmethod(bytes_at_most)

    @property
    def count(self) -> int:
        """The largest possible number of slices; files without a row are not packed."""
        if self.labels is None:
            return len(self.names)
        return min(len(self.names), len(self.labels))

    def source(self) -> PackSource:
        """Return the description of the source without its rows, which `find` adds."""
        label_names = []
        table = None
        if self.labels is not None:
            label_names = self.columns
            table = rows_of(self.labels)
        return PackSource(
            facts=_facts(self.names, self.labels, self.columns),
            label_names=label_names,
            classes=[],
            group_names=[],
            root=os.fspath(self.folder),
            table=table,
            encoded=self,
        )

    def sample_bytes(self, plan: dict) -> list[int]:
        """Return the number of bytes of some encoded slices."""
        return sample_bytes(self.folder, self.names, plan)

    def smaller(self, plan: dict) -> Iterator[tuple[str, str, dict]]:
        """Yield ever smaller values of `quality`, then of `size`, as arguments of `pack_dicom`."""
        for quality in (70, 50):
            if quality < plan.get("quality", 0):
                yield "quality", f"options=PackOptions(quality={quality})", {"quality": quality}
        for part in (0.75, 0.5, 0.375, 0.25):
            size = int(plan["pixels"] * part)
            yield "size", f"size={size}", {"pixels": size}

    def find(self, work: Path) -> PackSource:
        """Return the description with the rows of all slices; write the files that `Slices` reads.

        Args:
            work: the folder for these files, inside the folder of the pack.
        """
        if any(work.parent.glob("*.array_record")):
            # Shards are finished, so the rows must not change, even if files were copied again.
            group_names = json.loads((work / "studies.json").read_text())
            return replace(self.source(), group_names=group_names)
        # Nothing is packed yet, so determine the rows again: files may have changed.
        (work / "rows.npy").unlink(missing_ok=True)
        if self.indexed is not None:
            return self._lay_out(*self._by_index(), work)
        return self._lay_out(*self._by_headers(work), work)

    def _by_index(self) -> tuple:
        """Return headers from the labels' own columns, their rows in the labels, and their order.

        Only the fields study, series and file of the headers are set.
        """
        import numpy

        labels = self.labels
        columns = {"study": "StudyInstanceUID", "series": "SeriesInstanceUID"}
        longest = max(int(labels[column].str.len().max()) for column in columns.values())
        headers = numpy.zeros(len(labels), header_type(longest))
        number_of = {name: number for number, name in enumerate(self.names)}
        headers["file"] = [number_of[name] for name in self.indexed]
        for field, column in columns.items():
            headers[field] = labels[column].to_numpy().astype("S")
        position = labels["position"].to_numpy()
        order = numpy.lexsort((position, headers["series"], headers["study"]))
        return headers, numpy.arange(len(labels)), order

    def _by_headers(self, work: Path) -> tuple:
        """Read all headers; return them, the row of each in the labels, and their order."""
        import numpy

        headers, others = read_headers(self.folder, self.names, work, self.workers, self.progress)
        _check_others(self.folder, self.names, others, share=self.share, slices=len(headers))
        headers = without_copies(headers)
        rows = None
        if self.labels is not None:
            headers, rows = match_headers(
                headers,
                self.labels,
                self.settings["missing"],
                folder=self.folder,
                call="pack_dicom(...",
            )
        order, noticed = arrange(headers)
        for sentence in noticed:
            print(sentence)
        if rows is None:  # without labels the rows count the slices in their order
            rows = numpy.empty(len(headers), numpy.int64)
            rows[order] = numpy.arange(len(headers))
        return headers, rows, order

    def _lay_out(self, headers, rows_in_table, order, work: Path) -> PackSource:
        """Return the description with rows and names; write the files that `Slices` reads.

        Args:
            headers: (N,) of `header_type`.
            rows_in_table: (N,) the row of each header in the labels.
            order: (N,) the indices of the headers in the packed order.
            work: the folder for the files.
        """
        import numpy

        headers = headers[order]
        numbers = rows_in_table[order]
        studies, groups = numpy.unique(headers["study"], return_inverse=True)
        number_of_labels = 0
        if self.labels is not None:
            number_of_labels = len(self.columns)
        rows = numpy.zeros(len(headers), row_type(number_of_labels))
        rows["row"] = numbers
        rows["group"] = groups
        if number_of_labels:
            rows["labels"] = self.labels[self.columns].to_numpy("float32")[numbers]
        is_other_study = headers["study"][1:] != headers["study"][:-1]
        is_other_series = headers["series"][1:] != headers["series"][:-1]
        # Study and series together identify a series, because some anonymisers give all series the
        # same identifier.
        is_last = numpy.append(is_other_study | is_other_series, True)
        self._write_neighbours(numbers, is_last, work)
        names = [""] * (numbers.max() + 1)
        for number, file in zip(numbers.tolist(), headers["file"].tolist(), strict=True):
            names[number] = self.names[file]
        group_names = [study.decode() for study in studies]
        write_file(work / "studies.json", json.dumps(group_names).encode())
        return replace(self.source(), rows=rows, names=tuple(names), group_names=group_names)

    def _write_neighbours(self, numbers, is_last, work: Path) -> None:
        """Write neighbours.npy and, with a crop, order.npy and series.npy.

        neighbours.npy has, for each row, the rows of the slices below and above. order.npy has the
        rows in the order along the body, and series.npy, for each row, where its series begins and
        ends in order.npy.

        Args:
            numbers: (N,) the row of each slice, in the order along the body.
            is_last: (N,) True for the last slice of a series.
            work: the folder for the files.
        """
        import numpy

        # A slice at the end of its series has no neighbour there, and is its own neighbour instead.
        is_first = numpy.roll(is_last, 1)
        below = numpy.roll(numbers, 1)
        above = numpy.roll(numbers, -1)
        below[is_first] = numbers[is_first]
        above[is_last] = numbers[is_last]
        neighbours = numpy.zeros((numbers.max() + 1, 2), numpy.int64)
        neighbours[numbers] = numpy.stack([below, above], axis=1)
        write_file(work / "neighbours.npy", npy(neighbours))
        if "crop" not in self.settings:
            return
        stops = numpy.flatnonzero(is_last) + 1
        lengths = numpy.diff(stops, prepend=0)
        bounds = numpy.stack([stops - lengths, stops], axis=1)
        series = numpy.zeros_like(neighbours)
        series[numbers] = numpy.repeat(bounds, lengths, axis=0)
        write_file(work / "order.npy", npy(numbers))
        write_file(work / "series.npy", npy(series))


def _facts(names: list[str], labels, columns: list[str]) -> dict:
    """Return the entries of a pack's plan that identify files and labels."""
    files = "\0".join(names).encode(errors="surrogateescape")
    labels_fact = fact("no labels", b"")
    if labels is not None:
        values = "\0".join(labels["SOPInstanceUID"]).encode()
        values += labels[columns].to_numpy("float32").tobytes()
        labels_fact = fact(f"labels of {len(labels):,} images", values)
    return {
        "files": fact(f"{len(names):,} files, {names[0]} to {names[-1]}", files),
        "labels": labels_fact,
    }


def _check_others(folder, names, others, *, share: float, slices: int) -> None:
    """Print the number of files that cannot be read; raise an error for too many.

    Args:
        folder, names: the folder and all files in it.
        others: [number of the file, reason] for each file that is not a CT slice.
        share: the largest share of the files that may be damaged.
        slices: the number of CT slices.
    """
    if slices:
        others = without_other_kinds(folder, names, others)
        if not others:
            return
    number, why = others[0]
    found = f"for instance {os.path.join(folder, names[number])}: {why}"
    if not slices:
        raise InvalidValueError(
            f"none of the {len(names):,} files in {folder} is a CT slice",
            found=found,
            fix="pass the folder that holds series of CT",
        )
    lost = len(others) / len(names)
    if lost > share:
        enough = math.ceil(100 * lost) / 100  # rounded up, so that the fix is enough
        if lost <= share_of("skip"):
            enough = '"skip"'
        raise SystemFailureError(
            f"{len(others):,} of {len(names):,} files in {folder} cannot be read as CT slices",
            found=found,
            fix="copy these files again or remove them; or leave them out: "
            f"pack_dicom(..., damaged={enough})",
        )
    print(f"left out {len(others):,} of {len(names):,} files that cannot be read, {found}")
