"""Errors that say three things: the fact, the evidence, the fix."""


def explain(fact: str, *, found: object = "", fix: object = "") -> str:
    """Return the text of an error or a warning: the fact, below it what was found and what to do about it."""
    lines = [fact]
    for label, part in (("found:", found), ("fix:", fix)):
        if str(part):
            lines.append(f"  {label:<7}" + str(part).replace("\n", f"\n{'':9}"))
    return "\n".join(lines)


class TpukitError(Exception):
    """What all errors of this kit have in common that carry their fix; each is also the built-in error it is a case of.

    Attributes:
        fact: what is wrong, in one sentence in lower case, with the values that came.
        found: the evidence; "" where the fact has it all.
        fix: what to do about it, a click or a line of code; "" where nobody knows.
    """

    def __init__(self, fact: str = "", *, found: object = "", fix: object = "", **others: object):
        super().__init__(explain(fact, found=found, fix=fix))
        self.fact, self.found, self.fix = fact, str(found), str(fix)
        for name, value in others.items():
            getattr(self, name)  # raises for what the class does not have
            setattr(self, name, value)

    def __str__(self) -> str:  # OSError's own is another where somebody notes a file name, as shutil.rmtree does
        return str(self.args[0])


class InvalidValueError(TpukitError, ValueError):
    """An argument, or something in a file, has a value that cannot be used."""


class InvalidTypeError(TpukitError, TypeError):
    """An argument is of a type that cannot be used."""


class PathNotFoundError(TpukitError, FileNotFoundError):
    """A file or a folder is not there, or not where it was looked for."""


class SystemFailureError(TpukitError, OSError):
    """A file, a disk or another part of the system failed, or holds something damaged; `errno` as OSError has it."""


class NotInstalledError(TpukitError, ModuleNotFoundError):
    """A package that this needs is not installed."""


class Failed(TpukitError, RuntimeError):
    """Something that was asked for did not work."""


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class: of those in this module the built-in one, which people know and catch."""
    kind = type(error)
    return (kind.__mro__[2] if kind.__module__ == __name__ else kind).__name__
