"""Recognise folders whose sub-folders are not classes, and name the line that packs them.

    chest_xray/{train,test,val}/NORMAL, PNEUMONIA    splits: the classes lie one folder deeper
    aptos/{train_images,test_images}, train.csv      splits: the table says what each image is
    carvana/{train,train_masks}                      images and their masks
    breast/{10253,10254,...}/{0,1}                   patients: the classes lie one folder deeper
    busi/benign/{1.png,1_mask.png}                   masks among the images of a class
    covid/COVID/{images,masks}                       masks beside the images of a class
    brain/{no,yes,brain_tumor_dataset/{no,yes}}      a second copy of the classes

tpukit does not guess: it raises an error with the line to write. If the sub-folders are the classes
after all, the caller names them in classes=.
"""

import contextlib
import csv
import glob
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError, first_few

# Words in folder names that do not describe the contents of images.
_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}
_TRAIN = {"train", "training"}
_MASKS = {"mask", "masks", "label", "labels", "ann", "anns", "annotation", "annotations", "gt"}
_MASKS |= {"seg", "segmentation", "segmentations", "groundtruth"}
_IMAGES = {"image", "images", "img", "imgs", "picture", "pictures"}
_LABELS = {"label", "labels"}
_OTHERS = {"dir", "set", "data", "pred"}
_PEOPLE = {"patient", "pat", "subject", "sub", "case", "participant", "person", "exam", "study"}
_MASK_ENDINGS = ("_mask", "-mask", "_seg", "_segmentation", "_gt")
_TABLE_ENDINGS = (".csv", ".tsv")


class _Layout(NamedTuple):
    """A folder as `find_images` reads it: its classes, and the images and folders of each."""

    folder: str
    names: Sequence[str]  # paths of images, relative to the folder
    inside: Mapping[str, set]  # the folders in each class; "" for images directly in the class

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
    _refuse_masks_in_classes(layout)
    _refuse_people(layout)
    _refuse_same_folders(layout)
    _refuse_roles(layout)
    _refuse_masks(layout)
    _refuse_copies(layout)


def words_of(name: str) -> set[str]:
    """Return the words in the name of a folder, in lower case: {"train", "images"}."""
    # "TrainImages" and "train_images" have two words; "RGBImages" has "rgb" and "images".
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _list(names: Sequence[str]) -> str:
    return first_few(list(names), 4)


def _refuse_masks_in_classes(layout: _Layout) -> None:
    """Raise if each sub-folder holds one folder with images and one with their masks."""
    folder, _, inside = layout
    # Only folders that exist below every sub-folder count: a class may have a folder of any name.
    common = sorted(set.intersection(*inside.values()))
    masks = [name for name in common if words_of(name) & _MASKS]
    images = [name for name in common if words_of(name) & _IMAGES and name not in masks]
    if not masks or len(images) != 1:
        return
    pattern = os.path.join(glob.escape(folder), "*", images[0], "*")
    files = f"files = sorted(glob.glob({pattern!r})); {_parts_of_paths(folder, 'files')}"
    raise InvalidValueError(
        f"{folder} has masks in each class, and pack would store them as images of the class",
        found=f"each sub-folder contains {_list(common)}",
        fix=f"to pack the images without the masks: {files}; "
        'pack(pandas.DataFrame({"path": files, "label": [part[0] for part in parts]}), ..., '
        f'labels="label")\nor, to pack the masks as images, too: '
        f"pack(..., classes={_all(layout)})",
    )


def _refuse_copies(layout: _Layout) -> None:
    """Raise if a sub-folder contains copies of the other sub-folders."""
    folder, _, inside = layout
    for name, below in inside.items():
        if len(below) > 1 and name not in below and below <= inside.keys():
            deeper = os.path.join(folder, name)
            raise InvalidValueError(
                f"{deeper} does not look like a class: its sub-folders have the names of classes",
                found=_list(sorted(below)),
                fix=f"pack({deeper!r}, ...), one folder deeper; or classes={_all(layout)}",
            )


