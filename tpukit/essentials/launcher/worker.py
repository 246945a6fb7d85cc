"""The life of a forked worker process.

    main       detach from the kernel, start the device, and then for each core of the process:
    run_core     make the `Core`
    run_function   run the worker function, send its result or its failure

In a session the worker function is `session_worker.serve`, which runs one function after the other.
Two more threads run in the process: the first sends heartbeats, the second obeys the kernel's
commands. A worker does not exit after its result, because other cores may still need its process in
a collective. It waits for a command on the control pipe, or for the end of the pipe if the kernel
has died.
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.backends import Topology
from tpukit.essentials.display import InvalidValueError, TpukitRuntimeError, check_count
from tpukit.essentials.environment import (
    GENERATIONS,
    ONE_PROCESS_VARIABLES,
    OwnMemory,
    orphans,
    own_memory,
    peak_memory,
)
from tpukit.essentials.launcher import core_lookup, messages, signals
from tpukit.essentials.launcher.channel import Sender, SerializationError, serialize
from tpukit.essentials.launcher.core import Core
from tpukit.essentials.launcher.failure import (
    device_not_started,
    exception_raised,
    sigterm_received,
    stack_text,
)
from tpukit.essentials.launcher.notebook_output import forward_displays
from tpukit.essentials.launcher.watchdog import refuse_seconds

# A command on the control pipe, and its number. The end of the pipe means STOP.
COMMAND = struct.Struct("!cQ")
SEND_STACKS = b"s"
GO = b"g"  # exit as soon as the work is done
STOP = b"e"  # exit now, with all child processes
# Commands of a session.
RUN = b"r"  # run the function of this number
LIMIT = b"l"  # pass this number of boundaries in all, wait at the next; report as `messages.At`
END = b"d"  # to cores that all wait at the limit: as RAISE, but `fit` runs a step and saves
RAISE = b"x"  # leave the worker function by an exception


@dataclass(frozen=True)
class Task:
    """The work of a run.

    Attributes:
        fn: the worker function.
        args: its arguments after the core.
        seed: the seed of all random numbers.
        matmul_precision: the precision of matrix products, as `launch` documents.
        timeout: seconds after which tpukit ends the run; None for no limit.
    """

    fn: Callable
    args: tuple
    seed: int
    matmul_precision: str | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None:
            refuse_seconds("timeout", self.timeout, fix="timeout=3600, or None for no limit")
        if self.matmul_precision not in (None, "high", "highest"):
            raise InvalidValueError(
                "matmul_precision must be 'high', 'highest', or None for the device's own, "
                f"got {self.matmul_precision!r}",
                fix="matmul_precision='highest'; for bfloat16 everywhere pass bf16=True to fit, or "
                "use torch.autocast",
            )


class World(NamedTuple):
    """The planned size of a run.

    Attributes:
        size: number of cores on all hosts.
        hosts: number of hosts.
        peak_tflops: as `Core.peak_tflops`.
    """

    size: int
    hosts: int = 1
    peak_tflops: float | None = None

    @classmethod
    def of(cls, topology: Topology) -> "World":
        """Return the world of a layout."""
        hosts = topology.hosts.count if topology.hosts else 1
        kind = GENERATIONS.get(topology.generation)
        peak = None
        # A simulated TPU has a generation, too, but its peak would mean nothing.
        if kind is not None and not topology.is_dry_run:
            peak = kind.teraflops or None
        return cls(topology.world_size, hosts=hosts, peak_tflops=peak)


def seed_of(seed: int | None, hosts: object = None) -> int:
    """Return the seed of a run: the given one, otherwise the notebook's.

    A launch does not change the notebook's seed. With several hosts the default is 0, because the
    notebook of each host may have a different seed.

    Raises:
        InvalidTypeError, InvalidValueError: the given seed is no whole number of 0 or more.
    """
    if seed is not None:
        check_count("seed", seed, least=0)
        return int(seed)
    if hosts is not None:
        return 0
    import torch

    return torch.initial_seed()


@dataclass(frozen=True)
class WorkerPipes:
    """The connections of a worker process with its kernel.

    Attributes:
        rank: the expected rank of the first core of this process.
        kernel: the process ID of the kernel, which forked this process.
        folder: a folder for sockets and files of this process's children; the kernel removes it.
        heartbeat: seconds between two heartbeats.
        messages: file descriptor of the pipe for `Sender`.
        output: file descriptor of the pipe for standard output and error.
        control: file descriptor of the pipe with the kernel's commands. The pipe closes when the
            kernel ends.
        inherited: file descriptors of the kernel's ends of all pipes. The fork has copied them, and
            the worker closes its copies.
    """

    rank: int
    kernel: int
    folder: Path
    heartbeat: float
    messages: int
    output: int
    control: int
    inherited: tuple[int, ...]


class StartedCore(NamedTuple):
    """A core of this process that has started."""

    core: Core
    thread: int  # `threading.get_ident()` of the core's thread
    memory: OwnMemory


def main(task: Task, start: Callable[[Callable], None], pipes: WorkerPipes, world: World) -> None:
    """Run a worker process, and never return; called in the forked child.

    Args:
        task: the work.
        start: a function that starts the device. It takes another function, and calls that function
            once per core, with a `Backend`.
        pipes: the connections with the kernel.
        world: the planned number of cores and hosts.
    """
    global _this_worker
    _detach(pipes)
    worker = _Worker(pipes)
    _this_worker = worker
    signal_pipe = signals.signal_pipe()
    signal.signal(signal.SIGTERM, worker.end)
    forward_displays(worker.sender.send, worker.rank_here)
    threading.Thread(target=worker.obey, args=(signal_pipe,), daemon=True).start()
    threading.Thread(target=worker.beat, daemon=True).start()

    import torch
    from torch.optim import optimizer

    # The kernel's OpenMP threads did not survive the fork, but torch would wait for them.
    torch.set_num_threads(1)
    optimizer.register_optimizer_step_pre_hook(_before_step)
    optimizer.register_optimizer_step_post_hook(_after_step)
    send = worker.sender.send
    try:
        start(lambda backend: run_core(task, backend, send=send, cores=worker.cores, world=world))
    except BaseException as error:
        # After the device's start, `run_function` catches every error of the worker function. So
        # this one comes from a signal handler.
        if worker.cores:
            failure = exception_raised(worker.rank_here(), error)
        else:
            failure = device_not_started(pipes.rank, error)
        send(messages.CoreFailed(failure))
    _flush_streams()
    worker.finished.set()
    while True:
        signal.pause()  # `obey` ends the process


def run_core(
    task: Task,
    backend,
    *,
    send: Callable[[object], None],
    cores: list[StartedCore],
    world: World | None = None,
) -> None:
    """Run the worker function as a core, and send its result or its failure.

    Args:
        task: the work.
        backend: the core's device and collectives.
        send: sends a message to the kernel.
        cores: the list of the process's started cores, to which this function adds the core.
        world: the planned number of cores and hosts; None if it is not known.
    """
    import torch

    if task.matmul_precision:
        # Before the first graph, because recorded graphs keep their own precision.
        backend.set_precision(task.matmul_precision)
    core = Core(backend, send, task.seed)
    core_lookup.enter(core)
    memory = OwnMemory()  # after the device's start, whose peak must not count
    cores.append(StartedCore(core, threading.get_ident(), memory))
    send(messages.Started(core.rank))

    def begin(core: Core, *args: object) -> object:
        if world is not None:
            _refuse_another_world(core, world)
            core.hosts = world.hosts
            core.peak_tflops = world.peak_tflops
        core.internal.numbers.start()
        # If the kernel has called backward() on any tensor, the autograd engine that the fork
        # inherits has no thread for a device that the worker opens, and torch raises an error about
        # "device_ready_queues_.size()" (torch 2.8 and 2.9). Without multithreading, backward() runs
        # in this thread. On XLA that costs nothing, because backward() only records the graph.
        with torch.autograd.set_multithreading_enabled(False):
            return task.fn(core, *args)

    try:
        run_function(core, memory, begin, task.args)
    finally:
        core_lookup.leave()


def run_function(core: Core, memory: OwnMemory, fn: Callable, args: tuple = ()) -> bool:
    """Run a function on a core, and send its result or its failure to the kernel.

    Args:
        core: the core, which is the first argument of `fn`.
        memory: the measurement of the process's memory.
        fn: the function.
        args: its arguments after the core.

    Returns:
        True if `fn` returned and its result was sent, False after an exception.
    """
    send = core.internal.send
    send(_memory_of(core, memory))
    try:
        with signals.sigchld_reset_after():
            result = fn(core, *args)
        agreement = core.internal.agreement
        alone = agreement.has_trained_alone()
        send(messages.StateAtEnd(core.rank, agreement.state_at_end(), alone))
        core.flush()
        _flush_streams()  # before the result, so that a last line without an end is not lost
        send(_memory_of(core, memory))
        _send_result(core, result, send)
    except BaseException as error:  # the kernel must know of every exception
        _flush_streams()
        send(messages.CoreFailed(exception_raised(core.rank, error)))
        # After the failure is sent, because logged tensors may wait forever for a collective.
        with contextlib.suppress(Exception):
            core.flush()
        return False
    return True


def _refuse_another_world(core: Core, world: World) -> None:
    """Raise an error if the devices of the run did not find each other.

    Otherwise each core would train a separate model without an error.
    """
    if core.world_size == world.size:
        return
    evidence = [f"rank {core.rank} of {core.world_size} by {type(core.backend).__name__}"]
    for name in ONE_PROCESS_VARIABLES:
        if name in os.environ:
            evidence.append(f"{name}={os.environ[name]}")
    if world.hosts > 1:
        evidence.append(f"a run over {world.hosts} hosts")
        fix = (
            "launch on the hosts of one slice, each with its TPU_WORKER_HOSTNAMES, TPU_WORKER_ID "
            "and TPU_HOST_BOUNDS, and without variables meant for one process"
        )
    else:
        fix = "restart the kernel without variables that are meant for one process"
    raise TpukitRuntimeError(
        f"the devices did not join one run: only {core.world_size} of its {world.size} cores "
        "are connected here",
        found=", ".join(evidence),
        fix=fix,
    )


def _send_result(core: Core, result: object, send: Callable[[object], None]) -> None:
    try:
        send(messages.Result(core.rank, result))
    except SerializationError:
        # This raises an error that names the part of the result, not of the message.
        serialize(result)
        raise


def _before_step(optimizer, args: tuple, kwargs: dict) -> None:
    """Check an optimizer before its step; torch calls this hook for every optimizer."""
    core = core_lookup.find()
    if core is None:
        return
    closure = kwargs.get("closure")
    if "closure" not in kwargs and len(args) > 1:
        closure = args[1]
    core.internal.agreement.before_step(optimizer, closure=closure)
    # Before the step for a loaded state, and after it for the state that the first step creates.
    core.backend.place_state(optimizer)


def _after_step(optimizer, args: tuple, kwargs: dict) -> None:
    """Count a step of an optimizer; torch calls this hook for every optimizer."""
    core = core_lookup.find()
    if core is None:
        return
    core.backend.place_state(optimizer)
    core.internal.agreement.after_step(optimizer)


def _memory_of(core: Core, memory: OwnMemory) -> messages.Memory:
    return messages.Memory(core.rank, peak=peak_memory(), own=own_memory(), most=memory.most())


def _flush_streams() -> None:
    # The worker function may have replaced or closed them.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


class _Worker:
    """The state that the threads of a worker process share.

    Attributes:
        cores: the cores of this process that have started.
        finished: set when every core has returned or failed; a session clears it for each run.
        on_command: functions, one per core, that are called with each command of a session and
            its number, in the thread that reads commands.
    """

    def __init__(self, pipes: WorkerPipes):
        self.pipes = pipes
        self.sender = Sender(pipes.messages)
        self.cores: list[StartedCore] = []
        self.finished = threading.Event()
        self.on_command: list[Callable[[bytes, int], None]] = []

    def rank_here(self) -> int:
        """Return the rank of the core in this thread, else the lowest rank of the process."""
        ranks = {started.thread: started.core.rank for started in self.cores}
        first = min(ranks.values(), default=self.pipes.rank)
        return ranks.get(threading.get_ident(), first)

    def beat(self) -> None:
        """Send heartbeats while a worker function runs, in a separate thread.

        Between the runs of a session it sends none: the kernel reads no messages then, and a full
        pipe would block the sender.
        """
        with contextlib.suppress(OSError):  # the kernel is gone; `obey` then ends the process
            while True:
                time.sleep(self.pipes.heartbeat)
                if self.finished.is_set():
                    continue
                for core, _, memory in self.cores:
                    self.sender.send(_memory_of(core, memory))
                    now = core.internal.activity
                    doing = core.backend.compiling() or now.doing
                    alive = messages.Alive(core.rank, now.count, now.waiting, doing)
                    self.sender.send(alive)

    def obey(self, signal_pipe: int) -> None:
        """Obey the kernel's commands and report SIGTERM, then end the process.

        Runs in a separate thread, because the main thread may be in native code.
        """
        pipes = select.poll()  # not select, which refuses descriptors from 1,024 on
        for fd in (self.pipes.control, signal_pipe):
            pipes.register(fd, select.POLLIN | select.POLLHUP)
        while True:
            ready = [fd for fd, _ in pipes.poll()]
            if signal_pipe in ready:
                is_sigterm = signal.SIGTERM in os.read(signal_pipe, 1024)
                if is_sigterm and not self.finished.is_set():
                    self._report_sigterm()
            if self.pipes.control in ready:
                record = os.read(self.pipes.control, COMMAND.size) or COMMAND.pack(STOP, 0)
                command, number = COMMAND.unpack(record)
                if command in (GO, STOP):
                    break
                if command == SEND_STACKS:
                    self._send_stacks()
                for obey in self.on_command:
                    obey(command, number)
        # The kernel sends GO when it has all results of this process. The main thread may still be
        # in the few lines between sending its result and `finished`.
        seconds = signals.DONE_SECONDS if command == GO else 0
        if self.finished.wait(seconds):
            os._exit(0)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    def end(self, *_: object) -> None:
        """Handle SIGTERM: set `end_requested`, and raise `Terminated` in the main thread.

        It is not raised if the core of the main thread ends between steps, or if all cores run in
        other threads. Before the first core has started, it ends the start of the device.
        """
        if self.finished.is_set():
            return
        for started in self.cores:
            started.core.internal.end_requested = True
        here = threading.get_ident()
        interrupted = [
            started.core
            for started in self.cores
            if started.thread == here and not started.core.internal.ends_between_steps
        ]
        if interrupted or not self.cores:
            raise signals.Terminated

    def _report_sigterm(self) -> None:
        """Report SIGTERM for every core, and raise `Terminated` in cores outside the main thread.

        This is done here, because a main thread in native code runs its handler late or never.
        """
        for core, thread, frame in self._running():
            core.internal.end_requested = True
            if core.internal.ends_between_steps:
                continue
            with contextlib.suppress(OSError):
                self.sender.send(messages.CoreFailed(sigterm_received(core.rank, frame)))
            if thread != threading.main_thread().ident:
                with self.sender.lock:  # not while it writes a message
                    signals.raise_in_thread(thread)

    def _send_stacks(self) -> None:
        stacks = [(core.rank, frame) for core, _, frame in self._running()]
        if not self.cores:  # the device has not started yet
            main_thread = threading.main_thread().ident
            stacks = [(self.pipes.rank, sys._current_frames()[main_thread])]
        with contextlib.suppress(OSError):
            for rank, frame in stacks:
                self.sender.send(messages.Stack(rank, stack_text(frame)))

    def _running(self) -> list[tuple[Core, int, object]]:
        """Return (core, thread, frame) for each core; a core that is done may have no thread."""
        frames = sys._current_frames()
        # This frame and the dict would refer to each other, and keep all frames and their variables
        # alive until the garbage collector runs. A DataLoader that it frees waits for five seconds.
        frames.pop(threading.get_ident(), None)
        return [
            (core, thread, frames[thread]) for core, thread, _ in self.cores if thread in frames
        ]


_this_worker: _Worker | None = None


def this_worker() -> _Worker:
    """Return the state of this worker process."""
    return _this_worker


def _detach(pipes: WorkerPipes) -> None:
    """Detach from the kernel's signals, terminal and pipes, which a worker must not use."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # so the process and its own children can be ended together
    # Jupyter sends SIGINT to the whole process group. Only the kernel reacts, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.die_with_parent(pipes.kernel)
    orphans.mark(pipes.kernel)
    signals.tie_children()
    for fd in pipes.inherited:
        os.close(fd)
    _replace_streams(pipes.output)
    faulthandler.enable(file=sys.stderr)
    _refuse_questions()
    # A DataLoader's processes pass tensors through sockets in a temporary folder, and joblib's
    # through files in /dev/shm. Nobody removes these if the processes are killed, so they go into a
    # folder that the kernel removes.
    multiprocessing.current_process()._config["tempdir"] = str(pipes.folder)
    os.environ.setdefault("JOBLIB_TEMP_FOLDER", str(pipes.folder))


