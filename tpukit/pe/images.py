"""The JPEG files of a pulmonary-embolism set: found in one scan of the folders, read one at a time."""

import os
from pathlib import Path

from tpukit.essentials.show import NoSuchFile, SystemFailed, WrongValue
from tpukit.packs import decode
from tpukit.pe.labels import IDS, LABELS, check_columns
from tpukit.pe.missing_images import check_missing, leave_out


def index_images(labels, folder, *, missing: str = "raise"):
    """Add two columns to the labels: the `path` of each image, and its `position` along the body.

    Scans `<folder>/<StudyInstanceUID>/<SeriesInstanceUID>/<position>_<SOPInstanceUID>.jpg` once, and only the folders
    of the studies in `labels`. Files without a row are ignored; one printed line says how many.

    Args:
        labels: as `read_labels` returns them.
        folder: train-jpegs, the folder that contains the study folders.
        missing: "raise" an error if a row has no file, or "drop" such rows and print how many.

    Returns:
        A copy of the labels with a new index, `path` (str) and `position` (int, 0 for the first slice of a series).

    Raises:
        FileNotFoundError: the folder does not exist or contains no image, or a row has no file.
        ValueError: two files are of one image.
    """
    check_missing(missing)
    if not Path(folder).is_dir():
        raise NoSuchFile(
            f"there is no folder {folder}", fix="pass the folder train-jpegs, which contains one folder per study"
        )
    studies = labels["StudyInstanceUID"].unique()
    files = {}
    there = {entry.name for entry in _entries(folder) if entry.is_dir()}
    for study in (study for study in studies if study in there):
        for series in filter(os.DirEntry.is_dir, _entries(os.path.join(folder, study))):
            for entry in _entries(series.path):
                position, underscore, image = entry.name.removesuffix(".jpg").partition("_")
                if underscore and position.isdigit() and entry.name.endswith(".jpg"):
                    if (twice := files.get((study, series.name, image))) is not None:
                        raise WrongValue(
                            f"two files are of one image: {twice[0]} and {entry.path}",
                            found=f"positions {twice[1]} and {int(position)}",
                            fix="delete the one that is wrong",
                        )
                    files[study, series.name, image] = (entry.path, int(position))
    if not files:  # most often the folder above or below was passed: show what is in it
        inside = [entry.name for entry in _entries(folder)][:3] or "an empty folder"
        raise NoSuchFile(
            f"{folder} contains no image of the {len(studies)} studies in the labels",
            found=f"{inside}; looked for {studies[0]}/<series>/<position>_<image>.jpg",
            fix="pass the folder named train-jpegs, which contains one folder per study",
        )
    keys = list(zip(*(labels[name] for name in IDS), strict=True))
    gone = [key for key in keys if key not in files]
    extra = len(files) - (len(keys) - len(gone))
    if extra:
        print(f"{extra} images in {folder} have no row in the labels and are not used")
    named = [f"{study}/{series}/*_{image}.jpg" for study, series, image in gone]
    options = {"folder": folder, "found": f"{len(files):,} images", "call": "index_images(labels, folder"}
    leave_out(named, len(keys), missing, **options)
    labels, keys = labels[[key in files for key in keys]], [key for key in keys if key in files]
    paths, positions = zip(*(files[key] for key in keys), strict=True)
    return labels.reset_index(drop=True).assign(path=list(paths), position=list(positions))


class PEImages:
    """A map-style dataset of images with their ten labels, for `core.batches` or any DataLoader.

    `[i]` is `(image, labels)`. The image is (3, size, size) uint8 in [0, 255]: red is the lung window, green the
    embolism window, blue the mediastinal window. The labels are (10,) float32 of 0 and 1, in the order of `LABELS`.
    Images are decoded and resized as `tpukit.packs.decode` does when exact.

    Args:
        table: as `index_images` returns it, or some of its rows.
        size: height and width in pixels; None keeps the size of the files.

    Raises:
        ValueError: the table has no `path` column, or lacks a label.
        OSError: in `[i]`, if a file is missing or is not a complete JPEG; the message names the file and the row.
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
            raise NoSuchFile(
                f"image {index} of {len(self)} no longer exists: {path}",
                fix="if files were moved, call tpukit.pe.index_images(labels, folder) again",
            ) from None
        except (OSError, ValueError) as error:
            raise SystemFailed(
                f"image {index} of {len(self)} cannot be decoded: {path}",
                found=error,
                fix="copy this file again, or leave its row out of the table",
            ) from error
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), torch.tensor(self.labels[index])


def _entries(folder) -> list[os.DirEntry]:
    return sorted(os.scandir(folder), key=lambda entry: entry.name)
