"""Read and store images that are not files in a folder, such as the items of a dataset.

Two kinds of sources are read in two ways:

    a dataset (has a length and `source[3]`)   the parent process reads item after item in the
                                               packed order and sends it to the process that
                                               packs it: every image is written once
    a stream (can only be iterated)            `store_items` writes all items in their own order
                                               first; `StoredItems` reads them in the packed order

The first item that can be read decides the kind of all others: bytes of files or pixels of one
shape, with a mask or without, and the number of labels.
"""

import hashlib
import inspect
import math
import os
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from tpukit.datasets.checked_files import npy, write_file
from tpukit.datasets.image_modes import NEARLY_BLACK
from tpukit.datasets.item_parts import Columns, brightest_of, check_item, label_keys_of
from tpukit.datasets.label_arrays import are_other_numbers
from tpukit.datasets.masks import is_masked, resize_pixels
from tpukit.datasets.pixel_form import image_size
from tpukit.essentials.data import inside, only_iterates
from tpukit.essentials.display import (
    InvalidValueError,
    SystemFailureError,
    first_few,
    kind_of,
    names_in_order,
    parts_of,
    screen,
)

# At most this many items are read twice to detect random transforms. Of 16 items, a transform that
# flips with probability 1/2 remains undetected with probability 2**-16, 1 in 65,000.
_READ_TWICE = 16
# `Items.digest` reads at most this many items of a dataset; of a list it reads all, from memory.
_SAMPLED = 100


class StoredItem(NamedTuple):
    """An item's image, as the bytes of a file or of pixels, and its labels."""

    image: bytes
    labels: object  # (L,) float32
    dark: tuple[int, ...] = ()  # (brightest value,) of a 16-bit image that is nearly black; or ()
    failure: str = ""  # the reason why the item could not be read; "" if it was read
    shape: tuple[int, ...] | None = None  # (H, W, C) of pixels before they are resized


class ImageColumn:
    """A map-style dataset of the images in a table's column.

    Args:
        images: one image per row: bytes, a dict, an array or another image that `pack` accepts.
        masks: one per image; [] for no masks.
        labels: (N, L) float32.
    """

    def __init__(self, images: list, masks: list, labels):
        self.labels = labels
        self._images = images
        self._masks = masks

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> dict:
        item = {"image": self._images[number], "labels": self.labels[number]}
        if self._masks:
            item["mask"] = self._masks[number]
        return item


