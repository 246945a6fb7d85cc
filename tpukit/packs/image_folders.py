"""A folder of images with one sub-folder per class, as torchvision's ImageFolder reads it, without what is no image."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.show import NoSuchFile, WrongValue, explain
from tpukit.packs.resumable import UNFINISHED

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's ImageFolder


@dataclass(frozen=True)
class FoundFiles:
    """Files of images, and what is known of each: labels, (N, L) or (N,) numbers; files of masks; numbers of groups."""

    names: list[str]
    labels: object
    label_names: list[str]
    classes: list[str]
    groups: object = None
    group_names: list[str] = field(default_factory=list)
    mask_names: list[str] = field(default_factory=list)


def find_images(folder, classes: Sequence[str] | None = None, *, without: Path | None = None) -> FoundFiles:
    """Find the images of a folder, class by class, each class in the order of names.

    Left out are: what begins with a dot (`.ipynb_checkpoints`, a Mac's `._001.jpg`), `__MACOSX`, packs and caches,
    links that lead back to a folder above, and what is no file, such as a pipe.

    Args:
        folder: the folder with one folder per class.
        classes: the classes in the order of their numbers; None for the sub-folders, sorted. A class without a folder
            keeps its number: so the numbers of validation images are those of training.
        without: a folder to leave out, whatever is in it.

    Raises:
        FileNotFoundError: there is no such folder.
        PermissionError: a folder cannot be read.
        ValueError: there is no image, or a sub-folder that is none of the classes.
    """
    if not os.path.isdir(folder):
        raise NoSuchFile(f"there is no folder {folder}", fix="pass the folder that holds one folder per class")
    above = (_identity(folder),)
    found = [entry.name for entry in _entries(folder) if _is_part(entry, above, without) and entry.is_dir()]
    order = found if classes is None else [str(name) for name in classes]
    if others := [name for name in found if name not in order]:
        raise WrongValue(
            f"{folder} holds {len(others)} folders that are not in classes=",
            found=", ".join(others[:4]),
            fix="name all classes, also those that only training has; or move these folders away",
        )
    if len(set(order)) < len(order):
        raise WrongValue("classes= names a class twice", found=order, fix="each class once")
    names, numbers = [], []
    for number, name in enumerate(order):
        inside = list(_images(folder, name, above, without)) if name in found else []
        names += inside
        numbers += [number] * len(inside)
    if not names:
        raise WrongValue(
            f"{folder} holds no image in a sub-folder",
            found=sorted(os.listdir(folder))[:4] or "an empty folder",
            fix="pass the folder that holds one folder per class, or a DataFrame with a path column",
        )
    return FoundFiles(names, numbers, ["class"], order)


def _images(folder, inside: str, above: tuple, without: Path | None) -> Iterator[str]:
    """Yield the images of a folder, then those of the folders in it, as paths below the first."""
    path = os.path.join(folder, inside)
    above = (*above, _identity(path))
    entries = [entry for entry in _entries(path) if _is_part(entry, above, without)]
    for entry in entries:
        # A link to nothing is an image that is missing, which packing says.
        if entry.name.lower().endswith(_EXTENSIONS) and (entry.is_file() or not os.path.exists(entry.path)):
            yield os.path.join(inside, entry.name)
    for entry in entries:
        if entry.is_dir():
            yield from _images(folder, os.path.join(inside, entry.name), above, without)


def _entries(folder) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except PermissionError as error:
        fact, fix = f"{folder} cannot be read, so its images would be missing", f"chmod u+rx {folder}, or move it away"
        raise PermissionError(explain(fact, found=error.strerror, fix=fix)) from error


def _is_part(entry: os.DirEntry, above: tuple, without: Path | None) -> bool:
    if entry.name.startswith(".") or entry.name == "__MACOSX":
        return False
    if not entry.is_dir():
        return True
    return not (
        _identity(entry.path) in above
        or (without is not None and without.exists() and os.path.samefile(entry.path, without))
        or _is_ours(Path(entry.path))
    )


def _identity(folder) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _is_ours(folder: Path) -> bool:
    """Tell whether a folder holds a pack or a cache, finished or not."""
    if os.path.exists(folder / UNFINISHED / "plan.json"):  # False also where nothing can be read, which comes later
        return True
    try:
        with open(folder / "manifest.json", "rb") as manifest:
            return b'"format": "tpukit ' in manifest.read(200)
    except OSError:
        return False
