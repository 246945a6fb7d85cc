"""Every fault of the table as a test; one that fails, or does not start, is tried once more in a new kernel."""

import pytest

pytest.importorskip("fcntl", reason="a fault is one of forked processes")
from faults.matrix import BACKENDS, BY_NAME, Benches, can_mount, names

from tpukit.standin.build import why_not

MARKS = {"cpu": [], "xla:cpu": [pytest.mark.xla], "xla:standin": [pytest.mark.xla]}


@pytest.fixture(scope="module")
def benches():
    with Benches() as made:
        yield made


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        pytest.param(backend, name, marks=MARKS[backend], id=f"{backend}: {name}")
        for backend in BACKENDS
        for name in names(backend, only_in_graph=backend == "xla:standin")
    ],
)
def test_the_user_sees_the_fault_has_control_again_and_nothing_is_left(backend, fault, benches):
    if backend == "xla:standin" and (reason := why_not()):
        pytest.skip(reason)
    if fault in BY_NAME and BY_NAME[fault].needs_root and not can_mount():
        pytest.skip("it takes the right to mount")
    *_, last = benches.tried(backend, fault)
    assert last.passed, last.why