class Items:
    """The items of a source. The first item that can be read decides the kind of all items.

    Args:
        source: a dataset, or an iterable of items.
        columns: the form of the images, and the keys of image, labels and mask in items that are
            dicts; None for the defaults.
        classes: names in place of the dataset's own; None for the dataset's own, [] for none.

    Attributes:
        length: the number of items; None if the source has no length.
        by_number: True if `source[number]` reads an item.
        first: (image, labels) of the first item that can be read.
        labels: the number of labels per item.
        label_keys: the keys of the labels if items are dicts; else None.
        classes: if the label is a class number, the name of each class, from the argument or the
            dataset; else [].
        has_masks: True if each item has a mask.
        dark: for a stream, the largest values of the 16-bit images that become nearly black.
        sizes: the number of bytes, before resizing, of each image that `digest` has read.

    Raises:
        ValueError: the source has no items, or its items are not images with labels.
        OSError: no item of a dataset can be read, or the first item of a stream cannot.
    """

    def __init__(self, source, columns: Columns | None = None, classes=None):
        self.source = source
        self.dark: list[int] = []
        self.sizes: list[int] = []
        self._columns = replace(columns or Columns(), classes=classes or ())
        self.length = len(source) if hasattr(source, "__len__") else None
        has_numbers = self.length is not None and hasattr(source, "__getitem__")
        self.by_number = has_numbers and not only_iterates(source)
        can_be_read = self.by_number or isinstance(source, Iterable)
        if isinstance(source, Mapping) or not can_be_read:
            raise _unreadable(source)
        self._iterator = None
        if not self.by_number:
            self._iterator = iter(source)
        self._ahead = None  # the first item of a stream; `read` yields it again
        number, item = self._first_readable()
        self.labels = len(self.check(item, number)[1])
        self.label_keys = label_keys_of(item, self._columns.labels)
        self.classes = self._classes(classes)
        self._columns = replace(self._columns, classes=self.classes)
        self.first = self.check(item, number)
        self._refuse_random()
        self.has_masks = _has_mask(self.first[0])
        if not self.by_number:
            self._ahead = item

    def _first_readable(self) -> tuple:
        """Return the number of the first item that can be read, and the item."""
        first_failure = None
        for number, item in self.read():
            item = self._loaded(item, number)
            if not isinstance(item, Failed):
                return number, item
            if not self.by_number:  # a stream cannot be continued after an error
                item.stop(number)
            if first_failure is None:
                first_failure = (number, item)
        if first_failure is not None:
            number, failed = first_failure
            failed.stop(number)
        raise InvalidValueError(
            "the source yields nothing", fix="check its path; a generator can be used only once"
        )

    def _loaded(self, item, number: int):
        """Return an item; `Failed` if its file cannot be read.

        `PIL.Image.open` does not read the pixels, and a dict of Hugging Face may have only a path.
        This method reads such an image.
        """
        if isinstance(item, Failed):
            return item
        try:
            self.check(item, number)
        except OSError as error:
            return Failed(error)
        return item

    def _refuse_random(self) -> None:
        """Raise ValueError if two reads of an item differ: a pack stores only one of them."""
        import numpy

        if not self.by_number or type(self.source) in _IN_MEMORY:
            return
        for number in range(0, self.length, math.ceil(self.length / _READ_TWICE)):
            pairs = zip(self._one(number), self._one(number), strict=True)
            if all(numpy.array_equal(*pair) for pair in pairs):
                continue
            raise InvalidValueError(
                f"item {number} differs each time it is read, as with a random transform",
                found="a pack would store one random draw, and every epoch would use it",
                fix="pack the dataset without the transform, and augment on the device: fit(..., "
                "augment=tpukit.Augment(flip=0.5))",
            )

    def check(self, item, number: int) -> tuple:
        """Return the image and the labels of one item, see `check_item`."""
        return check_item(item, number, self._columns)

    def shape(self, size) -> tuple[int, ...] | None:
        """Return (height, width, channels) of images stored as pixels; None if files are stored."""
        image, _ = self.first
        if isinstance(image, bytes):
            return None
        height, width, channels = image.shape
        if size is None:
            return (height, width, channels)
        return (*image_size(size), channels)

    def prepare(self, item, number: int, size) -> StoredItem:
        """Return an item's image and labels, ready to store.

        Raises:
            ValueError: the item is not of the same kind as the first one.
        """
        image, labels = self.check(item, number)
        own_shape = getattr(image, "shape", None)
        dark = ()
        if not isinstance(image, bytes):
            dark = self._dark(item, image)
            image = resize_pixels(image, image_size(size), self._columns.form.resize)
        shape = self.shape(size)
        # All items must be of one kind. With size= that kind is the shape, and items of any size
        # are resized to it.
        expected = _kind(self.first[0]) if shape is None else list(shape)
        if _kind(image) == expected and len(labels) != self.labels:
            raise _of_other_length(number, len(labels), self.labels)
        if (_kind(image), len(labels)) != (expected, self.labels):
            raise InvalidValueError(
                f"item {number} is not like the first one: {_in_words(_kind(image), len(labels))}",
                found=f"the first one: {_in_words(expected, self.labels)}",
                fix="return all images as bytes or all as arrays; to resize all arrays to one "
                "size: size=224",
            )
        stored = image if isinstance(image, bytes) else image.tobytes()
        return StoredItem(stored, labels, dark, shape=own_shape)

    def _dark(self, item, image) -> tuple[int, ...]:
        """Return the brightest value of an image of 16 bits whose pixels are nearly black."""
        form = self._columns.form
        if form.window is not None or form.mode == "I;16" or image[..., :3].max() >= NEARLY_BLACK:
            return ()
        brightest = brightest_of(item, self._columns)
        return (brightest,) if brightest else ()

    def read_one(self, number: int, size, *, skip: bool) -> StoredItem:
        """Read the item with this number; return its image and labels, ready to store.

        With `skip`, an item that cannot be read has no image, labels of 0, and a `failure`.

        Raises:
            ValueError: the item is not like the first one.
            OSError: the item cannot be read, and `skip` is False.
        """
        import numpy

        try:
            item = self.source[number]
        except Exception as error:
            failed = Failed(error)
        else:
            try:
                return self.prepare(item, number, size)
            except OSError as error:  # Pillow reads the pixels of an open file only now
                failed = Failed(error)
        if not skip:
            failed.stop(number)
        no_labels = numpy.zeros(self.labels, numpy.float32)
        return StoredItem(b"", no_labels, failure=failed.why)

    def _classes(self, asked: list[str] | None) -> list[str]:
        """Return the names of the classes: those of classes=, else the dataset's own."""
        if asked and self.labels != 1:
            raise InvalidValueError(
                f"classes= names the classes of one label, but items have {self.labels} labels",
                fix="leave classes= out",
            )
        if self.labels != 1 or asked == []:
            return []
        key = None if self.label_keys is None else self.label_keys[0]
        own = class_names(self.source, key, has_others=bool(asked))
        if asked is None:
            return own
        if own and set(own) <= set(asked):
            self._columns = replace(self._columns, own=own)
            return asked
        # Two lists of equal length without a common name: classes= translates the names.
        are_renamed = len(own) == len(asked) and not set(own) & set(asked)
        if own and not are_renamed:
            left_out = [name for name in own if name not in asked]
            raise InvalidValueError(
                "the dataset has classes that classes= does not name",
                found=f"{first_few(left_out, 4)}; classes= {first_few(asked, 4)}",
                fix="name all classes, in any order; or, for the dataset's own names: classes=None",
            )
        if not own and are_other_numbers(asked):
            print(
                "pack: the labels of items are read as positions in classes=, so the label 0 is "
                f"the class {asked[0]!r}"
            )
        return asked

    def read(self) -> Iterator[tuple]:
        """Yield (number, item) for each item; a `Failed` in place of an item that cannot be read.

        A stream cannot continue after an error, so there `read` raises the error instead.
        """
        if self.by_number:
            return self._read_by_number()
        return self._read_stream()

    def _read_by_number(self) -> Iterator[tuple]:
        for number in range(self.length):
            try:
                item = self.source[number]
            except Exception as error:
                item = Failed(error)
            yield number, item

    def _read_stream(self) -> Iterator[tuple]:
        number = 0
        if self._ahead is not None:  # the item that was read to find out the kind of all items
            yield 0, self._ahead
            number = 1
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
        """Return a SHA-256 digest, by which a later call recognises the same items.

        For a list, the digest covers all items; for a stream, the first item. For a dataset, it
        covers at most a hundred items, and all labels that can be read without the images, such as
        `dataset.targets`. Reading all items would take as long as packing them.
        """
        if not self.by_number:
            chosen = [self.first]
        else:
            step = 1 if type(self.source) in _IN_MEMORY else math.ceil(self.length / _SAMPLED)
            chosen = (self._one(number) for number in range(0, self.length, step))
        # The checksum of an image is enough here, and is many times as fast as SHA-256.
        digest = hashlib.sha256(_all_labels(self.source) + self._columns_of_labels())
        for data, values in chosen:
            self.sizes.append(getattr(data, "nbytes", len(data)))
            digest.update(zlib.crc32(data).to_bytes(4))
            digest.update(len(data).to_bytes(8))
            digest.update(values.tobytes())
        return digest.digest()

    def _columns_of_labels(self) -> bytes:
        """Return all labels of a Hugging Face dataset as bytes; b"" for other sources."""
        # A column of a stream is not read, because this would read and decode all items.
        has_columns = self.by_number and hasattr(self.source, "select_columns")
        if not self.label_keys or not has_columns:
            return b""
        if not set(self.label_keys) <= set(self.source.column_names):
            return b""
        # Only the label columns, so that no image is decoded.
        labels = self.source.select_columns(self.label_keys).with_format(None)
        return repr([list(labels[name]) for name in self.label_keys]).encode()

    def _one(self, number: int) -> tuple:
        """Return an item's image and labels.

        If the item cannot be read, the text of the error takes the place of the image. The text has
        no addresses of objects, because these differ at each call.
        """
        import numpy

        try:
            item = self.source[number]
        except Exception as error:  # the dataset is the user's code, and may raise anything
            failed = error
        else:
            try:
                return self.check(item, number)
            except OSError as error:
                failed = error
        return re.sub(" at 0x[0-9A-Fa-f]+", "", repr(failed)).encode(), numpy.empty(0)


