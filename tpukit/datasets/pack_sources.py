"""What `pack` can read: a folder of images, a table of paths, or anything that yields images and labels."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tpukit.datasets.array_records import row_type
from tpukit.datasets.image_folders import FoundFiles, find_images
from tpukit.datasets.image_modes import check_window
from tpukit.datasets.item_parts import Columns
from tpukit.datasets.items import Items
from tpukit.datasets.label_arrays import number_groups
from tpukit.datasets.pack_tables import is_table_file, load_table, read_columns, refuse_other_file
from tpukit.datasets.resumable import fact
from tpukit.essentials.display import InvalidValueError


@dataclass(frozen=True)
class PackSource:
    """What is to be packed, in its own order.

    Attributes:
        facts: what tells this source from others, for the plan of a pack: names, labels, groups; of items, contents.
        label_names: one for each label.
        classes: what the numbers of a single label stand for: sub-folders, words, the classes of a dataset; or empty.
        group_names: what the numbers in the rows stand for.
        rows: (N,) of `row_type`; None for items, whose labels are not known yet.
        root: the folder the names are in, "" for the current one.
        names: one file for each row; none for items.
        mask_names: one file for each row; none where images have no masks.
        items: of a source that has no files.
        groups: (N,) int32 of items; None where every image is a group of its own.
        look: called with the folder's `work`, once the folder is ours; returns the source with what took long to find.
        shuffled: False keeps the order of `rows`.
        reader: "package.module:class" of what reads the images in the processes, made of `work`, root and plan, to be
            used as `Files` is; "" for `Files`. Whether its files are those that were packed, only names and sizes tell.
        settings: what else decides what is written; becomes part of the plan.
        left_out: how many files of a folder are no images that are read here, by their ending.
        weight: of images that are not stored as their files are: what they take, asked before anything is written; has
            `count`, `at_most`, `sample` and `smaller` as `tpukit.pe.dicom_slices.SliceWeight` has.
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
    look: Callable[[Path], "PackSource"] | None = None
    shuffled: bool = True
    reader: str = ""
    settings: dict = field(default_factory=dict)
    left_out: dict = field(default_factory=dict)
    weight: object = None

    @property
    def count(self) -> int | None:
        """How many images there are, at most; None where nobody knows."""
        if self.rows is not None:
            return len(self.rows)
        return self.items.length if self.items is not None else self.weight and self.weight.count

    @property
    def is_stream(self) -> bool:
        """True for items that can only be iterated, which are stored before they are packed."""
        return self.items is not None and not self.items.by_number

    @property
    def has_masks(self) -> bool:
        """Tell whether each image has a mask."""
        return bool(self.mask_names) or (self.items is not None and self.items.has_masks)


def describe_source(
    source, labels=None, groups=None, classes=None, columns: Columns | None = None, *, without: Path | None = None
) -> PackSource:
    """Describe what is to be packed; of a table and a folder only names are read, of items as much as tells them apart.

    Raises as `pack`, and PermissionError where a folder cannot be read.
    """
    columns = columns or Columns()
    classes = None if classes is None else _in_their_order(classes)
    window = check_window(columns.window)
    columns = replace(columns, window=window)
    if hasattr(labels, "iloc"):
        raise InvalidValueError(
            f"labels= is names of columns, or of what items hold, got a {type(labels).__name__}",
            found=f"{len(labels):,} values",
            fix=f"labels={str(labels.name)!r}" if hasattr(labels, "name") else f"labels={[*map(str, labels)]}",
        )
    if hasattr(source, "to_pandas") and not hasattr(source, "features"):  # of Arrow, polars; not of Hugging Face
        raise InvalidValueError(
            f"pack reads tables of pandas, got a {type(source).__name__}", fix="pack(table.to_pandas(), ...)"
        )
    if is_table_file(source) or (hasattr(source, "columns") and hasattr(source, "iloc")):
        _refuse(columns, "a table", "image")
        described = _describe_table(source, _names(labels), groups, classes, columns)
    elif isinstance(source, str | os.PathLike):
        refuse_other_file(os.fspath(source))
        if labels is not None or groups is not None:
            raise InvalidValueError(
                "the labels of a folder are its sub-folders, and it has no groups",
                fix="pass a DataFrame with a path column, with labels= and groups= the names of its columns",
            )
        _refuse(columns, "a folder", "path", "root", "image", "masks")
        described = _of_files(os.fspath(source), find_images(source, classes, without=without))
    else:
        _refuse(columns, "items", "path", "root")
        described = _describe_items(source, labels, groups, classes, columns)
    return replace(described, settings={"window": list(window)}) if window is not None else described


