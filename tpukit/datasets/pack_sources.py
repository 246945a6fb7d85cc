"""Describe the source of a pack: a folder, a table of paths, or items with labels.

    "photos"                  a folder with one sub-folder per class
    "train.csv", DataFrame    a table with a column of paths
    dataset, generator        items (image, labels)

`describe_source` returns a `PackSource`: the files or items, their labels, classes and groups, and
`facts`, by which a later call recognises the same source. Of a folder or a table of paths it reads
only names, of a table of images all cells. Of items it reads the first, some of them twice to
detect random transforms, and as many as `Items.digest` needs.
"""

import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from tpukit.datasets.array_records import row_type
from tpukit.datasets.image_folders import FoundFiles, find_images
from tpukit.datasets.item_parts import Columns, refuse_masks
from tpukit.datasets.items import ImageColumn, Items
from tpukit.datasets.kernel_state import refuse_own_bytes, refuse_own_plugins
from tpukit.datasets.label_arrays import number_groups
from tpukit.datasets.pack_tables import (
    is_table_file,
    line_that_reads,
    load_table,
    read_columns,
    refuse_other_file,
)
from tpukit.datasets.pixel_form import PixelForm
from tpukit.datasets.resumable import fact
from tpukit.datasets.row_labels import PackedRows, rows_of
from tpukit.datasets.tfrecords import TFRecords
from tpukit.essentials.display import InvalidValueError, TpukitError, names_in_order

_FEW = 12  # the most names that a message lists in full


def _in_memory() -> dict:
    """Return `PackSource.arguments` for a source without a path, such as a table in memory."""
    return {"source": {"words": "another kind of source, such as a table in memory", "digest": ""}}


class EncodedSource(Protocol):
    """A source with its own code to find and encode images, such as the slices of CT series.

    The images are packed in the order of their rows. A later call for the same pack compares only
    the names and sizes of the source files with those of the first call.

    Attributes:
        count: the largest possible number of images.
        reader: the class that reads the images in the worker processes. Its arguments are the
            folder `unfinished`, the root and the plan. It has the methods of `Files`.
    """

    count: int
    reader: type

    def find(self, work: Path) -> "PackSource":
        """Find the images for a pack that is not finished; return the source with them.

        Args:
            work: the folder `unfinished`, for files that the reader needs.
        """

    def bytes_at_most(self, plan: dict) -> int:
        """Return the largest possible number of bytes per image, without reading an image."""

    def sample_bytes(self, plan: dict) -> list[int]:
        """Return the number of bytes of some encoded images."""

    def smaller(self, plan: dict) -> Iterator[tuple[str, str, dict]]:
        """Yield arguments that make a smaller pack, in descending order of the pack's size.

        Each is (the argument's name, the code that passes it, the changed entries of the plan).
        """


@dataclass(frozen=True)
class PackSource:
    """The images to pack, in their own order.

    Attributes:
        facts: the entries of a pack's plan that identify this source: names, labels, groups; for
            items also contents.
        label_names: the names of the L labels.
        classes: if the label is a class number, the name of each class; else [].
        group_names: the names of the group numbers in the rows.
        rows: (N,) of `row_type`; None for items, whose labels are not known yet.
        root: the folder of the files; "" for the current folder.
        names: one file per row; () for items.
        mask_names: one file per row; () without masks.
        items: the items of a source without files; None for files.
        groups: for items, (N,) int32; None if each image is a group of its own.
        table: the number of a table's rows and the digest of its index; None for another source.
        encoded: an `EncodedSource` whose `rows` and `names` are not known yet; its `find` returns a
            `PackSource` with both. None for files and items.
        left_out: as in `FoundFiles`; {} for another source than a folder.
        path_column: the column of a table with the paths; "" for another source.
        table_file: the path of a CSV file; "" for another source.
        arguments: for a folder or a CSV file, the result of `arguments_of`. A later `pack` compares
            its own arguments with this result, if the folder or file is gone. For other sources,
            which cannot be compared, a dict that differs from every result of `arguments_of`.
    """

    facts: dict
    label_names: list[str]
    classes: list[str]
    group_names: list[str]
    rows: object = None
    root: str = ""
    names: tuple[str, ...] = ()
    mask_names: tuple[str, ...] = ()
    items: Items | None = None
    groups: object = None
    table: PackedRows | None = None
    encoded: EncodedSource | None = None
    left_out: dict = field(default_factory=dict)
    path_column: Hashable = ""
    table_file: str = ""
    arguments: dict = field(default_factory=_in_memory)

    @property
    def count(self) -> int | None:
        """The largest possible number of images; None if it is unknown."""
        if self.rows is not None:
            return len(self.rows)
        if self.items is not None:
            return self.items.length
        return self.encoded and self.encoded.count

    @property
    def is_stream(self) -> bool:
        """True for items without indices, which `pack` can only read in their own order."""
        return self.items is not None and not self.items.by_number

    @property
    def has_masks(self) -> bool:
        """True if each image has a mask."""
        if self.items is not None:
            return self.items.has_masks
        return bool(self.mask_names)


