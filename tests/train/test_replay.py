"""A step that `Programs` runs again computes what a recorded one does, to the last bit; what cannot be is said."""

import functools
import re
import runpy
import threading
from pathlib import Path

import pytest
from replay_rows import changed_by_the_dataset, growing, guarded, guarded_rows, right, scheduled, with_threshold
from replay_workers import STEPS, Trained, assert_same, both, net
from workers import Pairs

from tpukit import WorkerFailed, launch
from tpukit.train.replay import Replay

pytestmark = pytest.mark.xla
REPLAYED = r"the step is replayed from step 4 on: \d+\.\d ms of the host instead of \d+\.\d"


@functools.cache
def launched(which, steps, cores=1, backend="xla:cpu"):
    return launch(both, which(), steps, cores=cores, backend=backend, progress="off", seed=5).results


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
    said = [line for line in replayed["lines"] if "every step is recorded" in line]
    assert len(said) == 1, replayed["lines"]
    assert re.match(guarded()[row][1], said[0]), said[0]


def test_a_late_discovery_names_the_steps_that_were_replayed_without_it():
    """The contract says that nothing notices a number of one's own in time."""
    replayed, recorded = launched(lambda: {"late": changed_by_the_dataset}, 12)[0]["late"]
    assert replayed["losses"] != recorded["losses"]
    assert replayed["lines"][-1] == (
        "every step is recorded from step 12 on: a number of the host was 0.5 and is 2; "
        "4 of steps 8 to 11 were replayed as step 7 was"
    )


def unchecked(core):
    """Train without a look at the ends of an epoch; return what came out, and of the recorded run."""
    methods = {name: getattr(Replay, name) for name in ("begin_step", "look_again", "write_back")}

    def lazy(self):
        state = self._state
        methods["write_back"](self)
        self._state = state

    Replay.begin_step, Replay.look_again = lambda self, number, is_last: None, lambda self: None
    Replay.write_back = lazy
    found = with_threshold(core).run(True, 12)
    for name, method in methods.items():
        setattr(Replay, name, method)
    return found, with_threshold(core).run(False, 12)


def test_without_the_look_after_each_epoch_a_number_would_be_wrong_in_silence():
    replayed, recorded = launch(unchecked, cores=1, backend="xla:cpu", progress="off", seed=5).results[0]
    assert replayed["losses"] != recorded["losses"]
    assert not any("every step is recorded" in line for line in replayed["lines"])


def looked_at_by_a_thread(core):
    """Return the error of a thread that reads the weights in the middle of replayed steps."""
    one, errors = Trained(core), []

    def read():
        try:
            one.model[0].weight.sum()
        except Exception as error:
            errors.append(str(error))

    class InTheMiddle(Pairs):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            if self.read == 4 * 5:
                thread = threading.Thread(target=read, name="logger")
                thread.start()
                thread.join()
            return super().__getitem__(index)

    one.data = InTheMiddle(64)
    one.run(True, 6)
    return errors


def test_a_thread_that_reads_the_weights_is_told_how_it_can():
    (error,) = launch(looked_at_by_a_thread, cores=1, backend="xla:cpu", progress="off").results[0]
    assert re.search(r"found: thread 'logger'\n  fix:   fit\(replay=False\), or use them in on_epoch", error), error


def test_what_replay_is_must_be_true_or_false():
    with pytest.raises(WorkerFailed, match="replay is True or False, got 'on'"):
        launch(with_text, cores=1, backend="cpu", progress="off")


def with_text(core):
    Trained(core).run("on", 6)


def by_default(core):
    short, long = Trained(core, net(norm=False)), Trained(core, net(norm=False))
    short.options = {"steps_per_epoch": 2}
    return Trained(core).run(False)["lines"], [short.run(True, 12), long.run(True, 12)]


def test_on_plain_cpu_processes_replay_changes_nothing_and_prints_nothing():
    lines, (short, long) = launch(by_default, cores=1, backend="cpu", progress="off", seed=5).results[0]
    assert lines == long["lines"] == []
    assert short["lines"] == ["replay=True has no effect: of an epoch of 2 steps none is replayed"]


def test_another_group_in_the_optimiser_is_another_program():
    replayed, recorded = launched(lambda: {"growing": growing}, 24)[0]["growing"]
    assert_same(replayed, recorded)


class Ending(Pairs):
    """Samples that end the run with an exception after so many."""

    def __init__(self, after, error=KeyboardInterrupt):
        super().__init__()
        self.after, self.error = after, error

    def __getitem__(self, index):
        self.after -= 1
        if self.after < 0:
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
        one.options |= {"log_every": 2, **where}
        ends.append(one.run(True, 24))
    return left, ends


def test_weights_are_right_after_an_interrupt_and_a_resumed_run_equals_the_uninterrupted(tmp_path):
    left, ends = launch(ended, tmp_path / "run", cores=1, backend="xla:cpu", progress="off", seed=5).results[0]
    assert_same(*left)
    assert_same(*ends)
    assert any("replayed" in line for line in ends[0]["lines"])


def test_the_benchmark_of_a_step_runs():
    """It makes `TrainStep` as `fit` does, and nothing else would tell that the two have come apart."""
    stepped = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "recording.py"))["stepped"]
    assert launch(stepped, "resnet18", True, cores=1, backend="xla:cpu", progress="off").results[0] > 0
