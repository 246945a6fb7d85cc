"""Runs whose collectives happen in the graph, as on a TPU: cores record them, and block in `sync` or when they read."""

import time

import pytest
import torch
from helpers.workers import small_net
from torch import nn

import tpukit
from tpukit import WorkerError, launch
from tpukit.essentials import backends
from tpukit.essentials.backends.cpu import Cpu, CpuRuntime


class InGraph(Cpu):
    """CPU tensors whose gradients are averaged in `sync`, the moment a TPU would run the graph."""

    in_graph = True
    recorded = ()

    def average(self, tensors):
        self.recorded = tensors

    def sync(self):
        if self.recorded:
            super().average(self.recorded)
        self.recorded = ()
        super().sync()

    def to_cpu(self, tensors):
        self.sync()
        return super().to_cpu(tensors)

    def _for_collectives(self, tensors):
        return [tensor.detach() for tensor in tensors]


class InGraphRuntime(CpuRuntime):
    name = "in graph"
    backend = InGraph


@pytest.fixture(autouse=True)
def _in_graph(monkeypatch):
    monkeypatch.setitem(backends.runtimes(), "in graph", InGraphRuntime())


def quietly(fn, *, stall=120.0, **options):
    limits = tpukit.Limits(stall=stall, heartbeat=0.2)
    return launch(fn, cores=2, backend="in graph", progress="off", limits=limits, **options)


def step(core, model, optimizer, before=lambda: None):
    with core.step():
        model(torch.ones(4, 3, 8, 8)).square().mean().backward()
        core.optimizer_step(optimizer)
        before()


def stepping(core, body):
    """Give the body a function that makes a training step of a small model."""
    model = core.model(small_net(False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return body(lambda before=lambda: None: step(core, model, optimizer, before))


def test_it_trains():
    def work(core):
        stepping(core, lambda step: [step() for _ in range(3)])

    quietly(work)


def test_a_core_that_returns_early_is_named_though_the_others_wait_in_sync():
    def work(core):
        stepping(core, lambda step: [step() for _ in range(3 if core.rank else 2)])

    with pytest.raises(
        WorkerError, match=r"core 0 of 2 returned while core 1 still waits for it in step\(\)"
    ):
        quietly(work, timeout=600)


def test_a_compile_in_sync_that_takes_longer_than_the_limit_is_no_stall():
    def work(core):
        def compile_for_long():
            began = time.monotonic()
            while time.monotonic() < began + 6:
                pass

        def slow(core_step):
            core_step()
            core.backend.after_sync = compile_for_long
            core_step()
            core.backend.after_sync = None
            core_step()
            return "done"

        return stepping(core, slow)

    assert quietly(work, stall=1.0).results == ["done", "done"]


def test_cores_that_all_wait_in_a_read_nobody_marked_are_noticed():
    """`loss.item()` on a TPU waits for the graph; a sleep stands for it here, as it uses no processor either."""

    def work(core):
        core.barrier()
        time.sleep(99)

    with pytest.raises(
        WorkerError,
        match=r"core [01] of 2 has not moved for \d+ s(.*)neither has any other core",
    ):
        quietly(work, stall=2.0, timeout=600)


class LongToPickle:
    """Holds the interpreter while it is pickled, as millions of small objects do: no heartbeat is sent meanwhile."""

    def __reduce__(self):
        began = time.monotonic()
        while time.monotonic() < began + 8:  # longer than an early return is given
            sum(range(10**7))
        return LongToPickle, ()


def test_a_core_that_still_pickles_a_large_result_is_not_taken_for_waiting():
    def work(core):
        if core.rank == 1:
            time.sleep(1)  # so that the last heartbeat of core 0 says that it waits
        core.barrier()
        return LongToPickle() if core.rank == 0 else None

    run = launch(work, cores=2, backend="cpu", progress="off", limits=tpukit.Limits(heartbeat=0.2))
    assert isinstance(run.results[0], LongToPickle)


def test_a_core_whose_large_result_is_on_its_way_is_not_taken_for_waiting(monkeypatch):
    """Its last heartbeat may say that it waits: while the pipe is full, no other comes through."""
    monkeypatch.setattr(
        "tpukit.essentials.display.progress.Screen.draw", lambda *_, **__: time.sleep(0.8)
    )  # a slow kernel

    def work(core, count):
        if core.rank == 1:
            time.sleep(1)
        core.barrier()
        return torch.zeros(count if core.rank == 0 else 1)

    seconds = []
    for count in (
        2 * 10**7,
        6 * 10**7,
    ):  # how much a look of the kernel takes in is the machine's affair
        run = launch(
            work, count, cores=2, backend="cpu", progress="off", limits=tpukit.Limits(heartbeat=0.2)
        )
        assert len(run.results[0]) == count
        seconds.append(run.seconds)
        if run.seconds > 8:  # longer than an early return is given
            break
    assert seconds[-1] > 8


def test_an_error_in_a_collective_still_says_that_the_core_was_waiting():
    def work(core):
        core.gather(torch.ones(1 + core.rank))

    with pytest.raises(WorkerError, match=r"it was waiting for the other cores in gather\(\)"):
        launch(work, cores=2, backend="cpu", progress="off")


def test_nothing_of_this_needs_a_module():
    """Plain tensors are averaged in the graph as well."""

    def work(core):
        weight = nn.Parameter(torch.ones(2) * (core.rank + 1))
        with core.step():
            (weight * (core.rank + 1)).sum().backward()
            core.backend.average([weight.grad])
        return weight.grad.tolist()

    assert quietly(work).results == [[1.5, 1.5], [1.5, 1.5]]
