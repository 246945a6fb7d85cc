"""Read the names of classes or labels, in any usual form.

Every function of tpukit with an argument for names uses this module, so all support these forms:

    ["cat", "dog"]               a list, in the order of the class numbers
    {0: "cat", 1: "dog"}         from number to name, as `id2label`, in any order
    {"0": "cat", "1": "dog"}     the same after JSON, whose keys are texts
    {"cat": 0, "dog": 1}         from name to number, as `class_to_idx`
    {"cat": "Felis catus"}       from label to words, in the order of the labels' numbers
"""

from collections.abc import Iterable, Mapping

from tpukit.essentials.display.errors import InvalidValueError
from tpukit.essentials.display.tables import first_few

_SHOWN = 4  # names or numbers in a message


def names_in_order(names: object, argument: str, *, words: bool = True) -> list[str]:
    """Return names as a list of strings, in the order of their class numbers.

    Args:
        names: a list, an array, a pandas Series or Index, or a dict such as {0: "cat"} or
            {"cat": 0}. A name may be a list of strings, as for ImageNet's synonyms. They are
            joined with commas.
        argument: the name of the argument, for messages.
        words: True to allow also a dict without numbers, such as {"cat": "Felis catus"}. Its values
            are the names, and the order of its items is the order of the class numbers.

    Raises:
        InvalidValueError: the names have no order, as in a set; the numbers of a dict or the index
            of a Series are not 0, 1, 2, ...; or a name is missing or is a dict.
    """
    if hasattr(names, "iloc"):
        _check_series(names, argument)
        names = names.tolist()
    if isinstance(names, Mapping):
        names = _of_mapping(names, argument, words=words)
    are_ordered = isinstance(names, Iterable) and not isinstance(names, str | bytes)
    if not are_ordered or isinstance(names, set | frozenset):
        raise _without_order(names, argument)
    return [_as_text(name, argument) for name in names]


def _of_mapping(names: Mapping, argument: str, *, words: bool) -> list:
    """Return the names of a dict in the order of their numbers."""
    keys = list(names)
    values = list(names.values())
    # Texts of digits count as numbers only in the second round: {"10": 0, "2": 1} is the
    # `class_to_idx` of folders that are called 10 and 2.
    for texts in (False, True):
        for numbers, others in ((keys, values), (values, keys)):
            name_of = dict(zip(_whole_numbers(numbers, texts=texts), others, strict=True))
            if set(name_of) == set(range(len(names))):
                return [name_of[number] for number in range(len(names))]
    has_numbers = None not in _whole_numbers(keys) or None not in _whole_numbers(values)
    are_words = all(isinstance(value, str | bytes | list | tuple) for value in values)
    if words and are_words and not has_numbers:
        return values
    in_their_order = keys if None in _whole_numbers(keys) else values
    raise InvalidValueError(
        f"{argument}= is a dict of {len(names):,} names, whose numbers are not 0 to "
        f"{len(names) - 1:,}",
        found=dict(list(names.items())[:_SHOWN]),
        fix="number all names from 0; or, if the names are in the right order already, "
        f"{argument}={list(map(str, in_their_order))}",
    )


def _whole_numbers(values: Iterable, *, texts: bool = True) -> list[int | None]:
    """Return values as whole numbers, with None in place of each value that is not a number.

    If `texts` is True, a text of digits counts as a number.
    """
    return [_whole_number(value, texts=texts) for value in values]


def _whole_number(value: object, *, texts: bool) -> int | None:
    if isinstance(value, str):
        is_number = texts and value.strip().isdecimal()
        return int(value) if is_number else None
    try:
        return int(value) if int(value) == value else None
    except (TypeError, ValueError, OverflowError):  # records, nan, infinity
        return None


def _check_series(names, argument: str) -> None:
    """Raise an error for a table, and for a Series whose index is not 0, 1, 2, ..."""
    if hasattr(names, "columns"):
        raise InvalidValueError(
            f"{argument}= must be one name for each class number, got a table",
            found=f"columns {first_few(map(str, names.columns), _SHOWN)}",
            fix=f'{argument}=dict(zip(table["number"], table["name"])), with the names of your '
            "columns",
        )
    # After a sort or a filter, the index has old row numbers; it may also have class numbers.
    index = names.index.tolist()
    if index != list(range(len(index))):
        raise InvalidValueError(
            f"{argument}= is a Series whose index is not 0, 1, 2, ...",
            found=f"index {first_few(map(str, index), _SHOWN)}",
            fix=f"{argument}=series.to_dict() if the index has the class numbers, "
            f"{argument}=series.tolist() if the rows are in the order of the class numbers",
        )


def _without_order(names: object, argument: str) -> InvalidValueError:
    fix = f"{argument}=[{names!r}, ...]"
    if hasattr(names, "__index__"):  # probably the number of classes, perhaps of numpy
        fix = f"{argument}=range({names})"
    elif isinstance(names, set | frozenset):
        fix = f"a list, because a set has no order: {argument}={sorted(map(str, names))}"
    return InvalidValueError(
        f"{argument}= must be the names of all classes, in their order, got {names!r}", fix=fix
    )


def _as_text(name: object, argument: str) -> str:
    """Return a name as text; raise an InvalidValueError for a record or a missing name."""
    if isinstance(name, bytes):
        return name.decode()
    is_list = isinstance(name, list | tuple) and len(name) > 0
    if is_list and all(isinstance(part, str) for part in name):
        return ", ".join(name)
    is_text = isinstance(name, str)
    is_record = not is_text and hasattr(name, "__len__")
    is_missing = name is None or type(name).__name__ == "NAType"  # pandas.NA cannot be compared
    if is_record or is_missing or name != name:  # nan is not equal to itself
        raise InvalidValueError(
            f"{argument}= must be one text for each class number",
            found=repr(name),
            fix="leave out missing names; if the list contains records instead of names, "
            f'{argument}={{one["id"]: one["name"] for one in records}}',
        )
    return str(name)
