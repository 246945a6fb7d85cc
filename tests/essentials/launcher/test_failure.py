"""Failures at the edges: threads that have ended, signals without a name, huge texts, errors that travel."""

import copy
import mmap
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers.waiting import interrupt_when, wait_until

import tpukit
from tpukit import LaunchInterrupted, WorkerError, launch
from tpukit.essentials.environment import OwnMemory
from tpukit.essentials.launcher import messages, signals, worker
from tpukit.essentials.launcher.channel import Receiver
from tpukit.essentials.launcher.core import Core
from tpukit.essentials.launcher.failure import Failures, exception_raised, process_ended


def quietly(fn, *args, **options):
    return launch(fn, *args, cores=2, backend="cpu", progress="off", **options)


def process_of_two_threads():
    """Return a worker process's own view of two cores: one whose thread has ended, one that runs in this thread."""
    reading, writing = os.pipe()
    unused = {
        "kernel": 0,
        "folder": None,
        "heartbeat": 1.0,
        "output": -1,
        "control": -1,
        "inherited": (),
    }
    process = worker._Worker(worker.WorkerPipes(rank=0, messages=writing, **unused))
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    backend = SimpleNamespace(world_size=2, device=None, chips=1, shares_process=True)
    backend.compiles = lambda: None
    for rank, ident in ((0, thread.ident), (1, threading.get_ident())):
        core = Core(SimpleNamespace(rank=rank, **vars(backend)), process.sender.send)
        process.cores.append(worker.StartedCore(core, ident, OwnMemory()))
    return process, Receiver(reading)


def test_stacks_can_be_asked_of_a_process_of_which_a_cores_thread_has_ended():
    """The thread that answers would end with a KeyError, and the process no longer hear that it may go."""
    process, receiver = process_of_two_threads()
    asked = threading.Thread(target=process._send_stacks)  # as in a worker, where it is no core's
    asked.start()
    asked.join()
    (message,) = receiver.receive()
    assert isinstance(message, messages.Stack)
    assert message.rank == 1


def test_the_folder_beside_tpukit_whose_name_begins_like_it_is_the_users():
    file = f"{Path(tpukit.__file__).parent}-experiments/steps.py"
    own = {}
    exec(compile("def train(core):\n    raise KeyError('loss')", file, "exec"), own)
    with pytest.raises(WorkerError) as caught:
        quietly(own["train"])
    assert caught.value.found == f"train(), {file}, line 2"
    assert caught.value.traceback.splitlines()[1] == f'  File "{file}", line 2, in train'


def test_sigterm_is_told_of_the_core_that_still_runs():
    process, receiver = process_of_two_threads()
    reporting = threading.Thread(target=process._report_sigterm)  # as in a worker: no core's thread
    reporting.start()
    reporting.join()
    (message,) = receiver.receive()
    assert isinstance(message, messages.CoreFailed)
    assert message.failure.rank == 1


@pytest.mark.parametrize(("sent", "blamed"), [(signal.SIGKILL, 1), (signal.SIGABRT, 0)])
def test_a_killed_core_is_blamed_though_the_kernel_sees_it_after_what_another_raises_for_its_lack(
    sent, blamed
):
    failures = Failures()
    failures.add(exception_raised(0, RuntimeError("core 1 has gone")))
    failures.add(process_ended(1, -sent, started=True, memory=None, last_output=""))
    assert (
        failures.first().rank == blamed
    )  # libraries abort because others have gone; nobody kills for that


def test_of_a_huge_text_the_middle_is_left_out_and_the_whole_is_in_the_traceback():
    def work(core):
        raise ValueError("begin " + "x" * 5_000_000 + " end")

    with pytest.raises(WorkerError) as failed:
        quietly(work)
    text = str(failed.value)
    assert len(text) < 30_000
    assert "raised ValueError: begin xxx" in text
    assert text.rstrip().endswith("xxx end")
    assert text.count("characters are left out here") == 2
    assert len(failed.value.traceback) > 5_000_000
    assert failed.value.__cause__ is None  # which a notebook would print whole


