"""Labels as the float32 they are stored as, where that changes none of them; words and groups as numbers."""

import math
import re
import unicodedata
from collections.abc import Sequence

from tpukit.essentials.show import WrongValue

_EXACT = 2**24  # float32 holds every whole number up to here; beyond, an identifier would come out as another


def as_labels(values, names: Sequence[str], *, first_row: int = 0, what: str = "row"):
    """Return labels as (N, L) float32.

    Args:
        values: (N, L) of numbers; or L columns as a table has them.
        names, first_row, what: for messages: of the labels, the number of the first row, and what a row is.

    Raises:
        ValueError: a value is missing, infinite, no number, or one that float32 would change into another.
    """
    import numpy

    columns = [_numbers(values[:, k] if hasattr(values, "ndim") else values[k], name) for k, name in enumerate(names)]
    for name, column in zip(names, columns, strict=True):
        with numpy.errstate(over="ignore"):
            stored = column.astype(numpy.float32)
        large = (column > _EXACT) | (column < -_EXACT)  # not abs: the least int64 has no positive counterpart
        if column.dtype.kind == "f":  # a column of identifiers with a gap is one of floats; beyond 2**53 none is exact
            large &= (numpy.abs(column) <= 2.0**53) & (column == numpy.trunc(column)) & (stored != column)
        wrong = {
            "is missing": numpy.isnan(stored),
            "is no finite number as float32": numpy.isinf(stored),
            "is too small for float32, which makes it 0": (stored == 0) & (column != 0),
            "is beyond 2**24, where float32 holds not every whole number": large,
        }
        for why, rows in wrong.items():
            if rows.any():
                row = int(rows.argmax())
                raise WrongValue(
                    f"label {name!r} of {what} {first_row + row} {why}",
                    found=f"{column[row]}, and {int(rows.sum()) - 1} more like it; labels are stored as float32",
                    fix=_FIXES[why],
                )
    return numpy.stack([column.astype(numpy.float32) for column in columns], axis=1)


_FIXES = {
    "is missing": "leave these rows out, or give them a number that your loss knows: table.fillna(-1)",
    "is no finite number as float32": "leave these rows out, or divide the label by a constant",
    "is too small for float32, which makes it 0": "multiply the label by a constant, or take its logarithm",
    "is beyond 2**24, where float32 holds not every whole number": "leave identifiers out of labels=, as "
    "`Records.rows` gives each image's row; divide a quantity by a constant",
}


def _numbers(column, name: str):
    """Return a column as an array of booleans, integers or floats."""
    import numpy

    dtype = getattr(column, "dtype", None)
    if hasattr(column, "isna"):  # pandas' own types of integers hold pd.NA, which numpy has no number for
        column = column.to_numpy(float, na_value=numpy.nan) if _is_nullable(column) else column.to_numpy()
    array = numpy.asarray(column)
    if array.dtype.kind == "O":
        array = numpy.array([numpy.nan if value is None else value for value in array.tolist()])
    if array.dtype.kind not in "biuf":
        value = array.reshape(-1).tolist()[0]
        fix = (
            "a column of words is encoded where labels= names it alone; else "
            f"table[{name!r}].astype('category').cat.codes; of numbers in text, pandas.to_numeric(table[{name!r}]), "
            f"with a decimal comma pandas.to_numeric(table[{name!r}].str.replace(',', '.'))"
        )
        if array.dtype.kind in "mM":
            fix = f"as classes, table[{name!r}].astype(str); in days, (table[{name!r}] - table[{name!r}].min()).dt.days"
        raise WrongValue(
            f"labels are numbers, and these are not: {name!r} holds {value!r}",
            found=f"dtype {dtype or array.dtype}",
            fix=fix,
        )
    return array


def _is_nullable(column) -> bool:
    return getattr(column.dtype, "na_value", None) is not None and column.dtype.kind in "biuf" and column.isna().any()


def in_order(names) -> list[str]:
    """Return names as people number them: 2 before 10."""
    return sorted(
        names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    )


def check_classes(classes: Sequence[str]) -> None:
    """Raise ValueError where two classes are one, or look like one."""
    seen = {}
    for name in classes:
        if (plain := _plain(name)) in seen:
            one, other = sorted((seen[plain], name), key=len)
            raise WrongValue(
                "classes= names a class twice" if one == other else "two classes look like one",
                found=f"{one!r} and {other!r}",
                fix=f"write them in one way: table.replace({{{other!r}: {one!r}}}); or rename the folder",
            )
        seen[plain] = name


def _plain(name: str) -> float | str:
    """Return what names that look like one have in common: their number, or letters without case, and no odd blanks."""
    if _reads_as_number(name):
        return float(name)
    if not name.isascii():  # as a mark of byte order
        name = unicodedata.normalize("NFC", "".join(one for one in name if unicodedata.category(one) != "Cf"))
    return " ".join(name.split()).casefold()


def are_other_numbers(classes: Sequence[str]) -> bool:
    """Tell whether classes are numbers, and others than their places: what is a label of 1 then?"""
    return all(map(_reads_as_number, classes)) and list(map(float, classes)) != list(range(len(classes)))


