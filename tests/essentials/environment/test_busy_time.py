"""Busy or idle, on processors that real processes crowd."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tpukit.essentials.environment.busy_time import BusyTime
from tpukit.essentials.launcher.watchdog import _IDLE

pytestmark = [
    pytest.mark.alone,  # it crowds a processor itself, and counts what is got of it
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc"),
]

# What a core that hangs does: some threads look now and then whether there is news.
NAPS = """
import threading, time
def nap():
    while True: time.sleep(0.2)
for _ in range(3): threading.Thread(target=nap, daemon=True).start()
time.sleep(900)
"""


@pytest.fixture
def start():
    """Start Python programs, each in a process group of its own, on one processor; ended with the test."""
    started = []

    def one(code):
        one_processor = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); print(flush=True)\n"
        command = [sys.executable, "-c", one_processor + code]
        started.append(subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE))
        started[-1].stdout.readline()  # Python has started
        return started[-1].pid

    yield one
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)  # its children, too
        process.wait()
        process.stdout.close()


def share(group, seconds=2.0, looks=8, **options):
    """Return which part of some seconds a process group was busy."""
    busy = BusyTime(group, **options)
    time.sleep(1.0)  # and its first children
    before, began = busy.seconds(), time.monotonic()
    for _ in range(looks):
        time.sleep(seconds / looks)
        after = busy.seconds()
    return (after - before) / (time.monotonic() - began)


def test_threads_that_wake_up_now_and_then_are_idle_on_a_crowded_processor_too(start):
    for _ in range(3):
        start("while True: pass")
    assert share(start(NAPS)) < _IDLE


def test_a_program_that_computes_is_busy_however_little_it_gets_of_a_processor(start):
    for _ in range(3):
        start("while True: pass")
    assert share(start("while True: pass")) > _IDLE


def test_a_thread_that_waits_for_its_processor_is_counted_without_being_seen(start):
    for _ in range(3):
        start("while True: pass")
    assert share(start("while True: pass"), looks=1) > _IDLE


def test_a_program_that_sleeps_is_idle(start):
    assert share(start("import time; time.sleep(900)")) < 0.05


def test_what_children_do_counts(start):
    busy = share(
        start("import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])")
    )
    assert busy > 0.6


def test_a_thread_that_ends_during_a_look_hides_no_other_thread(tmp_path):
    process = tmp_path / "7"
    stat = "7 (python) S 1 50 " + "0 " * 40
    for number in range(7, 27):
        thread = process / "task" / str(number)
        thread.mkdir(parents=True)
        (thread / "stat").write_text(stat)
        (thread / "schedstat").write_text("0 5000000000 0")
    (process / "stat").write_text(stat)
    busy = BusyTime(50, proc=tmp_path)
    assert busy.seconds() == 100
    ends = next(process.glob("task/*")) / "stat"
    ends.rename(tmp_path / "ended")
    assert busy.seconds() == 100
    (tmp_path / "ended").rename(ends)
    assert busy.seconds() == 100
