import contextlib
import os
import select
import signal
import sys
import threading
import time
import types
import warnings

import numpy
import pytest
import torch
from torch import nn

from tpukit.essentials.backends.protocol import Topology
from tpukit.essentials.display.progress import Screen
from tpukit.essentials.launcher import messages
from tpukit.essentials.launcher.channel import (
    Receiver,
    Sender,
    SerializationError,
    deserialize,
    serialize,
)
from tpukit.essentials.launcher.signals import Terminated
from tpukit.essentials.launcher.watchdog import Limits
from tpukit.essentials.launcher.worker import Task
from tpukit.essentials.launcher.worker_group import WorkerGroup
from tpukit.essentials.launcher.worker_output import WorkerOutput


def there_and_back(*values):
    """Send values through a real pipe, from a thread, and return what comes out."""
    reading, writing = os.pipe()
    receiver = Receiver(reading)

    def send():
        try:
            for value in values:
                Sender(writing).send(value)
        finally:
            os.close(writing)

    thread = threading.Thread(target=send)
    thread.start()
    came = []
    while not receiver.closed:
        came += receiver.receive()
    thread.join()
    receiver.close()
    return came


with warnings.catch_warnings():  # torch calls this layout a beta
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
    BY_ROWS = torch.eye(3).to_sparse_csr()

TENSORS = {
    "float32": torch.randn(2, 3),
    "bfloat16, which numpy does not know": torch.randn(4).bfloat16(),
    "bool": torch.tensor([True, False]),
    "int64 scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "not contiguous": torch.arange(6).reshape(2, 3).T,
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate view": torch.randn(3, dtype=torch.complex64).conj(),
    "negative view": torch.randn(3, dtype=torch.complex64).conj().imag,
    "sparse, by rows": BY_ROWS,
    "sparse, by coordinates": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_arrives_as_it_was(tensor):
    (came,) = there_and_back(tensor)
    assert came.dtype == tensor.dtype
    assert came.layout == tensor.layout
    assert torch.equal(came.to_dense(), tensor.to_dense())
    if came.layout == torch.strided:
        came.zero_()  # its memory is its own, and writable


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_arrive():
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)])
    (came,) = there_and_back(tensor)
    assert [part.tolist() for part in came.unbind()] == [[1, 1], [0, 1, 2]]


class Boxes(torch.Tensor):
    """A tensor with a class and attributes of its own, as torchvision's bounding boxes are."""


def test_a_tensor_of_a_class_of_its_own_keeps_it_and_its_attributes():
    boxes = torch.ones(2, 4).as_subclass(Boxes)
    boxes.canvas_size = (8, 8)
    (came,) = there_and_back(boxes)
    assert type(came) is Boxes
    assert came.canvas_size == (8, 8)
    assert came.tolist() == boxes.tolist()


def test_a_bounding_box_of_torchvisions_arrives_whole():
    from torchvision import tv_tensors

    boxes = tv_tensors.BoundingBoxes([[0, 0, 4, 4]], format="XYXY", canvas_size=(8, 8))
    (came,) = there_and_back(boxes)
    assert type(came) is tv_tensors.BoundingBoxes
    assert (came.format, came.canvas_size) == (boxes.format, boxes.canvas_size)


def test_values_arrive_with_their_types():
    value = {
        "a": 1,
        "b": (2.5, None, "text"),
        "c": numpy.float64(3.0),
        "d": numpy.arange(4).reshape(2, 2),
    }
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


class Scale(nn.Parameter):
    pass


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter, Scale])
@pytest.mark.parametrize("needs", [False, True])
def test_a_tensor_that_is_trained_arrives_as_one_that_is_trained(kind, needs):
    weight = torch.ones(3).as_subclass(kind).requires_grad_(needs)
    (came,) = there_and_back(weight)
    assert type(came) is kind
    assert came.requires_grad == needs


def test_tensors_without_memory_arrive_as_torch_pickles_them():
    meta, lazy = there_and_back(torch.empty(3, device="meta"), nn.LazyLinear(2))
    assert (meta.device.type, meta.shape) == ("meta", (3,))
    assert lazy(torch.ones(1, 5)).shape == (1, 2)


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
    with pytest.raises(SerializationError, match=message):
        serialize(value)


