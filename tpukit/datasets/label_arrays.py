"""Convert labels to float32 if it can hold them, and words and groups to numbers.

column                    classes          stored labels
cat, dog, cat             cat, dog         0.0, 1.0, 0.0
0.1, 2, 7                 none             0.1 rounded to float32, 2.0, 7.0
16777217                  none             refused: float32 would store 16777216
"1", "2"                  none             refused: these are numbers that were read as text
"""

import itertools
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError, first_few

_EXACT = 2**24  # float32 is exact for every integer up to this one; a larger identifier may change
_EXACT_DOUBLE = 2.0**53  # the same for float64
_SHOWN = 8  # the most classes in a message
_ENOUGH = 20  # from this number of images on, classes of one image each are probably a mistake

_MISSING = "is missing"
_INFINITE = "is no finite number as float32"
_TOO_SMALL = "is too small for float32, which makes it 0"
_TOO_LARGE = "is beyond 2**24, where float32 cannot store every whole number"
_LEAVE_OUT = "leave identifiers out of labels=; `PackedImages.rows` gives each image's row"
_FIXES = {
    _MISSING: "leave these rows out, or give them a number that your loss knows: table.fillna(-1)",
    _INFINITE: "leave these rows out, or divide the label by a constant",
    _TOO_SMALL: "multiply the label by a constant, or take its logarithm",
    _TOO_LARGE: f"{_LEAVE_OUT}; divide a quantity by a constant",
}
_ITEM_FIXES = {
    **_FIXES,
    _MISSING: "leave these items out, or give them a number that your loss knows, such as -1",
}


class _Encoded(NamedTuple):
    """A column of words as class numbers."""

    numbers: object  # (N,) float32
    classes: list[str]  # the word of each number


def as_labels(values, names: Sequence[str], *, first_row: int = 0, what: str = "row"):
    """Return labels as (N, L) float32.

    Args:
        values: (N, L) numbers, or L columns of a table.
        names: the names of the labels, for messages.
        first_row: the number of the first row, for messages.
        what: "row" of a table or "item", for messages and their fixes.

    Raises:
        ValueError: a value is missing, infinite or not a number; becomes infinite or 0 in float32;
            is an integer beyond 2**24; or is a float with a whole number up to 2**53 that float32
            would round. All other floats are rounded.
    """
    import numpy

    is_array = hasattr(values, "ndim")
    columns = []
    for number, name in enumerate(names):
        column = values[:, number] if is_array else values[number]
        columns.append(_numbers(column, name, what))
    for name, column in zip(names, columns, strict=True):
        for why, rows in _changed_by_float32(column).items():
            if rows.any():
                row = int(rows.argmax())
                more = f"{int(rows.sum()) - 1} more like it"
                raise InvalidValueError(
                    f"label {name!r} of {what} {first_row + row} {why}",
                    found=f"{column[row]}, and {more}; labels are stored as float32",
                    fix=_FIXES[why] if what == "row" else _ITEM_FIXES[why],
                )
    return numpy.stack([column.astype(numpy.float32) for column in columns], axis=1)


def _changed_by_float32(column) -> dict:
    """Return, for each problem, whether each value of the column has it, (N,) bool."""
    import numpy

    with numpy.errstate(over="ignore"):  # float16 also overflows when it is compared with 2**24
        stored = column.astype(numpy.float32)
        # Not numpy.abs, because abs of the lowest int64 overflows.
        is_large = (column > _EXACT) | (column < -_EXACT)
        if column.dtype.kind == "f":
            # pandas reads a column of identifiers with a missing value as float64, which is exact
            # for integers up to 2**53.
            is_integer = (numpy.abs(column) <= _EXACT_DOUBLE) & (column == numpy.trunc(column))
            is_large &= is_integer & (stored != column)
    return {
        _MISSING: numpy.isnan(stored),
        _INFINITE: numpy.isinf(stored),
        _TOO_SMALL: (stored == 0) & (column != 0),
        _TOO_LARGE: is_large,
    }


