"""What `pack` can read: a folder of images, a table with paths, or anything that yields images and labels."""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.storage.array_records import row_type
from tpukit.storage.image_folders import find_images
from tpukit.storage.items import Items
from tpukit.storage.labels import as_labels, number_groups
from tpukit.storage.resumable import fact


@dataclass(frozen=True)
class PackSource:
    """What is to be packed, in its own order.

    Attributes:
        facts: what tells this source from others, for the plan of a pack: names, labels, groups; of items, contents.
        label_names: one for each label.
        classes: of a folder, the names its class numbers stand for.
        group_names: what the numbers in the rows stand for.
        rows: (N,) of `row_type`; None for items, whose labels are not known yet.
        root: the folder the names are in, "" for the current one.
        names: one file for each row; none for items.
        items: of a source that has no files.
        groups: (N,) int32 of items; None where every image is a group of its own.
        look: called with the folder's `work`, once the folder is ours; returns the source with what took long to find.
        shuffled: False keeps the order of `rows`.
        reader: "package.module:class" of what reads the images in the processes, made of `work`, root and plan, to be
            used as `Files` is; "" for `Files`. Whether its files are those that were packed, only names and sizes tell.
        settings: what else decides what is written; becomes part of the plan.
    """

    facts: dict
    label_names: list[str]
    classes: list[str]
    group_names: list[str]
    rows: object = None
    root: str = ""
    names: tuple[str, ...] = ()
    items: Items | None = None
    groups: object = None
    look: Callable[[Path], "PackSource"] | None = None
    shuffled: bool = True
    reader: str = ""
    settings: dict = field(default_factory=dict)


def describe_source(source, labels=None, groups=None, classes=None, *, without: Path | None = None) -> PackSource:
    """Describe what is to be packed; of a table and a folder only names are read, of items as much as tells them apart.

    Raises:
        ValueError: it cannot be packed, or holds nothing.
        FileNotFoundError: the folder does not exist.
        PermissionError: a folder in it cannot be read.
    """
    if isinstance(source, str | os.PathLike):
        if labels is not None or groups is not None:
            raise ValueError(
                "the labels of a folder are its sub-folders, and it has no groups\n"
                "  fix:   pass a DataFrame with a path column, with labels= and groups= the names of its columns"
            )
        found = find_images(source, classes, without=without)
        numbers = [[number] for number in found.numbers]
        return _of_files(os.fspath(source), found.names, numbers, None, ["class"], found.classes, [])
    if classes is not None:
        raise ValueError(
            "classes= numbers the sub-folders of a folder, and this is none\n"
            "  fix:   leave classes= out; a table and items have their labels as numbers already"
        )
    if hasattr(source, "columns") and hasattr(source, "iloc"):
        return _describe_table(source, labels, groups)
    return _describe_items(source, labels, groups)


def _describe_table(table, labels, groups) -> PackSource:
    labels = _names(labels)
    if not isinstance(groups, Hashable) or isinstance(groups, tuple):  # a Series, a list
        raise ValueError(
            f"groups= of a table is the name of one of its columns, got a {type(groups).__name__}\n"
            f"  found: columns {', '.join(map(str, table.columns))}\n"
            '  fix:   groups="patient"; for values that are in no column, table.assign(patient=values) first'
        )
    for column in ["path", *labels, *([groups] if groups is not None else [])]:
        if column not in table.columns:
            raise ValueError(
                f"the table has no column {column!r}\n  found: {', '.join(map(str, table.columns))}\n"
                "  fix:   name the image files in a column path, and labels= and groups= as the table does"
            )
        if list(table.columns).count(column) > 1:
            raise ValueError(
                f"the table has the column {column!r} more than once\n  found: {', '.join(map(str, table.columns))}\n"
                "  fix:   table.loc[:, ~table.columns.duplicated()] keeps the first of each"
            )
    if not len(table):
        raise ValueError("the table has no row\n  fix:   check how it was made")
    values = as_labels([table[name] for name in labels], labels) if labels else []
    numbers, group_names = number_groups(table[groups]) if groups is not None else (None, [])
    try:
        names = [path if type(path) is str else os.fsdecode(path) for path in table["path"]]
    except TypeError as error:
        raise ValueError(
            f"the column path holds something else: {error}\n  fix:   drop the rows without one"
        ) from error
    return _of_files("", names, values, numbers, list(map(str, labels)), [], group_names)


def _of_files(root, names, labels, groups, label_names, classes, group_names) -> PackSource:
    import numpy

    joined = "\0".join(names)
    if joined.count("\0") >= len(names):
        row = next(row for row, name in enumerate(names) if "\0" in name)
        raise ValueError(
            f"the path of row {row} holds a zero character, which no path can\n  found: {names[row]!r}\n"
            "  fix:   check how the paths were made; a fixed-width field is cut with path.rstrip('\\0')"
        )
    rows = make_rows(numpy.asarray(labels, numpy.float32).reshape(len(names), len(label_names)), groups)
    facts = {
        "files": fact(f"{len(names):,} files, {names[0]} to {names[-1]}", joined.encode(errors="surrogateescape")),
        "labels": _names_fact(classes or label_names, "classes" if classes else "labels", rows["labels"]),
        "groups": _names_fact(group_names, "groups", rows["group"] if group_names else None),
    }
    return PackSource(facts, label_names, classes, group_names, rows, root, tuple(names))


def _describe_items(source, labels, groups) -> PackSource:
    items, names = Items(source), [str(name) for name in _names(labels)]
    if not names:
        names = ["label"] if items.labels == 1 else [f"label_{number}" for number in range(items.labels)]
    if len(names) != items.labels:
        raise ValueError(
            f"the items have {items.labels} labels, and labels= names {len(names)}: {', '.join(names)}\n"
            f"  fix:   a name for each of the {items.labels}, or none"
        )
    if isinstance(groups, str):
        raise ValueError(
            f"groups= of items is one value for each item, got {groups!r}\n  fix:   groups=list of the values"
        )
    numbers, group_names = number_groups(groups) if groups is not None else (None, [])
    facts = {
        "items": fact("items" if items.length is None else f"{items.length:,} items", str(items.length).encode()),
        "contents": fact("contents", items.digest()),
        "labels": _names_fact(names, "labels", None),
        "groups": _names_fact(group_names, "groups", numbers),
    }
    if hasattr(source, "facts"):
        facts |= source.facts()
    return PackSource(facts, names, [], group_names, items=items, groups=numbers)


def make_rows(labels, groups):
    """Return the rows of an index in the order of the source; without groups every image is a group of its own.

    Raises:
        ValueError: there are more groups or fewer than images.
    """
    import numpy

    if groups is not None and len(groups) != len(labels):
        raise ValueError(
            f"the source yields {len(labels):,} items, and groups= has {len(groups):,}\n"
            "  fix:   as many of one as of the other"
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
