import threading
import time
import weakref

import numpy as np
import pytest
import torch
from helpers.waiting import wait_until

from tpukit.essentials.data.prefetch import Buffers, run_ahead


def test_results_come_in_order_even_if_later_calls_are_faster():
    calls = (
        (lambda number=number: time.sleep(0.02 * (number % 3)) or number) for number in range(12)
    )
    assert list(run_ahead(calls, threads=3)) == list(range(12))


def test_no_more_calls_are_started_than_two_ahead_per_thread():
    started = []
    calls = ((lambda number=number: started.append(number) or number) for number in range(100))
    results = run_ahead(calls, threads=2)
    assert next(results) == 0
    wait_until(lambda: len(started) >= 5)
    time.sleep(0.1)
    assert len(started) == 5  # the one that was given, and four ahead
    results.close()


def test_an_error_is_raised_when_its_result_is_due():
    def fail():
        raise OSError("record 1 is damaged")

    results = run_ahead(iter([lambda: 0, fail, lambda: 2]), threads=1)
    assert next(results) == 0
    with pytest.raises(OSError, match="record 1 is damaged"):
        next(results)


def test_a_loop_that_ends_early_leaves_no_thread():
    results = run_ahead(((lambda: time.sleep(0.01)) for _ in range(1000)), threads=4)
    next(results)
    results.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_a_buffer_is_used_again_only_when_nobody_holds_it():
    buffers = Buffers((2, 2))
    first = buffers.get()
    view = torch.from_numpy(first)[1:]
    place = first.ctypes.data
    del first
    assert buffers.get().ctypes.data != place
    del view
    assert buffers.get().ctypes.data == place


def test_shared_buffers_are_as_many_as_were_made_and_then_none():
    buffers = Buffers((2, 2), shared=2)
    first, second = buffers.get(), buffers.get()
    assert {buffers.number(first), buffers.number(second)} == {0, 1}
    assert buffers.get() is None
    first[:] = 7
    assert np.array_equal(buffers[buffers.number(first)], first)
    del second
    assert buffers.get() is not None


def test_buffers_that_a_loop_held_go_back_and_many_of_them_cost_no_more_each():
    buffers, alive = Buffers((1000, 1000)), []
    held = [buffers.get() for _ in range(300)]
    for array in held:
        alive.append(weakref.ref(array))
    assert len({array.ctypes.data for array in held}) == 300
    del held, array
    assert sum(one() is not None for one in alive) <= 16

    def seconds(count):
        small, began = (
            Buffers((1,)),
            time.process_time(),
        )  # which others that use the processor do not add to
        held = [small.get() for _ in range(count)]
        return (time.process_time() - began) / len(held)

    assert min(seconds(8000) for _ in range(3)) < 8 * min(
        seconds(200) for _ in range(5)
    )  # 40 where all are looked at
