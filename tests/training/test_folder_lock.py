"""One run at a time in a folder of checkpoints, and the next one at once."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
from helpers.launching import quietly
from helpers.workers import Pairs, small_net

from tpukit import FitOptions, WorkerError, fit
from tpukit.training import checkpoints

ROOT = Path(__file__).parents[2]


def train(core, folder, epochs, pause=0.0, net=None, model=None):
    model = model or core.model(net or small_net(True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = core.batches(Pairs(), batch_size=8, shuffle=True, drop_last=True)
    wait = lambda *batch: time.sleep(pause) or batch  # noqa: E731
    loss = torch.nn.MSELoss()
    history = fit(
        core,
        model,
        optimizer,
        loss,
        batches,
        epochs=epochs,
        checkpoints=folder,
        augment=wait,
        options=FitOptions(log_every=2),
    )
    return history.resumed


def test_a_second_fit_in_the_same_launch_continues_the_first(tmp_path):
    def work(core):
        sync = os.fsync
        os.fsync = lambda file: (
            time.sleep(0.3) or sync(file)
        )  # a slow disk: still being written when `fit` is done
        model = core.model(small_net(True))
        return [train(core, tmp_path, epochs, model=model) for epochs in (1, 2)], sorted(
            os.listdir(tmp_path)
        )

    (first, files), (second, _) = quietly(work).results
    assert first == second
    assert first[0] is None
    assert first[1].startswith("step-00000004")
    assert ".run.lock" not in files


def test_a_fit_that_failed_leaves_the_folder_to_the_next_in_the_same_launch(tmp_path):
    def work(core):
        train(core, tmp_path, 1)
        with pytest.raises(ValueError, match="another architecture"):
            train(
                core,
                tmp_path,
                2,
                net=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2)),
            )
        return train(core, tmp_path, 2)

    assert all(name.startswith("step-00000004") for name in quietly(work).results)


@pytest.fixture
def other(tmp_path):
    """Return a process that trains in the folder, and has saved there; a fork of this one has nothing to import."""
    process = multiprocessing.get_context("fork").Process(
        target=quietly, args=(train, tmp_path, 500, 0.05)
    )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12: of the threads that pytest-xdist has
        process.start()
    while not list(tmp_path.glob("step-*")):
        assert process.is_alive()
        time.sleep(0.05)
    yield process
    process.kill()
    process.join()


def test_a_second_run_is_told_who_holds_the_folder_and_another_folder_works(other, tmp_path):
    with pytest.raises(
        WorkerError, match="core 0 of 2 raised CheckpointError: another run saves in"
    ) as failure:
        quietly(train, tmp_path, 1)
    text = str(failure.value)
    holder = int(
        re.search(r"\n  found: process (\d+) on .* holds .run.lock\n  fix:   wait until", text)[1]
    )
    assert psutil.Process(holder).ppid() == other.pid
    assert quietly(train, tmp_path / "another", 1).results == [None, None]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_was_ended_can_be_run_again_at_once(number, other, tmp_path):
    os.kill(other.pid, number)
    if number != signal.SIGKILL:
        other.join()  # an interrupt saves first: the cell is run again when it has ended
    assert all(name.startswith("step-") for name in quietly(train, tmp_path, 1).results)


def test_what_a_dying_run_still_holds_is_waited_for(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from tpukit.training.checkpoints import one_run
with one_run(Path({str(tmp_path)!r}), say=print):
    print("held", flush=True)
    time.sleep(1.5)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout.readline() == b"held\n"
    with checkpoints.one_run(tmp_path, say=pytest.fail):
        assert holder.wait() == 0
        assert f"process {os.getpid()} on " in (tmp_path / ".run.lock").read_text()
    assert list(tmp_path.iterdir()) == []
    holder.stdout.close()


def test_its_own_forks_do_not_hold_the_folder_after_it(tmp_path):
    with checkpoints.one_run(tmp_path, say=pytest.fail):
        child = os.fork()
        if child == 0:
            time.sleep(900)
            os._exit(0)
    try:
        took = []

        def elsewhere():
            code = "import sys; from pathlib import Path; from tpukit.training.checkpoints import one_run\n"
            code += f"with one_run(Path({str(tmp_path)!r}), say=print): pass"
            took.append(
                subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=600).returncode
            )

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert took == [0]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_drive_without_locks_is_used_and_said(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(38, "Function not implemented")  # as Google Drive in Colab may

    monkeypatch.setattr("fcntl.lockf", refuse)
    said = []
    with checkpoints.one_run(tmp_path, say=said.append):
        assert list(tmp_path.iterdir()) == []
    assert said == [
        f"{tmp_path} cannot be locked ([Errno 38] Function not implemented): make sure that no other run saves there"
    ]
