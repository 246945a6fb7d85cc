"""Read a duration that a user writes, such as "8h30m"."""

import re
from numbers import Real

from tpukit.essentials.display.errors import InvalidValueError

# Each unit once, the larger first: "8h30m", "1d 12h".
_DURATION = re.compile(r"(\d+d)? ?(\d+h)? ?(\d+m)? ?(\d+s)?")
_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


def parse_duration(text: str | float, argument: str = "max_time") -> float:
    """Return a duration in seconds, from a text such as "8h30m" or a number.

    Args:
        text: days, hours, minutes and seconds, such as "1d2h3m4s" or "30m"; or an int or a float,
            the number of seconds.
        argument: the name of the argument, for the error.

    Raises:
        InvalidValueError: `text` has another form, or is negative.
    """
    is_number = isinstance(text, Real) and not isinstance(text, bool)
    if is_number and text >= 0:
        return float(text)
    written = str(text).strip()
    parts = re.findall(r"(\d+)([dhms])", written)
    # The second test refuses a text such as "about 8h", in which `findall` finds a part.
    if not parts or not _DURATION.fullmatch(written):
        fact = f'a time is written "8h30m", "10m", "90s", or as a number of seconds; got {text!r}'
        raise InvalidValueError(fact, fix=f'{argument}="8h30m"')
    seconds = 0.0
    for number, unit in parts:
        seconds += int(number) * _SECONDS[unit]
    return seconds
