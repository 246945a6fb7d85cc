"""Sessions: the state that stays, what begins anew in each run, and every way in which a run can be left."""

import contextlib
import ctypes
import functools
import importlib
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from helpers.kernels import Kernel, is_alive
from helpers.launching import children
from helpers.waiting import interrupt_when, wait_until

import tpukit
from tpukit.essentials.backends import Topology
from tpukit.essentials.environment import DeviceBusyError, open_sessions, wait_for_chips
from tpukit.essentials.launcher import (
    LaunchInterrupted,
    SessionEndedError,
    WorkerError,
    messages,
    worker,
)
from tpukit.essentials.launcher.session import _Recovery
from tpukit.essentials.launcher.session_worker import StoppingPoint, serve

if not hasattr(os, "fork"):
    pytest.skip("workers are forks", allow_module_level=True)

BACKENDS = [
    "cpu",
    pytest.param("xla:cpu", marks=pytest.mark.xla),
    pytest.param("xla", marks=pytest.mark.xla),
]


@contextlib.contextmanager
def opened(cores=2, backend="cpu", **options):
    with tpukit.Session(cores, backend, progress="off", **options) as session:
        session.quietly = functools.partial(session.run, progress="off")
        yield session


@pytest.fixture(scope="module")
def sessions():
    """Return a session on two CPU processes: the same one while it is open, and a new one after that."""
    with contextlib.ExitStack() as stack:
        kept = []

        def current():
            if not kept or kept[-1]._ended:
                kept.append(stack.enter_context(opened()))
                kept[-1].quietly(make)
            return kept[-1]

        yield current


@pytest.fixture
def patient(monkeypatch):
    """Give cores a minute to come back, because other tests may keep the processors busy."""
    monkeypatch.setattr("tpukit.essentials.launcher.session._PROMPT_SECONDS", 60.0)


def make(core):
    """Keep a model and its data; both cores have the same, so any shared weight can be computed here."""
    torch.manual_seed(0)
    core.state.model = core.model(torch.nn.Linear(20, 20))
    core.state.optimizer = torch.optim.SGD(core.state.model.parameters(), lr=0.1)
    (core.state.inputs,) = core.to_device([torch.rand(8, 20) + core.rank])
    core.state.steps = 0


def step(core):
    with core.step():
        loss = core.state.model(core.state.inputs).square().mean()
        loss.backward()
        core.optimizer_step(core.state.optimizer)
    core.state.steps += 1
    return loss.detach()


def steps(core, count=2):
    return [core.to_host(step(core)).item() for _ in range(count)]


def look(core):
    return core.state.steps, core.to_host(core.state.model.weight.detach()).double().sum().item()


def in_one_launch(core, count):
    make(core)
    return steps(core, count)


# What stays and what begins anew


