"""What launch is called with, looked at before anything is forked: the function, its arguments, the options."""

import functools
import inspect
from collections.abc import Callable
from typing import NoReturn

from tpukit.essentials.data import remember
from tpukit.essentials.display import InvalidTypeError

# What others call it, and what it is here.
_ELSEWHERE = {
    **dict.fromkeys(("nprocs", "num_processes", "devices"), "launch({name}), which takes every core; cores=1 for one"),
    "args": "launch({name}, config): what the function takes follows it, without a tuple around it",
    "start_method": "launch({name}): the workers are always forks, which see what the notebook has defined",
}


def refuse_call(fn: Callable, args: tuple) -> None:
    """Raise where `fn(core, *args)` cannot be called, in the kernel and before a device has started.

    What it gets that a fork shares is noted, for `core.batches` to look for in its dataset.

    Raises:
        TypeError: `fn` is no function, or takes something else.
    """
    if not callable(fn):
        raise InvalidTypeError(
            f"launch runs a function, got {'None' if fn is None else 'a ' + type(fn).__name__}",
            fix="launch(train), the function itself: launch(train()) calls it here, and passes on what it returned",
        )
    remember(fn, args)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some that are written in C do not tell theirs
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        called = f"core{', ' * bool(args)}{', '.join(type(one).__name__ for one in args)}"
        raise InvalidTypeError(
            f"{_name(fn)}{signature} cannot be called with ({called}): {error}",
            fix=f"def {_name(fn)}(core, ...): a worker function takes its core first, then what follows it in launch; "
            f"what it takes by keyword, functools.partial({_name(fn)}, rate=0.1)",
        ) from None


def explain_unknown_options(launch: Callable) -> Callable:
    """Decorate `launch` so that a keyword it does not have raises an error with a fix."""
    options = []
    for parameter in inspect.signature(launch).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            options.append(parameter.name)

    @functools.wraps(launch)
    def checked(*args: object, **given: object) -> object:
        unknown = [name for name in given if name not in options and name != "fn"]
        if unknown and args:
            _refuse_options(args[0], unknown, options)
        return launch(*args, **given)

    return checked


def _refuse_options(fn: Callable, unknown: list[str], options: list[str]) -> NoReturn:
    name = _name(fn)
    fixes = [_ELSEWHERE[key].format(name=name) for key in unknown if key in _ELSEWHERE]
    if not fixes:
        given = ", ".join(f"{key}=..." for key in unknown)
        fixes = [f"launch(functools.partial({name}, {given}), ...), if it is meant for {name}"]
    raise InvalidTypeError(
        f"launch has no option {', '.join(map(repr, unknown))}",
        found=f"its options are {', '.join(options)}; nothing by keyword is passed on to {name}",
        fix="\n".join(fixes),
    )


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", "fn")
