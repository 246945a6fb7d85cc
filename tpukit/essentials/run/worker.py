"""The life of a forked worker: cut loose from the kernel, start the device, run the function, say how it went."""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tpukit.essentials.machine import ONE_PROCESS_VARIABLES, OwnMemory, orphans, own_memory, peak_memory
from tpukit.essentials.run import signals, this_core
from tpukit.essentials.run.channel import Sender, Unsendable, serialize
from tpukit.essentials.run.core import Core
from tpukit.essentials.run.failure import device_not_started, exception_raised, sigterm_received, stack_text
from tpukit.essentials.run.notebook_output import forward_displays
from tpukit.essentials.show import Failed, WrongValue

SEND_STACKS, GO, STOP = b"s", b"g", b"e"  # on the control pipe; its end means STOP, too


@dataclass(frozen=True)
class Task:
    """What to run: the worker function, its arguments, the seed of its random numbers, its products' precision."""

    fn: Callable
    args: tuple
    seed: int
    precision: str | None = None

    def __post_init__(self) -> None:
        if self.precision not in (None, "high", "highest"):
            raise WrongValue(
                f"precision is 'high', 'highest', or None for the device's own, got {self.precision!r}",
                fix="for bfloat16 everywhere pass bf16=True to fit, or use torch.autocast",
            )


def seed_of(seed: int | None, hosts: object = None) -> int:
    """Return the seed of a run: that which was given, or the notebook's own, which launches do not use up.

    Of several hosts each has a generator of its own: without a seed it is 0.
    """
    if seed is not None or hosts is not None:
        return seed or 0
    import torch

    return torch.initial_seed()


@dataclass(frozen=True)
class WorkerPipes:
    """What connects a worker process to its kernel.

    Attributes:
        rank: of the first core of this process.
        kernel: the process that forked this one.
        folder: where this process's own processes meet it, removed by the kernel.
        heartbeat: seconds between two signs of life.
        messages: the pipe for `Sender`.
        output: the pipe that standard output and error become.
        control: the pipe of the kernel's commands; it ends when the kernel is gone.
        inherited: the kernel's ends of all pipes, which the fork brought along; to be closed.
    """

    rank: int
    kernel: int
    folder: Path
    heartbeat: float
    messages: int
    output: int
    control: int
    inherited: tuple[int, ...]


def main(task: Task, start: Callable[[Callable], None], pipes: WorkerPipes, world_size: int) -> None:
    """Run in the forked child and never return; `start` starts the device and calls its argument once per core."""
    _cut_loose(pipes)
    worker, signal_pipe = _Worker(pipes), signals.signal_pipe()
    signal.signal(signal.SIGTERM, worker.end)
    forward_displays(worker.sender.send, worker.rank_here)
    threading.Thread(target=worker.obey, args=(signal_pipe,), daemon=True).start()
    threading.Thread(target=worker.beat, daemon=True).start()

    import torch
    from torch.optim import optimizer

    # The kernel's OpenMP threads did not survive the fork, but torch believes they did and would wait for them.
    torch.set_num_threads(1)
    optimizer.register_optimizer_step_pre_hook(_before_step)
    optimizer.register_optimizer_step_post_hook(_after_step)
    try:
        start(lambda backend: run_core(task, backend, worker.sender.send, worker.cores, world_size))
    except BaseException as error:
        # A core that has started reports its own failure, but a signal's handler may raise meanwhile.
        describe = exception_raised if worker.cores else device_not_started
        worker.sender.send(("failed", describe(worker.rank_here(), error)))
    _flush_streams()
    worker.finished.set()
    while True:
        signal.pause()  # others may still need this process's side of a collective: the kernel says when to go


