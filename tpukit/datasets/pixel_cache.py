"""Read decoded images through the page cache: as fast as memory is copied.

A cache is one .npy file, `images.npy`, that is mapped into memory. All processes of a machine share
the mapping, so eight workers need the memory once. Each block of 1,024 images has a checksum in the
manifest, which is compared when the cache is opened.
"""

import functools
import io
import math
import mmap
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tpukit.datasets.checked_files import find_fault
from tpukit.datasets.pixel_form import image_size
from tpukit.datasets.resumable import ResumableFolder
from tpukit.datasets.stored_images import StoredImages
from tpukit.essentials.display import human_size
from tpukit.essentials.environment import available_memory, cpus

# Images that share a checksum, and are decoded again together after an interruption.
BLOCK = 1024


class CacheFolder(ResumableFolder):
    """A folder that `cached_images` writes: all pixels in a file, and the index of the pack."""

    kind = "cache"
    version = 4
    outputs = ("images.npy", "index.npy", "groups.npy")
    make = "tpukit.cached_images(packed, size=..., folder=folder)"
    repair = "delete it, shutil.rmtree('{folder}'), and build it again"


class CachedImages(StoredImages):
    """Decoded images on disk, as a map-style dataset and as a source of whole batches.

    `[i]` is `(image, labels)`: (3, H, W) uint8 tensor in [0, 255] and labels as those of
    `PackedImages`; with another mode (1, H, W) or (2, H, W). Make it in the kernel and use it in
    the workers: forks share the mapping of the file, and a pickle contains only the path.

    Do not change the files while the cache is open: the system ends a process with SIGBUS if it
    reads from a truncated file.

    Args:
        folder: the folder that `cached_images` wrote.
        verify: True compares every block of images with its checksum, on all CPUs. One CPU checks
            4.5 GB/s, so 88 GB in memory take 20 s of one CPU. From a disk it is as fast as the
            disk, and afterwards memory holds the images. False checks everything except these
            blocks.

    Attributes:
        images: (N, H, W, 3) uint8, read-only, the mapped file; with masks (N, H, W, 4).
        shape: (H, W, 3), with masks (H, W, 4).
        in_memory: True if memory holds all images, so that nothing must be read ahead.
        names, labels, groups, group_names, classes, rows: as those of `PackedImages`.

    Raises:
        FileNotFoundError: there is no finished cache in the folder.
        ValueError: the folder is not that of a cache.
        OSError: a file is missing, truncated, changed, or belongs to another cache; the message
            names it.
    """

    encoding = "uint8"

    def __init__(self, folder, *, verify: bool = True):
        import numpy

        cache = CacheFolder(Path(folder).absolute())
        folder = cache.folder
        manifest = cache.read_manifest()
        for name, expected in manifest["files"].items():
            fault = find_fault(folder / name, expected)
            if fault:
                raise cache.damaged(fault)
        super().__init__(folder, numpy.load(folder / "index.npy"), manifest)
        self.plan = manifest["plan"]
        self.made = manifest.get("made", {})
        layout = layout_of(self.plan)
        self._layout = layout
        self.shape = layout.shape
        self._mapping = map_file(folder / "images.npy")
        if self._mapping[: len(layout.header)] != layout.header:
            raise cache.damaged("the header of images.npy is not what was written")
        pixels = numpy.frombuffer(self._mapping, numpy.uint8, offset=len(layout.header))
        self.images = pixels.reshape(layout.count, *layout.shape)
        if verify:
            self._verify(cache, manifest["blocks"])
        # Verifying reads all images, so memory holds them now if it is large enough.
        fits_memory = self.images.nbytes < (available_memory() or 0)
        self.in_memory = verify and fits_memory

    def _verify(self, cache: CacheFolder, blocks: list[int]) -> None:
        """Raise OSError if a block does not have its checksum."""
        checksums = dict(enumerate(blocks))
        wrong = checksums.keys() - self._layout.intact(self._mapping, checksums)
        if not wrong:
            return
        first = self._layout.images(min(wrong))
        raise cache.damaged(
            f"images.npy is not what was written in {len(wrong)} of {self._layout.blocks} blocks, "
            f"first among images {first[0]:,} to {first[-1]:,}"
        )

    def __reduce__(self):
        return functools.partial(CachedImages, verify=False), (self.folder,), self._relabelled()

    def _form(self) -> str:
        height, width, channels = self.shape
        return f" of {height} x {width} x {channels} uint8"

    def _size(self) -> str:
        return f"{human_size(self.images.nbytes)} of decoded pixels in 1 file"

    def take(self, indices, out=None):
        """Return (n, H, W, 3) uint8 in [0, 255] in the order of `indices`.

        With masks (n, H, W, 4). Arguments and errors are those of `PackedImages.take`.
        """
        import numpy

        indices = self._indices(indices)
        if out is not None:
            self._check_out(out, len(indices))
        # With mode="raise" numpy fills a temporary array first and copies it: a third of the
        # speed. The indices are checked above.
        return numpy.take(self.images, indices, axis=0, out=out, mode="clip")

    def read_ahead(self, indices) -> None:
        """Ask the system to read images that will be taken soon, without waiting for them.

        From a cold disk `take` is then four to five times as fast. For images in memory the request
        would take a seventh of the time of `take`, so `read_ahead` does nothing if `in_memory` is
        True.
        """
        if self.in_memory:
            return
        for index in self._indices(indices).tolist():
            ask_for(self._mapping, self._layout.start(index), self._layout.each)

    def _image(self, index: int):
        return self.take([index])[0]


