"""One worker process as the kernel sees it: its fork, its pipes, its signals, its end."""

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from tpukit.essentials.backends import Topology, runtimes
from tpukit.essentials.environment import BusyTime
from tpukit.essentials.launcher import messages, worker
from tpukit.essentials.launcher.channel import Receiver
from tpukit.essentials.launcher.topology import WORKER
from tpukit.essentials.launcher.worker import Task, WorkerPipes, World
from tpukit.essentials.launcher.worker_output import WorkerOutput


class WorkerProcess:
    """One worker process: its pipes, the ranks it runs, and its end.

    Args:
        number: of the process, from 0.
        heartbeat, folder: as in `WorkerPipes`.
        meeting_point: what the runtime opened for the processes to find each other through.
        inherited: the kernel's ends of the pipes of the workers forked before, which this one closes.

    Attributes:
        started: the ranks of its cores, as each reports when its device is up: the order of a TPU's chips is not
            promised (pytorch/xla 3824, 3902), so a rank need not be the number of its process.
        has_failed: True once a core of it has reported a failure, or the kernel has noted its death.
        messages: what its cores send.
        output: its standard output and error.
        busy_time: of the process and its own children.
    """

    def __init__(
        self,
        number: int,
        topology: Topology,
        task: Task,
        *,
        heartbeat: float,
        folder: Path,
        meeting_point: object,
        inherited: Iterable[int],
    ):
        self._expected = topology.ranks(number)
        self.started: list[int] = []
        self.has_failed = False
        messages, messages_end = os.pipe()
        output, output_end = os.pipe()
        control_end, self._control = os.pipe()
        pipes = WorkerPipes(
            rank=self.rank,
            kernel=os.getpid(),
            folder=folder,
            heartbeat=heartbeat,
            messages=messages_end,
            output=output_end,
            control=control_end,
            inherited=(messages, output, self._control, *inherited),
        )
        start = functools.partial(
            runtimes()[topology.backend].start, topology=topology, process=number, meeting_point=meeting_point
        )
        self.process = multiprocessing.get_context("fork").Process(
            target=worker.main, args=(task, start, pipes, World.of(topology)), name=f"{WORKER} {self.rank}"
        )
        # What the kernel has let go of may wait, when it is torn down, for a thread that the worker does not have: what
        # is frozen is left alone there.
        gc.freeze()
        try:
            with warnings.catch_warnings():
                # Python 3.12 and JAX warn of forks from a process with threads. That is what a notebook kernel is; what
                # a worker may not inherit (OpenMP, pipes, signals, streams) it replaces first thing.
                warnings.filterwarnings("ignore", message=r".*(use of fork|os\.fork\(\)).*")
                self.process.start()
        except BaseException:  # the machine allows no more processes
            for fd in (messages, output, self._control):
                os.close(fd)
            raise
        finally:
            gc.unfreeze()
            for fd in (messages_end, output_end, control_end):
                os.close(fd)
        with contextlib.suppress(OSError):
            os.setpgid(self.process.pid, self.process.pid)  # the child does it too: whoever comes first
        self.messages, self.output = Receiver(messages), WorkerOutput(output)
        self.busy_time = BusyTime(self.process.pid)

    @property
    def rank(self) -> int:
        """The first core of the process; the one it will probably have, until its device is up."""
        return min(self.started or self._expected)

    @property
    def unstarted(self) -> int:
        """How many of its cores have not reported yet."""
        return len(self._expected) - len(self.started)

    def fds(self) -> list[int]:
        """Return the kernel's ends of the pipes, which no other worker may keep open."""
        return [self.messages.fd, self.output.fd, self._control]

    def receive(self) -> Iterator[object]:
        """Yield the messages that have arrived by now; an exception stands for one that does not unpickle."""
        for message in self.messages.receive():
            match message:
                case messages.Started(rank):
                    self.started.append(rank)
                case messages.CoreFailed() | Exception():
                    self.has_failed = True
            yield message

    def is_closed(self, fd: int) -> bool:
        """Say whether the pipe has come to its end."""
        return (self.messages if fd == self.messages.fd else self.output).closed

    def is_gone(self) -> bool:
        """Say whether the process has ended."""
        return self.process.exitcode is not None

    def terminate(self) -> None:
        """Send SIGTERM to the process alone: it may still need its own children to end its step."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)

    def dismiss(self, command: bytes = worker.STOP) -> None:
        """Close the control pipe: a worker that is done exits, at GO as soon as it is done; any other kills itself."""
        if self._control >= 0:
            with contextlib.suppress(OSError):  # said, too: a launch in another thread may have forked this end along
                os.write(self._control, command)
            os.close(self._control)
            self._control = -1

    def ask_for_stacks(self) -> None:
        """Have the process send the Python stack of each of its cores, which it does unless its interpreter hangs."""
        with contextlib.suppress(OSError):
            os.write(self._control, worker.SEND_STACKS)

    def kill(self) -> None:
        """Make sure nothing is left of the process and its children, and close the pipes."""
        self.dismiss()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        # joblib's semaphores have names, which a process that is killed with them would have removed.
        for semaphore in Path("/dev/shm").glob(f"sem.loky-{self.process.pid}-*"):
            semaphore.unlink(missing_ok=True)
        self.process.close()
        self.messages.close()
        self.output.close()
