"""The files that are packed: read by their numbers, and looked at again when a pack is opened for the same source."""

import os
import stat
import zlib
from collections.abc import Callable, Iterable, Sequence

from tpukit.datasets.masks import join

_LOOKED_AT = 20_000  # files; on a network drive a look takes about a millisecond
_COMPARED = 100  # of those that may have changed
# A pipe or a device ends at once, where an ordinary open would wait for somebody to write to it.
_FLAGS = getattr(os, "O_NONBLOCK", 0)


class Files:
    """The files of a source: `[n]` is the bytes of one, and of its mask if there are masks."""

    shape = None  # not known until they are decoded
    encoding = "jpeg"

    def __init__(self, names: Sequence[str], root: str, masks: Sequence[str] | None = None):
        self.names, self._root, self._masks = names, root, masks

    def __getitem__(self, number: int) -> bytes:
        image = _read(self.name(number))
        if not self._masks:
            return image
        mask = os.path.join(self._root, self._masks[number])
        try:
            return join(image, _read(mask))
        except OSError as error:
            raise OSError(error.errno, f"its mask {mask}: {error.strerror}") from error

    def name(self, number: int) -> str:
        """Say where a file is."""
        return os.path.join(self._root, self.names[number])


def _read(path: str) -> bytes:
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | _FLAGS)) as file:
        return file.read()


class Names:
    """Names in a file, each ended by a zero byte as no path holds one; two million cost 16 MB of memory, not 200."""

    def __init__(self, file):
        import numpy

        self._bytes = numpy.memmap(file, numpy.uint8, "r")
        self._ends = numpy.flatnonzero(self._bytes == 0)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str:
        begin = self._ends[number - 1] + 1 if number else 0
        return os.fsdecode(self._bytes[begin : self._ends[number]].tobytes())

    @staticmethod
    def encode(names: Iterable[str]) -> bytes:
        """Return the bytes of such a file."""
        return os.fsencode("\0".join([*names, ""]))


# Names say nothing of it: another folder may hold files of the same names. To read all again would take as long as to
# pack them. Times alone are too strict, as a copy has others; so where only those differ the bytes decide.


def look_at(names: Sequence[str], root: str, masks: Sequence[str] = ()):
    """Return row, size, time and place of files, evenly spread where there are more than 20,000; size -1: not there.

    Of an image and its mask, the sum of their sizes and the later of their times.
    """
    import numpy

    rows = range(0, len(names), -(-len(names) // _LOOKED_AT) or 1)
    base, looks = os.path.realpath(root or "."), []
    for row in rows:
        paths = [os.path.join(base, mine[row]) for mine in (names, masks) if mine]
        try:
            found = [os.stat(path) for path in paths]
            there = all(stat.S_ISREG(status.st_mode) for status in found)
            size = sum(status.st_size for status in found) if there else -1
            time = max(status.st_mtime_ns for status in found)
        except OSError:
            size, time = -1, 0
        looks.append((row, size, time, zlib.crc32(os.fsencode("\0".join(paths)))))
    return numpy.array(looks, [("row", "<i8"), ("size", "<i8"), ("time", "<i8"), ("place", "<u4")])


def find_changed(before, now, files: Files, is_packed: Callable[[int], bool] | None) -> str | None:
    """Say which files are not those that were packed; None: none is known to be another.

    Files that are gone are not compared: a pack may outlive its source. `before` and `now` are what `look_at` returned
    when they were packed, and returns now; `is_packed` tells of a file's number whether its bytes are those in the
    pack, and None compares sizes alone.
    """
    there = (now["size"] >= 0) & (before["size"] >= 0)
    other = there & (now["size"] != before["size"])
    if other.any():
        first = int(other.argmax())
        return (
            f"{int(other.sum())} of {len(now)} files have another size, for instance {files.name(now['row'][first])}: "
            f"{now['size'][first]:,} bytes, packed were {before['size'][first]:,}"
        )
    if is_packed is None:
        return None
    doubtful = now["row"][there & ((now["time"] != before["time"]) | (now["place"] != before["place"]))]
    for row in doubtful[:: -(-len(doubtful) // _COMPARED) or 1].tolist():
        if not is_packed(row):
            return f"{files.name(row)} has other contents than the file that was packed"
    if len(doubtful) > _COMPARED:
        print(
            f"pack: {len(doubtful):,} files have other times or places than when they were packed; "
            "a hundred of them were compared, and are the same"
        )
    return None
