"""An .npy file of images as it lies on the disk: its header, its map into memory, a checksum for every block."""

import io
import math
import mmap
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tpukit.machine.resources import cpus

BLOCK = 1024  # images that share a checksum, and are decoded again together after an interruption


@dataclass(frozen=True)
class Layout:
    """Where in the file everything is."""

    count: int
    shape: tuple[int, ...]

    @property
    def header(self) -> bytes:
        """What the file begins with."""
        from numpy.lib import format as npy

        written = io.BytesIO()
        told = {"descr": "|u1", "fortran_order": False, "shape": (self.count, *self.shape)}
        npy.write_array_header_1_0(written, told)
        return written.getvalue()

    @property
    def each(self) -> int:
        """Bytes of one image."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.count * self.each

    @property
    def blocks(self) -> int:
        """How many blocks there are; the last may be short."""
        return -(-self.count // BLOCK)

    def images(self, block: int) -> range:
        """Return the images of a block."""
        return range(block * BLOCK, min(self.count, (block + 1) * BLOCK))

    def intact(self, mapping: mmap.mmap, checksums: dict[int, int]) -> set[int]:
        """Return the blocks whose checksum is still the one given, read on all CPUs."""
        view, begin = memoryview(mapping), len(self.header)

        def is_intact(block: int) -> bool:
            images = self.images(block)
            start, size = begin + images.start * self.each, len(images) * self.each
            ask_for(mapping, start, size)
            return zlib.crc32(view[start : start + size]) == checksums[block]

        with ThreadPoolExecutor(cpus()) as pool:
            return {block for block, fine in zip(checksums, pool.map(is_intact, checksums), strict=True) if fine}


def map_file(file: Path) -> mmap.mmap:
    """Map a file into memory, read-only."""
    with open(file, "rb") as handle:
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)


def ask_for(mapping: mmap.mmap, start: int, size: int) -> None:
    """Have the system read a stretch of a mapped file into memory, unless it is there, without waiting for it."""
    # Not os.posix_fadvise: it gives up the GIL, and beside a thread that keeps Python busy waits up to 5 ms to have it
    # back, for every image. Measured so: 300 images/s, against 16,000 with this.
    if hasattr(mmap, "MADV_WILLNEED"):
        page = start - start % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_WILLNEED, page, start + size - page)
