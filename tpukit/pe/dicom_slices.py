"""Read the slices of a DICOM pack: each is decoded once, put upright, cropped, resized and encoded.

The processes of `pack_dicom` make a `Slices` each. `SliceWeight` estimates the size of the pack
before, from a sample of the slices.
"""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from tpukit.datasets import NOT_DAMAGE, Names, spread
from tpukit.pe.ct import WINDOWS
from tpukit.pe.dicom import found_in, hounsfield_table, read_slice, window_table
from tpukit.pe.lungs import lung_box
from tpukit.pe.series import turn

LOOKS = 16  # slices per series in which the lungs are searched
_WEIGHED = 64  # slices in the sample of `SliceWeight`: under a second
_PLANES = 16  # decoded slices to keep: each is used three times, by threads that read ahead
_BOXES = 4  # lung boxes to keep, one per series


class Slices:
    """The stored form of each slice of a pack.

    `slices[row]` is a JPEG, or int16 as (size, size, 2) uint8 with the low byte first.
    """

    def __init__(self, work: Path, root: str, plan: dict):
        import numpy

        self._names = Names(work / "names")
        self._root = root
        self._plan = plan
        self._neighbours = numpy.load(work / "neighbours.npy", mmap_mode="r")
        size = plan["pixels"]
        if plan["form"] == "jpeg":
            self.encoding = "jpeg"
            self.shape = (size, size, 3)
        else:
            self.encoding = "uint8"
            self.shape = (size, size, 2)
        self._plane = _Recent(self._read_plane, _PLANES)
        self._box = _Recent(self._find_box, _BOXES)
        if plan.get("crop"):
            self._order = numpy.load(work / "order.npy", mmap_mode="r")
            self._series = numpy.load(work / "series.npy", mmap_mode="r")

    def __getitem__(self, row: int) -> bytes:
        try:
            return self._stored(row)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in NOT_DAMAGE:
                raise
            # In one line, with the file's name: the damaged file may be a neighbouring slice.
            raise ValueError(found_in(error)) from error

    def _stored(self, row: int) -> bytes:
        from PIL import Image

        size = self._plan["pixels"]
        if self._plan["form"] == "int16":
            return to_hounsfield(self.name(row), size, self._crop(row)).tobytes()
        if self._plan["window"] is None:
            windows = tuple(WINDOWS.values())
            image = to_windows(self.name(row), size, windows, crop=self._crop(row))
        else:
            below, above = self._neighbours[row].tolist()
            image = Image.merge("RGB", [self._plane(slice_) for slice_ in (below, row, above)])
        return _encoded(image, self._plan["quality"])

    def name(self, row: int) -> str:
        """Return the path of the file of a row."""
        return os.path.join(self._root, self._names[row])

    def _read_plane(self, row: int):
        windows = (self._plan["window"],)
        return to_windows(self.name(row), self._plan["pixels"], windows, crop=self._crop(row))

    def _crop(self, row: int):
        """Return the lung box of a row's series; None for the whole slice."""
        if not self._plan.get("crop"):
            return None
        start, stop = self._series[row].tolist()
        return self._box((start, stop))

    def _find_box(self, ends: tuple[int, int]):
        """Find the lungs of the series between these positions, in some of its slices."""
        start, stop = ends
        rows = [int(self._order[start + place]) for place in spread(stop - start, LOOKS)]
        # A generator: one slice at a time is in memory.
        slices = (self._hounsfield(row) for row in rows)
        return lung_box(units for units in slices if units is not None)

    def _hounsfield(self, row: int):
        """Return a slice in Hounsfield units; None if damaged, which `__getitem__` reports."""
        try:
            stored = read_slice(self.name(row))
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in NOT_DAMAGE:
                raise
            return None
        return hounsfield_table(stored.scale)[stored.codes]