def _refuse_people(layout: _Layout) -> None:
    """Raise if each sub-folder looks like a patient: classes inside, or a name like patient_7."""
    folder, names, inside = layout
    classes = layout.classes
    # `kinds` are the most frequent sub-folders. Others may exist, such as a copy of all patients.
    kinds, complete = Counter(map(frozenset, inside.values())).most_common(1)[0]
    # It is enough if most patients have all classes: some have images of a single class.
    have_classes_inside = "" not in kinds and 1 < len(kinds) < len(classes)
    are_parts = all(words_of(kind) & _PARTS for kind in kinds)
    have_classes_inside &= not are_parts and not all(map(_is_person, kinds))
    if have_classes_inside and not _parts(layout) and 2 * complete > len(classes):
        raise InvalidValueError(
            f"the {len(classes)} sub-folders of {folder} look like patients and not like classes",
            found=f"{_list(classes)}; most of them contain {_list(sorted(kinds))}",
            fix=f"files = {_files(layout)}; {_parts_of_paths(folder, 'files')}; "
            'table = pandas.DataFrame({"path": files, "patient": [part[0] for part in parts], '
            '"label": [part[1] for part in parts]}); '
            f'pack(table[table.label.isin({sorted(kinds)})], ..., labels="label", '
            f'groups="patient", classes={sorted(kinds)}); '
            f"or, if these sub-folders are classes: pack(..., classes={_all(layout)})",
        )
    if len(classes) > 1 and all(_is_person(name) for name in classes):
        raise InvalidValueError(
            f"the sub-folders of {folder} are named like patients and not like classes",
            found=_list(classes),
            fix="pass a table with the label of each image: pack(pandas.DataFrame("
            '{"path": files, "label": labels, "patient": patients}), ..., labels="label", '
            f'groups="patient"); or classes={_all(layout)}',
        )


def _files(layout: _Layout) -> str:
    """Return code that lists the images in the sub-folders of a folder, and in those below."""
    endings = {os.path.splitext(name)[1] for name in layout.names}
    ending = next(iter(endings)) if len(endings) == 1 else ".*"
    # "*" first: an image directly in the folder has no class, and is not in `layout.names`.
    found = os.path.join(glob.escape(layout.folder), "*", "**", "*" + ending)
    return f"sorted(glob.glob({found!r}, recursive=True))"


def _parts_of_paths(folder: str, files: str) -> str:
    """Return code that splits the paths of files, relative to the folder, into their parts."""
    return f"parts = [os.path.relpath(file, {folder!r}).split(os.sep) for file in {files}]"


def _is_person(name: str) -> bool:
    """Return whether a name is a word for people and a number, as in patient_7."""
    has_number = any(letter.isdecimal() for letter in name)
    return has_number and bool(words_of(name)) and words_of(name) <= _PEOPLE


def _all(layout: _Layout) -> str:
    """Return code for a list of all classes."""
    if len(layout.classes) <= 12:
        return str(layout.classes)
    return f'sorted(name[:-1] for name in glob.glob("*/", root_dir={layout.folder!r}))'


def _refuse_same_folders(layout: _Layout) -> None:
    """Raise if each sub-folder contains the same folders, and these look like the classes."""
    folder, names, inside = layout
    common = set.intersection(*inside.values())
    are_alike = all(found == common for found in inside.values())
    has_classes = len(common) > 1 and "" not in common
    # If the only sub-folder has splits inside, as in chest_xray/{train,test,val}, it is no class.
    are_parts = len(inside) > 1 and all(words_of(name) & _PARTS for name in common)
    has_classes &= not are_parts and not all(map(_is_person, common))
    if are_alike and has_classes and not _parts(layout):
        raise _one_deeper(layout, os.path.join(folder, layout.classes[0]), sorted(common))


def _one_deeper(layout: _Layout, deeper: str, found: Sequence[str]) -> InvalidValueError:
    classes = layout.classes
    return InvalidValueError(
        f"{layout.folder} would give the classes {_list(classes)}, and the classes lie deeper",
        found=f"in {deeper} lie {_list(found)}",
        fix=f"pack({deeper!r}, ...), one folder deeper; or classes={classes}",
    )


def _parts(layout: _Layout) -> list[str]:
    """Return the sub-folders whose names have a word for a split, such as train or test.

    At least two different words must occur: train_interior and train_station are classes, because
    both have the word train. If there is only one sub-folder, a single word is enough. Otherwise
    the result is [].
    """
    parts = [name for name in layout.classes if words_of(name) & _PARTS]
    kinds = {frozenset(words_of(name) & _PARTS) for name in parts}
    is_single = len(parts) == len(layout.classes) == 1
    return parts if len(kinds) > 1 or is_single else []


