"""How a run ends: the protocol of SIGTERM, the handlers of signals, and every grace time.

A platform that reclaims its machine sends SIGTERM to the kernel, and SIGKILL some seconds later. An
interrupt of the cell and the failure of a core end a run by the same steps:

1. In the kernel `sigterm_ends_the_run` raises `Terminated`; an interrupt is a KeyboardInterrupt.
2. The kernel sends SIGTERM to every worker process that has not returned. It does not signal that
   process's children, because the process may need them to end its step.
3. In a worker, the thread that reads the signal pipe sends the stack of each core to the kernel,
   because a main thread in native code would handle the signal late. Then `Terminated` is raised in
   the worker function, so that its `finally` blocks run. If the function ends between steps
   (`core.internal.finishing_steps`, as `fit` does), only `end_requested` is set.
4. The kernel waits `END_SECONDS`; if core 0 ends between steps and saves, up to `SAVE_SECONDS`.
5. The kernel sends the last command on the control pipes and closes them. A worker that has
   finished exits; any other worker kills itself and its children. A worker whose result has just
   arrived has `DONE_SECONDS` to finish.
6. After another `END_SECONDS` the kernel kills every remaining process, with its process group.

A worker ignores SIGINT, which Jupyter sends to the whole process group, because only the kernel
decides how a run ends. In a session a worker sends SIGINT to itself when the kernel commands it,
which stops the run and not the process (`session_worker`). A core that is a thread, as on v2 and
v3, gets an exception instead (`raise_in_thread`). If the kernel dies, Linux kills the worker
(PR_SET_PDEATHSIG), and the worker also sees the end of its control pipe.
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator

DONE_SECONDS = 2.0  # for a worker to exit after its result has come
END_SECONDS = 1.0  # for the `finally` blocks of workers that got SIGTERM
SAVE_SECONDS = 8.0  # for core 0 to end its step and save, if it has announced that
# The first part of SAVE_SECONDS: until then the other cores stay, because core 0 needs them in the
# collectives of its step.
STEP_SECONDS = 5.0
FAILURE_SECONDS = 0.5  # for the report of an earlier failure, which is still in its pipe
# The same after a failure in a collective. Its cause is another core, which may report later.
FAILURE_IN_A_COLLECTIVE_SECONDS = 2.0
STACKS_SECONDS = 2.0  # for the cores of a run that hangs to send their stacks
INTERRUPT_STACKS_SECONDS = 0.5  # the same for an interrupted run, because its user waits

_PR_SET_PDEATHSIG = 1
# The signal that children get when the thread that forked them ends. SIGURG, because a program that
# the child executes ignores it by default.
_THREAD_ENDED = getattr(signal, "SIGURG", signal.SIGTERM)


class Terminated(BaseException):
    """An exception that ends the worker function on SIGTERM, so that `finally` blocks run.

    `Terminated` is not an `Exception`, so `except Exception` does not catch it.
    """


@contextlib.contextmanager
def sigterm_ends_the_run() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM in the block, then end the process by SIGTERM.

    If the user has set a handler of SIGTERM, it remains in effect.
    """
    # Only the main thread can set handlers.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends the process at once
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Terminated:
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Postpone SIGINT and SIGTERM to the end of the block, if it runs in the main thread.

    In another thread the block has no effect, because Python handles signals in the main thread.
    """
    # Not with `signal.pthread_sigmask`: another thread of the process would take the signal, and
    # Python would run the handler in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_open = True
    arrived = []
    before = {}

    def postpone(number: int, frame) -> None:
        if is_open:
            arrived.append(number)
        else:
            # A handler of another signal may have raised an error before this one was restored.
            before[number](number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        handler = signal.getsignal(number)
        if callable(handler):  # SIG_IGN and SIG_DFL raise nothing
            before[number] = handler
    try:
        # Inside of `try`, because a signal may arrive between the two calls.
        for number in before:
            signal.signal(number, postpone)
        yield
    finally:
        is_open = False
        for number, handler in before.items():
            signal.signal(number, handler)
        # SIGTERM first: if its handler raises an error, the interrupt is no longer needed.
        for number in before:
            if number in arrived:
                signal.raise_signal(number)


def die_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent dies, so that the chip becomes free.

    Args:
        parent: the process ID of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def _die_with_process(parent: int) -> None:
    """End this process with its parent, if a thread of the parent has forked it.

    Linux signals the end of the thread, which may end before its process does.
    """

    def end(*_: object) -> None:
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    if sys.platform == "linux":
        signal.signal(_THREAD_ENDED, end)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _THREAD_ENDED)
    end()


def tie_children() -> None:
    """Let later forks of this process, such as a DataLoader's processes, end with this process.

    The forks get the default handler of SIGTERM.
    """
    fork = threading.local()  # threads may fork at the same time

    def before() -> None:
        fork.parent = os.getpid()
        fork.is_main = threading.current_thread() is threading.main_thread()
        # A pool ends its processes with SIGTERM, some of them right after their fork. Such a
        # process would still have this worker's handler, and would write into the worker's signal
        # pipe as if the worker itself had got the signal.
        fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, fork.mask)

    def in_child() -> None:
        # Destroying an inherited object may wait for a thread that the fork does not have.
        gc.freeze()
        if fork.is_main:
            die_with_parent(fork.parent)
        else:
            _die_with_process(fork.parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, fork.mask)

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def signal_pipe() -> int:
    """Return a pipe into which Python writes the number of every signal.

    A thread that reads the pipe reacts to SIGTERM even while the main thread sleeps or compiles.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


@contextlib.contextmanager
def sigchld_reset_after() -> Iterator[None]:
    """Reset the handler of SIGCHLD after the block; do nothing on Windows, which has no SIGCHLD.

    PyTorch installs a handler that raises an error when a process of a DataLoader was killed. After
    the worker function, that error would interrupt this process while it sends the result.
    """
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def raise_in_thread(thread: int, exception: type[BaseException] | None = Terminated) -> None:
    """Raise an exception in another thread of this process, when that thread next runs Python.

    Args:
        thread: `threading.get_ident()` of the thread.
        exception: the class; None to cancel an exception that has not been raised yet.
    """
    value = ctypes.py_object()  # NULL
    if exception is not None:
        value = ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)