def describe_source(
    source,
    labels=None,
    groups=None,
    classes=None,
    columns: Columns | None = None,
    *,
    without: Path | None = None,
) -> PackSource:
    """Return the description of the images to pack.

    Args:
        source, labels, groups, classes: as for `pack`.
        columns: the other arguments of `pack` about columns and keys; None for the defaults.
        without: a folder to leave out, because the pack itself may be inside the source folder.

    Raises:
        ValueError, OSError: as for `pack`; PermissionError if a folder cannot be read.
    """
    columns = columns or Columns()
    if classes is not None:
        classes = names_in_order(classes, "classes", words=False)
    _refuse_values(labels, source)
    is_hugging_face = hasattr(source, "features")
    if hasattr(source, "to_pandas") and not is_hugging_face:  # a table of Arrow or polars
        raise InvalidValueError(
            f"pack reads tables of pandas, got a {type(source).__name__}",
            fix="pack(table.to_pandas(), ...)",
        )
    is_data_frame = hasattr(source, "columns") and hasattr(source, "iloc")
    if is_data_frame or is_table_file(source):
        _refuse(columns, "a table", "image")
        described = _describe_table(source, as_names(labels), groups, classes, columns)
    elif isinstance(source, str | os.PathLike):
        refuse_other_file(os.fspath(source))
        if labels is not None or groups is not None:
            raise InvalidValueError(
                "labels= and groups= are not for folders: a folder's labels are its sub-folders",
                fix="pass a DataFrame with these columns: "
                'pack(table, ..., path="path", labels="label", groups="patient")',
            )
        _refuse(columns, "a folder", "path", "root", "image", "masks")
        described = _of_files(os.fspath(source), find_images(source, classes, without=without))
    else:
        _refuse(columns, "items", "path", "root")
        described = _describe_items(source, labels, groups, classes, columns)
    if described.has_masks:
        refuse_masks(columns.form)
    return described


def _refuse_values(labels, source) -> None:
    """Raise ValueError if labels= is a Series or DataFrame instead of names."""
    if not hasattr(labels, "iloc"):
        return
    names = [str(name) for name in getattr(labels, "columns", [getattr(labels, "name", None)])]
    there = [str(name) for name in getattr(source, "columns", names)]
    fix = f"labels={names}"
    if hasattr(labels, "name"):
        fix = f"labels={names[0]!r}"
    is_table = hasattr(source, "columns") or isinstance(source, str | os.PathLike)
    if not is_table:
        fix = "pack(list(zip(images, values)), ...)"
    elif not set(names) <= set(there) or names == ["None"]:
        fix = 'pack(table.assign(label=values), ..., labels="label")'
    raise InvalidValueError(
        "labels= must be names of columns, or of parts of the items, got a "
        f"{type(labels).__name__}",
        found=f"{len(labels):,} values",
        fix=fix,
    )


