"""Read the files, labels, groups and masks in a table of images, a DataFrame or a CSV file.

path      species    patient
a.jpg     rose       P1          one word per image: classes, "rose" is 0
b.jpg     tulip      P2
"""

import glob
import os
from collections.abc import Hashable, Sequence
from dataclasses import replace

from tpukit.datasets.encoded_images import is_image
from tpukit.datasets.image_folders import FoundFiles
from tpukit.datasets.label_arrays import as_labels, as_list, encode_words, is_missing, number_groups
from tpukit.essentials.display import InvalidValueError, PathNotFoundError

_WITH_COMMAS = (".csv", ".csv.gz", ".csv.zip")
_WITH_TABS = (".tsv", ".tsv.gz", ".tsv.zip")
_WIDEST = 12  # the most digits of a file name that is a number
_READERS = {  # calls of pandas that read other kinds of files
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
    """Return True for the path of a CSV or TSV file."""
    if not isinstance(source, str | os.PathLike):
        return False
    return os.fspath(source).lower().endswith(_WITH_COMMAS + _WITH_TABS)


def _separator(source) -> str:
    """Return the character between two fields of a file, by the ending of its name."""
    return "\t" if os.fspath(source).lower().endswith(_WITH_TABS) else ","


def refuse_other_file(source: str) -> None:
    """Raise ValueError if `source` is a file. The caller has handled CSV and TSV files before."""
    if not os.path.isfile(source):
        return
    fix = "pass the folder of the file; or, for an archive, unpack it first: unzip, tar -xf"
    for ending, call in _READERS.items():
        if source.lower().endswith(ending):
            fix = _with_pandas(source, call.format(file=source), " path=, labels=,")
            break
    raise InvalidValueError(
        f"{source} is a file, and pack reads folders, CSV files and tables in memory", fix=fix
    )


def load_table(source, *, words: Sequence):
    """Read a CSV file into a DataFrame; return a DataFrame unchanged.

    Args:
        source: a DataFrame, or the path of a CSV or TSV file.
        words: the columns of the file to read as text, so that "007" is not 7: those of paths,
            groups and masks.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty, or pandas cannot read it. The fix of the message names the
            option of `pandas.read_csv` that the file needs.
    """
    if not is_table_file(source):
        return source
    if not os.path.isfile(source):
        raise PathNotFoundError(
            f"there is no file {source}",
            fix=f"check the path; the current folder is {os.getcwd()}",
        )
    import pandas

    try:
        types = dict.fromkeys(words, str)
        table = pandas.read_csv(source, sep=_separator(source), dtype=types, low_memory=False)
    except pandas.errors.EmptyDataError as error:
        raise InvalidValueError(
            f"{source} is empty",
            found=error,
            fix="save the table again; the first line must have the names of the columns",
        ) from error
    except pandas.errors.ParserError as error:
        # For instance, a line has more fields than the first ones, or a quotation mark has no end.
        why = "has lines that pandas cannot read"
        raise _to_be_read_by(source, why, error, "on_bad_lines='warn'") from error
    except UnicodeDecodeError as error:
        is_utf_16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
        encoding = "encoding='utf-16'" if is_utf_16 else "encoding='latin-1'"
        raise _to_be_read_by(source, "is not in UTF-8", error, encoding) from error
    if len(table.columns) == 1 and len(str(table.columns[0]).split(";")) > 1:
        why = f"has a single column, {table.columns[0]!r}"
        raise _to_be_read_by(source, why, "semicolons", "sep=';'")
    # If rows have one field more than the first line, pandas uses the first field as the index.
    if len(table) and not isinstance(table.index, pandas.RangeIndex):
        fields = [str(field) for field in (table.index[0], *table.iloc[0])]
        raise _to_be_read_by(
            source,
            "has rows with one field more than its first line. If the first field of a row is its "
            "name, pass index_col=0; to leave out the last field, pass index_col=False",
            f"{', '.join(map(str, table.columns))}; and {', '.join(fields)}",
            "index_col=False",
        )
    return table


def line_that_reads(file: str, words: Sequence[Hashable], *, root: str) -> str:
    """Return the first half of a fix: how to read a CSV file into `table`, and the root to pass.

    The caller adds the second half, which changes a column of `table`.

    Args:
        file: the path of the CSV file.
        words: the columns to read as text, such as those of paths and groups.
        root: the folder to which the paths in the file are relative.
    """
    separator = ", sep='\\t'" if _separator(file) == "\t" else ""
    types = f"dtype={{{', '.join(f'{word!r}: str' for word in words)}}}"
    return f"table = pandas.read_csv({file!r}{separator}, {types}), with root={root or '.'!r}"


def _to_be_read_by(source, why: str, found, option: str) -> InvalidValueError:
    if _separator(source) == "\t" and "sep=" not in option:
        option += ", sep='\\t'"
    fix = _with_pandas(source, f"read_csv({os.fspath(source)!r}, {option})")
    return InvalidValueError(f"{source} {why}", found=found, fix=fix)


def _with_pandas(source, call: str, columns: str = "") -> str:
    root = os.path.dirname(source) or "."
    return f"pack(pandas.{call}, ...,{columns} root={root!r})"


def read_columns(
    table,
    *,
    path: Hashable,
    labels: list,
    groups: Hashable,
    masks: Hashable,
    classes,
    root: str = "",
) -> FoundFiles:
    """Read from a DataFrame the columns that are given as arguments of `pack`.

    If there is a single label, its values may be words, or positions in `classes`.

    Raises:
        ValueError: a column does not exist, or a value in it is missing or not supported.
    """
    # A tuple is hashable and could be the name of a column of a MultiIndex, but users pass tuples
    # of values, as they pass lists.
    is_series_or_list = not isinstance(groups, Hashable) or isinstance(groups, tuple)
    if is_series_or_list:
        raise InvalidValueError(
            f"groups= of a table is the name of one of its columns, got a {type(groups).__name__}",
            found=f"columns {', '.join(map(str, table.columns))}",
            fix='groups="patient"; if the values are in no column, first add them to the table: '
            "table.assign(patient=values)",
        )
    optional = [name for name in (groups, masks) if name is not None]
    _check_columns(table, [path, *labels, *optional], path)
    if classes is not None and len(labels) != 1:
        raise InvalidValueError(
            f"classes= names the classes of one label, and labels= names {len(labels)}",
            fix="leave classes= out; or pass labels= with the one column of the classes",
        )
    for name in labels:
        _refuse_several_values(table, name)
    values, classes_found = _read_labels(table, labels, classes)
    numbers = None
    group_names = []
    if groups is not None:
        numbers, group_names = number_groups(table[groups])
    found = FoundFiles(
        names=[],
        labels=values,
        label_names=list(map(str, labels)),
        classes=classes_found,
        groups=numbers,
        group_names=group_names,
    )
    # The cells may be images instead of paths, as in a parquet file of the Hugging Face hub.
    if _holds_images(table[path]):
        images = _images(table[path], path)
        return replace(
            found, images=images, masks=[] if masks is None else _images(table[masks], masks)
        )
    mask_names = [] if masks is None else _paths(table[masks], masks, root)
    return replace(found, names=_paths(table[path], path, root), mask_names=mask_names)


def _refuse_several_values(table, name: Hashable) -> None:
    """Raise ValueError if the values of a label are lists."""
    for value in as_list(table[name]):
        if isinstance(value, str) or not hasattr(value, "__len__"):
            continue
        tags = f"pandas.DataFrame(table[{name!r}].tolist(), table.index)"
        if any(isinstance(part, str) for part in value):
            tags = f"table[{name!r}].str.join('|').str.get_dummies()"
        raise InvalidValueError(
            f"label {name!r} holds several values at once, as {value!r}",
            fix=f"add a column per value: tags = {tags}; "
            "pack(table.join(tags), ..., labels=list(tags))",
        )


def _read_labels(table, labels: list, classes) -> tuple:
    """Return the labels of a table and the names of its classes; [] if labels are not classes."""
    if not labels:
        return [], []
    # Only a single column can be classes; several columns are questions with yes or no, or numbers.
    if len(labels) == 1:
        (name,) = labels
        encoded = encode_words(table[name], name, classes)
        if encoded is not None:
            numbers, names = encoded
            return numbers[:, None], names
    return as_labels([table[name] for name in labels], labels), []


def _check_columns(table, wanted: list, path: Hashable) -> None:
    there = ", ".join(map(str, table.columns))
    for column in wanted:
        if column not in table.columns:
            fix = "pass the names of existing columns; path= names the column of the image files"
            if column == path:
                fix = 'pass the column that names the image files: path="file_name"'
                with_images = [name for name in table.columns if _holds_images(table[name])]
                if with_images:
                    fix = f"pass the column that holds the images: path={with_images[0]!r}"
            raise InvalidValueError(f"the table has no column {column!r}", found=there, fix=fix)
        if list(table.columns).count(column) > 1:
            raise InvalidValueError(
                f"the table has the column {column!r} more than once",
                found=there,
                fix="keep the first of these columns: table.loc[:, ~table.columns.duplicated()]",
            )
    if not len(table):
        raise InvalidValueError("the table has no row", fix="check how it was made")


def _holds_images(column) -> bool:
    """Return whether the first value that is not missing is an image, as in parquet files."""
    there = column.dropna()
    return len(there) > 0 and is_image(there.iloc[0])


def _images(column, name: Hashable) -> list:
    """Return the images in a column; ValueError if one is missing."""
    missing = column.isna().to_numpy().nonzero()[0]
    if len(missing):
        raise InvalidValueError(
            f"{len(missing):,} rows of the column {name} hold no image",
            found=f"the first is row {missing[0]:,}",
            fix=f"drop the rows without an image: table.dropna(subset=[{name!r}])",
        )
    return as_list(column)


def _paths(column, name: Hashable, root: str) -> list[str]:
    try:
        names = [path if type(path) is str else os.fsdecode(path) for path in as_list(column)]
    except TypeError as error:
        other = next(path for path in column if not isinstance(path, str | bytes | os.PathLike))
        fix = f"drop the rows without a path: table.dropna(subset=[{name!r}])"
        if not is_missing(other):
            fix = _as_paths(other, name, root)
        raise InvalidValueError(
            f"the column {name} holds a value that is not a path", found=repr(other), fix=fix
        ) from error
    for row, path in enumerate(names):
        if "\0" in path:  # the system would cut the path there
            raise InvalidValueError(
                f"the path of row {row} holds a zero character, which is not allowed in a path",
                found=repr(path),
                fix="check how the paths were made; if they come from a field of fixed width, cut "
                "them: path.rstrip('\\0')",
            )
    return names


def _as_paths(value, name: Hashable, root: str) -> str:
    """Return the fix for a column that has numbers in place of paths.

    For the number 7, the fix has the name of a file that exists: 7.png, 07.png, 007.png and so on.
    """
    text = f"table[{name!r}].astype(str)"
    for width in range(1, _WIDEST + 1):
        called = f"{value!s:0>{width}}"
        found = sorted(glob.glob(os.path.join(glob.escape(root), f"{called}.*")))
        if found:
            ending = os.path.splitext(found[0])[1]
            zeros = "" if called == str(value) else f".str.zfill({width})"
            name = os.path.basename(found[0])
            return f'make paths of the numbers, such as {name}: {text}{zeros} + "{ending}"'
    return f"pass the folder of the files as root=, and make paths of the numbers: {text} + ending"
