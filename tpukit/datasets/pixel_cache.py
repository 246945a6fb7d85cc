"""Read decoded images from a memory-mapped file, at the speed of a copy in memory.

A cache has one .npy file of all images, `images.npy`, which is mapped into memory. All processes of
a machine share the mapping, so eight workers need the memory once. Each block of 1,024 images has a
checksum in the manifest, which is compared when the cache is opened.
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

# The number of images per checksum. After an interruption, whole blocks are decoded again.
BLOCK = 1024


class CacheFolder(ResumableFolder):
    """A folder that `cached_images` writes: one file of all pixels, and the index of the pack."""

    kind = "cache"
    version = 4
    outputs = ("images.npy", "index.npy", "groups.npy")
    make = "tpukit.cached_images(packed, size=..., folder=folder)"
    repair = "delete it, shutil.rmtree('{folder}'), and build it again"


class CachedImages(StoredImages):
    """Decoded images on disk, as a map-style dataset and as a source of whole batches.

    `[i]` is `(image, labels)`. The image is a (3, H, W) uint8 tensor in [0, 255]; (1, H, W) for
    mode "L", and (2, H, W) for "I;16". Labels and masks are as those of `PackedImages`. Open the
    cache in the kernel and use it in the workers: forked processes share the mapping of the file,
    and a pickle contains only the path and the assigned labels.

    Do not change the files while the cache is open: if a mapped file is truncated, the system
    sends SIGBUS to every process that reads from the file, and the process ends.

    Args:
        folder: the folder that `cached_images` wrote.
        verify: True to compare every block of images with its checksum, on all CPUs. One CPU checks
            4.5 GB/s, so a cache of 88 GB in memory takes 20 s of one CPU. From a disk, the check
            takes the time to read the file, and then the images are in memory. False to skip this
            comparison; missing or truncated files are still found.

    Attributes:
        images: (N, H, W, C) uint8, read-only, the mapped file.
        shape: (H, W, C); C is 3, 4 with masks, 1 for mode "L", and 2 for "I;16".
        in_memory: True if the check of the images has read all of them and memory is large enough
            to keep them, so that `read_ahead` is not necessary.
        names, labels, groups, group_names, classes, rows: as in `PackedImages`.

    Raises:
        FileNotFoundError: there is no finished cache in the folder.
        ValueError: the folder has something other than a cache.
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
        self._shape = layout.shape
        self._mapping = map_file(folder / "images.npy")
        if self._mapping[: len(layout.header)] != layout.header:
            raise cache.damaged("the header of images.npy is not what was written")
        pixels = numpy.frombuffer(self._mapping, numpy.uint8, offset=len(layout.header))
        self.images = pixels.reshape(layout.count, *layout.shape)
        if verify:
            self._verify(cache, manifest["blocks"])
        # `_verify` reads all images, so they are in memory now if memory is large enough.
        fits_memory = self.images.nbytes < (available_memory() or 0)
        self.in_memory = verify and fits_memory

    def _verify(self, cache: CacheFolder, blocks: list[int]) -> None:
        """Raise OSError if the checksum of a block does not match."""
        checksums = dict(enumerate(blocks))
        wrong = checksums.keys() - self._layout.intact(self._mapping, checksums)
        if not wrong:
            return
        first = self._layout.images(min(wrong))
        raise cache.damaged(
            f"{len(wrong)} of {self._layout.blocks} blocks of images.npy are not what was written; "
            f"the first has the images {first[0]:,} to {first[-1]:,}"
        )

    def __reduce__(self):
        return functools.partial(CachedImages, verify=False), (self.folder,), self._relabelled()

    def _form(self) -> str:
        height, width, channels = self.shape
        return f" of {height} x {width} x {channels} uint8"

    def _size(self) -> str:
        return f"{human_size(self.images.nbytes)} of decoded pixels in 1 file"

    def take(self, indices, out=None):
        """Return the images of these indices, (n, H, W, C) uint8 in [0, 255], in their order.

        Arguments and errors are those of `PackedImages.take`.
        """
        import numpy

        indices = self._indices(indices)
        if out is not None:
            self._check_out(out, len(indices))
        # With mode="raise", numpy fills a temporary array and copies it, at a third of the speed.
        # `_indices` has checked the indices.
        return numpy.take(self.images, indices, axis=0, out=out, mode="clip")

    def read_ahead(self, indices) -> None:
        """Ask the system to read the images of a later `take` into memory, without waiting.

        If the images are on disk, the later `take` is four to five times as fast. If `in_memory` is
        True, `read_ahead` does nothing.

        Args:
            indices: (n,) integers, 0 to N - 1.
        """
        if self.in_memory:  # the request would take a seventh of the time of `take`, for nothing
            return
        for index in self._indices(indices).tolist():
            ask_for(self._mapping, self._layout.start(index), self._layout.each)

    def _image(self, index: int):
        return self.take([index])[0]


@dataclass(frozen=True)
class Layout:
    """The layout of an .npy file of images, in blocks with one checksum each.

        header | image 0 | image 1 | ... | image 1023 | image 1024 | ...
               | block 0                              | block 1

    Attributes:
        count: the number of images.
        shape: (H, W, C) of one image.
    """

    count: int
    shape: tuple[int, ...]

    @functools.cached_property
    def header(self) -> bytes:
        """The header of the .npy file; the first image comes directly after it."""
        from numpy.lib import format as npy

        written = io.BytesIO()
        description = {"descr": "|u1", "fortran_order": False, "shape": (self.count, *self.shape)}
        npy.write_array_header_1_0(written, description)
        return written.getvalue()

    @property
    def each(self) -> int:
        """The number of bytes of one image."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The number of bytes of the whole file."""
        return len(self.header) + self.count * self.each

    @property
    def blocks(self) -> int:
        """The number of blocks; the last may have fewer images."""
        return math.ceil(self.count / BLOCK)

    def start(self, image: int) -> int:
        """Return the offset in the file, in bytes, at which an image begins."""
        return len(self.header) + image * self.each

    def images(self, block: int) -> range:
        """Return the indices of the images of a block."""
        return range(block * BLOCK, min(self.count, (block + 1) * BLOCK))

    def intact(self, mapping: mmap.mmap, checksums: dict[int, int]) -> set[int]:
        """Return the blocks whose bytes match their checksum, computed on all CPUs.

        Args:
            mapping: the mapped file.
            checksums: the expected CRC-32 of each block to check, by its number.
        """
        view = memoryview(mapping)

        def is_intact(block: int) -> bool:
            images = self.images(block)
            start = self.start(images.start)
            size = len(images) * self.each
            ask_for(mapping, start, size)
            return zlib.crc32(view[start : start + size]) == checksums[block]

        # Threads, because zlib.crc32 releases the GIL.
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
    # madvise keeps the GIL. os.posix_fadvise releases it, and if another thread is busy, waits up
    # to 5 ms to get it back, for each image: 300 images per second instead of 16,000.
    if hasattr(mmap, "MADV_WILLNEED"):
        page = start - start % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_WILLNEED, page, start + size - page)
