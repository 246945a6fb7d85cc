"""What goes wrong between ranks is told by name, to all of them, in bounded time; nothing is left behind."""

import os
import signal
import time

import pytest
import torch
from simulator.machine import on_every_core, run

from tpukit.simulator import shapes
from tpukit.simulator.shapes import SHAPES, dry_run

pytestmark = pytest.mark.xla


def _total(tensor, op="sum", **others):
    import torch_xla
    import torch_xla.core.xla_model as xm

    total = xm.all_reduce(op, tensor.to("xla"), **others)
    torch_xla.sync()  # reading alone would leave torch_xla's token pending, and run this again with the next one
    return total.cpu()


def _rank():
    import torch_xla.runtime as xr

    return xr.global_ordinal()


def _other_size():
    _total(torch.ones(3))
    _total(torch.ones(5 if _rank() == 1 else 9))


def _other_shape():
    _total(torch.ones((3, 2) if _rank() == 1 else (2, 3)))


def _other_type():
    _total(torch.ones(4, dtype=torch.int32 if _rank() == 1 else torch.float32))


def _other_reduction():
    _total(torch.ones(4), op="max" if _rank() == 1 else "sum")


def _other_kind():
    import torch_xla.core.xla_model as xm

    value = torch.ones(4, device="xla")
    (
        xm.all_reduce("sum", value) if _rank() == 1 else xm.reduce_scatter("sum", value, 1.0, 0, 2)
    ).cpu()


def _other_groups():
    _total(torch.ones(4), groups=[[0], [1]] if _rank() == 1 else [[0, 1]])


def _other_order():
    for dtype in (torch.float32, torch.int32)[:: -1 if _rank() == 1 else 1]:
        _total(torch.ones(4, dtype=dtype))


def _misses_one():
    _total(torch.ones(3))
    if _rank() == 1:
        time.sleep(900)
    _total(torch.ones(3))


def _is_killed():
    _total(torch.ones(3))
    if _rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _total(torch.ones(3))


def _leaves_early():
    _total(torch.ones(3))
    if _rank() != 1:
        _total(torch.ones(3))


def _dies_before_it_starts():
    _total(torch.ones(3))


WRONG = [
    (_other_size, "f32[9]", "f32[5]", "disagree about collective 2"),
    (_other_shape, "f32[2,3]", "f32[3,2]", "disagree about collective 1"),
    (_other_type, "of f32[4]", "of s32[4]", "disagree about collective 1"),
    (_other_reduction, "all-reduce(add)", "all-reduce(maximum)", "disagree about collective 1"),
    (_other_kind, "reduce-scatter(add)", "all-reduce(add)", "disagree about collective 1"),
    (
        _other_groups,
        "rank 0 runs all-reduce(add)",
        "with other groups",
        "disagree about collective 1",
    ),
    (_other_order, "of f32[4]", "of s32[4]", "disagree about collective 1"),
]


@pytest.mark.parametrize(
    ("body", "ours", "theirs", "told"), WRONG, ids=[row[0].__name__ for row in WRONG]
)
def test_ranks_that_disagree_are_told_what_each_runs(body, ours, theirs, told, library):
    for ended in run(dry_run(2), body, library=library):
        assert told in ended.said
        assert ours in ended.said
        assert theirs in ended.said
        assert "rank 0 runs" in ended.said
        assert "rank 1 runs" in ended.said


def test_a_rank_that_is_killed_is_named_long_before_patience_ends(library):
    first, killed, third = run(dry_run(3), _is_killed, library=library)
    assert killed.status == -signal.SIGKILL
    for ended in (first, third):
        assert "rank 1 has gone before collective 2" in ended.said
        assert "ended after 1 collective(s)" in ended.said
        assert ended.seconds < killed.seconds + 100  # of 300


def test_a_rank_that_returns_early_is_named(library):
    waiting, left = run(dry_run(2), _leaves_early, library=library)
    assert "rank 1 has gone before collective 2" in waiting.said
    assert (left.status, left.error) == (0, "")


