"""The worker processes of one run: forked, watched, heard and ended."""

import contextlib
import functools
import multiprocessing
import os
import selectors
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator

from tpukit import worker
from tpukit.backends import cpu, cuda, xla
from tpukit.messages import Receiver
from tpukit.plan import Plan
from tpukit.progress import Screen
from tpukit.worker import Failure, Task

_TICK_SECONDS = 0.1
_GRACE_SECONDS = 0.5  # for a failure that came first but is still in its pipe
_GRACE_SECONDS_WAITING = 2.0  # a core that failed in a collective: the one that left it there will be heard of
_END_SECONDS = 1.0  # for `finally` blocks of workers told to end


class Crew:
    """The worker processes of one run, from the fork until the last of them is gone.

    Attributes:
        results: what has come back so far, by rank.
        memory: peak host memory in bytes, by rank.
        log: the rows of `core.log` so far.
    """

    def __init__(self, plan: Plan, task: Task):
        self.plan, self.task = plan, task
        self.members: list[_Member] = []
        self.results: dict[int, object] = {}
        self.memory: dict[int, int] = {}
        self.log: list[dict] = []
        self.failures: list[Failure] = []
        self.began = self.ended = 0.0

    def __enter__(self) -> "Crew":
        _load(self.plan)
        self.began = time.monotonic()
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            with _without_interrupts():  # an interrupt between a fork and the note of it would lose the child
                for rank in range(self.plan.processes):
                    self.members.append(_Member(rank, self.plan, self.task, listener, self.members))
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def watch(self, display: Screen) -> Failure | None:
        """Take in what the workers send until all have returned, or one has failed; say which failed first."""
        deadline = None
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
                if self.failures and deadline is None:
                    waiting = all(failure.waiting for failure in self.failures)
                    deadline = time.monotonic() + (_GRACE_SECONDS_WAITING if waiting else _GRACE_SECONDS)
                if deadline and (time.monotonic() > deadline or self._all_accounted_for()):
                    break
        self.ended = time.monotonic()
        for member in self.members:
            self._read(member, display)
        return min(self.failures, key=lambda failure: (bool(failure.waiting), failure.when), default=None)

    def end(self) -> None:
        """End every process: those that are done at once, the others after their `finally` blocks, all in the end."""
        try:
            unfinished = [member for member in self.members if not self._done(member)]
            for member in unfinished:
                member.signal(signal.SIGTERM)
            _wait(unfinished, _END_SECONDS)
            for member in self.members:
                member.dismiss()
            _wait(self.members, _END_SECONDS)
        finally:
            for member in self.members:
                member.kill()
            self.members = []

    def _read(self, member: "_Member", display: Screen) -> None:
        for text in member.output.lines():
            display.line(text if self.plan.cores == 1 else f"[core {member.rank}] {text}")
        for message in member.messages.receive():
            self._take(message, member.rank, display)

    def _take(self, message: object, sender: int, display: Screen) -> None:
        match message:
            case ("result", rank, value, memory):
                self.results[rank], self.memory[rank] = value, memory
            case ("failed", failure):
                self.failures.append(failure)
            case ("log", _, rows):
                self.log += rows
                display.curve(rows)
            case ("progress", 0, label, done, total, samples):
                display.bar(label, done, total, samples)
            case ("progress", *_):
                pass  # kept for the day a core lags behind
            case ("line", rank, text, named):
                display.line(f"[core {rank}] {text}" if named else text)
            case Exception():
                what = f"returned something the kernel cannot unpickle: {type(message).__name__}: {message}"
                self.failures.append(Failure(sender, time.monotonic(), what, error=message))

    def _done(self, member: "_Member") -> bool:
        return all(rank in self.results for rank in member.ranks)

    def _note_death(self, member: "_Member") -> None:
        """Tell of a process that ended with neither a result nor a word."""
        told = {failure.rank for failure in self.failures}
        if self._done(member) or told & {-1, *member.ranks} or member.reported:
            return
        member.reported = True
        what, fix = _death(member.process.exitcode or 0)
        self.failures.append(Failure(member.rank, time.monotonic(), what, fix=fix, trace="\n".join(member.output.tail)))

    def _all_accounted_for(self) -> bool:
        told = {failure.rank for failure in self.failures}
        return all(rank in told or rank in self.results for rank in range(self.plan.cores))


class Alone(Crew):
    """The crew where there is no fork (Windows): one core, in this very process."""

    def __enter__(self) -> "Alone":
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
            worker.run_core(self.task, cpu.Cpu(0, 1, None), send)
        finally:
            dist.destroy_process_group()
            self.ended = time.monotonic()
        failure = self.failures[0] if self.failures else None
        if failure and isinstance(failure.error, KeyboardInterrupt):
            raise failure.error
        return failure