def run_core(
    task: Task,
    backend,
    send: Callable[[object], None],
    cores: list[tuple[Core, int, OwnMemory]],
    world_size: int | None = None,
) -> None:
    """Run the worker function as one core, noted in `cores` with its thread, and send its result or its failure.

    `world_size` is that of the run as it was laid out; None where nothing was.
    """
    import torch

    if task.precision:
        backend.set_precision(task.precision)  # before the first graph: those recorded so far would keep their own
    core = Core(backend, send, task.seed)
    this_core.enter(core)
    memory = OwnMemory()  # what the start of the device took for a moment is not the function's
    cores.append((core, threading.get_ident(), memory))
    send(("started", core.rank))
    send(_memory_of(core, memory))
    try:
        if world_size is not None and core.world_size != world_size:
            raise _not_one_run(core, world_size)
        core.numbers.start()
        # One backward() in the kernel, on any tensor, and the engine that the fork inherits has no thread for a device
        # that is opened here ("device_ready_queues_.size()" in torch 2.8 and 2.9). Without such threads it runs in this
        # one, which loses nothing on XLA: it only records the graph.
        with torch.autograd.set_multithreading_enabled(False):
            result = task.fn(core, *task.args)
        send(("same", core.rank, core.same.at_end()))
        core.flush()
        _flush_streams()  # what was printed without an end of line is on its way before the result is
        try:
            send(_memory_of(core, memory))
            send(("result", core.rank, result))
        except Unsendable:
            serialize(result)  # raises too, and names the part of the result, not of the message
            raise
    except BaseException as error:  # whatever it is, the kernel has to hear of it
        _flush_streams()
        send(("failed", exception_raised(core.rank, error)))
        with contextlib.suppress(Exception):  # last: what was logged may hang on a collective that never comes
            core.flush()
    finally:
        this_core.leave()


def _before_step(optimizer, args: tuple, kwargs: dict) -> None:
    if core := this_core.find():
        core.same.before_step(optimizer, closure=kwargs.get("closure", args[1] if len(args) > 1 else None))
        core.backend.place_state(optimizer)


def _after_step(optimizer, args: tuple, kwargs: dict) -> None:
    if core := this_core.find():
        core.backend.place_state(optimizer)
        core.same.after_step(optimizer)


def _not_one_run(core: Core, world_size: int) -> Failed:
    left = [f"{name}={os.environ[name]}" for name in ONE_PROCESS_VARIABLES if name in os.environ]
    return Failed(
        f"the devices did not become one run: {core.world_size} of its {world_size} cores are joined here",
        found=f"this is rank {core.rank} of {core.world_size} by {type(core.backend).__name__}; {', '.join(left)}",
        fix="the environment of a run on all chips: restart the kernel without variables meant for one process;\n"
        "of several hosts, those of one slice, each with TPU_WORKER_HOSTNAMES, TPU_WORKER_ID and TPU_HOST_BOUNDS",
    )


def _memory_of(core: Core, memory: OwnMemory) -> tuple:
    return "memory", core.rank, peak_memory(), own_memory(), memory.most()


def _flush_streams() -> None:
    with contextlib.suppress(Exception):  # the worker function may have put anything in their place, or closed them
        sys.stdout.flush()
        sys.stderr.flush()


