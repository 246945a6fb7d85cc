"""What the processes of `pack_dicom` do with each slice: read it once, and store it as JPEG or int16."""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from tpukit.packs import NOT_DAMAGE, Names, spread
from tpukit.pe.ct import WINDOWS
from tpukit.pe.dicom import found_in, hounsfield_table, read_slice, window_table
from tpukit.pe.lungs import lung_box
from tpukit.pe.series import turn

LOOKS = 16  # slices of a series in which its lungs are looked for
_WEIGHED = 64  # slices, by which is told what all take: under a second


class Slices:
    """What a pack stores of each slice: `[row]` is a JPEG, or int16 as (size, size, 2) uint8, low byte first."""

    def __init__(self, work: Path, root: str, plan: dict):
        import numpy

        self._names, self._root, self._plan = Names(work / "names"), root, plan
        self._neighbours = numpy.load(work / "neighbours.npy", mmap_mode="r")
        size = plan["pixels"]
        self.encoding, channels = ("jpeg", 3) if plan["form"] == "jpeg" else ("uint8", 2)
        self.shape = (size, size, channels)
        self._plane = _Recent(self._read_plane, 16)  # each is asked for three times, by threads that run ahead
        self._box = _Recent(self._find_box, 4)
        if plan.get("crop"):
            self._order = numpy.load(work / "order.npy", mmap_mode="r")
            self._series = numpy.load(work / "series.npy", mmap_mode="r")

    def __getitem__(self, row: int) -> bytes:
        try:
            return self._stored(row)
        except (OSError, ValueError) as error:  # in one line; with neighbours it may be another file that is damaged
            if getattr(error, "errno", None) in NOT_DAMAGE:
                raise
            raise ValueError(found_in(error)) from error

    def _stored(self, row: int) -> bytes:
        from PIL import Image

        if self._plan["form"] == "int16":
            return to_hounsfield(self.name(row), self._plan["pixels"], self._crop(row)).tobytes()
        if self._plan["window"] is None:
            image = to_windows(self.name(row), self._plan["pixels"], tuple(WINDOWS.values()), self._crop(row))
        else:
            below, above = self._neighbours[row].tolist()
            image = Image.merge("RGB", [self._plane(one) for one in (below, row, above)])
        return _encoded(image, self._plan["quality"])

    def name(self, row: int) -> str:
        """Say which file it is."""
        return os.path.join(self._root, self._names[row])

    def _read_plane(self, row: int):
        return to_windows(self.name(row), self._plan["pixels"], (self._plan["window"],), self._crop(row))

    def _crop(self, row: int):
        """Return the box of this row's series, None for all of the slice."""
        return self._box(tuple(self._series[row].tolist())) if self._plan.get("crop") else None

    def _find_box(self, places: tuple[int, int]):
        """Find the lungs of a series, given where its rows lie in the order, by some slices along the body."""
        start, stop = places
        rows = [int(self._order[start + look]) for look in spread(stop - start, LOOKS)]
        return lung_box(unit for row in rows if (unit := self._units(row)) is not None)

    def _units(self, row: int):
        """Return a slice in Hounsfield units; None if it is damaged, which is said where it is packed."""
        try:
            stored = read_slice(self.name(row))
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in NOT_DAMAGE:
                raise
            return None
        return hounsfield_table(stored.scale)[stored.codes]


class SliceWeight:
    """What slices take in a pack, by some of them: as `PackSource.weight`; `count` is how many there are, at most."""

    def __init__(self, root, names: Sequence[str], count: int):
        self.count, self._root, self._names = count, root, names

    def at_most(self, plan: dict) -> int:
        """Return the bytes that no image exceeds, without reading any: no JPEG of up to 95 has more than its pixels."""
        return plan["pixels"] ** 2 * (3 if plan["form"] == "jpeg" else 2)

    def sample(self, plan: dict) -> list[int]:
        """Return the bytes of some slices; whole ones, as a crop to the lungs takes 4 % more."""
        if plan["form"] == "int16":
            return [self.at_most(plan)]
        sizes = []
        for row in spread(len(self._names), _WEIGHED):
            try:
                sizes.append(len(_encoded(self._image(row, plan), plan["quality"])))
            except (OSError, ValueError):  # is said where it is packed
                continue
        return sizes

    def smaller(self, plan: dict) -> Iterator[tuple[str, int, dict]]:
        """Yield arguments that make a smaller pack: name, value, and how they change the plan."""
        for quality in (70, 50):
            if quality < plan.get("quality", 0):
                yield "quality", quality, {"quality": quality}
        for part in (0.75, 0.5, 0.375, 0.25):
            size = int(plan["pixels"] * part)
            yield "size", size, {"pixels": size}

    def _image(self, row: int, plan: dict):
        from PIL import Image

        def see(row: int, *windows):
            return to_windows(os.path.join(self._root, self._names[row]), plan["pixels"], windows)

        if plan["window"] is None:
            return see(row, *WINDOWS.values())
        # In the order of names, neighbours are other slices of the series: a little less alike than true ones.
        rows = (row, min(row + 1, len(self._names) - 1), max(row - 1, 0))
        return Image.merge("RGB", [see(one, plan["window"]) for one in rows])


def _encoded(image, quality: int) -> bytes:
    encoded = io.BytesIO()
    # Not halved: the colours are different slices or windows, and no eye looks at them.
    image.save(encoded, "JPEG", quality=quality, subsampling=0)
    return encoded.getvalue()


def to_windows(path, size: int, windows: tuple, crop: tuple | None = None):
    """Read a slice, upright, and return it through one window as a grey Pillow image, through three as RGB.

    A window is (level, width); `crop` is left, top, right and bottom from 0 to 1, as the slice is stored.
    """
    import numpy
    from PIL import Image

    stored = read_slice(path)
    planes = [Image.fromarray(numpy.take(window_table(stored.scale, *window), stored.codes)) for window in windows]
    image = planes[0] if len(planes) == 1 else Image.merge("RGB", planes)
    return _upright(image, size, crop, stored.orientation)


def to_hounsfield(path, size: int, crop: tuple | None = None):
    """Read a slice, upright, and return (size, size) little-endian int16 Hounsfield units."""
    import numpy
    from PIL import Image

    stored = read_slice(path)
    units = Image.fromarray(numpy.take(hounsfield_table(stored.scale), stored.codes))
    units = _upright(units, size, crop, stored.orientation)
    return numpy.clip(numpy.rint(numpy.asarray(units)), -32768, 32767).astype("<i2")


def _upright(image, size: int, crop: tuple | None, orientation: tuple | None):
    """Return what a box holds of an image, at a size and upright."""
    from PIL import Image

    width, height = image.size
    box = crop and (crop[0] * width, crop[1] * height, crop[2] * width, crop[3] * height)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    how = orientation and turn(orientation)
    return image.transpose(Image.Transpose[how]) if how else image


class _Recent:
    """Call a function once for each argument, whichever thread asks first, and keep the most recent results."""

    def __init__(self, function: Callable, keep: int):
        self._function, self._keep, self._lock = function, keep, threading.Lock()
        self._results: OrderedDict[object, Future] = OrderedDict()

    def __call__(self, argument) -> object:
        with self._lock:
            first = argument not in self._results
            future = self._results.setdefault(argument, Future())
            if len(self._results) > self._keep:
                self._results.popitem(last=False)
        if first:
            try:
                future.set_result(self._function(argument))
            except BaseException as error:
                future.set_exception(error)
        return future.result()
