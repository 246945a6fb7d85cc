"""Labels as the float32 they are stored as, where that changes none of them; words and groups as numbers."""

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
        value = array.reshape(-1)[0]
        raise WrongValue(
            f"labels are numbers, and these are not: {name!r} holds {value!r}",
            found=f"dtype {dtype or array.dtype}",
            fix="a column of words is encoded where labels= names it alone; else "
            f"table[{name!r}].astype('category').cat.codes; of numbers in text, pandas.to_numeric",
        )
    return array


def _is_nullable(column) -> bool:
    return getattr(column.dtype, "na_value", None) is not None and column.dtype.kind in "biuf" and column.isna().any()


def encode_words(column, name: str, classes: Sequence[str] | None):
    """Return a column of words as class numbers, (N,) float32, and the classes; None where it holds numbers.

    Args:
        column: of a table; a categorical one has its classes, and their order, itself.
        name: of the column, for messages.
        classes: in the order of their numbers; with them, a column of whole numbers is one of class numbers.

    Raises:
        ValueError: a value is missing, is none of the classes, or only some are words.
    """
    import numpy

    values = column.tolist()
    words = {value for value in values if isinstance(value, str)}
    # Words that all read as numbers are rather a column that was read as text: that is for `as_labels` to refuse.
    if classes is None and (not words or all(map(_reads_as_number, words))):
        return None
    if classes is None:
        own = getattr(getattr(column, "cat", None), "categories", None)
        classes = sorted(words) if own is None else own.tolist()
    classes = [str(one) for one in classes]
    if len(set(classes)) < len(classes):
        raise WrongValue("classes= names a class twice", found=classes, fix="each class once")
    numbers = {word: number for number, word in enumerate(classes)}
    if not words:
        numbers = {number: number for number in range(len(classes))}
    for row, value in enumerate(values):
        if _is_missing(value):
            raise WrongValue(
                f"label {name!r} of row {row} is missing",
                found=f"{value!r} among {', '.join(classes[:4])}",
                fix='leave such rows out: table.dropna(subset=...); a class "None" of a CSV file is read so, too: '
                "pandas.read_csv(file, keep_default_na=False)",
            )
        if value not in numbers:
            raise WrongValue(
                f"label {name!r} of row {row} is none of the classes",
                found=f"{value!r}; classes {', '.join(classes[:8])}{', ...' * (len(classes) > 8)}",
                fix="all of them words of classes=; or all whole numbers, from 0",
            )
    return numpy.array([numbers[value] for value in values], numpy.float32), classes


def _reads_as_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def number_groups(values):
    """Return each value's number (int32), and the values, sorted: the same whatever the order of the images."""
    import numpy

    values = list(values)
    # None and NaN belong to no group, and would put the same patient on both sides of a split.
    if missing := [number for number, value in enumerate(values) if _is_missing(value)]:
        raise WrongValue(f"{len(missing)} images have no group, first image {missing[0]}", fix="name a group for each")
    names, numbers = numpy.unique([str(value) for value in values], return_inverse=True)
    return numbers.astype(numpy.int32), names.tolist()


def _is_missing(value) -> bool:
    try:
        return value is None or bool(value != value)
    except TypeError:  # pd.NA is neither equal to itself nor not
        return True