def _numbers(column, name: str, what: str):
    """Return a column as an array of booleans, integers or floats."""
    import numpy

    dtype = getattr(column, "dtype", None)
    if hasattr(column, "isna"):
        column = _without_na(column)
    array = numpy.asarray(column)
    values = array.reshape(-1).tolist()
    # A column of numbers with None or pd.NA has the dtype object. With NaN instead, numpy finds the
    # dtype of the numbers, and the check of missing values finds the row.
    if array.dtype.kind == "O":
        values = [numpy.nan if is_missing(value) else value for value in array.tolist()]
        array = numpy.array(values)
    if array.dtype.kind in "biuf":
        return array
    others = (value for value in values if numpy.asarray(value).dtype.kind not in "biuf")
    value = next(others, values[0])
    fix = "yield (image, number), or (image, word) and classes= with all words"
    if what == "row":
        fix = _as_numbers(name, is_date=array.dtype.kind in "mM")
    raise InvalidValueError(
        f"labels must be numbers, but {name!r} holds {value!r}",
        found=f"dtype {dtype or array.dtype}",
        fix=fix,
    )


def _without_na(column):
    """Return a pandas column as an array; pd.NA of nullable numeric dtypes becomes NaN."""
    import numpy

    is_nullable = getattr(column.dtype, "na_value", None) is not None
    if is_nullable and column.dtype.kind in "biuf" and column.isna().any():
        return column.to_numpy(float, na_value=numpy.nan)
    return column.to_numpy()


def _as_numbers(name: str, *, is_date: bool) -> str:
    """Return the fix for a column whose values are not numbers."""
    column = f"table[{name!r}]"
    if is_date:
        return f"as classes, {column}.astype(str); in days, ({column} - {column}.min()).dt.days"
    decimal_comma = f"pandas.to_numeric({column}.str.replace(',', '.'))"
    return (
        "if these are words, labels= with this column alone, which pack then encodes; "
        f"or, beside other columns, {column}.astype('category').cat.codes; if these are numbers "
        f"in text, pandas.to_numeric({column}), or with a decimal comma {decimal_comma}"
    )


def in_order(names) -> list[str]:
    """Return names in natural order, with 2 before 10."""

    def parts(name: str) -> list:
        # re.split with a group alternates text and digits, so equal positions are comparable.
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]

    # The name last, because "a1" and "a01" have equal parts, and the order of a set is random.
    return sorted(names, key=lambda name: (parts(name), name))


def refuse_similar_classes(found: Sequence[str], all_of_them: str) -> None:
    """Raise ValueError if two classes of a folder or of a column look the same.

    Args:
        found: the names of the classes.
        all_of_them: the list of these names as Python code, for the fix.
    """
    seen = {}
    for name in found:
        other = seen.setdefault(_plain(name), name)
        if other != name:
            shorter, longer = sorted((other, name), key=len)
            raise InvalidValueError(
                "two classes look like one",
                found=f"{shorter!r} and {longer!r}",
                fix=f"if they are one: table.replace({{{longer!r}: {shorter!r}}}), "
                "or rename the folder; "
                f"if they are two: classes={all_of_them}",
            )


def check_classes(classes: Sequence[str], *, are_texts: bool = False) -> None:
    """Raise ValueError if classes= names a class twice.

    Names that differ only in upper and lower case, such as "a" and "A", are two classes. If all
    names are numbers, "1" and "01" are one class; with `are_texts`, two.
    """
    are_numbers = not are_texts and all(map(_reads_as_number, classes))
    first = {}
    twice = None
    for name in classes:
        value = float(name) if are_numbers else name
        if value in first:
            twice = f"{first[value]!r} and {name!r}"
        first.setdefault(value, name)
    if twice:
        raise InvalidValueError(
            "classes= names a class twice",
            found=twice,
            fix=f"one name for each number: classes={list(first.values())}",
        )


def _plain(name: str) -> float | str:
    """Return a value that is equal for names that look the same.

    For a name that is a number, it is the number. For other names it is the text in lower case with
    single blanks and without invisible characters, such as a byte order mark.
    """
    if _reads_as_number(name):
        return float(name)
    if not name.isascii():
        # Unicode category Cf: format characters, which are not visible.
        visible = [letter for letter in name if unicodedata.category(letter) != "Cf"]
        name = unicodedata.normalize("NFC", "".join(visible))
    return " ".join(name.split()).casefold()


def are_other_numbers(classes: Sequence[str]) -> bool:
    """Return whether all classes are numbers, and at least one differs from its position.

    Then the label 1 is ambiguous: it may mean the class "1" or the class at position 1.
    """
    if not all(map(_reads_as_number, classes)):
        return False
    return list(map(float, classes)) != list(range(len(classes)))