def train(core, count):
    """Dropout, Adam and random numbers outside of steps: whatever begins anew changes a bit of the losses."""
    state = core.state
    if not hasattr(state, "model"):
        layers = torch.nn.Linear(20, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        state.model = core.model(torch.nn.Sequential(*layers))
        state.optimizer = torch.optim.Adam(state.model.parameters(), lr=0.01)
    losses = []
    for _ in range(count):
        (inputs,) = core.to_device([torch.rand(8, 20)])
        with core.step():
            loss = (state.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            core.optimizer_step(state.optimizer)
        losses.append(loss.detach())
    return [loss.item().hex() for loss in core.to_host(losses)], core.backend.compiles()


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_runs_are_one_run_to_the_bit_and_only_the_first_compiles(backend):
    before = children()  # of a session on CPU processes that other tests use
    launched = tpukit.launch(train, 9, cores=2, backend=backend, seed=0, progress="off")
    with opened(backend=backend) as session:
        runs = [session.quietly(train, 3).results for _ in range(3)]
    losses = [sum((run[rank][0] for run in runs), []) for rank in range(2)]
    assert losses == [result[0] for result in launched.results]
    assert runs[0][0][1] == runs[1][0][1] == runs[2][0][1]
    assert set(children()) <= set(before)  # the new session has closed the other one


def test_a_run_returns_what_a_launch_returns(sessions, capsys):
    session, rows = sessions(), []

    def work(core, count):
        for number in core.progress(range(count), "loop"):
            core.log(loss=number)
        core.print("a line")
        print("from", core.rank)
        return {
            "rank": torch.tensor(core.rank),
            "state": core.current if hasattr(core, "current") else None,
        }

    run = session.quietly(work, 3, loggers=rows.append)
    assert [int(result["rank"]) for result in run.results] == [0, 1]
    assert [row["loss"] for row in run.log] == [row["loss"] for row in rows] == [0, 1, 2]
    assert (run.cores, run.device, len(run.memory)) == (2, "CPU", 2)
    assert run.seconds < 5
    shown = capsys.readouterr().out
    assert "a line" in shown
    assert "[core 1] from 1" in shown
    again = session.quietly(work, 1)
    assert [row["step"] for row in again.log] == [1]  # and not 4


def test_a_class_of_the_notebook_is_the_same_class_on_the_way_back_and_a_new_one_is_noticed(capsys):
    def define(version):
        class Net:
            number = version

        Net.__module__, Net.__qualname__ = "__main__", "Net"
        return Net

    def cell(source, **names):
        exec(
            compile(textwrap.dedent(source), "<cell>", "exec"),
            scope := {"__name__": "__main__", **names},
        )
        return scope["work"]

    Net = define(1)
    with opened(cores=1) as session:
        keep = cell("def work(core): core.state.net = Net(); return core.state.net", Net=Net)
        assert isinstance(session.quietly(keep).results[0], Net)
        read = "def work(core): return isinstance(core.state.net, Net), Net.number"
        assert session.quietly(cell(read, Net=Net)).results == [(True, 1)]
        assert "of an earlier" not in capsys.readouterr().out
        assert session.quietly(cell(read, Net=define(2))).results == [(False, 2)]
        assert "core.state.net is an object of an earlier class Net" in capsys.readouterr().out


def test_the_workers_follow_the_folder_and_name_the_variables_that_they_do_not_follow(
    sessions, tmp_path, monkeypatch, capsys
):
    session = sessions()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUKIT_SET_LATER", "1")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "later.py").write_text("value = 5\n")
    import later

    def work(core):
        return os.getcwd(), os.environ.get("TPUKIT_SET_LATER"), later.value

    assert session.quietly(work).results[0] == (str(tmp_path), None, 5)
    assert "TPUKIT_SET_LATER: changed in os.environ" in capsys.readouterr().out
    os.utime(tmp_path / "later.py", (1, 1))
    session.quietly(work)
    shown = capsys.readouterr().out
    assert "later: the file has changed" in shown
    assert "TPUKIT_SET_LATER" not in shown
    session.quietly(work)
    assert capsys.readouterr().out == ""
    del sys.modules["later"]


@pytest.mark.parametrize("is_new", [True, False], ids=["new session", "by value"])
def test_after_the_fix_of_a_changed_module_the_workers_use_the_new_code(
    tmp_path, monkeypatch, capsys, is_new
):
    monkeypatch.syspath_prepend(tmp_path)
    name = "edited_" + ("once" if is_new else "twice")
    file = tmp_path / f"{name}.py"
    file.write_text("def work(core): return 1\n")
    module = importlib.import_module(name)
    with opened(1) as session:
        assert session.quietly(module.work).results == [1]
        file.write_text("def work(core): return 22\n")
        os.utime(file, (1, 1))
        assert session.quietly(module.work).results == [1]
        reload, register = re.findall(r"call (\S+\))", capsys.readouterr().out)[-2:]
        scope = {"importlib": importlib, "cloudpickle": cloudpickle, name: module}
        exec(reload, scope)
        if not is_new:
            exec(register, scope)
            assert session.quietly(module.work).results == [22]
            cloudpickle.unregister_pickle_by_value(module)
    if is_new:
        with opened(1) as session:
            assert session.quietly(module.work).results == [22]
    del sys.modules[name]


def changes_settings_of_torch(core):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)


def settings_of_torch(core):
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        str(torch.empty(0).device),
        torch.are_deterministic_algorithms_enabled(),
    )


