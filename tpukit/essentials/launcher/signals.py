"""How a run is ended: SIGTERM's protocol, who hears which signal, and every grace time.

A platform that takes its machine back sends SIGTERM to the kernel, and SIGKILL some seconds later. An interrupt of the
cell ends a run in the same way, and so does the failure of a core:

1. In the kernel, `sigterm_ends_the_run` raises `Terminated`; an interrupt is a KeyboardInterrupt as ever.
2. The kernel sends SIGTERM to every worker process that has not returned, not to that process's own children: it may
   need them to end its step.
3. In a worker, the thread that reads the signal pipe tells the kernel where each core stood, since a main thread in
   native code would hear of it late. `Terminated` is then raised in the worker function, so that its `finally` blocks
   run; unless the function ends between steps (`Core.finishing_steps`, as `fit` does), which only sets `end_requested`.
4. The kernel waits `END_SECONDS`; for core 0, where it ends between steps and saves, up to `SAVE_SECONDS`.
5. The kernel says so on the control pipes and closes them: a worker that is done exits, any other kills itself and its
   children. One whose result has just come is given `DONE_SECONDS` to be done.
6. What is left after another `END_SECONDS` is killed, with its process group.

A worker ignores SIGINT, which Jupyter sends to the whole process group: only the kernel decides. A worker whose kernel
dies, however it dies, is killed by Linux (PR_SET_PDEATHSIG) and sees the end of its control pipe.
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator

DONE_SECONDS = 2.0  # for a worker whose result is here, and which has nothing left to do
END_SECONDS = 1.0  # for the `finally` blocks of workers told to end
SAVE_SECONDS = 8.0  # for core 0 to end its step and save, where it said that it would
STEP_SECONDS = 5.0  # of these, for the other cores to stay with core 0, which may have a step to finish
FAILURE_SECONDS = 0.5  # for a failure that happened earlier and is still in its pipe
# For a failure in a collective: the core that left the others there is heard of a moment later.
FAILURE_IN_A_COLLECTIVE_SECONDS = 2.0
STACKS_SECONDS = 2.0  # for the cores of a run that hangs to say where they stand
INTERRUPT_STACKS_SECONDS = 0.5  # the same for a run that is interrupted, whose user waits

_PR_SET_PDEATHSIG = 1
# Heard by children of threads, sent by Linux alone; ignored where a program that the child becomes does not know it.
_THREAD_ENDED = getattr(signal, "SIGURG", signal.SIGTERM)


class Terminated(BaseException):
    """SIGTERM arrived: unwinds the worker function, so that its `finally` blocks run."""


@contextlib.contextmanager
def sigterm_ends_the_run() -> Iterator[None]:
    """Raise `Terminated` where SIGTERM would end this process on the spot, and let it end afterwards."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
    """Put SIGINT and SIGTERM off to the end of the block; only the main thread gets any.

    Blocking them would not do: another thread of the process would take them, and Python tell the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if callable(handler)}  # others do not raise
    try:
        for number in before:
            signal.signal(number, lambda number, _: arrived.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent dies: a worker that outlives its kernel holds the chip for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before Linux could be asked
        os._exit(1)


def _die_with_process(parent: int) -> None:
    """Do the same in a child of a thread: Linux signals the end of that thread, which may end before its process."""

    def end(*_: object) -> None:
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    if sys.platform == "linux":
        signal.signal(_THREAD_ENDED, end)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _THREAD_ENDED)
    end()


def tie_children() -> None:
    """Have processes that this one forks, a DataLoader's or a pool's, die with it, and hear none of its signals.

    Nor do they tear down what it has let go of: that may wait for a thread which they do not have.

    SIGTERM is blocked across the fork. A pool ends its processes by it, some within their first moment, when they
    still have this worker's handler and write into its signal pipe: the worker would believe that it was meant.
    """
    fork = threading.local()  # threads may fork at the same time

    def before() -> None:
        fork.parent = os.getpid()
        fork.is_main = threading.current_thread() is threading.main_thread()
        fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, fork.mask)

    def in_child() -> None:
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
    """Return a pipe on which the number of every signal arrives that Python handles, whatever the main thread does.

    Without it, a SIGTERM that the system hands to another thread does not wake a main thread that sleeps or compiles.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


@contextlib.contextmanager
def children_heard() -> Iterator[None]:
    """Let handlers of SIGCHLD raise inside this block only.

    PyTorch installs a handler that raises when a process of a DataLoader was killed. After the worker function has
    ended, it would interrupt the message that says how the function ended.
    """
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def raise_in_thread(thread: int) -> None:
    """Raise `Terminated` in another thread of this process, as soon as it runs Python again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Terminated))
