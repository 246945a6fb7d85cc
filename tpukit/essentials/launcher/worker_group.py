"""The worker processes of a run: fork them, read their messages, watch them, end them.

    with WorkerGroup(topology, task, limits, display) as group:    forks the processes
        failure = group.watch()                                    until all returned or one failed
    group.results                                                  by rank

`launch_each` has several groups at once. It calls `looks` in place of `watch`, so that a single
loop in the main thread can watch all of them.
"""

import selectors
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.backends import Cpu, Topology, runtimes
from tpukit.essentials.data import random_states_restored
from tpukit.essentials.display import Screen, TpukitRuntimeError
from tpukit.essentials.environment import orphans
from tpukit.essentials.launcher import messages, signals, worker
from tpukit.essentials.launcher.core_states import CoreStates
from tpukit.essentials.launcher.failure import (
    Failure,
    Failures,
    process_ended,
    result_unreadable,
    run_hangs,
)
from tpukit.essentials.launcher.watchdog import Limits, Stall, Watchdog
from tpukit.essentials.launcher.worker import Task, World
from tpukit.essentials.launcher.worker_process import WorkerProcess

_TICK_SECONDS = 0.1  # at most between two checks of the processes
_POLL_SECONDS = 0.02  # between two reads while the kernel waits for stacks or a checkpoint


# The groups of open sessions. Every new worker inherits their pipes, and closes its copies.
session_groups: list["WorkerGroup"] = []


class _Arrived(NamedTuple):
    """A message, with the first rank of the process that sent it."""

    message: object
    sender: int


