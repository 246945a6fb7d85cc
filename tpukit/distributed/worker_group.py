"""The worker processes of one run, together: forked, watched, heard and ended."""

import contextlib
import selectors
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tpukit.backends import cpu, xla
from tpukit.display.progress import Screen
from tpukit.distributed import worker
from tpukit.distributed.topology import Topology
from tpukit.distributed.watchdog import Limits, Stall, Watchdog
from tpukit.distributed.worker import Failure, Task
from tpukit.distributed.worker_process import WorkerProcess, death, wait
from tpukit.machine import orphans

_TICK_SECONDS = 0.1
_GRACE_SECONDS = 0.5  # for a failure that came first but is still in its pipe
_GRACE_SECONDS_WAITING = 2.0  # a core that failed in a collective: the one that left it there will be heard of
_END_SECONDS = 1.0  # for `finally` blocks of workers told to end
_SAVE_SECONDS = 8.0  # for core 0 to finish its step and save, where it has said that it would
_STACKS_SECONDS = 2.0


class WorkerGroup:
    """The worker processes of one run, from the fork until the last of them is gone.

    Attributes:
        results: what has come back so far, by rank.
        memory: peak host memory in bytes, by rank.
        log: the rows of `core.log` so far.
    """

    def __init__(self, plan: Topology, task: Task, limits: Limits):
        self.plan, self.task, self.limits = plan, task, limits
        self.members: list[WorkerProcess] = []
        self.results: dict[int, object] = {}
        self.memory: dict[int, int] = {}
        self.log: list[dict] = []
        self.failures: list[Failure] = []
        self.began = self.ended = 0.0
        self.folder: Path | None = None  # where the workers' own processes meet, removed with them
        self._stacks: dict[int, str] = {}
        self._saves = False

    def __enter__(self) -> "WorkerGroup":
        _load(self.plan)
        self.began = time.monotonic()
        self.folder = orphans.make_folder()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            try:
                with _without_interrupts():  # an interrupt between a fork and the note of it would lose the child
                    for rank in range(self.plan.processes):
                        self.members.append(WorkerProcess(rank, self, listener))
            except BaseException:  # OSError: the machine allows no more processes; or the interrupt, now
                self.end()
                raise
        self._watchdog = Watchdog(self.plan.cores, self.limits, lambda rank: self._member_of(rank).cpu_seconds())
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def watch(self, display: Screen) -> Failure | None:
        """Take in what the workers send until all have returned, or one has failed; say which failed first."""
        deadline, self._display = None, display
        with selectors.DefaultSelector() as pipes:
            for member in self.members:
                pipes.register(member.messages.fd, selectors.EVENT_READ, member)
                pipes.register(member.output.fd, selectors.EVENT_READ, member)
            while len(self.results) < self.plan.cores:
                gone = [member for member in self.members if member.is_gone()]  # asked before the last read
                for key, _ in pipes.select(_TICK_SECONDS):
                    self._read(key.data, display)
                    if key.data.closed(key.fd):
                        pipes.unregister(key.fd)
                for member in gone:
                    self._read(member, display)
                    self._note_death(member)
                display.draw()
                if not self.failures and (stall := self._watchdog.judge(set(self.results))):
                    self.failures.append(self._explain(stall, display))
                    break
                if self.failures and deadline is None:
                    waiting = all(failure.waiting for failure in self.failures)
                    deadline = time.monotonic() + (_GRACE_SECONDS_WAITING if waiting else _GRACE_SECONDS)
                if deadline and self._all_accounted_for():  # but for the last rows of a log
                    deadline = min(deadline, time.monotonic() + _TICK_SECONDS)
                if deadline and time.monotonic() > deadline:
                    break
        self.ended = time.monotonic()
        for member in self.members:
            self._read(member, display)
            for text in member.output.hidden():
                display.line(f"[core {member.rank}] {text}")
        return min(self.failures, key=lambda failure: (bool(failure.waiting), failure.when), default=None)

    def end(self) -> None:
        """End every process: those that are done at once, the others after their `finally` blocks, all in the end."""
        try:
            unfinished = [member for member in self.members if not self._done(member)]
            for member in unfinished:
                member.terminate()
            if self._saves and unfinished and not self.failures:
                self._wait_for_save()
            else:
                wait(unfinished, _END_SECONDS)
            for member in self.members:
                member.dismiss()
            wait(self.members, _END_SECONDS)
        finally:
            for member in self.members:
                member.kill()
            self.members = []
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_for_save(self) -> None:
        """Show what core 0 says until it has ended its work; the others may wait in a collective for ever."""
        deadline = time.monotonic() + _SAVE_SECONDS
        first = self.members[0]
        while time.monotonic() < deadline and not (first.is_gone() or self.failures or self._done(first)):
            self._read(first, self._display)
            time.sleep(0.02)

    def _read(self, member: "WorkerProcess", display: Screen) -> None:
        for text in member.output.lines():
            display.line(text if self.plan.cores == 1 else f"[core {member.rank}] {text}")
        for message in member.messages.receive():
            self._take(message, member.rank, display)

    def _take(self, message: object, sender: int, display: Screen) -> None:
        match message:
            case ("result", rank, value, memory):
                self.results[rank] = value
                self.memory[rank] = max(memory, self.memory.get(rank, 0))
            case ("failed", failure):
                self.failures.append(failure)
            case ("log", _, rows):
                self.log += rows
                display.curve(rows)
            case ("progress", label, done, total, samples):
                display.bar(label, done, total, samples)
            case ("alive", rank, activity, waiting, memory):
                self.memory[rank] = max(memory, self.memory.get(rank, 0))
                self._watchdog.beat(rank, activity, waiting)
            case ("finishes steps", 0):
                self._saves = True
            case ("stacks", rank, text):
                self._stacks[rank] = text
            case ("line", rank, text, named):
                display.line(f"[core {rank}] {text}" if named else text)
            case Exception():
                what = f"returned something the kernel cannot unpickle: {type(message).__name__}: {message}"
                self.failures.append(Failure(sender, time.monotonic(), what, error=message))

    def _done(self, member: "WorkerProcess") -> bool:
        return all(rank in self.results for rank in member.ranks)

    def _note_death(self, member: "WorkerProcess") -> None:
        """Tell of a process that ended with neither a result nor a word."""
        told = {failure.rank for failure in self.failures}
        if self._done(member) or told & {*member.ranks} or member.reported:
            return
        member.reported = True
        what, fix = death(member.process.exitcode or 0, self.memory.get(member.rank))
        last = member.output.last_words()
        told = Failure(member.rank, time.monotonic(), what, fix=fix, trace=last, title="the last it printed")
        self.failures.append(told)

    def _member_of(self, rank: int) -> WorkerProcess:
        return next(member for member in self.members if rank in member.ranks)

    def _explain(self, stall: Stall, display: Screen) -> Failure:
        """Ask every core where it stands, and tell of the stall with their stacks."""
        when = time.monotonic()
        for member in self.members:
            member.ask_for_stacks()
        missing = set(range(self.plan.cores)) - set(self.results)
        while missing - set(self._stacks) and time.monotonic() < when + _STACKS_SECONDS:
            time.sleep(0.05)
            for member in self.members:
                self._read(member, display)
        hung = "does not answer: native code holds its interpreter\n"
        stacks = {rank: self._stacks.get(rank, hung) for rank in sorted(missing, key=lambda rank: rank != stall.rank)}
        trace = "".join(f"core {rank}:\n{text}" for rank, text in stacks.items())
        return Failure(stall.rank, when, stall.what, fix=stall.fix, trace=trace, title="where the cores stand")

    def _all_accounted_for(self) -> bool:
        told = {failure.rank for failure in self.failures}
        return all(rank in told or rank in self.results for rank in range(self.plan.cores))


