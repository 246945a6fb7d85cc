"""Find the JPEG files of the pulmonary-embolism data set in one scan, and read them one by one.

train-jpegs/<StudyInstanceUID>/<SeriesInstanceUID>/<position>_<SOPInstanceUID>.jpg
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tpukit.datasets import decode
from tpukit.essentials.display import InvalidValueError, PathNotFoundError, SystemFailureError
from tpukit.pe.labels import IDS, LABELS, STUDY, check_columns
from tpukit.pe.missing_images import check_missing, leave_out


class _Key(NamedTuple):
    """The identifiers of an image, in the order of `IDS`."""

    study: str
    series: str
    image: str


class _File(NamedTuple):
    path: str
    position: int


def index_images(labels, folder, *, missing: str = "raise"):
    """Add two columns to the labels: the `path` of each image, and its `position` along the body.

    `index_images` scans `<folder>/<StudyInstanceUID>/<SeriesInstanceUID>/` of the exams in `labels`
    once, for files `<position>_<SOPInstanceUID>.jpg`. Files without a row in the labels are
    ignored, and their number is printed.

    Args:
        labels: the table of `read_labels`.
        folder: the folder that contains the study folders, named train-jpegs in the data set.
        missing: "raise" for a FileNotFoundError if a row has no file, or "drop" to leave such rows
            out and print their number.

    Returns:
        A copy of the labels, in their order, with a new index and two more columns: `path` (str),
        and `position` (int, 0 for the first slice of a series).

    Raises:
        FileNotFoundError: the folder is missing or lacks a row's file; with "drop", all files.
        ValueError: two files have the name of the same image.
    """
    check_missing(missing)
    if not Path(folder).is_dir():
        raise PathNotFoundError(
            f"there is no folder {folder}",
            fix="pass the folder train-jpegs, which contains one folder per study",
        )
    studies = labels[STUDY].unique()
    files = _scan(folder, studies)
    if not files and len(labels):
        raise _no_images(folder, studies)
    columns = [labels[name] for name in IDS]
    keys = [_Key(*ids) for ids in zip(*columns, strict=True)]
    found = [files[key] for key in keys if key in files]
    # Files without a row are no error, because users often pass only some rows of the labels.
    unused = len(files.keys() - set(keys))  # several rows may have the same file
    if unused:
        print(f"{unused} images in {folder} have no row in the labels and are not used")
    gone = [f"{key.study}/{key.series}/*_{key.image}.jpg" for key in keys if key not in files]
    leave_out(
        gone,
        len(keys),
        missing,
        folder=folder,
        found=f"{len(files):,} images",
        call="index_images(labels, folder",
    )
    labels = labels.loc[[key in files for key in keys]].reset_index(drop=True)
    paths = [file.path for file in found]
    return labels.assign(path=paths, position=[file.position for file in found])


def _no_images(folder, studies) -> PathNotFoundError:
    # The usual mistake is to pass a folder one level too high or too low, so show its contents.
    inside = [entry.name for entry in _entries(folder)][:3] or "an empty folder"
    return PathNotFoundError(
        f"{folder} contains no image of the {len(studies)} studies in the labels",
        found=f"{inside}; looked for {studies[0]}/<series>/<position>_<image>.jpg",
        fix="pass the folder named train-jpegs, which contains one folder per study",
    )


def _scan(folder, studies) -> dict[_Key, _File]:
    """Return the file of each image of these exams in a folder."""
    # List the folder once, because `is_dir` for each study would be a request to the disk: 7,279 in
    # the competition.
    existing = {entry.name for entry in _entries(folder) if entry.is_dir()}
    files = {}
    for study in studies:
        if study not in existing:
            continue
        for series, entry in _files_of(os.path.join(folder, study)):
            position, underscore, image = entry.name.removesuffix(".jpg").partition("_")
            is_image = underscore and position.isdigit() and entry.name.endswith(".jpg")
            if not is_image:
                continue
            key = _Key(study, series, image)
            file = _File(entry.path, int(position))
            if key in files:
                first = files[key]
                raise InvalidValueError(
                    f"two files hold the same image: {first.path} and {file.path}",
                    found=f"positions {first.position} and {file.position}",
                    fix="empty the folder of this series, and copy its files again",
                )
            files[key] = file
    return files


def _files_of(study_folder: str) -> Iterator[tuple[str, os.DirEntry]]:
    """Yield (name of the series, file) for all files in the folder of an exam."""
    for series in _entries(study_folder):
        if series.is_dir():
            for entry in _entries(series.path):
                yield series.name, entry


def _entries(folder) -> list[os.DirEntry]:
    return sorted(os.scandir(folder), key=lambda entry: entry.name)


class PEImages:
    """A map-style dataset of images with their ten labels, for `core.batches` or any DataLoader.

    `[i]` is `(image, labels)`. The image is (3, size, size) uint8 in [0, 255]: red is the lung
    window, green the embolism window, blue the mediastinal window. The labels are (10,) float32 of
    0 and 1, in the order of `LABELS`. Images are decoded and resized as by
    `tpukit.datasets.decode`.

    Args:
        table: the table of `index_images`, or some of its rows.
        size: height and width in pixels; None for the size of the files.

    Raises:
        ValueError: the table has no `path` column, or lacks a label.
        OSError: in `[i]`, if a file is missing or is not a complete JPEG; the message names the
            file and the row.
    """

    def __init__(self, table, size: int | None = 128):
        fix = "PEImages(tpukit.pe.index_images(labels, folder))"
        check_columns(table, ("path", *LABELS), "the table of PEImages has", fix=fix)
        self.paths = table["path"].tolist()
        self.labels = table[list(LABELS)].to_numpy("float32")
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        import torch

        path = self.paths[index]
        try:
            pixels = decode(Path(path).read_bytes(), self.size)
        except FileNotFoundError:
            raise PathNotFoundError(
                f"image {index} of {len(self)} no longer exists: {path}",
                fix="if files were moved, call tpukit.pe.index_images(labels, folder) again",
            ) from None
        except (OSError, ValueError) as error:
            raise SystemFailureError(
                f"image {index} of {len(self)} cannot be decoded: {path}",
                found=error,
                fix="copy this file again, or leave its row out of the table",
            ) from error
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        return image, torch.tensor(self.labels[index])
