"""Read packed images in any order, a whole batch per call, and check each image's checksum."""

import hashlib
from functools import partial
from pathlib import Path

from tpukit.datasets.array_records import Shards
from tpukit.datasets.checked_files import find_fault, seal
from tpukit.datasets.decoding import decode, jpeg_decoder
from tpukit.datasets.image_folders import most_frequent
from tpukit.datasets.pixel_form import PixelForm, image_size, size_in_plan
from tpukit.datasets.resumable import ResumableFolder
from tpukit.datasets.source_files import Names, printable
from tpukit.datasets.stored_images import StoredImages
from tpukit.essentials.display import (
    InvalidValueError,
    SystemFailureError,
    counted,
    first_few,
    human_size,
)

# The entries of a plan that decide which images are packed and in which order. The other entries
# decide the pixels, and `PackedImages.made` has them.
_NOT_PIXELS = ("seed", "shard", "missing")
_FEW = 12  # the largest number of classes, labels or mask values that a line of the report lists


class PackFolder(ResumableFolder):
    """A folder that `pack` writes: shards, their index, and the names of the packed files."""

    kind = "pack"
    version = 4
    outputs = ("*.array_record", "index.npy", "groups.npy", "names", "looks.npy")
    make = "pack(source, folder)"
    repair = "copy it again from where it is whole, or pack the images again into a new folder"


