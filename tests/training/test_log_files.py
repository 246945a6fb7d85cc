"""Rows of `core.log` in other places while a run lasts: any function, TensorBoard, CSV."""

import _thread
import csv
import importlib.util
import os
import shutil
import signal
import sys
import time

import pytest
import torch
from helpers.launching import quietly
from helpers.workers import Pairs, small_net
from torch import nn

import tpukit
from tpukit import FitOptions, LaunchInterrupted, WorkerError, fit
from tpukit.training import CsvWriter, TensorBoardWriter


def log_three(core):
    for step in range(3):
        core.log(step, loss=torch.tensor(0.5) / (step + 1))
        core.flush()
    core.barrier()


def test_every_function_gets_every_row_in_order_in_this_process():
    seen = []
    run = quietly(
        log_three,
        loggers=[
            lambda row: seen.append(("first", row["step"], os.getpid())),
            lambda row: seen.append(("second", row)),
        ],
    )
    assert [one[0] for one in seen] == ["first", "second"] * 3
    assert [one[1:] for one in seen[::2]] == [(step, os.getpid()) for step in range(3)]
    assert [one[1] for one in seen[1::2]] == run.log


def test_rows_arrive_while_the_run_lasts(tmp_path):
    file = tmp_path / "seen"

    def work(core):
        core.log(loss=1)
        core.flush()
        while not file.exists():  # written by the kernel, when it has the row
            pass

    quietly(work, cores=1, timeout=600, loggers=lambda row: file.touch())


def test_a_function_that_raises_costs_neither_the_run_nor_the_others_and_is_told_once(capsys):
    seen = []

    def broken(row):
        row.clear()
        raise ConnectionError("no route to host")

    run = quietly(log_three, loggers=[broken, seen.append])
    assert (
        run.log
        == seen
        == [{"step": step, "loss": pytest.approx(0.5 / (step + 1))} for step in range(3)]
    )
    out = capsys.readouterr().out
    line = "loggers=broken raised ConnectionError: no route to host; the run continues without this logger"
    assert out.count(line) == 1
    assert "  found: it was given {'step': 0, 'loss': 0.5}\n  fix:   " in out


def test_a_slow_function_is_not_taken_for_a_run_that_hangs():
    def work(core):
        for step in range(6):
            core.log(step, loss=1)
            core.flush()
            core.barrier()
            time.sleep(0.2)

    seen = []

    def slow(row):
        seen.append(row)
        time.sleep(4 * (len(seen) == 2))

    assert quietly(work, limits=tpukit.Limits(stall=2, heartbeat=0.2), loggers=slow).log == seen


def test_rows_of_a_run_that_fails_have_arrived():
    seen = []

    def work(core):
        log_three(core)
        raise KeyError("later")

    with pytest.raises(WorkerError):
        quietly(work, loggers=seen.append)
    assert [row["step"] for row in seen] == [0, 1, 2]


@pytest.mark.parametrize(
    "interrupt",
    [lambda: signal.raise_signal(signal.SIGINT), _thread.interrupt_main],
    ids=["from outside", "its own"],
)
def test_an_interrupt_while_a_function_runs_gives_no_row_twice_and_is_the_interrupt_of_the_run(
    interrupt, capsys
):
    def work(core):
        log_three(core)
        time.sleep(900)

    seen, others = [], []

    def slow(row):
        seen.append(row["step"])
        if row["step"] == 1:
            time.sleep(2.0)  # the third has arrived
            interrupt()

    with pytest.raises(KeyboardInterrupt) as caught:
        quietly(work, loggers=[slow, lambda row: others.append(row["step"])])
    assert isinstance(caught.value, LaunchInterrupted)
    assert [row["step"] for row in caught.value.run.log] == [0, 1, 2]
    assert (seen, others) == ([0, 1], [0, 1, 2])
    line = (
        "loggers=slow was interrupted and gets no more rows; "
        "it was given {'step': 1, 'loss': 0.25}, and `run.log` has all"
    )
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.parametrize("loggers", ["wandb", ["wandb"], 3])
def test_what_is_no_function_is_refused_before_anything_starts(loggers):
    with pytest.raises(TypeError, match="loggers takes a function of a row, or a list of such"):
        quietly(log_three, loggers=loggers)


