"""What `pack` can read: a folder of images, a table with paths, or anything that yields images and labels."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.display.progress import screen
from tpukit.storage.array_records import row_type
from tpukit.storage.files import write_file

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's ImageFolder


@dataclass(frozen=True)
class PackSource:
    """What is to be packed, in its own order.

    Attributes:
        fingerprint: the same for the same names, labels and groups; of items, for the same first one and length.
        label_names: one for each label.
        classes: of a folder, the names its class numbers stand for.
        group_names: what the numbers in the rows stand for.
        rows: (N,) of `row_type`; None for items, whose labels are not known yet.
        root: the folder the names are in, "" for the current one.
        names: one file for each row; none for items.
        items: pairs of image and labels, for a source that has no files.
        length: how many items there are, if the source says so.
        groups: (N,) int32 of items; None where every image is a group of its own.
        look: called with the folder's `work`, once the folder is ours; returns the source with what took long to find.
        shuffled: False keeps the order of `rows`.
        reader: "package.module:class" of what reads the images in the processes, made of `work`, root and plan, to be
            used as `Files` is; "" for `Files`.
        settings: what else decides what is written; becomes part of the plan.
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
    look: Callable[[Path], "PackSource"] | None = None
    shuffled: bool = True
    reader: str = ""
    settings: dict = field(default_factory=dict)


def describe_source(source, labels=None, groups=None) -> PackSource:
    """Describe what is to be packed; of a table and a folder only names are read, of items the first one.

    Raises:
        ValueError: it cannot be packed, or holds nothing.
        FileNotFoundError: the folder does not exist.
    """
    if isinstance(source, str | os.PathLike):
        return _describe_folder(source, labels, groups)
    if hasattr(source, "columns") and hasattr(source, "iloc"):
        return _describe_table(source, labels, groups)
    return _describe_items(source, labels, groups)


def _describe_folder(folder, labels, groups) -> PackSource:
    if labels is not None or groups is not None:
        raise ValueError(
            "the labels of a folder are its sub-folders, and it has no groups\n"
            "  fix:   pass a DataFrame with a path column, with labels= and groups= the names of its columns"
        )
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"there is no folder {folder}\n  fix:   pass the folder that holds one folder per class"
        )
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
            "  fix:   pass the folder that holds one folder per class, or a DataFrame with a path column"
        )
    return _of_files(os.fspath(folder), names, numbers, None, ["class"], classes, [])


def _describe_table(table, labels, groups) -> PackSource:
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
    rows = _make_rows(labels, groups)
    fingerprint = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
    fingerprint.update(rows.tobytes())
    fingerprint.update(repr((label_names, classes, group_names)).encode(errors="surrogateescape"))
    return PackSource(fingerprint.hexdigest(), label_names, classes, group_names, rows, root, tuple(names))


def _describe_items(source, labels, groups) -> PackSource:
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
    data, values = _check_item(first, 0)
    names = [labels] if isinstance(labels, str) else labels and list(labels)
    if not names:
        names = ["label"] if len(values) == 1 else [f"label_{number}" for number in range(len(values))]
    if len(names) != len(values):
        raise ValueError(
            f"the items have {len(values)} labels, and labels= names {len(names)}: {', '.join(names)}\n"
            f"  fix:   a name for each of the {len(values)}, or none"
        )
    fingerprint = hashlib.sha256(repr((length, names, group_names)).encode())
    fingerprint.update(bytes(data) + values.tobytes() + (b"" if numbers is None else numbers.tobytes()))
    items = itertools.chain([first], items)
    return PackSource(fingerprint.hexdigest(), names, [], group_names, items=items, length=length, groups=numbers)


def _make_rows(labels, groups):
    """Return the rows of an index in the order of the source; without groups every image is a group of its own."""
    import numpy

    rows = numpy.zeros(len(labels), row_type(labels.shape[1]))
    rows["row"] = numpy.arange(len(labels))
    rows["group"] = rows["row"] if groups is None else groups
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


