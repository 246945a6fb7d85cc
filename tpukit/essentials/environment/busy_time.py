"""Measure how long the processes of a group have been busy.

If a machine has more ready threads than processors, busy time is longer than processor time:

    busy = processor time + time spent waiting for a processor + time spent waiting for a disk

The watchdog compares busy time with the clock: a worker that is hardly busy and makes no progress
hangs.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

# The unit of processor time in /proc; 100 on all common kernels.
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_NANOSECONDS = 1e9
# A thread that waits at the time of a call counts as waiting since the call before, but for at most
# so many seconds.
_LONGEST_SIGHTING = 0.5

# Fields of /proc/PID/stat, counted from the state on (man 5 proc).
_STATE = 0
_GROUP = 2
_USER_TICKS = 11
_SYSTEM_TICKS = 12


class _Sample(NamedTuple):
    """The state of all processes of the group at one moment."""

    ticks: int  # processor time
    waited: dict[Path, float]  # seconds that each thread has waited for a processor
    is_waiting: bool  # whether a thread is now in a wait that the system does not measure


class BusyTime:
    """The time for which the processes of a group computed, or waited for a processor or a disk.

    Args:
        group: id of the process group.
        proc: the folder /proc. If the folder does not exist, the time is always 0.
    """

    def __init__(self, group: int, proc: Path = Path("/proc")):
        self._group = group
        self._proc = proc
        self._waited: dict[Path, float] = {}  # per thread, at the last call
        self._seconds_waited = 0.0
        self._last_call = time.monotonic()

    def seconds(self) -> float:
        """Return the busy time so far in seconds, added up over all threads.

        The processor time of a process that has ended is not included, so the result can fall.

        Linux does not measure waits for a disk, and not every kernel measures waits for a
        processor. Waits that are not measured are estimated: if a thread is waiting at the time of
        a call, the result grows by the time since the previous call, but at most by 0.5 seconds.
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
            try:
                fields = _fields(status)
            except OSError:  # the process ended a moment ago
                continue
            if int(fields[_GROUP]) != self._group:
                continue
            ticks += int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
            for thread in status.parent.glob("task/*"):
                with contextlib.suppress(OSError):  # the thread ended a moment ago
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
    """Return the seconds a thread has waited for a processor; None if they are not measured."""
    # See "Scheduler Statistics" on kernel.org.
    try:
        _ran, waited, _times = (thread / "schedstat").read_text().split()
    except FileNotFoundError:
        return None
    return int(waited) / _NANOSECONDS