def _have_roles(classes: Sequence[str]) -> bool:
    """Return whether the names of all sub-folders are roles, such as images and masks."""
    words = [words_of(name) for name in classes]
    if len(classes) < 2 or not all(words):
        return False
    if all(word <= _LABELS for word in words):  # label_0, label_1
        return False
    # HAM10000_images_part_1 and HAM10000_images_part_2 differ only in their numbers.
    are_numbered = len(set(map(frozenset, words))) == 1 and bool(words[0] & _IMAGES)
    roles = _PARTS | _MASKS | _IMAGES | _OTHERS
    return are_numbered or all(word <= roles for word in words)


def _are_pairs(layout: _Layout) -> bool:
    """Return whether two sub-folders have images and masks with the same file names.

    An example is JPEGImages and SegmentationClass of Pascal VOC.
    """
    words = list(map(words_of, layout.classes))
    have_images = any(word & _IMAGES and not word & _MASKS for word in words)
    return have_images and any(word & _MASKS for word in words) and bool(_with_masks(layout))


def _refuse_roles(layout: _Layout) -> None:
    """Raise if sub-folders are splits, or images and masks."""
    folder, names, _ = layout
    classes = layout.classes
    parts = _parts(layout)
    if not parts and not _have_roles(classes) and not _are_pairs(layout):
        return
    # The training split first, so that the fix names it.
    for part in sorted(parts, key=lambda name: not words_of(name) & _TRAIN):
        deeper, found = _classes_in(layout, part)
        if len(found) > 1:
            raise _one_deeper(layout, deeper, found)
    fix = _with_masks(layout) or _with_table(layout)
    if not fix:
        fix = (
            "pass a table with the label of each image: "
            'pack(pandas.DataFrame({"path": files, "label": labels}), ..., labels="label"); '
            'or, if its column "mask" has the paths of masks, masks="mask"'
        )
    raise InvalidValueError(
        f"{folder} would give the classes {_list(classes)}, which do not describe the images",
        found=f"{len(names):,} images, for example {names[0]}",
        fix=f"{fix}; or classes={classes}",
    )


def _classes_in(layout: _Layout, part: str) -> tuple[str, list[str]]:
    """Return the folder in a split that contains the class folders, and the classes."""
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
    """Return the code that packs two folders with images and masks; "" without such folders."""
    by_folder = defaultdict(list)
    for name in sorted(layout.names):
        by_folder[os.path.dirname(name)].append(Path(name).stem)
    masks = [name for name in by_folder if words_of(name) & _MASKS]
    images = [name for name in by_folder if name not in masks]
    for image in images:
        for mask in masks:
            stems = by_folder[image]
            # Both lists are sorted, so each mask must begin with the name of the image in the same
            # place: 1.png or 1_mask.png for 1.jpg.
            are_alike = len(stems) == len(by_folder[mask])
            if are_alike and all(map(str.startswith, by_folder[mask], stems)):
                folder = glob.escape(layout.folder)
                found = [os.path.join(folder, name, "*") for name in (image, mask)]
                return (
                    f"images, masks = [sorted(glob.glob(files)) for files in {found}]; "
                    'pack(pandas.DataFrame({"path": images, "mask": masks}), ..., masks="mask")'
                )
    return ""


class _Match(NamedTuple):
    """A table beside the folders, with a column that names their images."""

    table: str  # the path of the CSV or TSV file
    separator: str
    column: str
    ending: str  # ".png" if the column names images without the ending of the file; else ""
    others: Sequence[str]  # the other columns
    inside: str | None  # the folder of all images of the column; None for several


def _with_table(layout: _Layout) -> str:
    """Return the code that packs a table beside the folders; "" if no table names the images."""
    files = [file for file in os.listdir(layout.folder) if file.lower().endswith(_TABLE_ENDINGS)]
    # Tables of the training split first, because sample_submission.csv names test images.
    for file in sorted(files, key=lambda file: (not words_of(file) & _TRAIN, file)):
        # The name may be that of a directory, or a field may have more than csv's 128 KiB.
        with contextlib.suppress(OSError, csv.Error):
            match = _matching(os.path.join(layout.folder, file), layout.names)
            if match is not None:
                return _line(match, layout)
    return ""