class PackedImages(StoredImages):
    """A pack, as a map-style dataset and as a source of whole batches.

    `[i]` is `(image, labels)`. The image is a (3, H, W) uint8 tensor in [0, 255]; (1, H, W) with
    `PackOptions(mode="L")`, and (2, H, W) with "I;16". The labels are a (L,) float32 tensor; a
    class is a () int64 tensor. If the pack has masks and no labels, `[i]` is `(image, mask)`, and
    the mask is a (H, W) int64 tensor. With masks and labels, `[i]` is
    `(image, {"labels": ..., "masks": ...})`.

    When you open a pack, `PackedImages` checks the sizes of all files, and the checksums of the
    index and the groups. An image is checked each time it is read. Open the pack in the kernel, and
    use it in forked workers, in threads, and in the processes of a DataLoader.

    Args:
        folder: the folder that `pack` wrote.
        size: height and width in pixels to which images are decoded, one number or (height, width);
            None for the size in the pack.
        exact: True for exactly the pixels of Pillow; see `decode`.

    Attributes:
        names, labels, has_masks, groups, group_names, classes, rows: see `StoredImages`. `rows`
            has no entry for a damaged image that was left out.
        encoding: "jpeg" for encoded images of any format, "uint8" for pixels.
        index: the array in the file index.npy, (N,) with the fields of `row_type`.
        skipped: a list with a dict of "row", "name" and "why" for each image that was left out.
        digest: the digest of the manifest. Only packs of equal contents have the same digest.

    Raises:
        FileNotFoundError: there is no finished pack in the folder.
        OSError: a file of the pack is damaged, truncated or missing; or, when images are read, an
            image is damaged.
        ValueError: the pack has pixels of another size than `size`, or the folder has files of
            another program.
    """

    def __init__(self, folder, size=None, *, exact: bool = False):
        import numpy

        size = image_size(size)
        self._pack = PackFolder(Path(folder).expanduser().absolute())
        folder = self._pack.folder
        manifest = self._pack.read_manifest()
        plan = manifest["plan"]
        shards = manifest["shards"]
        self.files = manifest["files"]
        self._check_files(shards)
        self.index = numpy.load(folder / "index.npy")
        super().__init__(folder, self.index, manifest)
        self._manifest = manifest
        self.size = size
        self.exact = exact
        self._pixel_form = PixelForm.of_plan(plan)
        self.encoding = manifest["encoding"]
        self.skipped = manifest["skipped"]
        self.made = {}
        for key, value in plan.items():
            if key not in _NOT_PIXELS and not isinstance(value, dict):
                self.made[key] = value
        self.digest = hashlib.sha256(seal(manifest)).hexdigest()
        self.shards = Shards(
            [folder / shard["file"] for shard in shards],
            [shard["records"] for shard in shards],
            self.index,
            at_once=self.encoding == "uint8",  # encoded images are decoded one after the other
        )
        self._head = self.index.dtype.itemsize  # bytes of a record before its image
        self._names = None
        self._shape = None
        if manifest["shape"]:
            self._shape = tuple(manifest["shape"])
        self._choose_size(size)

    def _check_files(self, shards: list[dict]) -> None:
        """Raise OSError if a file of the pack is missing or truncated, or the index is damaged."""
        expected = {}
        for name, facts in self.files.items():
            expected[name] = facts
            # Without their checksums, because millions of names would have to be read.
            if name in ("names", "looks.npy"):
                expected[name] = {"bytes": facts["bytes"]}
        for shard in shards:
            expected[shard["file"]] = shard
        for name, facts in expected.items():
            fault = find_fault(self._pack.folder / name, facts)
            if fault:
                raise self._pack.damaged(fault)

    def _choose_size(self, size: tuple[int, int] | None) -> None:
        """Set the shape that images are decoded to; ValueError for pixels of another size."""
        if self.encoding == "jpeg":
            jpeg_decoder()  # warns here, and not in every worker, if simplejpeg is not installed
            if size is not None:
                self._shape = (*size, self._pixel_form.channels + self.has_masks)
        elif size is not None and self._shape[:2] != size:
            height, width, _ = self._shape
            raise InvalidValueError(
                f"{self.folder} holds pixels of {height} x {width}, not of {size[0]} x {size[1]}",
                fix="open the pack at its own size: PackedImages(folder); or make another pack: "
                f"pack(source, another_folder, size={size_in_plan(size)})",
            )

    @property
    def report(self) -> str:
        """A summary of the pack in one line, then a line for each fact that may be a mistake."""
        found = self._manifest
        lines = [counted(len(self), "image") + self._labels_in_words()]
        quantity = self._likely_classes()
        if quantity:
            lines.append(quantity)
        others = found["left_out"]
        if others:
            count = sum(others.values())
            kinds = most_frequent(others)
            lines.append(
                f"files left out, because they are no images of a class: {count:,} ({kinds})"
            )
        if found["repeated"]:
            lines.append(self._copies_in_words())
        brightest = found["brightest"]
        if found["dark"] and brightest < 2**14:
            white = 2 ** brightest.bit_length() - 1  # 4095 for images of 12 bits
            lines.append(
                f"images of 16 bits that are nearly black: {found['dark']:,}, with values up to "
                f"{brightest:,}; if they have one channel, pass "
                f"options=tpukit.PackOptions(window=(0, {white})): {white:,} becomes white"
            )
        lines += self._masks_in_words()
        frames = found.get("frames")
        if frames:
            lines.append(
                f"files with several pages or frames: {frames:,}; only the first page or frame of "
                "each is used"
            )
        return printable("\n      ".join(lines))

    def _labels_in_words(self) -> str:
        import numpy

        if self.classes:
            counts = numpy.bincount(self._stored_labels, minlength=len(self.classes)).tolist()
            sizes = [f"{name} {count:,}" for name, count in zip(self.classes, counts, strict=True)]
            return f" of {counted(len(self.classes), 'class')}: {first_few(sizes, _FEW)}"
        if self.names:
            return f", {counted(len(self.names), 'label')}: {first_few(self.names, _FEW)}"
        return "" if self.has_masks else ", no labels"

    def _likely_classes(self) -> str | None:
        """Return a line that proposes classes=, if the values of the only label may be classes.

        They may be if they are few whole numbers from 0 to 999.
        """
        import numpy

        # `pack_dicom`, whose packs have the entry "pixels", has no argument classes=.
        if self.classes or len(self.names) != 1 or "pixels" in self.made:
            return None
        values = numpy.unique(self._stored_labels[:, 0])
        # Ages or counts are whole numbers too, but have many values or large ones.
        are_few = len(values) <= min(100, len(self) / 2)
        are_whole = values[0] >= 0 and not (values % 1).any()
        if not are_few or not are_whole or values[-1] >= 1000:
            return None
        return (
            f"the label {self.names[0]} has {len(values)} values, all whole, and is stored as a "
            f"quantity, (N, 1) float32; for classes: pack(..., classes=range({values[-1] + 1:.0f}))"
        )

    def _copies_in_words(self) -> str:
        line = f"copies of other images: {self._manifest['repeated']:,}"
        relabelled = self._manifest.get("relabelled")
        if relabelled:
            line += f"; copies with other labels: {relabelled:,}"
        if self.group_names:
            return f"{line}; `split` follows groups=, and may separate an image from its copies"
        return f"{line}; `split` puts an image and its copies into the same part"

    def _masks_in_words(self) -> list[str]:
        if not self.has_masks:
            return []
        values = self._manifest["mask_values"]
        lines = [f"masks hold {counted(len(values), 'value')}: {first_few(values, _FEW)}"]
        if 255 in values and set(values) <= {0, 255}:
            lines.append(
                "masks hold only the values 0 and 255: if 255 is a class, divide the masks by 255; "
                "if it marks pixels that do not count, pass ignore_index=255 to the loss"
            )
        for number, (colour, other) in self._manifest.get("mask_colours", {}).items():
            lines.append(
                f"masks show class {number} in several colours, {tuple(colour)} and "
                f"{tuple(other)}: check that a class has the same number in all palettes"
            )
            break  # the first is enough to look at
        return lines

    def __reduce__(self):
        return partial(PackedImages, exact=self.exact), (self.folder, self.size), self._relabelled()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of every image: C is 3, 4 with masks, 1 for mode "L", and 2 for "I;16"."""
        if self._shape is None:
            raise InvalidValueError(
                f"the images in {self.folder} differ in size, so they do not fit into one batch",
                fix="to decode all images at one size: PackedImages(folder, size=128)",
            )
        return self._shape

    def _form(self) -> str:
        # Not "JPEG", because the manifest does not have the formats of the files.
        stored = "encoded" if self.encoding == "jpeg" else "uint8"
        if self._shape is None:
            return f" of different sizes, {stored}"
        height, width, channels = self._shape
        return f" of {height} x {width} x {channels}, {stored}"

    def _size(self) -> str:
        count = len(self.shards.files)
        size = sum(file.stat().st_size for file in self.shards.files)
        return f"{human_size(size)} in {counted(count, 'file')}"

    def read(self, indices) -> list[bytes]:
        """Return the checked bytes of each image: those of its file, or of its (H, W, C) pixels."""
        records = self.shards.read(self._indices(indices))
        return [record[self._head :] for record in records]

    def take(self, indices, out=None):
        """Return images as (n, H, W, C) uint8 in [0, 255], in the order of the indices.

        Args:
            indices: (n,) integers, 0 to N - 1.
            out: an array (n, H, W, C) uint8 to write into; None for a new one.

        Returns:
            The array. With masks, the last channel is the class of each pixel.

        Raises:
            IndexError: an index is not one of 0 to N - 1.
            ValueError: the indices are not (n,) integers, or `out` has another shape or dtype.
            OSError: an image is damaged; the message names it.
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
        """Return the path of an image in the source; "item 7" if the source has no paths."""
        row = int(self.rows[index])
        if "names" not in self.files:
            return f"item {row}"
        if self._names is None:
            fault = find_fault(self.folder / "names", self.files["names"])
            if fault:
                raise self._pack.damaged(fault)
            self._names = Names(self.folder / "names")
        return self._names[row]

    def _image(self, index: int):
        (record,) = self.shards.read([index])
        return self._pixels(index, record)

    def _pixels(self, index: int, record: bytes, out=None):
        import numpy

        stored = memoryview(record)[self._head :]
        if self.encoding == "jpeg":
            try:
                return decode(stored, self.size, exact=self.exact, out=out, form=self._pixel_form)
            except ValueError as error:
                raise SystemFailureError(
                    f"image {index} of {self.folder} cannot be decoded: {self.name(index)}",
                    found=error,
                    fix="pack the images again; or leave this one out: torch.utils.data.Subset("
                    f"packed, [i for i in range(len(packed)) if i != {index}])",
                ) from error
        pixels = numpy.frombuffer(stored, numpy.uint8).reshape(self.shape)
        if out is None:
            return pixels.copy()  # the bytes of a record are read-only
        out[:] = pixels
        return out