def test_an_optimizer_in_a_worker_leaves_no_temporary_folder(tmp_path):
    """Making the first one in a process imports a part of torch that makes a temporary folder."""
    code = """
    import os, tempfile, torch, tpukit

    def work(core):
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    tpukit.launch(work, cores=2, backend="cpu", progress="off")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=True,
    )
    assert ended.returncode == 0
    assert os.listdir(tmp_path) == []


def raised_from_itself(core):
    try:
        raise ValueError("loss is nan")
    except ValueError as error:
        raise error from error


def test_an_exception_that_is_its_own_cause_ends_the_run():
    with pytest.raises(WorkerError, match="core [01] of 2 raised ValueError: loss is nan"):
        quietly(raised_from_itself, timeout=300)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_the_line_of_an_error_in_a_library_is_that_of_the_user(folder, tmp_path):
    own = {}
    file = tmp_path / folder / "library.py"  # Debian and Colab install into dist-packages
    exec(compile("def inner():\n    raise KeyError('loss')", file, "exec"), own)

    def work(core):
        own["inner"]()

    with pytest.raises(WorkerError) as caught:
        quietly(work)
    assert caught.value.found.startswith(f"work(), {__file__}, line ")


def test_an_exception_of_a_module_that_only_the_worker_can_import_is_reported(tmp_path):
    (tmp_path / "only_in_workers.py").write_text("class LossError(Exception): pass")

    def work(core):
        sys.path.append(str(tmp_path))
        import only_in_workers

        raise only_in_workers.LossError("loss is nan")

    with pytest.raises(WorkerError, match="raised LossError: loss is nan") as caught:
        quietly(work)
    assert caught.value.__cause__ is None


def test_sigterm_is_not_lost_if_an_interrupt_comes_with_it():
    def end(*_):
        raise signals.Terminated

    before = signal.signal(signal.SIGTERM, end)
    ended_by = None
    try:
        with signals.without_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
    except (KeyboardInterrupt, signals.Terminated) as error:
        ended_by = error
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(ended_by, signals.Terminated)


def test_an_interrupt_is_raised_again_after_sigterm_came_while_the_handlers_were_restored(
    monkeypatch,
):
    def end(*_):
        raise signals.Terminated

    change = signal.signal
    sent = []

    def changed(number, handler):
        if number == signal.SIGINT and not sent:
            sent.append(number)
            signal.raise_signal(signal.SIGTERM)  # its handler is restored already
        return change(number, handler)

    before = signal.signal(signal.SIGTERM, end)
    try:
        with (
            monkeypatch.context() as patched,
            pytest.raises(signals.Terminated),
            signals.without_interrupts(),
        ):
            patched.setattr(signal, "signal", changed)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def copies(error):
    return [pickle.loads(pickle.dumps(error)), copy.copy(error)]


def test_worker_failed_survives_pickling():
    def work(core):
        core.log(loss=0.5)
        raise KeyError("a")

    with pytest.raises(WorkerError) as failed:
        quietly(work)
    failed.value.add_note("seen by the scheduler")
    for again in copies(failed.value):
        assert type(again) is WorkerError
        assert str(again) == str(failed.value)
        assert (again.rank, again.traceback) == (failed.value.rank, failed.value.traceback)
        assert again.run.log == failed.value.run.log
        assert again.__notes__ == ["seen by the scheduler"]


def interrupted(work, seconds, **options):
    """Interrupt a run so many seconds after both cores have begun."""
    begun = mmap.mmap(-1, 2)  # the workers share it

    def noting(core):
        begun[core.rank] = 1
        return work(core)

    interrupt_when(lambda: all(begun[:]), later=seconds)
    with pytest.raises(LaunchInterrupted) as caught:
        quietly(noting, limits=tpukit.Limits(heartbeat=0.2), **options)
    return caught.value


def never_comes(core):
    if core.rank == 1:
        time.sleep(99)
    core.barrier()


def test_an_interrupt_of_a_hung_run_shows_where_the_cores_stood():
    error = interrupted(never_comes, 8.0)
    assert (
        "the run was interrupted; its workers were ended\n\nthe stacks of the cores:\ncore 0:\n"
        in str(error)
    )
    assert "core.barrier()" in error.stacks[0]
    assert "time.sleep(99)" in error.stacks[1]
    assert error.stacks[1] in str(error)
    for again in copies(error):
        assert (str(again), again.stacks, again.run.results) == (
            str(error),
            error.stacks,
            [None, None],
        )


def test_an_interrupt_of_a_run_that_moves_is_one_line_and_keeps_the_stacks():
    def work(core):
        while True:
            core.barrier()
            time.sleep(0.05)

    error = interrupted(work, 6.5)
    assert str(error) == "the run was interrupted; its workers were ended"
    assert error.stacks.keys() == {0, 1}


def train(core, factor, lr=0.1):
    return factor * lr


def test_a_keyword_that_is_no_option_is_refused_and_the_fix_works():
    import functools

    with pytest.raises(TypeError) as caught:
        quietly(train, 2, lr=0.5)
    assert str(caught.value).startswith(
        "launch has no option 'lr'\n  found: its options are cores, device, backend, seed"
    )
    assert "fix:   launch(functools.partial(train, lr=...), ...)" in str(caught.value)
    assert quietly(functools.partial(train, lr=0.5), 2).results == [1.0, 1.0]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's way to end children with their parent")
def test_a_process_made_by_a_thread_ends_when_its_worker_is_killed(tmp_path):
    def work(core):
        import multiprocessing

        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(99,))
        thread = threading.Thread(target=process.start)
        thread.start()
        thread.join()
        os.setpgid(process.pid, process.pid)  # not ended with the worker's process group
        (tmp_path / str(core.rank)).write_text(str(process.pid))
        core.barrier()
        assert process.is_alive()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        quietly(work)

    left = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    wait_until(lambda: not any(map(psutil.pid_exists, left)))


class EndsAChild:
    """A stream that ends a child process when it is flushed, as a DataLoader's process may end at any moment."""

    def write(self, text):
        return len(text)

    def flush(self):
        subprocess.run(["true"], check=True)


