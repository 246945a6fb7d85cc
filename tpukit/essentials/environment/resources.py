"""The processors and the memory that this process may use, and the memory that it has used.

A container often has less than its machine. Its limits are those of control groups, which are
folders in /sys/fs/cgroup. The limits of the groups above a group apply to it, too. Version 1 of
control groups has a tree of folders per controller ("cpu", "memory"), version 2 has a single tree.
"""

import contextlib
import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine

_KIB = 1024
# The files with the limit and with the memory in use, for versions 2 and 1 of control groups.
_LIMITS_AND_USES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def cpus(machine: Machine = THIS_MACHINE) -> int:
    """Return the number of processors that this process may use."""
    found, _ = find_cpus(machine)
    return found


def find_cpus(machine: Machine = THIS_MACHINE) -> tuple[int, str]:
    """Return the number of processors that this process may use, and the source of the number.

    The CPU affinity alone is not enough. In a container with a quota of 2 processors on a machine
    with 96, the affinity lists all 96, and 96 processes would share 2 processors.
    """
    if machine.affinity:
        found = machine.affinity
        source = "CPU affinity of this process"
    elif hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
        source = "CPU affinity of this process"
    else:  # macOS, Windows
        found = os.cpu_count() or 1
        source = "CPU count of the system"
    for group in _control_groups(machine, "cpu"):
        quota = _cpu_quota(group)
        if quota is not None and quota < found:
            found = quota
            source = f"CPU quota in {group}"
    return found, source


def _cpu_quota(group: Path) -> int | None:
    """Return the quota of a control group in processors, rounded up; None without a quota."""
    version_2 = read_text(group / "cpu.max")
    version_1 = f"{read_text(group / 'cpu.cfs_quota_us')} {read_text(group / 'cpu.cfs_period_us')}"
    fields = (version_2 or version_1).split()
    is_quota = len(fields) == 2 and all(field.isdigit() for field in fields)  # not "max", not -1
    if not is_quota:
        return None
    quota, period = map(int, fields)
    return max(1, math.ceil(quota / period))


def find_memory(machine: Machine = THIS_MACHINE) -> tuple[int | None, str]:
    """Return the bytes of memory that this process may use, and the source; None if unknown."""
    total = _size(read_text(machine.proc / "meminfo"), "MemTotal")
    source = f"{machine.proc}/meminfo"
    if total is None:
        total = _physical_memory()  # macOS
        source = "this system does not report it" if total is None else "sysconf"
    for group in _control_groups(machine, "memory"):
        for name, _ in _LIMITS_AND_USES:
            limit = read_text(group / name)
            # Without a limit the file has "max", or in version 1 a number near 2**63.
            if limit.isdigit() and (total is None or int(limit) < total):
                total = int(limit)
                source = f"limit in {group / name}"
    return total, source


def available_memory(machine: Machine = THIS_MACHINE) -> int | None:
    """Return the memory in bytes that can be used without swapping; None if unknown.

    That is the smaller of the system's estimate (MemAvailable) and the unused part of the control
    group's limit. Without /proc/meminfo (macOS) it is half of the physical memory.
    """
    least = _size(read_text(machine.proc / "meminfo"), "MemAvailable")
    if least is None:
        physical = _physical_memory()
        if physical is None:
            return None
        return physical // 2
    for group in _control_groups(machine, "memory"):
        # Cached files count as used memory, but the system frees them when memory is needed.
        cached = _cached_files(group)
        for limit_file, used_file in _LIMITS_AND_USES:
            limit = read_text(group / limit_file)
            used = read_text(group / used_file)
            if limit.isdigit() and used.isdigit():  # "max": no limit
                least = min(least, int(limit) - int(used) + cached)
    return max(0, least)


def _cached_files(group: Path) -> int:
    statistics = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
    total = 0
    for kind in ("active_file", "inactive_file"):
        # In version 1 the values whose names begin with total_ include the groups below this one.
        total += int(statistics.get(f"total_{kind}", statistics.get(kind, 0)))
    return total


def peak_memory() -> int:
    """Return the largest resident set of this process so far, in bytes.

    The value includes pages that the process shares with its parent. It is 0 if the system does not
    report a peak (Windows).
    """
    # /proc first: the peak of `resource` begins with the memory of the parent process at the fork.
    if peak := _resident(THIS_MACHINE).peak:
        return peak
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * _KIB  # macOS counts bytes, Linux KiB


def reset_peak_memory(machine: Machine = THIS_MACHINE) -> None:
    """Reset the peak of this process for `peak_memory` (Linux only)."""
    with contextlib.suppress(OSError):
        # 5 resets the peak (man 5 proc_pid_clear_refs).
        (machine.proc / "self" / "clear_refs").write_text("5")


def own_memory() -> int:
    """Return this process's memory in bytes, without mapped files; 0 if unknown.

    Right after a fork the value is that of the parent. Only the increase since then belongs to this
    process alone.
    """
    return _resident(THIS_MACHINE).own


class OwnMemory:
    """The maximum of `own_memory` since this object was made, or since the last call of `begin`.

    `most` finds a maximum between two of its calls only if the process then used more memory than
    ever before. Files that were mapped and released between the calls may count as own memory.
    """

    # The system records only the peak of all resident memory, which includes mapped files. If the
    # peak has risen since the last read, this class subtracts the larger of the mapped sizes at the
    # two reads. A reset of the peak before each read would be exact, but change `peak_memory`.

    def __init__(self, machine: Machine = THIS_MACHINE):
        self._machine = machine
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Forget the maximum so far."""
        with self._lock:
            self._last = _resident(self._machine)
            self._most = self._last.own

    def most(self) -> int:
        """Return the maximum of `own_memory` in bytes; 0 if unknown."""
        # The thread of heartbeats and a core that returns call this at the same time, and each must
        # see the last read of the other.
        with self._lock:
            now = _resident(self._machine)
            missed = 0
            if now.own and now.peak > self._last.peak:
                missed = now.peak - max(now.mapped, self._last.mapped)
            self._most = max(self._most, now.own, missed)
            self._last = now
            return self._most


class _Resident(NamedTuple):
    """The resident memory of this process, in bytes."""

    own: int  # anonymous pages
    mapped: int  # files and shared memory
    peak: int  # the largest sum of own and mapped so far


def _resident(machine: Machine) -> _Resident:
    status = read_text(machine.proc / "self" / "status")
    mapped = (_size(status, "RssFile") or 0) + (_size(status, "RssShmem") or 0)
    return _Resident(_size(status, "RssAnon") or 0, mapped, peak=_size(status, "VmHWM") or 0)


def _size(text: str, name: str) -> int | None:
    """Return the size in bytes from a line of /proc such as "MemTotal:  24596 kB", or None."""
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    if found:
        return int(found[1]) * _KIB
    return None


def read_text(file: Path) -> str:
    """Read a small system file, such as in /proc or /sys; "" if it is missing or unreadable."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _control_groups(machine: Machine, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of each group above it.

    A line of /proc/self/cgroup is "0::/user.slice" in version 2 of control groups, and
    "4:memory:/docker/1a2b" in version 1.
    """
    for line in read_text(machine.proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = machine.cgroup / controller if controllers else machine.cgroup  # version 1, or 2
        folder = root / path.strip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(root))


def _physical_memory() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