class _Member:
    """One worker process, as the kernel sees it: its pipes, the ranks it runs, and its end."""

    def __init__(self, rank: int, plan: Plan, task: Task, listener: socket.socket, earlier: list["_Member"]):
        share = plan.cores // plan.processes
        self.rank, self.ranks = rank * share, range(rank * share, (rank + 1) * share)
        self.reported = False
        messages, messages_end = os.pipe()
        output, output_end = os.pipe()
        control_end, self._control = os.pipe()
        mine = [messages, output, self._control]
        others = mine + [fd for member in earlier for fd in member.fds()]
        self.process = multiprocessing.get_context("fork").Process(
            target=worker.main,
            args=(task, functools.partial(_start, plan, rank, listener)),
            kwargs={"messages": messages_end, "output": output_end, "control": control_end, "others": others},
            name=f"tpukit core {self.rank}",
        )
        with warnings.catch_warnings():
            # Python 3.12 and JAX warn of forks from a process with threads. That is what a notebook kernel is; what
            # a worker may not inherit (OpenMP, pipes, signals, streams) it replaces first thing.
            warnings.filterwarnings("ignore", message=r".*(use of fork|os\.fork\(\)).*")
            self.process.start()
        for fd in (messages_end, output_end, control_end):
            os.close(fd)
        with contextlib.suppress(OSError):
            os.setpgid(self.process.pid, self.process.pid)  # the child does it too: whoever comes first
        self.messages, self.output = Receiver(messages), _Output(output)

    def fds(self) -> list[int]:
        """Return the kernel's ends of the pipes, which no other worker may keep open."""
        return [self.messages.fd, self.output.fd, self._control]

    def closed(self, fd: int) -> bool:
        """Say whether the pipe has come to its end."""
        return (self.messages if fd == self.messages.fd else self.output).closed

    def is_gone(self) -> bool:
        """Say whether the process has ended."""
        return self.process.exitcode is not None

    def signal(self, number: int) -> None:
        """Send a signal to the process and its own children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def dismiss(self) -> None:
        """Close the control pipe: a worker that is done exits, any other kills itself."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def kill(self) -> None:
        """Make sure nothing is left of it."""
        self.dismiss()
        self.signal(signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.messages.close()
        self.output.close()


class _Output:
    """The kernel's end of a worker's standard output and error, read in whole lines."""

    _KEEP = 20  # lines, for the report of a process that died without a word

    def __init__(self, fd: int):
        self.fd, self.closed, self.tail = fd, False, []
        self._rest = b""
        os.set_blocking(fd, False)

    def lines(self) -> Iterator[str]:
        """Yield the lines that are complete by now, and at the end what is left."""
        while not self.closed:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return
            self.closed = not data
            *complete, self._rest = (self._rest + data).split(b"\n")
            if self.closed and self._rest:
                complete, self._rest = [self._rest], b""
            for line in complete:
                text = line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
                self.tail = [*self.tail[1 - self._KEEP :], text]
                yield text

    def close(self) -> None:
        """Close the pipe."""
        self.closed = True
        os.close(self.fd)


def _load(plan: Plan) -> None:
    """Import in the kernel what every worker would otherwise import for itself. Starts no runtime."""
    import torch  # noqa: F401

    if plan.backend == "tpu":
        xla.load("TPU")
    elif plan.backend == "xla rehearsal":
        xla.load("CPU")
    else:
        import torch.distributed  # noqa: F401


def _start(plan: Plan, rank: int, listener: socket.socket, body: Callable) -> None:
    if plan.backend == "tpu":
        xla.run_tpu(body, rank=rank, processes=plan.processes)
    elif plan.backend == "xla rehearsal":
        xla.run_rehearsal(body, rank=rank, world_size=plan.cores, listener=listener)
    else:
        core = cuda.Cuda if plan.backend == "cuda" else cpu.Cpu
        cpu.run(body, rank=rank, world_size=plan.cores, listener=listener, core=core)


def _death(exitcode: int) -> tuple[str, str]:
    """Say what an exit status means and what to do about it."""
    if exitcode == -signal.SIGKILL:
        return (
            "was killed by SIGKILL, which on a machine that runs out of host memory the kernel does",
            "a smaller batch_size, fewer DataLoader workers, or a dataset that is read from disk, not held in memory",
        )
    if exitcode < 0:
        return (
            f"was killed by {signal.Signals(-exitcode).name}",
            "what it printed last is below; a native library ended it",
        )
    return (
        f"ended with exit status {exitcode} before it returned a result",
        "leave the worker function with return, not os._exit",
    )


def _wait(members: list[_Member], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(member.is_gone() for member in members):
        time.sleep(0.01)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
