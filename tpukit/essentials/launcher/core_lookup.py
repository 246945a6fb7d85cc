"""Find the core that the calling code runs on, for code that was not passed its `Core`."""

import threading
from typing import TYPE_CHECKING

from tpukit.essentials.display import TpukitRuntimeError

if TYPE_CHECKING:
    from tpukit.essentials.launcher.core import Core

_cores: "dict[int, Core]" = {}  # by thread, because a v2 or v3 chip has two cores in one process


def enter(core: "Core") -> None:
    """Note that the calling thread runs this core from now on."""
    _cores[threading.get_ident()] = core


def leave() -> None:
    """Forget the core of the calling thread."""
    _cores.pop(threading.get_ident(), None)


def find() -> "Core | None":
    """Return the core of the calling thread, or else the only core of the process, or None."""
    core = _cores.get(threading.get_ident())
    if core is None and len(_cores) == 1:
        (core,) = _cores.values()
    return core


def current_core() -> "Core":
    """Return the `Core` of the calling code, anywhere within a worker function.

    In a thread that the worker function has started, it is the process's core, if the process has
    only one.

    Raises:
        TpukitRuntimeError: this process is not a worker, or the thread could belong to either of
            two cores.
    """
    core = find()
    if core is not None:
        return core
    thread = threading.current_thread().name
    if _cores:
        raise TpukitRuntimeError(
            "this thread does not run one of the two cores of this process",
            found=f"{thread}, on a chip with two cores",
            fix="call tpukit.current_core() in the worker function, and pass it to the thread",
        )
    raise TpukitRuntimeError(
        "tpukit.current_core() works only inside a worker function",
        found=f"{thread} of a process that launch did not start",
        fix="tpukit.launch(train), and call it within train(core)",
    )