def test_settings_of_torch_that_a_run_changes_change_no_later_run(sessions):
    session = sessions()
    session.quietly(changes_settings_of_torch)
    found = session.quietly(settings_of_torch)
    assert found.results == [(True, torch.float32, "cpu", False)] * 2


def test_runs_begin_with_the_notebooks_choice_to_warn_of_nondeterminism_only():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with opened(cores=1) as session:
            found = session.quietly(lambda core: torch.get_deterministic_debug_mode())
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.results == [1]


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.zeros(1)


def test_batches_that_are_kept_count_the_waits_of_the_current_run():
    def make(core):
        core.state.batches = core.batches(Slow(), batch_size=1)
        return len(list(core.state.batches))

    with opened(cores=1) as session:
        session.quietly(make)
        found = session.quietly(lambda core: (core.state.batches.wait_seconds, core.seconds))
    (waited, seconds) = found.results[0]
    assert waited <= seconds


def test_the_peak_of_memory_is_that_of_the_run():
    with opened(cores=1) as session:
        much = session.quietly(lambda core: torch.zeros(100_000_000).sum().item())
        little = session.quietly(lambda core: None)
    assert much.memory_growth[0] > 300e6
    assert little.memory_growth[0] < 50e6
    assert little.memory[0] < much.memory[0] - 300e6


def test_cores_that_drew_unequally_begin_anew(capsys):
    def draw(core):
        return random.random(), torch.rand(1).item()

    def unequal(core):
        if core.rank:
            torch.rand(1)

    with opened() as session:
        before = session.quietly(draw).results
        session.quietly(unequal)
        assert capsys.readouterr().out.count("unequal") == 0
        after = session.quietly(draw).results
        assert "unequal" in capsys.readouterr().out
    assert before[0] == before[1] != after[0] == after[1]


@pytest.mark.parametrize(
    "seeds",
    [
        lambda core: core.seed(1),
        lambda core: core.same_seed(1),
        lambda core: core.is_main and core.seed(1),
    ],
)
def test_a_run_that_seeds_the_cores_changes_no_later_run(sessions, seeds):
    def draw(core):
        outside = torch.rand(1).item()
        with core.step():
            inside = torch.rand(1).item()
        return outside, inside

    session = sessions()
    session.quietly(seeds)
    before = session.quietly(draw).results
    session.quietly(seeds)
    after = session.quietly(draw).results
    assert len({*before[0], *before[1], *after[0], *after[1]}) == 6  # no number comes again
    for (first, mine), (other, theirs) in (before, after):
        assert first == other
        assert mine != theirs


def test_a_model_that_was_deleted_is_gone_though_its_optimizer_was_followed(sessions):
    session = sessions()

    def begin(core):
        core.state.other = core.model(torch.nn.Linear(2, 2))
        core.state.other_optimizer = torch.optim.SGD(core.state.other.parameters(), lr=0.1)
        core.state.other(torch.ones(1, 2)).sum().backward()
        core.optimizer_step(core.state.other_optimizer)

    def delete(core):
        core.state.reference = weakref.ref(core.state.other)
        del core.state.other, core.state.other_optimizer

    session.quietly(begin)
    session.quietly(delete)
    assert session.quietly(lambda core: core.state.reference() is None).results == [True, True]
    session.quietly(make)


def test_cores_that_train_apart_are_still_found_in_a_later_run(sessions):
    session = sessions()

    def apart(core):
        core.state.model.weight.data += core.rank
        step(core)

    session.quietly(make)
    session.quietly(steps)
    with pytest.raises(WorkerError, match="out of sync|differ"):
        session.quietly(apart)
    session.quietly(make)


# Exceptions


def fails_everywhere(core):
    step(core)
    raise ValueError("all")


