"""What outlives a kernel that was killed: workers, known by a mark, and temporary folders, known by their name."""

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tpukit.display import tables
from tpukit.machine.chips import chip_holders, command, entries

_MARK = re.compile(r"/memfd:tpukit-(\d+)-(\d+)")
_FOLDER = re.compile(r"tpukit-(\d+)-(\d+-\d+)-")
_PROC = Path("/proc")
_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Leftover:
    """A worker of a kernel that is gone. `chips` are the device nodes it holds."""

    pid: int
    kernel: int
    command: str
    chips: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Released:
    """The leftover workers that `release` has ended."""

    leftovers: tuple[Leftover, ...]

    @property
    def title(self) -> str:
        """What was done, in one line."""
        count = len(self.leftovers)
        return f"ended {count} leftover worker{'s' * (count > 1)}" if count else "no leftover worker of an earlier run"

    def _rows(self) -> list[tuple[str, str, str]]:
        return [
            (f"process {one.pid}", f"of kernel {one.kernel}", f"{', '.join(one.chips) or 'no chip'}: {one.command}")
            for one in self.leftovers
        ]

    def __repr__(self) -> str:
        return f"{self.title}\n{tables.as_text(self._rows())}" if self.leftovers else self.title

    def _repr_html_(self) -> str:
        return tables.as_html(self._rows(), title=self.title)


def mark(kernel: int) -> None:
    """Mark this process, and every fork of it, as a worker of a kernel: an empty file in memory with a name."""
    if hasattr(os, "memfd_create"):  # Linux
        os.memfd_create(f"tpukit-{kernel}-{_started(_PROC, kernel)}")


def make_folder() -> Path:
    """Make a temporary folder that bears this process's name, and remove those of processes that are gone."""
    for folder in entries(Path(tempfile.gettempdir())):
        if (match := _FOLDER.match(folder.name)) and _life(int(match[1])) != match[2]:
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays
    return Path(tempfile.mkdtemp(prefix=f"tpukit-{os.getpid()}-{_life(os.getpid())}-"))


def release(*, proc: Path = _PROC, dev: Path = Path("/dev")) -> Released:
    """End the workers of this user that have outlived their kernel, and say which they were.

    Workers end with their kernel, so there should be none; where one is, it may hold a chip that then reads "in use".
    Workers of kernels that are alive, and processes that are no workers, are left alone.
    """
    leftovers = _leftovers(proc, dev)
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        for one in leftovers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and any(_started(proc, one.pid) for one in leftovers):
            time.sleep(0.05)
    return Released(tuple(leftovers))


def _life(pid: int) -> str:
    """Tell a process from another that has its number later, or in another container with the same /tmp."""
    try:
        namespace = os.stat(_PROC / "self" / "ns" / "pid").st_ino
    except OSError:  # no /proc
        namespace = 0
    return f"{_started(_PROC, pid)}-{namespace}"


def _leftovers(proc: Path, dev: Path) -> list[Leftover]:
    found = []
    chips = list(chip_holders(proc, dev))
    for process in entries(proc):
        if not process.name.isdigit() or not _is_mine(process):
            continue
        marks = [match for fd in entries(process / "fd") if (match := _MARK.match(_target(fd)))]
        for match in marks[:1]:
            kernel, started = int(match[1]), int(match[2])
            if _started(proc, kernel) != started:  # gone; another process may have its number by now
                pid = int(process.name)
                held = tuple(node for holder, node in chips if holder == pid)
                found.append(Leftover(pid, kernel, command(proc, pid), held))
    return found


def _is_mine(process: Path) -> bool:
    try:
        return process.stat().st_uid == os.getuid()
    except OSError:  # it has just ended
        return False


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:  # closed a moment ago
        return ""


def _started(proc: Path, pid: int) -> int:
    """Return when a process started, in the system's own ticks; 0 if it is gone, or a zombie."""
    try:
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
