"""How long the processes of a group have been busy.

On a crowded machine this is more than processor time, because a thread that is ready to run also
waits for a processor:

    busy = processor time + time spent waiting for a processor + time spent waiting for a disk

The watchdog compares it with the clock: a worker that is not busy is stuck.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

# The unit of processor time in /proc; 100 on all common kernels.
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_NANOSECONDS = 1e9
_LONGEST_SIGHTING = 0.5  # seconds that are counted at most for a thread that was seen to wait

# Fields of /proc/PID/stat, counted from the state on (man 5 proc).
_STATE = 0
_GROUP = 2
_USER_TICKS = 11
_SYSTEM_TICKS = 12


class _Sample(NamedTuple):
    """The state of all processes of the group at one moment."""

    ticks: int  # of processor time
    waited: dict[Path, float]  # seconds that each thread has waited for a processor
    is_waiting: bool  # some thread waits now, in a way that the system does not count


class BusyTime:
    """The time that the processes of a group used a processor, or waited for one or for a disk.

    Args:
        group: id of the process group.
        proc: the folder /proc; without it the time is 0.
    """

    def __init__(self, group: int, proc: Path = Path("/proc")):
        self._group = group
        self._proc = proc
        self._waited: dict[Path, float] = {}  # per thread, at the last call
        self._seconds_waited = 0.0
        self._last_call = time.monotonic()

    def seconds(self) -> float:
        """Return the busy time so far, added up over all threads.

        Linux counts how long a ready thread has waited for a processor (`/proc/*/schedstat`, see
        "Scheduler Statistics" on kernel.org). If it does not count this, a thread that is seen
        waiting adds the time since the last call, at most half a second; waits for a disk are
        always measured in this way.
        """
        sample = self._sample()
        now = time.monotonic()
        for thread, seconds in sample.waited.items():
            self._seconds_waited += seconds - self._waited.get(thread, 0.0)
        if sample.is_waiting:
            self._seconds_waited += min(_LONGEST_SIGHTING, now - self._last_call)
        self._waited = sample.waited
        self._last_call = now
        return sample.ticks / _TICKS_PER_SECOND + self._seconds_waited

    def _sample(self) -> _Sample:
        ticks = 0
        waited: dict[Path, float] = {}
        is_waiting = False
        for status in self._proc.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the process ended a moment ago
                fields = _fields(status)
                if int(fields[_GROUP]) != self._group:
                    continue
                ticks += int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
                for thread in status.parent.glob("task/*"):
                    counted = _seconds_waited(thread)
                    waited[thread] = counted or 0.0
                    # R: ready or running; D: waits for a disk.
                    uncounted_states = "RD" if counted is None else "D"
                    if not is_waiting:
                        state = _fields(thread / "stat")[_STATE]
                        is_waiting = state in uncounted_states
        return _Sample(ticks, waited, is_waiting)


def _fields(status: Path) -> list[str]:
    """Return the fields of a stat file of /proc, from the state on."""
    text = status.read_text(errors="replace")
    return text.rpartition(")")[2].split()  # the command before may contain spaces and ")"


def _seconds_waited(thread: Path) -> float | None:
    """Return how long a thread has waited for a processor; None if the kernel does not count."""
    try:
        _ran, waited, _times = (thread / "schedstat").read_text().split()
    except FileNotFoundError:
        return None
    return int(waited) / _NANOSECONDS
