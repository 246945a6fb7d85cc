"""A table of images, as a DataFrame or in a CSV file: which files, labels, groups and masks its columns name."""

import os
from collections.abc import Hashable, Sequence
from pathlib import Path

from tpukit.essentials.show import NoSuchFile, WrongValue
from tpukit.packs.image_folders import FoundFiles
from tpukit.packs.label_arrays import as_labels, encode_words, number_groups

_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")


def is_table_file(source) -> bool:
    """Tell whether this is the path of a CSV file."""
    return isinstance(source, str | os.PathLike) and os.fspath(source).lower().endswith(_SUFFIXES)


def load_table(source, *, words: Sequence):
    """Return a table; of a CSV file with the columns of `words` (paths, groups) as they are written: "007" is not 7."""
    if not is_table_file(source):
        return source
    if not os.path.isfile(source):
        raise NoSuchFile(f"there is no file {source}", fix=f"check the path, from {os.getcwd()}")
    import pandas

    separator = "\t" if ".tsv" in Path(source).suffixes else ","
    return pandas.read_csv(source, sep=separator, dtype=dict.fromkeys(words, str), low_memory=False)


def read_columns(table, *, path: Hashable, labels: list, groups: Hashable, masks: Hashable, classes) -> FoundFiles:
    """Read the columns that are asked for.

    Args:
        table: a DataFrame.
        path: the column of the image files.
        labels: the columns of the labels; one alone may hold words, or numbers of `classes`.
        groups: the column of the groups, or None.
        masks: the column of the mask files, or None.
        classes: of a single label, the words in the order of their numbers; None for those there are, sorted.
    """
    if not isinstance(groups, Hashable) or isinstance(groups, tuple):  # a Series, a list
        raise WrongValue(
            f"groups= of a table is the name of one of its columns, got a {type(groups).__name__}",
            found=f"columns {', '.join(map(str, table.columns))}",
            fix='groups="patient"; for values that are in no column, table.assign(patient=values) first',
        )
    _check_columns(table, [path, *labels, *(name for name in (groups, masks) if name is not None)], path)
    if classes is not None and len(labels) != 1:
        raise WrongValue(
            f"classes= names the classes of one label, and labels= names {len(labels)}",
            fix="leave classes= out; or labels= the one column that says the class",
        )
    encoded = encode_words(table[labels[0]], labels[0], classes) if len(labels) == 1 else None
    if encoded is not None:
        values, found = encoded
        values = values[:, None]
    else:
        values, found = as_labels([table[name] for name in labels], labels) if labels else [], []
    numbers, group_names = number_groups(table[groups]) if groups is not None else (None, [])
    mask_names = _paths(table[masks], masks) if masks is not None else []
    names = _paths(table[path], path)
    return FoundFiles(names, values, list(map(str, labels)), found, numbers, group_names, mask_names)


def _check_columns(table, wanted: list, path: Hashable) -> None:
    there = ", ".join(map(str, table.columns))
    for column in wanted:
        if column not in table.columns:
            fix = "name the image files in a column path, and labels= and groups= as the table does"
            if column == path:
                fix = 'path="file_name" is the column that names the image files'
            raise WrongValue(f"the table has no column {column!r}", found=there, fix=fix)
        if list(table.columns).count(column) > 1:
            raise WrongValue(
                f"the table has the column {column!r} more than once",
                found=there,
                fix="table.loc[:, ~table.columns.duplicated()] keeps the first of each",
            )
    if not len(table):
        raise WrongValue("the table has no row", fix="check how it was made")


def _paths(column, name: Hashable) -> list[str]:
    try:
        names = [path if type(path) is str else os.fsdecode(path) for path in column]
    except TypeError as error:
        raise WrongValue(f"the column {name} holds something else: {error}", fix="drop the rows without one") from error
    for row, path in enumerate(names):
        if "\0" in path:
            raise WrongValue(
                f"the path of row {row} holds a zero character, which no path can",
                found=repr(path),
                fix="check how the paths were made; a fixed-width field is cut with path.rstrip('\\0')",
            )
    return names
