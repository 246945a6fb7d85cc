"""Detect that a step's Python code takes longer on the host than its program on the device.

10 steps    180 ms of Python    10 programs that ran for 90 ms
18.0 ms > 1.3 * 9.0 ms per step, so `fit` recommends replay=True
"""

from typing import NamedTuple

_FACTOR = 1.3  # the host's time by the device's: below this ratio, replay saves little
CONTRACT = "docs/replay.md"


class Moment(NamedTuple):
    """Totals since the run began.

    Attributes:
        recording: processor seconds of this thread in the Python code of steps.
        programs: number of programs that have ended on the device.
        running: total seconds of these programs. The time of a program begins when the device gets
            it, and ends when the program ends.
        compiles: number of compilations.
    """

    recording: float
    programs: int
    running: float
    compiles: int


def advice(before: Moment, now: Moment, steps: int) -> str | None:
    """Return a line that recommends replay; None if replay is not certain to help.

    The host's time contains only the Python of the steps, so it is a lower limit. The device's
    time includes the time that programs wait for the device, so it is an upper limit.

    Args:
        before: the totals at the start of the interval.
        now: the totals at the end of the interval.
        steps: number of steps in the interval.
    """
    programs = now.programs - before.programs
    # The last program may be counted after this moment. If there are more programs than steps, some
    # of them do other work, and the times cannot be compared.
    if programs not in (steps, steps - 1) or programs < 1:
        return None
    if now.compiles != before.compiles:
        return None
    host = 1000 * (now.recording - before.recording) / steps
    device = 1000 * (now.running - before.running) / programs
    if host <= _FACTOR * device:
        return None
    return (
        f"the host needs {host:.1f} ms for the Python of a step, "
        f"the device at most {device:.1f} ms to run it: "
        f"fit(replay=True) would save up to {host - device:.1f} ms per step; read {CONTRACT} first"
    )
