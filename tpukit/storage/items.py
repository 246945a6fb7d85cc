"""Items without files, such as a dataset's: read once, one after the other, and stored until they are packed."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from tpukit.display.progress import screen
from tpukit.storage.files import write_file
from tpukit.storage.labels import as_labels

_SAMPLED = 100  # items of a dataset that are read to know it again; of a list, which is in memory, all


class Items:
    """The items of a source, read from any of them on where it has numbers.

    Attributes:
        length: how many there are, if the source says so.
        by_number: True where each can be read by its number.
        first: (image, labels) of the first that can be read.
        labels: how many each has.
    """

    def __init__(self, source):
        self.source = source
        self.length = len(source) if hasattr(source, "__len__") else None
        self.by_number = self.length is not None and hasattr(source, "__getitem__") and not _only_iterates(source)
        if not self.by_number and not isinstance(source, Iterable) or isinstance(source, Mapping):
            raise ValueError(
                f"pack cannot read a {type(source).__name__}\n"
                "  fix:   pass a folder, a DataFrame with a path column, or items (image, labels), the image bytes or "
                "uint8" + ("; of a dict, list(items.values())" if isinstance(source, Mapping) else "")
            )
        self._iterator = None if self.by_number else iter(source)
        self._ahead = []
        failed = None
        for number, item in self.read():
            if isinstance(item, Failed):
                failed = failed or (number, item)
                continue
            self.first = check_item(item, number)
            self.labels = len(self.first[1])
            self._ahead = [] if self.by_number else [(number, item)]
            return
        if failed:
            failed[1].stop(failed[0])
        raise ValueError("the source yields nothing\n  fix:   check its path; a generator can be used only once")

    def read(self, start: int = 0) -> Iterator[tuple]:
        """Yield the number of each item and the item; `Failed` for one that cannot be read, where others follow it."""
        if not self.by_number:
            while self._ahead:
                yield self._ahead.pop()
            start = getattr(self, "_reached", 0)
        number = start
        while self.length is None or number < self.length or not self.by_number:
            try:
                item = self.source[number] if self.by_number else next(self._iterator)
            except StopIteration:
                return
            except Exception as error:
                item = Failed(error)
                if not self.by_number:
                    item.stop(number)
            self._reached = number + 1
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
        digest = hashlib.sha256()
        for data, values in chosen:
            digest.update(zlib.crc32(data).to_bytes(4) + len(data).to_bytes(8) + values.tobytes())
        return digest.digest()

    def _one(self, number: int) -> tuple:
        import numpy

        try:
            item = self.source[number]
        except Exception as error:
            return repr(error).encode(), numpy.empty(0)
        return check_item(item, number)


class Failed:
    """An item that could not be read."""

    def __init__(self, error: Exception):
        self.error = error

    @property
    def why(self) -> str:
        """What went wrong, in one line."""
        return f"{type(self.error).__name__}: {self.error}".partition("\n")[0]

    def stop(self, number: int) -> NoReturn:
        """Raise what is to be raised where the item is not to be left out."""
        if "  fix:" in str(self.error):  # as of a TFRecord file, which knows better what to do
            self.error.add_note(f"item {number} of the source")
            raise self.error
        raise OSError(
            f"item {number} of the source cannot be read\n  found: {self.why}\n"
            '  fix:   mend it; or, of a source with numbers, pack(..., damaged="skip") leaves such items out'
        ) from self.error


def check_item(item, number: int) -> tuple:
    """Return the image, bytes or (H, W, 3) uint8, and the labels, (L,) float32, of one item.

    Raises:
        ValueError: it is something else.
    """
    import numpy

    fix = "give the bytes of the file, or numpy.asarray(image.convert('RGB')), and one number or several"
    try:
        if isinstance(item, Mapping):
            fix = f"pass pairs: [(item[{next(iter(item), 'image')!r}], item['label']) for item in source]"
            raise TypeError(f"keys {', '.join(map(repr, item))}")
        data, labels = item
        if isinstance(data, str | os.PathLike):
            fix = 'pass a table of the paths: pandas.DataFrame({"path": paths, "label": labels}), labels="label"'
            raise TypeError(f"the path {os.fspath(data)!r}")
        values = numpy.asarray(labels).reshape(1, -1)
        if isinstance(data, bytes) or _is_image(data := numpy.asarray(data)):
            data = data if isinstance(data, bytes) else numpy.ascontiguousarray(data)
            names = [str(name) for name in range(values.shape[1])]
            if not names:
                return data, numpy.empty(0, numpy.float32)
            return data, as_labels(values, names, first_row=number, what="item")[0]
        found = f"an image of shape {data.shape} and dtype {data.dtype}"
    except (TypeError, ValueError) as error:
        if str(error).startswith("label"):
            raise
        found = f"{type(item).__name__}: {error}"
    raise ValueError(
        f"item {number} is not (image, labels), the image bytes or (H, W, 3) uint8\n  found: {found}\n  fix:   {fix}"
    )


def store_items(items: Items, folder: Path, size: int | None, *, skip: bool, progress: str | None):
    """Write the items one after the other, in their order; return their labels, (N, L) float32.

    What an earlier call has written is kept, where the source has numbers and so can be read from there on.

    Raises:
        ValueError: an item is not like the first one.
        OSError: an item cannot be read, and `skip` is False.
    """
    import numpy
    from PIL import Image

    folder.mkdir(exist_ok=True)
    kept = _keep(folder, items) if items.by_number else 0
    if kept:
        print(f"pack: goes on after the {kept:,} items that an earlier call has read")
    else:
        for name in ("data", "notes", "failed"):
            (folder / name).write_bytes(b"")
    shape, number = _read_shape(folder), kept - 1
    # Without buffers, the note after its data: a note that is there tells of data that is there.
    with (
        open(folder / "data", "ab", buffering=0) as file,
        open(folder / "notes", "ab", buffering=0) as notes,
        screen(progress) as display,
    ):
        end = file.tell()
        for number, item in items.read(kept):
            if isinstance(item, Failed):
                if not skip:
                    item.stop(number)
                with open(folder / "failed", "a") as failed:
                    failed.write(json.dumps([number, item.why]) + "\n")
                stored, values, checked = b"", numpy.zeros(items.labels, numpy.float32), item.why.encode()
            else:
                data, values = check_item(item, number)
                if size is not None and not isinstance(data, bytes) and data.shape != (size, size, 3):
                    data = numpy.asarray(Image.fromarray(data).resize((size, size), Image.Resampling.BILINEAR))
                mine = "bytes" if isinstance(data, bytes) else list(data.shape)
                if shape is None:
                    shape = mine
                    write_file(folder / "shape.json", json.dumps(shape).encode())
                if (mine, len(values)) != (shape, items.labels):
                    raise ValueError(
                        f"item {number} is not like those before: {_in_words(mine, len(values))}\n"
                        f"  found: until then {_in_words(shape, items.labels)}\n"
                        "  fix:   all as bytes or all as arrays, with as many labels; size= makes arrays of one shape"
                    )
                stored = checked = data if mine == "bytes" else data.tobytes()
            end += _write(file, stored)
            note = numpy.array([(end, zlib.crc32(checked), values)], _note_type(items.labels))
            _write(notes, note.tobytes())
            display.bar("read images", number + 1, items.length)
            display.draw()
        os.fsync(file.fileno())
        os.fsync(notes.fileno())
    if items.length not in (None, number + 1):
        raise ValueError(
            f"the source yields {number + 1:,} items, and the source has a length of {items.length:,}\n"
            "  fix:   as many of one as of the other"
        )
    return numpy.fromfile(folder / "notes", _note_type(items.labels))["labels"]


class StoredItems:
    """What `store_items` wrote: `[n]` is the bytes of an item's image, `shape` that of pixels, None of encoded ones."""

    def __init__(self, folder: Path, labels: int):
        import numpy

        self._file = open(folder / "data", "rb")  # noqa: SIM115 (as long as this lives)
        self._ends = numpy.concatenate([[0], numpy.fromfile(folder / "notes", _note_type(labels))["end"]])
        self._failed = dict(map(json.loads, (folder / "failed").read_text().splitlines()))
        shape = _read_shape(folder)
        self.shape, self.encoding = (None, "jpeg") if shape == "bytes" else (tuple(shape), "uint8")

    def __getitem__(self, number: int) -> bytes:
        if number in self._failed:
            raise ValueError(self._failed[number])
        begin, end = self._ends[number : number + 2].tolist()
        return os.pread(self._file.fileno(), end - begin, begin)

    def name(self, number: int) -> str:
        """Say which item it is."""
        return f"item {number}"