def encode_words(column, name: str, classes: Sequence[str] | None):
    """Return a column of words as class numbers, (N,) float32, and the classes; None where it holds numbers.

    Args:
        column: of a table; a categorical one has its classes, and their order, itself.
        name: of the column, for messages.
        classes: in the order of their numbers. With them, numbers in a column are names where all classes are numbers;
            else, if the column has no word, places, from 0. True and False, and intervals, are their text if it names a
            class.

    Raises:
        ValueError: a value is missing, is none of the classes, or only some are words.
    """
    import numpy

    values = column.tolist()
    words = {value for value in values if isinstance(value, str)}
    # Words that all read as numbers are rather a column that was read as text: that is for `as_labels` to refuse.
    own = getattr(getattr(column, "cat", None), "categories", None)
    are_numbers = all(_reads_as_number(word.replace(",", ".")) for word in words)
    if classes is None and own is None and are_numbers:
        return None
    if blank := {word for word in words if not word.strip()} - set(classes or ()):
        raise WrongValue(
            f"label {name!r} of row {next(row for row, value in enumerate(values) if value in blank)} is blank",
            found=f"{len(words) - len(blank)} other words",
            fix=f"leave such rows out: table[table[{name!r}].str.strip() != '']; or name them in classes=",
        )
    if classes is None and own is None:
        _refuse_tags(words, name)
        classes = in_order(words)
    classes = [str(one) for one in (own if classes is None else classes)]
    check_classes(classes)
    names = map(float, classes) if all(map(_reads_as_number, classes)) else classes
    numbers = {name: number for number, name in enumerate(names)}
    values = [_as_written(value, numbers) for value in values]
    are_words = bool(words) or any(isinstance(value, str) for value in values)
    if not are_words and numbers.keys() <= set(classes):
        numbers = {number: number for number in range(len(classes))}
    for row, value in enumerate(values):
        if _is_missing(value):
            raise WrongValue(
                f"label {name!r} of row {row} is missing",
                found=f"{value!r} among {', '.join(classes[:4])}",
                fix=f'leave such rows out: table.dropna(subset=[{name!r}]); a class "None" of a CSV file is read so, '
                "too: pack(pandas.read_csv(file, keep_default_na=False), ..., root=folder of the file)",
            )
        if value not in numbers:
            raise WrongValue(
                f"label {name!r} of row {row} is none of the classes",
                found=f"{value!r}; classes {', '.join(classes[:8])}{', ...' * (len(classes) > 8)}",
                fix="all of them names in classes=; or, where these are words, all whole numbers, from 0",
            )
    return numpy.array([numbers[value] for value in values], numpy.float32), classes


def _refuse_tags(words: set[str], name: str) -> None:
    """Raise where words are several tags each: of all of them, there are no more tags than ways to combine them."""
    for mark in ("; ", ";", "| ", "|", ", ", ","):
        tags = {tag.strip() for word in words for tag in word.split(mark)}
        if any(mark in word for word in words) and len(tags) <= len(words):
            example = next(word for word in sorted(words) if mark in word)
            raise WrongValue(
                f"label {name!r} holds several words at once, as {example!r}",
                found=f"{len(tags)} of them, in {len(words)} combinations",
                fix=f"a label for each: tags = table[{name!r}].str.get_dummies({mark!r}), pack(table.join(tags), ..., "
                f"labels=list(tags)); or, of combinations that are classes, classes=sorted(set(table[{name!r}]))",
            )


def _as_written(value, numbers: dict):
    """Return a value as classes name it: True or an interval by its text, "007" as 7 where classes are numbers."""
    if isinstance(value, str):
        return float(value) if value not in numbers and _reads_as_number(value) else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number or _is_missing(value) or str(value) not in numbers else str(value)


def _reads_as_number(word: str) -> bool:
    try:
        return math.isfinite(float(word)) and "_" not in word  # as "1_2", which Python takes for 12
    except ValueError:
        return False


def number_groups(values):
    """Return each value's number (int32), and the values, sorted: the same whatever the order of the images."""
    import numpy

    values = as_list(values)
    # None and NaN belong to no group, and would put the same patient on both sides of a split.
    # Without what nobody sees: "p1" and "p1 " would, too.
    texts = ["" if type(value) is not str and _is_missing(value) else str(value).strip() for value in values]
    if missing := texts.count(""):
        raise WrongValue(f"{missing} images have no group, first image {texts.index('')}", fix="name a group for each")
    names = sorted(set(texts))  # the few groups, and not the many images: numpy.unique would take seconds
    alike = {}
    for name in names:
        if (other := alike.setdefault(_plain(name), name)) != name:
            print(f"pack: the groups {other!r} and {name!r} look like one, and are two here")
            break
    places = {name: place for place, name in enumerate(names)}
    return numpy.fromiter(map(places.__getitem__, texts), numpy.int32, len(texts)), names


def as_list(values) -> list:
    """Return the values of a column; of words in Arrow's memory, four times faster than one by one."""
    return values.to_numpy(object).tolist() if hasattr(values, "iloc") else list(values)


def _is_missing(value) -> bool:
    try:
        return value is None or bool(value != value)
    except TypeError:  # pd.NA is neither equal to itself nor not
        return True
