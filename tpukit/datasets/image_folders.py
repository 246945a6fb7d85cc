"""A folder of images with one sub-folder per class, as torchvision's ImageFolder reads it, without what is no image."""

import functools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.datasets.label_arrays import check_classes, in_order
from tpukit.datasets.resumable import UNFINISHED
from tpukit.essentials.display import AccessDeniedError, InvalidValueError, PathNotFoundError

_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}  # which a class may be divided into
_ROLES = {"image", "images", "img", "imgs", "mask", "masks", "label", "labels", "annotations"}  # no classes, either
# Pillow opens these as drawings, as tables of numbers, or with programs of others.
_NO_PICTURES = {"BUFR", "EPS", "FITS", "GRIB", "HDF5", "MPEG", "PDF", "WMF"}


@dataclass(frozen=True)
class FoundFiles:
    """Files of images, and what is known of each: labels, (N, L) or (N,) numbers; files of masks; numbers of groups.

    `left_out` counts the other files that lie there, by their ending.
    """

    names: list[str]
    labels: object
    label_names: list[str]
    classes: list[str]
    groups: object = None
    group_names: list[str] = field(default_factory=list)
    mask_names: list[str] = field(default_factory=list)
    left_out: Counter = field(default_factory=Counter)


@functools.cache
def endings() -> tuple[str, ...]:
    """Return how the names of images end that Pillow opens here."""
    from PIL import Image

    Image.init()
    return tuple(end for end, kind in Image.EXTENSION.items() if kind in Image.OPEN and kind not in _NO_PICTURES)


def find_images(folder, classes: Sequence[str] | None = None, *, without: Path | None = None) -> FoundFiles:
    """Find the images of a folder, class by class, each class in the order of names.

    Left out are: what begins with a dot (`.ipynb_checkpoints`, a Mac's `._001.jpg`), `__MACOSX`, packs and caches,
    links that lead back to a folder above, and what is no file, such as a pipe.

    Args:
        folder: the folder with one folder per class.
        classes: the classes in the order of their numbers; None for the sub-folders, sorted, 2 before 10. A class
            without a folder keeps its number: so the numbers of validation images are those of training.
        without: a folder to leave out, whatever is in it.

    Raises:
        FileNotFoundError: there is no such folder.
        PermissionError: a folder cannot be read.
        ValueError: there is no image, or none in a class that has files, or a sub-folder that is none of the classes;
            or the classes lie one folder deeper.
    """
    if not os.path.isdir(folder):
        raise PathNotFoundError(f"there is no folder {folder}", fix="pass the folder that holds one folder per class")
    above = (_identity(folder),)
    parts = [entry for entry in _entries(folder) if _is_part(entry, above, without)]
    found = [entry.name for entry in parts if entry.is_dir()]
    order = in_order(found) if classes is None else [str(name) for name in classes]
    if others := [name for name in found if name not in order]:
        raise InvalidValueError(
            f"{folder} holds {len(others)} folders that are not in classes=",
            found=", ".join(others[:4]),
            fix="name all classes, also those that only training has; or move these folders away",
        )
    check_classes(order)
    names, numbers = [], []
    left_out = Counter(f"{_ending(entry.name)} beside the classes" for entry in parts if not entry.is_dir())
    for number, name in enumerate(order):
        others = Counter()
        inside = list(_images(folder, name, above, without, others)) if name in found else []
        if others and not inside:
            raise InvalidValueError(
                f"the folder {name!r} holds no image that is read here, and would be a class without one",
                found=most_frequent(others),
                fix="save them as PNG or JPEG; or move the folder away",
            )
        names += inside
        numbers += [number] * len(inside)
        left_out += others
    if not names:
        raise InvalidValueError(
            f"{folder} holds no image in a sub-folder",
            found=sorted(os.listdir(folder))[:4] or "an empty folder",
            fix="pass the folder that holds one folder per class, or a DataFrame with a path column",
        )
    if classes is None:
        _refuse_deeper_classes(folder, names)
    return FoundFiles(names, numbers, ["class"], order, left_out=left_out)


def _refuse_deeper_classes(folder, names: list[str]) -> None:
    """Raise where all images lie in the same sub-folders of each class, or one class is all: then those are classes."""
    inside = {}
    for name in names:
        first, *others = Path(name).parts
        inside.setdefault(first, set()).add(others[0] if len(others) > 1 else "")
    below, called = set.intersection(*inside.values()), {name.lower() for name in inside}
    first = next((name for name in inside if "" not in inside[name]), None)
    is_alike = len(below) > 1 and not below <= _PARTS and all(mine == below for mine in inside.values())
    if first is not None and (called <= _PARTS or (is_alike and "" not in below)):
        raise InvalidValueError(
            f"{folder} would give the classes {', '.join(list(inside)[:4])}, and in each lie the same folders",
            found=", ".join(sorted(inside[first])[:4]),
            fix=f"pack({os.path.join(folder, first)!r}, ...), one folder deeper; or classes={list(inside)}",
        )
    if called <= _PARTS or (len(called) > 1 and called <= _PARTS | _ROLES):
        raise InvalidValueError(
            f"{folder} would give the classes {', '.join(list(inside)[:4])}, which say nothing of what is seen",
            found=f"{len(names):,} images, as {names[0]}",
            fix='a table says what each image is: pack(pandas.DataFrame({"path": files, "label": labels}), ..., '
            f'labels="label"), masks="mask" for a column of those; or classes={list(inside)}',
        )


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower() or "no ending"


def most_frequent(endings: Mapping[str, int]) -> str:
    """Return the four most frequent endings of files in words, with how many there are of each."""
    return ", ".join(f"{ending} {count:,}" for ending, count in Counter(endings).most_common(4))


def _images(folder, inside: str, above: tuple, without: Path | None, others: Counter) -> Iterator[str]:
    """Yield the images of a folder, then those of the folders in it, as paths below the first; count other files."""
    path = os.path.join(folder, inside)
    above = (*above, _identity(path))
    entries = [entry for entry in _entries(path) if _is_part(entry, above, without)]
    for entry in entries:
        if entry.is_dir():
            continue
        # A link to nothing is an image that is missing, which packing says.
        if entry.name.lower().endswith(endings()) and (entry.is_file() or not os.path.exists(entry.path)):
            yield os.path.join(inside, entry.name)
        else:
            others[_ending(entry.name)] += 1
    for entry in entries:
        if entry.is_dir():
            yield from _images(folder, os.path.join(inside, entry.name), above, without, others)


def _entries(folder) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except PermissionError as error:
        fact, fix = f"{folder} cannot be read, so its images would be missing", f"chmod u+rx {folder}, or move it away"
        raise AccessDeniedError(fact, found=error.strerror, fix=fix) from error


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
