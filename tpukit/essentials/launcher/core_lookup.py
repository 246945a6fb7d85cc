"""Which core the calling code runs on: for code that is deep within a worker function and was not handed its core."""

import threading

from tpukit.essentials.display import TpukitRuntimeError

_cores: dict[int, object] = {}  # by thread: a v2 or v3 chip has two cores in one process


def enter(core: object) -> None:
    """Note that the calling thread is this core's from here on."""
    _cores[threading.get_ident()] = core


def leave() -> None:
    """Forget the core of the calling thread."""
    _cores.pop(threading.get_ident(), None)


def find():
    """Return the core of the calling thread, or the only one of the process; None where there is none."""
    return _cores.get(threading.get_ident()) or (next(iter(_cores.values())) if len(_cores) == 1 else None)


def current_core():
    """Return the `Core` that the calling code runs on, from anywhere within a worker function.

    From a thread of the worker's own it is the process's core, where there is only one.

    Raises:
        TpukitRuntimeError: this is no worker.
    """
    if found := find():
        return found
    if _cores:
        raise TpukitRuntimeError(
            "this thread is none of the two cores that this process has",
            found=f"{threading.current_thread().name}, on a chip with two cores",
            fix="ask for tpukit.current_core() in the worker function, and hand it to the thread",
        )
    raise TpukitRuntimeError(
        "tpukit.current_core() is what a worker function runs on, and this is none",
        found=f"{threading.current_thread().name} of a process that launch did not start",
        fix="tpukit.launch(train), and call it within train(core)",
    )
