"""Read the slices for a DICOM pack: decode, crop, resize, turn and encode each.

Each process of `pack_dicom` makes a `Slices`. Before, `sample_bytes` encodes some slices, to
estimate the size of the pack.
"""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from tpukit.datasets import NOT_DAMAGE, Names, spread
from tpukit.pe.ct import WINDOWS
from tpukit.pe.dicom import found_in, hounsfield_table, read_slice, window_table
from tpukit.pe.lungs import lung_box
from tpukit.pe.series import turn

LOOKS = 16  # the number of slices per series in which the lungs are searched
_SAMPLED = 64  # the number of slices that `sample_bytes` encodes in under a second
# The number of decoded slices in memory. Each is used for three images, by threads that read ahead.
_PLANES = 16
_BOXES = 4  # the number of lung boxes in memory, one per series


class Slices:
    """Read slices from DICOM files, and encode them for a pack: the reader of `pack_dicom`.

    `slices[row]` is the bytes of a JPEG; or, for int16 pixels, (size, size, 2) uint8, each pixel
    with its low byte first. `EncodedSource.reader` documents this interface.

    Args:
        work: the folder with the files that `_SliceSource.find` of `dicom_packing` wrote.
        root: the folder of the DICOM files.
        plan: the settings of the pack.
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
            # One line with the name of the file, which may be that of an adjacent slice.
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
        """Find the lungs in some slices of the series order[start:stop]; None for no box."""
        start, stop = ends
        rows = [int(self._order[start + place]) for place in spread(stop - start, LOOKS)]
        # Generators, so that only one slice at a time is in memory.
        slices = (self._hounsfield(row) for row in rows)
        return lung_box(units for units in slices if units is not None)

    def _hounsfield(self, row: int):
        """Return a slice in Hounsfield units; None for a damaged one: `__getitem__` reports it."""
        try:
            stored = read_slice(self.name(row))
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in NOT_DAMAGE:
                raise
            return None
        return hounsfield_table(stored.scale)[stored.codes]


def bytes_at_most(plan: dict) -> int:
    """Return a number of bytes that no JPEG of a real slice exceeds: the bytes of its pixels.

    Even a JPEG of uniform noise, 64 x 64 pixels at quality 95, has only 0.86 times this number.
    """
    channels = 3 if plan["form"] == "jpeg" else 2
    return plan["pixels"] ** 2 * channels


def sample_bytes(root, names: Sequence[str], plan: dict) -> list[int]:
    """Encode at most 64 of the slices, and return the number of bytes of each.

    The slices are not cropped, because cropping takes longer. Cropped slices have 4 % more bytes.

    Args:
        root: the folder of the DICOM files.
        names: the paths of the files, relative to the root.
        plan: the settings of the pack.
    """
    if plan["form"] == "int16":
        return [bytes_at_most(plan)]
    files = [os.path.join(root, name) for name in names]
    sizes = []
    for number in spread(len(files), _SAMPLED):
        try:
            sizes.append(len(_encoded(_sample_image(files, number, plan), plan["quality"])))
        except (OSError, ValueError):  # `pack_dicom` reports the damaged slice later
            continue
    return sizes


def _sample_image(files: list[str], number: int, plan: dict):
    from PIL import Image

    if plan["window"] is None:
        return to_windows(files[number], plan["pixels"], tuple(WINDOWS.values()))
    # Names next to each other are usually of one series, but not of adjacent slices. Adjacent
    # slices are a little more similar, so the estimate is rather too high.
    near = (number, min(number + 1, len(files) - 1), max(number - 1, 0))
    planes = [to_windows(files[each], plan["pixels"], (plan["window"],)) for each in near]
    return Image.merge("RGB", planes)


def _encoded(image, quality: int) -> bytes:
    encoded = io.BytesIO()
    # No subsampling of colours, because they are different slices or windows.
    image.save(encoded, "JPEG", quality=quality, subsampling=0)
    return encoded.getvalue()


def to_windows(path, size: int, windows: tuple, crop: tuple | None = None):
    """Read a slice in one window as a grey Pillow image, or in three windows as RGB, upright.

    Args:
        path: the path of the DICOM file.
        size: height and width of the result in pixels.
        windows: one or three pairs (level, width) in Hounsfield units.
        crop: left, top, right and bottom as shares of the width and height of the stored slice, 0
            to 1; None for the whole slice.
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
    """Read a slice as Hounsfield units, (size, size) little-endian int16, upright.

    The arguments are those of `to_windows`.
    """
    import numpy
    from PIL import Image

    stored = read_slice(path)
    units = Image.fromarray(numpy.take(hounsfield_table(stored.scale), stored.codes))
    units = _upright(units, size, crop, orientation=stored.orientation)
    return numpy.clip(numpy.rint(numpy.asarray(units)), -32768, 32767).astype("<i2")


def _upright(image, size: int, crop: tuple | None, *, orientation: tuple | None):
    """Crop and resize a Pillow image, and turn it upright by its DICOM orientation."""
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
    """A cache of a function's most recent results, for several threads.

    If two threads ask for the same argument, one calls the function, and the other waits for it.
    """

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
