import contextlib

import pytest

import tpukit
from tpukit.essentials.backends.protocol import Compiling
from tpukit.essentials.launcher.core_states import CoreStates


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(beats, seconds=5.0, cores=None, returned=()):
    """Let the same heartbeats come for some seconds, as from cores that do not move; return the states."""
    clock = Clock()
    states = CoreStates(range(cores or len(beats)), clock=clock)
    for _ in range(int(seconds)):
        for rank, (activity, waiting, doing) in beats.items():
            states.beat(rank, activity, waiting, doing)
        clock.now += 1.0
        states.rows(returned)
    return states


FIRST, SECOND = Compiling(1, None), Compiling(2, 17.2)


@pytest.mark.parametrize(
    ("beats", "words"),
    [
        ({0: (0, None, FIRST), 1: (0, None, FIRST)}, "compiling graph 1 for 5 s"),
        (
            {0: (1, None, SECOND), 1: (1, "step", SECOND)},
            "compiling graph 2 for 5 s; graph 1 took 17 s",
        ),
        ({0: (0, None, Compiling(1, None, "loading"))}, "loading graph 1 for 5 s"),
        (
            {
                0: (0, None, FIRST),
                1: (0, None, Compiling(1, None, "waiting for another process to compile", True)),
            },
            "compiling graph 1 for 5 s",
        ),
        (
            {0: (1, "step", "running"), 1: (1, None, SECOND)},
            "compiling graph 2 on core 1 for 5 s; graph 1 took 17 s, core 0 waits",
        ),
        ({0: (1, None, "tracing"), 1: (1, None, "tracing")}, "tracing the step, for 5 s"),
        (
            {0: (1, "gather", None), 1: (1, None, "tracing")},
            "core 1: tracing the step, for 5 s",
        ),
        (
            {0: (1, "gather", None), 1: (1, None, None)},
            "core 0: waiting in gather() for core 1, for 5 s",
        ),
        (
            {0: (1, "gather", None), 1: (1, None, "data")},
            "core 0: waiting in gather() for core 1, for 5 s, which is waiting for data for 5 s",
        ),
        (
            {0: (1, "gather", None), 1: (1, "barrier", None)},
            "waiting, each for the other: core 0 in gather(), core 1 in barrier(), for 5 s",
        ),
        ({0: (1, "barrier", None), 1: (1, "barrier", None)}, "all cores in barrier() for 5 s"),
        (
            {0: (1, "step", "running"), 1: (1, "step", "running")},
            "running the step on the device, for 5 s",
        ),
        ({0: (1, None, "data"), 1: (1, None, "data")}, "waiting for data, for 5 s"),
        ({0: (1, None, None), 1: (1, None, None)}, ""),
    ],
)
def test_what_a_run_does_is_told_where_it_stands_still(beats, words):
    assert run(beats).words() == words


def test_a_run_that_moves_says_nothing():
    clock = Clock()
    states = CoreStates(range(2), clock=clock)
    for step in range(20):
        for rank in (0, 1):
            states.beat(
                rank, step, "step" if step % 2 else None, "running" if step % 2 else "tracing"
            )
        clock.now += 1.0
        assert states.words() == ""
        assert states.rows() == []


def test_a_core_that_has_not_started_is_named():
    clock = Clock()
    states = CoreStates(range(4), clock=clock)
    for rank in (0, 1, 3):
        states.started(rank)
    assert states.words() == ""  # not at once
    clock.now += 8
    assert states.words() == "starting core 2 for 8 s"


def test_work_without_steps_is_told_only_when_it_takes_long():
    assert run({0: (1, None, None)}, 9).words() == ""
    assert run({0: (1, None, None)}, 14).words() == "no step and no message for 14 s"


def test_a_graph_that_stays_counted_though_its_core_moves_on_is_not_compiled_for_ever():
    clock = Clock()
    states = CoreStates(range(1), clock=clock)
    for step in range(5):
        states.beat(0, step, None, SECOND)
        clock.now += 1.0
    assert states.words() == ""
    states.beat(0, 5, None, Compiling(3, 1.0))
    clock.now += 1.0
    assert states.words().startswith("compiling graph 3")


def test_cores_have_a_line_each_only_where_they_differ():
    same = dict.fromkeys(range(4), (1, None, FIRST))
    assert run(same).rows() == []
    assert run(same | {2: (1, None, "data")}).rows() == [
        ("core 0", "compiling graph 1 for 5 s"),
        ("core 1", "compiling graph 1 for 5 s"),
        ("core 2", "waiting for data for 5 s"),
        ("core 3", "compiling graph 1 for 5 s"),
    ]


def test_a_difference_of_a_moment_is_not_shown():
    assert run({0: (1, None, FIRST), 1: (1, None, None)}, 2).rows() == []


def test_of_very_many_cores_only_those_that_differ_are_shown():
    beats = dict.fromkeys(range(64), (1, None, None)) | {7: (1, None, FIRST)}
    assert run(beats).rows() == [("core 7", "compiling graph 1 for 5 s")]


def test_a_core_that_has_returned_is_not_waited_for():
    states = run({0: (5, None, FIRST), 1: (9, None, None)}, returned={1})
    assert states.words({1}) == "compiling graph 1 for 5 s"
    assert states.rows({1}) == [("core 0", "compiling graph 1 for 5 s"), ("core 1", "done")]


def test_the_last_cores_in_a_collective_are_named():
    beats = {0: (5, None, None), 1: (9, "barrier", None), 2: (9, "barrier", None)}
    assert run(beats).words({0}) == "cores 1 and 2 in barrier() for 5 s"
    assert run(beats).words({0, 1}) == "core 2 in barrier() for 5 s"


def test_a_core_whose_heartbeats_stop_is_told():
    states = run({0: (1, "gather", None), 1: (1, None, None)})
    states.beat(0, 1, "gather", None)
    states._clock.now += 9
    states.beat(0, 1, "gather", None)
    assert "core 1" in states.words()
    assert "without a sign of life for 10 s" in states.words()


@pytest.mark.xla
@pytest.mark.parametrize("backend", ["xla:cpu", "xla:simulator"])
def test_a_core_that_compiles_says_so_while_it_does(monkeypatch, backend):
    import tpukit.essentials.launcher.launcher as launcher
    from tpukit.essentials.backends import runtimes
    from tpukit.essentials.display.progress import Screen

    if backend not in runtimes():
        pytest.skip("no simulator here")
    said = []
    operations = {"xla:cpu": 240, "xla:simulator": 800}[backend]  # seconds of compiling

    class Listening(Screen):
        def status(self, doing, cores=()):
            said.append(doing)

    @contextlib.contextmanager
    def screen(kind):
        yield Listening()

    def work(core):
        import time

        import torch

        values = torch.ones(8, 8, device=core.device)
        for step in range(3):
            with core.step():
                if step == 2:
                    time.sleep(4.0)  # as the tracing of a large model does
                for size in range(
                    operations
                ):  # every operation of another shape, so that none is compiled for another
                    values = torch.cumsum(torch.nn.functional.pad(values, (0, 1 + size % 2)), 1)[
                        :, : 8 + size % 7
                    ]
        return core.backend.compiling()

    monkeypatch.setattr(launcher, "screen", screen)
    run = launcher.launch(work, cores=1, backend=backend, limits=tpukit.Limits(heartbeat=0.1))
    assert run.results == [None]  # nothing is being compiled any more
    assert any(words.startswith("compiling graph 1 for") for words in said), set(said)
    assert any(words.startswith("tracing the step, for") for words in said), set(said)
