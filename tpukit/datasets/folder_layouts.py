"""Recognise folders whose sub-folders are not classes, and name the line that packs them.

    chest_xray/{train,test,val}/NORMAL, PNEUMONIA    splits: the classes lie one folder deeper
    aptos/{train_images,test_images}, train.csv      splits: the table says what each image is
    carvana/{train,train_masks}                      images and their masks
    breast/{10253,10254,...}/{0,1}                   patients: the classes lie one folder deeper
    busi/benign/{1.png,1_mask.png}                   masks among the images of a class

tpukit does not guess: the error has the line to write, or the caller names the classes.
"""

import csv
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError, first_few

# Words in the names of folders that say nothing of what is seen in the images.
_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}
_TRAIN = {"train", "training"}
_MASKS = {"mask", "masks", "label", "labels", "ann", "anns", "annotation", "annotations", "gt"}
_MASKS |= {"seg", "segmentation", "segmentations", "groundtruth"}
_IMAGES = {"image", "images", "img", "imgs", "picture", "pictures"}
_OTHERS = {"dir", "set", "data", "pred"}
_PEOPLE = {"patient", "pat", "subject", "sub", "case", "participant", "person", "exam", "study"}
_MASK_ENDINGS = ("_mask", "-mask", "_seg", "_segmentation", "_gt")
_TABLE_ENDINGS = (".csv", ".tsv")


class _Layout(NamedTuple):
    """A folder as it would be read: its classes, and the images of each."""

    folder: str
    names: Sequence[str]  # paths of images, relative to the folder
    inside: Mapping[str, set]  # the folders in each class; "" for images that lie in it directly

    @property
    def classes(self) -> list[str]:
        return list(self.inside)


def refuse_other_layouts(folder: str, names: Sequence[str]) -> None:
    """Raise ValueError if the sub-folders of a folder do not look like classes.

    Args:
        folder: the folder.
        names: the paths of its images, relative to it.
    """
    inside = defaultdict(set)
    for name in names:
        first, *others = name.split(os.sep)
        inside[first].add(others[0] if len(others) > 1 else "")
    layout = _Layout(folder, names, inside)
    _refuse_people(layout)
    _refuse_same_folders(layout)
    _refuse_roles(layout)
    _refuse_masks(layout)