class _Worker:
    """What the threads of a worker process share.

    Attributes:
        cores: each core of this process that has started, with the thread it runs in and its process's memory.
        finished: set when every core has returned or failed.
    """

    def __init__(self, pipes: WorkerPipes):
        self.pipes, self.sender = pipes, Sender(pipes.messages)
        self.cores: list[tuple[Core, int, OwnMemory]] = []
        self.finished = threading.Event()

    def rank_here(self) -> int:
        """Return the rank of the core that runs in the calling thread; of another thread, the process's first."""
        ranks = {thread: core.rank for core, thread, _ in self.cores}
        return ranks.get(threading.get_ident(), min(ranks.values(), default=self.pipes.rank))

    def beat(self) -> None:
        """Send now and then what each core has done, and what it waits for: a heartbeat for the watchdog."""
        with contextlib.suppress(OSError):  # the kernel is gone; the control pipe says so too
            while not self.finished.wait(self.pipes.heartbeat):
                for core, _, memory in self.cores:
                    self.sender.send(_memory_of(core, memory))
                    doing = core.backend.compiling() or core.doing
                    self.sender.send(("alive", core.rank, core.activity, core.waiting, doing))

    def obey(self, signal_pipe: int) -> None:
        """Send stacks when asked, tell of SIGTERM; when told to go or to stop, end the process."""
        pipes = select.poll()  # not select, which refuses descriptors from 1,024 on
        for fd in (self.pipes.control, signal_pipe):
            pipes.register(fd, select.POLLIN | select.POLLHUP)
        while True:
            ready = [fd for fd, _ in pipes.poll()]
            if signal_pipe in ready and signal.SIGTERM in os.read(signal_pipe, 1024) and not self.finished.is_set():
                self._report_sigterm()
            if self.pipes.control in ready:
                command = os.read(self.pipes.control, 1)
                if command != SEND_STACKS:
                    break
                self._send_stacks()
        # The kernel says GO when it has the results, and the main thread may have only just sent the last of them.
        if self.finished.wait(signals.DONE_SECONDS if command == GO else 0):
            os._exit(0)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    def end(self, *_: object) -> None:
        """On SIGTERM, raise `Terminated` in the core that runs in the main thread, if one does."""
        if self.finished.is_set():
            return
        for core, _, _ in self.cores:
            core.end_requested = True
        here = [core for core, thread, _ in self.cores if thread == threading.get_ident()]
        if not self.cores or any(not core.ends_between_steps for core in here):
            raise signals.Terminated

    def _report_sigterm(self) -> None:
        """Report every core, which may sit in native code and hear of SIGTERM late, and unwind those in threads."""
        for core, thread, frame in self._running():
            core.end_requested = True
            if core.ends_between_steps:
                continue
            with contextlib.suppress(OSError):
                self.sender.send(("failed", sigterm_received(core.rank, frame)))
            if thread != threading.main_thread().ident:
                with self.sender.lock:  # not while it writes a message
                    signals.raise_in_thread(thread)

    def _send_stacks(self) -> None:
        stacks = [(core.rank, frame) for core, _, frame in self._running()]
        if not self.cores:  # the device is still on its way up
            stacks = [(self.pipes.rank, sys._current_frames()[threading.main_thread().ident])]
        with contextlib.suppress(OSError):
            for rank, frame in stacks:
                self.sender.send(("stacks", rank, stack_text(frame)))

    def _running(self) -> list[tuple[Core, int, object]]:
        """Return each core with its thread and where that stands; a core that is done may have none left."""
        frames = sys._current_frames()
        return [(core, thread, frames[thread]) for core, thread, _ in self.cores if thread in frames]


def _cut_loose(pipes: WorkerPipes) -> None:
    """Leave everything the kernel had that a worker must not touch: its signals, terminal and pipes."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # the process and its own children can be ended together
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts the whole group; the kernel decides
    signals.die_with_parent(pipes.kernel)
    orphans.mark(pipes.kernel)
    signals.tie_children()
    for fd in pipes.inherited:
        os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(pipes.output, 1)
    os.dup2(pipes.output, 2)
    # From a fork, ipykernel's own streams lose lines and mix them; plain files on the pipe do not.
    before = sys.stdout, sys.stderr
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    _redirect_logging(before, (sys.stdout, sys.stderr))
    faulthandler.enable(file=sys.stderr)
    _refuse_questions()
    # A DataLoader's processes hand tensors over through sockets in a folder that nobody removes if they are killed.
    multiprocessing.current_process()._config["tempdir"] = str(pipes.folder)
    os.environ.setdefault("JOBLIB_TEMP_FOLDER", str(pipes.folder))  # not /dev/shm, for the same reason


def _redirect_logging(before: tuple, after: tuple) -> None:
    """Let the log handlers that the notebook has made write where this process prints, so that lines name the core."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {handler for logger in loggers for handler in getattr(logger, "handlers", ())}:
        for old, new in zip(before, after, strict=True):
            if getattr(handler, "stream", None) is old:
                handler.stream = new  # not setStream, which flushes the old one


def _refuse_questions() -> None:
    """Make input(), getpass() and breakpoint() raise: ipykernel's own, which the fork brought along, never return."""
    import builtins
    import getpass

    def refuse(*_: object, **__: object) -> None:
        raise EOFError(
            "a worker cannot ask: nobody sees its question, and several cores would ask at once; "
            "ask in the notebook and pass the answer as an argument of launch, or look at values with core.print"
        )

    builtins.input = getpass.getpass = sys.breakpointhook = refuse
