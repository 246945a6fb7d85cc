"""Messages from a worker to the kernel: each arrives as its type, and one that nobody knows is an error."""

import pytest

from tpukit import launch
from tpukit.essentials.backends import Topology
from tpukit.essentials.display import Screen, TpukitRuntimeError
from tpukit.essentials.launcher import Limits, Task, WorkerGroup, messages
from tpukit.essentials.launcher.channel import deserialize, serialize
from tpukit.essentials.launcher.failure import Failure


@pytest.mark.parametrize(
    "message",
    [
        messages.Started(1),
        messages.Alive(1, 3, "barrier", None),
        messages.LogRows(0, [{"step": 1, "loss": 0.5}]),
        messages.CoreFailed(Failure(1, 2.0, "raised KeyError: 'a'")),
    ],
)
def test_a_message_arrives_as_its_type_with_its_fields(message):
    again = deserialize([bytearray(part) for part in serialize(message)])
    assert type(again) is type(message)
    assert again == message


@pytest.mark.parametrize("message", [("result", 0, 7), "hello", None])
def test_a_message_of_no_known_type_is_an_error(message):
    group = WorkerGroup(
        Topology("cpu", "CPU", 1, 1), task=Task(print, (), 0), limits=Limits(), display=Screen()
    )
    with pytest.raises(TpukitRuntimeError, match="the kernel does not know this message of core 0"):
        group._take(message, 0)


def test_an_unknown_message_from_a_worker_ends_the_launch_with_an_error():
    def work(core):
        core.internal.send(("of an older version", core.rank))

    with pytest.raises(TpukitRuntimeError, match="of an older version"):
        launch(work, cores=2, backend="cpu", progress="off")
