import numpy
import pytest

from tpukit.essentials.display import parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8h30m", 30600),
        ("90s", 90),
        ("10m", 600),
        ("1d", 86400),
        (2.5, 2.5),
        (" 1h ", 3600),
        (numpy.int64(9), 9),
    ],
)
def test_times_are_read(text, expected):
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "8 hours", "h", "-3", -1, True, "10m5"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="a time is written"):
        parse_duration(text)
