"""What the processes of `pack_dicom` do with each slice: read it once, and store it as JPEG or int16."""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from tpukit.pe.ct import WINDOWS
from tpukit.pe.dicom import found_in, hounsfield_table, read_slice, window_table
from tpukit.pe.series import turns
from tpukit.storage.pack_shards import NOT_DAMAGE
from tpukit.storage.source_files import Names


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
            return to_hounsfield(self.name(row), self._plan["pixels"]).tobytes()
        if self._plan["window"] is None:
            image = to_windows(self.name(row), self._plan["pixels"], tuple(WINDOWS.values()))
        else:
            below, above = self._neighbours[row].tolist()
            image = Image.merge("RGB", [self._plane(one) for one in (below, row, above)])
        encoded = io.BytesIO()
        # Not halved: the colours are different slices or windows, and no eye looks at them.
        image.save(encoded, "JPEG", quality=self._plan["quality"], subsampling=0)
        return encoded.getvalue()

    def name(self, row: int) -> str:
        """Say which file it is."""
        return os.path.join(self._root, self._names[row])

    def _read_plane(self, row: int):
        return to_windows(self.name(row), self._plan["pixels"], (self._plan["window"],))


def to_windows(path, size: int, windows: tuple):
    """Read a slice, upright, and return it through one window as a grey Pillow image, through three as RGB."""
    import numpy
    from PIL import Image

    stored = read_slice(path)
    planes = [Image.fromarray(numpy.take(window_table(stored.scale, *window), stored.codes)) for window in windows]
    image = planes[0] if len(planes) == 1 else Image.merge("RGB", planes)
    return _upright(image.resize((size, size), Image.Resampling.BILINEAR), stored.orientation)


def to_hounsfield(path, size: int):
    """Read a slice, upright, and return (size, size) little-endian int16 Hounsfield units."""
    import numpy
    from PIL import Image

    stored = read_slice(path)
    units = Image.fromarray(numpy.take(hounsfield_table(stored.scale), stored.codes))
    units = _upright(units.resize((size, size), Image.Resampling.BILINEAR), stored.orientation)
    return numpy.clip(numpy.rint(numpy.asarray(units)), -32768, 32767).astype("<i2")


def _upright(image, orientation):
    from PIL import Image

    upside_down, mirrored = turns(orientation) if orientation else (False, False)
    for wrong, turn in ((upside_down, Image.Transpose.FLIP_TOP_BOTTOM), (mirrored, Image.Transpose.FLIP_LEFT_RIGHT)):
        image = image.transpose(turn) if wrong else image
    return image


class _Recent:
    """Call a function once for each argument, whichever thread asks first, and keep the most recent results."""

    def __init__(self, function: Callable[[int], object], keep: int):
        self._function, self._keep, self._lock = function, keep, threading.Lock()
        self._results: OrderedDict[int, Future] = OrderedDict()

    def __call__(self, argument: int) -> object:
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
