"""Find the images of a folder with one sub-folder per class, laid out as for ImageFolder.

    photos/cat/a.jpg        class 0, "cat"
    photos/cat/old/b.png    class 0, because only the first sub-folder decides
    photos/dog/c.jpg        class 1, "dog"
    photos/dog/notes.txt    left out, and counted
    photos/.cache/d.jpg     left out

Classes are numbered in the order of their names, 10 after 2; torchvision's ImageFolder has 10
before 2. A folder one level too high or too low gives an error. `folder_layouts` recognises folders
whose sub-folders are not classes but splits, patients or masks.
"""

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.datasets.folder_layouts import refuse_other_layouts
from tpukit.datasets.label_arrays import check_classes, in_order, refuse_similar_classes
from tpukit.datasets.resumable import UNFINISHED
from tpukit.essentials.display import AccessDeniedError, InvalidValueError, PathNotFoundError

# Formats that Pillow opens as drawings or tables of numbers, or for which it needs other programs.
_NO_PICTURES = {"BUFR", "EPS", "FITS", "GRIB", "HDF5", "MPEG", "PDF", "WMF"}


@dataclass(frozen=True)
class FoundFiles:
    """Files of images, with their labels, masks and groups.

    Attributes:
        names: the paths of the images.
        labels: (N, L) or (N,) numbers.
        label_names: the names of the L labels.
        classes: if the label is a class number, the name of each class; else [].
        groups: (N,) int32, the number of each image's group; None without groups.
        group_names: the name of each group, in the order of the numbers.
        mask_names: the paths of the masks; or [].
        images, masks: the contents of a table's cells; [] if the cells are paths.
        left_out: {ending: number of files}, for a folder's files that are no images or have no
            class. Files directly in the folder are counted as ".png beside the classes".
    """

    names: list[str]
    labels: object
    label_names: list[str]
    classes: list[str]
    groups: object = None
    group_names: list[str] = field(default_factory=list)
    mask_names: list[str] = field(default_factory=list)
    images: list = field(default_factory=list)
    masks: list = field(default_factory=list)
    left_out: Counter = field(default_factory=Counter)


def endings() -> tuple[str, ...]:
    """Return the endings of all image files that Pillow and its plugins open, such as ".png"."""
    from PIL import Image

    Image.init()
    kinds = Image.OPEN.keys() - _NO_PICTURES
    return tuple(ending for ending, kind in Image.EXTENSION.items() if kind in kinds)


def find_images(
    folder, classes: Sequence[str] | None = None, *, without: Path | None = None
) -> FoundFiles:
    """Find the images of a folder, class by class.

    The images in a folder are in the order of their names, before those in its sub-folders.
    Left out are names that begin with a dot (`.ipynb_checkpoints`, `._001.jpg` of a Mac),
    `__MACOSX`, packs, caches, links to a folder above, and pipes.

    Args:
        folder: the folder with one folder per class.
        classes: the classes in the order of their numbers; None for the sub-folders in
            natural order (2 before 10). A class without a folder keeps its number, so that a class
            has the same number in training and validation. A folder without any file is a class
            without images.
        without: a folder to leave out.

    Raises:
        FileNotFoundError: there is no such folder.
        PermissionError: a folder cannot be read.
        ValueError: there is no image; a class has files but no image; a sub-folder is not in
            `classes`; or the class folders are one folder deeper.
    """
    if not os.path.isdir(folder):
        raise PathNotFoundError(
            f"there is no folder {folder}", fix="pass the folder that holds one folder per class"
        )
    above = (_identity(folder),)
    # Files directly in the folder have no class, so they are only counted.
    parts = [entry for entry in _entries(folder) if _is_part(entry, above, without)]
    found = [entry.name for entry in parts if entry.is_dir()]
    order = _order_of_classes(folder, found, classes)
    names = []
    numbers = []
    left_out = Counter()
    empty = []
    for entry in parts:
        if not entry.is_dir():
            left_out[f"{_ending(entry.name)} beside the classes"] += 1
    for number, name in enumerate(order):
        others = Counter()
        inside = []
        if name in found:
            inside += _images(folder, name, above=above, without=without, others=others)
        if others and not inside:
            empty.append((name, others))
        names += inside
        numbers += [number for _ in inside]
        left_out += others
    if names and classes is None:
        refuse_other_layouts(os.fspath(folder), names)
    if empty:
        raise _without_images(*empty[0])
    if not names:
        raise InvalidValueError(
            f"{folder} holds no image in a sub-folder",
            found=sorted(os.listdir(folder))[:4] or "an empty folder",
            fix="pass the folder that holds one folder per class, "
            "or a DataFrame with a path column",
        )
    return FoundFiles(names, numbers, ["class"], order, left_out=left_out)