def _replace_streams(output: int) -> None:
    """Make standard output and error plain files on the pipe, and standard input empty.

    ipykernel's own streams lose and mix lines in a fork.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    before = sys.stdout, sys.stderr
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    _redirect_logging(before, (sys.stdout, sys.stderr))


def _redirect_logging(before: tuple, after: tuple) -> None:
    """Let the notebook's log handlers write to the new streams, so that lines name the core.

    Args:
        before: standard output and error of the kernel.
        after: the streams in their place.
    """
    handlers = set()
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        handlers |= set(getattr(logger, "handlers", ()))
    for handler in handlers:
        for old, new in zip(before, after, strict=True):
            if getattr(handler, "stream", None) is old:
                handler.stream = new  # not setStream, which flushes the old one


def _refuse_questions() -> None:
    """Let input(), getpass() and breakpoint() raise an error.

    ipykernel's versions never return in a fork.
    """
    import builtins
    import getpass

    def refuse(*_: object, **__: object) -> None:
        raise EOFError(
            "input(), getpass() and breakpoint() do not work in a worker, which has no keyboard; "
            "ask in the notebook and pass the answer as an argument of launch, or print values "
            "with core.print"
        )

    builtins.input = refuse
    getpass.getpass = refuse
    sys.breakpointhook = refuse
