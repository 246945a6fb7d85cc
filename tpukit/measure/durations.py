"""A time as people write it."""

import re

from tpukit.essentials.show import WrongValue


def parse_duration(text: str | float, argument: str = "budget") -> float:
    """Return how many seconds "8h30m", "90s" or a number are; `argument` names it in an error.

    Raises:
        ValueError: it is none of these, or it is negative.
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and text >= 0:
        return float(text)
    parts = re.fullmatch(r"(?:(\d+)d)? ?(?:(\d+)h)? ?(?:(\d+)m)? ?(?:(\d+)s)?", str(text).strip())
    if not parts or not any(parts.groups()):
        raise WrongValue(
            f'a time is written "8h30m", "10m", "90s", or as seconds; got {text!r}', fix=f'{argument}="8h30m"'
        )
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
