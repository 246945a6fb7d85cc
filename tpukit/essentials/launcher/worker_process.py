"""A worker process as the kernel controls it: its fork, its pipes, its signals, its end."""

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
    """A worker process: its pipes, the ranks of its cores, and its end.

    Args:
        number: number of the process, from 0.
        topology: the layout of the run.
        task: the work.
        heartbeat: as in `WorkerPipes`.
        folder: as in `WorkerPipes`.
        meeting_point: opened by the runtime, so that the processes find each other.
        inherited: the kernel's ends of the pipes of workers that were forked before. This worker
            closes them.

    Attributes:
        started: ranks of its cores, as each reports when its device has started. The order of a
            TPU's chips is not fixed (pytorch/xla 3824, 3902), so a rank need not be the number of
            its process.
        has_failed: True once a core of it has reported a failure, or the kernel has noted that
            the process died.
        process: the `multiprocessing.Process`.
        messages: the messages of its cores.
        output: its standard output and error.
        busy_time: processor time of the process and its children.
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
        messages_fd, messages_end = os.pipe()
        output_fd, output_end = os.pipe()
        control_end, self._control = os.pipe()
        pipes = WorkerPipes(
            rank=self.rank,
            kernel=os.getpid(),
            folder=folder,
            heartbeat=heartbeat,
            messages=messages_end,
            output=output_end,
            control=control_end,
            inherited=(messages_fd, output_fd, self._control, *inherited),
        )
        start = functools.partial(
            runtimes()[topology.backend].start,
            topology=topology,
            process=number,
            meeting_point=meeting_point,
        )
        self.process = multiprocessing.get_context("fork").Process(
            target=worker.main,
            args=(task, start, pipes, World.of(topology)),
            name=f"{WORKER} {self.rank}",
        )
        try:
            _fork(self.process)
        except BaseException:  # the machine allows no more processes
            for fd in (messages_fd, output_fd, self._control):
                os.close(fd)
            raise
        finally:
            for fd in (messages_end, output_end, control_end):
                os.close(fd)
        self.messages = Receiver(messages_fd)
        self.output = WorkerOutput(output_fd)
        self.busy_time = BusyTime(self.process.pid)

    @property
    def rank(self) -> int:
        """The first core of the process; until a device has started, its probable rank."""
        return min(self.started or self._expected)

    @property
    def unstarted(self) -> int:
        """Number of its cores that have not reported yet."""
        return len(self._expected) - len(self.started)

    def fds(self) -> list[int]:
        """Return the kernel's ends of the pipes, which no other worker may keep open."""
        return [self.messages.fd, self.output.fd, self._control]

    def receive(self) -> Iterator[object]:
        """Yield the messages that have arrived; an exception for each that does not unpickle."""
        for message in self.messages.receive():
            match message:
                case messages.Started(rank):
                    self.started.append(rank)
                case messages.CoreFailed() | Exception():
                    self.has_failed = True
            yield message

    def is_closed(self, fd: int) -> bool:
        """Return whether this pipe has ended."""
        pipe = self.messages if fd == self.messages.fd else self.output
        return pipe.closed

    def is_gone(self) -> bool:
        """Return whether the process has ended."""
        return self.process.exitcode is not None

    def terminate(self) -> None:
        """Send SIGTERM to the process alone: it may need its children to end its step."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)

    def dismiss(self, command: bytes = worker.STOP) -> None:
        """Send the last command, and close the control pipe.

        At GO a worker exits as soon as it has finished. At STOP it kills itself if it has not
        finished.
        """
        if self._control < 0:
            return
        with contextlib.suppress(OSError):
            # The end of the pipe is not enough: a launch in another thread may have forked
            # meanwhile, and then its worker keeps this end open, too.
            os.write(self._control, worker.COMMAND.pack(command, 0))
        os.close(self._control)
        self._control = -1

    def command(self, command: bytes, number: int = 0) -> None:
        """Send a command of `worker`; a process that is gone gets none."""
        with contextlib.suppress(OSError):
            os.write(self._control, worker.COMMAND.pack(command, number))

    def begin_run(self) -> None:
        """Forget the run before, in a session."""
        self.has_failed = False
        self.output.forget()

    def kill(self) -> None:
        """End the process and its children for certain, and close the pipes."""
        self.dismiss()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        # joblib's semaphores have names, which a killed process cannot remove.
        for semaphore in Path("/dev/shm").glob(f"sem.loky-{self.process.pid}-*"):
            semaphore.unlink(missing_ok=True)
        self.process.close()
        self.messages.close()
        self.output.close()


def _fork(process: multiprocessing.Process) -> None:
    # Objects that the kernel has released may wait for a thread when they are torn down, and the
    # worker does not have that thread. The collector leaves frozen objects alone.
    gc.freeze()
    try:
        with warnings.catch_warnings():
            # Python 3.12 and JAX warn of forks from a process with threads, which a notebook kernel
            # is. A worker first replaces everything that it must not inherit: OpenMP, pipes,
            # signals, streams.
            warnings.filterwarnings("ignore", message=r".*(use of fork|os\.fork\(\)).*")
            process.start()
    finally:
        gc.unfreeze()
    with contextlib.suppress(OSError):
        # The child does this, too, because either of them may come first.
        os.setpgid(process.pid, process.pid)