def _refuse(columns: Columns, kind: str, *names: str) -> None:
    """Raise ValueError for an argument that belongs to another kind of source."""
    kinds = {"image": "items that are dicts", "masks": "a table or items"}
    for name in names:
        if getattr(columns, name) is not None:
            belongs_to = kinds.get(name, "a table")
            raise InvalidValueError(
                f"{name}= is an argument for {belongs_to}, and the source is {kind}",
                fix=f"leave {name}= out",
            )


def _describe_table(source, labels: list, groups, classes, columns: Columns) -> PackSource:
    path = "path" if columns.path is None else columns.path
    words = [name for name in (path, groups, columns.masks) if isinstance(name, str)]
    table = load_table(source, words=words)
    root = columns.root or ""
    if columns.root is None and is_table_file(source):
        root = os.path.dirname(source)
    root = os.fspath(root)
    arguments = {"path": path, "labels": labels, "groups": groups, "masks": columns.masks}
    try:
        found = read_columns(table, **arguments, classes=classes, root=root)
    except TpukitError as error:
        if not is_table_file(source) or "table" not in error.fix:
            raise
        # The fix changes a DataFrame `table`, but the user passed a file: add the code to read it.
        read = line_that_reads(os.fspath(source), words, root=root)
        raise type(error)(error.fact, found=error.found, fix=f"{read}; {error.fix}") from error
    described = _of_images(found, columns.form) if found.images else _of_files(root, found)
    table_file = os.fspath(source) if is_table_file(source) else ""
    return replace(described, table=rows_of(table), path_column=path, table_file=table_file)


def _of_files(root: str, found: FoundFiles) -> PackSource:
    import numpy

    names = found.names
    refuse_own_plugins([*names, *found.mask_names])
    labels = numpy.asarray(found.labels, numpy.float32)
    rows = make_rows(labels.reshape(len(names), len(found.label_names)), found.groups)
    # The facts identify the source: a pack continues only if all of them are the same.
    groups = rows["group"] if found.group_names else None
    facts = {
        "files": fact(f"{len(names):,} files, {names[0]} to {names[-1]}", _joined(names)),
        "labels": _labels_fact(found.classes, found.label_names, rows["labels"]),
        "groups": _names_fact(found.group_names, "groups", groups),
    }
    if found.mask_names:
        facts["masks"] = fact("masks", _joined(found.mask_names))
    return PackSource(
        facts=facts,
        label_names=found.label_names,
        classes=found.classes,
        group_names=found.group_names,
        rows=rows,
        root=root,
        names=tuple(names),
        mask_names=tuple(found.mask_names),
        left_out=dict(found.left_out),
    )


def _of_images(found: FoundFiles, form: PixelForm) -> PackSource:
    """Describe a table whose cells are images instead of paths."""
    import numpy

    labels = numpy.asarray(found.labels, numpy.float32)
    source = ImageColumn(
        found.images, found.masks, labels.reshape(len(found.images), len(found.label_names))
    )
    masks = "mask" if found.masks else None
    columns = Columns(image="image", labels=["labels"], masks=masks, form=form)
    items = Items(source, columns, [])
    _refuse_own_plugin(items)
    facts = {
        "items": fact(f"{items.length:,} images in a table", str(items.length).encode()),
        "contents": fact("contents", items.digest()),
        "labels": _labels_fact(found.classes, found.label_names, source.labels),
        "groups": _names_fact(found.group_names, "groups", found.groups),
    }
    return PackSource(
        facts=facts,
        label_names=found.label_names,
        classes=found.classes,
        group_names=found.group_names,
        items=items,
        groups=found.groups,
    )


def _refuse_own_plugin(items: Items) -> None:
    """Raise ValueError if only a Pillow plugin of the notebook can decode the first item.

    Worker processes do not have such a plugin.
    """
    image, _ = items.first
    if isinstance(image, bytes) and not items.has_masks:
        refuse_own_bytes(image)


def _joined(names: Iterable[str]) -> bytes:
    return "\0".join(names).encode(errors="surrogateescape")


