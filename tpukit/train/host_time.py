"""Notice that the host's Python takes longer per step than the device, which `fit(replay=True)` would change."""

from typing import NamedTuple

_FACTOR = 1.3  # of the device's time: below that, replay saves little
CONTRACT = "docs/replay.md"


class Moment(NamedTuple):
    """What has been counted so far: this thread's seconds of Python in steps, the device's programs, compilations."""

    recording: float
    programs: int
    running: float
    compiles: int


def advice(before: Moment, now: Moment, steps: int) -> str | None:
    """Return a line that recommends replay after an interval of so many steps; None if it is not certain to help.

    The host's time is that of a step's Python alone, so it is a lower limit. The device's runs from the moment at which
    a program is handed over, so it contains waiting and is an upper limit.
    """
    programs = now.programs - before.programs
    # The end of the last program may be counted late; more programs than steps are other work.
    if now.compiles != before.compiles or programs not in (steps, steps - 1) or programs < 1:
        return None
    host = 1000 * (now.recording - before.recording) / steps
    device = 1000 * (now.running - before.running) / programs
    if host <= _FACTOR * device:
        return None
    return (
        f"the host needs {host:.1f} ms for the Python of a step, the device at most {device:.1f} ms to run it: "
        f"fit(replay=True) would save up to {host - device:.1f} ms per step; read {CONTRACT} first"
    )