def _in_their_order(classes) -> list[str]:
    """Return classes= as a list of names; of a dict, as `class_to_idx` or `id2label` are, in the order of numbers."""
    if isinstance(classes, Mapping):
        places = set(range(len(classes)))
        names = classes if places == set(classes) else {number: name for name, number in classes.items()}
        classes = [names[place] for place in sorted(places)] if places == set(names) else set(classes)
    if isinstance(classes, str | set | frozenset) or not isinstance(classes, Iterable):
        fix = f"classes=range({classes})" if isinstance(classes, int) else f"classes=[{classes!r}, ...]"
        if isinstance(classes, set | frozenset):
            fix = f"a list, in which they have an order: classes={sorted(map(str, classes))}"
        raise InvalidValueError(f"classes= is the names of all classes, in their order, got {classes!r}", fix=fix)
    return [str(name) for name in classes]


def _refuse(columns: Columns, what: str, *names: str) -> None:
    """Raise for an argument that another kind of source has."""
    for name in names:
        if getattr(columns, name) is not None:
            kind = {"image": "items that are dicts", "masks": "a table or items"}.get(name, "a table")
            raise InvalidValueError(f"{name}= is an argument for {kind}, and this is {what}", fix=f"leave {name}= out")


def _describe_table(source, labels: list, groups, classes, columns: Columns) -> PackSource:
    path = "path" if columns.path is None else columns.path
    words = [name for name in (path, groups, columns.masks) if isinstance(name, str)]
    table = load_table(source, words=words)
    root = os.path.dirname(source) if is_table_file(source) and columns.root is None else columns.root or ""
    found = read_columns(table, path=path, labels=labels, groups=groups, masks=columns.masks, classes=classes)
    return _of_files(os.fspath(root), found)


def _of_files(root: str, found: FoundFiles) -> PackSource:
    import numpy

    names, label_names, classes, group_names = found.names, found.label_names, found.classes, found.group_names
    labels = numpy.asarray(found.labels, numpy.float32).reshape(len(names), len(label_names))
    rows, masks = make_rows(labels, found.groups), tuple(found.mask_names)
    facts = {
        "files": fact(f"{len(names):,} files, {names[0]} to {names[-1]}", _joined(names)),
        "labels": _names_fact(classes or label_names, "classes" if classes else "labels", rows["labels"]),
        "groups": _names_fact(group_names, "groups", rows["group"] if group_names else None),
    }
    if masks:
        facts["masks"] = fact("masks", _joined(masks))
    left_out = dict(found.left_out)
    return PackSource(facts, label_names, classes, group_names, rows, root, tuple(names), masks, left_out=left_out)


def _joined(names: Iterable[str]) -> bytes:
    return "\0".join(names).encode(errors="surrogateescape")


def _describe_items(source, labels, groups, classes, columns: Columns) -> PackSource:
    asked = None if labels is None else _names(labels)
    items = Items(source, replace(columns, labels=asked), classes)
    names = [str(name) for name in asked or []]
    if items.columns is not None:  # of dicts, what labels= names are keys, each of one number or several
        names = [str(name) for name in items.columns] if len(items.columns) == items.labels else []
    if not names:
        names = ["label"] if items.labels == 1 else [f"label_{number}" for number in range(items.labels)]
    if len(names) != items.labels:
        raise InvalidValueError(
            f"the items have {items.labels} labels, and labels= names {len(names)}: {', '.join(names)}",
            fix=f"a name for each of the {items.labels}, or none",
        )
    if isinstance(groups, str):
        raise InvalidValueError(
            f"groups= of items is one value for each item, got {groups!r}", fix="groups=list of the values"
        )
    numbers, group_names = number_groups(groups) if groups is not None else (None, [])
    facts = {
        "items": fact("items" if items.length is None else f"{items.length:,} items", str(items.length).encode()),
        "contents": fact("contents", items.digest()),
        "labels": _names_fact(items.classes or names, "classes" if items.classes else "labels", None),
        "groups": _names_fact(group_names, "groups", numbers),
    }
    if hasattr(source, "facts"):
        facts |= source.facts()
    return PackSource(facts, names, items.classes, group_names, items=items, groups=numbers)


def make_rows(labels, groups):
    """Return the rows of an index in the order of the source; without groups every image is a group of its own."""
    import numpy

    if groups is not None and len(groups) != len(labels):
        raise InvalidValueError(
            f"the source yields {len(labels):,} items, and groups= has {len(groups):,}",
            fix="as many of one as of the other",
        )
    rows = numpy.zeros(len(labels), row_type(labels.shape[1]))
    rows["row"] = numpy.arange(len(labels))
    rows["group"] = rows["row"] if groups is None else groups
    rows["labels"] = labels
    return rows


def _names(labels) -> list:
    """Return labels= as a list of names: one alone may be a number, too, and pandas has columns in an Index."""
    if labels is None:
        return []
    return [labels] if isinstance(labels, str) or not isinstance(labels, Iterable) else list(labels)


def _names_fact(names: Sequence[str], what: str, values) -> dict:
    few = ", ".join(names) if len(names) <= 12 else f"{len(names):,}, {names[0]} to {names[-1]}"
    data = repr(list(names)).encode(errors="surrogateescape") + (b"" if values is None else values.tobytes())
    return fact(f"{what} {few}" if names else f"no {what}", data)
