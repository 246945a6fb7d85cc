"""What this process may use: processors and memory, the limits of its container included; and what it has used."""

import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def cpus(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Return how many processors this process may use, which in a container is often fewer than the machine has."""
    return find_cpus(proc, cgroup)[0]


def find_cpus(proc: Path = _PROC, cgroup: Path = _CGROUP) -> tuple[int, str]:
    """Return the processors that this process may use, and where that number comes from.

    The affinity alone is not enough: a container with a quota of two processors on a machine of 96 shows all 96, and
    96 processes would then share two.
    """
    if hasattr(os, "sched_getaffinity"):
        found, source = len(os.sched_getaffinity(0)), "CPU affinity of this process"
    else:  # macOS, Windows
        found, source = os.cpu_count() or 1, "CPU count of the system"
    for group in _control_groups(proc, cgroup, "cpu"):
        quota = (
            read_text(group / "cpu.max")
            or f"{read_text(group / 'cpu.cfs_quota_us')} {read_text(group / 'cpu.cfs_period_us')}"
        )
        numbers = quota.split()
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):  # "max" and -1 mean no quota
            allowed = max(1, math.ceil(int(numbers[0]) / int(numbers[1])))
            if allowed < found:
                found, source = allowed, f"CPU quota in {group}"
    return found, source


def find_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> tuple[int | None, str]:
    """Return the bytes of memory that this process may use, and where that number comes from; None if not known."""
    total, source = None, "this system does not say"
    for line in read_text(proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total, source = int(line.split()[1]) * 1024, f"{proc}/meminfo"
    if total is None and (physical := _physical_memory()) is not None:  # macOS
        total, source = physical, "sysconf"
    for group in _control_groups(proc, cgroup, "memory"):
        for file in (group / "memory.max", group / "memory.limit_in_bytes"):
            limit = read_text(file)
            if limit.isdigit() and (total is None or int(limit) < total):  # "max", or 2**63 in version 1: no limit
                total, source = int(limit), f"limit in {file}"
    return total, source


def available_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes of memory that files may fill, pushing out nothing but other files; None if not known.

    What the kernel calls available or what a control group's limit leaves, whichever is less; half of all memory where
    there is no /proc/meminfo (macOS).
    """
    found = re.search(r"^MemAvailable: +(\d+) kB", read_text(proc / "meminfo"), re.MULTILINE)
    if not found:
        physical = _physical_memory()
        return physical and physical // 2
    least = int(found[1]) * 1024
    for group in _control_groups(proc, cgroup, "memory"):
        statistics = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
        # Files in the page cache count as used, but make room for others. Version 1 has sums under names of their own.
        kinds = ("active_file", "inactive_file")
        files = sum(int(statistics.get(f"total_{kind}", statistics.get(kind, 0))) for kind in kinds)
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = read_text(group / limit), read_text(group / used)
            if limit.isdigit() and used.isdigit():  # "max": no limit
                least = min(least, int(limit) - int(used) + files)
    return max(0, least)


def peak_memory() -> int:
    """Return this process's largest resident set so far, in bytes, pages shared with its parent included.

    0 where the system does not say (Windows).
    """
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_text(file: Path) -> str:
    """Read a small file of the system's; empty where it is missing or unreadable."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _control_groups(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """Yield the folders whose limits bind this process: its own control group and those above it."""
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup  # version 1 has a tree for each controller
        folder = root / path.strip("/")
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(root)))


def _physical_memory() -> int | None:
    known = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
