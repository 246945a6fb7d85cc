"""A step that `Programs` runs again computes what a recorded one does, to the last bit; what cannot be is said."""

import copy
import functools
import itertools
import re
import runpy
import threading
from pathlib import Path

import pytest
import torch
from helpers.replay_rows import (
    changed_by_the_dataset,
    growing,
    guarded,
    guarded_rows,
    right,
    scheduled,
    with_threshold,
)
from helpers.replay_workers import STEPS, Trained, assert_same, both, net
from helpers.workers import Pairs
from torch import nn

from tpukit import WorkerError, launch
from tpukit.training.replay import Replay

pytestmark = pytest.mark.xla
REPLAYED = (
    r"the step is replayed from step 4 on: \d+\.\d ms of host time per step instead of \d+\.\d"
)


def freeze(one):
    one.model[0].requires_grad_(False)


def double(one):
    with torch.no_grad():
        one.model[0].weight.mul_(2)


def share(one):
    one.kept = one.model[0].weight.detach()


def forget(one):
    one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))


def exchange(one):
    one.model[0].weight = nn.Parameter(one.model[0].weight.detach() * 2)


# Done by the schedule in the middle of an epoch, before step 11; and the reason that follows.
CHANGES = {
    "a layer is frozen": (freeze, "other step counters have grown on the host than before"),
    "weights are doubled": (double, "something is computed on the device between the steps"),
    "weights are kept": (share, "another tensor shares the memory of a tensor of the step"),
    "the optimizer's state is loaded": (
        forget,
        "other step counters have grown on the host than before",
    ),
    "a weight is exchanged": (exchange, "something is computed on the device between the steps"),
}


class ChangingOnce(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, one, change):
        self.one, self.change = one, change
        super().__init__(one.optimizer, lambda step: 1.0)

    def step(self, *args):
        super().step(*args)
        if self.last_epoch == 10:
            self.change(self.one)


def changing(change):
    def make(core):
        one = Trained(core, net(norm=False))
        one.options = {"scheduler": ChangingOnce(one, change), "steps_per_epoch": 24}
        one.data = Pairs(4 * 24)
        return one

    return make


def changes():
    return {name: changing(change) for name, (change, _) in CHANGES.items()}


@functools.cache
def launched(which, steps, cores=1, backend="xla:cpu"):
    return launch(
        both, which(), steps, cores=cores, backend=backend, progress="off", seed=5
    ).results


@pytest.mark.parametrize("row", right())
def test_a_replayed_run_equals_the_recorded_one_to_the_last_bit(row):
    replayed, recorded = launched(right, STEPS)[0][row]
    assert_same(replayed, recorded)
    said = [line for line in replayed["lines"] if "replayed" in line]
    assert len(said) == 1, replayed["lines"]
    assert re.fullmatch(REPLAYED.replace("step 4", r"step \d+"), said[0])
    assert not any("recorded" in line for line in replayed["lines"])
    assert not any("replayed" in line for line in recorded["lines"])


@pytest.mark.parametrize("row", guarded())
def test_what_cannot_be_replayed_is_recorded_with_the_right_numbers_and_said_once(row):
    replayed, recorded = launched(guarded_rows, 12)[0][row]
    assert_same(replayed, recorded)
    said = [line for line in replayed["lines"] if "every step is captured" in line]
    assert len(said) == 1, replayed["lines"]
    assert re.match(guarded()[row][1], said[0]), said[0]


def test_a_late_discovery_names_the_steps_that_were_replayed_without_it():
    """The contract says that nothing notices a number of one's own in time."""
    replayed, recorded = launched(lambda: {"late": changed_by_the_dataset}, 12)[0]["late"]
    assert replayed["losses"] != recorded["losses"]
    assert replayed["lines"][-1] == (
        "every step is captured from step 12 on: a number of the host was 0.5 and is 2; "
        "4 of steps 8 to 11 were replayed as step 7 was"
    )


def unchecked(core):
    """Train without a look at the ends of an epoch; return what came out, and of the recorded run."""
    methods = {name: getattr(Replay, name) for name in ("begin_step", "capture_next")}
    Replay.begin_step = lambda self, number, is_last: None
    Replay.capture_next = lambda self: None
    found = with_threshold(core).run(True, 12)
    for name, method in methods.items():
        setattr(Replay, name, method)
    return found, with_threshold(core).run(False, 12)


def test_without_the_look_after_each_epoch_a_number_would_be_wrong_in_silence():
    replayed, recorded = launch(
        unchecked, cores=1, backend="xla:cpu", progress="off", seed=5
    ).results[0]
    assert replayed["losses"] != recorded["losses"]
    assert not any("every step is captured" in line for line in replayed["lines"])


class ReadByThread(Pairs):
    """Samples before each of which a thread reads weights."""

    def __init__(self, weight):
        super().__init__(64)
        self.weight = weight
        self.seen = []

    def read(self):
        self.seen.append(self.weight.detach().cpu())

    def __getitem__(self, index):
        thread = threading.Thread(target=self.read, name="logger")
        thread.start()
        thread.join()
        return super().__getitem__(index)


def read_by_a_thread(core):
    """Return lines and the weights that the thread reads, of a replayed and a recorded run."""
    found = []
    for replay in (True, False):
        one = Trained(core)
        one.data = ReadByThread(one.model[0].weight)
        lines = one.run(replay, 6)["lines"]
        found.append((lines, one.data.seen))
    return found


