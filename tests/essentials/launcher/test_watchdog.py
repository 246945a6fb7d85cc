import time

import pytest

from tpukit.essentials.launcher.watchdog import Limits, Watchdog

LIMIT = 0.2


def stall_of(
    beats,
    *,
    returned=(),
    cpu=lambda rank: 0.0,
    quiet=0.3,
    cores=3,
    timeout=None,
    others=False,
    **limits,
):
    """Let cores beat once, stay quiet for a while, and return what the watchdog says then, and after the CPU sample."""
    watchdog = Watchdog(
        range(cores), Limits(**{"stall": LIMIT, **limits}), cpu, timeout=timeout, others=others
    )
    for rank, waiting in beats.items():
        watchdog.beat(rank, activity=1, waiting=waiting)
    time.sleep(quiet)
    first = watchdog.find_stall(set(returned))
    if first is None:
        time.sleep(0.15)
        return watchdog.find_stall(set(returned))
    return first


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch):
    monkeypatch.setattr("tpukit.essentials.launcher.watchdog._CPU_SAMPLE_SECONDS", 0.1)
    monkeypatch.setattr("tpukit.essentials.launcher.watchdog._SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr("tpukit.essentials.launcher.watchdog._UNEVEN_SECONDS", 0.2)


def test_the_core_that_does_not_come_is_named():
    stall = stall_of({0: "all_reduce", 1: None, 2: "all_reduce"})
    assert stall.rank == 1
    assert "while core 0 waits for it in all_reduce()" in stall.what


def test_a_core_that_compiles_is_not_stalled():
    assert (
        stall_of({0: "all_reduce", 1: None, 2: "all_reduce"}, cpu=lambda rank: time.monotonic())
        is None
    )


def test_cores_that_wait_for_another_process_s_compile_are_not_stalled():
    watchdog = Watchdog(range(2), Limits(stall=LIMIT), lambda rank: 0.0)
    for _ in range(12):
        for rank in range(2):
            watchdog.beat(rank, 1, None, waits_outside=True)
        time.sleep(0.05)
        assert watchdog.find_stall(set()) is None
    time.sleep(0.3)
    watchdog.find_stall(set())
    time.sleep(0.15)
    assert watchdog.find_stall(set()).rank in (0, 1)  # once they do not say so any more


def test_cores_that_all_work_are_not_stalled_however_long_they_say_nothing():
    assert stall_of({0: None, 1: None, 2: None}, cpu=lambda rank: time.monotonic()) is None


def test_a_core_that_says_nothing_and_uses_no_processor_is_named_although_nobody_waits():
    stall = stall_of({0: None, 1: None}, returned={2})
    assert "has not moved for 0 s, nor used a processor" in stall.what
    assert "a lock" in stall.fix


def test_waiting_is_no_stall_before_the_limit():
    assert stall_of({0: "barrier", 1: None, 2: None}, stall=60.0) is None
    assert stall_of({0: "barrier", 1: None, 2: None}, stall=None) is None


def test_a_core_that_never_starts_is_named_and_one_that_loads_its_libraries_is_not():
    assert stall_of({0: "model", 2: "model"}).rank == 1
    assert stall_of({0: "model", 2: "model"}, cpu=lambda rank: time.monotonic()) is None


def test_a_device_that_does_not_start_on_any_core_is_a_stall():
    stall = stall_of({})
    assert "core" not in stall.what
    assert "has not started in 0 s, and uses no processor" in stall.what


def test_cores_that_wait_for_different_things_are_told_apart():
    stall = stall_of({0: "gather", 1: "gather", 2: "barrier"})
    assert stall.rank == 2
    assert "core 0 in gather(), core 1 in gather(), core 2 in barrier()" in stall.what


def test_a_core_that_returned_early_is_named_at_once_whatever_the_limit():
    stall = stall_of({1: "optimizer_step", 2: "optimizer_step"}, returned={0}, stall=600.0)
    assert stall.rank == 0
    assert "returned while core 1 still waits for it in optimizer_step()" in stall.what


def test_a_core_that_returned_early_is_fine_while_another_still_works():
    assert stall_of({1: "barrier", 2: None}, returned={0}, stall=600.0) is None


def test_a_run_over_its_time_names_a_core_that_works_before_one_that_waits():
    stall = stall_of({0: "barrier", 1: None, 2: None}, timeout=0.1)
    assert stall.rank == 1
    assert "was not done after timeout=0.1 seconds" in stall.what


def test_a_beat_with_something_new_starts_the_clock_again():
    watchdog = Watchdog(range(2), Limits(stall=LIMIT), lambda rank: 0.0)
    for activity in range(5):
        watchdog.beat(0, activity, "barrier")
        watchdog.beat(1, activity, None)
        time.sleep(0.1)
        assert watchdog.find_stall(set()) is None


def test_cores_that_wait_for_another_host_are_not_stalled_and_one_that_keeps_this_host_waiting_is():
    waiting = {0: "all_reduce", 1: "all_reduce", 2: "all_reduce"}
    assert stall_of(waiting).rank == 0
    assert stall_of(waiting, others=True) is None
    assert stall_of({**waiting, 1: None}, others=True).rank == 1
