"""Collectives between CPU processes: whatever the cores are in, none mixes data, ends the process or waits for good."""

import pytest
import torch

from tpukit import launch
from tpukit.essentials.backends import cpu
from tpukit.essentials.display import InvalidValueError


def often(core, *calls):
    """Make collectives so often that each has a group of its own."""
    for _ in range(cpu._OFTEN + 1):
        for call in calls:
            call(core)


def add(core):
    return core.all_reduce(torch.ones(2))


def add_three(core):
    return core.all_reduce(torch.ones(3))


def largest(core):
    return core.all_reduce(torch.ones(2), "max")


def average(core):
    core.backend.average([torch.ones(2)])


def barrier(core):
    core.barrier()


def model(core):
    core.model(torch.nn.Linear(2, 1))


# What both cores did often, what core 0 is in then, what core 1 is in, and what the error has to name.
APART = {
    "two that are often": (
        (add, add_three),
        add,
        add_three,
        ("same shape", "core 0 (2,)", "core 1 (3,)"),
    ),
    "another operation": (
        (add, largest),
        add,
        largest,
        ("core 0 all_reduce(sum)", "core 1 all_reduce(max)"),
    ),
    "another operation, rarely": (
        (),
        add,
        largest,
        ("core 0 all_reduce(sum)", "core 1 all_reduce(max)"),
    ),
    "one that is often, one that is not": (
        (average,),
        average,
        barrier,
        ("core 0 average", "core 1 barrier"),
    ),
    "one that is not, one that is often": (
        (average,),
        model,
        average,
        ("core 0 all_reduce(max)", "core 1 average"),
    ),
}


@pytest.mark.parametrize("case", APART)
def test_cores_in_different_collectives_are_named_and_the_next_collective_works(case):
    before, first, second, words = APART[case]

    def work(core):
        often(core, *before)
        with pytest.raises(InvalidValueError) as raised:
            (first, second)[core.rank](core)
        often(core, add, average)
        return str(raised.value), add(core).tolist()

    for said, total in launch(work, cores=2, backend="cpu", progress="off", timeout=60).results:
        assert total == [2, 2]
        for word in words:
            assert word in said


def test_a_core_that_comes_late_is_waited_for():
    def work(core):
        import time

        often(core, add)
        time.sleep(2.5 * core.rank)
        first = add(core).tolist()
        time.sleep(1.5 * (core.rank == 0))
        return first, add_three(core).tolist()

    assert launch(work, cores=3, backend="cpu", progress="off").results == [([3, 3], [3, 3, 3])] * 3


def test_large_tensors_of_other_strides_meet_in_one_message():
    def work(core):
        whole = torch.full((1024, 300), float(core.rank))
        if core.rank == 1:
            whole = whole.t().contiguous().t()  # the same shape, not contiguous
        small = torch.full((3,), float(core.rank))
        core.backend.average([whole, small])
        return whole.unique().tolist(), small.tolist()

    run = launch(work, cores=2, backend="cpu", progress="off", timeout=60)
    assert run.results == [([0.5], [0.5, 0.5, 0.5])] * 2


def test_a_device_may_have_another_dtype_for_numbers():
    class Single(cpu.Cpu):
        def open_device(self):
            self.real = torch.float32
            return torch.device("cpu")

    assert Single(rank=0, world_size=1, meeting_point=None).real == torch.float32
    assert cpu.Cpu(rank=0, world_size=1, meeting_point=None).real == torch.float64