# ---- reading them by their numbers ---------------------------------------------------------------------------------


class Files:
    """The files of a source: `[n]` is the bytes of one."""

    shape = None  # not known until they are decoded
    encoding = "jpeg"

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


# ---- items, which are stored first: some can be read only once, and a random order needs all of them -----------------


def store_items(source: PackSource, folder: Path, size: int | None, progress: str | None):
    """Write the items of a source one after the other, in their order, and return their rows.

    Raises:
        ValueError: an item is not like the first one.
    """
    import numpy
    from PIL import Image

    folder.mkdir(exist_ok=True)
    ends, labels, first = [0], [], None
    with open(folder / "data", "wb") as file, screen(progress) as display:
        for number, item in enumerate(source.items):
            data, values = _check_item(item, number)
            if size is not None and not isinstance(data, bytes) and data.shape != (size, size, 3):
                data = numpy.asarray(Image.fromarray(data).resize((size, size), Image.Resampling.BILINEAR))
            shape = None if isinstance(data, bytes) else data.shape
            first = first or (shape, len(values))
            if (shape, len(values)) != first:
                raise ValueError(
                    f"item {number} is not like those before: {_describe_item(shape, len(values))}\n"
                    f"  found: until then {_describe_item(*first)}\n"
                    "  fix:   all as bytes or all as arrays, with as many labels; size= makes arrays of one shape"
                )
            ends.append(ends[-1] + file.write(data if shape is None else data.tobytes()))
            labels.append(values)
            display.bar("read images", number + 1, source.length)
            display.draw()
        file.flush()
        os.fsync(file.fileno())
    groups = None if source.groups is None else len(source.groups)
    for what, count in (("the source has a length of", source.length), ("groups= has", groups)):
        if count not in (None, len(labels)):
            raise ValueError(
                f"the source yields {len(labels):,} items, and {what} {count:,}\n"
                "  fix:   as many of one as of the other"
            )
    numpy.save(folder / "ends.npy", numpy.array(ends))
    write_file(folder / "shape.json", json.dumps(first[0]).encode())
    return _make_rows(numpy.stack(labels), source.groups)


class StoredItems:
    """What `store_items` wrote: `[n]` is the bytes of an item's image, `shape` that of pixels, None of encoded ones."""

    def __init__(self, folder: Path):
        import numpy

        self._file = open(folder / "data", "rb")  # noqa: SIM115 (as long as this lives)
        self._ends = numpy.load(folder / "ends.npy")
        shape = json.loads((folder / "shape.json").read_text())
        self.shape, self.encoding = shape and tuple(shape), "uint8" if shape else "jpeg"

    def __getitem__(self, number: int) -> bytes:
        begin, end = self._ends[number : number + 2].tolist()
        return os.pread(self._file.fileno(), end - begin, begin)

    def name(self, number: int) -> str:
        """Say which item it is."""
        return f"item {number}"


def _check_item(item, number: int) -> tuple:
    """Return the image, bytes or (H, W, 3) uint8, and the labels, (L,) float32, of one item.

    Raises:
        ValueError: it is something else.
    """
    import numpy

    try:
        data, labels = item
        labels = numpy.asarray(labels, numpy.float32).reshape(-1)
        if isinstance(data, bytes):
            return data, labels
        data = numpy.asarray(data)
        if data.dtype == numpy.uint8 and data.ndim == 3 and data.shape[2] == 3 and data.size:
            return numpy.ascontiguousarray(data), labels
        found = f"an image of shape {data.shape} and dtype {data.dtype}"
    except (TypeError, ValueError) as error:
        found = f"{type(item).__name__}: {error}"
    raise ValueError(
        f"item {number} is not (image, labels), the image bytes or (H, W, 3) uint8\n  found: {found}\n"
        "  fix:   give the bytes of the file, or numpy.asarray(image.convert('RGB')), and one number or several"
    )


def _describe_item(shape, labels: int) -> str:
    return f"{'bytes' if shape is None else f'an array of shape {shape}'} and {labels} labels"
