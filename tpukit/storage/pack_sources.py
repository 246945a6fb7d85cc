"""What `pack` can read: a folder of images, a table with paths, or anything that yields images and labels."""

import hashlib
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass

from tpukit.storage.array_records import row_type
from tpukit.storage.spool import check_item

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's ImageFolder


@dataclass(frozen=True)
class PackSource:
    """What is to be packed, in its own order.

    Attributes:
        fingerprint: the same for the same names, labels and groups; of items, for the same first one and length.
        label_names: one for each label.
        classes: of a folder, the names its class numbers stand for.
        group_names: what the numbers in the rows stand for.
        rows: (N,) of `shards.row_type`; None for items, whose labels are not known yet.
        root: the folder the names are in, "" for the current one.
        names: one file for each row; none for items.
        items: pairs of image and labels, for a source that has no files.
        length: how many items there are, if the source says so.
        groups: (N,) int32 of items; None where every image is a group of its own.
    """

    fingerprint: str
    label_names: list[str]
    classes: list[str]
    group_names: list[str]
    rows: object = None
    root: str = ""
    names: tuple[str, ...] = ()
    items: object = None
    length: int | None = None
    groups: object = None


def look_at(source, labels=None, groups=None) -> PackSource:
    """Say what is to be packed; of a table and a folder only names are read, of items the first one.

    Raises:
        ValueError: it cannot be packed, or holds nothing.
        FileNotFoundError: the folder does not exist.
    """
    if isinstance(source, str | os.PathLike):
        return _look_at_folder(source, labels, groups)
    if hasattr(source, "columns") and hasattr(source, "iloc"):
        return _look_at_table(source, labels, groups)
    return _look_at_items(source, labels, groups)


def _look_at_folder(folder, labels, groups) -> PackSource:
    if labels is not None or groups is not None:
        raise ValueError(
            "the labels of a folder are its sub-folders, and it has no groups\n"
            "  fix:   pass a DataFrame with a path column, with labels= and groups= the names of its columns"
        )
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder}\n  fix:   pass the folder that holds one folder a class")
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    names, numbers = [], []
    for number, name in enumerate(classes):
        for inner, folders, files in os.walk(os.path.join(folder, name), followlinks=True):
            folders.sort()
            found = [file for file in sorted(files) if file.lower().endswith(_EXTENSIONS)]
            names += [os.path.relpath(os.path.join(inner, file), folder) for file in found]
            numbers += [[number]] * len(found)
    if not names:
        raise ValueError(
            f"{folder} holds no image in a sub-folder\n"
            f"  found: {sorted(os.listdir(folder))[:4] or 'an empty folder'}\n"
            "  fix:   pass the folder that holds one folder a class, or a DataFrame with a path column"
        )
    return _of_files(os.fspath(folder), names, numbers, None, ["class"], classes, [])


def _look_at_table(table, labels, groups) -> PackSource:
    labels = [labels] if isinstance(labels, str) else list(labels or ())
    for column in ["path", *labels, *([groups] if groups is not None else [])]:
        if column not in table.columns:
            raise ValueError(
                f"the table has no column {column!r}\n  found: {', '.join(map(str, table.columns))}\n"
                "  fix:   name the image files in a column path, and labels= and groups= as the table does"
            )
    if not len(table):
        raise ValueError("the table has no row\n  fix:   check how it was made")
    try:
        values = table[labels].to_numpy("float32")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"labels are numbers, and these are not: {error}\n  found: {dict(table[labels].dtypes.astype(str))}\n"
            "  fix:   table[column].astype('category').cat.codes gives each word a number"
        ) from error
    numbers, group_names = _number_groups(table[groups]) if groups is not None else (None, [])
    try:
        names = [os.fspath(path) for path in table["path"]]
    except TypeError as error:
        raise ValueError(
            f"the column path holds something else: {error}\n  fix:   drop the rows without one"
        ) from error
    return _of_files("", names, values, numbers, list(map(str, labels)), [], group_names)