def _of_other_length(number: int, count: int, expected: int) -> InvalidValueError:
    """Return the error for an item with more or fewer labels than the first one."""
    row = "[float(k in {}) for k in range(number_of_classes)]"
    in_dict = row.format('item["labels"]')
    return InvalidValueError(
        f"item {number} has another number of labels than the first one",
        found=f"{count}, where the first one has {expected}",
        fix=f"turn lists of classes into zeros and ones: {row.format('labels')}; "
        "with Hugging Face: "
        f'source.map(lambda item: {{"tags": {in_dict}}}) and labels="tags"',
    )


# The kinds of sources whose items are in memory, so that reading them again is fast.
_IN_MEMORY = (list, tuple, ImageColumn)


def _unreadable(source) -> InvalidValueError:
    """Return the error for a source that has no items."""
    fix = "pass a folder, a table, or items (image, label)"
    if isinstance(source, Mapping) and source:
        name, part = next(iter(source.items()))
        is_column = isinstance(part, list) and all(isinstance(x, str | os.PathLike) for x in part)
        fix = f"pass one of its parts: source[{name!r}]"
        if is_column:
            fix = "pandas.DataFrame(source)"
    return InvalidValueError(f"pack cannot read a {type(source).__name__}", fix=fix)


def _all_labels(source) -> bytes:
    """Return the labels in a dataset's attributes as bytes; b"" if it has none.

    No image is read.
    """
    import numpy

    parts = inside(source)
    if parts:
        indices = numpy.asarray(getattr(source, "indices", ()))
        return b"".join(map(_all_labels, parts)) + indices.tobytes()
    tensors = getattr(source, "tensors", None)
    if isinstance(tensors, tuple):  # torch's TensorDataset, the images first
        return b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors[1:])
    labels = _kept_labels(source)
    try:
        array = numpy.asarray(labels)
    except ValueError:  # rows of different lengths
        array = numpy.empty(0, object)
    if array.dtype.kind != "O":
        return array.tobytes()
    # An array of objects stores their addresses, which differ per session, so use their text.
    words = repr(labels)
    if " at 0x" in words:  # the default `repr` of an object contains its address too
        return b""
    return words.encode()


