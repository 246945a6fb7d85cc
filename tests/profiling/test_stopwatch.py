import time

import pytest
import torch

from tpukit import launch
from tpukit.profiling import Stopwatch


class Device:
    """A core whose device works for `seconds` after the program has gone on."""

    def __init__(self, seconds=0.0):
        self.backend, self.seconds, self.waits = self, seconds, 0

    def wait(self):
        self.waits += 1
        time.sleep(self.seconds)


def test_a_section_lasts_until_the_device_is_done():
    watch = Stopwatch(Device(seconds=0.05))
    with watch.section("step"):
        pass
    assert watch.seconds["step"][0] >= 0.05


def test_the_wait_for_a_batch_is_timed_and_the_end_of_the_batches_is_not_one_more():
    def slow():
        for number in range(3):
            time.sleep(0.02)
            yield number

    watch = Stopwatch(Device())
    seen = []
    for batch in watch.each("load", slow()):
        with watch.section("forward"):
            seen.append(batch)
    assert seen == [0, 1, 2]
    assert len(watch.seconds["load"]) == 3
    assert min(watch.seconds["load"]) >= 0.02
    assert list(watch.seconds) == ["load", "forward"]


def test_medians_leave_out_the_first_times():
    watch = Stopwatch(Device())
    watch.seconds = {"load": [9.0, 1.0, 3.0, 2.0], "step": [8.0, 4.0, 4.0, 4.0]}
    assert watch.medians(skip=1) == {"load": 2.0, "step": 4.0}


def test_a_section_without_enough_times_is_named_and_the_fix_helps():
    watch = Stopwatch(Device())
    watch.seconds = {"load": [1.0, 2.0]}
    with pytest.raises(
        ValueError,
        match=r"load: timed 2 times, of which skip=2 are left out\n  fix:   .*smaller skip",
    ):
        watch.medians(skip=2)
    assert watch.medians(skip=1) == {"load": 2.0}


def test_a_section_that_raises_is_not_counted():
    watch = Stopwatch(Device())
    with pytest.raises(KeyError), watch.section("step"):
        raise KeyError("labels")
    assert watch.seconds == {}


@pytest.mark.parametrize("backend", ["cpu", pytest.param("xla:cpu", marks=pytest.mark.xla)])
def test_it_times_the_work_of_a_device_that_begins_late(backend):
    def work(core):
        watch, matrix = Stopwatch(core), torch.ones(1500, 1500, device=core.device)
        for _ in range(3):
            with watch.section("product"):
                product = matrix @ matrix
            with watch.section("read"):
                product[0, 0].item()
        return watch.medians(skip=1)

    medians = launch(work, cores=1, backend=backend, progress="off").results[0]
    assert (
        medians["product"] > medians["read"]
    )  # without the wait, XLA would multiply where the result is read


@pytest.mark.xla
def test_its_waits_are_not_counted_as_steps():
    def work(core):
        watch = Stopwatch(core)
        for _ in range(3):
            with core.step(), watch.section("sum"):
                torch.ones(4, device=core.device).sum()
        return core.backend.metrics()["MarkStep"][0]

    assert launch(work, cores=1, backend="xla:cpu", progress="off").results == [3]
