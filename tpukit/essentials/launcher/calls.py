"""Check the call of `launch` before a fork: the function, its arguments, its options."""

import functools
import inspect
from collections.abc import Callable
from typing import NoReturn, TypeVar

from tpukit.essentials.data import remember
from tpukit.essentials.display import InvalidTypeError

_Launch = TypeVar("_Launch", bound=Callable)  # so that type checkers keep its signature
# Options of other launchers, such as xmp.spawn and accelerate's, and tpukit's counterpart.
_ALL_CORES = "launch({name}), which uses every core; cores=1 for a single core"
_COUNTERPARTS = {
    "nprocs": _ALL_CORES,
    "num_processes": _ALL_CORES,
    "devices": _ALL_CORES,
    "args": "launch({name}, config): the function's arguments follow it, without a tuple",
    "start_method": "launch({name}): the workers are always forks, which see the notebook's names",
}


def refuse_call(fn: Callable, args: tuple, caller: str = "launch") -> None:
    """Raise an error unless `fn(core, *args)` can be called.

    It also records random generators, open files and similar objects in `fn` and `args`, for
    `core.batches`. Each worker gets a copy of such an object, and all copies give equal values.

    Args:
        fn: the worker function.
        args: its arguments after the core.
        caller: name of the function that the user has called, for the message.

    Raises:
        InvalidTypeError: `fn` is not a function, or its signature does not accept the arguments.
        InvalidValueError: `fn` uses threads of the notebook, which the workers do not have.
    """
    if not callable(fn):
        given = "None" if fn is None else f"a {type(fn).__name__}"
        raise InvalidTypeError(
            f"{caller} runs a function, got {given}",
            fix=f"{caller}(train), without parentheses after train: they would call the function "
            f"here, and {caller} would get its result",
        )
    remember(fn, args)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(None, *args)  # raises what a call would raise; None stands for the core
    except TypeError as error:
        name = _name(fn)
        types = ["core", *(type(arg).__name__ for arg in args)]
        raise InvalidTypeError(
            f"{name}{signature} cannot be called with ({', '.join(types)}): {error}",
            fix=f"def {name}(core, ...): the first parameter gets the core, the others get the "
            f"arguments that follow {name} in {caller}(...); to pass an argument by keyword: "
            f"functools.partial({name}, rate=0.1)",
        ) from None


def explain_unknown_options(launch: _Launch) -> _Launch:
    """Decorate `launch`, so that an unknown keyword raises an error with a fix."""
    options = []
    for parameter in inspect.signature(launch).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            options.append(parameter.name)

    @functools.wraps(launch)
    def checked(*args: object, **given: object) -> object:
        # Without `args` there is no function that the fix could name; Python raises an error then.
        unknown = [name for name in given if name not in options and name != "fn"]
        if unknown and args:
            _refuse_options(args[0], unknown, options)
        return launch(*args, **given)

    return checked


def _refuse_options(fn: Callable, unknown: list[str], options: list[str]) -> NoReturn:
    name = _name(fn)
    fixes = [_COUNTERPARTS[key].format(name=name) for key in unknown if key in _COUNTERPARTS]
    if not fixes:
        given = ", ".join(f"{key}=..." for key in unknown)
        fixes = [f"launch(functools.partial({name}, {given}), ...), to pass it to {name}"]
    raise InvalidTypeError(
        f"launch has no option {', '.join(map(repr, unknown))}",
        found=f"its options are {', '.join(options)}; keyword arguments are not passed to {name}",
        fix="\n".join(fixes),
    )


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", "fn")
