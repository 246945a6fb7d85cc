"""The processors and memory that this process may use, with the limits of its container, and the memory it has used."""

import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine


def cpus(machine: Machine = THIS_MACHINE) -> int:
    """Return the number of processors that this process may use; in a container often fewer than the machine has."""
    return find_cpus(machine)[0]


def find_cpus(machine: Machine = THIS_MACHINE) -> tuple[int, str]:
    """Return the number of processors that this process may use, and where that number comes from.

    The CPU affinity alone is not enough: in a container with a quota of two processors on a machine of 96, it lists all
    96, and 96 processes would then share two.
    """
    if machine.affinity is None and not hasattr(os, "sched_getaffinity"):  # macOS, Windows
        found, source = os.cpu_count() or 1, "CPU count of the system"
    else:
        found, source = machine.affinity or len(os.sched_getaffinity(0)), "CPU affinity of this process"
    for group in _control_groups(machine, "cpu"):
        version_1 = f"{read_text(group / 'cpu.cfs_quota_us')} {read_text(group / 'cpu.cfs_period_us')}"
        numbers = (read_text(group / "cpu.max") or version_1).split()
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):  # "max" and -1 mean no quota
            allowed = max(1, math.ceil(int(numbers[0]) / int(numbers[1])))
            if allowed < found:
                found, source = allowed, f"CPU quota in {group}"
    return found, source


def find_memory(machine: Machine = THIS_MACHINE) -> tuple[int | None, str]:
    """Return the bytes of memory that this process may use, and where that number comes from; None if unknown."""
    total, source = None, "this system does not tell"
    for line in read_text(machine.proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total, source = int(line.split()[1]) * 1024, f"{machine.proc}/meminfo"
    if total is None and (physical := _physical_memory()) is not None:  # macOS
        total, source = physical, "sysconf"
    for group in _control_groups(machine, "memory"):
        for file in (group / "memory.max", group / "memory.limit_in_bytes"):
            limit = read_text(file)
            if limit.isdigit() and (total is None or int(limit) < total):  # "max", or 2**63 in version 1: no limit
                total, source = int(limit), f"limit in {file}"
    return total, source


def available_memory(machine: Machine = THIS_MACHINE) -> int | None:
    """Return the bytes of memory that can still be filled without swapping; None if unknown.

    The smaller of the system's own estimate (MemAvailable) and what the limit of the control group leaves. Where there
    is no /proc/meminfo (macOS), half of all memory.
    """
    found = re.search(r"^MemAvailable: +(\d+) kB", read_text(machine.proc / "meminfo"), re.MULTILINE)
    if not found:
        physical = _physical_memory()
        return physical and physical // 2
    least = int(found[1]) * 1024
    for group in _control_groups(machine, "memory"):
        statistics = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
        # Cached files count as used, but the system drops them when memory is needed. In version 1 of control groups,
        # the names that begin with total_ include the groups below.
        kinds = ("active_file", "inactive_file")
        files = sum(int(statistics.get(f"total_{kind}", statistics.get(kind, 0))) for kind in kinds)
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = read_text(group / limit), read_text(group / used)
            if limit.isdigit() and used.isdigit():  # "max": no limit
                least = min(least, int(limit) - int(used) + files)
    return max(0, least)


def peak_memory() -> int:
    """Return the largest resident set of this process so far, in bytes, including pages shared with its parent.

    0 where the system does not tell (Windows).
    """
    # Not first what `resource` says: it begins with what the process held that started this one.
    if peak := _resident(THIS_MACHINE)[2]:
        return peak
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def own_memory() -> int:
    """Return the bytes of memory that this process holds now, without files that are mapped; 0 if unknown.

    Right after a fork it is what the parent had; what is added later is this process's own.
    """
    return _resident(THIS_MACHINE)[0]


class OwnMemory:
    """The most of `own_memory` since this was made; what was held between two reads only counts too.

    The system keeps a peak of all that is resident, mapped files included, and of nothing smaller. Where it rose since
    the last read, what was mapped then or is mapped now, the larger, is taken off. So a file that was mapped and let go
    between two reads may count. A reset of the peak (/proc/self/clear_refs) would take it from `peak_memory` too.
    """

    def __init__(self, machine: Machine = THIS_MACHINE):
        self._machine, self._lock = machine, threading.Lock()
        self._most, self._mapped, self._peak = _resident(machine)

    def most(self) -> int:
        """Return it in bytes; 0 if unknown."""
        with self._lock:  # of a heartbeat and of a core that returns, both have to know what either read
            own, mapped, peak = _resident(self._machine)
            missed = peak - max(mapped, self._mapped) if own and peak > self._peak else 0
            self._most, self._mapped, self._peak = max(self._most, own, missed), mapped, peak
            return self._most


def _resident(machine: Machine) -> tuple[int, int, int]:
    """Return what this process holds for itself, what it has mapped or shares, and the peak of both, in bytes."""
    found = re.findall(
        r"^(RssAnon|RssFile|RssShmem|VmHWM):\s+(\d+) kB", read_text(machine.proc / "self" / "status"), re.MULTILINE
    )
    sizes = {name: int(size) * 1024 for name, size in found}
    mapped = sizes.get("RssFile", 0) + sizes.get("RssShmem", 0)
    return sizes.get("RssAnon", 0), mapped, sizes.get("VmHWM", 0)


def read_text(file: Path) -> str:
    """Read a small system file, such as one in /proc or /sys; return "" where it is missing or unreadable."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _control_groups(machine: Machine, controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process: its own and those above it."""
    for line in read_text(machine.proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = machine.cgroup / controller if controllers else machine.cgroup  # version 1 has one tree per controller
        folder = root / path.strip("/")
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(root)))


def _physical_memory() -> int | None:
    known = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