class KilledLoader(BaseException):
    """A BaseException, since the stream is flushed inside `suppress(Exception)`."""


def handle_ended_children(_core):
    def handler(*_):
        raise KilledLoader("DataLoader worker is killed")

    signal.signal(signal.SIGCHLD, handler)
    sys.stdout = EndsAChild()
    raise KeyError("loss")


def test_a_handler_of_ended_children_does_not_replace_the_failure_of_a_core():
    with pytest.raises(WorkerError, match="of 2 raised KeyError: 'loss'"):
        quietly(handle_ended_children)


def signal_late(_core):
    """Raise from a signal handler while the failure of this core is put into words."""

    def handler(*_):
        raise KilledLoader("too late")

    class Loss(KeyError):
        def __str__(self):
            os.kill(os.getpid(), signal.SIGUSR2)
            return "loss"

    signal.signal(signal.SIGUSR2, handler)
    raise Loss


def test_an_exception_of_a_signal_handler_after_the_worker_function_is_not_a_device_that_did_not_start():
    with pytest.raises(WorkerError, match="of 2 raised") as caught:
        quietly(signal_late)
    assert "could not start its device" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("Input tensor is not an XLA tensor: CPUFloatType", "core.model(model)"),
        ("Check failed: xtensor: Expected XLA tensor. Got: torch.FloatTensor", "core.model(model)"),
        ("expected scalar type Long but found Float", "targets.long()"),
    ],
)
def test_a_text_of_torch_that_has_one_cause_gets_its_fix(text, fix):
    assert fix in exception_raised(0, RuntimeError(text)).fix


def test_a_module_of_torch_export_that_gets_another_shape_names_the_fix_and_the_fix_works():
    net = torch.nn.Linear(4, 1)
    exported = torch.export.export(net, (torch.zeros(2, 4),)).module()
    if torch.__version__ >= "2.9":  # modules that torch 2.8 exports have no guards
        with pytest.raises(WorkerError, match="Guard failed") as caught:
            quietly(lambda core: core.model(exported)(torch.zeros(3, 4)))
        assert "dynamic_shapes=" in caught.value.fix
    free = torch.export.export(
        net, (torch.zeros(2, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    ).module()
    shapes = quietly(lambda core: core.model(free)(torch.zeros(3, 4)).shape).results
    assert shapes == [(3, 1), (3, 1)]


def test_a_core_that_something_outside_ends_gets_no_line_to_correct():
    def work(core):
        if core.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(0.01)

    with pytest.raises(WorkerError, match="was ended by SIGTERM") as caught:
        quietly(work)
    assert "backup_dir" in caught.value.fix
    assert "correct that line" not in str(caught.value)