def _without_images(name: str, others: Counter) -> InvalidValueError:
    return InvalidValueError(
        f"the folder {name!r} holds no image that pack can read, and would be an empty class",
        found=most_frequent(others),
        fix="save its images as PNG or JPEG; or move it away; or, if you cannot change the folder, "
        'pack(pandas.DataFrame({"path": files, "label": labels}), ..., labels="label")',
    )


def _order_of_classes(folder, found: list[str], classes: Sequence[str] | None) -> list[str]:
    """Return the classes in the order of their numbers; ValueError for an unexpected folder."""
    if classes is None:
        order = in_order(found)
        refuse_similar_classes(order, str(order))
    else:
        order = list(classes)
        check_classes(order, are_texts=True)
    others = [name for name in found if name not in order]
    if others:
        raise InvalidValueError(
            f"{folder} holds {len(others)} folders that are not in classes=",
            found=", ".join(others[:4]),
            fix="list every folder in classes=; or move away the folders that are no classes",
        )
    return order


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower() or "no ending"


def most_frequent(counts: Mapping[str, int]) -> str:
    """Return the four most frequent endings of files and their counts, as ".txt 12, .csv 3"."""
    most = Counter(counts).most_common(4)
    return ", ".join(f"{ending} {count:,}" for ending, count in most)


def _images(
    folder, inside: str, *, above: tuple, without: Path | None, others: Counter
) -> Iterator[str]:
    """Yield the images of a folder, then those of its sub-folders; count other files.

    Args:
        folder: the folder of all classes.
        inside: the path of the folder to read, relative to `folder`.
        above: the identities of all parent folders, to detect links that lead back to them.
        without: a folder to leave out.
        others: the counter of other files, by their ending.
    """
    path = os.path.join(folder, inside)
    above = (*above, _identity(path))
    readable = endings()
    entries = [entry for entry in _entries(path) if _is_part(entry, above, without)]
    for entry in entries:
        if entry.is_dir():
            continue
        # A broken link counts as an image, so that `pack` reports the missing file.
        is_readable = entry.is_file() or not os.path.exists(entry.path)
        if is_readable and entry.name.lower().endswith(readable):
            yield os.path.join(inside, entry.name)
        else:
            others[_ending(entry.name)] += 1
    for entry in entries:
        if entry.is_dir():
            deeper = os.path.join(inside, entry.name)
            yield from _images(folder, deeper, above=above, without=without, others=others)


def _entries(folder) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except PermissionError as error:
        raise AccessDeniedError(
            f"{folder} cannot be read, so its images would be missing",
            found=error.strerror,
            fix=f"chmod u+rx {shlex.quote(os.fspath(folder))}, or move it away",
        ) from error


def _is_part(entry: os.DirEntry, above: tuple, without: Path | None) -> bool:
    if entry.name.startswith(".") or entry.name == "__MACOSX":
        return False
    if not entry.is_dir():
        return True
    if _identity(entry.path) in above:  # a link to a folder that contains it would never end
        return False
    if without is not None and without.exists() and os.path.samefile(entry.path, without):
        return False
    return not _is_pack_or_cache(Path(entry.path))


def _identity(folder) -> tuple[int, int]:
    """Return device and inode, which are equal for a folder and a link to it."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _is_pack_or_cache(folder: Path) -> bool:
    """Return True if a folder holds a pack or a cache, finished or not."""
    # False if the folder cannot be read: `_entries` raises the error later.
    if os.path.exists(folder / UNFINISHED / "plan.json"):
        return True
    try:
        with open(folder / "manifest.json", "rb") as manifest:
            return b'"format": "tpukit ' in manifest.read(200)
    except OSError:
        return False
