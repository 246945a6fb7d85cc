"""Read packed images at random: whole batches in one call, and every record checked."""

import hashlib
from functools import partial
from pathlib import Path

from tpukit.datasets.array_records import Shards
from tpukit.datasets.checked_files import find_fault, seal, whole_number
from tpukit.datasets.decoding import decode, jpeg_decoder
from tpukit.datasets.image_folders import most_frequent
from tpukit.datasets.resumable import ResumableFolder
from tpukit.datasets.source_files import Names
from tpukit.datasets.stored_images import StoredImages
from tpukit.essentials.display import InvalidValueError, SystemFailureError, counted, first_few, human_size

_NOT_PIXELS = ("seed", "shard", "missing")  # of a plan: which images, and in which order


class PackFolder(ResumableFolder):
    """A folder that `pack` writes: shards, their index, and the names of the files that were packed."""

    kind, version = "pack", 4
    outputs = ("*.array_record", "index.npy", "groups.npy", "names", "looks.npy")
    make = "pack(source, folder)"
    repair = "copy it again from where it is whole, or pack the images again into a new folder"


class PackedImages(StoredImages):
    """A pack as a map-style dataset, and as a source of whole batches.

    `[i]` is `(image, labels)`: (3, H, W) uint8 tensor in [0, 255] and (L,) float32 tensor, or () int64 of a class;
    with masks `(image, mask)`, (H, W) int64, or `(image, {"labels": ..., "masks": ...})`. Opening it looks at every
    file's size and at the index, not at the images; those are checked as they are read. It can be made in the kernel
    and used in forked workers, in threads, and in a DataLoader's processes of any kind.

    Args:
        folder: where `pack` wrote.
        size: height and width in pixels that images are decoded at; None for the pack's own.
        exact: True for Pillow's pixels to the last bit; see `decode`.

    Attributes:
        names, labels, has_masks, groups, group_names, classes, rows: as of `StoredImages`. `rows` is right also where
            damaged images were left out.
        encoding: "jpeg" for encoded images, "uint8" for pixels.
        index: (N,) of `row_type`, the same as on the disk.
        skipped: a dict with "row", "name" and "why" for each image that was left out.
        digest: of the manifest: another pack, another digest.

    Raises:
        FileNotFoundError: there is no finished pack in the folder.
        OSError: a file of it is damaged, cut off or gone; from reading, a record is.
        ValueError: the pack holds pixels of another size, or the folder holds something else.
    """

    def __init__(self, folder, size: int | None = None, *, exact: bool = False):
        import numpy

        size = whole_number("size", size, 1)
        self._pack = PackFolder(Path(folder).absolute())
        folder, manifest = self._pack.folder, self._pack.read_manifest()
        self.files, shards = manifest["files"], manifest["shards"]
        small = [(name, self.files[name]) for name in ("index.npy", "groups.npy") if name in self.files]
        for name, expected in [*small, *((shard["file"], shard) for shard in shards)]:
            if fault := find_fault(folder / name, expected):
                raise self._pack.damaged(fault)
        self.index = numpy.load(folder / "index.npy")
        super().__init__(folder, self.index, manifest)
        self._manifest = manifest
        self.size, self.exact, self._window = size, exact, manifest["plan"].get("window")
        self.encoding, self.skipped = manifest["encoding"], manifest["skipped"]
        plan = manifest["plan"]
        self.made = {key: plan[key] for key in plan if not isinstance(plan[key], dict) and key not in _NOT_PIXELS}
        self.digest = hashlib.sha256(seal(manifest)).hexdigest()
        self.shards = Shards(
            [folder / shard["file"] for shard in shards],
            [shard["records"] for shard in shards],
            self.index,
            at_once=self.encoding == "uint8",  # encoded images are decoded one by one in any case
        )
        self._head = self.index.dtype.itemsize  # bytes of a record before its image
        self._names = None
        self._shape = manifest["shape"] and tuple(manifest["shape"])
        if self.encoding == "jpeg":
            jpeg_decoder()  # if it is missing, say so here and not in every worker
            if size is not None:
                self._shape = (size, size, 3 + self.has_masks)
        elif size is not None and self._shape[:2] != (size, size):
            raise InvalidValueError(
                f"{folder} holds pixels of {self._shape[0]} x {self._shape[1]}, not of {size} x {size}",
                fix=f"PackedImages(folder), or pack(..., size={size}) into another folder",
            )

    @property
    def report(self) -> str:
        """What is in the pack, in a line, and in further lines what rarely is meant so."""
        import numpy

        found, lines = self._manifest, [counted(len(self), "image")]
        if self.classes:
            counts = numpy.bincount(self._stored_labels, minlength=len(self.classes)).tolist()
            sizes = [f"{name} {count:,}" for name, count in zip(self.classes, counts, strict=True)]
            lines[0] += f" of {counted(len(self.classes), 'class')}: {first_few(sizes, 12)}"
        elif self.names:
            lines[0] += f", {counted(len(self.names), 'label')}: {first_few(self.names, 12)}"
            values = numpy.unique(self._stored_labels[:, 0])
            are_whole = len(values) <= min(100, len(self) / 2) and values[0] >= 0 and not (values % 1).any()
            if len(self.names) == 1 and are_whole and values[-1] < 1000:
                lines.append(
                    f"{self.names[0]} is a quantity here, (N, 1) float32, with {len(values)} whole values; as classes: "
                    f"pack(..., classes=range({values[-1] + 1:.0f}))"
                )
        elif not self.has_masks:
            lines[0] += ", no labels"
        if others := found["left_out"]:
            kinds = most_frequent(others)
            lines.append(f"left out: {sum(others.values()):,} files that are no images of a class ({kinds})")
        if repeated := found["repeated"]:
            sides = (
                "groups= decides on which side of a split each is" if self.group_names else "split keeps them together"
            )
            labels = f", {found['relabelled']:,} with other labels" * bool(found.get("relabelled"))
            lines.append(f"{repeated:,} images are there more than once{labels}; {sides}")
        if found["dark"] and found["brightest"] < 2**14:
            lines.append(
                f"{found['dark']:,} images of 16 bits are nearly black, none above {found['brightest']:,}: "
                f"options=tpukit.PackOptions(window=(0, {2 ** found['brightest'].bit_length() - 1})) makes that white"
            )
        if self.has_masks:
            lines.append(
                f"masks hold {counted(len(found['mask_values']), 'value')}: {first_few(found['mask_values'], 12)}"
            )
        if 255 in found["mask_values"] and set(found["mask_values"]) <= {0, 255}:
            lines.append("masks hold 0 and 255 alone: is 255 a class, divide by 255; or pixels that do not count?")
        for number, (one, other) in list(found.get("mask_colours", {}).items())[:1]:
            both = f"{tuple(one)} and {tuple(other)}"
            lines.append(f"masks show class {number} in several colours, {both}: do their palettes number alike?")
        if frames := found.get("frames"):
            lines.append(f"of {counted(frames, 'file')} with several pages or frames the first is taken")
        return "\n      ".join(lines)

    def __reduce__(self):
        return partial(PackedImages, exact=self.exact), (self.folder, self.size), self._relabelled()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, 3) of every image; (H, W, 4) with masks."""
        if self._shape is None:
            raise InvalidValueError(
                f"the images in {self.folder} differ in size, so they do not fit into one batch",
                fix="PackedImages(folder, size=128) decodes all of them at one",
            )
        return self._shape

    def _form(self) -> str:
        stored = "JPEG" if self.encoding == "jpeg" else "uint8"
        if self._shape is None:
            return f" of different sizes, {stored}"
        height, width, channels = self._shape
        return f" of {height} x {width} x {channels}, {stored}"

    def _size(self) -> str:
        count = len(self.shards.files)
        return f"{human_size(sum(file.stat().st_size for file in self.shards.files))} in {counted(count, 'file')}"

    def read(self, indices) -> list[bytes]:
        """Return what is stored of each image, checked: the bytes of its file, or its (H, W, 3) pixels."""
        return [record[self._head :] for record in self.shards.read(self._indices(indices))]

    def take(self, indices, out=None):
        """Return (n, H, W, 3) uint8 in [0, 255], in the order asked for; into `out` where it is given.

        With masks (n, H, W, 4): the fourth channel is the class number of each pixel.

        Raises:
            IndexError: an index is not one of 0 to N - 1.
            ValueError: the indices are not (n,) integers, or `out` has another shape or dtype.
            OSError: a record is damaged; the message names it.
        """
        import numpy

        indices = self._indices(indices)
        if out is None:
            out = numpy.empty((len(indices), *self.shape), numpy.uint8)
        else:
            self._check_out(out, len(indices))
        for index, place, record in zip(indices, out, self.shards.read(indices), strict=True):
            self._pixels(index, record, place)
        return out

    def name(self, index: int) -> str:
        """Say which file an image was, as the source named it, or which item."""
        row = int(self.rows[index])
        if "names" not in self.files:
            return f"item {row}"
        if self._names is None:
            if fault := find_fault(self.folder / "names", self.files["names"]):
                raise self._pack.damaged(fault)
            self._names = Names(self.folder / "names")
        return self._names[row]

    def _image(self, index: int):
        return self._pixels(index, *self.shards.read([index]))

    def _pixels(self, index: int, record: bytes, out=None):
        import numpy

        stored = memoryview(record)[self._head :]
        if self.encoding == "jpeg":
            try:
                return decode(stored, self.size, exact=self.exact, out=out, window=self._window)
            except ValueError as error:
                raise SystemFailureError(
                    f"image {index} of {self.folder} cannot be decoded: {self.name(index)}",
                    found=error,
                    fix="leave it out, torch.utils.data.Subset(records, indices), or pack the images again",
                ) from error
        pixels = numpy.frombuffer(stored, numpy.uint8).reshape(self.shape)
        if out is None:
            return pixels.copy()  # a record's own cannot be written to
        out[:] = pixels
        return out
