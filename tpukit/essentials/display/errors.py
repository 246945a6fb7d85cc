"""Errors with three fields: the fact, the evidence and the fix. `explain` formats their text.

    try:
        raise InvalidValueError("lr must be above 0", found="lr=-1", fix="lr=0.1")
    except TpukitError as error:
        error.fact    'lr must be above 0'
        error.fix     'lr=0.1'
        print(error)  lr must be above 0
                        found: lr=-1
                        fix:   lr=0.1

Code that needs a part of an error reads the field instead of searching the text.
"""

from typing import NamedTuple


def explain(fact: str, *, found: object = "", fix: object = "", details: str = "") -> str:
    """Return the text of an error or a warning, with each part on lines of its own.

    Args:
        fact: the problem, in a sentence.
        found: the evidence; "" for no evidence. The value None is printed, because None may be the
            evidence.
        fix: a line of code or an action that solves the problem; "" if it is not known.
        details: text of any length that follows after an empty line, such as a traceback; "" for
            none.
    """
    lines = [fact]
    for label, part in (("found:", found), ("fix:", fix)):
        text = str(part)
        if text:
            indented = text.replace("\n", f"\n{'':9}")  # further lines begin below the first
            lines.append(f"  {label:<7}{indented}")
    if details:
        lines.append(f"\n{details}")
    return "\n".join(lines)


class ErrorFields:
    """Mixin that gives an exception the fields and the text of `TpukitError`.

    Errors inherit it through `TpukitError`. Interrupts inherit it directly, because
    `except Exception` must not catch them.
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
            getattr(self, name)  # raises AttributeError for a field that the class does not declare
            setattr(self, name, value)

    # OSError would return another text after code has set its file name, as shutil.rmtree does.
    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def summary(self) -> str:
        """The text without the details."""
        return explain(self.fact, found=self.found, fix=self.fix)


class TpukitError(ErrorFields, Exception):
    """Base of all errors of tpukit. Most of them have a built-in error as a second base.

    For example, `except ValueError` catches an InvalidValueError, too.

    Attributes:
        fact: the problem, in a sentence in lower case, with the values that were given.
        found: the evidence; "" if the fact has all of it.
        fix: a click or a line of code that solves the problem; "" if it is not known.
        details: longer text that follows in the message, such as a traceback; "" for none.
    """


class InvalidValueError(TpukitError, ValueError):
    """An argument, or a value in a file, is not supported."""


class InvalidTypeError(TpukitError, TypeError):
    """An argument has a type that is not supported."""


class PathNotFoundError(TpukitError, FileNotFoundError):
    """A file or a folder does not exist, or is in another place."""


class PathExistsError(TpukitError, FileExistsError):
    """A file or a folder exists already, with other contents."""


class AccessDeniedError(TpukitError, PermissionError):
    """This process has no permission to read or write a file or a folder."""


class InvalidIndexError(TpukitError, IndexError):
    """There is no item with this number."""


class SystemFailureError(TpukitError, OSError):
    """A file, a disk or another part of the system has failed.

    `errno` is the system's number of the error, such as ENOSPC; None if there is none.
    """


class NotInstalledError(TpukitError, ModuleNotFoundError):
    """A package, or a subpackage of tpukit, is not installed."""


class TpukitRuntimeError(TpukitError, RuntimeError):
    """A requested action failed, or is not possible in the present state."""


class ErrorParts(NamedTuple):
    """The three parts of an exception's message."""

    fact: str
    found: str
    fix: str


def parts_of(error: BaseException) -> ErrorParts:
    """Split the message of a `TpukitError`; for another error, the text is the fact."""
    if isinstance(error, ErrorFields):
        return ErrorParts(error.fact, error.found, error.fix)
    return ErrorParts(str(error), "", "")


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class, for a report.

    For the errors of this module it is the name of the built-in base class, such as "ValueError"
    for an InvalidValueError, because users know the built-in classes.
    """
    kind = type(error)
    # The bases of such a class are TpukitError and the built-in error.
    if kind.__module__ == __name__:
        kind = kind.__bases__[-1]
    return kind.__name__