@dataclass(frozen=True)
class Layout:
    """The layout of an .npy file of images, in blocks that have a checksum each.

        header | image 0 | image 1 | ... | image 1023 | image 1024 | ...
               | block 0                              | block 1

    Attributes:
        count: the number of images.
        shape: (H, W, 3) or, with masks, (H, W, 4).
    """

    count: int
    shape: tuple[int, ...]

    @functools.cached_property
    def header(self) -> bytes:
        """The bytes at the beginning of the file."""
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
        """The number of blocks; the last may be short."""
        return math.ceil(self.count / BLOCK)

    def start(self, image: int) -> int:
        """Return the first byte of an image."""
        return len(self.header) + image * self.each

    def images(self, block: int) -> range:
        """Return the images of a block."""
        return range(block * BLOCK, min(self.count, (block + 1) * BLOCK))

    def intact(self, mapping: mmap.mmap, checksums: dict[int, int]) -> set[int]:
        """Return the blocks whose contents match their checksum, checked on all CPUs."""
        view = memoryview(mapping)

        def is_intact(block: int) -> bool:
            images = self.images(block)
            start = self.start(images.start)
            size = len(images) * self.each
            ask_for(mapping, start, size)
            return zlib.crc32(view[start : start + size]) == checksums[block]

        with ThreadPoolExecutor(cpus()) as pool:
            results = dict(zip(checksums, pool.map(is_intact, checksums), strict=True))
        return {block for block, fine in results.items() if fine}


def layout_of(plan: dict) -> Layout:
    """Return the layout of the images of a cache with this plan."""
    return Layout(plan["count"], (*image_size(plan["size"]), plan.get("channels", 3)))


def map_file(file: Path) -> mmap.mmap:
    """Map a file into memory, read-only."""
    with open(file, "rb") as handle:
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)


def ask_for(mapping: mmap.mmap, start: int, size: int) -> None:
    """Ask the system to read a part of a mapped file into memory, without waiting for it."""
    # Not os.posix_fadvise: it releases the GIL, and another thread that keeps Python busy returns
    # it after up to 5 ms, for each image: 300 images per second, against 16,000 with this.
    if hasattr(mmap, "MADV_WILLNEED"):
        page = start - start % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_WILLNEED, page, start + size - page)
