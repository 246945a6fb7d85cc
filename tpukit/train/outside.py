"""What a training step asks of the world outside its process: the clock, a file, a socket."""

import contextlib
import sys
from collections.abc import Iterator

from tpukit.train.host_parts import is_own

# Modules whose functions may answer otherwise the next time, as these functions name them.
_OUTSIDE = {"time", "posix", "nt", "io", "_io", "genericpath", "pathlib", "socket", "_socket", "select", "subprocess"}
_NOW = ("now", "today", "utcnow")  # of datetime


@contextlib.contextmanager
def calls_outside() -> Iterator[set[str]]:
    """Have the set hold by name what the user's own functions call within and is outside of the process.

    Python calls a function of ours for every call of this thread, which makes a step half as long again. Where somebody
    else has asked for that, a profiler, nothing is looked at.
    """
    found: set[str] = set()

    def look(frame, event: str, called) -> None:
        if event == "c_call" and is_own(frame.f_code.co_filename):
            name, owner = called.__qualname__, getattr(called, "__self__", None)
            module = called.__module__ or getattr(owner if isinstance(owner, type) else type(owner), "__module__", "")
            if module in _OUTSIDE or (module == "datetime" and called.__name__ in _NOW):
                found.add(f"{module}.{name}")
        elif (
            event == "call"
            and frame.f_globals.get("__name__", "").partition(".")[0] in _OUTSIDE  # pathlib is a package from 3.13 on
            and is_own(frame.f_back.f_code.co_filename)
        ):
            found.add(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")

    if sys.getprofile() is not None:
        yield found
        return
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
