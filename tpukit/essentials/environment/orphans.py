"""Workers and temporary folders that have outlived a killed kernel: found by their mark or their name, and removed."""

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

_MARK = re.compile(r"/memfd:tpukit-(\d+)-(\d+)")
_FOLDER = re.compile(r"tpukit-(\d+)-(\d+-\d+)-")
_PROC = THIS_MACHINE.proc
_LONGEST_SOCKET_PATH = 107
_SOCKET_NAME = len("/xxxxxxxx/listener-xxxxxxxx")  # as tempfile and multiprocessing end the path
_GRACE_SECONDS = 2.0  # after SIGTERM, and again after SIGKILL


@dataclass(frozen=True)
class Orphan:
    """A worker whose kernel has ended. `chips` are the device nodes it holds."""

    pid: int
    kernel: int
    command: str
    chips: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class CleanupReport(Table):
    """The orphaned workers that `release` has ended, with one row for each."""

    orphans: tuple[Orphan, ...]

    @property
    def title(self) -> str:
        """What was done, in one line."""
        count = len(self.orphans)
        return f"ended {counted(count, 'orphaned worker')}" if count else "no orphaned worker of an earlier run"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (process, kernel, chips and command) of every worker."""
        return [
            (f"process {one.pid}", f"of kernel {one.kernel}", f"{', '.join(one.chips) or 'no chip'}: {one.command}")
            for one in self.orphans
        ]


def mark(kernel: int) -> None:
    """Mark this process, and every process it forks, as a worker of a kernel.

    The mark is an empty file in memory whose name contains the kernel's process id and start time. /proc shows it among
    the open files of the worker, even if the worker has left its session and has no living parent.
    """
    if hasattr(os, "memfd_create"):  # Linux
        os.memfd_create(f"tpukit-{kernel}-{_started(_PROC, kernel)}")


def make_folder() -> Path:
    """Make a temporary folder named after this process, and remove the folders of processes that have ended.

    Sockets are made in it, whose whole path may have 107 characters (AF_UNIX). Where TMPDIR is too long for that it is
    made in /tmp: a DataLoader's processes would wait for ever for one that cannot be made.
    """
    name, place = f"tpukit-{os.getpid()}-{_identity(os.getpid())}-", tempfile.gettempdir()
    if len(place) + len(name) + _SOCKET_NAME > _LONGEST_SOCKET_PATH and os.access("/tmp", os.W_OK):
        place = "/tmp"
    for folder in entries(Path(place)):
        if (match := _FOLDER.match(folder.name)) and _identity(int(match[1])) != match[2]:
            shutil.rmtree(folder, ignore_errors=True)  # a folder of another user stays
    return Path(tempfile.mkdtemp(prefix=name, dir=place))


def cleanup(machine: Machine = THIS_MACHINE) -> CleanupReport:
    """End the workers of this user that have outlived their kernel, and return which they were.

    Workers end with their kernel, so there should be none. If there is one, it may still hold a chip, which `check`
    then reports as "in use". Workers of living kernels and all other processes are left alone.
    """
    proc, orphans = machine.proc, _find(machine)
    started = {one.pid: _started(proc, one.pid) for one in orphans}

    def alive() -> list[int]:
        # The start times are compared because another process may get the id of an orphan that has ended.
        return [pid for pid, when in started.items() if when and _started(proc, pid) == when]

    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        for pid in alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and alive():
            time.sleep(0.05)
    return CleanupReport(tuple(orphans))


def _identity(pid: int) -> str:
    """Return the start time and PID namespace of a process: its id is used again, and by containers that share /tmp."""
    try:
        namespace = os.stat(_PROC / "self" / "ns" / "pid").st_ino
    except OSError:  # no /proc
        namespace = 0
    return f"{_started(_PROC, pid)}-{namespace}"


def _find(machine: Machine) -> list[Orphan]:
    found, proc = [], machine.proc
    chips = list(chip_holders(machine))
    for process in entries(proc):
        if not process.name.isdigit() or not _is_mine(process):
            continue
        marks = [match for target in open_files(process) if (match := _MARK.match(target))]
        for match in marks[:1]:
            kernel, started = int(match[1]), int(match[2])
            if _started(proc, kernel) != started:  # it has ended, even if another process has its id now
                pid = int(process.name)
                held = tuple(node for holder, node in chips if holder == pid)
                found.append(Orphan(pid, kernel, command(proc, pid), held))
    return found


def _is_mine(process: Path) -> bool:
    try:
        return process.stat().st_uid == os.getuid()
    except OSError:  # it has just ended
        return False


def _started(proc: Path, pid: int) -> int:
    """Return the start time of a process in clock ticks; 0 if it has ended or is a zombie."""
    fields = read_text(proc / str(pid) / "stat").rpartition(")")[2].split()
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0