class SliceWeight:
    """Estimate the bytes per slice of a pack, as `PackSource.weight`.

    Attributes:
        count: the most slices that the pack can have.
    """

    def __init__(self, root, names: Sequence[str], count: int):
        self.count = count
        self._root = root
        self._names = names

    def at_most(self, plan: dict) -> int:
        """Return the largest possible number of bytes of an image, without reading an image.

        No JPEG of quality 95 or less is larger than its pixels.
        """
        channels = 3 if plan["form"] == "jpeg" else 2
        return plan["pixels"] ** 2 * channels

    def sample(self, plan: dict) -> list[int]:
        """Return the bytes of some slices, uncropped; a crop to the lungs takes 4 % more."""
        if plan["form"] == "int16":
            return [self.at_most(plan)]
        sizes = []
        for row in spread(len(self._names), _WEIGHED):
            try:
                sizes.append(len(_encoded(self._image(row, plan), plan["quality"])))
            except (OSError, ValueError):  # packing reports it
                continue
        return sizes

    def smaller(self, plan: dict) -> Iterator[tuple[str, str, dict]]:
        """Yield arguments that make a smaller pack: name, code, and the change of the plan."""
        for quality in (70, 50):
            if quality < plan.get("quality", 0):
                yield "quality", f"options=PackOptions(quality={quality})", {"quality": quality}
        for part in (0.75, 0.5, 0.375, 0.25):
            size = int(plan["pixels"] * part)
            yield "size", f"size={size}", {"pixels": size}

    def _image(self, row: int, plan: dict):
        from PIL import Image

        if plan["window"] is None:
            return self._read(row, plan, tuple(WINDOWS.values()))
        # In the order of names the next slices are of the same series, but not adjacent. Adjacent
        # slices would be a little more alike.
        last = len(self._names) - 1
        rows = (row, min(row + 1, last), max(row - 1, 0))
        return Image.merge("RGB", [self._read(near, plan, (plan["window"],)) for near in rows])

    def _read(self, row: int, plan: dict, windows: tuple):
        return to_windows(os.path.join(self._root, self._names[row]), plan["pixels"], windows)


def _encoded(image, quality: int) -> bytes:
    encoded = io.BytesIO()
    # Colours keep their full resolution: they are different slices or windows.
    image.save(encoded, "JPEG", quality=quality, subsampling=0)
    return encoded.getvalue()


def to_windows(path, size: int, windows: tuple, crop: tuple | None = None):
    """Read a slice upright, through one window as a grey Pillow image or through three as RGB.

    Args:
        path: the path of the DICOM file.
        size: height and width of the result in pixels.
        windows: one or three pairs (level, width) in Hounsfield units.
        crop: left, top, right and bottom, 0 to 1, of the slice as it is stored; None for all of it.
    """
    import numpy
    from PIL import Image

    stored = read_slice(path)
    planes = []
    for level, width in windows:
        table = window_table(stored.scale, level, width)
        planes.append(Image.fromarray(numpy.take(table, stored.codes)))
    image = planes[0] if len(planes) == 1 else Image.merge("RGB", planes)
    return _upright(image, size, crop, orientation=stored.orientation)


def to_hounsfield(path, size: int, crop: tuple | None = None):
    """Read a slice upright, as (size, size) little-endian int16 Hounsfield units."""
    import numpy
    from PIL import Image

    stored = read_slice(path)
    units = Image.fromarray(numpy.take(hounsfield_table(stored.scale), stored.codes))
    units = _upright(units, size, crop, orientation=stored.orientation)
    return numpy.clip(numpy.rint(numpy.asarray(units)), -32768, 32767).astype("<i2")


def _upright(image, size: int, crop: tuple | None, *, orientation: tuple | None):
    """Crop an image, resize it and put it upright."""
    from PIL import Image

    box = None
    if crop is not None:
        left, top, right, bottom = crop
        width, height = image.size
        box = (left * width, top * height, right * width, bottom * height)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    if orientation is None:
        return image
    how = turn(orientation)
    if how is None:
        return image
    return image.transpose(Image.Transpose[how])


class _Recent:
    """Call a function once per argument from several threads, and keep the most recent results."""

    def __init__(self, function: Callable, keep: int):
        self._function = function
        self._keep = keep
        self._lock = threading.Lock()
        self._results: OrderedDict[object, Future] = OrderedDict()

    def __call__(self, argument) -> object:
        with self._lock:
            is_first = argument not in self._results
            future = self._results.setdefault(argument, Future())
            if len(self._results) > self._keep:
                self._results.popitem(last=False)
        if is_first:
            try:
                future.set_result(self._function(argument))
            except BaseException as error:  # the other threads must not wait forever
                future.set_exception(error)
        return future.result()
