"""Read decoded images through the page cache: as fast as memory is copied, checked when the cache is opened."""

import json
import zlib
from functools import partial
from pathlib import Path

from tpukit.display.tables import human_size
from tpukit.machine.resources import available_memory
from tpukit.storage.array_records import unseal
from tpukit.storage.blocks import ask_for, map_file
from tpukit.storage.build_pixel_cache import FORMAT, NoRoom, build_cache, cache_or_decode, layout_of
from tpukit.storage.records import split_by_group

__all__ = ["Cache", "NoRoom", "build_cache", "cache_or_decode"]


class Cache:
    """Decoded images on disk as a map-style dataset, and as a source of whole batches.

    `[i]` is `(image, labels)`: (3, size, size) uint8 tensor in [0, 255] and (L,) float32 tensor. Make it in the kernel
    and use it in the workers: the map of the file goes through a fork, a pickle is the path, and all processes of a
    machine share the memory. Leave the files as they are while it is open: a process that reads where one was cut off
    is ended by the system (SIGBUS).

    Args:
        folder: where `build_cache` wrote.
        verify: compare every block of images with its checksum, on all CPUs: at 4.5 GB/s a CPU, 20 s of one CPU for
            88 GB in memory; from a disk as fast as it reads, after which memory holds the images. False: all the rest.

    Attributes:
        images: (N, size, size, 3) uint8, read-only, the mapped file.
        shape: (size, size, 3).
        names, labels, groups, group_names, classes: as of `Records`.

    Raises:
        FileNotFoundError: there is no finished cache in the folder.
        ValueError: the folder is not one of a cache.
        OSError: a file is missing, cut off, changed, or of another cache; the message names it.
    """

    form = "uint8"

    def __init__(self, folder, *, verify: bool = True):
        import numpy

        self.folder = Path(folder).absolute()
        manifest = _manifest(self.folder)
        for name, told in manifest["files"].items():
            file = self.folder / name
            found = file.stat().st_size if file.is_file() else None
            if found != told["bytes"]:
                found = "is missing" if found is None else f"has {found:,} bytes where {told['bytes']:,} were written"
                raise _damaged(self.folder, f"{name} {found}")
            if "crc" in told and zlib.crc32(file.read_bytes()) != told["crc"]:
                raise _damaged(self.folder, f"{name} is not what was written")
        self.plan = manifest["plan"]
        self.labels, self.groups = (numpy.load(self.folder / name) for name in ("labels.npy", "groups.npy"))
        self.names, self.classes, self.group_names = (manifest[key] for key in ("names", "classes", "group_names"))
        layout = layout_of(self.plan)
        self.shape, self._each, self._begin = layout.shape, layout.each, len(layout.header)
        self._mapping = map_file(self.folder / "images.npy")
        if self._mapping[: self._begin] != layout.header:
            raise _damaged(self.folder, "the header of images.npy is not what was written")
        pixels = numpy.frombuffer(self._mapping, numpy.uint8, offset=self._begin)
        self.images = pixels.reshape(layout.count, *layout.shape)
        if verify:
            checksums = dict(enumerate(manifest["blocks"]))
            wrong = checksums.keys() - layout.intact(self._mapping, checksums)
            if wrong:
                raise _damaged(
                    self.folder,
                    f"images.npy is not what was written in {len(wrong)} of {layout.blocks} blocks, "
                    f"first among images {layout.images(min(wrong))[0]:,} to {layout.images(min(wrong))[-1]:,}",
                )
        # What was verified was read: memory holds it now, unless there was no room for all of it.
        self._in_memory = verify and self.images.nbytes < (available_memory() or 0)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        import torch

        index = index + len(self) if -len(self) <= index < 0 else index
        image = torch.from_numpy(self.take([index])[0])
        return image.permute(2, 0, 1).contiguous(), torch.from_numpy(self.labels[index].copy())

    def __reduce__(self):
        return partial(Cache, verify=False), (self.folder,)

    def __repr__(self) -> str:
        return f"Cache({str(self.folder)!r}): {len(self):,} images {self.shape}, {human_size(self.images.nbytes)}"

    def take(self, indices, out=None):
        """Return (n, size, size, 3) uint8 in [0, 255], in the order asked for; into `out` where it is given.

        Raises:
            IndexError: an index is not one of 0 to N - 1.
            ValueError: the indices are not (n,) integers, or `out` has another shape or dtype.
        """
        import numpy

        indices = self._numbers(indices)
        if out is not None and (out.shape != (len(indices), *self.shape) or out.dtype != numpy.uint8):
            raise ValueError(
                f"take writes {(len(indices), *self.shape)} uint8, and out is {out.shape} {out.dtype}\n"
                f"  fix:   out=numpy.empty({(len(indices), *self.shape)}, numpy.uint8), or leave it away"
            )
        # With mode="raise" numpy fills an array of its own first and copies that: a third of the speed.
        return numpy.take(self.images, indices, axis=0, out=out, mode="clip")

    def read_ahead(self, indices) -> None:
        """Ask the system for images that will be taken soon, without waiting for them.

        From a cold disk `take` is then four to five times as fast. Where memory holds them it would be a seventh of
        the time lost, so a cache that was verified, and has room in memory, is not asked for again.
        """
        if self._in_memory:
            return
        for index in self._numbers(indices).tolist():
            ask_for(self._mapping, self._begin + index * self._each, self._each)

    def split(self, valid: float = 0.2, seed: int = 0):
        """Return the images to train and to validate on, two int64 arrays, the same as of the `Records`."""
        return split_by_group(self.groups, valid, seed)

    def _numbers(self, indices):
        import numpy

        indices = numpy.asarray(indices)
        if not indices.size:
            return numpy.empty(0, numpy.int64)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":  # numpy would take True for 1
            raise ValueError(
                f"indices are one list of whole numbers, got shape {indices.shape} of {indices.dtype}\n"
                "  fix:   numpy.flatnonzero(mask), where this is a mask"
            )
        low, high = indices.min(), indices.max()
        if low < 0 or high >= len(self):
            raise IndexError(
                f"image {high if high >= len(self) else low} of {len(self):,} was asked for\n"
                f"  fix:   indices from 0 to {len(self) - 1:,}, such as split() gives"
            )
        return indices


def _manifest(folder: Path) -> dict:
    try:
        data = (folder / "manifest.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        there = sorted(entry.name for entry in folder.iterdir())[:4] if folder.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"{folder} holds no finished cache\n"
            f"  found: {there}\n"
            "  fix:   build_cache(records, folder, size=...), which goes on where it was interrupted"
        ) from None
    try:
        told = json.loads(data)
        if not isinstance(told, dict) or told.get("format") != FORMAT:
            raise ValueError(
                f"{folder} is not the folder of a cache\n"
                f'  found: a manifest.json without "format": "{FORMAT}"\n'
                "  fix:   name the folder that build_cache wrote, or a new one for it to write"
            )
    except json.JSONDecodeError:
        raise _damaged(folder, "manifest.json is not what was written") from None
    try:
        return unseal(data)
    except ValueError:
        raise _damaged(folder, "manifest.json is not what was written") from None


def _damaged(folder: Path, found: str) -> OSError:
    return OSError(
        f"the cache in {folder} is damaged, or its files are not of one cache\n"
        f"  found: {found}\n"
        f"  fix:   delete it, shutil.rmtree({str(folder)!r}), and build it again"
    )