def fails_alone(core):
    step(core)
    if core.rank:
        raise ValueError("one")
    time.sleep(0.2)


def fails_while_the_other_waits(core):
    step(core)
    if core.rank:
        raise ValueError("one")
    core.barrier()


def fails_before_the_optimizer(core):
    step(core)
    with core.step():
        core.state.model(core.state.inputs).square().mean().backward()
        raise ValueError("gradients are left")


def runs_out_of_memory(core):
    step(core)
    torch.empty(1 << 50)


def exits(core):
    step(core)
    sys.exit(3)


def returns_a_lock(core):
    step(core)
    return threading.Lock()


def loses_the_disk(core):
    step(core)
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


@pytest.mark.parametrize(
    "fn",
    [
        fails_everywhere, fails_alone, fails_while_the_other_waits, fails_before_the_optimizer,
        runs_out_of_memory, exits, returns_a_lock, loses_the_disk,
    ],
)  # fmt: skip
@pytest.mark.usefixtures("patient")
def test_after_an_exception_the_session_goes_on_as_if_it_had_not_happened(sessions, fn):
    session = sessions()
    session.quietly(make)
    first = session.quietly(steps).results
    with pytest.raises(WorkerError, match="the session goes on") as caught:
        session.quietly(fn)
    assert "the other was stopped" in str(caught.value)
    assert session.quietly(look).results[0][0] == 3
    last = session.quietly(steps).results
    expected = tpukit.launch(
        in_one_launch, 5, cores=2, backend="cpu", seed=0, progress="off"
    ).results
    for rank in range(2):
        assert [*first[rank], *last[rank]] == [*expected[rank][:2], *expected[rank][3:]]


def test_a_call_that_cannot_be_sent_leaves_the_session_as_it_is(sessions):
    session = sessions()
    lock = threading.Lock()
    with pytest.raises(TypeError, match="`lock`, which .*lambda.* uses"):
        session.run(lambda core: lock)
    with pytest.raises(tpukit.TpukitError, match="runs a function"):
        session.run(None)
    with pytest.raises(ValueError, match="timeout must be a number"):
        session.run(look, timeout=0)
    assert session.quietly(look).results


@pytest.mark.usefixtures("patient")
def test_a_run_that_takes_too_long_is_stopped_and_the_session_goes_on(sessions):
    session = sessions()
    with pytest.raises(WorkerError, match="was not done after timeout") as caught:
        session.quietly(lambda core: time.sleep(600), timeout=0.2)
    assert "the session goes on" in str(caught.value)
    assert session.quietly(look).results


# Interrupts


def trains_for_ever(core):
    while True:
        core.log(loss=step(core))  # core 0 alone copies it to the host, which is no boundary


def sleeps(core):
    core.log(loss=0)
    time.sleep(600)


def computes(core):
    core.log(loss=0)
    while True:
        sum(range(1000))


def one_sleeps_the_other_waits(core):
    core.log(loss=0)
    core.flush()
    if core.rank:
        time.sleep(600)
    core.barrier()


