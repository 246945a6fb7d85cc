"""Every fault of the table as a test; one that fails, or does not start, is tried once more in a new kernel."""

import pytest

pytest.importorskip("fcntl", reason="a fault is one of forked processes")
from faults.matrix import BACKENDS, BY_NAME, Benches, can_mount, names

from tpukit.simulator.build import why_not

# What a backend decides. All else is the same code under each, so that `make test` tries it under one.
OF_THE_BACKEND = {
    "exception while others wait in a collective",
    "XLA tensor as result",
    "SIGKILL of one rank",
    "a rank that sleeps for ever",
    "different collectives",
    "DataLoader process killed",
    "interrupt during a collective",
    "fork after threaded torch operations and backward",
    "SIGKILL of a rank that is not its process's number",
    "gradients of other parameters on each core",
    "kernel kill -9",
}


def marks(backend, name):
    once_more = [pytest.mark.only_soak] * (backend == "xla:cpu" and name not in OF_THE_BACKEND)
    return [pytest.mark.xla] * (backend != "cpu") + once_more


def test_what_a_backend_decides_is_among_the_faults():
    assert set(names("xla:cpu")) >= OF_THE_BACKEND


@pytest.fixture(scope="module")
def benches():
    with Benches() as made:
        yield made


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        pytest.param(backend, name, marks=marks(backend, name), id=f"{backend}: {name}")
        for backend in BACKENDS
        for name in names(backend, only_in_graph=backend == "xla:simulator")
    ],
)
def test_the_user_sees_the_fault_has_control_again_and_nothing_is_left(backend, fault, benches):
    if backend == "xla:simulator" and (reason := why_not()):
        pytest.skip(reason)
    if fault in BY_NAME and BY_NAME[fault].needs_root and not can_mount():
        pytest.skip("it takes the right to mount")
    *_, last = benches.tried(backend, fault)
    assert last.passed, last.why
