"""Replay is recommended only after an interval that shows for certain that the host is slower than the device."""

import pytest

from tpukit.training.host_time import Moment, advice

BEFORE = Moment(recording=1.0, programs=10, running=2.0, compiles=3)


def after(*, recording=0.0, programs=10, running=0.0, compiles=0):
    return Moment(1.0 + recording, 10 + programs, 2.0 + running, 3 + compiles)


def test_the_line_names_both_times_the_saving_and_the_contract():
    assert advice(BEFORE, after(recording=0.18, running=0.09), 10) == (
        "the host needs 18.0 ms for the Python of a step, the device at most 9.0 ms to run it: "
        "fit(replay=True) would save up to 9.0 ms per step; read docs/replay.md first"
    )


def test_the_last_program_may_be_counted_late():
    assert "at most 10.0 ms" in advice(BEFORE, after(recording=0.18, running=0.09, programs=9), 10)


@pytest.mark.parametrize(
    "now",
    [
        after(recording=0.13, running=0.1),
        after(recording=0.05, running=0.1),
        after(recording=0.18, running=0.09, compiles=1),
        after(recording=0.18, running=0.09, programs=20),
        after(recording=0.18, running=0.09, programs=8),
        after(recording=0.18, running=0.0, programs=0),
    ],
    ids=[
        "hardly slower",
        "faster",
        "a compile",
        "other programs",
        "programs missing",
        "no program",
    ],
)
def test_nothing_is_printed_when_it_is_not_certain(now):
    assert advice(BEFORE, now, 10) is None
