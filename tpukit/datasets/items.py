"""Items without files, such as a dataset's.

Items with numbers are read in the order in which they are packed, and written once. A stream has one order only: its
items are stored beside the pack first, and read from there in the order of the pack.
"""

import hashlib
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from tpukit.datasets.checked_files import npy, write_file
from tpukit.datasets.image_modes import NEARLY_BLACK
from tpukit.datasets.item_parts import Columns, brightest_of, check_item, label_columns
from tpukit.datasets.label_arrays import are_other_numbers
from tpukit.datasets.masks import is_masked, resize
from tpukit.essentials.data import inside, only_iterates
from tpukit.essentials.display import InvalidValueError, SystemFailureError, first_few, kind_of, parts_of, screen

_TWICE = 16  # items of a dataset that are read once more: one that is flipped now and then is the same half of the time
_SAMPLED = 100  # items of a dataset that are read to know it again; of a list, which is in memory, all


class StoredItem(NamedTuple):
    """An item as it is stored: the bytes of a file, or those of pixels."""

    image: bytes
    labels: object  # (L,) float32
    dark: tuple[int, ...] = ()  # the brightest value of an image of 16 bits that came out nearly black
    failure: str = ""  # the reason why it could not be read


class Items:
    """The items of a source.

    Attributes:
        length: how many there are, if the source says so.
        by_number: True where each can be read by its number.
        first: (image, labels) of the first that can be read.
        labels: how many each has.
        columns: the keys of the labels where items are dicts; else None.
        classes: what the numbers of a single label stand for, if classes= or the dataset says so; else empty.
        has_masks: True where each has a mask.
        dark: of a stream, the brightest value of each stored image of 16 bits that came out nearly black.
        sizes: of a source with numbers, the bytes that some of its images take as they are, before `size` applies.
    """

    def __init__(self, source, columns: Columns | None = None, classes=None):
        self.source = source
        self.dark: list[int] = []
        self.sizes: list[int] = []
        self._columns = replace(columns or Columns(), classes=classes or ())
        self.length = len(source) if hasattr(source, "__len__") else None
        self.by_number = self.length is not None and hasattr(source, "__getitem__") and not only_iterates(source)
        if not self.by_number and not isinstance(source, Iterable) or isinstance(source, Mapping):
            fix = "pass a folder, a table, or items (image, label)"
            if isinstance(source, Mapping) and source:
                name, part = next(iter(source.items()))
                are_words = isinstance(part, list) and all(isinstance(word, str | os.PathLike) for word in part)
                fix = "pandas.DataFrame(source)" if are_words else f"pass one of its parts: source[{name!r}]"
            raise InvalidValueError(f"pack cannot read a {type(source).__name__}", fix=fix)
        self._iterator = None if self.by_number else iter(source)
        self._ahead = None  # the first item of a stream, which was read to know what it holds
        failed = None
        for number, item in self.read():
            if isinstance(item, Failed):
                failed = failed or (number, item)
                continue
            self.labels = len(self.check(item, number)[1])
            self.columns = label_columns(item, self._columns.labels)
            self.classes = self._classes(classes)
            self._columns = replace(self._columns, classes=self.classes)
            self.first = self.check(item, number)
            kind = _kind(self.first[0])
            self._refuse_random()
            self.has_masks = kind == "bytes and masks" if isinstance(kind, str) else kind[2] == 4
            self._ahead = None if self.by_number else item
            return
        if failed:
            failed[1].stop(failed[0])
        raise InvalidValueError("the source yields nothing", fix="check its path; a generator can be used only once")

    def _refuse_random(self) -> None:
        """Raise where an item is another one when it is read again: its one draw would be packed for good."""
        import numpy

        if not self.by_number or type(self.source) in (list, tuple):
            return
        for number in range(0, self.length, -(-self.length // _TWICE)):
            pairs = zip(self._one(number), self._one(number), strict=True)
            if all(numpy.array_equal(*pair) for pair in pairs):
                continue
            raise InvalidValueError(
                f"item {number} is another one each time it is read: a random transform?",
                found="packed, every epoch would see the one draw of now",
                fix="pack the dataset without it; fit(..., augment=tpukit.Augment(flip=0.5)) does it on the device",
            )

    def check(self, item, number: int) -> tuple:
        """Return the image and the labels of one item, see `check_item`."""
        return check_item(item, number, self._columns)

    def shape(self, size: int | None) -> tuple[int, ...] | None:
        """Return the shape in which all images are stored as pixels; None if they are stored as files."""
        image, _ = self.first
        if isinstance(image, bytes):
            return None
        height, width, channels = image.shape
        return (height, width, channels) if size is None else (size, size, channels)

    def prepare(self, item, number: int, size: int | None) -> StoredItem:
        """Return an item as it is stored; ValueError if it is not of the same kind as the first one."""
        image, labels = self.check(item, number)
        dark = ()
        if not isinstance(image, bytes):
            if self._columns.window is None and image[..., :3].max() < NEARLY_BLACK:
                dark = tuple(value for value in [brightest_of(item, self._columns)] if value)
            image = resize(image, size)
        shape = self.shape(size)
        expected = _kind(self.first[0]) if shape is None else list(shape)
        if (_kind(image), len(labels)) != (expected, self.labels):
            raise InvalidValueError(
                f"item {number} is not like the first one: {_in_words(_kind(image), len(labels))}",
                found=f"the first one: {_in_words(expected, self.labels)}",
                fix="all as bytes or all as arrays, with as many labels; size= makes arrays of one shape",
            )
        return StoredItem(image if isinstance(image, bytes) else image.tobytes(), labels, dark)

    def read_one(self, number: int, size: int | None, *, skip: bool) -> StoredItem:
        """Read an item by its number, as it is stored.

        Raises:
            ValueError: the item is not like the first one.
            OSError: the item cannot be read, and `skip` is False.
        """
        import numpy

        try:
            item = self.source[number]
        except Exception as error:
            failed = Failed(error)
            if not skip:
                failed.stop(number)
            return StoredItem(b"", numpy.zeros(self.labels, numpy.float32), failure=failed.why)
        return self.prepare(item, number, size)

    def _classes(self, asked: list[str] | None) -> list[str]:
        if asked and self.labels != 1:
            raise InvalidValueError(
                f"classes= names the classes of one label, and items have {self.labels}", fix="leave classes= out"
            )
        if self.labels != 1 or asked == []:
            return []
        own = class_names(self.source, None if self.columns is None else self.columns[0], has_others=bool(asked))
        if asked is None:
            return own
        if own and set(own) <= set(asked):
            self._columns = replace(self._columns, own=own)
        elif own and (len(own) != len(asked) or set(own) & set(asked)):  # else these are other names for the same
            raise InvalidValueError(
                "the dataset has classes that classes= does not name",
                found=f"{first_few([name for name in own if name not in asked], 4)}; classes= {first_few(asked, 4)}",
                fix="name all of them, in any order; classes=None takes the names of the dataset",
            )
        elif not own and are_other_numbers(asked):
            print(f"pack: the numbers of items are places in classes=, from 0: 0 stands for {asked[0]!r}")
        return asked

    def read(self) -> Iterator[tuple]:
        """Yield the number of each item and the item; `Failed` for one that cannot be read, if others follow it."""
        if self.by_number:
            for number in range(self.length):
                try:
                    item = self.source[number]
                except Exception as error:
                    item = Failed(error)
                yield number, item
            return
        if self._ahead is not None:
            yield 0, self._ahead
        number = 0 if self._ahead is None else 1
        while True:
            try:
                item = next(self._iterator)
            except StopIteration:
                return
            except Exception as error:
                Failed(error).stop(number)
            yield number, item
            number += 1

    def digest(self) -> bytes:
        """Return what tells these items from others: of a list all, of a dataset a hundred, else the first one.

        Reading all of a dataset would take as long as packing it.
        """
        if not self.by_number:
            chosen = [self.first]
        else:
            step = 1 if type(self.source) in (list, tuple) else -(-self.length // _SAMPLED)
            chosen = (self._one(number) for number in range(0, self.length, step))
        digest = hashlib.sha256(_all_labels(self.source) + self._columns_of_labels())
        for data, values in chosen:
            self.sizes.append(getattr(data, "nbytes", len(data)))
            digest.update(zlib.crc32(data).to_bytes(4) + len(data).to_bytes(8) + values.tobytes())
        return digest.digest()

    def _columns_of_labels(self) -> bytes:
        """Return all labels of a dataset of Hugging Face's, which keeps them in columns."""
        columns = getattr(self.source, "column_names", None)
        if not (self.columns and hasattr(self.source, "select_columns") and set(self.columns) <= set(columns)):
            return b""
        labels = self.source.select_columns(self.columns).with_format(None)
        return repr([list(labels[name]) for name in self.columns]).encode()

    def _one(self, number: int) -> tuple:
        import numpy

        try:
            item = self.source[number]
        except Exception as error:
            return repr(error).encode(), numpy.empty(0)
        return self.check(item, number)


def _all_labels(source) -> bytes:
    """Return what a dataset says of all its labels, without reading an image; nothing where it says nothing."""
    import numpy

    if parts := inside(source):
        return b"".join(map(_all_labels, parts)) + numpy.asarray(getattr(source, "indices", ())).tobytes()
    if isinstance(tensors := getattr(source, "tensors", None), tuple):  # torch's TensorDataset, the images first
        return b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors[1:])
    kept = [getattr(source, name, None) for name in ("targets", "labels", "_labels")]
    samples = getattr(source, "samples", None)
    if isinstance(samples, list) and all(isinstance(sample, tuple) for sample in samples):  # path and number
        kept.append([sample[-1] for sample in samples])
    labels = next((labels for labels in kept if hasattr(labels, "__len__")), b"")
    try:
        array = numpy.asarray(labels)
    except ValueError:  # rows of different lengths
        array = numpy.empty(0, object)
    if array.dtype.kind != "O":
        return array.tobytes()
    words = repr(labels)  # the bytes of objects are where they lie in memory
    return b"" if " at 0x" in words else words.encode()


class Failed:
    """An item that could not be read."""

    def __init__(self, error: Exception):
        self.error = error

    @property
    def why(self) -> str:
        """What went wrong, in one line."""
        return f"{kind_of(self.error)}: {parts_of(self.error).fact}".partition("\n")[0]

    def stop(self, number: int) -> NoReturn:
        """Raise what is to be raised where the item is not to be left out."""
        if parts_of(self.error).fix:  # as of a TFRecord file, which knows better what to do
            self.error.add_note(f"item {number} of the source")
            raise self.error
        raise SystemFailureError(
            f"item {number} of the source cannot be read",
            found=self.why,
            fix='mend it; or, of a source with numbers, pack(..., damaged="skip") leaves such items out',
        ) from self.error


def class_names(source, label: str | None, *, has_others: bool = False) -> list[str]:
    """Return what the numbers of a label stand for, where the dataset says so: torchvision's, Hugging Face's.

    With `has_others`, a dataset that says two things of it says nothing.
    """
    if parts := inside(source):
        names, *others = (class_names(one, label, has_others=has_others) for one in parts)
        if other := next((one for one in others if one != names), None):
            raise InvalidValueError(
                "the datasets that are joined number their classes differently",
                found=f"{', '.join(names[:4]) or 'no names'}; and {', '.join(other[:4]) or 'no names'}",
                fix="give them the same classes, in the same order; or pack each for itself",
            )
        return names
    if getattr(source, "target_transform", None) is not None:  # what it gives are no longer numbers of its names
        return []
    features = getattr(source, "features", None)
    names = getattr(features.get(label), "names", None) if isinstance(features, Mapping) else None
    names = names or (getattr(source, "classes", None) if label is None else None)
    names = list(names) if isinstance(names, list | tuple) else []
    numbers = getattr(source, "class_to_idx", None)
    numbers = numbers if isinstance(numbers, Mapping) else {}
    if any(numbers.get(name, number) != number for number, name in enumerate(names)):
        if sorted(numbers[name] for name in names if name in numbers) != list(range(len(names))):
            if has_others:
                return []
            raise InvalidValueError(
                "the dataset says two things of its classes",
                found=f"classes {first_few(names, 4)}; class_to_idx {dict(list(numbers.items())[:4])}",
                fix="classes=[...] names them in the order of their numbers",
            )
        names.sort(key=numbers.get)
    return [str(name) for name in names]


def store_items(items: Items, folder: Path, size: int | None, *, progress: str | None):
    """Write the items of a stream in their order; return their labels, (N, L) float32.

    Raises:
        ValueError: an item is not like the first one.
        OSError: an item cannot be read.
    """
    import numpy

    folder.mkdir(exist_ok=True)
    ends, labels = [], []
    end = 0
    with open(folder / "data", "wb", buffering=0) as file, screen(progress) as display:
        for number, item in items.read():
            stored = items.prepare(item, number, size)
            items.dark += stored.dark
            end += _write(file, stored.image)
            ends.append(end)
            labels.append(stored.labels)
            display.bar("read images", number + 1, items.length)
            display.draw()
        os.fsync(file.fileno())
    if items.length not in (None, len(ends)):
        raise InvalidValueError(
            f"the source yields {len(ends):,} items, and the source has a length of {items.length:,}",
            fix="as many of one as of the other",
        )
    write_file(folder / "ends.npy", npy(numpy.array([0, *ends])))
    return numpy.stack(labels)


class StoredItems:
    """The images that `store_items` wrote: `[n]` is the bytes of one; `shape` is None if they are encoded."""

    def __init__(self, folder: Path, shape: tuple[int, ...] | None):
        import numpy

        self._file = open(folder / "data", "rb")  # noqa: SIM115 (as long as this lives)
        self._ends = numpy.load(folder / "ends.npy")
        self.shape = shape
        self.encoding = "jpeg" if shape is None else "uint8"

    def __getitem__(self, number: int) -> bytes:
        begin, end = self._ends[number : number + 2].tolist()
        return os.pread(self._file.fileno(), end - begin, begin)

    def name(self, number: int) -> str:
        """Say which item it is."""
        return f"item {number}"


class ReceivedItems:
    """The items that another process reads and sends, in the order in which they are packed."""

    def __init__(self, stream: BinaryIO, shape: tuple[int, ...] | None):
        self._stream = stream
        self._received: dict[int, StoredItem] = {}
        self.shape = shape
        self.encoding = "jpeg" if shape is None else "uint8"

    def receive(self, number: int) -> StoredItem:
        """Wait for the next item, which has this number; its image can then be had once by `[number]`."""
        item = pickle.load(self._stream)
        self._received[number] = item
        return item

    def __getitem__(self, number: int) -> bytes:
        item = self._received.pop(number)
        if item.failure:
            raise ValueError(item.failure)
        return item.image

    def name(self, number: int) -> str:
        """Say which item it is."""
        return f"item {number}"


def _write(file, data: bytes) -> int:
    """Write all of it: without a buffer, a disk that fills up takes a part and says so the next time only."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    return len(data)


def _kind(data):
    """Say what all items have in common: that they are bytes, with masks or not, or the shape of their pixels."""
    if isinstance(data, bytes):
        return "bytes and masks" if is_masked(data) else "bytes"
    return list(data.shape)


def _in_words(shape, labels: int) -> str:
    return f"{shape if isinstance(shape, str) else f'an array of shape {tuple(shape)}'} and {labels} labels"
