"""Read the files of a source by number, and detect files that have changed since `pack`.

A pack stores size, modification time and path of its files, at most 20,000 of them, evenly spread.
If a size differs, the source has changed. If only times and paths differ, the source may be a copy,
so `find_changed` compares up to a hundred files with the pack, byte by byte. To compare all files
would take as long as to pack them.
"""

import math
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Sequence

from tpukit.datasets.masks import join

# `look_at` reads the sizes and times of this many files: about 1 ms per file on a network drive.
_LOOKED_AT = 20_000
COMPARED = 100  # `find_changed` compares the contents of at most this many files
# Without this flag, `open` waits for a writer if the path is that of a pipe or a device.
_FLAGS = getattr(os, "O_NONBLOCK", 0)


class Files:
    """The files of a source. `files[n]` is the bytes of one image file.

    If there are masks, `files[n]` is the result of `join` for the image file and its mask file.

    Args:
        names: the paths of the images.
        root: the folder to which the paths are relative; "" for the current folder.
        masks: the paths of the masks; None for no masks.
    """

    shape = None  # unknown, because the files are not decoded
    encoding = "jpeg"

    def __init__(self, names: Sequence[str], root: str, masks: Sequence[str] | None = None):
        self.names = names
        self._root = root
        self._masks = masks

    def __getitem__(self, number: int) -> bytes:
        image = _read(self.name(number))
        if not self._masks:
            return image
        mask = os.path.join(self._root, self._masks[number])
        try:
            return join(image, _read(mask))
        except OSError as error:
            fact = f"the mask {mask} cannot be read: {error.strerror}"
            raise OSError(error.errno, fact) from error

    def name(self, number: int) -> str:
        """Return the path of a file."""
        return os.path.join(self._root, self.names[number])


def _read(path: str) -> bytes:
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | _FLAGS)) as file:
        return file.read()


class Names:
    """A sequence of names in a memory-mapped file; a zero byte, which no path has, ends a name.

    Two million names take 16 MB of memory, instead of 200 MB as a list.
    """

    def __init__(self, file):
        import numpy

        self._bytes = numpy.memmap(file, numpy.uint8, "r")
        self._ends = numpy.flatnonzero(self._bytes == 0)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str:
        begin = 0
        if number:
            begin = self._ends[number - 1] + 1
        return os.fsdecode(self._bytes[begin : self._ends[number]].tobytes())

    @staticmethod
    def encode(names: Iterable[str]) -> bytes:
        """Return the contents of a file that `Names` reads as these names."""
        return os.fsencode("\0".join([*names, ""]))


def printable(text: str) -> str:
    """Return a file name or other text in which bytes that are not UTF-8 are escaped."""
    return text.encode(errors="backslashreplace").decode()


def look_at(names: Sequence[str], root: str, masks: Sequence[str] = ()):
    """Return size, time and path of every file, or of at most 20,000 at equal intervals.

    Args:
        names: the paths of the images, relative to the root.
        root: the folder to which the paths are relative; "" for the current folder.
        masks: the paths of the masks; () for no masks. An image and its mask are one entry, with
            the sum of their sizes and the later of their times.

    Returns:
        A structured array with the fields "row", the position in `names`; "size" in bytes, -1 if
        there is no file at the path; "time", the modification time in ns; and "place", a CRC-32 of
        the absolute paths of the image and its mask.
    """
    import numpy

    step = math.ceil(len(names) / _LOOKED_AT) or 1
    base = os.path.realpath(root or ".")
    looks = []
    for row in range(0, len(names), step):
        paths = [os.path.join(base, names[row])]
        if masks:
            paths.append(os.path.join(base, masks[row]))
        size = -1
        time = 0
        try:
            found = [os.stat(path) for path in paths]
        except OSError:
            found = []
        if found:
            time = max(status.st_mtime_ns for status in found)
            if all(stat.S_ISREG(status.st_mode) for status in found):
                size = sum(status.st_size for status in found)
        place = zlib.crc32(os.fsencode("\0".join(paths)))
        looks.append((row, size, time, place))
    return numpy.array(looks, [("row", "<i8"), ("size", "<i8"), ("time", "<i8"), ("place", "<u4")])


def find_changed(before, now, files: Files, is_packed: Callable[[int], bool] | None) -> str | None:
    """Describe the files that have changed since they were packed; None if there is no difference.

    Missing files are not compared, because a pack may outlive its source.

    Args:
        before: the result of `look_at` when the files were packed.
        now: the result of `look_at` now.
        files: the files of the source.
        is_packed: a function of a file's number that returns True if the bytes of the file equal
            those in the pack; None to compare sizes only.
    """
    # A size of -1 is that of a file that does not exist.
    is_there = (now["size"] >= 0) & (before["size"] >= 0)
    has_other_size = is_there & (now["size"] != before["size"])
    if has_other_size.any():
        first = int(has_other_size.argmax())
        return (
            f"{int(has_other_size.sum())} of {len(now)} files have another size, for instance "
            f"{files.name(now['row'][first])}: {now['size'][first]:,} bytes, "
            f"packed were {before['size'][first]:,}"
        )
    if is_packed is None:
        return None
    has_moved = (now["time"] != before["time"]) | (now["place"] != before["place"])
    # A copy or a download changes times and paths, but not contents. Reading all files again would
    # take as long as packing them, so a sample is compared.
    doubtful = now["row"][is_there & has_moved]
    step = math.ceil(len(doubtful) / COMPARED) or 1
    sample = doubtful[::step].tolist()
    for row in sample:
        if not is_packed(row):
            return f"{files.name(row)} has other contents than the file that was packed"
    if len(doubtful) > COMPARED:
        print(
            f"pack: {len(doubtful):,} files have other times or paths than when they were "
            f"packed; {len(sample)} of them were compared, and have the same contents"
        )
    return None
