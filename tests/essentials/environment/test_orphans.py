import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from helpers.kernels import is_alive

import tpukit
from tpukit.essentials.environment import Machine, orphans

pytestmark = [
    pytest.mark.alone,  # it looks for orphans on the whole machine
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="workers are marked on Linux only"),
]

ESCAPES = """
import ctypes, os, time, tpukit

def work(core):
    # A process that breaks every link to its worker: its own session, no signal when its parent dies.
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(1, 0)
        open({noted!r}, "w").write(str(os.getpid()))
        time.sleep(600)
        os._exit(0)
    time.sleep(600)

tpukit.launch(work, cores=1, progress="off")
"""


@pytest.fixture
def escaped(tmp_path):
    """Yield a worker's process that has outlived its killed kernel."""
    noted = tmp_path / "pid"
    kernel = subprocess.Popen([sys.executable, "-c", ESCAPES.format(noted=str(noted))])
    deadline = time.monotonic() + 600
    while not (noted.exists() and noted.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process = psutil.Process(int(noted.read_text()))
    yield kernel, process
    kernel.kill()
    kernel.wait()
    if is_alive(process):
        process.kill()


def test_a_worker_of_a_living_kernel_is_left_alone_and_one_of_a_dead_kernel_is_ended(escaped):
    kernel, process = escaped
    assert process.pid not in [one.pid for one in tpukit.cleanup().orphans]
    assert is_alive(process)
    kernel.kill()
    kernel.wait()
    time.sleep(0.5)
    assert is_alive(process)
    released = tpukit.cleanup()
    assert (process.pid, kernel.pid) in [(one.pid, one.kernel) for one in released.orphans]
    assert f"process {process.pid}" in str(released)
    assert not is_alive(process)
    assert str(tpukit.cleanup()) == "no orphaned worker of an earlier run"


def test_a_process_that_is_no_worker_is_never_ended():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
    try:
        tpukit.cleanup()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_folders_of_dead_kernels_are_swept_and_those_of_living_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = orphans.make_folder()
    dead = mine.with_name(mine.name.replace(f"tpukit-{os.getpid()}-", "tpukit-999999999-"))
    foreign = tmp_path / "tpukit-notes"
    # Of a process in another container with this /tmp, which may run.
    elsewhere = dead.with_name(re.sub(r"-\d+-(\w+)$", r"-1-\1", dead.name))
    for folder in (dead, foreign, elsewhere):
        folder.mkdir()
    second = orphans.make_folder()
    assert not dead.exists()
    assert mine.exists()
    assert foreign.exists()
    assert elsewhere.exists()
    elsewhere.rmdir()
    assert second != mine


def test_no_worker_survives_that_ignores_every_signal_it_can():
    before = {process.pid for process in psutil.Process().children(recursive=True)}

    def work(core):
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if core.rank == 1:
            raise KeyError("now")
        time.sleep(600)

    with pytest.raises(tpukit.WorkerError, match="core 1 of 2 raised KeyError"):
        tpukit.launch(work, cores=2, progress="off")
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_a_process_that_has_got_the_id_of_an_orphan_is_not_signalled(tmp_path, monkeypatch):
    orphan = tmp_path / "proc" / "4321"
    (orphan / "fd").mkdir(parents=True)
    (orphan / "fd" / "3").symlink_to(
        "/memfd:tpukit-99-7 (deleted)"
    )  # of kernel 99, which is not there
    sent = []

    def started(at):
        (orphan / "stat").write_text("4321 (python) S " + "0 " * 18 + str(at))

    def kill(pid, number):
        sent.append((pid, number))
        started(at=200)  # the orphan ends, and another process gets its id

    started(at=100)
    monkeypatch.setattr(orphans.os, "kill", kill)
    released = orphans.cleanup(Machine(proc=tmp_path / "proc", dev=tmp_path))
    assert [(one.pid, one.kernel) for one in released.orphans] == [(4321, 99)]
    assert sent == [(4321, signal.SIGTERM)]


def test_a_worker_of_a_container_is_left_alone_because_its_kernel_has_another_id_there(tmp_path):
    proc = tmp_path / "proc"
    for process, namespace in (("self", "here"), ("4321", "container"), ("4322", "here")):
        (proc / process / "ns").mkdir(parents=True)
        (tmp_path / namespace).touch()
        (proc / process / "ns" / "pid").symlink_to(tmp_path / namespace)
        (proc / process / "fd").mkdir()
        (proc / process / "fd" / "3").symlink_to("/memfd:tpukit-1-7 (deleted)")
        (proc / process / "stat").write_text("1 (python) S " + "0 " * 18 + "100")
    (proc / "1").mkdir()
    (proc / "1" / "stat").write_text("1 (init) S " + "0 " * 18 + "3")  # not the kernel of the marks
    found = orphans._find(Machine(proc=proc, dev=tmp_path))
    assert [one.pid for one in found] == [4322]
