"""Find and remove workers and temporary folders that a killed kernel has left behind.

Each worker has a mark: an open file in memory, whose name contains the kernel's process id and
start time, such as "tpukit-4711-123456". If no process has that id and start time, the worker is an
orphan. The name of a temporary folder contains the id and start time of its process, too, and the
number of its PID namespace: containers with a common /tmp do not see each other's processes.
"""

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tpukit.essentials.display import Table, counted
from tpukit.essentials.environment.chip_holders import chip_holders, command, entries, open_files
from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine
from tpukit.essentials.environment.resources import read_text

# The name of the mark among the open files of a worker, and the name of the folder of a run.
_MARK = re.compile(r"/memfd:tpukit-(\d+)-(\d+)")
_FOLDER = re.compile(r"tpukit-(\d+)-(\d+)-(\d+)-")
_PROC = THIS_MACHINE.proc
_LONGEST_SOCKET_PATH = 107  # characters: 108 bytes with the final zero (man 7 unix)
# tempfile and multiprocessing append such a name to the path of the folder.
_SOCKET_NAME = len("/xxxxxxxx/listener-xxxxxxxx")
_GRACE_SECONDS = 2.0  # after SIGTERM, and again after SIGKILL
_START_TIME = 19  # field of /proc/PID/stat, counted from the state on (man 5 proc)


@dataclass(frozen=True)
class Orphan:
    """A worker whose kernel has ended.

    Attributes:
        pid: process id of the worker.
        kernel: process id of its kernel.
        command: command line of the worker.
        chips: the device nodes that the worker holds.
    """

    pid: int
    kernel: int
    command: str
    chips: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class CleanupReport(Table):
    """The orphaned workers that `cleanup` has found and ended, one per row."""

    orphans: tuple[Orphan, ...]

    @property
    def title(self) -> str:
        """The number of workers that were ended, as a line."""
        if not self.orphans:
            return "no orphaned worker of an earlier run"
        return f"ended {counted(len(self.orphans), 'orphaned worker')}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return three texts per worker: its process; its kernel; its chips and command."""
        found = []
        for orphan in self.orphans:
            chips = ", ".join(orphan.chips) or "no chip"
            row = (
                f"process {orphan.pid}",
                f"of kernel {orphan.kernel}",
                f"{chips}: {orphan.command}",
            )
            found.append(row)
        return found


def mark(kernel: int) -> None:
    """Mark this process, and every process that it forks, as a worker of a kernel.

    `cleanup` finds the mark, even after the kernel has ended. Only Linux has such marks; on other
    systems this function does nothing.

    Args:
        kernel: process id of the kernel.
    """
    if hasattr(os, "memfd_create"):
        # The mark is the name of an open file, which /proc shows. It does not depend on the parent
        # or the process group. The file stays open until the process ends, on purpose.
        os.memfd_create(f"tpukit-{kernel}-{_started(_PROC, kernel)}")


def make_folder() -> Path:
    """Make a temporary folder named after this process; remove folders of ended processes.

    The folder is in TMPDIR, or in /tmp if the path of TMPDIR is too long for sockets. Without
    /proc no folder is removed, because tpukit cannot see which processes have ended.
    """
    # Workers create sockets in the folder, and the path of a socket has at most 107 characters.
    # Without their sockets, the processes of a DataLoader would wait forever.
    namespace = _namespace()
    name = f"tpukit-{os.getpid()}-{_started(_PROC, os.getpid())}-{namespace}-"
    place = tempfile.gettempdir()
    is_too_long = len(place) + len(name) + _SOCKET_NAME > _LONGEST_SOCKET_PATH
    if is_too_long and os.access("/tmp", os.W_OK):
        place = "/tmp"
    for folder in entries(Path(place)):
        match = _FOLDER.match(folder.name)
        if not match:
            continue
        pid, started, its_namespace = map(int, match.groups())
        # The process of a folder from another namespace may run, although it is not visible here.
        if its_namespace == namespace and _started(_PROC, pid) != started:
            shutil.rmtree(folder, ignore_errors=True)  # an error if it belongs to another user
    return Path(tempfile.mkdtemp(prefix=name, dir=place))


def cleanup(machine: Machine = THIS_MACHINE) -> CleanupReport:
    """End this user's workers whose kernel has ended.

    Workers normally end with their kernel, so that there is nothing to do. An orphan may still hold
    a chip, which `check` then reports as "in use". `cleanup` does not touch workers of running
    kernels, workers in a container, or any other process.

    Args:
        machine: the machine; this machine by default.

    Returns:
        A `CleanupReport` of the workers that were ended, which displays itself as a table.
    """
    orphans = _find(machine)
    # Start times are compared, because a new process may get the id of an orphan that has ended.
    started = {orphan.pid: _started(machine.proc, orphan.pid) for orphan in orphans}

    def alive() -> list[int]:
        return [
            pid for pid, when in started.items() if when and _started(machine.proc, pid) == when
        ]

    # SIGTERM first, so that `finally` blocks run, then SIGKILL, which Windows does not have.
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        for pid in alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and alive():
            time.sleep(0.05)
    return CleanupReport(tuple(orphans))


def _namespace(process: Path = _PROC / "self") -> int:
    """Return the number of the PID namespace of a process in /proc; 0 if it cannot be read."""
    try:
        return os.stat(process / "ns" / "pid").st_ino
    except OSError:
        return 0


def _find(machine: Machine) -> list[Orphan]:
    proc = machine.proc
    here = _namespace(proc / "self")
    chips = list(chip_holders(machine))
    found = []
    for process in entries(proc):
        if not process.name.isdigit() or not _is_mine(process):
            continue
        # In a container the kernel has another id than here, so it would seem to have ended.
        if _namespace(process) != here:
            continue
        # A process without a mark is no worker; one mark is enough.
        marks = [match for target in open_files(process) if (match := _MARK.match(target))]
        if not marks:
            continue
        kernel = int(marks[0][1])
        started = int(marks[0][2])
        has_ended = _started(proc, kernel) != started  # also if a new process has the kernel's id
        if has_ended:
            pid = int(process.name)
            held = tuple(node for holder, node in chips if holder == pid)
            found.append(Orphan(pid, kernel, command=command(proc, pid), chips=held))
    return found


def _is_mine(process: Path) -> bool:
    try:
        return process.stat().st_uid == os.getuid()
    except OSError:  # the process has just ended
        return False


def _started(proc: Path, pid: int) -> int:
    """Return the start time of a process in clock ticks; 0 if it has ended or is a zombie."""
    fields = read_text(proc / str(pid) / "stat").rpartition(")")[2].split()
    has_ended = not fields or fields[0] in "ZX"
    if has_ended:
        return 0
    return int(fields[_START_TIME])
