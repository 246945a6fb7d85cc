"""Launches from a real Jupyter kernel: a process with threads and streams of its own, and a user who interrupts."""

import psutil
import pytest
from kernels import Kernel

WORK = """
import os, time, torch, tpukit
def work(core, fail=False):
    core.print("a line from", core.rank)
    if fail and core.rank == 1:
        raise KeyError("here")
    return core.mean(torch.ones(2))
"""


@pytest.fixture(scope="module")
def kernel():
    started = Kernel()
    started.run(WORK)
    yield started
    started.close()


def test_launch_again_after_an_exception_and_nothing_is_left(kernel):
    assert "tensor([1., 1.])" in kernel.run("print(tpukit.launch(work, cores=2).results)")
    assert "a line from 0" in kernel.run("tpukit.launch(work, cores=2)")
    kernel.run("tpukit.launch(work, True, cores=2)")
    name, trace = kernel.error
    assert name == "WorkerFailed"
    assert "core 1 of 2 raised KeyError: 'here'" in trace
    assert "where: work(), cell " in trace
    assert "tensor([1., 1.])" in kernel.run("print(tpukit.launch(work, cores=2).results)")
    assert kernel.workers() == []
    assert kernel.run("from tpukit.backends import xla; print(xla.runtime_started())").strip() == "False"


def test_print_from_a_worker_arrives_in_whole_lines(kernel):
    out = kernel.run(
        "def talk(core):\n    for _ in range(50): print('a', 'b', core.rank)\ntpukit.launch(talk, cores=2)"
    )
    assert out.splitlines().count("[core 0] a b 0") == 50
    assert out.splitlines().count("[core 1] a b 1") == 50


def test_an_interrupt_ends_the_workers_keeps_the_log_and_the_next_launch_works(kernel):
    kernel.run(
        "def wait(core):\n    core.log(loss=0.5); core.flush()\n    core.barrier()\n    time.sleep(600)\n"
        "import threading, signal\n"
        "threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "began = time.time()\n"
        "try:\n    tpukit.launch(wait, cores=2)\n"
        "except KeyboardInterrupt as error:\n    kept = error.run.log\n"
    )
    assert kernel.error is None
    assert kernel.run("print(kept, time.time() - began < 10)").strip() == "[{'step': 1, 'loss': 0.5}] True"
    assert kernel.workers() == []
    assert "tensor([1., 1.])" in kernel.run("print(tpukit.launch(work, cores=2).results)")


def test_a_killed_kernel_takes_its_workers_along():
    kernel = Kernel()
    try:
        kernel.client.execute("import time, tpukit\ntpukit.launch(lambda core: time.sleep(600), cores=2)")
        workers = kernel.wait_for_workers(2)
        kernel.process.kill()
        gone, alive = psutil.wait_procs(workers, timeout=10)
        assert alive == []
    finally:
        kernel.close()


def test_two_notebooks_at_once_do_not_collide(kernel):
    other = Kernel()
    try:
        other.run(WORK)
        many = "print([tpukit.launch(work, cores=2).results[0].tolist() for _ in range(5)] == [[1, 1]] * 5)"
        waiting = other.client.execute(many)
        assert kernel.run(many).splitlines()[-1] == "True"
        assert other.client.get_shell_msg(timeout=60)["parent_header"]["msg_id"] == waiting
        assert other.run("print(tpukit.launch(work, cores=2).results)").count("tensor([1., 1.])") == 2
    finally:
        other.close()