def _kept_labels(source):
    """Return the labels that a dataset has under a name of torchvision's datasets; b"" if none."""
    for name in ("targets", "labels", "_labels"):
        labels = getattr(source, name, None)
        if hasattr(labels, "__len__"):
            return labels
    samples = getattr(source, "samples", None)
    if isinstance(samples, list) and all(isinstance(sample, tuple) for sample in samples):
        return [sample[-1] for sample in samples]  # (path, number)
    return b""


class Failed:
    """An item that could not be read."""

    def __init__(self, error: Exception):
        self.error = error

    @property
    def why(self) -> str:
        """The error in one line."""
        return f"{kind_of(self.error)}: {parts_of(self.error).fact}".partition("\n")[0]

    def stop(self, number: int) -> NoReturn:
        """Raise the error of the item, with the item's number in the message."""
        if parts_of(self.error).fix:  # an error of tpukit, such as one of a TFRecord file
            self.error.add_note(f"item {number} of the source")
            raise self.error
        raise SystemFailureError(
            f"item {number} of the source cannot be read",
            found=self.why,
            fix="correct the item; or, if the source has indices, leave such items out: "
            'pack(..., damaged="skip")',
        ) from self.error


def class_names(source, label: str | None, *, has_others: bool = False) -> list[str]:
    """Return the names of the classes of a dataset of torchvision or Hugging Face; [] if none.

    Args:
        source: the dataset; torch's Subset and ConcatDataset have the classes of their parts.
        label: the key of the label if items are dicts; else None.
        has_others: True if the caller has other names. Then the result is [] if `classes` and
            `class_to_idx` contradict each other, and no error is raised.

    Raises:
        ValueError: `classes` and `class_to_idx` contradict each other, or two datasets that are
            joined have different classes.
    """
    parts = inside(source)
    if parts:
        return _names_of_parts(parts, label, has_others)
    if getattr(source, "target_transform", None) is not None or _has_other_targets(source):
        return []  # its labels are no longer the numbers of these names
    features = getattr(source, "features", None)
    names = None
    if isinstance(features, Mapping):
        names = getattr(features.get(label), "names", None)
    if not names and label is None:
        names = getattr(source, "classes", None)
    if not isinstance(names, list | tuple):
        return []
    numbers = getattr(source, "class_to_idx", None)
    if isinstance(numbers, Mapping):
        names = _in_order(names, numbers, has_others)
    return names_in_order(names, "classes")


def _has_other_targets(source) -> bool:
    """Return whether a torchvision dataset has labels that its `classes` do not name.

    For example, the labels of OxfordIIITPet(target_types="binary-category") are cat and dog, but
    its `classes` are breeds.
    """
    for name in ("target_types", "target_type"):
        asked = getattr(source, name, getattr(source, f"_{name}", None))
        arguments = inspect.signature(type(source).__init__).parameters
        if asked is None or name not in arguments:
            continue
        usual = arguments[name].default
        # Some datasets store "category" as ["category"].
        if isinstance(asked, list | tuple) and len(asked) == 1:
            (asked,) = asked
        if asked != usual:
            return True
    return False


