"""Read decoded images through the page cache: as fast as memory is copied, checked when the cache is opened."""

import functools
import io
import math
import mmap
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tpukit.datasets.checked_files import find_fault
from tpukit.datasets.resumable import ResumableFolder
from tpukit.datasets.stored_images import StoredImages
from tpukit.essentials.display import human_size
from tpukit.essentials.environment import available_memory, cpus

BLOCK = 1024  # images that share a checksum, and are decoded again together after an interruption


class CacheFolder(ResumableFolder):
    """A folder that `cached_images` writes: all pixels in one file, and the index of the records."""

    kind, version = "cache", 4
    outputs = ("images.npy", "index.npy", "groups.npy")
    make = "tpukit.cached_images(packed, size=..., folder=folder)"
    repair = "delete it, shutil.rmtree('{folder}'), and build it again"


class CachedImages(StoredImages):
    """Decoded images on disk as a map-style dataset, and as a source of whole batches.

    `[i]` is `(image, labels)`: (3, size, size) uint8 tensor in [0, 255] and labels as of `PackedImages`. Make it in the
    kernel and use it in the workers: the map of the file goes through a fork, a pickle is the path, and all processes
    of a machine share the memory. Leave the files as they are while it is open: a process that reads where one was cut
    off is ended by the system (SIGBUS).

    Args:
        folder: where `cached_images` wrote.
        verify: compare every block of images with its checksum, on all CPUs: 4.5 GB/s per CPU, so 20 s of one CPU
            for 88 GB in memory; from a disk as fast as it reads, after which memory holds the images. False: check
            everything else only.

    Attributes:
        images: (N, size, size, 3) uint8, read-only, the mapped file; with masks (N, size, size, 4).
        shape: (size, size, 3 or 4).
        in_memory: True where memory holds all images, so that nothing need be read ahead.
        names, labels, groups, group_names, classes, rows: as of the `PackedImages` it was made of.

    Raises:
        FileNotFoundError: there is no finished cache in the folder.
        ValueError: the folder is not one of a cache.
        OSError: a file is missing, cut off, changed, or of another cache; the message names it.
    """

    encoding = "uint8"

    def __init__(self, folder, *, verify: bool = True):
        import numpy

        cache = CacheFolder(Path(folder).absolute())
        folder, manifest = cache.folder, cache.read_manifest()
        for name, expected in manifest["files"].items():
            if fault := find_fault(folder / name, expected):
                raise cache.damaged(fault)
        super().__init__(folder, numpy.load(folder / "index.npy"), manifest)
        self.plan, self.made = manifest["plan"], manifest.get("made", {})
        self._layout = layout = layout_of(self.plan)
        self.shape = layout.shape
        self._mapping = map_file(folder / "images.npy")
        if self._mapping[: len(layout.header)] != layout.header:
            raise cache.damaged("the header of images.npy is not what was written")
        pixels = numpy.frombuffer(self._mapping, numpy.uint8, offset=len(layout.header))
        self.images = pixels.reshape(layout.count, *layout.shape)
        if verify:
            checksums = dict(enumerate(manifest["blocks"]))
            wrong = checksums.keys() - layout.intact(self._mapping, checksums)
            if wrong:
                first = layout.images(min(wrong))
                raise cache.damaged(
                    f"images.npy is not what was written in {len(wrong)} of {layout.blocks} blocks, "
                    f"first among images {first[0]:,} to {first[-1]:,}"
                )
        # What was verified was read: memory holds it now, unless there was no room for all of it.
        self.in_memory = verify and self.images.nbytes < (available_memory() or 0)

    def __reduce__(self):
        return functools.partial(CachedImages, verify=False), (self.folder,), self._relabelled()

    def _form(self) -> str:
        height, width, channels = self.shape
        return f" of {height} x {width} x {channels} uint8"

    def _size(self) -> str:
        return f"{human_size(self.images.nbytes)} of decoded pixels in 1 file"

    def take(self, indices, out=None):
        """Return (n, size, size, 3) uint8 in [0, 255], in the order asked for; takes and raises as `PackedImages.take`."""
        import numpy

        indices = self._indices(indices)
        if out is not None:
            self._check_out(out, len(indices))
        # With mode="raise" numpy fills an array of its own first and copies that: a third of the speed.
        return numpy.take(self.images, indices, axis=0, out=out, mode="clip")

    def read_ahead(self, indices) -> None:
        """Ask the system for images that will be taken soon, without waiting for them.

        From a cold disk `take` is then four to five times as fast. Where memory holds them already, asking would cost
        a seventh of the time, so nothing is asked for a cache that was verified and fits into memory.
        """
        if self.in_memory:
            return
        for index in self._indices(indices).tolist():
            ask_for(self._mapping, self._layout.start(index), self._layout.each)

    def _image(self, index: int):
        return self.take([index])[0]


@dataclass(frozen=True)
class Layout:
    """An .npy file of images as it lies on the disk: where everything is in it, and a checksum for every block."""

    count: int
    shape: tuple[int, ...]

    @functools.cached_property
    def header(self) -> bytes:
        """What the file begins with."""
        from numpy.lib import format as npy

        written = io.BytesIO()
        description = {"descr": "|u1", "fortran_order": False, "shape": (self.count, *self.shape)}
        npy.write_array_header_1_0(written, description)
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

    def start(self, image: int) -> int:
        """Return the first byte of an image."""
        return len(self.header) + image * self.each

    def images(self, block: int) -> range:
        """Return the images of a block."""
        return range(block * BLOCK, min(self.count, (block + 1) * BLOCK))

    def intact(self, mapping: mmap.mmap, checksums: dict[int, int]) -> set[int]:
        """Return the blocks whose checksum is still the one given, read on all CPUs."""
        view = memoryview(mapping)

        def is_intact(block: int) -> bool:
            images = self.images(block)
            start, size = self.start(images.start), len(images) * self.each
            ask_for(mapping, start, size)
            return zlib.crc32(view[start : start + size]) == checksums[block]

        with ThreadPoolExecutor(cpus()) as pool:
            return {block for block, fine in zip(checksums, pool.map(is_intact, checksums), strict=True) if fine}


def layout_of(plan: dict) -> Layout:
    """Say how the file of images of a cache with this plan is laid out."""
    return Layout(plan["count"], (plan["size"], plan["size"], plan.get("channels", 3)))


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
