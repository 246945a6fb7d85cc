"""Notice that the host's Python takes longer per step than the device.

10 steps    180 ms of Python    10 programs that ran for 90 ms
18.0 > 1.3 * 9.0, so `fit` recommends replay=True
"""

from typing import NamedTuple

_FACTOR = 1.3  # of the device's time: below that, replay saves little
CONTRACT = "docs/replay.md"


class Moment(NamedTuple):
    """Totals since the run began.

    Attributes:
        recording: this thread's seconds of Python in steps.
        programs: number of programs of the device that have ended.
        running: seconds of these programs, from the hand-over to the end.
        compiles: compilations.
    """

    recording: float
    programs: int
    running: float
    compiles: int


def advice(before: Moment, now: Moment, steps: int) -> str | None:
    """Return a line that recommends replay; None if replay is not certain to help.

    The host's time contains only the Python of the steps, so it is a lower limit. The device's
    time contains waiting, so it is an upper limit.

    Args:
        before: the totals at the start of the interval.
        now: the totals at its end.
        steps: in the interval.
    """
    programs = now.programs - before.programs
    # The end of the last program may be counted late; more programs than steps are other work.
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
