"""Read a duration as people write it."""

import re

from tpukit.essentials.display import InvalidValueError

_DURATION = re.compile(r"(?:(\d+)d)? ?(?:(\d+)h)? ?(?:(\d+)m)? ?(?:(\d+)s)?")


def parse_duration(text: str | float, argument: str = "max_time") -> float:
    """Return the seconds of "8h30m", "90s" or a number.

    Args:
        text: days, hours, minutes and seconds as "1d2h3m4s", in any selection; or seconds.
        argument: the name of the argument in an error.

    Raises:
        ValueError: it is neither, or it is negative.
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and text >= 0:
        return float(text)
    parts = _DURATION.fullmatch(str(text).strip())
    if not parts or not any(parts.groups()):
        fact = f'a time is written "8h30m", "10m", "90s", or as seconds; got {text!r}'
        raise InvalidValueError(fact, fix=f'{argument}="8h30m"')
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    hours += 24 * days
    minutes += 60 * hours
    return float(60 * minutes + seconds)
