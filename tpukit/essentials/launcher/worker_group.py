"""The worker processes of one run, together: forked, watched, heard and ended."""

import selectors
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tpukit.essentials.backends import Cpu, Topology, runtimes
from tpukit.essentials.data import numbers_kept
from tpukit.essentials.display import Screen
from tpukit.essentials.environment import orphans
from tpukit.essentials.launcher import signals, worker
from tpukit.essentials.launcher.core_states import CoreStates
from tpukit.essentials.launcher.failure import Failure, Failures, process_ended, result_unreadable, run_hangs
from tpukit.essentials.launcher.watchdog import Limits, Stall, Watchdog
from tpukit.essentials.launcher.worker import Task
from tpukit.essentials.launcher.worker_process import WorkerProcess

_TICK_SECONDS = 0.1  # at most between two looks at the processes


class WorkerGroup:
    """The worker processes of one run, from the fork until the last of them is gone.

    Args:
        display: shows what the cores say.
        writers: get the rows of `core.log` as they arrive; None for nobody.
        beside: the groups that run at the same time; a worker closes the pipes of theirs that its fork brings along.

    Attributes:
        ranks: of its cores; each is what it will probably be until the core has said what it is.
        results: what has come back so far, by rank.
        same: what a core held at its end that has to be the same on all, by rank.
        memory: peak host memory in bytes, by rank.
        memory_growth: by how many bytes a process has grown since its start, at most, by rank.
        log: the rows of `core.log` so far.
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
        self.topology, self.task, self.limits, self.display = topology, task, limits, display
        self._writers, self._beside = writers, beside
        self._runtime = runtimes()[topology.backend]
        self.workers: list[WorkerProcess] = []
        self.results: dict[int, object] = {}
        self.same: dict[int, dict | None] = {}
        self.memory: dict[int, int] = {}
        self.memory_growth: dict[int, int] = {}
        self._first_memory: dict[int, int] = {}
        self.log: list[dict] = []
        self.failures = Failures()
        self.ranks = [*range(topology.first_rank, topology.first_rank + topology.cores)]
        self.states = CoreStates(self.ranks, limits.heartbeat)
        self.began = self.ended = 0.0
        self._folder: Path | None = None  # where the workers' own processes meet, removed with them
        self._arrived: deque[tuple[object, int]] = deque()  # messages, and the ranks that they are from
        self._stacks: dict[int, str] = {}
        self._core_0_saves = False
        self._told_to_end = False

    def __enter__(self) -> "WorkerGroup":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        """Fork the processes; after an exception here none is left."""
        if self._runtime.package and self._runtime.package not in sys.modules:
            self.display.status(f"importing {self._runtime.package}, once, for about ten seconds")
            self.display.draw()
        self._runtime.load(self.topology)
        self.states = CoreStates(self.ranks, self.limits.heartbeat)  # whose clock starts now
        self.began = time.monotonic()
        self._folder = orphans.make_folder()
        with self._runtime.meeting_point(self.topology) as meeting_point:
            try:
                with signals.without_interrupts():  # an interrupt between a fork and the note of it loses the child
                    for number in range(self.topology.processes):
                        self.workers.append(self._fork(number, meeting_point))
            except BaseException:  # OSError: the machine allows no more processes; or the interrupt, now
                self.end()
                raise
        backend = self._runtime.backend
        self._watchdog = Watchdog(
            self.ranks,
            self.limits,
            lambda rank: self._worker_of(rank).busy_time.seconds(),
            timeout=self.task.timeout,
            in_graph=backend.in_graph,
            waits_idle=backend.waits_idle,
            others=self.topology.hosts is not None,
        )

    def _fork(self, number: int, meeting_point: object) -> WorkerProcess:
        return WorkerProcess(
            number,
            self.topology,
            self.task,
            heartbeat=self.limits.heartbeat,
            folder=self._folder,
            meeting_point=meeting_point,
            inherited=[fd for group in (self, *self._beside) for one in group.workers for fd in one.fds()],
        )

    def watch(self) -> Failure | None:
        """Take in what the workers send until all have returned, or one has failed; return the first failure."""
        for _ in self.looks(_TICK_SECONDS):
            pass
        return self.failures.first()

    def looks(self, seconds: float) -> Iterator[None]:
        """Do the same in steps that wait for at most so many seconds each, so that one loop can watch several runs."""
        with selectors.DefaultSelector() as pipes:
            for one in self.workers:
                pipes.register(one.messages.fd, selectors.EVENT_READ, one)
                pipes.register(one.output.fd, selectors.EVENT_READ, one)
            while len(self.results) < self.topology.cores:
                gone = [one for one in self.workers if one.is_gone()]  # asked before the last read
                for key, _ in pipes.select(seconds):
                    self._read(key.data)
                    if key.data.is_closed(key.fd):
                        pipes.unregister(key.fd)
                for one in gone:
                    self._read(one)
                    self._note_death(one)
                self.display.status(self.states.words(self.results), self.states.rows(self.results))
                self.display.draw()
                sending = {rank for one in self.workers if one.messages.in_message for rank in one.started}
                if not self.failures and (stall := self._watchdog.find_stall(set(self.results), sending)):
                    self.failures.add(self._with_stacks(stall))
                    break
                if self.failures.are_settled(self.failures.ranks | self.results.keys() >= {*self.ranks}):
                    break
                yield
        self.ended = time.monotonic()
        for one in self.workers:
            self._read(one)
            self._show(one, one.output.rest())

    def _read(self, one: WorkerProcess) -> None:
        with signals.without_interrupts():  # one in the middle would lose what has arrived, and all that follows it
            lines = [*one.output.lines()]
            self._arrived += [(message, one.rank) for message in one.receive()]
        self._show(one, lines)
        while self._arrived:
            self._take(*self._arrived[0])  # an interrupt in here has it taken twice, and never lost
            self._arrived.popleft()

    def _show(self, one: WorkerProcess, lines: Iterable[str]) -> None:
        for text in lines:
            self.display.line(text if self.topology.cores == 1 else f"[core {one.rank}] {text}")

    def _take(self, message: object, sender: int) -> None:
        match message:
            case ("result", rank, value):
                self.results[rank] = value
            case ("same", rank, found):
                self.same[rank] = found
            case ("memory", rank, peak, own, most):
                self.memory[rank] = max(peak, self.memory.get(rank, 0))
                first = self._first_memory.setdefault(rank, own)
                self.memory_growth[rank] = max(most - first, self.memory_growth.get(rank, 0))
            case ("failed", failure):
                self.failures.add(failure)
            case ("log", _, rows):
                with signals.without_interrupts():  # else a message that is taken again would log them again
                    self.log += rows
                    self.display.curve(rows)
                    if self._writers:
                        self._writers.add(rows)
                    rows.clear()
                if self._writers:
                    self._writers.write()  # may take long, so it hears interrupts
            case ("progress", label, done, total, options):
                self.display.bar(label, done, total, **options)
            case ("started", rank):
                self._name(rank)
                self.states.started(rank)
            case ("alive", rank, activity, waiting, doing):
                self._watchdog.beat(rank, activity, waiting, waits_outside=getattr(doing, "is_waiting", False))
                self.states.beat(rank, activity, waiting, doing)
            case ("finishes steps", 0):
                self._core_0_saves = True
            case ("stacks", rank, text):
                self._stacks[rank] = text
            case ("line", rank, text, named):
                self.display.line(f"[core {rank}] {text}" if named else text)
            case ("display", rank, data, metadata, options):
                if self.topology.cores > 1:
                    self.display.line(f"[core {rank}] shows:")
                self.display.show(data, metadata, **options)
            case Exception():
                self.failures.add(result_unreadable(sender, message))

    def _name(self, rank: int) -> None:
        """Note that there is a core of this rank, in place of one that was only supposed."""
        if rank not in self.ranks:
            started = {rank for one in self.workers for rank in one.started}
            self.ranks.remove(max(one for one in self.ranks if one not in started))
            self.ranks.append(rank)
            self.ranks.sort()

    def _note_death(self, one: WorkerProcess) -> None:
        """Note a process that ended with neither a result nor a word, once."""
        if self._is_done(one) or one.has_failed:
            return
        one.has_failed = True
        self.failures.add(
            process_ended(
                one.rank,
                one.process.exitcode or 0,
                started=not one.unstarted,
                memory=self.memory.get(one.rank),
                last_output=one.output.last_lines(),
            )
        )

    def _with_stacks(self, stall: Stall) -> Failure:
        """Describe the stall with the stacks of all cores."""
        found = self.stacks(signals.STACKS_SECONDS)
        missing = sorted({*self.ranks} - self.results.keys())
        return run_hangs(stall.rank, stall.what, stall.fix, stacks={rank: found.get(rank) for rank in missing})

    def stacks(self, seconds: float) -> dict[int, str]:
        """Ask every core that has not returned where it stands; those that answer within so many seconds, by rank."""
        deadline = time.monotonic() + seconds
        for one in self.workers:
            one.ask_for_stacks()
        missing = {*self.ranks} if self.workers else set()
        while missing - self.results.keys() - self._stacks.keys() and time.monotonic() < deadline:
            time.sleep(0.02)
            for one in self.workers:
                self._read(one)
        return {rank: text for rank, text in self._stacks.items() if rank not in self.results}

    def waits_long(self) -> bool:
        """Say whether a core has been in one collective for longer than healthy cores are apart."""
        return self._watchdog.waits_long(set(self.results))

    def tell_to_end(self) -> None:
        """Send SIGTERM to every process that is not done, once: a second would cut its `finally` blocks short."""
        unfinished = [] if self._told_to_end else [one for one in self.workers if not self._is_done(one)]
        self._told_to_end = True
        for one in unfinished:
            one.terminate()

    def end(self) -> None:
        """End every process: those that are done at once, the others after their `finally` blocks, all in the end."""
        try:
            self.tell_to_end()
            unfinished = [one for one in self.workers if not self._is_done(one)]
            if self._core_0_saves and unfinished and not self.failures:
                self._wait_for_save()
            else:
                _wait(unfinished, signals.END_SECONDS)
            done = [one for one in self.workers if self._is_done(one)]
            for one in self.workers:
                one.dismiss(worker.GO if one in done else worker.STOP)
            _wait(done, signals.DONE_SECONDS)
            _wait(self.workers, signals.END_SECONDS)
        finally:
            for one in self.workers:
                one.kill()
            self.workers = []
            self.ended = self.ended or time.monotonic()  # interrupted
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_save(self) -> None:
        """Show what core 0 says until it has ended its work; the others may wait in a collective for ever."""
        deadline = time.monotonic() + signals.SAVE_SECONDS
        first = self._worker_of(0)
        while time.monotonic() < deadline and not (first.is_gone() or self.failures or self._is_done(first)):
            self._read(first)
            time.sleep(0.02)

    def _is_done(self, one: WorkerProcess) -> bool:
        return not one.unstarted and all(rank in self.results for rank in one.started)

    def _worker_of(self, rank: int) -> WorkerProcess:
        """Return the process of a rank; of one that has not reported, a process of which a core has not."""
        for one in self.workers:
            if rank in one.started:
                return one
        started = {rank for one in self.workers for rank in one.started}
        unknown = [rank for rank in self.ranks if rank not in started]
        open_places = [one for one in self.workers for _ in range(one.unstarted)]
        return open_places[unknown.index(rank)]


class InProcessGroup(WorkerGroup):
    """The group where there is no fork (Windows): one core, in this very process."""

    def start(self) -> None:
        """Start nothing: the core runs when it is watched."""
        self._runtime.load(self.topology)
        self._watchdog = Watchdog(self.ranks, self.limits, lambda rank: 0.0)
        self.began = time.monotonic()

    def looks(self, seconds: float) -> Iterator[None]:
        """Run the worker function here and take in what it sends as it sends it."""

        def send(message: object) -> None:
            self._take(message, 0)
            self.display.draw()

        try:
            with numbers_kept():  # the notebook's own, of which the next launch takes its seed
                worker.run_core(self.task, Cpu(0, 1, None), send, [], self.topology.world_size)
        finally:
            self.ended = time.monotonic()
        failure = self.failures.first()
        if failure and isinstance(failure.error, KeyboardInterrupt):
            raise failure.error
        yield from ()


def _wait(workers: Iterable[WorkerProcess], seconds: float) -> None:
    """Wait until all processes have ended, at most so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(one.is_gone() for one in workers):
        time.sleep(0.01)