def encode_words(column, name: str, classes: Sequence[str] | None):
    """Return a column of words as class numbers.

    Args:
        column: a column of a table; a categorical column has its own classes and their order.
        name: the name of the column, for messages.
        classes: the classes in the order of their numbers; None for the words of the column,
            sorted. If all classes are numbers, a number in the column is the name of a class. If
            not, and the column has only numbers, they are the positions of the classes, from 0.
            True, False and intervals are compared as text, such as "True".

    Returns:
        The class numbers, (N,) float32, and the classes. None for a column of numbers without
        `classes`, if it is not categorical. Text such as "7" counts as a number here.

    Raises:
        ValueError: a value is missing or is not one of the classes, or only some values are words.
    """
    values = column.tolist()
    words = {value for value in values if isinstance(value, str)}
    categories = getattr(getattr(column, "cat", None), "categories", None)
    # If all words are numbers, the column was read as text by mistake, and `as_labels` raises.
    are_numbers = all(_reads_as_number(word.replace(",", ".")) for word in words)
    if classes is None and categories is None and are_numbers:
        return None
    _check_blank(values, words, name, classes)
    if classes is not None:
        check_classes(classes)
    elif categories is not None:
        classes = [str(class_) for class_ in categories]
        refuse_similar_classes(classes, f"list(table[{name!r}].cat.categories)")
    else:
        _refuse_tags(words, name, len(values))
        classes = in_order(words)
        refuse_similar_classes(classes, f"sorted(set(table[{name!r}]))")
    return _Encoded(_class_numbers(values, name, classes), classes)


def _check_blank(values: list, words: set[str], name: str, classes) -> None:
    """Raise ValueError if a word is blank and is not in classes=."""
    blank = {word for word in words if not word.strip()} - set(classes or ())
    if blank:
        row = next(row for row, value in enumerate(values) if value in blank)
        others = f"table[table[{name!r}].str.strip() != '']"
        raise InvalidValueError(
            f"label {name!r} of row {row} is blank",
            found=f"{len(words) - len(blank)} other values that are words",
            fix=f"leave such rows out: {others}; or, if the blank is a class, list it in classes=",
        )


def _class_numbers(values: list, name: str, classes: list[str]):
    """Return the number of the class of each value, (N,) float32."""
    import numpy

    are_numbers = all(map(_reads_as_number, classes))
    names = map(float, classes) if are_numbers else classes
    numbers = {class_: number for number, class_ in enumerate(names)}
    written = [_as_written(value, numbers) for value in values]
    has_words = any(isinstance(value, str) for value in itertools.chain(values, written))
    # A column of numbers with classes that are words: the numbers are positions.
    if not has_words and not are_numbers:
        numbers = {number: number for number in range(len(classes))}
    _check_members(written, numbers, name, classes=classes)
    return numpy.array([numbers[value] for value in written], numpy.float32)


def _check_members(values: list, numbers: dict, name: str, *, classes: list[str]) -> None:
    """Raise ValueError if a value is missing, or is not a key of `numbers`."""
    for row, value in enumerate(values):
        if is_missing(value):
            read_again = "pack(pandas.read_csv(file, keep_default_na=False)"
            raise InvalidValueError(
                f"label {name!r} of row {row} is missing",
                found=f"{value!r} among {', '.join(classes[:4])}",
                fix=f"leave such rows out: table.dropna(subset=[{name!r}]); "
                'or, if a class has the name "None", which pandas reads as missing: '
                f"{read_again}, ..., root=os.path.dirname(file))",
            )
        if value not in numbers:
            more = ", ..." if len(classes) > _SHOWN else ""
            fix = "list all names in classes=; or, if labels are numbers, use whole numbers from 0"
            has_words = any(isinstance(other, str) for other in values)
            if has_words and not isinstance(value, str):
                fix = f"make words of all values: table[{name!r}] = table[{name!r}].astype(str)"
            raise InvalidValueError(
                f"label {name!r} of row {row} is not one of the classes",
                found=f"{value!r}; classes {', '.join(classes[:_SHOWN])}{more}",
                fix=fix,
            )