def test_fit_sends_the_loss_of_each_interval_and_the_evaluation_of_each_epoch():
    def work(core):
        model = core.model(small_net(norm=True))
        batches = core.batches(Pairs(), batch_size=8, shuffle=True, drop_last=True)
        valid = core.batches(Pairs(20), batch_size=8)
        wrong = {"error": lambda outputs, targets: (outputs - targets).abs().mean()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        history = fit(
            core,
            model,
            optimizer,
            nn.MSELoss(),
            batches,
            valid,
            epochs=2,
            options=FitOptions(log_every=2),
            metrics=wrong,
        )
        return history.epochs

    seen = []
    epochs = quietly(work, loggers=seen.append).results[0]
    assert [row["step"] for row in seen] == [2, 4, 4, 6, 8, 8]
    assert [{*row} - {"step"} for row in seen[1:3]] == [
        {"train_loss", "lr", "tflops_per_second"},
        {"valid_loss", "valid_error"},
    ]
    assert [seen[i]["valid_error"] for i in (2, 5)] == [row["valid_error"] for row in epochs]


def rows(file):
    with open(file, newline="") as opened:
        return list(csv.reader(opened))


def test_a_csv_file_has_a_column_for_each_name_whenever_it_appears(tmp_path):
    file = tmp_path / "new" / "log.csv"
    write = CsvWriter(file)
    for row in (
        {"step": 1, "loss": 0.5},
        {"step": 2, "valid, all": 0.25},
        {"step": 3, "loss": float("nan")},
    ):
        write(row)
    assert rows(file) == [
        ["step", "loss", "valid, all"],
        ["1", "0.5", ""],
        ["2", "", "0.25"],
        ["3", "nan", ""],
    ]
    assert os.listdir(file.parent) == ["log.csv"]


def test_a_csv_file_that_is_there_is_continued(tmp_path):
    CsvWriter(tmp_path / "log.csv")({"step": 1, "loss": 0.5, "lr": 0.1})
    CsvWriter(tmp_path / "log.csv")({"step": 2, "lr": 0.1, "loss": 0.25})
    assert rows(tmp_path / "log.csv") == [
        ["step", "loss", "lr"],
        ["1", "0.5", "0.1"],
        ["2", "0.25", "0.1"],
    ]


def test_a_csv_file_that_was_removed_begins_with_the_names_again(tmp_path):
    write = CsvWriter(tmp_path / "new/log.csv")
    for remove in (os.remove, lambda file: shutil.rmtree(file.parent)):
        write({"step": 1, "loss": 0.5})
        remove(tmp_path / "new/log.csv")
        write({"step": 2, "loss": 0.25})
        assert rows(tmp_path / "new/log.csv") == [["step", "loss"], ["2", "0.25"]]


def test_a_home_folder_is_the_one_of_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # on Windows
    monkeypatch.chdir(tmp_path)
    CsvWriter("~/log.csv")({"step": 1})
    if importlib.util.find_spec("tensorboard"):
        TensorBoardWriter("~/board")({"step": 1, "loss": 0.5})
    assert not (tmp_path / "~").exists()
    assert rows(tmp_path / "log.csv") == [["step"], ["1"]]


def test_a_run_writes_a_csv_file(tmp_path):
    quietly(log_three, loggers=CsvWriter(tmp_path / "log.csv"))
    assert rows(tmp_path / "log.csv")[:2] == [["step", "loss"], ["0", "0.5"]]


def test_without_tensorboard_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError,
        match="needs the package tensorboard.*\n  fix:   %pip install tensorboard",
    ):
        TensorBoardWriter(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboards_own_reader_finds_the_numbers_of_two_launches(tmp_path):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write = TensorBoardWriter(tmp_path)
    quietly(log_three, loggers=write)
    quietly(lambda core: core.log(7, loss=0.25), loggers=write)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(0, 0.5), (1, 0.25), (2, pytest.approx(1 / 6)), (7, 0.25)]
