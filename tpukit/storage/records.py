"""Read packed images at random: whole batches in one call, and every record checked."""

import hashlib
import os
import zlib
from pathlib import Path

from tpukit.storage.array_records import FORMAT, Shards, unseal
from tpukit.storage.decoding import decode, jpeg_decoder
from tpukit.storage.pack_sources import Names
from tpukit.storage.packing import pack

__all__ = ["Records", "pack", "split_by_group"]


class Records:
    """A pack as a map-style dataset, and as a source of whole batches.

    `[i]` is `(image, labels)`: (3, H, W) uint8 tensor in [0, 255] and (L,) float32 tensor. Opening it looks at every
    file's size and at the index, not at the images; those are checked as they are read. It can be made in the kernel
    and used in forked workers, in threads, and in a DataLoader's processes of any kind.

    Args:
        folder: where `pack` wrote.
        size: height and width in pixels that images are decoded at; None for the pack's own.
        exact: True for Pillow's pixels to the last bit; see `decode`.

    Attributes:
        names: of the L labels.
        labels: (N, L) float32.
        groups: (N,) int32, the number of each image's group; without groups each image is its own.
        group_names: what those numbers stand for; empty without groups.
        classes: of a folder, the names of its sub-folders: what the numbers in its one label stand for.
        form: "jpeg" for encoded images, "uint8" for pixels.
        skipped: a dict with "source", "name" and "why" for each image that was left out.
        digest: of the manifest: another pack, another digest.

    Raises:
        FileNotFoundError: there is no finished pack in the folder.
        OSError: a file of it is damaged, cut off or gone; from reading, a record is.
        ValueError: the pack holds pixels of another size.
    """

    def __init__(self, folder, size: int | None = None, *, exact: bool = False):
        import numpy

        self.folder, self.exact = Path(folder).absolute(), exact
        manifest = self._manifest()
        self._files = manifest["files"]
        index = self._checked("index.npy")
        shards = manifest["shards"]
        for shard in shards:
            _check_size(self.folder / shard["file"], shard["bytes"])
        rows = numpy.load(index)
        self.form, self.skipped = manifest["form"], manifest["skipped"]
        self._shards = Shards(
            [self.folder / shard["file"] for shard in shards],
            [shard["records"] for shard in shards],
            rows,
            at_once=self.form == "uint8",  # decoding is one by one in any case
        )
        self._head = rows.dtype.itemsize  # bytes of a record before its image
        self._names = None
        self.names, self.classes, self.group_names = (manifest[k] for k in ("label_names", "classes", "group_names"))
        self.labels, self.groups = numpy.ascontiguousarray(rows["labels"]), numpy.ascontiguousarray(rows["group"])
        self._shape = manifest["shape"] and tuple(manifest["shape"])
        self.size = size
        if self.form == "jpeg":
            jpeg_decoder()  # if it is missing, say so here and not in every worker
            if size is not None:
                self._shape = (size, size, 3)
        elif size is not None and self._shape != (size, size, 3):
            raise ValueError(
                f"{folder} holds pixels of {self._shape[0]} x {self._shape[1]}, not of {size} x {size}\n"
                f"  fix:   Records(folder), or pack(..., size={size}) into another folder"
            )

    def __reduce__(self):
        return _open, (self.folder, self.size, self.exact)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        import torch

        index = self._number(index)
        (record,) = self._shards.read([index])
        return torch.from_numpy(self._pixels(record)).permute(2, 0, 1).contiguous(), torch.from_numpy(
            self.labels[index].copy()
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, 3) of every image."""
        if self._shape is None:
            raise ValueError(
                f"the images in {self.folder} differ in size, so they do not fit into one batch\n"
                "  fix:   Records(folder, size=128) decodes all of them at one"
            )
        return self._shape

    def read(self, indices) -> list[bytes]:
        """Return what is stored of each image, checked: the bytes of its file, or its (H, W, 3) pixels."""
        return [record[self._head :] for record in self._shards.read(self._numbers(indices))]

    def take(self, indices, out=None):
        """Return (n, H, W, 3) uint8 in [0, 255], in the order asked for; into `out` where it is given."""
        import numpy

        indices = self._numbers(indices)
        if out is None:
            out = numpy.empty((len(indices), *self.shape), numpy.uint8)
        elif out.shape != (len(indices), *self.shape) or out.dtype != numpy.uint8:
            raise ValueError(
                f"take writes {(len(indices), *self.shape)} uint8, and out is {out.shape} {out.dtype}\n"
                f"  fix:   out=numpy.empty({(len(indices), *self.shape)}, numpy.uint8), or leave it away"
            )
        for place, record in zip(out, self._shards.read(indices), strict=True):
            self._pixels(record, place)
        return out

    def split(self, valid: float = 0.2, seed: int = 0):
        """Return the images to train and to validate on, two int64 arrays; no group is on both sides."""
        return split_by_group(self.groups, valid, seed)

    def name(self, index: int) -> str:
        """Say which file an image was, as the source named it, or which item."""
        source = int(self._shards.rows["source"][self._number(index)])
        if "names" not in self._files:
            return f"item {source}"
        if self._names is None:
            self._names = Names(self._checked("names"))
        return self._names[source]

    def _pixels(self, record: bytes, out=None):
        import numpy

        stored = memoryview(record)[self._head :]
        if self.form == "jpeg":
            return decode(stored, self.size, exact=self.exact, out=out)
        pixels = numpy.frombuffer(stored, numpy.uint8).reshape(self.shape)
        if out is None:
            return pixels.copy()  # a record's own cannot be written to
        out[:] = pixels
        return out

    def _numbers(self, indices):
        import numpy

        indices = numpy.asarray(indices)
        if not indices.size:
            return numpy.empty(0, numpy.int64)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueError(f"indices are one list of whole numbers, got shape {indices.shape} of {indices.dtype}")
        low, high = indices.min(), indices.max()
        if low < 0 or high >= len(self):
            raise IndexError(f"image {high if high >= len(self) else low} of {len(self):,} was asked for")
        return indices

    def _number(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self):,} was asked for")
        return index % len(self)

    def _manifest(self) -> dict:
        file = self.folder / "manifest.json"
        try:
            data = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            there = sorted(os.listdir(self.folder))[:4] if self.folder.is_dir() else "no such folder"
            fix = "pass the folder that pack wrote"
            if "unfinished" in there:
                fix = "call pack as before, it goes on from where it was ended"
            raise FileNotFoundError(f"{self.folder} holds no finished pack\n  found: {there}\n  fix:   {fix}") from None
        try:
            manifest = unseal(data)
            told = manifest["plan"]["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(file, f"not the manifest that pack wrote: {error}") from error
        if told != FORMAT:
            raise ValueError(
                f"{self.folder} was packed in format {told}, and this tpukit reads {FORMAT}\n"
                "  fix:   use the tpukit that packed it, or pack again into a new folder"
            )
        self.digest = hashlib.sha256(data).hexdigest()
        return manifest

    def _checked(self, name: str) -> Path:
        file, told = self.folder / name, self._files[name]
        _check_size(file, told["bytes"])
        if zlib.crc32(file.read_bytes()) != told["crc"]:
            raise _damaged(file, "its checksum is not the manifest's")
        return file


def split_by_group(groups, valid: float = 0.2, seed: int = 0):
    """Split images into two parts with no group in both; return the images of each, int64, in order.

    Args:
        groups: (N,) int, the group of each image.
        valid: share of the images in the second part, between 0 and 1; met as nearly as whole groups allow.
        seed: decides which groups.

    Raises:
        ValueError: valid is out of range, or there is only one group.
    """
    import numpy

    if not 0 < valid < 1:
        raise ValueError(f"valid is the share of the images to validate on, between 0 and 1, got {valid}")
    names, numbers, counts = numpy.unique(groups, return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise ValueError(
            f"{len(numbers):,} images in one group cannot be split\n"
            "  fix:   pack(..., groups=...) with the column that says which images belong together"
        )
    order = numpy.random.default_rng(seed).permutation(len(names))
    chosen = counts[order].cumsum()[:-1]  # images in the second part if it got the first group, two, ...
    enough = int(numpy.abs(chosen - valid * len(numbers)).argmin()) + 1
    second = numpy.isin(numbers, order[:enough])
    return numpy.flatnonzero(~second), numpy.flatnonzero(second)


def _open(folder: Path, size: int | None, exact: bool) -> Records:
    return Records(folder, size, exact=exact)


def _check_size(file: Path, size: int) -> None:
    try:
        found = file.stat().st_size
    except FileNotFoundError:
        raise _damaged(file, "no such file") from None
    if found != size:
        raise _damaged(file, f"{found:,} bytes where {size:,} were written")


def _damaged(file: Path, why: str) -> OSError:
    return OSError(
        f"{file} is damaged\n  found: {why}\n"
        "  fix:   copy it again from where it is whole, or pack the images again into a new folder"
    )