class WorkerGroup:
    """The worker processes of a run, from the fork until the last of them is gone.

    Args:
        topology: the layout of the run.
        task: the work.
        limits: how long cores may hang, and how often they report.
        display: shows the output of the cores.
        writers: the `LogWriters`, which get the rows of `core.log`; None for none.
        beside: the groups that run at the same time. A worker inherits copies of the pipes of these
            groups, and closes them.

    Attributes:
        ranks: the ranks of the cores. Until a core has reported its rank, this is its expected
            rank.
        results: the results so far, by rank.
        states: the states that must be in sync at the end, by rank.
        alone: cores that have trained but were in no collective.
        memory: peak host memory in bytes, by rank.
        memory_growth: as `Run.memory_growth`, by rank.
        log: the rows of `core.log` so far.
        failures: the failures so far.
        began: `time.monotonic()` of the fork; in a session, of the start of the run.
        core_0_may_save: whether core 0 has called `fit` in this run, so it may save on SIGTERM.
        run: number of the run; a launch has only run 0.
        places: the last reported progress of each core in this run of a session, by rank.
        ended: `time.monotonic()` of the last result; 0 before, and after an interrupt in a session.
    """

    def __init__(
        self,
        topology: Topology,
        task: Task,
        limits: Limits,
        display: Screen,
        writers=None,
        beside: Sequence["WorkerGroup"] = (),
    ):
        self.topology = topology
        self.task = task
        self.ranks = [*range(topology.first_rank, topology.first_rank + topology.cores)]
        self.workers: list[WorkerProcess] = []
        self._beside = beside
        self._runtime = runtimes()[topology.backend]
        self._folder: Path | None = None  # for the workers' own processes; removed with them
        self._arrived: deque[_Arrived] = deque()
        self.run = -1
        self.begin_run(display, limits, timeout=task.timeout, writers=writers)

    def __enter__(self) -> "WorkerGroup":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin_run(self, display: Screen, limits: Limits, *, timeout: float | None, writers) -> None:
        """Begin a run: the only run of a launch, or the next run of a session."""
        self.run += 1
        self.display = display
        self.limits = limits
        self.results: dict[int, object] = {}
        self.states: dict[int, dict | None] = {}
        self.alone: set[int] = set()
        self.memory: dict[int, int] = {}
        self.memory_growth: dict[int, int] = {}
        self.log: list[dict] = []
        self.failures = Failures()
        self.places: dict[int, messages.At] = {}
        self.began = time.monotonic()
        self.ended = 0.0
        self._writers = writers
        self._timeout = timeout
        self._first_memory: dict[int, int] = {}  # bytes at the start, by rank
        self._stacks: dict[int, str] = {}
        self.core_0_may_save = False
        self._was_told_to_end = False
        for process in self.workers:
            process.begin_run()
        self._restart_clocks()

    def _restart_clocks(self) -> None:
        backend = self._runtime.backend
        self._activity = CoreStates(self.ranks, self.limits.heartbeat)
        for rank in self._started():
            self._activity.started(rank)
        self._watchdog = Watchdog(
            self.ranks,
            self.limits,
            lambda rank: self._worker_of(rank).busy_time.seconds(),
            timeout=self._timeout,
            in_graph=backend.in_graph,
            waits_idle=backend.waits_idle,
            others=self.topology.hosts is not None,
        )

    def start(self) -> None:
        """Fork the processes. If this raises an error, it leaves no process behind."""
        package = self._runtime.package
        if package and package not in sys.modules:
            self.display.status(f"importing {package}, once, for about ten seconds")
            self.display.draw()
        self._runtime.load(self.topology)
        self.began = time.monotonic()
        self._folder = orphans.make_folder()
        try:
            # After an interrupt between a fork and `append`, nobody would end the child.
            with (
                self._runtime.meeting_point(self.topology) as meeting_point,
                signals.without_interrupts(),
            ):
                for number in range(self.topology.processes):
                    self.workers.append(self._fork(number, meeting_point))
            self._restart_clocks()
        except BaseException:  # an interrupt; OSError if the machine allows no more processes
            self.end()
            raise

    # Each worker closes its copies of the other workers' pipes. Otherwise such a pipe would stay
    # open after its own worker has died, and the kernel would not see its end.
    def _fork(self, number: int, meeting_point: object) -> WorkerProcess:
        inherited = []
        for group in (self, *self._beside, *session_groups):
            for process in group.workers:
                inherited += process.fds()
        return WorkerProcess(
            number,
            self.topology,
            self.task,
            heartbeat=self.limits.heartbeat,
            folder=self._folder,
            meeting_point=meeting_point,
            inherited=inherited,
        )

    # While it runs

    def watch(self) -> Failure | None:
        """Watch the run until all cores have returned or one failed; return the failure."""
        for _ in self.looks(_TICK_SECONDS):
            pass
        return self.failures.first()

    def looks(self, seconds: float) -> Iterator[None]:
        """Read messages until all cores are done, or the run has failed; yield after each check.

        Args:
            seconds: the longest time between two checks.
        """
        with selectors.DefaultSelector() as pipes:
            for process in self.workers:
                pipes.register(process.messages.fd, selectors.EVENT_READ, process)
                pipes.register(process.output.fd, selectors.EVENT_READ, process)
            while len(self.results) < self.topology.cores:
                self._look(pipes, seconds)
                if self._is_over():
                    break
                yield
        self.ended = time.monotonic()
        # A last read, for output that came after the last result.
        for process in self.workers:
            self._read(process)
            self._show(process, process.output.rest())

    def _look(self, pipes: selectors.BaseSelector, seconds: float) -> None:
        """Read from the processes and record deaths; wait for data at most `seconds`."""
        # Before the reads: a process that ends during them may still have messages in its pipe.
        gone = [process for process in self.workers if process.is_gone()]
        for key, _ in pipes.select(seconds):
            process = key.data
            self._read(process)
            if process.is_closed(key.fd):
                pipes.unregister(key.fd)
        for process in gone:
            self._read(process)
            self._note_death(process)
        status = self._activity.words(self.results)
        self.display.status(status, self._activity.rows(self.results))
        self.display.draw()

    def _is_over(self) -> bool:
        """Return whether the run has failed or hangs; record a hang as a failure."""
        if not self.failures:
            sending = set()
            for process in self.workers:
                if process.messages.in_message:
                    sending |= set(process.started)
            stall = self._watchdog.find_stall(set(self.results), sending)
            if stall is not None:
                self.failures.add(self._with_stacks(stall))
                return True
        known = self.failures.ranks | self.results.keys()
        return self.failures.are_settled(every_core_is_known=known >= set(self.ranks))

    def _read(self, process: WorkerProcess) -> None:
        """Handle all messages and lines of a process that have arrived."""
        # After an interrupt in the middle of a message, no later message would be readable.
        with signals.without_interrupts():
            lines = [*process.output.lines()]
            for message in process.receive():
                self._arrived.append(_Arrived(message, process.rank))
        self._show(process, lines)
        while self._arrived:
            # After an interrupt here the message is handled a second time, but never lost.
            self._take(*self._arrived[0])
            self._arrived.popleft()

    def _show(self, process: WorkerProcess, lines: Iterable[str]) -> None:
        for text in lines:
            if self.topology.cores > 1:
                text = f"[core {process.rank}] {text}"
            self.display.line(text)

    def _take(self, message: object, sender: int) -> None:
        """Handle a message."""
        match message:
            case messages.Started(rank):
                self._name(rank)
                self._activity.started(rank)
            case messages.Memory():
                self._take_memory(message)
            case messages.Alive(rank, activity, waiting, doing):
                waits_outside = getattr(doing, "is_waiting", False)
                self._watchdog.beat(rank, activity, waiting, waits_outside=waits_outside)
                self._activity.beat(rank, activity, waiting, doing)
            case messages.Result(rank, value):
                self.results[rank] = value
            case messages.StateAtEnd(rank, state, alone):
                self.states[rank] = state
                if alone:
                    self.alone.add(rank)
            case messages.CoreFailed(failure):
                self.failures.add(failure)
            case messages.Stack(rank, text):
                self._stacks[rank] = text
            case messages.At(rank, run):
                if run == self.run:  # otherwise a late report from the previous run
                    self.places[rank] = message
            # Only core 0 writes files, so the kernel waits for no other core.
            case messages.FinishesSteps(rank):
                self.core_0_may_save |= rank == 0
            case _:
                self._take_output(message, sender)

    def _take_output(self, message: object, sender: int) -> None:
        """Handle a message that the display shows, or an unknown message."""
        match message:
            case messages.Line(rank, text, named):
                self.display.line(f"[core {rank}] {text}" if named else text)
            case messages.LogRows(_, rows):
                self._take_rows(rows)
            case messages.Progress(label, done, total, options):
                self.display.bar(label, done, total, **options)
            case messages.Display(rank, data, metadata, options):
                if self.topology.cores > 1:  # a picture has no line that could name its core
                    self.display.line(f"[core {rank}] shows:")
                self.display.show(data, metadata, **options)
            case Exception():  # from `Receiver`, for a message that cannot be unpickled
                self.failures.add(result_unreadable(sender, message))
            case _:
                raise TpukitRuntimeError(
                    f"the kernel does not know this message of core {sender}",
                    found=repr(message)[:200],
                    fix="restart the kernel; probably tpukit was updated while the kernel ran",
                )

    def _take_memory(self, memory: messages.Memory) -> None:
        rank = memory.rank
        first = self._first_memory.setdefault(rank, memory.own)
        self.memory[rank] = max(memory.peak, self.memory.get(rank, 0))
        self.memory_growth[rank] = max(memory.most - first, self.memory_growth.get(rank, 0))

    def _take_rows(self, rows: list[dict]) -> None:
        # `_read` handles a message again after an interrupt. Without this block, and the `clear` at
        # its end, the rows would then be logged twice.
        with signals.without_interrupts():
            self.log += rows
            self.display.curve(rows)
            if self._writers:
                self._writers.add(rows)
            rows.clear()
        if self._writers:
            self._writers.write()  # outside of the block, because it may take long

    def _name(self, rank: int) -> None:
        """Put the rank that a core reports into `ranks`, in place of an expected rank."""
        if rank in self.ranks:
            return
        started = self._started()
        # The reported rank is not among the expected ranks, so it replaces one of them.
        self.ranks.remove(max(expected for expected in self.ranks if expected not in started))
        self.ranks.append(rank)
        self.ranks.sort()

    def _started(self) -> set[int]:
        """Return the ranks that have reported."""
        started = set()
        for process in self.workers:
            started |= set(process.started)
        return started

    def _note_death(self, process: WorkerProcess) -> None:
        """Record the failure of a process that ended without a result or a report, once."""
        if self._is_done(process) or process.has_failed:
            return
        process.has_failed = True
        self.failures.add(
            process_ended(
                process.rank,
                process.process.exitcode or 0,
                started=not process.unstarted,
                memory=self.memory.get(process.rank),
                last_output=process.output.last_lines(),
            )
        )

    def _is_done(self, process: WorkerProcess) -> bool:
        return not process.unstarted and all(map(self._has_ended, process.started))

    def _has_ended(self, rank: int) -> bool:
        return rank in self.results or self.is_at(rank, "prompt")

    def is_at(self, rank: int, place: str) -> bool:
        """Return whether the last `messages.At` of a core has this place."""
        return rank in self.places and self.places[rank].place == place

    def send(self, command: bytes, number: int = 0, ranks: Iterable[int] | None = None) -> None:
        """Send a command, such as `worker.RUN`, to the processes of these ranks; None for all."""
        processes = self.workers
        if ranks is not None:
            # Each once, because cores of a v2 or v3 share a process.
            processes = list(dict.fromkeys(map(self._worker_of, ranks)))
        for process in processes:
            process.command(command, number)

    def read(self) -> None:
        """Handle all messages and lines that have arrived from the processes."""
        for process in self.workers:
            self._read(process)

    def _worker_of(self, rank: int) -> WorkerProcess:
        """Return the process of a rank; if the rank has not reported, one that may have it."""
        for process in self.workers:
            if rank in process.started:
                return process
        started = self._started()
        unknown = [expected for expected in self.ranks if expected not in started]
        open_places = []
        for process in self.workers:
            open_places += [process] * process.unstarted
        return open_places[unknown.index(rank)]

    # Stacks of cores that hang

    def _with_stacks(self, stall: Stall) -> Failure:
        """Describe a stall with the stacks of all cores that have not returned."""
        stacks = self.stacks(signals.STACKS_SECONDS)
        missing = sorted(set(self.ranks) - self.results.keys())
        by_rank = {rank: stacks.get(rank) for rank in missing}
        return run_hangs(stall.rank, stall.what, stall.fix, stacks=by_rank)

    def stacks(self, seconds: float) -> dict[int, str]:
        """Return by rank the stacks of cores that have not returned.

        Cores that do not answer within this many seconds are left out.
        """
        deadline = time.monotonic() + seconds
        for process in self.workers:
            process.command(worker.SEND_STACKS)
        missing = set(self.ranks) if self.workers else set()
        while time.monotonic() < deadline and missing - self.results.keys() - self._stacks.keys():
            time.sleep(_POLL_SECONDS)
            for process in self.workers:
                self._read(process)
        return {rank: text for rank, text in self._stacks.items() if rank not in self.results}

    def waits_long(self) -> bool:
        """Return whether a core has been in a collective for more than 5 seconds."""
        return self._watchdog.waits_long(set(self.results))

    # The end

    def tell_to_end(self) -> None:
        """Send SIGTERM to every process that is not done; a second call does nothing.

        A second SIGTERM would interrupt the `finally` blocks of the worker function.
        """
        if self._was_told_to_end:
            return
        self._was_told_to_end = True
        for process in self.workers:
            if not self._is_done(process):
                process.terminate()

    def end(self) -> None:
        """End every process; an unfinished worker function gets time for its `finally` blocks."""
        try:
            self.tell_to_end()
            # `signals` documents the steps and the times of the end.
            unfinished = [process for process in self.workers if not self._is_done(process)]
            if self.core_0_may_save and unfinished and not self.failures:
                self._wait_for_save()
            else:
                _wait(unfinished, signals.END_SECONDS)
            done = [process for process in self.workers if self._is_done(process)]
            for process in self.workers:
                process.dismiss(worker.GO if process in done else worker.STOP)
            _wait(done, signals.DONE_SECONDS)
            _wait(self.workers, signals.END_SECONDS)
        finally:
            for process in self.workers:
                process.kill()
            self.workers = []
            self.ended = self.ended or time.monotonic()  # not set yet after an interrupt
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_save(self) -> None:
        """Wait until core 0 has saved and returned, for at most `SAVE_SECONDS`.

        There is no wait for the other cores, which may be in a collective forever.
        """
        deadline = time.monotonic() + signals.SAVE_SECONDS
        first = self._worker_of(0)
        while time.monotonic() < deadline:
            if first.is_gone() or self.failures or self._is_done(first):
                return
            self._read(first)
            time.sleep(_POLL_SECONDS)


