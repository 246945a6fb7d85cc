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
        heartbeat, folder: as in `WorkerPipes`.
        meeting_point: the runtime's object through which the processes find each other.
        inherited: file descriptors of this process's ends of the pipes to earlier workers. The fork
            copies them, and the new worker closes its copies.

    Attributes:
        started: ranks of its cores whose devices have started, as the cores report them. The order
            of a TPU's chips is not fixed (pytorch/xla 3824, 3902), so a rank need not be the number
            of its process.
        has_failed: True after a core of the process has reported a failure, after a message could
            not be unpickled, or after the process has died.
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
        # Three pipes: the kernel reads messages and output, and writes commands.
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
            # The worker has its own copies. Open ends in the kernel would hide the worker's end.
            for fd in (messages_end, output_end, control_end):
                os.close(fd)
        self.messages = Receiver(messages_fd)
        self.output = WorkerOutput(output_fd)
        self.busy_time = BusyTime(self.process.pid)

    @property
    def rank(self) -> int:
        """The lowest rank of the process; until a device has started, the expected rank."""
        return min(self.started or self._expected)

    @property
    def unstarted(self) -> int:
        """Number of the process's cores whose devices have not started yet."""
        return len(self._expected) - len(self.started)

    def fds(self) -> list[int]:
        """Return the kernel's ends of the pipes, which no other worker may keep open."""
        return [self.messages.fd, self.output.fd, self._control]

    def receive(self) -> Iterator[object]:
        """Yield the messages that have arrived, as `Receiver.receive` does."""
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
        """Send SIGTERM to the process only; its last step may still need its child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)

    def dismiss(self, command: bytes = worker.STOP) -> None:
        """Send the last command, and close the control pipe.

        Args:
            command: `worker.GO`: exit as soon as the work is done. `worker.STOP`: exit now.
        """
        if self._control < 0:
            return
        with contextlib.suppress(OSError):
            # To close the pipe is not enough: if a launch in another thread has forked meanwhile,
            # its worker has a copy of this end, and the pipe stays open.
            os.write(self._control, worker.COMMAND.pack(command, 0))
        os.close(self._control)
        self._control = -1

    def command(self, command: bytes, number: int = 0) -> None:
        """Send a command of `worker`; without effect if the process has ended."""
        with contextlib.suppress(OSError):
            os.write(self._control, worker.COMMAND.pack(command, number))

    def begin_run(self) -> None:
        """Forget the failure and the output of the session's previous run."""
        self.has_failed = False
        self.output.forget()

    def kill(self) -> None:
        """Kill the process and its children, and close the pipes."""
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
    # The destructor of an object of the kernel may wait for a thread, which the worker does not
    # have. The garbage collector does not destroy frozen objects.
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
        # The child makes this call, too, because the kernel or the child may be first to need it.
        os.setpgid(process.pid, process.pid)