def test_a_rank_that_does_not_come_is_named_when_patience_ends(library):
    patience = {
        "SIMULATOR_TIMEOUT": "6"
    }  # also of what comes late to the first one, on a busy machine
    waiting, missing = run(
        dry_run(2), _misses_one, library=library, environ=patience, after_the_first=0.0
    )
    assert "rank 1 has not come to collective 2 for 6 s" in waiting.said
    assert "is alive and has come to 1" in waiting.said
    assert "SIMULATOR_TIMEOUT" in waiting.said
    assert "still running" in missing.error


def test_a_slow_rank_is_waited_for(library):
    def slow():
        time.sleep(3 * _rank())
        return _total(torch.ones(1)).item()

    assert on_every_core(dry_run(2), slow, library=library) == {0: 2.0, 1: 2.0}


def test_a_core_that_fails_on_a_chip_of_two_ends_all_eight(library):
    def seven_of_eight():
        _total(torch.ones(2 if _rank() == 5 else 3))

    for ended in run(SHAPES["v3-8"], seven_of_eight, library=library):
        assert "rank 5 runs all-reduce(add) of f32[2]" in ended.said


def test_busy_chips_say_so_until_they_are_free(library):
    busy, free = (
        {"SIMULATOR_BUSY_UNTIL": str(int(time.time()) + seconds)} for seconds in (3600, -1)
    )
    for number, ended in enumerate(
        run(dry_run(2), _dies_before_it_starts, library=library, environ=busy)
    ):
        assert f"open(/dev/vfio/{number}): Device or resource busy" in ended.said
    on_every_core(dry_run(2), _dies_before_it_starts, library=library, environ=free)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (
            {"TPU_PROCESS_ADDRESSES": "local"},
            "expected 2 worker addresses, got 1",
        ),  # Kaggle's image, kept
        ({"TPU_PROCESS_BOUNDS": "2,0,1"}, "no topology of 1 to 64 devices"),
        ({"CLOUD_TPU_TASK_ID": "7"}, "found: process 7 of 2"),
        ({"SIMULATOR_ORDER": "0,0"}, "no permutation of 2 processes"),
        ({"SIMULATOR_MEMORY": None}, "SIMULATOR_MEMORY=(not set)"),
        ({"SIMULATOR_MEMORY": "/nowhere/at/all"}, "No such file or directory"),
        ({"CLOUD_TPU_TASK_ID": "0"}, "two processes want the same chip"),
        ({"SIMULATOR_PLUGIN": None}, "the simulator's plugin for the CPU cannot be loaded"),
        ({"SIMULATOR_PLUGIN": "/nowhere/plugin.so"}, "cannot open shared object file"),
    ],
    ids=lambda value: next(iter(value.items()))[1] or "unset" if isinstance(value, dict) else "",
)
def test_an_environment_that_cannot_be_is_refused_in_words(environ, told, library):
    ended = run(
        dry_run(2),
        _dies_before_it_starts,
        library=library,
        environ={"SIMULATOR_TIMEOUT": "1"} | environ,
    )
    assert any(told in process.said for process in ended), [process.said for process in ended]
    assert all(process.error or process.status for process in ended)


def test_one_chip_that_advertises_four_cannot_be_started_as_one_of_many(library):
    """Colab's: the multi-process start-up waits for three more, as on the real machine."""
    colab = SHAPES["colab v5e-1"]
    many = {
        "TPU_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_ADDRESSES": "localhost:8476",
        "SIMULATOR_TIMEOUT": "1",
    }
    (ended,) = run(colab, _dies_before_it_starts, library=library, environ=many)
    assert "expected 4 worker addresses, got 1" in ended.said


def test_nothing_is_left_in_shared_memory_even_of_processes_that_are_killed(library):
    before = sorted(os.listdir("/dev/shm"))

    def big_then_killed():
        _total(torch.ones(1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)

    ended = run(dry_run(2), big_then_killed, library=library)
    assert [process.status for process in ended] == [-signal.SIGKILL] * 2
    assert sorted(os.listdir("/dev/shm")) == before


def test_the_meeting_place_is_memory_without_a_name_that_goes_with_its_maker():
    with shapes.meeting_place() as path:
        assert os.readlink(path) == "/memfd:tpukit-simulator (deleted)"
        with open(path, "r+b") as file:
            assert file.write(b"here") == 4
    assert not os.path.exists(path)