class InProcessGroup(WorkerGroup):
    """The crew where there is no fork (Windows): one core, in this very process."""

    def __enter__(self) -> "InProcessGroup":
        _load(self.plan)
        self.began = time.monotonic()
        return self

    def watch(self, display: Screen) -> Failure | None:
        """Run the worker function here and take in what it sends as it sends it."""
        import torch.distributed as dist

        def send(message: object) -> None:
            self._take(message, 0, display)
            display.draw()

        try:
            worker.run_core(self.task, cpu.Cpu(0, 1, None), send, cores=[])
        finally:
            dist.destroy_process_group()
            self.ended = time.monotonic()
        failure = self.failures[0] if self.failures else None
        if failure and isinstance(failure.error, KeyboardInterrupt):
            raise failure.error
        return failure


def _load(plan: Topology) -> None:
    """Import in the kernel what every worker would otherwise import for itself. Starts no runtime."""
    import torch  # noqa: F401

    if plan.backend == "tpu":
        xla.load("TPU")
    elif plan.backend == "xla rehearsal":
        xla.load("CPU")
    else:
        import torch.distributed  # noqa: F401


@contextlib.contextmanager
def sigterm_ends_the_run() -> Iterator[None]:
    """Raise `Terminated` where SIGTERM would end this process on the spot, and let it end afterwards.

    A platform that takes its machine back sends it, and SIGKILL some seconds later: workers can save in between.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise worker.Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except worker.Terminated:
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Put an interrupt off to the end of the block; only the main thread gets any.

    Blocking the signal would not do: another thread of the kernel would take it, and Python tell the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGINT)
