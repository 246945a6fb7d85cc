"""Errors with three fields: the fact, the evidence and the fix. Only `explain` makes them text.

    try:
        raise InvalidValueError("lr must be above 0", found="lr=-1", fix="lr=0.1")
    except TpukitError as error:
        error.fact    'lr must be above 0'
        error.fix     'lr=0.1'
        print(error)  lr must be above 0
                        found: lr=-1
                        fix:   lr=0.1

Code that needs a part of an error reads the field, and never searches the text.
"""

from typing import NamedTuple


def explain(fact: str, *, found: object = "", fix: object = "", details: str = "") -> str:
    """Return the text of an error or a warning, with each part on separate lines.

    Args:
        fact: the problem, in a sentence.
        found: the evidence; "" for no evidence. The value None is printed, because None may be the
            evidence.
        fix: what to do about it; "" if it is not known.
        details: text of any length that follows after an empty line, such as a traceback.
    """
    lines = [fact]
    for label, part in (("found:", found), ("fix:", fix)):
        text = str(part)
        if text:
            indented = text.replace("\n", f"\n{'':9}")
            lines.append(f"  {label:<7}{indented}")
    if details:
        lines.append(f"\n{details}")
    return "\n".join(lines)


class ErrorFields:
    """Mixin that gives an exception the fields of `TpukitError`, and its text from `explain`.

    Only an exception that must not be an `Exception`, such as an interrupt, uses it directly.
    """

    fact = ""
    found = ""
    fix = ""
    details = ""

    def __init__(self, fact: str = "", *, found: object = "", fix: object = "", **others: object):
        details = str(others.pop("details", ""))
        super().__init__(explain(fact, found=found, fix=fix, details=details))
        self.fact = fact
        self.found = str(found)
        self.fix = str(fix)
        self.details = details
        for name, value in others.items():
            getattr(self, name)  # raises AttributeError for a name that the class does not have
            setattr(self, name, value)

    # OSError has a text of its own as soon as someone sets its file name, as shutil.rmtree does.
    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def summary(self) -> str:
        """The text without the details."""
        return explain(self.fact, found=self.found, fix=self.fix)


class TpukitError(ErrorFields, Exception):
    """Base of every error that tpukit raises; each one is also a built-in error of its kind.

    Attributes:
        fact: the problem, in a sentence in lower case, with the values that were given.
        found: the evidence; "" if the fact has all of it.
        fix: what to do about it, a click or a line of code; "" if it is not known.
        details: longer text that follows in the message, such as a traceback; "" for none.
    """


class InvalidValueError(TpukitError, ValueError):
    """An argument, or a value in a file, cannot be used."""


class InvalidTypeError(TpukitError, TypeError):
    """An argument has a type that cannot be used."""


class PathNotFoundError(TpukitError, FileNotFoundError):
    """A file or a folder does not exist, or is in another place."""


class PathExistsError(TpukitError, FileExistsError):
    """A file or a folder exists already, with other contents."""


class AccessDeniedError(TpukitError, PermissionError):
    """The system does not allow this process to read or write a file or a folder."""


class InvalidIndexError(TpukitError, IndexError):
    """There is no item with this number."""


class SystemFailureError(TpukitError, OSError):
    """A file, a disk or another part of the system failed or is damaged; `errno` is OSError's."""


class NotInstalledError(TpukitError, ModuleNotFoundError):
    """A package, or a subpackage of tpukit, is not installed."""


class TpukitRuntimeError(TpukitError, RuntimeError):
    """A requested action failed, or is not possible in the present state."""


class ErrorParts(NamedTuple):
    """The three parts of any exception."""

    fact: str
    found: str
    fix: str


def parts_of(error: BaseException) -> ErrorParts:
    """Return the fields of an error of tpukit; the text of any other exception is its fact."""
    if isinstance(error, ErrorFields):
        return ErrorParts(error.fact, error.found, error.fix)
    return ErrorParts(str(error), "", "")


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class; the built-in name for the general errors of this module.

    Users know and catch `ValueError`, so a report names it in place of `InvalidValueError`.
    """
    kind = type(error)
    if kind.__module__ == __name__:
        kind = kind.__bases__[-1]
    return kind.__name__