def _keep(folder: Path, items: Items) -> int:
    """Cut what an interrupted call has written to the items that are whole; return how many those are."""
    import numpy

    try:
        notes = numpy.fromfile(folder / "notes", _note_type(items.labels))
        lines = (folder / "failed").read_text().splitlines(keepends=True)
        whys = dict(json.loads(line) for line in lines if line.endswith("\n"))
        file = open(folder / "data", "r+b")  # noqa: SIM115
    except FileNotFoundError:
        return 0
    kept, end = 0, 0
    with file:
        for note in notes:  # checked: a power cut keeps what it likes
            data = file.read(int(note["end"]) - end)
            checked = data or whys.get(kept, "").encode()
            if len(data) != note["end"] - end or zlib.crc32(checked) != note["crc"]:
                break
            kept, end = kept + 1, int(note["end"])
        file.truncate(end)
    os.truncate(folder / "notes", kept * notes.dtype.itemsize)
    failed = [json.dumps([number, why]) + "\n" for number, why in whys.items() if number < kept]
    write_file(folder / "failed", "".join(failed).encode())
    return kept


def _read_shape(folder: Path):
    try:
        return json.loads((folder / "shape.json").read_bytes())
    except FileNotFoundError:
        return None


def _note_type(labels: int):
    import numpy

    return numpy.dtype([("end", "<i8"), ("crc", "<u4"), ("labels", "<f4", (labels,))])


def _write(file, data: bytes) -> int:
    """Write all of it: without a buffer, a disk that fills up takes a part and says so the next time only."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    return len(data)


def _only_iterates(source) -> bool:
    """Tell whether this is torch's IterableDataset, which has a `__getitem__` that only raises."""
    return "IterableDataset" in [kind.__name__ for kind in type(source).__mro__]


def _is_image(data) -> bool:
    return data.dtype == "uint8" and data.ndim == 3 and data.shape[2] == 3 and data.size > 0


def _in_words(shape, labels: int) -> str:
    return f"{'bytes' if shape == 'bytes' else f'an array of shape {tuple(shape)}'} and {labels} labels"