def _matching(table: str, names: Sequence[str]) -> _Match | None:
    """Find the first column whose first value is the name of an image; None if there is none.

    Columns without a name come last: an index from `DataFrame.to_csv` may look like such names.
    """
    folders = defaultdict(set)  # by the name of an image, with its ending and without
    for name in names:
        inside, file = os.path.split(name)
        folders[file].add(inside)
        # Tables of APTOS 2019 and ISIC 2018 name images without the ending of the file.
        folders[os.path.splitext(file)[0]].add(inside)
    separator = "\t" if table.lower().endswith(".tsv") else ","
    with open(table, newline="", encoding="utf-8-sig", errors="replace") as lines:
        rows = csv.reader(lines, delimiter=separator)
        columns = next(rows, [])
        first = next(rows, [])
        pairs = enumerate(zip(columns, first, strict=False))  # rows may be shorter or longer
        places = {place: name for place, (name, value) in pairs if value in folders}
        if not places:
            return None
        place = min(places, key=lambda place: (not places[place], place))
        values = {row[place] for row in rows if len(row) > place} | {first[place]}
    column = columns[place] or f"Unnamed: {place}"  # pandas' name of a column without one
    others = [name for name in [*columns[:place], *columns[place + 1 :]] if name]
    files = (os.path.basename(name) for name in names)
    ending = os.path.splitext(next(file for file in files if _is_named(file, first[place])))[1]
    inside = _folder_of_all([folders[value] for value in values if value in folders], table)
    ending = "" if first[place].endswith(ending) else ending
    return _Match(table, separator, column, ending, others, inside)


def _is_named(file: str, value: str) -> bool:
    return value in (file, os.path.splitext(file)[0])


def _folder_of_all(folders: Sequence[set], table: str) -> str | None:
    """Return the folder that contains all images of a table; None if there is no such folder.

    Images of train and test may have the same names. Then two folders contain all images, and the
    result is the folder whose name shares the most words with the name of the table. If both share
    equally many, the result is the training folder.
    """
    words = words_of(os.path.basename(table))

    def rank(inside: str) -> tuple:
        return -len(words & words_of(inside)), not words_of(inside) & _TRAIN, inside

    return min(set.intersection(*folders), key=rank, default=None)


def _line(match: _Match, layout: _Layout) -> str:
    """Return the code that reads the table of a match and packs its images."""
    path = f"table[{match.column!r}]"
    if match.ending:
        path = f"({path} + {match.ending!r})"
    labels = ""
    if len(match.others) == 1:
        labels = f", labels={match.others[0]!r}"
    elif match.others:
        labels = f", labels={match.others}"
    # As str, because pandas would read the names 007 and 7 as one number.
    read = f"{match.table!r}, sep={match.separator!r}, dtype={{{match.column!r}: str}}"
    table = f"table = pandas.read_csv({read})"
    if match.inside is None:
        files = f"files = {{os.path.basename(file): file for file in {_files(layout)}}}"
        return f"{table}; {files}; pack(table.assign(path={path}.map(files)), ...{labels})"
    root = os.path.join(layout.folder, match.inside)
    return f"{table}; pack(table.assign(path={path}), ..., root={root!r}{labels})"


def _refuse_masks(layout: _Layout) -> None:
    """Raise if masks are in the same folders as the images, as 1_mask.png beside 1.png."""
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
    # The part of the mask's name after that of the image, such as "_mask". The code of
    # the fix recognises masks by it.
    inside = os.path.splitext(mask)[0][len(os.path.splitext(image)[0]) :]
    classes = layout.classes
    raise InvalidValueError(
        f"{layout.folder} has masks beside {len(pairs):,} of its images, and pack would take the "
        "masks for images of the classes",
        found=f"{image} and {mask}",
        fix=f"to pack the images without the masks: images = [file for file in {_files(layout)} "
        f"if {inside!r} not in os.path.basename(file)]; "
        f"{_parts_of_paths(layout.folder, 'images')}; "
        'pack(pandas.DataFrame({"path": images, "label": [part[0] for part in parts]}), ..., '
        f'labels="label", classes={classes})\nor, to pack the masks as images, too: '
        f"pack(..., classes={_all(layout)})",
    )