def _names_of_parts(parts: list, label: str | None, has_others: bool) -> list[str]:
    """Return the class names of joined datasets; ValueError if the datasets' names differ."""
    names, *others = (class_names(part, label, has_others=has_others) for part in parts)
    for other in others:
        if other != names:
            raise InvalidValueError(
                "the datasets that are joined number their classes differently",
                found=f"{', '.join(names[:4]) or 'no names'}; "
                f"and {', '.join(other[:4]) or 'no names'}",
                fix="give them the same classes, in the same order; or pack each "
                "dataset separately",
            )
    return names


def _in_order(names, numbers: Mapping, has_others: bool) -> list:
    """Return names in the order of their numbers in `class_to_idx`."""
    if all(numbers.get(name, number) == number for number, name in enumerate(names)):
        return list(names)
    # Each name has a number of its own, so they only have to be sorted.
    known = [numbers[name] for name in names if name in numbers]
    if sorted(known) == list(range(len(names))):
        return sorted(names, key=numbers.get)
    if has_others:
        return []
    raise InvalidValueError(
        "classes and class_to_idx of the dataset contradict each other",
        found=f"classes {first_few(names, 4)}; class_to_idx {dict(list(numbers.items())[:4])}",
        fix="pass the names of the classes in the order of their numbers: classes=[...]",
    )


def store_items(items: Items, folder: Path, size, *, progress: str | None):
    """Write the items of a stream to a folder, in their own order; return (N, L) float32 labels.

    Raises:
        ValueError: an item is not like the first one.
        OSError: an item cannot be read.
    """
    import numpy

    folder.mkdir(exist_ok=True)
    # "data" has the bytes of all images one after the other; image n is [ends[n], ends[n + 1]).
    ends = [0]
    labels = []
    with open(folder / "data", "wb", buffering=0) as file, screen(progress) as display:
        for number, item in items.read():
            try:
                stored = items.prepare(item, number, size)
            except OSError as error:
                Failed(error).stop(number)
            items.dark += stored.dark
            ends.append(ends[-1] + _write(file, stored.image))
            labels.append(stored.labels)
            display.bar("read images", number + 1, items.length)
            display.draw()
        os.fsync(file.fileno())
    if items.length not in (None, len(labels)):
        raise InvalidValueError(
            f"the source yields {len(labels):,} items, but its length is {items.length:,}",
            fix="let len(source) be the number of items that it yields",
        )
    write_file(folder / "ends.npy", npy(numpy.array(ends)))
    return numpy.stack(labels)


def _write(file, data: bytes) -> int:
    """Write all bytes and return their number.

    When a disk becomes full, an unbuffered `write` writes only a part; the next call raises an
    error.
    """
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    return len(data)


class StoredItems:
    """The images that `store_items` wrote: `[n]` is the bytes of one image.

    `shape` is (height, width, channels) of pixels; None if the bytes are those of image files.
    """

    def __init__(self, folder: Path, shape: tuple[int, ...] | None):
        import numpy

        self._file = open(folder / "data", "rb")  # noqa: SIM115 (open as long as this object)
        self._ends = numpy.load(folder / "ends.npy")
        self.shape = shape
        self.encoding = "jpeg" if shape is None else "uint8"

    def __getitem__(self, number: int) -> bytes:
        begin, end = self._ends[number : number + 2].tolist()
        return os.pread(self._file.fileno(), end - begin, begin)

    def name(self, number: int) -> str:
        """Return the name of an item for messages."""
        return f"item {number}"


class ReceivedItems:
    """The items that the parent process reads and sends to this process, in the pack's order."""

    def __init__(self, stream: BinaryIO, shape: tuple[int, ...] | None):
        self._stream = stream
        self._received: dict[int, StoredItem] = {}
        self.shape = shape
        self.encoding = "jpeg" if shape is None else "uint8"

    def receive(self, number: int) -> StoredItem:
        """Wait for the next item, which has this number, and return it.

        Then `self[number]` returns the item's image once, and forgets the item.
        """
        item = pickle.load(self._stream)
        self._received[number] = item
        return item

    def __getitem__(self, number: int) -> bytes:
        item = self._received.pop(number)
        if item.failure:
            raise ValueError(item.failure)
        return item.image

    def name(self, number: int) -> str:
        """Return the name of an item for messages."""
        return f"item {number}"


def _has_mask(image) -> bool:
    if isinstance(image, bytes):
        return is_masked(image)
    return image.shape[2] == 4


def _kind(data) -> str | list[int]:
    """Return the property that all items share: bytes, bytes with masks, or a shape of pixels."""
    if not isinstance(data, bytes):
        return list(data.shape)
    return "bytes and masks" if is_masked(data) else "bytes"


def _in_words(kind: str | list[int], labels: int) -> str:
    if not isinstance(kind, str):
        kind = f"an array of shape {tuple(kind)}"
    return f"{kind} and {labels} labels"
