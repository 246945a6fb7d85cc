"""The life of a forked worker: cut loose from the kernel, start the device, run the function, say how it went."""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import random
import select
import shutil
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tpukit.distributed.channel import Sender, Unsendable, pack, unpack
from tpukit.distributed.core import Core
from tpukit.machine import orphans
from tpukit.machine.resources import peak_memory

_HOME = str(Path(__file__).parents[1])  # the kit: errors blame the line of whoever called it
_PR_SET_PDEATHSIG = 1
_TERMINATED = "was told to end by SIGTERM"
SEND_STACKS = b"s"  # on the control pipe


@dataclass(frozen=True)
class Task:
    """What to run: the worker function, its arguments, and the seed of its random numbers."""

    fn: Callable
    args: tuple
    seed: int


@dataclass(frozen=True)
class Failure:
    """How one core failed, told by itself or, if it could not, by the kernel.

    Attributes:
        rank: of the core.
        when: `time.monotonic()`, one clock for all processes of a machine.
        what: "raised KeyError: 'a'", "was killed by SIGKILL".
        waiting: the collective it was in, so the failure is probably another core's.
        where: (file, line, function) of the innermost line that is not a library's.
        trace: the traceback, or whatever else shows what happened, as text.
        title: what `trace` is.
        error: the exception itself where it survives pickling.
        fix: what to do, where that is known.
    """

    rank: int
    when: float
    what: str
    waiting: str | None = None
    where: tuple[str, int, str] | None = None
    trace: str = ""
    title: str = "its traceback"
    error: BaseException | None = None
    fix: str = "correct that line and run the cell again; the kernel need not be restarted"


class Terminated(BaseException):
    """SIGTERM arrived: unwinds the worker function, so that its `finally` blocks run."""


@dataclass(frozen=True)
class WorkerPipes:
    """What ties a worker to its kernel.

    Attributes:
        rank: of the first core of this process.
        kernel: the process that forked this one.
        folder: where this process's own processes meet it, removed by the kernel.
        heartbeat: seconds between two signs of life.
        messages: the pipe for `Sender`.
        output: the pipe that standard output and error become.
        control: a pipe on which the kernel asks for stacks, and which ends when it wants this process gone or is gone.
        others: the kernel's ends of all pipes, inherited by the fork; to be closed.
    """

    rank: int
    kernel: int
    folder: Path
    heartbeat: float
    messages: int
    output: int
    control: int
    others: tuple[int, ...]


def main(task: Task, start: Callable[[Callable], None], ties: WorkerPipes) -> None:
    """Run in the forked child and never return; `start` starts the device and calls its argument once a core."""
    _cut_loose(ties)
    sender, cores, finished = Sender(ties.messages), [], threading.Event()
    signals = _hear_signals()
    signal.signal(signal.SIGTERM, lambda *_: _unwind(finished, cores))
    threading.Thread(target=_obey, args=(ties, signals, finished, sender, cores), daemon=True).start()
    threading.Thread(target=_beat, args=(ties.heartbeat, finished, sender, cores), daemon=True).start()

    import torch

    # The kernel's OpenMP threads did not survive the fork, but torch believes they did and would wait for them.
    torch.set_num_threads(1)
    try:
        start(lambda backend: run_core(task, backend, sender.send, cores))
    except BaseException as error:  # the device did not start: no core is there to say so
        sender.send(("failed", _failure(ties.rank, error, waiting=None)))
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    finished.set()
    while True:
        signal.pause()  # others may still need this process's side of a collective: the kernel says when to go


def run_core(task: Task, backend, send: Callable[[object], None], cores: list) -> None:
    """Run the worker function as one core, noted in `cores` with its thread, and send its result or its failure."""
    import torch

    core = Core(backend, send, task.seed)
    cores.append((core, threading.get_ident()))
    try:
        torch.manual_seed(task.seed + core.rank)
        random.seed(task.seed + core.rank)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed((task.seed + core.rank) % 2**32)
        backend.seed(task.seed + core.rank)
        result = task.fn(core, *task.args)
        core.flush()
        try:
            send(("result", core.rank, result, peak_memory()))
        except Unsendable:
            pack(result)  # raises too, and names the part of the result, not of the message
            raise
    except BaseException as error:  # whatever it is, the kernel has to hear of it
        send(("failed", _failure(core.rank, error, core.waiting)))
        with contextlib.suppress(Exception):  # last: what was logged may hang on a collective that never comes
            core.flush()


def _cut_loose(ties: WorkerPipes) -> None:
    """Leave everything the kernel had that a worker must not touch: its signals, terminal and pipes."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # the process and its own children can be ended together
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts the whole group; the kernel decides
    _die_with_parent()
    if os.getppid() != ties.kernel:  # it died before it could be asked
        os._exit(1)
    orphans.mark(ties.kernel)
    _tie_grandchildren()
    for fd in ties.others:
        os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(ties.output, 1)
    os.dup2(ties.output, 2)
    # From a fork, ipykernel's own streams lose lines and mix them; plain files on the pipe do not.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)
    # A DataLoader's processes hand tensors over through sockets in a folder that nobody removes if they are killed.
    multiprocessing.current_process()._config["tempdir"] = str(ties.folder)


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent dies: a worker that outlives its kernel holds the chip for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _tie_grandchildren() -> None:
    """Have processes that this one forks, a DataLoader's, die with it, and hear none of its signals."""
    parent = [0]

    def begin() -> None:
        _die_with_parent()
        if os.getppid() != parent[0]:  # it died before it could be asked
            os._exit(1)
        signal.set_wakeup_fd(-1)

    os.register_at_fork(before=lambda: parent.__setitem__(0, os.getpid()), after_in_child=begin)


