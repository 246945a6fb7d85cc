"""For how long have the processes of a group been busy? On a crowded machine that is more than processor time."""

import contextlib
import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_NANOSECONDS = 1e9


class BusyTime:
    """For how long the processes of a group used a processor, or waited for one or for a disk; 0 without /proc."""

    def __init__(self, group: int, proc: Path = Path("/proc")):
        self._group, self._proc = group, proc
        self._waited: dict[Path, float] = {}  # for a processor, by thread
        self._seconds_waited, self._looked = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Return for how long they have been busy so far, the time of several threads added up.

        How long a thread that was ready had to wait for a processor, Linux says itself (`/proc/*/schedstat`, see
        kernel.org's "Scheduler Statistics"). Where it does not, and for a disk, at most half a second is counted
        between two calls, if a thread is seen to wait.
        """
        used, waited, is_seen = 0, {}, False
        for status in self._proc.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended a moment ago
                fields = _fields(status)
                if int(fields[2]) != self._group:
                    continue
                used += int(fields[11]) + int(fields[12])
                for thread in status.parent.glob("task/*"):
                    told = _seconds_waited(thread)
                    waited[thread] = told or 0.0
                    is_seen = is_seen or _fields(thread / "stat")[0] in ("RD" if told is None else "D")
        now = time.monotonic()
        self._seconds_waited += sum(seconds - self._waited.get(thread, 0.0) for thread, seconds in waited.items())
        self._seconds_waited += min(0.5, now - self._looked) * is_seen
        self._waited, self._looked = waited, now
        return used / _TICKS + self._seconds_waited


def _fields(status: Path) -> list[str]:
    """Return the fields of a stat file of /proc from the state on; the command before them may hold spaces."""
    return status.read_text(errors="replace").rpartition(")")[2].split()


def _seconds_waited(thread: Path) -> float | None:
    """Return for how long a thread has waited for a processor since it began; None where the kernel does not count."""
    try:
        _ran, waited, _times = (thread / "schedstat").read_text().split()
    except FileNotFoundError:
        return None
    return int(waited) / _NANOSECONDS
