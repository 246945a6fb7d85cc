"""A step that is run again on the machines that the simulator provides, where the cores' gradients meet within it."""

import re
import time

import pytest
from helpers.replay_rows import guarded, guarded_rows, right
from helpers.replay_workers import Trained, assert_same, both, net
from simulator.machine import machines
from simulator.test_kit import on
from torch import nn

import tpukit
from tpukit.simulator import shapes

pytestmark = [
    pytest.mark.usefixtures("library"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning"
    ),  # torch_xla's, in its own calls of its own old names
]
MACHINES = pytest.mark.parametrize(
    "machine", machines(("colab v5e-1", "v4-8", "kaggle v5e-8"), only_soak=["kaggle v5e-8"])
)


@MACHINES
def test_every_row_equals_the_recorded_run_to_the_last_bit_on_every_core(machine, tmp_path):
    cores = on(shapes.SHAPES[machine], both, right(), 12, seed=5, compile_cache=tmp_path).results
    for row in right():
        for replayed, recorded in (rows[row] for rows in cores):
            assert_same(replayed, recorded)
        assert any("the step is replayed from" in line for line in cores[0][row][0]["lines"]), row


@MACHINES
def test_what_cannot_be_replayed_is_recorded_on_every_core(machine, tmp_path):
    cores = on(
        shapes.SHAPES[machine], both, guarded_rows(), 12, seed=5, compile_cache=tmp_path
    ).results
    for row, (_, words) in guarded().items():
        for replayed, recorded in (rows[row] for rows in cores):
            assert_same(replayed, recorded)
        said = [line for line in cores[0][row][0]["lines"] if "every step is captured" in line]
        assert len(said) == 1, said
        assert re.match(words, said[0]), said[0]


def lines_with_replay(core):
    return Trained(core, net(norm=False)).run(True, 6)["lines"]


def on_processes_of_the_cpu():
    return tpukit.launch(lines_with_replay, cores=2, backend="xla:cpu", progress="off", seed=5)


def on_sharded_chips():
    return on(shapes.dry_run(4), lines_with_replay, shard="fsdp", seed=5)


def on_threads():
    return on(shapes.SHAPES["v3-8"], lines_with_replay, seed=5)


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (on_processes_of_the_cpu, "on several XLA:CPU processes"),
        (on_sharded_chips, "for a sharded model"),
        pytest.param(on_threads, "if two cores share a process", marks=pytest.mark.every_machine),
    ],
)
def test_where_replay_is_not_supported_fit_prints_the_reason(start, reason):
    lines = [line for line in start().results[0] if "replay" in line]
    assert lines == [f"replay=True has no effect here: it is not supported {reason}"]


def busy(core, replay):
    """Return the lines of a run whose Python takes a fifth of a second per step, much longer than its program."""
    one = Trained(core, net(norm=False))

    def loss(outputs, targets):
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        return nn.functional.mse_loss(outputs, targets)

    one.loss, one.options = loss, {"log_every": 3, "steps_per_epoch": 12}
    return one.run(replay, 12)["lines"]


def test_a_line_recommends_replay_once_when_the_host_is_slower_than_the_chip(tmp_path):
    def advice(replay):
        shape = shapes.SHAPES["colab v5e-1"]
        lines = on(shape, busy, replay, seed=5, compile_cache=tmp_path).results[0]
        return [line for line in lines if "replay" in line]

    (line,) = advice(False)
    expected = (
        r"the host needs 20\d\.\d ms for the Python of a step, the device at most .* ms to run it: "
        r"fit\(replay=True\) would save up to .* ms per step; read docs/replay.md first"
    )
    assert re.fullmatch(expected, line), line
    assert not any("fit(replay=True)" in line for line in advice(True))