def _hear_signals() -> int:
    """Return a pipe on which the number of every signal arrives that Python handles, whatever the main thread does."""
    signals, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    return signals


def _obey(ties: WorkerPipes, signals: int, finished: threading.Event, sender: Sender, cores: list) -> None:
    """Send stacks when asked, tell of SIGTERM; at the end of the control pipe go, quietly if the work is done."""
    while True:
        ready, _, _ = select.select([ties.control, signals], [], [])
        if signals in ready and signal.SIGTERM in os.read(signals, 1024) and not finished.is_set():
            _tell_of_the_end(sender, cores)
        if ties.control in ready:
            if os.read(ties.control, 1) != SEND_STACKS:
                break
            frames = sys._current_frames()
            started = [(core.rank, thread) for core, thread in cores]
            with contextlib.suppress(OSError):
                for rank, thread in started or [(ties.rank, threading.main_thread().ident)]:
                    sender.send(("stacks", rank, _stack(frames[thread])))
    if finished.is_set():
        os._exit(0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _beat(seconds: float, finished: threading.Event, sender: Sender, cores: list) -> None:
    """Tell the kernel now and then what the cores of this process have done, and what they wait for."""
    with contextlib.suppress(OSError):  # the kernel is gone; the control pipe says so too
        while not finished.wait(seconds):
            for core, _ in cores:
                sender.send(("alive", core.rank, core.activity, core.waiting, peak_memory()))


def _unwind(finished: threading.Event, cores: list) -> None:
    """On SIGTERM, raise `Terminated` in the core that runs in the main thread, if one does."""
    if finished.is_set():
        return
    for core, _ in cores:
        core.told_to_end = True
    here = [core for core, thread in cores if thread == threading.get_ident()]
    if not cores or any(not core.ends_between_steps for core in here):
        raise Terminated


def _tell_of_the_end(sender: Sender, cores: list) -> None:
    """Tell of SIGTERM for every core, which may sit in native code and hear of it late, and unwind those in threads."""
    frames = sys._current_frames()
    for core, thread in cores:
        core.told_to_end = True
        if core.ends_between_steps:
            continue
        told = Failure(core.rank, time.monotonic(), _TERMINATED, trace=_stack(frames[thread]), title="where it stood")
        with contextlib.suppress(OSError):
            sender.send(("failed", told))
        if thread != threading.main_thread().ident:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Terminated))


def _failure(rank: int, error: BaseException, waiting: str | None) -> Failure:
    when = time.monotonic()
    if isinstance(error, Unsendable):
        fix = "return tensors, arrays, numbers and containers of them"
        return Failure(rank, when, f"returned something that cannot leave its process: {error}", fix=fix)
    steps = error.__traceback__
    while steps and steps.tb_frame.f_code.co_filename.startswith(_HOME) and steps.tb_next:
        steps = steps.tb_next  # the reader wants their own function first
    trace = "".join(traceback.format_exception(type(error), error, steps))
    if isinstance(error, SystemExit):
        what = f"called sys.exit({error.code!r}) before it returned a result"
    elif isinstance(error, Terminated):
        what = _TERMINATED
    else:
        what = f"raised {type(error).__name__}: {_in_a_line(error)}".removesuffix(": ")
    fix = _fix_of_a_dead_loader() if "DataLoader worker (pid" in what else Failure.fix
    return Failure(rank, when, what, waiting, where=_where(error), trace=trace, error=_survivor(error), fix=fix)


def _fix_of_a_dead_loader() -> str:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return (
        f"a DataLoader process was killed: host memory, or /dev/shm, which has {free / 2**20:,.0f} MiB free;\n"
        "         workers=0, a smaller batch_size, or a container with more shared memory"
    )


def _in_a_line(error: BaseException) -> str:
    """Return what an exception says, its notes too; of many lines, as a DataLoader's process sends, first and last."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) > 3:
        lines = [lines[0], "...", "; ".join(lines[-2:])]
    return " ".join([*lines, *(f"({note})" for note in getattr(error, "__notes__", []))])


def _stack(frame: object) -> str:
    """Return where a core stands, from the worker function on."""
    steps = traceback.extract_stack(frame)
    above = [index for index, step in enumerate(steps) if step.filename == __file__]
    return "".join(traceback.format_list(steps[max(above, default=-1) + 1 :]))


def _where(error: BaseException) -> tuple[str, int, str] | None:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and _HOME not in frame.filename]
    own = [frame for frame in own if not frame.filename.startswith((sysconfig.get_path("stdlib"), "<frozen"))]
    return (own[-1].filename, own[-1].lineno or 0, own[-1].name) if own else None


def _survivor(error: BaseException) -> BaseException | None:
    """Return the exception if the kernel will be able to unpickle it: many cannot be built from their `args`."""
    try:
        again = unpack([bytearray(part) for part in pack(error)])
    except Exception:  # an exception class may do anything in __reduce__ and __init__
        return None
    return error if type(again) is type(error) else None
