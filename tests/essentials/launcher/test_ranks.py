"""Ranks that are not the numbers of their processes: the order of a TPU's chips is not promised (pytorch/xla 3824)."""

import os
import signal
import time

import pytest
import torch

import tpukit
from tpukit import WorkerError, launch
from tpukit.essentials import backends
from tpukit.essentials.backends.cpu import CpuRuntime

CORES = 3


class Reversed(CpuRuntime):
    """CPU processes of which the last has rank 0."""

    name = "reversed"

    def start(self, body, topology, *, process, meeting_point):
        super().start(
            body, topology, process=topology.cores - 1 - process, meeting_point=meeting_point
        )


@pytest.fixture(autouse=True)
def _reversed(monkeypatch):
    monkeypatch.setitem(backends.runtimes(), "reversed", Reversed())


def quietly(fn, **options):
    return launch(fn, cores=CORES, backend="reversed", progress="off", **options)


def test_results_are_in_order_of_rank():
    run = quietly(lambda core: (core.rank, core.gather(torch.tensor([core.rank])).tolist()))
    assert run.results == [(rank, [0, 1, 2]) for rank in range(CORES)]


def test_what_a_core_prints_bears_its_own_rank(capsys):
    def work(core):
        core.barrier()
        os.write(1, f"this is {core.rank}\n".encode())

    quietly(work)
    lines = [line for line in capsys.readouterr().out.splitlines() if "this is" in line]
    assert sorted(lines) == [f"[core {rank}] this is {rank}" for rank in range(CORES)]


def test_a_core_that_is_killed_although_another_has_the_number_of_its_process_and_is_done():
    def work(core):
        if core.rank == 2:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match="core 2 of 3 was killed by SIGKILL"):
        quietly(work, timeout=600)


def test_the_processor_time_of_a_core_is_that_of_its_own_process():
    """Core 2 computes for longer than the limit, which is no stall; core 0's process sleeps."""

    def work(core):
        core.barrier()
        began = time.monotonic()
        while core.rank == 2 and time.monotonic() < began + 5:
            pass
        core.barrier()
        return core.rank

    assert quietly(work, limits=tpukit.Limits(stall=1.0, heartbeat=0.2)).results == [0, 1, 2]


def test_the_stacks_of_a_run_that_hangs_are_of_the_cores_that_have_them():
    def work(core):
        if core.rank == 0:
            sleeps_for_ever()
        core.barrier()

    def sleeps_for_ever():
        time.sleep(99)

    with pytest.raises(WorkerError, match="core 0 of 3 has not moved") as failed:
        quietly(work, limits=tpukit.Limits(stall=1.0, heartbeat=0.2))
    first, _, _ = failed.value.traceback.partition("core 1:")
    assert first.startswith("core 0:")
    assert "sleeps_for_ever" in first