def fits(core):
    points = torch.rand(64, 20)
    dataset = torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True))
    model = core.model(torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = core.batches(dataset, batch_size=8, drop_last=True)
    tpukit.fit(core, model, optimizer, torch.nn.MSELoss(), batches, epochs=100_000)


def fits_with_checkpoints(core, folder, epochs, loss=torch.nn.functional.mse_loss):
    torch.manual_seed(0)
    points = torch.rand(64, 20)
    dataset = torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True))
    core.state.model = model = core.model(torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = core.batches(dataset, batch_size=8, drop_last=True)
    tpukit.fit(core, model, optimizer, loss, batches, epochs=epochs, checkpoints=folder)
    return look_at_weight(core)


def fits_with_slow_steps(core, folder, seconds):
    def loss(predicted, target):
        time.sleep(seconds)
        return torch.nn.functional.mse_loss(predicted, target)

    core.log(loss=0)
    core.flush()
    fits_with_checkpoints(core, folder, 100_000, loss)


def look_at_weight(core):
    return core.to_host(core.state.model.weight.detach()).double().sum().item()


def reads_with_processes(core):
    """Begin a new epoch, with new processes, several times per second."""
    for _ in range(10_000):
        for (batch,) in core.batches(
            torch.utils.data.TensorDataset(torch.rand(16, 4)), batch_size=2, workers=2
        ):
            core.log(loss=batch.sum())
            with core.step():
                pass


def swallows(core):
    core.log(loss=0)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(600)


def holds_the_interpreter(core):
    core.log(loss=0)
    core.flush()
    ctypes.PyDLL(None).sleep(20)


def interrupted(session, fn, *args):
    """Run a function, interrupt it when it has begun, and return (the exception, seconds from then on)."""
    interrupts = []
    begun = threading.Event()

    def heard(row):
        begun.set()

    def happened():
        if begun.is_set():
            interrupts.append(time.monotonic())
        return begun.is_set()

    interrupt_when(happened, later=0.3)
    with pytest.raises(LaunchInterrupted) as caught:
        session.quietly(fn, *args, loggers=heard)
    return caught.value, time.monotonic() - interrupts[-1] - 0.3


@pytest.mark.parametrize(
    "fn",
    [trains_for_ever, sleeps, computes, one_sleeps_the_other_waits, fits, reads_with_processes],
)
@pytest.mark.usefixtures("patient")
def test_an_interrupt_keeps_the_state(sessions, fn):
    session = sessions()
    session.quietly(make)
    error, _ = interrupted(session, fn)
    assert "the session goes on" in str(error)
    assert 0.3 < error.run.seconds < 600
    first, second = session.quietly(look).results
    assert first == second  # both stopped after the same step
    losses = session.quietly(steps).results
    assert losses[0][1] < losses[0][0]


def test_an_interrupt_of_fit_saves_a_checkpoint_and_every_core_stops_after_that_step(
    sessions, tmp_path, capsys
):
    session = sessions()
    error, seconds = interrupted(session, fits_with_checkpoints, tmp_path, 100_000)
    assert "the session goes on" in str(error)
    assert seconds < 10
    assert "saved at step" in capsys.readouterr().out
    first, second = session.quietly(look_at_weight).results
    assert first == second
    saved = []
    for file in tmp_path.glob("**/*.pt"):
        leaves = torch.utils._pytree.tree_leaves(torch.load(file, weights_only=False))
        saved += [leaf.double().sum().item() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert first in saved
    session.quietly(make)


def test_an_interrupt_while_the_run_is_sent_reaches_all_cores(sessions, monkeypatch):
    session = sessions()
    first = session._group.workers[0]
    send = first.command

    def send_and_interrupt(command, number=0):
        send(command, number)
        if command == worker.RUN:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(first, "command", send_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.quietly(sleeps)
    assert session.quietly(lambda core: core.rank, timeout=20).results == [0, 1]


@pytest.mark.parametrize("seconds", [0.6, 1.5])
def test_an_interrupt_of_fit_with_slow_steps_saves_a_checkpoint(
    sessions, tmp_path, capsys, seconds
):
    error, _ = interrupted(sessions(), fits_with_slow_steps, tmp_path, seconds)
    assert "the session goes on" in str(error)
    assert "saved at step" in capsys.readouterr().out


@pytest.mark.parametrize("fn", [swallows, holds_the_interpreter])
def test_a_core_that_does_not_come_back_ends_the_session(sessions, fn):
    session = sessions()
    error, seconds = interrupted(session, fn)
    assert "the session has ended, and core.state is lost" in str(error)
    assert seconds < 10
    with pytest.raises(SessionEndedError, match="did not come back"):
        session.run(look)
    assert children() == []


# The end


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_ends_the_session(sessions, number):
    session = sessions()
    pids = session.quietly(lambda core: os.getpid()).results
    threading.Timer(0.3, os.kill, (pids[1], number)).start()
    began = time.monotonic()
    with pytest.raises(WorkerError, match="the session has ended") as caught:
        session.quietly(trains_for_ever)
    assert time.monotonic() - began < 10
    assert caught.value.rank == 1
    assert children() == []


def test_a_worker_that_was_killed_at_the_prompt_is_noticed_by_the_next_run(sessions):
    session = sessions()
    pids = session.quietly(lambda core: os.getpid()).results
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        session.quietly(look)
    assert children() == []


def test_a_second_interrupt_ends_the_session(sessions):
    session = sessions()
    begun = threading.Event()
    interrupt_when(begun.is_set, later=0.2)
    interrupt_when(begun.is_set, later=1.2)
    with pytest.raises(LaunchInterrupted, match="interrupted again"):
        session.quietly(swallows, loggers=lambda row: begun.set())
    assert children() == []


def test_a_new_session_closes_the_one_before_and_a_closed_one_refuses(capsys):
    with opened(cores=1) as first, opened(cores=1) as second:
        assert "the earlier session was closed" in capsys.readouterr().out
        with pytest.raises(SessionEndedError, match="a new session took its place"):
            first.run(look)
        assert second.quietly(lambda core: core.rank).results == [0]
        assert len(children()) == 1
        assert "open" in repr(second)
    assert "closed" in repr(second)
    second.close()
    assert children() == []


def test_a_session_whose_start_was_interrupted_can_be_made_again(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = set(children())
    with monkeypatch.context() as patched:
        patched.setattr("tpukit.essentials.launcher.serialization.Surroundings", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tpukit.Session(1, "cpu", progress="off")
    with opened(1) as session:
        assert session.quietly(lambda core: core.rank).results == [0]
    assert set(children()) <= before  # a session of another test may end meanwhile


def test_the_error_of_a_core_that_is_not_at_its_prompt_names_the_seconds(monkeypatch):
    monkeypatch.setattr("tpukit.essentials.launcher.session._PROMPT_SECONDS", 0.1)
    group = SimpleNamespace(ranks=[0], core_0_may_save=True, is_at=lambda *_: False, read=list)
    why = _Recovery(group).wait_for_prompts()
    assert why == "core 0 did not come back within 0.1 seconds"


def test_an_idle_session_gives_its_chips_back(capsys):
    with opened(cores=1, idle=2) as session:
        session.quietly(lambda core: time.sleep(2.5))  # a run is no idle time
        assert not session._ended
        wait_until(lambda: session._ended)
        wait_until(lambda: "there was no run for" in capsys.readouterr().out)
        with pytest.raises(SessionEndedError, match="no run"):
            session.run(look)
    assert children() == []


def test_an_interrupt_of_close_leaves_no_thread_that_waits_for_idle_time(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    with opened(cores=1, idle=600) as session:
        with monkeypatch.context() as patched:
            patched.setattr(session, "_resources", SimpleNamespace(close=interrupt))
            with pytest.raises(KeyboardInterrupt):
                session.close()
        session._resources.close()
    assert session._closed.is_set()


def test_a_session_is_made_in_the_main_thread():
    errors = []

    def begin():
        try:
            tpukit.Session(1, "cpu")
        except tpukit.TpukitError as error:
            errors.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_a_run_within_a_run_is_refused(sessions):
    session, errors = sessions(), []

    def logger(row):
        try:
            session.run(look)
        except SessionEndedError as error:
            errors.append(str(error))

    session.quietly(lambda core: core.log(loss=1), loggers=logger)
    assert "one function at a time" in errors[0]


def test_a_session_is_not_closed_within_its_run(sessions, capsys):
    session = sessions()
    run = session.quietly(
        lambda core: core.log(loss=1), loggers=lambda row: session.close(), timeout=20
    )
    assert run.results == [None, None]
    assert "session.close() after the run" in capsys.readouterr().out
    assert session.quietly(lambda core: core.rank).results == [0, 1]


def test_a_launch_beside_a_session_keeps_none_of_its_pipes(sessions):
    session = sessions()
    mine = {
        os.readlink(f"/proc/self/fd/{fd}")
        for process in session._group.workers
        for fd in process.fds()
    }

    def pipes(core):
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
        return found

    assert not mine & tpukit.launch(pipes, cores=1, backend="cpu", progress="off").results[0]


def test_check_shows_an_open_session_and_a_launch_that_needs_its_chips_is_refused():
    with opened(cores=1) as session:
        found = [finding for finding in tpukit.check().findings if finding.name == "session"]
        assert [finding.fact for finding in found] == ["open on 1 x CPU"]
        record = open_sessions[0]._replace(holds_chips=True, cores="8 x TPU v5e core")
        open_sessions[0] = record
        with pytest.raises(DeviceBusyError, match="a session of this notebook holds") as caught:
            wait_for_chips(8, print)
        assert "8 x TPU v5e core" in caught.value.found
        assert caught.value.fix.startswith("session.close()")
        assert any("until session.close()" in finding.fact for finding in tpukit.check().findings)
        open_sessions[0] = session._record
    assert open_sessions == []


PROGRAM = """
import os, signal, time, tpukit
session = tpukit.Session(2, "cpu", progress="off")
print(*session.run(lambda core: os.getpid(), progress="off").results, flush=True)
"""


@pytest.mark.parametrize("number", [None, signal.SIGKILL])
def test_a_program_that_ends_leaves_no_worker(number):
    code = PROGRAM if number is None else PROGRAM + "time.sleep(600)"
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    while not (line := program.stdout.readline())[0].isdigit():
        assert program.poll() is None
    pids = [int(word) for word in line.split()]
    if number is not None:
        program.send_signal(number)
    began = time.monotonic()
    program.wait(60)
    program.stdout.close()
    assert time.monotonic() - began < 20
    wait_until(lambda: not any(map(is_running, pids)))


def is_running(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    return False


# The graph


def fails_after_the_optimizer(core):
    with core.step():
        core.state.model(core.state.inputs).square().mean().backward()
        core.optimizer_step(core.state.optimizer)
        raise ValueError("the step is recorded and has not run")


@pytest.mark.xla
def test_on_the_simulator_a_step_that_was_left_is_run_and_training_goes_on():
    before = children()  # of a session on CPU processes that other tests use
    with opened(backend="xla") as session:
        session.quietly(make)
        session.quietly(steps)
        with pytest.raises(WorkerError, match="the session goes on"):
            session.quietly(fails_after_the_optimizer)
        losses = session.quietly(steps).results[0]
        error, _ = interrupted(session, trains_for_ever)
        assert "the session goes on" in str(error)
        assert len(set(session.quietly(look).results)) == 1
        with pytest.raises(WorkerError, match="the session has ended"):
            session.quietly(fails_while_the_other_trains)
    expected = tpukit.launch(
        in_one_launch, 5, cores=2, backend="xla", seed=0, progress="off"
    ).results[0]
    assert losses == expected[3:]  # the weights of the step that was left count
    assert children() == before


def is_behind(core):
    """Core 1 needs two seconds for its step, and core 0 waits for it in the graph."""
    core.log(loss=step(core))
    core.flush()
    if core.rank:
        began = time.monotonic()
        while time.monotonic() < began + 2:
            sum(range(1000))
    while True:
        core.to_host(step(core))


@pytest.mark.xla
@pytest.mark.usefixtures("patient")
def test_on_the_simulator_a_core_that_is_behind_has_the_time_to_catch_up(monkeypatch):
    monkeypatch.setattr("tpukit.essentials.launcher.session._RAISE_SECONDS", 0.5)
    with opened(backend="xla") as session:
        session.quietly(make)
        session.quietly(steps)  # compiles
        error, _ = interrupted(session, is_behind)
        assert "the session goes on" in str(error)
        first, second = session.quietly(look).results
    assert first == second


@pytest.mark.xla
def test_a_sharded_session_compiles_once():
    def compiled(core):
        steps(core)
        return core.chips, core.backend.compiles()[0]

    with opened(None, "xla", shard="fsdp") as session:
        session.quietly(make)
        first = session.quietly(compiled).results
        assert first[0][0] > 1
        assert session.quietly(compiled).results == first


CELLS = """
import tpukit
session = tpukit.Session(2, "cpu", progress="off")
--- def fails(core):
    core.state.value = 7
    raise ValueError("on purpose")
session.run(fails)
--- def looks(core):
    return core.state.value
print(session.run(looks).results)
"""


def test_in_a_notebook_an_error_names_the_cell_and_a_restart_leaves_no_worker():
    with contextlib.closing(Kernel()) as kernel:
        first, second, third = CELLS.strip().split("\n--- ")
        kernel.run(first)
        kernel.run(second)
        name, text = kernel.error
        assert name == "WorkerError"
        assert "fails(), cell 3, line 3" in text
        assert 'raise ValueError("on purpose")' in text
        assert "the session goes on" in text
        assert "[7, 7]" in kernel.run(third)
        workers = kernel.wait_for_workers(2)
        kernel.manager.restart_kernel(now=True)
        wait_until(lambda: not any(map(is_alive, workers)))


def fails_while_the_other_trains(core):
    if core.rank:
        raise ValueError("one")
    steps(core)


# The parts


def test_a_system_that_cannot_fork_is_refused(monkeypatch):
    layout = Topology("cpu", "CPU", cores=1, processes=0)
    monkeypatch.setattr("tpukit.essentials.launcher.launcher.choose_topology", lambda *_: layout)
    with pytest.raises(ValueError, match="a session needs") as caught:
        tpukit.Session()
    assert "cannot fork" in str(caught.value)
    assert "tpukit.launch(train)" in caught.value.fix


def test_a_missing_cloudpickle_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.delitem(sys.modules, "tpukit.essentials.launcher.serialization", raising=False)
    monkeypatch.delattr("tpukit.essentials.launcher.serialization", raising=False)
    with pytest.raises(tpukit.TpukitError, match="cloudpickle, which is not installed"):
        tpukit.Session(1, "cpu")


@pytest.mark.parametrize(
    ("first", "second", "is_clean", "is_late", "expected"),
    [
        (("paused", 4), ("paused", 4), False, False, worker.END),
        (("paused", 3), ("running", 4), False, False, None),  # core 0 must run on to the limit
        (("paused", 3), ("paused", 4), True, False, None),
        (("running", 4), ("paused", 4), False, False, None),
        (("prompt", 3), ("paused", 4), False, False, worker.RAISE),  # core 0 cannot run on
        (("paused", 4), ("running", 4), False, True, worker.RAISE),  # core 1 does not move
        (("paused", 3), ("running", 4), True, True, worker.RAISE),
        (("paused", 3), ("running", 4), False, True, None),  # core 1 may wait for core 0 in a graph
    ],
)
def test_the_command_that_ends_a_run_depends_on_the_places_of_the_cores(
    first, second, is_clean, is_late, expected
):
    places = {}
    for rank, (place, passed) in enumerate([first, second]):
        places[rank] = messages.At(rank, 1, place, passed, is_clean, None)
    group = SimpleNamespace(
        ranks=[0, 1],
        places=places,
        core_0_may_save=False,
        is_at=lambda rank, place: places[rank].place == place,
    )
    recovery = _Recovery(group)
    recovery._take_reports()
    if is_late:
        recovery._moved -= 10
    assert recovery._limit == 4
    assert recovery._end_command() == expected


def test_a_stopping_point_lets_a_core_pass_up_to_the_limit():
    reports = []
    point = StoppingPoint(lambda: reports.append((point.passed, point.arrived)))
    for _ in range(3):
        point.cross()
    point.limit = 4
    thread = threading.Thread(target=lambda: [point.cross() for _ in range(3)])
    thread.start()
    wait_until(lambda: point.is_paused)
    assert reports == [(4, 5)]
    point.limit = 10
    thread.join()
    assert (point.passed, point.is_paused, reports) == (6, False, [(4, 5)])
    assert callable(serve)