def test_a_thread_reads_the_newest_weights_between_replayed_steps():
    replayed, recorded = launch(
        read_by_a_thread, cores=1, backend="xla:cpu", progress="off", seed=5
    ).results[0]
    lines, weights = replayed
    assert re.fullmatch(REPLAYED, lines[0])
    assert len(lines) == 1
    assert len(weights) == len(recorded[1])
    assert all(map(torch.equal, weights, recorded[1]))
    assert not torch.equal(weights[0], weights[-1])


class InNewOrder(Pairs):
    """Batches of four whose entries come in another order each time."""

    def __getitem__(self, index):
        row = self.images[index, 0]
        entries = {
            "a": row[0],
            "b": row[1],
            "c": row[2],
            "d": row[3],
            "labels": self.targets[index],
        }
        orders = list(itertools.permutations(entries))
        return {name: entries[name] for name in orders[index // 4]}


class Four(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(8, 2)

    def forward(self, a, b, c, d):
        return self.layer(a - b) + self.layer(c + d)


def in_new_order(core):
    one = Trained(core, Four())
    one.data = InNewOrder(4 * 60)
    one.batches = {"batch_size": 4, "drop_last": True}
    one.options = {"steps_per_epoch": 60, "epochs": 1}
    return one


def test_a_line_says_that_no_batch_has_the_form_of_an_earlier_one():
    replayed, recorded = launched(lambda: {"in a new order": in_new_order}, 60)[0]["in a new order"]
    assert_same(replayed, recorded)
    assert replayed["lines"] == [
        "no step of the first 47 was replayed, all were captured: their batches have 46 forms, and a form is replayed "
        "from its third step on"
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_within_an_epoch_is_met_by_the_next_step(change):
    replayed, recorded = launched(changes, 24)[0][change]
    assert_same(replayed, recorded)
    first, second = [line for line in replayed["lines"] if "replayed" in line or "recorded" in line]
    assert re.fullmatch(REPLAYED, first)
    assert second.startswith(f"every step is captured from step 11 on: {CHANGES[change][1]}")


def test_what_replay_is_must_be_true_or_false():
    with pytest.raises(WorkerError, match="replay must be True or False, got 'on'"):
        launch(with_text, cores=1, backend="cpu", progress="off")


def with_text(core):
    Trained(core).run("on", 6)


def by_default(core):
    short, long = Trained(core, net(norm=False)), Trained(core, net(norm=False))
    short.options = {"steps_per_epoch": 2}
    return Trained(core).run(False)["lines"], [short.run(True, 12), long.run(True, 12)]


def test_on_plain_cpu_processes_replay_changes_nothing_and_prints_nothing():
    lines, (short, long) = launch(
        by_default, cores=1, backend="cpu", progress="off", seed=5
    ).results[0]
    assert lines == long["lines"] == []
    assert short["lines"] == ["replay=True has no effect: an epoch has 2 steps, and replay needs 3"]


def test_another_group_in_the_optimiser_is_another_program():
    replayed, recorded = launched(lambda: {"growing": growing}, 24)[0]["growing"]
    assert_same(replayed, recorded)


class Ending(Pairs):
    """Samples that end the run with an exception after so many."""

    def __init__(self, after, error=KeyboardInterrupt):
        super().__init__()
        self.error = error
        self.left = [after]  # in a list, because a number is a setting of the dataset

    def __getitem__(self, index):
        self.left[0] -= 1
        if self.left[0] < 0:
            raise self.error
        return super().__getitem__(index)


def ended(core, folder):
    """Return states: of runs that an interrupt ended, replayed and recorded, and of one resumed and one not."""
    left = []
    for replay in (True, False):
        one = scheduled(core)
        one.data, one.options = Ending(4 * 9), one.options | {"log_every": 50}
        with pytest.raises(KeyboardInterrupt):
            one.run(replay)
        own = [dict(state) for state in one.optimizer.state.values()]
        left.append({"losses": [], "state": core.to_host([dict(one.model.state_dict()), own])})
    for steps, error in ((8, ValueError), (7, KeyboardInterrupt)):
        one = scheduled(core)
        one.data = Ending(4 * steps, error)
        one.options |= {"log_every": 2, "save_every": 0, "folder": folder}
        with pytest.raises(error):
            one.run(True, 24)
    ends = []
    for where in ({"folder": folder}, {}):
        one = scheduled(core)
        one.data = Ending(1000)  # the same kind of dataset, which does not end
        one.options |= {"log_every": 2, **where}
        ends.append(one.run(True, 24))
    return left, ends


def test_weights_are_right_after_an_interrupt_and_a_resumed_run_equals_the_uninterrupted(tmp_path):
    left, ends = launch(
        ended, tmp_path / "run", cores=1, backend="xla:cpu", progress="off", seed=5
    ).results[0]
    assert_same(*left)
    assert_same(*ends)
    assert any("replayed" in line for line in ends[0]["lines"])


def test_the_benchmark_of_a_step_runs():
    """It makes `TrainStep` as `fit` does, and nothing else would tell that the two have come apart."""
    stepped = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "recording.py"))[
        "stepped"
    ]
    assert (
        launch(stepped, "resnet18", True, cores=1, backend="xla:cpu", progress="off").results[0] > 0
    )