def _refuse_tags(words: set[str], name: str, count: int) -> None:
    """Raise if values are lists of tags, such as "cat;dog", or if more than half are different.

    A column of fewer than 20 values may have any number of different values. Values are lists of
    tags if some contain a separator, and if the number of different tags is at most that of
    different values. Names such as "left lung" contain a blank, too. So a blank is a separator only
    if two more conditions are met: some values have more parts than others, and there are at least
    twice as many different values as tags.
    """
    # A separator with a blank is tried before the same one without, so that the tags have no blank
    # at their start. A blank alone is the least certain, and the last.
    for mark in ("; ", ";", "| ", "|", ", ", ",", " "):
        divided = sorted(word for word in words if mark in word)
        parts = [word.split(mark) for word in words]
        tags = {part.strip() for part in itertools.chain.from_iterable(parts)}
        most = len(words)
        if mark == " ":
            have_lengths = len(set(map(len, parts))) > 1
            most = len(words) // 2 if have_lengths else 0
        if divided and len(tags) <= most:
            dummies = f"tags = table[{name!r}].str.get_dummies({mark!r})"
            combinations = f"classes=sorted(set(table[{name!r}]))"
            raise InvalidValueError(
                f"label {name!r} holds several words at once, as {divided[0]!r}",
                found=f"{len(tags)} words in {len(words)} combinations",
                fix=f"a label per word: {dummies}; pack(table.join(tags), ..., labels=list(tags)); "
                f"or, if each combination is a class: {combinations}",
            )
    if count >= _ENOUGH and len(words) > count / 2:
        raise InvalidValueError(
            f"label {name!r} has {len(words):,} different words for {count:,} images: "
            "names of patients or files?",
            found=first_few(sorted(words), 4),
            fix=f"to keep the images of a patient together: groups={name!r}; "
            f"or, if each word is a class: classes=sorted(set(table[{name!r}]))",
        )


def _as_written(value, numbers: dict):
    """Return the key of `numbers` for a value of the column; the value itself if there is no key.

    True and intervals become their text if this text is a key. A text that is no key but reads as a
    number, such as "007", becomes this number.
    """
    if isinstance(value, str):
        if value not in numbers and _reads_as_number(value):
            return float(value)
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or is_missing(value) or str(value) not in numbers:
        return value
    return str(value)


def _reads_as_number(word: str) -> bool:
    try:
        # `float` accepts "1_2" as 12, but a class of this name is not a number.
        return math.isfinite(float(word)) and "_" not in word
    except ValueError:
        return False


def number_groups(values):
    """Return the number of each image's group, (N,) int32, and the names of the groups, sorted.

    The numbers do not depend on the order of the images.

    Args:
        values: the group of each image, (N,) of words or numbers.

    Raises:
        ValueError: an image has no group.
    """
    import numpy

    # Blanks around a name do not count: if "p1" and "p1 " were two groups, a patient could be in
    # both parts of a split. None and NaN are an error for the same reason.
    texts = [_group_name(value) for value in as_list(values)]
    missing = texts.count("")
    if missing:
        raise InvalidValueError(
            f"images without a group: {missing}; the first is image {texts.index('')}",
            fix="give every image a group",
        )
    # Sort only the few groups. numpy.unique would sort one value per image, which takes seconds.
    names = sorted(set(texts))
    similar = {}
    for name in names:
        other = similar.setdefault(_plain(name), name)
        if other != name:
            print(f"pack: the groups {other!r} and {name!r} look like one group, but count as two")
            break
    places = {name: place for place, name in enumerate(names)}
    return numpy.fromiter(map(places.__getitem__, texts), numpy.int32, len(texts)), names


def _group_name(value) -> str:
    """Return the name of a group without blanks around it; "" for a missing value."""
    if type(value) is not str and is_missing(value):
        return ""
    return str(value).strip()


def as_list(values) -> list:
    """Return the values of a column; for Arrow strings this is four times as fast as `list`."""
    if hasattr(values, "iloc"):
        return values.to_numpy(object).tolist()
    if hasattr(values, "detach"):  # a tensor, whose items have no text of their own
        return values.tolist()
    return list(values)


def is_missing(value) -> bool:
    """Return whether a value of a column is None, NaN, pd.NaT or pd.NA."""
    try:
        return value is None or bool(value != value)  # only NaN and NaT differ from themselves
    except TypeError:  # pd.NA cannot be compared
        return True
    except ValueError:  # an array
        return False