def _of_files(root, names, labels, groups, label_names, classes, group_names) -> PackSource:
    import numpy

    labels = numpy.asarray(labels, numpy.float32).reshape(len(names), len(label_names))
    rows = make_rows(labels, groups)
    told = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
    told.update(rows.tobytes())
    told.update(repr((label_names, classes, group_names)).encode(errors="surrogateescape"))
    return PackSource(told.hexdigest(), label_names, classes, group_names, rows, root, tuple(names))


def _look_at_items(source, labels, groups) -> PackSource:
    numbers, group_names = _number_groups(groups) if groups is not None else (None, [])
    length = len(source) if hasattr(source, "__len__") else None
    if length is not None and hasattr(source, "__getitem__"):
        items = (source[number] for number in range(length))
    elif isinstance(source, Iterable):
        items = iter(source)
    else:
        raise ValueError(
            f"pack cannot read a {type(source).__name__}\n"
            "  fix:   pass a folder, a DataFrame with a path column, or items (image, labels), the image bytes or uint8"
        )
    first = next(items, None)
    if first is None:
        raise ValueError("the source yields nothing\n  fix:   check its path; a generator can be used only once")
    data, values = check_item(first, 0)
    names = [labels] if isinstance(labels, str) else labels and list(labels)
    if not names:
        names = ["label"] if len(values) == 1 else [f"label_{number}" for number in range(len(values))]
    if len(names) != len(values):
        raise ValueError(
            f"the items have {len(values)} labels, and labels= names {len(names)}: {', '.join(names)}\n"
            f"  fix:   a name for each of the {len(values)}, or none"
        )
    told = hashlib.sha256(repr((length, names, group_names)).encode())
    told.update(bytes(data) + values.tobytes() + (b"" if numbers is None else numbers.tobytes()))
    items = itertools.chain([first], items)
    return PackSource(told.hexdigest(), names, [], group_names, items=items, length=length, groups=numbers)


def make_rows(labels, groups):
    """Return the rows of an index in the order of the source; without groups every image is its own."""
    import numpy

    rows = numpy.zeros(len(labels), row_type(labels.shape[1]))
    rows["source"] = numpy.arange(len(labels))
    rows["group"] = rows["source"] if groups is None else groups
    rows["labels"] = labels
    return rows


def _number_groups(values):
    """Return each value's number (int32), and the values, sorted: the same whatever the order of the images."""
    import numpy

    # None and NaN belong to no group, and would put the same patient on both sides of a split.
    values = list(values)
    missing = [number for number, value in enumerate(values) if value is None or value != value]
    if missing:
        raise ValueError(
            f"{len(missing)} images have no group, first image {missing[0]}\n  fix:   name a group for each"
        )
    names, numbers = numpy.unique([str(value) for value in values], return_inverse=True)
    return numbers.astype(numpy.int32), names.tolist()


class Files:
    """The files of a source by their numbers: `[n]` is the bytes of one."""

    shape = None  # they are yet to be decoded

    def __init__(self, names, root: str):
        self.names, self._root = Names(names), root

    def __getitem__(self, number: int) -> bytes:
        with open(os.path.join(self._root, self.names[number]), "rb") as file:
            return file.read()

    def name(self, number: int) -> str:
        """Say where a file is."""
        return os.path.join(self._root, self.names[number])


class Names:
    """Names in a file, each ended by a zero byte as no path holds one; two million cost 16 MB of memory, not 200."""

    def __init__(self, file):
        import numpy

        self._bytes = numpy.memmap(file, numpy.uint8, "r")
        self._ends = numpy.flatnonzero(self._bytes == 0)

    def __getitem__(self, number: int) -> str:
        begin = self._ends[number - 1] + 1 if number else 0
        return os.fsdecode(self._bytes[begin : self._ends[number]].tobytes())

    @staticmethod
    def encode(names: Iterable[str]) -> bytes:
        """Return the bytes of such a file."""
        return b"".join(os.fsencode(name) + b"\0" for name in names)
