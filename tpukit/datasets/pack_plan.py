"""Examine a source without writing anything, and print what `pack` would pack.

    folder: 5,216 images
      classes     2: NORMAL 1,341, PNEUMONIA 3,875
      left out    1 file by the ending: .txt 1
      looked at   50 images, JPEG L 48, JPEG RGB 2
      pixels      from 384 x 127 to 2,663 x 2,916 (width x height)

`plan_pack` describes the source with the functions of `pack`, so it raises the same errors.
"""

import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpukit.datasets.image_folders import most_frequent
from tpukit.datasets.item_parts import Columns
from tpukit.datasets.masks import is_masked, parts_of
from tpukit.datasets.pack_shards import decode_as_packed, prepare
from tpukit.datasets.pack_sources import PackSource, describe_source
from tpukit.datasets.packing import PackOptions, form_of
from tpukit.datasets.pixel_form import PixelForm
from tpukit.datasets.source_files import Files, printable
from tpukit.essentials.display import InvalidValueError, counted, first_few
from tpukit.essentials.display import parts_of as parts_of_error

_LOOKED_AT = 50  # the number of images that are decoded, which takes about a second
_SHOWN = 12  # the most names that a line lists
_DEFAULTS = PackOptions()


@dataclass(frozen=True)
class PackPlan:
    """A summary of what `pack` would pack, from the names of all images and fifty decoded images.

    Attributes:
        kind: "folder", "table" or "items".
        images: the number of images; None if the source has no length.
        classes: the name of each class with its number of images. For items, and for a table whose
            cells are images, the numbers are None.
        labels: the names of the labels.
        groups: the number of groups; None without groups.
        masks: True if each image has a mask.
        left_out: {ending: number of files}, for a folder's files that are no images or have no
            class.
        looked_at: the number of images that `plan_pack` has tried to decode.
        formats: the number of decoded images of each file format and mode, such as "JPEG RGB".
        smallest: (H, W) of the image with the fewest pixels; None if none could be decoded.
        largest: (H, W) of the image with the most pixels; None if none could be decoded.
        damaged: (name, reason) of each image that could not be decoded.
    """

    kind: str
    images: int | None
    classes: dict[str, int | None]
    labels: tuple[str, ...]
    groups: int | None
    masks: bool
    left_out: dict[str, int]
    looked_at: int
    formats: dict[str, int]
    smallest: tuple[int, int] | None
    largest: tuple[int, int] | None
    damaged: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return the plan as a few lines of text."""
        count = "images of unknown number" if self.images is None else counted(self.images, "image")
        rows = [("classes", self._classes_in_words()), ("labels", first_few(self.labels, _SHOWN))]
        if self.classes:
            rows.pop()  # the line of classes describes the only label
        if self.groups is not None:
            rows.append(("groups", f"{self.groups:,}"))
        if self.masks:
            rows.append(("masks", "one for each image"))
        if self.left_out:
            files = counted(sum(self.left_out.values()), "file")
            rows.append(("left out", f"{files} by the ending: {most_frequent(self.left_out)}"))
        formats = [f"{name} {number:,}" for name, number in self.formats.items()]
        looked_at = [counted(self.looked_at, "image"), *formats]
        rows.append(("looked at", ", ".join(looked_at)))
        if self.smallest:
            rows.append(("pixels", self._sizes_in_words()))
        if self.damaged:
            name, why = self.damaged[0]
            rows.append(("damaged", f"{len(self.damaged)} of them, as {name}: {why}"))
        lines = [f"  {title:<11} {text}" for title, text in rows if text]
        return printable("\n".join([f"{self.kind}: {count}", *lines]))

    def _classes_in_words(self) -> str:
        sizes = []
        for name, number in self.classes.items():
            sizes.append(name if number is None else f"{name} {number:,}")
        return f"{len(sizes)}: {first_few(sizes, _SHOWN)}" if sizes else ""

    def _sizes_in_words(self) -> str:
        sizes = [f"{width:,} x {height:,}" for height, width in (self.smallest, self.largest)]
        if sizes[0] == sizes[1]:
            return f"{sizes[0]} (width x height)"
        return f"from {sizes[0]} to {sizes[1]} (width x height)"


def plan_pack(
    source,
    *,
    labels=None,
    groups=None,
    classes: Sequence[str] | None = None,
    path: str | None = None,
    root=None,
    masks: str | None = None,
    options: PackOptions = _DEFAULTS,
) -> PackPlan:
    """Print and return what `pack` would pack, without writing anything.

    Args:
        source, labels, groups, classes, path, root, masks, options: as for `pack`.

    Returns:
        A `PackPlan`. To make it, `plan_pack` decodes up to fifty images, evenly spread. If the
        source can only be iterated, it decodes only the first. `plan_pack` accepts arrays and
        Pillow images of different sizes; `pack` accepts them only with `size`.

    Raises:
        ValueError: the source is a generator, from which `plan_pack` would take the first item.
        ValueError, OSError: as for `pack`. For example, the sub-folders are splits, masks or
            patients; a value of a column is a list of tags; a class is missing. The message has the
            code to pass instead.
    """
    if isinstance(source, Iterator):
        raise InvalidValueError(
            f"plan_pack reads the first item, and a {type(source).__name__} yields it only once",
            fix="pass an object that can be read again, such as a list; or pack without a plan: "
            "pack(source, ...)",
        )
    columns = Columns(path, root, options.image, masks=masks, form=form_of(options))
    described = describe_source(source, labels, groups, classes, columns)
    plan = _plan_of(described, columns.form)
    print(plan)
    return plan


def _plan_of(described: PackSource, form: PixelForm) -> PackPlan:
    """Decode some images of a source, and return the summary."""
    formats = Counter()
    damaged = []
    sizes = []
    numbers = _spread(described)
    for number in numbers:
        look = _look_at(described, number, form)
        if look.shape is None:
            damaged.append((look.name, look.why))
            continue
        sizes.append(tuple(look.shape[:2]))
        formats[_format_of(look.file)] += 1
    sizes.sort(key=math.prod)  # by the number of pixels
    kind = "folder" if described.items is None else "items"
    if described.path_column != "":
        kind = "table"
    return PackPlan(
        kind=kind,
        images=described.count,
        classes=_class_counts(described),
        labels=tuple(described.label_names),
        groups=len(described.group_names) or None,
        masks=described.has_masks,
        left_out=dict(described.left_out),
        looked_at=len(numbers),
        formats=dict(formats.most_common()),
        smallest=sizes[0] if sizes else None,
        largest=sizes[-1] if sizes else None,
        damaged=tuple(damaged),
    )


def _spread(described: PackSource) -> range:
    """Return the numbers of at most fifty images, evenly spread."""
    if described.is_stream:
        return range(1)
    return range(0, described.count, math.ceil(described.count / _LOOKED_AT) or 1)


class _Look(NamedTuple):
    """One decoded image of a source."""

    name: str
    file: bytes  # b"" for an image in memory
    shape: tuple[int, ...] | None  # (H, W, C); None if the image cannot be decoded
    why: str = ""  # the reason why the image cannot be decoded


def _look_at(described: PackSource, number: int, form: PixelForm) -> _Look:
    """Read and decode one image."""
    items = described.items
    if items is None:
        files = Files(described.names, described.root, described.mask_names)
        prepared = prepare(files, number, None, form)
        if prepared.shape is None:
            return _Look(files.name(number), b"", None, prepared.why)
        return _Look(files.name(number), prepared.payload, prepared.shape)
    name = f"item {number}"
    # An iterable would lose the items that are read here, so only its first item is known.
    stored = items.first[0]
    shape = items.shape(None)
    if not described.is_stream:
        # At the size of the first item, because with size= `pack` resizes all arrays.
        item = items.read_one(number, shape and shape[:2], skip=True)
        if item.failure:
            return _Look(name, b"", None, item.failure)
        stored = item.image
        shape = item.shape
    if shape is not None:
        return _Look(name, b"", shape)
    try:
        return _Look(name, stored, decode_as_packed(stored, None, form).shape)
    except ValueError as error:
        return _Look(name, b"", None, parts_of_error(error).fact)


def _format_of(data: bytes) -> str:
    """Return a file's format and mode, such as "JPEG RGB"; "array" for an image in memory."""
    from PIL import Image

    if not data:
        return "array"
    if is_masked(data):
        data = parts_of(data)[0]
    with Image.open(io.BytesIO(data)) as image:
        return f"{image.format} {image.mode}"


def _class_counts(described: PackSource) -> dict[str, int | None]:
    import numpy

    if described.rows is None or not described.classes:
        return dict.fromkeys(described.classes)
    numbers = described.rows["labels"][:, 0].astype(int)
    counts = numpy.bincount(numbers, minlength=len(described.classes)).tolist()
    return dict(zip(described.classes, counts, strict=True))
