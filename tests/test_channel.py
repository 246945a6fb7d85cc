import os
import threading

import numpy
import pytest
import torch
from torch import nn

from tpukit.distributed.channel import Receiver, Sender, Unsendable, deserialize, serialize


def there_and_back(*values):
    """Send values through a real pipe, from a thread, and return what comes out."""
    reading, writing = os.pipe()
    receiver = Receiver(reading)

    def send():
        for value in values:
            Sender(writing).send(value)
        os.close(writing)

    thread = threading.Thread(target=send)
    thread.start()
    came = []
    while not receiver.closed:
        came += receiver.receive()
    thread.join()
    receiver.close()
    return came


TENSORS = {
    "float32": torch.randn(2, 3),
    "bfloat16, which numpy does not know": torch.randn(4).bfloat16(),
    "bool": torch.tensor([True, False]),
    "int64 scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "not contiguous": torch.arange(6).reshape(2, 3).T,
    "complex": torch.randn(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_arrives_as_it_was(tensor):
    (came,) = there_and_back(tensor)
    assert came.dtype == tensor.dtype
    assert torch.equal(came, tensor)
    came.zero_()  # its memory is its own, and writable


def test_values_arrive_with_their_types():
    value = {"a": 1, "b": (2.5, None, "text"), "c": numpy.float64(3.0), "d": numpy.arange(4).reshape(2, 2)}
    (came,) = there_and_back(value)
    assert came["b"] == (2.5, None, "text")
    assert type(came["c"]) is numpy.float64
    assert came["d"].tolist() == [[0, 1], [2, 3]]


def test_a_tensor_that_needs_gradients_arrives_without_and_a_parameter_stays_one():
    needs = torch.ones(3, requires_grad=True) * 2
    model = nn.Linear(3, 2)
    came_tensor, came_model = there_and_back(needs, model)
    assert not came_tensor.requires_grad
    assert isinstance(came_model.weight, nn.Parameter)
    assert torch.equal(came_model.weight, model.weight)


def test_many_messages_larger_than_the_pipe_arrive_in_order():
    values = [torch.full((300_000,), float(index)) for index in range(5)] + ["x" * 1_000_000]
    came = there_and_back(*values)
    assert [float(value[0]) for value in came[:5]] == [0, 1, 2, 3, 4]
    assert came[5] == values[5]


def test_a_message_cut_off_in_the_middle_is_not_received():
    reading, writing = os.pipe()
    receiver = Receiver(reading)
    Sender(writing).send("whole")
    os.write(writing, b"\0\0\0\1" + b"\0\0\0\0\0\0\0\x20" + b"half")
    os.close(writing)
    assert list(receiver.receive()) == ["whole"]
    assert receiver.closed
    receiver.close()


class Breaks:
    """Pickles, but does not unpickle."""

    def __reduce__(self):
        return int, ("not a number",)


def test_what_does_not_unpickle_comes_out_as_the_error_and_the_next_message_is_fine():
    came = there_and_back(Breaks(), "next")
    assert isinstance(came[0], ValueError)
    assert came[1] == "next"


UNSENDABLE = {
    "a function inside": ({"model": [1, lambda: 0]}, r"the value\['model'\]\[1\] \(a function\)"),
    "an open file": (open(os.devnull), r"the value \(a TextIOWrapper\)"),  # noqa: SIM115
    "a lock in an attribute": (type("Thing", (), {})(), r"the value"),
    "a generator": ([iter(()), (n for n in ())], r"the value\[1\] \(a generator\)"),
}


@pytest.mark.parametrize(("value", "message"), UNSENDABLE.values(), ids=UNSENDABLE)
def test_what_cannot_be_pickled_is_named(value, message):
    with pytest.raises(Unsendable, match=message):
        serialize(value)


def test_an_array_is_not_copied_into_the_pickle():
    array = numpy.zeros(1_000_000, dtype=numpy.uint8)
    first, second = serialize(array)
    assert first.nbytes < 1000
    assert second.nbytes == array.nbytes
    assert deserialize([bytearray(first), bytearray(second)]).nbytes == array.nbytes
