"""Errors of three parts: the fact, the evidence, the fix."""

_INDENT = " " * 9  # continues a part on its next line


def explain(fact: str, *, found: object = "", fix: object = "") -> str:
    """Return the text of an error or a warning: the fact, then the evidence and the fix below it.

    size is 0
      found: size=0
      fix:   size=64
    """
    lines = [fact]
    for label, part in (("found:", found), ("fix:", fix)):
        if str(part):
            text = str(part).replace("\n", f"\n{_INDENT}")
            lines.append(f"  {label:<7}{text}")
    return "\n".join(lines)


class TpukitError(Exception):
    """The base of tpukit's errors that carry their fix. Each is also a built-in error.

    Attributes:
        fact: the problem in one sentence in lower case, with the values that caused it.
        found: the evidence; "" if the fact contains it.
        fix: a click or a line of code; "" if none is known.
    """

    def __init__(self, fact: str = "", *, found: object = "", fix: object = "", **others: object):
        super().__init__(explain(fact, found=found, fix=fix))
        self.fact = fact
        self.found = str(found)
        self.fix = str(fix)
        for name, value in others.items():
            getattr(self, name)  # raises if the class has no such attribute
            setattr(self, name, value)

    def __str__(self) -> str:
        # OSError's own text changes if code sets its file name, as shutil.rmtree does.
        return str(self.args[0])


class InvalidValueError(TpukitError, ValueError):
    """An argument, or a value in a file, cannot be used."""


class InvalidTypeError(TpukitError, TypeError):
    """An argument has a type that cannot be used."""


class PathNotFoundError(TpukitError, FileNotFoundError):
    """A file or a folder does not exist, or not in the place where tpukit looked."""


class SystemFailureError(TpukitError, OSError):
    """A file, a disk or another part of the system failed, or a file is damaged.

    `errno` is that of OSError.
    """


class NotInstalledError(TpukitError, ModuleNotFoundError):
    """A package, or a subpackage of tpukit, is not installed."""


class Failed(TpukitError, RuntimeError):
    """An operation failed."""


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class; for a class of this module, its built-in class.

    Users know and catch the built-in classes: "ValueError" for `InvalidValueError`.
    """
    kind = type(error)
    if kind.__module__ == __name__:
        _, _tpukit_error, kind, *_ = kind.__mro__
    return kind.__name__
