"""Where the time of an epoch goes: its parts add up, and the text names the one to work on."""

import time
from types import SimpleNamespace

import pytest
import torch
from helpers.launching import DRY_RUNS, quietly
from torch import nn

import tpukit
from tpukit.training import History, epoch_time, show_time
from tpukit.training.epoch_time import PARTS, EpochClock, part_to_work_on, time_advice, total_time


class Slow(torch.utils.data.Dataset):
    """Samples that take some milliseconds to read."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __len__(self):
        return 16

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(4), torch.ones(1)


def train(core, read=0.0, evaluate=0.0, folder=None):
    model = core.model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = core.batches(Slow(read), batch_size=4, shuffle=True, drop_last=True)
    valid = core.batches(Slow(), batch_size=4)

    def slow(outputs, targets):
        time.sleep(evaluate)
        return (outputs - targets).mean()

    return tpukit.fit(
        core, model, optimizer, nn.functional.mse_loss, batches, valid,
        epochs=2, metrics={"error_loss": slow}, checkpoints=folder,
    )  # fmt: skip


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_the_parts_add_up_to_the_epoch(backend, tmp_path):
    history = quietly(lambda core: train(core, folder=tmp_path), backend=backend).results[0]
    assert [row["epoch"] for row in history.times] == [1, 2]
    for row, epoch in zip(history.times, history.epochs, strict=True):
        parts = {part: row[part] for part in PARTS}
        assert min(parts.values()) >= 0
        assert parts["evaluation"] > 0
        assert parts["checkpoints"] > 0
        # A row of an epoch is made before the checkpoint at its end.
        assert sum(parts.values()) >= epoch["seconds"]
    assert (history.times[0]["compile"] > 0) is (backend != "cpu")


@pytest.mark.parametrize(
    ("options", "part", "line"),
    [
        ({"read": 0.05}, "input", "add workers= or threads= to core.batches"),
        ({"evaluate": 1.0}, "evaluation", "with a larger steps_per_epoch="),
    ],
)
def test_the_part_that_was_made_slow_is_named_with_the_line_to_write(options, part, line):
    (history,) = quietly(lambda core: train(core, **options), cores=1).results
    assert part_to_work_on(total_time(history.times)) == part
    assert f"{part} takes " in repr(history)
    assert line in repr(history)


class Counts:
    """Counters that a test sets."""

    def __init__(self, device="xla", running=None):
        self.backend = SimpleNamespace(
            device=SimpleNamespace(type=device),
            compiles=lambda: (1, self.compiled),
            loads=lambda: (0, 0.0),
        )
        self.now = 0.0
        self.wait = 0.0
        self.host = 0.0
        self.compiled = 0.0
        self.running = None if running is None else 0.0

    def clock(self):
        return EpochClock(
            self.backend,
            wait_seconds=lambda: self.wait,
            host_seconds=lambda: self.host,
            device_seconds=lambda: self.running,
        )


@pytest.fixture
def counts(monkeypatch):
    def make(**options):
        made = Counts(**options)
        monkeypatch.setattr(epoch_time.time, "perf_counter", lambda: made.now)
        return made

    return make


# Seconds of ten steps: the host's, those of the device's programs if they are counted, and the
# result. The wait for batches takes one more.
STEPS = {
    "the programs are counted": (9.0, 6.0, {"device": 6.0, "host": 3.0}),
    "the programs overlap": (2.0, 14.0, {"device": 9.0, "host": 0.0}),
    "the host waits for the device": (5.0, None, {"device": 9.0, "host": 0.0}),
    "the device waits for the host": (8.5, None, {"device": 0.5, "host": 8.5}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_second_of_the_host_counts_only_if_the_device_is_idle(name, counts):
    host, running, expected = STEPS[name]
    made = counts(running=running)
    clock = made.clock()
    with clock.part("steps"):
        made.now = 10.0
        made.wait = 1.0
        made.host = host
        made.running = running
    found = clock.end_epoch()
    assert found == {**dict.fromkeys(PARTS, 0.0), "input": 1.0, **expected}


def test_a_save_within_steps_and_a_compile_anywhere_are_parts_of_their_own(counts):
    made = counts(device="cpu")
    clock = made.clock()
    with clock.part("steps"):
        made.now = 4.0
        made.compiled = 3.0
        with clock.part("checkpoints"):
            made.now = 6.0
        made.now = 7.0
    with clock.part("evaluation"):
        made.now = 12.0
        made.compiled = 5.0
    made.now = 12.5
    assert clock.end_epoch() == {
        "device": 2.0, "host": 0.0, "input": 0.0, "compile": 5.0,
        "evaluation": 3.0, "checkpoints": 2.0, "other": 0.5,
    }  # fmt: skip


def test_a_busy_device_is_the_part_to_work_on():
    seconds = {**dict.fromkeys(PARTS, 0.0), "device": 8.0, "input": 2.0}
    assert time_advice(seconds).startswith("device takes 80% of the time: on a TPU or GPU use bf16")
    seconds["input"] = 2.1
    assert time_advice(seconds).startswith("input takes 21% of the time: ")


def test_the_bar_is_as_long_as_the_time_and_its_title_names_the_part():
    row = {"device": 3.0, "host": 0.0, "input": 5.0, "compile": 2.0}
    row |= {"evaluation": 0.0, "checkpoints": 0.0, "other": 0.0}
    history = History(times=[{"epoch": 1, **row}])
    figure = show_time(history)
    (axes,) = figure.axes
    assert axes.get_xlim() == (0, 10)
    assert axes.get_title(loc="left").startswith("input takes 50% of the time: ")
    assert "device 30%, host 0%, input 50%, compile 20%" in figure.alt
    with pytest.raises(tpukit.TpukitError, match="no finished epoch"):
        show_time(History())
