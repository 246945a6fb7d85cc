"""Raise errors that name arguments of the wrong type: texts for numbers, numbers for flags.

The parameters of a notebook or a form may be texts. Without these checks, Python would fail far
from the call when it compares "3" with a number, and would treat "False" as true.

    check_count("epochs", "3")      epochs must be a whole number, got '3'     fix: epochs=3
    check_flag("bf16", "False")     bf16 must be True or False, got 'False'    fix: bf16=False
"""

from numbers import Integral, Real

from tpukit.essentials.display.errors import InvalidTypeError, InvalidValueError

# As people type them in a form; bool("False") is True in Python.
_FALSE = ("false", "no", "off", "0", "", "none")
_FLAGS = ("bool", "bool_")  # numpy's is called bool_ before 2.0


def check_count(name: str, value: object, *, least: int = 1, otherwise: str = "") -> None:
    """Raise an error unless an argument is a whole number of at least `least`.

    Args:
        name: the name of the argument.
        value: the value of the argument.
        least: the smallest allowed value.
        otherwise: an alternative fix, which the message adds to the first fix with "or"; "" for
            none.

    Raises:
        InvalidTypeError: the value is not a whole number.
        InvalidValueError: the value is below `least`.
    """
    fix = f"{name}={least}"
    is_number_as_text = isinstance(value, str) and value.strip().isdecimal()
    is_whole_float = isinstance(value, float) and value.is_integer()
    if is_number_as_text or is_whole_float:  # the number that the user probably meant
        fix = f"{name}={max(least, int(value))}"
    if otherwise:
        fix += f", or {otherwise}"
    if not _is_whole(value):
        raise InvalidTypeError(f"{name} must be a whole number, got {value!r}", fix=fix)
    if value < least:
        raise InvalidValueError(f"{name} must be at least {least}, got {value}", fix=fix)


def check_number(name: str, value: object, *, fix: str) -> None:
    """Raise an InvalidTypeError unless an argument is a number.

    Single numbers of numpy and torch count as well.

    Args:
        name: the name of the argument.
        value: the value of the argument.
        fix: the fix of the error.
    """
    if not _is_number(value):
        raise InvalidTypeError(f"{name} must be a number, got {value!r}", fix=fix)


def check_flag(name: str, value: object) -> None:
    """Raise an InvalidTypeError unless an argument is a bool, of Python or numpy."""
    if type(value).__name__ in _FLAGS:
        return
    is_false = str(value).strip().lower() in _FALSE
    raise InvalidTypeError(
        f"{name} must be True or False, got {value!r}", fix=f"{name}={not is_false}"
    )


def _is_whole(value: object) -> bool:
    if isinstance(value, bool):  # in Python, True is 1
        return False
    return isinstance(value, Integral)


def _is_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    is_of_numpy_or_torch = hasattr(value, "__float__") and getattr(value, "ndim", None) == 0
    return isinstance(value, Real) or is_of_numpy_or_torch