def _describe_items(source, labels, groups, classes, columns: Columns) -> PackSource:
    asked = None if labels is None else as_names(labels)
    items = Items(source, replace(columns, labels=asked), classes)
    _refuse_own_plugin(items)
    names = _label_names(items, asked)
    numbers = None
    group_names = []
    if isinstance(groups, str):
        groups = _values_of(groups, source)
    if groups is not None:
        numbers, group_names = number_groups(groups)
    count = "items"
    if items.length is not None:
        count = f"{items.length:,} items"
    facts = {
        "items": fact(count, str(items.length).encode()),
        "contents": fact("contents", items.digest()),
        "labels": _labels_fact(items.classes, names, None),
        "groups": _names_fact(group_names, "groups", numbers),
    }
    if hasattr(source, "facts"):
        facts |= source.facts()
    return PackSource(facts, names, items.classes, group_names, items=items, groups=numbers)


def _values_of(groups: str, source) -> list:
    """Return the values of a feature of TFRecord files, one per item."""
    if isinstance(source, TFRecords):
        return source.column(groups)
    raise InvalidValueError(
        f"groups= of items must be one value for each item, got {groups!r}",
        fix="pass a list with the group of each item: groups=values",
    )


def _label_names(items: Items, asked: list | None) -> list[str]:
    """Return the names of the labels of items; ValueError if labels= has too many or too few."""
    names = [str(name) for name in asked or []]
    if items.label_keys is not None:
        # The keys of dicts are the names of labels only if each key has a single number.
        names = [str(name) for name in items.label_keys]
        if len(names) != items.labels:
            names = []
    # labels=[] means no labels, which is an error for tuples that have some.
    has_defaults = asked is None or items.label_keys is not None
    if not names and has_defaults:
        names = [f"label_{number}" for number in range(items.labels)]
        if items.labels == 1:
            names = ["label"]
    if len(names) != items.labels:
        fix = f"pass {items.labels} names, one per label, or leave labels= out"
        if not names:
            fix = "leave labels= out; or, for no labels, [(image, ()) for image, _ in source]"
        raise InvalidValueError(
            f"the items have {items.labels} labels, "
            f"and labels= names {len(names)}: {', '.join(names) or 'none'}",
            fix=fix,
        )
    return names


def make_rows(labels, groups):
    """Return the rows of an index in the order of the source.

    Args:
        labels: (N, L) float32.
        groups: (N,) int32; None for one group per image.

    Returns:
        (N,) of `row_type`.
    """
    import numpy

    if groups is not None and len(groups) != len(labels):
        raise InvalidValueError(
            f"the source yields {len(labels):,} items, and groups= has {len(groups):,}",
            fix="pass one group per item",
        )
    rows = numpy.zeros(len(labels), row_type(labels.shape[1]))
    rows["row"] = numpy.arange(len(labels))
    rows["group"] = rows["row"] if groups is None else groups
    rows["labels"] = labels
    return rows


def as_names(labels) -> list:
    """Return the argument labels=, such as one name or an Index of pandas, as a list."""
    if labels is None:
        return []
    if isinstance(labels, str) or not isinstance(labels, Iterable):
        return [labels]
    return list(labels)


def _labels_fact(classes: Sequence[str], names: Sequence[str], values) -> dict:
    if classes:
        return _names_fact(classes, "classes", values)
    return _names_fact(names, "labels", values)


def _names_fact(names: Sequence[str], kind: str, values) -> dict:
    """Return a plan's entry for names and the values of all images.

    Args:
        names: the names of classes, labels or groups.
        kind: "classes", "labels" or "groups", for messages.
        values: an array with the values of all images; None to compare only the names.
    """
    words = f"no {kind}"
    if names:
        few = ", ".join(names)
        if len(names) > _FEW:
            few = f"{len(names):,}, {names[0]} to {names[-1]}"
        words = f"{kind} {few}"
    data = repr(list(names)).encode(errors="surrogateescape")
    if values is not None:
        data += values.tobytes()
    return fact(words, data)
