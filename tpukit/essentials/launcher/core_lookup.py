"""Find the core that the calling code runs on, for code that was not passed its `Core`."""

import threading
from typing import TYPE_CHECKING

from tpukit.essentials.display import TpukitRuntimeError

if TYPE_CHECKING:
    from tpukit.essentials.launcher.core import Core

_cores: "dict[int, Core]" = {}  # by thread, because a v2 or v3 chip has two cores in one process


def enter(core: "Core") -> None:
    """Record that the calling thread runs this core from now on."""
    _cores[threading.get_ident()] = core


def leave() -> None:
    """Forget the core of the calling thread."""
    _cores.pop(threading.get_ident(), None)


def find() -> "Core | None":
    """Return the calling thread's core, else the process's only core; None if it has neither."""
    core = _cores.get(threading.get_ident())
    if core is None and len(_cores) == 1:  # a thread that the worker function has started
        (core,) = _cores.values()
    return core


def current_core() -> "Core":
    """Return the `Core` of the calling code, anywhere inside a worker function.

    In a thread that the worker function has started, it returns the only core of the process.

    Raises:
        TpukitRuntimeError: this process is not a worker. Or the worker function has started this
            thread, and the process has two cores (v2 and v3).
    """
    core = find()
    if core is not None:
        return core
    thread = threading.current_thread().name
    if _cores:
        raise TpukitRuntimeError(
            "tpukit.current_core() cannot tell to which of the process's two cores this thread "
            "belongs",
            found=f"{thread}, on a chip with two cores",
            fix="pass the core of the worker function to the thread: "
            "threading.Thread(target=..., args=(core,))",
        )
    raise TpukitRuntimeError(
        "tpukit.current_core() works only inside a worker function",
        found=f"{thread} of a process that launch did not start",
        fix="make this call in a worker function, train(core), which runs on every core with: "
        "tpukit.launch(train)",
    )
