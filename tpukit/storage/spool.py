"""Items on the disk in the order they come: an iterable is read once, and a random order needs all of them."""

import json
import os
from pathlib import Path

from tpukit.display.progress import screen


def check_item(item, number: int) -> tuple:
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


def spool(found, folder: Path, size: int | None, progress: str | None):
    """Write the items of a source one after the other; ended, it begins anew. Return their rows.

    Raises:
        ValueError: an item is not like the first one.
    """
    import numpy
    from PIL import Image

    from tpukit.storage.array_records import write_file
    from tpukit.storage.pack_sources import make_rows

    folder.mkdir(exist_ok=True)
    ends, labels, kind = [0], [], None
    with open(folder / "data", "wb") as file, screen(progress) as display:
        for number, item in enumerate(found.items):
            data, values = check_item(item, number)
            if size is not None and not isinstance(data, bytes) and data.shape != (size, size, 3):
                data = numpy.asarray(Image.fromarray(data).resize((size, size), Image.Resampling.BILINEAR))
            shape = None if isinstance(data, bytes) else data.shape
            kind = kind or (shape, len(values))
            if (shape, len(values)) != kind:
                raise ValueError(
                    f"item {number} is not like those before: {_told(shape, len(values))}\n"
                    f"  found: until then {_told(*kind)}\n"
                    "  fix:   all as bytes or all as arrays, with as many labels; size= makes arrays of one shape"
                )
            ends.append(ends[-1] + file.write(data if shape is None else data.tobytes()))
            labels.append(values)
            display.bar("read images", number + 1, found.length)
            display.draw()
        file.flush()
        os.fsync(file.fileno())
    for what, count in (("the source has a length of", found.length), ("groups= has", _length(found.groups))):
        if count not in (None, len(labels)):
            raise ValueError(
                f"the source yields {len(labels):,} items, and {what} {count:,}\n"
                "  fix:   as many of one as of the other"
            )
    numpy.save(folder / "ends.npy", numpy.array(ends))
    write_file(folder / "shape.json", json.dumps(kind[0]).encode())
    return make_rows(numpy.stack(labels), found.groups)


class Spool:
    """What `spool` wrote: `[n]` is the bytes of an item's image, `shape` that of pixels, None of encoded ones."""

    def __init__(self, folder: Path):
        import numpy

        self._file = open(folder / "data", "rb")  # noqa: SIM115 (as long as this lives)
        self._ends = numpy.load(folder / "ends.npy")
        shape = json.loads((folder / "shape.json").read_text())
        self.shape = shape and tuple(shape)

    def __getitem__(self, number: int) -> bytes:
        begin, end = self._ends[number : number + 2].tolist()
        return os.pread(self._file.fileno(), end - begin, begin)

    def name(self, number: int) -> str:
        """Say which item it is."""
        return f"item {number}"


def _told(shape, labels: int) -> str:
    return f"{'bytes' if shape is None else f'an array of shape {shape}'} and {labels} labels"


def _length(groups) -> int | None:
    return None if groups is None else len(groups)