def test_an_array_is_not_copied_into_the_pickle():
    array = numpy.zeros(1_000_000, dtype=numpy.uint8)
    first, second = serialize(array)
    assert first.nbytes < 1000
    assert second.nbytes == array.nbytes
    assert deserialize([bytearray(first), bytearray(second)]).nbytes == array.nbytes


@contextlib.contextmanager
def showered(number, function):
    """Send this process a signal every 0.2 ms, whose handler raises if it comes while the function runs."""
    raised, over = [], threading.Event()

    def handle(_, frame):
        while frame:
            if frame.f_code is function.__code__:
                raised.append(number)
                raise Terminated
            frame = frame.f_back

    def shower():
        while not over.wait(0.0002):
            os.kill(os.getpid(), number)

    before, interval, unraisable = (
        signal.signal(number, handle),
        sys.getswitchinterval(),
        sys.unraisablehook,
    )
    sys.setswitchinterval(1e-5)
    sys.unraisablehook = lambda _: (
        None
    )  # a generator that is closed cannot raise; pytest's would be showered as well
    thread = threading.Thread(target=shower)
    thread.start()
    try:
        yield raised
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
        sys.unraisablehook = unraisable
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_kernel_reads_does_not_end_the_reading(number):
    (reading, writing), (printed, printing) = os.pipe(), os.pipe()
    one = types.SimpleNamespace(
        receive=Receiver(reading).receive, output=WorkerOutput(printed), rank=0
    )
    group = WorkerGroup(
        Topology("cpu", "CPU", 1, 1), task=Task(print, (), 0), limits=Limits(), display=Screen()
    )
    sender = Sender(writing)
    with showered(number, WorkerGroup._read) as raised:
        while len(raised) < 50:
            before, late = len(group.log), time.monotonic() + 600
            sender.send(messages.LogRows(0, [{"step": 1}] * 20))
            while len(group.log) == before:
                assert time.monotonic() < late
                with contextlib.suppress(Terminated):
                    group._read(one)
    sender.send(messages.Result(0, "arrived"))
    group._read(one)
    assert group.results == {0: "arrived"}
    for fd in (reading, writing, printed, printing):
        os.close(fd)


def test_a_bar_that_overwrites_itself_often_is_not_printed_as_long_lines():
    printed, printing = os.pipe()
    output = WorkerOutput(printed)
    lines = []
    for percent in range(100):
        os.write(printing, b"\r%3d%% |####    |" % percent * 1000)
        lines += output.lines()
    assert not lines
    os.write(printing, b"\rdone\n")
    for _ in range(2):
        os.write(printing, b"x" * 35_000)
        lines += output.lines()
    os.close(printing)
    for _ in range(2):
        lines += output.lines()
    output.close()
    assert (lines[0], "".join(lines[1:])) == ("done", "x" * 70_000)


def test_a_signal_while_a_worker_sends_leaves_its_next_messages_whole():
    reading, writing = os.pipe()
    receiver, came = Receiver(reading), []

    def read():
        while not receiver.closed:
            select.select([reading], [], [])
            came.extend(receiver.receive())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    sender, array = Sender(writing), numpy.arange(30_000)
    with showered(signal.SIGTERM, Sender.send) as raised:
        while len(raised) < 50:
            with contextlib.suppress(Terminated):
                sender.send(array)
    sender.send("the last")
    os.close(writing)
    reader.join(timeout=600)
    assert not reader.is_alive()
    receiver.close()
    assert came[-1] == "the last"
    assert all((one == array).all() for one in came[:-1])


def test_a_short_message_is_never_seen_in_part():
    """The watchdog begins its look at idle cores again where a part of a message has arrived."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        for number in range(5000):
            Sender(writing).send(messages.Alive(0, number, "to_host", None))
        os._exit(0)
    os.close(writing)
    receiver, in_part = Receiver(reading), 0
    while not receiver.closed:
        select.select([reading], [], [])
        for _ in receiver.receive():
            pass
        in_part += receiver.in_message
    os.waitpid(child, 0)
    receiver.close()
    assert in_part == 0