def words_of(name: str) -> set[str]:
    """Return the words in the name of a folder, in lower case: {"train", "images"}."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def _list(names: Sequence[str]) -> str:
    return first_few(list(names), 4)


def _refuse_people(layout: _Layout) -> None:
    """Raise if the sub-folders are the patients of the images."""
    folder, names, inside = layout
    classes = layout.classes
    # Beside the patients may lie another folder, such as a copy of all of them.
    kinds, complete = Counter(map(frozenset, inside.values())).most_common(1)[0]
    # Most and not all, because a patient may have images of one class only.
    have_classes_inside = "" not in kinds and 1 < len(kinds) < len(classes)
    are_parts = all(words_of(kind) & _PARTS for kind in kinds)
    if have_classes_inside and not are_parts and not _parts(layout) and 2 * complete > len(classes):
        raise InvalidValueError(
            f"the {len(classes)} sub-folders of {folder} look like patients and not like classes",
            found=f"{_list(classes)}; in most of them lie {_list(sorted(kinds))}",
            fix=f"files = {_files(layout)}; {_parts_of_paths(folder, 'files')}; "
            'table = pandas.DataFrame({"path": files, "patient": [part[0] for part in parts], '
            '"label": [part[1] for part in parts]}); '
            f'pack(table[table.label.isin({sorted(kinds)})], ..., labels="label", '
            f'groups="patient", classes={sorted(kinds)}); or classes={_all(classes)}',
        )
    if len(classes) > 1 and all(_is_person(name) for name in classes):
        raise InvalidValueError(
            f"the sub-folders of {folder} are named like patients and not like classes",
            found=_list(classes),
            fix="pass a table with the label of each image: pack(pandas.DataFrame("
            '{"path": files, "label": labels, "patient": patients}), ..., labels="label", '
            f'groups="patient"); or classes={_all(classes)}',
        )


def _files(layout: _Layout) -> str:
    """Return code that lists the images of a folder, in all folders below."""
    endings = {os.path.splitext(name)[1] for name in layout.names}
    ending = next(iter(endings)) if len(endings) == 1 else ".*"
    return f"sorted(glob.glob({os.path.join(layout.folder, '**', '*' + ending)!r}, recursive=True))"


def _parts_of_paths(folder: str, files: str) -> str:
    """Return code that divides the paths of files, from the folder on."""
    return f"parts = [os.path.relpath(file, {folder!r}).split(os.sep) for file in {files}]"


def _is_person(name: str) -> bool:
    has_number = any(letter.isdecimal() for letter in name)
    return has_number and bool(words_of(name)) and words_of(name) <= _PEOPLE


def _all(classes: Sequence[str]) -> str:
    """Return code that names all classes."""
    return str(list(classes)) if len(classes) <= 12 else "sorted(os.listdir(folder))"


def _refuse_same_folders(layout: _Layout) -> None:
    """Raise if the same folders lie in each sub-folder, and these look like the classes."""
    folder, names, inside = layout
    common = set.intersection(*inside.values())
    are_alike = all(found == common for found in inside.values())
    has_classes = len(common) > 1 and "" not in common
    are_parts = all(words_of(name) & _PARTS for name in common)
    if are_alike and has_classes and not are_parts and not _parts(layout):
        raise _one_deeper(layout, os.path.join(folder, layout.classes[0]), sorted(common))


def _one_deeper(layout: _Layout, deeper: str, found: Sequence[str]) -> InvalidValueError:
    classes = layout.classes
    return InvalidValueError(
        f"{layout.folder} would give the classes {_list(classes)}, and the classes lie deeper",
        found=f"in {deeper} lie {_list(found)}",
        fix=f"pack({deeper!r}, ...), one folder deeper; or classes={classes}",
    )


def _parts(layout: _Layout) -> list[str]:
    """Return the sub-folders that are splits: all are, or two or more are named so."""
    classes = layout.classes
    parts = [name for name in classes if words_of(name) & _PARTS]
    return parts if len(parts) > 1 or len(parts) == len(classes) else []


def _refuse_roles(layout: _Layout) -> None:
    """Raise if sub-folders are splits, or images and masks."""
    folder, names, _ = layout
    classes = layout.classes
    roles = _PARTS | _MASKS | _IMAGES | _OTHERS
    have_roles = len(classes) > 1 and all(words_of(name) <= roles for name in classes)
    have_words = all(words_of(name) for name in classes)
    parts = _parts(layout)
    if not parts and not (have_roles and have_words):
        return
    for part in sorted(parts, key=lambda name: not words_of(name) & _TRAIN):
        deeper, found = _classes_in(layout, part)
        if len(found) > 1:
            raise _one_deeper(layout, deeper, found)
    fix = _with_masks(layout) or _with_table(layout)
    if not fix:
        fix = (
            "pass a table with the label of each image: "
            'pack(pandas.DataFrame({"path": files, "label": labels}), ..., labels="label"), '
            'masks="mask" for a column of those'
        )
    raise InvalidValueError(
        f"{folder} would give the classes {_list(classes)}, which do not describe the images",
        found=f"{len(names):,} images, for example {names[0]}",
        fix=f"{fix}; or classes={classes}",
    )


def _classes_in(layout: _Layout, part: str) -> tuple[str, list[str]]:
    """Return the folder below a split that holds its classes, and the classes."""
    below = [Path(name).parts[1:] for name in layout.names if name.split(os.sep)[0] == part]
    deeper = os.path.join(layout.folder, part)
    # Archives often hold one folder in another, such as train/train/.
    while below and all(len(path) > 2 for path in below) and len({path[0] for path in below}) == 1:
        deeper = os.path.join(deeper, below[0][0])
        below = [path[1:] for path in below]
    if any(len(path) < 2 for path in below):
        return deeper, []
    return deeper, sorted({path[0] for path in below})


def _with_masks(layout: _Layout) -> str:
    """Return the line for two folders with images and their masks; "" if there are none."""
    by_folder = defaultdict(list)
    for name in sorted(layout.names):
        by_folder[os.path.dirname(name)].append(Path(name).stem)
    masks = [name for name in by_folder if words_of(name) & _MASKS]
    images = [name for name in by_folder if name not in masks]
    for image in images:
        for mask in masks:
            stems = by_folder[image]
            are_alike = len(stems) == len(by_folder[mask])
            if are_alike and all(map(str.startswith, by_folder[mask], stems)):
                found = [os.path.join(layout.folder, name, "*") for name in (image, mask)]
                return (
                    f"images, masks = [sorted(glob.glob(files)) for files in {found}]; "
                    'pack(pandas.DataFrame({"path": images, "mask": masks}), ..., masks="mask")'
                )
    return ""


class _Match(NamedTuple):
    """A table beside the folders, whose first row names one of the images."""

    table: str  # the path of the CSV or TSV file
    separator: str
    column: str
    value: str
    others: Sequence[str]  # the other columns
    image: str  # the path of the image, relative to the folder


def _with_table(layout: _Layout) -> str:
    """Return the line for a table beside the folders that names their images; "" for none."""
    files = [file for file in os.listdir(layout.folder) if file.lower().endswith(_TABLE_ENDINGS)]
    # Training first, because sample_submission.csv names images of the test.
    for file in sorted(files, key=lambda file: (not words_of(file) & _TRAIN, file)):
        match = _matching(os.path.join(layout.folder, file), layout.names)
        if match is not None:
            return _line(match, layout.folder)
    return ""


def _matching(table: str, names: Sequence[str]) -> _Match | None:
    """Return the column of a table whose first value is the name of an image."""
    separator = "\t" if table.lower().endswith(".tsv") else ","
    with open(table, newline="", encoding="utf-8", errors="replace") as lines:
        rows = csv.reader(lines, delimiter=separator)
        columns = next(rows, [])
        first = next(rows, [])
    images = {}
    for name in names:
        file = os.path.basename(name)
        images.setdefault(file, name)
        # Tables of APTOS 2019 and ISIC 2018 name images without the ending of the file.
        images.setdefault(os.path.splitext(file)[0], name)
    for column, value in zip(columns, first, strict=False):
        if value in images:
            others = [other for other in columns if other != column]
            return _Match(table, separator, column, value, others, images[value])
    return None


def _line(match: _Match, folder: str) -> str:
    """Return the line that packs the table of a match."""
    ending = os.path.splitext(match.image)[1]
    root = os.path.join(folder, os.path.dirname(match.image))
    path = f"table[{match.column!r}]"
    if not match.value.endswith(ending):
        path += f" + {ending!r}"
    labels = ""
    if len(match.others) == 1:
        labels = f", labels={match.others[0]!r}"
    elif match.others:
        labels = f", labels={match.others}"
    # As str, because pandas would read the names 007 and 7 as one number.
    read = f"{match.table!r}, sep={match.separator!r}, dtype={{{match.column!r}: str}}"
    return (
        f"table = pandas.read_csv({read}); "
        f"pack(table.assign(path={path}), ..., root={root!r}{labels})"
    )


def _refuse_masks(layout: _Layout) -> None:
    """Raise if masks lie among the images, as 1_mask.png beside 1.png."""
    stems = {os.path.splitext(name)[0]: name for name in layout.names}
    pairs = {}
    for stem, name in stems.items():
        for ending in _MASK_ENDINGS:
            image = stem.removesuffix(ending)
            if image != stem and image in stems:
                pairs[stems[image]] = name
    if not pairs:
        return
    image, mask = next(iter(pairs.items()))
    inside = os.path.splitext(mask)[0][len(os.path.splitext(image)[0]) :]
    classes = layout.classes
    raise InvalidValueError(
        f"{len(pairs):,} images of {layout.folder} have their masks beside them, "
        "which are no images",
        found=f"{image} and {mask}",
        fix=f"images = [file for file in {_files(layout)} if {inside!r} not in file]; "
        f"{_parts_of_paths(layout.folder, 'images')}; "
        'pack(pandas.DataFrame({"path": images, "label": [part[0] for part in parts]}), ..., '
        f'labels="label", classes={classes}); or classes={_all(classes)}',
    )