class InProcessGroup(WorkerGroup):
    """The group on systems without fork: a single core, in the kernel itself."""

    def start(self) -> None:
        """Load the runtime. The method `looks` runs the worker function later."""
        self._runtime.load(self.topology)
        self._watchdog = Watchdog(self.ranks, self.limits, lambda rank: 0.0)
        self.began = time.monotonic()

    def looks(self, seconds: float) -> Iterator[None]:
        """Run the worker function in the kernel, and handle each message as it is sent."""

        def send(message: object) -> None:
            self._take(message, 0)
            self.display.draw()

        try:
            # Keep the notebook's random numbers, because the next launch takes its seed from them.
            with random_states_restored():
                worker.run_core(
                    self.task,
                    Cpu(0, 1, None),
                    send=send,
                    cores=[],
                    world=World.of(self.topology),
                )
        finally:
            self.ended = time.monotonic()
        failure = self.failures.first()
        # `run_core` reports every exception as a failure, but an interrupt ends the launch.
        if failure and isinstance(failure.error, KeyboardInterrupt):
            raise failure.error
        yield from ()  # nothing, but it makes this method a generator


def _wait(processes: Iterable[WorkerProcess], seconds: float) -> None:
    """Wait until all processes have ended, for at most this many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(process.is_gone() for process in processes):
            return
        time.sleep(0.01)
