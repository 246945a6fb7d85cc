"""The JPEG files of a pulmonary-embolism set: found in one scan, read one at a time."""

import os
from pathlib import Path


def index_images(labels, folder, *, missing: str = "raise"):
    """Add to each row of the labels where its image is: `path`, and `position` along the body.

    One scan of `<folder>/<StudyInstanceUID>/<SeriesInstanceUID>/<position>_<SOPInstanceUID>.jpg`. Only the folders of
    the studies in `labels` are looked into. Files that no row asks for are left alone, and counted in one printed line.

    Args:
        labels: as `read_labels` gives.
        folder: train-jpegs, the folder that holds the study folders.
        missing: "raise" if a row has no file, or "drop" to leave such rows out, which is then printed.

    Returns:
        A copy of the labels with a new index, `path` (str) and `position` (int, 0 for the first slice of a series).

    Raises:
        FileNotFoundError: the folder does not exist or holds no image, or a row has no file.
    """
    if missing not in ("raise", "drop"):
        raise ValueError(f'missing is "raise" or "drop", got {missing!r}')
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}\n  fix: pass the folder named train-jpegs, which holds one folder a study"
        )
    studies = labels["StudyInstanceUID"].unique()
    files = {}
    for study in studies:
        for series in _folders(os.path.join(folder, study)):
            for entry in _entries(os.path.join(folder, study, series)):
                position, underscore, image = entry.name.removesuffix(".jpg").partition("_")
                if underscore and position.isdigit() and entry.name.endswith(".jpg"):
                    files[study, series, image] = (entry.path, int(position))
    if not files:
        inside = [entry.name for entry in _entries(folder)][:3] or "an empty folder"
        raise FileNotFoundError(
            f"{folder} holds no image of the {len(studies)} studies in the labels\n"
            f"  found: {inside}; looked for {studies[0]}/<series>/<position>_<image>.jpg\n"
            "  fix:   pass the folder named train-jpegs, which holds one folder a study"
        )
    keys = list(zip(labels["StudyInstanceUID"], labels["SeriesInstanceUID"], labels["SOPInstanceUID"], strict=True))
    gone = [key for key in keys if key not in files]
    extra = len(files) - (len(keys) - len(gone))
    if extra:
        print(f"{extra} images in {folder} have no row in the labels and are not used")
    if gone:
        few = ", ".join(f"{study}/{series}/*_{image}.jpg" for study, series, image in gone[:3])
        if missing == "raise":
            raise FileNotFoundError(
                f"{len(gone)} of {len(keys)} images are not in {folder}\n"
                f"  found: {len(files)} images; missing for instance {few}\n"
                '  fix:   copy them there, or leave their rows out with index_images(labels, folder, missing="drop")'
            )
        print(f"left out {len(gone)} of {len(keys)} rows whose image is not in {folder}, for instance {few}")
        here = [key in files for key in keys]
        labels, keys = labels[here], [key for key in keys if key in files]
    paths, positions = zip(*(files[key] for key in keys), strict=True)
    return labels.reset_index(drop=True).assign(path=list(paths), position=list(positions))


class PEImages:
    """A map-style dataset of images and their ten labels, for `core.batches` or any DataLoader.

    `[i]` is `(image, labels)`: (3, size, size) uint8 in [0, 255], red lung, green embolism and blue mediastinal window;
    and (10,) float32 of 0 and 1 in the order of `LABELS`. The resize is Pillow's bilinear filter on the whole decoded
    image, to the last bit; `size=None` keeps the size of the files.

    Args:
        table: as `index_images` gives; any rows of it.
        size: height and width in pixels.

    Raises:
        ValueError: the table has no `path` column.
        OSError: from `[i]`, a file is missing or is not a whole JPEG; the message names it and the row.
    """

    def __init__(self, table, size: int | None = 128):
        from tpukit.pe.labels import LABELS

        if "path" not in table.columns:
            raise ValueError(
                "PEImages needs a table with a path column\n  fix: PEImages(tpukit.pe.index_images(labels, folder))"
            )
        self.paths = table["path"].tolist()
        self.labels = table[list(LABELS)].to_numpy("float32")
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        import numpy as np
        import torch
        from PIL import Image

        path = self.paths[index]
        try:
            with Image.open(path) as file:
                # Decode every pixel, then resize: Pillow's draft mode shrinks while decoding, faster and not the same.
                image = file.convert("RGB")
        except FileNotFoundError:
            raise FileNotFoundError(
                f"image {index} of {len(self)} is gone: {path}\n"
                "  fix: if files were moved, call tpukit.pe.index_images(labels, folder) again"
            ) from None
        except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for some broken headers
            raise OSError(
                f"image {index} of {len(self)} cannot be decoded: {path}\n"
                f"  found: {error} ({os.path.getsize(path)} bytes)\n"
                "  fix:   copy this file again, or leave its row out of the table"
            ) from error
        if self.size is not None and image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels, torch.tensor(self.labels[index])


def _entries(folder) -> list[os.DirEntry]:
    """List a folder in order of name, or nothing if it is not there."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _folders(folder) -> list[str]:
    return [entry.name for entry in _entries(folder) if entry.is_dir()]
