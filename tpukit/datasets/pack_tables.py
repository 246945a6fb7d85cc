"""A table of images, as a DataFrame or in a CSV file: which files, labels, groups and masks its columns name."""

import os
from collections.abc import Hashable, Sequence
from pathlib import Path

from tpukit.datasets.image_folders import FoundFiles
from tpukit.datasets.label_arrays import as_labels, as_list, encode_words, number_groups
from tpukit.essentials.display import InvalidValueError, PathNotFoundError

_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.zip", ".tsv.zip")
_READERS = {  # of pandas, for tables in other files
    ".parquet": "read_parquet({file!r})",
    ".feather": "read_feather({file!r})",
    ".json": "read_json({file!r})",
    ".jsonl": "read_json({file!r}, lines=True)",
    ".ndjson": "read_json({file!r}, lines=True)",
    ".xlsx": "read_excel({file!r})",
    ".xls": "read_excel({file!r})",
    ".txt": "read_csv({file!r}, sep=None, engine='python')",
}


def is_table_file(source) -> bool:
    """Tell whether this is the path of a CSV file."""
    return isinstance(source, str | os.PathLike) and os.fspath(source).lower().endswith(_SUFFIXES)


def refuse_other_file(source: str) -> None:
    """Raise for a file that is no folder and no table that is read here; the fix names what reads it."""
    if not os.path.isfile(source):
        return
    reader = next((call for ending, call in _READERS.items() if source.lower().endswith(ending)), None)
    fix = "pass the folder it lies in, or unpack it first: unzip, tar -xf"
    if reader:
        fix = _with_pandas(source, reader.format(file=source), " path=, labels=,")
    raise InvalidValueError(f"{source} is a file, and pack reads folders, CSV files and tables in memory", fix=fix)


def load_table(source, *, words: Sequence):
    """Return a table; of a CSV file with the columns of `words` (paths, groups) as they are written: "007" is not 7."""
    if not is_table_file(source):
        return source
    if not os.path.isfile(source):
        raise PathNotFoundError(f"there is no file {source}", fix=f"check the path, from {os.getcwd()}")
    import pandas

    separator = "\t" if ".tsv" in Path(source).suffixes else ","
    try:
        table = pandas.read_csv(source, sep=separator, dtype=dict.fromkeys(words, str), low_memory=False)
    except UnicodeDecodeError as error:
        is_utf_16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
        encoding = "encoding='utf-16'" if is_utf_16 else "encoding='latin-1'"
        raise _to_be_read_by(source, "is not in UTF-8", error, encoding) from error
    if len(table.columns) == 1 and len(str(table.columns[0]).split(";")) > 1:
        raise _to_be_read_by(source, f"has one column in all, {table.columns[0]!r}", "semicolons", "sep=';'")
    if len(table) and not isinstance(table.index, pandas.RangeIndex):  # the first field, as the name of its row
        fields = [str(field) for field in (table.index[0], *table.iloc[0])]
        found = f"{', '.join(map(str, table.columns))}; and {', '.join(fields)}"
        why = "has rows of one field more than its first line: names of rows, index_col=0, or an end that is not read"
        raise _to_be_read_by(source, why, found, "index_col=False")
    return table


def _to_be_read_by(source, why: str, found, option: str) -> InvalidValueError:
    fix = _with_pandas(source, f"read_csv({os.fspath(source)!r}, {option})")
    return InvalidValueError(f"{source} {why}", found=found, fix=fix)


def _with_pandas(source, call: str, columns: str = "") -> str:
    return f"pack(pandas.{call}, ...,{columns} root={os.path.dirname(source) or '.'!r})"


def read_columns(table, *, path: Hashable, labels: list, groups: Hashable, masks: Hashable, classes) -> FoundFiles:
    """Read the columns of a DataFrame that `pack` names; one label alone may hold words, or numbers of `classes`."""
    if not isinstance(groups, Hashable) or isinstance(groups, tuple):  # a Series, a list
        raise InvalidValueError(
            f"groups= of a table is the name of one of its columns, got a {type(groups).__name__}",
            found=f"columns {', '.join(map(str, table.columns))}",
            fix='groups="patient"; for values that are in no column, table.assign(patient=values) first',
        )
    _check_columns(table, [path, *labels, *(name for name in (groups, masks) if name is not None)], path)
    if classes is not None and len(labels) != 1:
        raise InvalidValueError(
            f"classes= names the classes of one label, and labels= names {len(labels)}",
            fix="leave classes= out; or labels= the one column that says the class",
        )
    for name in labels:
        values = (value for value in as_list(table[name]) if hasattr(value, "__len__") and not isinstance(value, str))
        if (several := next(values, None)) is not None:
            tags = f"pandas.DataFrame(table[{name!r}].tolist(), table.index)"
            if any(isinstance(value, str) for value in several):
                tags = f"table[{name!r}].str.join('|').str.get_dummies()"
            raise InvalidValueError(
                f"label {name!r} holds several values at once, as {several!r}",
                fix=f"a label for each: tags = {tags}, pack(table.join(tags), ..., labels=list(tags))",
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
            raise InvalidValueError(f"the table has no column {column!r}", found=there, fix=fix)
        if list(table.columns).count(column) > 1:
            raise InvalidValueError(
                f"the table has the column {column!r} more than once",
                found=there,
                fix="table.loc[:, ~table.columns.duplicated()] keeps the first of each",
            )
    if not len(table):
        raise InvalidValueError("the table has no row", fix="check how it was made")


def _paths(column, name: Hashable) -> list[str]:
    try:
        names = [path if type(path) is str else os.fsdecode(path) for path in as_list(column)]
    except TypeError as error:
        other = next(path for path in column if not isinstance(path, str | bytes | os.PathLike))
        fix = f"drop the rows without one: table.dropna(subset=[{name!r}])"
        if other == other and other is not None:
            fix = f'table[{name!r}].astype(str) + ".png", where the files are called so'
        raise InvalidValueError(
            f"the column {name} holds something else than paths", found=repr(other), fix=fix
        ) from error
    for row, path in enumerate(names):
        if "\0" in path:
            raise InvalidValueError(
                f"the path of row {row} holds a zero character, which no path can",
                found=repr(path),
                fix="check how the paths were made; a fixed-width field is cut with path.rstrip('\\0')",
            )
    return names
