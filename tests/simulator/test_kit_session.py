"""Sessions on a simulated TPU v3: two cores are threads of a process, and only Python code can be interrupted there."""

import functools
import os
import threading
import time

import pytest
import torch
from helpers.launching import children
from helpers.waiting import interrupt_when
from simulator.machine import played
from torch import nn

import tpukit
from tpukit import WorkerError
from tpukit.essentials.launcher import LaunchInterrupted, SessionEndedError
from tpukit.simulator.shapes import SHAPES

V3 = SHAPES["v3-8"]  # four processes
CORES = range(8)

pytestmark = [
    pytest.mark.usefixtures("library"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch_xla's, in its own calls
]


@pytest.fixture(scope="module")
def sessions(library):
    """Return a session on a v3-8: the same one while it is open, and a new one after that."""
    kept = []

    def current():
        if not kept or kept[-1]._ended:
            kept.append(tpukit.Session(progress="off"))
            kept[-1].quietly = functools.partial(kept[-1].run, progress="off")
        return kept[-1]

    with played(V3):
        yield current
        for session in kept:
            session.close()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Give cores a minute to come back, because other tests may keep the processors busy."""
    monkeypatch.setattr("tpukit.essentials.launcher.session._PROMPT_SECONDS", 60.0)
    monkeypatch.setattr("tpukit.essentials.launcher.session.SAVE_SECONDS", 60.0)


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.Linear(4, 1))  # made once: see Core.seed


def train(core, count):
    """Dropout and Adam: if anything of them begins anew, the losses change."""
    state = core.state
    if not hasattr(state, "model"):
        state.model = core.model(NET)
        state.optimizer = torch.optim.Adam(state.model.parameters(), lr=0.01)
        (state.inputs,) = core.to_device([torch.arange(12.0).reshape(2, 6) / 12 + core.rank])
    losses = []
    for _ in range(count):
        with core.step():
            loss = (state.model(state.inputs) - 1).square().mean()
            loss.backward()
            core.optimizer_step(state.optimizer)
        losses.append(loss.detach())
    return [loss.item().hex() for loss in core.to_host(losses)], core.backend.compiles()[0]


def weights(core):
    return [weight.tolist() for weight in core.to_host(list(core.state.model.parameters()))]


def test_three_runs_are_one_launch_to_the_bit_and_a_closed_session_leaves_no_process(library):
    with played(V3):
        launched = tpukit.launch(train, 6, seed=0, progress="off").results
        with tpukit.Session(progress="off") as session:
            runs = [session.run(train, 2, progress="off").results for _ in range(3)]
            pids = session.run(lambda core: os.getpid(), progress="off").results
    assert len(set(pids)) == 4
    for rank in CORES:
        assert sum((run[rank][0] for run in runs), []) == launched[rank][0]
    assert runs[1][0][1] == runs[2][0][1]  # compilations
    assert children() == []


def test_a_function_that_was_defined_again_is_used_by_every_core(sessions):
    def cell(source):
        scope = {"__name__": "__main__"}
        exec(compile(source, "<cell>", "exec"), scope)
        return scope["work"]

    session = sessions()
    for version in range(2):
        work = cell(f"class Net: number = {version}\ndef work(core): return core.rank, Net.number")
        assert session.quietly(work).results == [(rank, version) for rank in CORES]


def fails_on_one_core(core):
    train(core, 1)
    if core.rank == 1:
        raise ValueError("one")


def draw(core):
    with core.step():
        numbers = torch.rand(4, device=core.device)
    return tuple(core.to_host(numbers).tolist())


def test_an_exception_on_one_core_of_a_process_keeps_the_state_of_all(sessions):
    session = sessions()
    session.quietly(train, 1)
    with pytest.raises(
        WorkerError, match="core 1 of 8 raised ValueError(.|\n)*the session goes on"
    ):
        session.quietly(fails_on_one_core)
    before = session.quietly(weights).results
    assert before == [before[0]] * 8
    session.quietly(train, 1)
    after = session.quietly(weights).results
    assert after == [after[0]] * 8 != before
    assert len(set(session.quietly(draw).results)) == 8  # random numbers of steps differ again


def fails_beside_gradients(core):
    """Core 1 cleans up after its exception, while core 0, of the same process, is within a step."""
    if core.rank == 1:
        while "HAS_GRADIENTS" not in os.environ:  # of this process
            time.sleep(0.01)
        raise ValueError("one")
    if core.rank == 0:
        core.state.alone = nn.Linear(2, 2).to(core.device)
        core.state.sgd = torch.optim.SGD(core.state.alone.parameters(), lr=0.1)
        core.state.alone(torch.ones(1, 2, device=core.device)).sum().backward()
        os.environ["HAS_GRADIENTS"] = "1"
        try:
            while True:
                time.sleep(0.01)
        finally:
            core.state.had_gradients = core.state.alone.weight.grad is not None


def gradients(core):
    return core.state.had_gradients, core.state.alone.weight.grad is not None


def test_after_an_exception_the_random_numbers_of_steps_do_not_come_again(sessions):
    def draw(core):
        with core.step():
            numbers = torch.rand(2, device=core.device)
        return tuple(core.to_host(numbers).tolist())

    def fails(core):
        raise ValueError("on purpose")

    session = sessions()
    seen = set()
    for _ in range(2):
        with pytest.raises(WorkerError):
            session.quietly(fails)
        seen |= set(session.quietly(draw).results)
    assert len(seen) == 16


def test_a_core_that_fails_leaves_the_gradients_of_the_other_core_of_its_process(sessions):
    session = sessions()
    with pytest.raises(WorkerError, match="the session goes on"):
        session.quietly(fails_beside_gradients)
    found = session.quietly(lambda core: gradients(core) if core.rank == 0 else None).results
    assert found[0] == (True, False)  # cleared when all had stopped


def computes(core):
    core.log(loss=0)
    while True:
        sum(range(1000))


def talks(core):
    """Send messages of two parts: after an exception between the parts no later message is readable."""
    core.log(loss=0)
    while True:
        core.print("x" * 2_000_000)


def trains_for_ever(core):
    core.log(loss=0)
    while True:
        train(core, 1)


def fits(core, folder):
    points = torch.arange(384.0).reshape(64, 6) / 384
    dataset = torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True))
    model = core.model(NET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = core.batches(dataset, batch_size=4, drop_last=True)
    tpukit.fit(
        core,
        model,
        optimizer,
        nn.MSELoss(),
        batches,
        epochs=100_000,
        checkpoints=folder,
        options=tpukit.FitOptions(log_every=1),
    )


def interrupted(session, fn, *args):
    """Run a function, interrupt it when it has begun, and return the exception's text."""
    begun = threading.Event()
    interrupt_when(begun.is_set, later=0.3)
    with pytest.raises(LaunchInterrupted) as caught:
        session.quietly(fn, *args, loggers=lambda row: begun.set())
    return str(caught.value)


@pytest.mark.parametrize("fn", [computes, talks, trains_for_ever])
def test_an_interrupt_of_python_code_keeps_the_state(sessions, fn):
    session = sessions()
    session.quietly(train, 1)
    assert "the session goes on" in interrupted(session, fn)
    found = session.quietly(weights).results
    assert found == [found[0]] * 8  # all stopped after the same step
    assert len(session.quietly(train, 1).results) == 8


def test_an_interrupt_of_fit_saves_a_checkpoint(sessions, tmp_path, capsys):
    session = sessions()
    assert "the session goes on" in interrupted(session, fits, tmp_path)
    assert "saved at step" in capsys.readouterr().out
    session.quietly(train, 1)


def sleeps_on_one_core(core):
    core.log(loss=0)
    if core.rank == 1:
        time.sleep(600)


def test_a_thread_that_waits_in_native_code_ends_the_session(sessions, monkeypatch):
    monkeypatch.setattr("tpukit.essentials.launcher.session._PROMPT_SECONDS", 3.0)
    session = sessions()
    assert "core 1 did not come back within 3 seconds" in interrupted(session, sleeps_on_one_core)
    with pytest.raises(SessionEndedError, match="did not come back"):
        session.run(weights)
    assert children() == []
