"""One worker process as the kernel sees it: its fork, its pipes, its signals, its end."""

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tpukit.backends import cpu, cuda, xla
from tpukit.distributed import worker
from tpukit.distributed.channel import Receiver
from tpukit.distributed.topology import Topology

if TYPE_CHECKING:
    from tpukit.distributed.worker_group import WorkerGroup

_LINES_A_SECOND = 500  # of one process; a browser that has to lay out a hundred thousand lines stops answering
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class WorkerProcess:
    """One worker process, as the kernel sees it: its pipes, the ranks it runs, and its end."""

    def __init__(self, number: int, crew: "WorkerGroup", listener: socket.socket):
        share = crew.plan.cores // crew.plan.processes
        self.rank, self.ranks = number * share, range(number * share, (number + 1) * share)
        self.reported = False
        messages, messages_end = os.pipe()
        output, output_end = os.pipe()
        control_end, self._control = os.pipe()
        others = [messages, output, self._control, *(fd for member in crew.members for fd in member.fds())]
        ties = worker.WorkerPipes(
            self.rank,
            os.getpid(),
            crew.folder,
            crew.limits.heartbeat,
            messages_end,
            output_end,
            control_end,
            tuple(others),
        )
        self.process = multiprocessing.get_context("fork").Process(
            target=worker.main,
            args=(crew.task, functools.partial(_start, crew.plan, number, listener), ties),
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

    def terminate(self) -> None:
        """Send SIGTERM to the process alone: it may still need its own children to end its step."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)

    def dismiss(self) -> None:
        """Close the control pipe: a worker that is done exits, any other kills itself."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def ask_for_stacks(self) -> None:
        """Have the process send the Python stack of each of its cores, which it does unless its interpreter hangs."""
        with contextlib.suppress(OSError):
            os.write(self._control, worker.SEND_STACKS)

    def cpu_seconds(self, proc: Path = Path("/proc")) -> float:
        """Return the processor time of the process and its own children so far; 0 where there is no /proc."""
        total = 0
        for status in proc.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended a moment ago
                fields = status.read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[2]) == self.process.pid:  # its process group
                    total += int(fields[11]) + int(fields[12])
        return total / _TICKS

    def kill(self) -> None:
        """Make sure nothing is left of it."""
        self.dismiss()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.messages.close()
        self.output.close()


class _Output:
    """The kernel's end of a worker's standard output and error, read in whole lines, a flood of them cut short."""

    _KEEP = 200  # lines, for the report of a process that died without a word

    def __init__(self, fd: int):
        self.fd, self.closed = fd, False
        self.tail: list[str] = []
        self._rest = b""
        self._shown = self._hidden = 0
        self._second = 0
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
            texts = [line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1] for line in complete]
            self.tail = [*self.tail, *texts][-self._KEEP :]
            yield from self._few(texts)

    def _few(self, texts: list[str]) -> Iterator[str]:
        second = int(time.monotonic())
        if second != self._second or self.closed:
            yield from self.hidden()
            self._second, self._shown = second, 0
        room = max(0, _LINES_A_SECOND - self._shown)
        yield from texts[:room]
        self._shown += len(texts[:room])
        self._hidden += len(texts[room:])

    def last_words(self) -> str:
        """Return what a dying process printed last; of a crash, the lines around Python's own word of it."""
        crash = next((n for n, line in enumerate(self.tail) if line.startswith("Fatal Python error")), None)
        return "\n".join(self.tail[-20:] if crash is None else self.tail[max(0, crash - 10) : crash + 10])

    def hidden(self) -> Iterator[str]:
        """Yield one line that tells how many were not shown, if any."""
        if self._hidden:
            yield f"... {self._hidden:,} lines more, over {_LINES_A_SECOND} a second, are not shown"
            self._hidden = 0

    def close(self) -> None:
        """Close the pipe."""
        self.closed = True
        os.close(self.fd)


def _start(plan: Topology, rank: int, listener: socket.socket, body: Callable) -> None:
    if plan.backend == "tpu":
        xla.run_tpu(body, rank=rank, processes=plan.processes)
    elif plan.backend == "xla rehearsal":
        xla.run_rehearsal(body, rank=rank, world_size=plan.cores, listener=listener)
    else:
        core = cuda.Cuda if plan.backend == "cuda" else cpu.Cpu
        cpu.run(body, rank=rank, world_size=plan.cores, listener=listener, core=core)


def death(exitcode: int, memory: int | None) -> tuple[str, str]:
    """Say what an exit status means and what to do about it; `memory` is the peak in bytes it last told of."""
    if exitcode == -signal.SIGKILL:
        seen = f"; at its last word it had used {memory / 2**20:,.0f} MiB" if memory else ""
        return (
            f"was killed by SIGKILL, which is what happens where host memory runs out{seen}",
            "a smaller batch_size, fewer DataLoader workers, or a dataset that is read from disk, not held in memory",
        )
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}", "a native library ended it; see what it printed last"
    return (
        f"ended with exit status {exitcode} before it returned",
        "leave the worker function with return, not os._exit",
    )


def wait(members: list[WorkerProcess], seconds: float) -> None:
    """Wait until all processes have ended, at most so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(member.is_gone() for member in members):
        time.sleep(0.01)
