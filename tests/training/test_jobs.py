"""Independent jobs, one a core, from a queue."""

import mmap
import os
import signal
import time

import psutil
import pytest
import torch
from helpers.kernels import Kernel
from helpers.launching import children
from helpers.machines import KAGGLE, on_machine
from helpers.waiting import HANGS, interrupt_when, wait_until
from helpers.workers import Pairs, small_net
from torch import nn

import tpukit
from tpukit import Checkpoints, FitOptions, LaunchInterrupted, fit, launch, launch_each
from tpukit.simulator.build import why_not

SIMULATOR = pytest.param(
    "xla:simulator",
    marks=[pytest.mark.xla, pytest.mark.skipif(bool(why_not()), reason=why_not() or "")],
)
REHEARSALS = ["cpu", pytest.param("xla:cpu", marks=pytest.mark.xla), SIMULATOR]


def quietly(fn, configs, **options):
    return launch_each(fn, configs, progress="off", **options)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = set(children())
    yield
    assert set(children()) <= before


@pytest.mark.parametrize("backend", REHEARSALS)
def test_each_config_is_a_job_alone_on_its_core_and_results_come_in_the_order_of_configs(backend):
    def work(core, config):
        time.sleep(0.3 * (config == 0))  # the first is done last
        return {
            "config": config,
            "core": (core.rank, core.world_size),
            "mean": core.mean(config),
            "sum": core.all_reduce(torch.full((2,), float(config), device=core.device)),
            "drawn": torch.rand(1, device=core.device),
            "pid": os.getpid(),
        }

    jobs = quietly(work, range(5), cores=2, backend=backend)
    assert not jobs.failures
    for config, result in enumerate(jobs.results):
        assert result["config"] == config
        assert result["core"] == (0, 1)
        assert result["mean"] == config
        assert result["sum"].tolist() == [config, config]
    assert len({result["pid"] for result in jobs.results}) == 5
    assert (
        len({result["drawn"].item() for result in jobs.results}) == 1
    )  # jobs differ by their configs alone


def test_as_many_jobs_run_at_a_time_as_there_are_cores_and_no_more(tmp_path):
    """The first three wait for each other; were fewer run at a time, they would wait for ever."""
    begun, there = tmp_path / "begun", tmp_path / "there"
    begun.mkdir()
    there.mkdir()

    def work(core, config):
        (begun / f"{config}").touch()
        (there / f"{config}").touch()
        wait_until(lambda: config > 2 or len(os.listdir(begun)) >= 3)
        time.sleep(0.1)
        together = len(os.listdir(there))
        (there / f"{config}").unlink()
        return together

    assert max(quietly(work, range(6), cores=3).results) <= 3


@pytest.mark.parametrize("backend", REHEARSALS)
def test_a_job_that_fails_stops_no_other_and_is_told_with_its_traceback(backend, capsys):
    def work(core, config):
        core.log(loss=0.5)
        if config == "raises":
            raise KeyError("SOPInstanceUID")
        if config == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return config

    configs = ["raises", "first", "dies", "second", "third"]
    jobs = quietly(work, configs, cores=2, backend=backend)
    assert jobs.results == [None, "first", None, "second", "third"]
    assert list(jobs.failures) == [0, 2]
    assert str(jobs.failures[0]).startswith(
        "job 0: core 0 of 1 raised KeyError: 'SOPInstanceUID'\n  found: work(), "
    )
    assert 'raise KeyError("SOPInstanceUID")' in jobs.failures[0].traceback
    assert isinstance(jobs.failures[0].__cause__, KeyError)
    assert "was killed by SIGKILL" in str(jobs.failures[2])
    assert jobs.runs[0].log == jobs.runs[1].log == [{"step": 1, "loss": 0.5}]
    assert "job 0: core 0 of 1 raised KeyError" in capsys.readouterr().out
    assert str(jobs).startswith(f"3 of 5 jobs done, each on one {jobs.device}; ")
    assert [row[:3] for row in jobs.rows()][1:3] == [
        ("ok", "job 1", "'first'"),
        ("failure", "job 2", "'dies'"),
    ]
    assert "&#9679;</span>&nbsp;failure" in jobs._repr_html_()


def test_fit_with_checkpoints_works_in_each_job_as_it_does_alone(tmp_path):
    def train(core, lr, folder="alone"):
        model = core.model(small_net(norm=True))
        batches = core.batches(Pairs(), batch_size=16, shuffle=True, drop_last=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        history = fit(
            core,
            model,
            optimizer,
            nn.MSELoss(),
            batches,
            epochs=2,
            options=FitOptions(log_every=2),
            checkpoints=tmp_path / folder / str(lr),
        )
        return [row["train_loss"] for row in history.epochs], core.to_host(
            dict(model.named_parameters())
        )

    jobs = quietly(lambda core, lr: train(core, lr, "jobs"), [0.1, 0.01], cores=2)
    for lr, (losses, weights) in zip(jobs.configs, jobs.results, strict=True):
        expected, expected_weights = launch(train, lr, cores=1, progress="off").results[0]
        assert losses == expected
        assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())
    assert sorted(os.listdir(tmp_path / "jobs")) == ["0.01", "0.1"]


def test_lines_carry_the_number_of_the_job(capsys):
    def work(core, config):
        print("printed", config)
        core.print("said", config)
        for _ in core.progress(range(3)):
            pass

    launch_each(work, ["a", "b"], progress="text")
    lines = capsys.readouterr().out.splitlines()
    assert {"[job 0] printed a", "[job 1] printed b", "[job 0] said a", "[job 1] said b"} <= set(
        lines
    )
    assert [line for line in lines if line.startswith("job 1  3/3")]
    assert [line for line in lines if line.startswith("jobs  2/2")]


def test_timeout_and_stall_end_the_job_that_they_are_about():
    def work(core, config):
        time.sleep(900 * (config == "slow"))
        return config

    jobs = quietly(
        work, ["slow", "quick", "quick"], cores=2, timeout=8, limits=tpukit.Limits(heartbeat=0.2)
    )
    assert jobs.results == [None, "quick", "quick"]
    assert "was not done after timeout=8 seconds" in str(jobs.failures[0])
    assert "time.sleep(900" in jobs.failures[0].traceback


def test_an_interrupt_ends_all_jobs_after_their_finally_blocks_and_returns_what_had_come(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "tpukit.essentials.launcher.signals.END_SECONDS", 60.0
    )  # a busy machine needs more than one
    begun = mmap.mmap(-1, 5)  # the jobs share it

    def work(core, config):
        core.log(loss=0.5)
        core.flush()
        if config == 0:
            return "done"
        try:
            begun[config] = 1
            time.sleep(900)
        finally:
            time.sleep(0.3)  # a second SIGTERM would cut this short
            (tmp_path / str(config)).touch()

    interrupt_when(lambda: begun[1] and begun[2])
    with pytest.raises(LaunchInterrupted) as caught:
        quietly(work, range(5), cores=2)
    jobs = caught.value.run
    assert jobs.results == ["done", None, None, None, None]
    assert list(jobs.failures) == [1, 2]
    assert (
        str(jobs.failures[1])
        == "job 1: core 0 of 1 was ended by an interrupt\n  fix:   run the cell again"
    )
    assert jobs.runs[1].log == [{"step": 1, "loss": 0.5}]
    assert 0 < jobs.runs[1].seconds < 900
    assert jobs.runs[3] is jobs.runs[4] is None
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
    assert [row[0] for row in jobs.rows()] == ["ok", "failure", "failure", "warning", "warning"]
    assert quietly(lambda core, config: config, [1]).results == [1]


def test_an_interrupt_lets_fit_save_in_every_job(tmp_path):
    drawn = tmp_path / "drawn"
    drawn.mkdir()

    class Slow(Pairs):
        def __getitem__(self, index):
            time.sleep(0.02)
            (drawn / str(os.getpid())).touch()
            return super().__getitem__(index)

    def train(core, name):
        model = core.model(small_net(norm=False))
        batches = core.batches(Slow(), batch_size=4, shuffle=True, drop_last=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return fit(
            core,
            model,
            optimizer,
            nn.MSELoss(),
            batches,
            epochs=100,
            checkpoints=Checkpoints(tmp_path / name, save_every="1h"),
        )

    interrupt_when(lambda: len(os.listdir(drawn)) == 2, later=1)
    with pytest.raises(LaunchInterrupted):
        quietly(train, ["a", "b"], cores=2)
    for name in ("a", "b"):
        checkpoints = list((tmp_path / name).iterdir())
        assert checkpoints, name


def test_a_kernel_that_is_interrupted_and_one_that_is_killed_leave_nothing():
    kernel = Kernel()
    try:
        kernel.run(
            "import os, signal, threading, time, tpukit\ndef wait(core, config):\n    time.sleep(600)"
        )

        def interrupt():
            kernel.wait_for_workers(2)
            time.sleep(1)
            os.kill(kernel.process.pid, signal.SIGINT)

        kernel.later(0, interrupt)
        kernel.run(
            "try:\n    tpukit.launch_each(wait, range(4), cores=2)\nexcept KeyboardInterrupt as e: kept = e.run"
        )
        assert kernel.error is None
        assert (
            kernel.run("print(kept.results, len(kept.failures))").strip()
            == "[None, None, None, None] 2"
        )
        assert kernel.workers() == []
        kernel.client.execute("tpukit.launch_each(wait, range(4), cores=2)")
        workers = kernel.wait_for_workers(2)
        kernel.process.kill()
        assert psutil.wait_procs(workers, timeout=HANGS)[1] == []
    finally:
        kernel.close()


def test_a_job_that_is_done_leaves_at_once_though_another_has_been_forked_since(monkeypatch):
    """The later fork holds copies of the pipes of the earlier; it has to close them."""
    monkeypatch.setattr(
        "tpukit.essentials.launcher.signals.END_SECONDS", 200.0
    )  # which one that does not leave is given
    began = time.monotonic()
    jobs = quietly(lambda core, seconds: time.sleep(seconds), [0.5, 3.0], cores=2)
    assert max(run.seconds for run in jobs.runs) < time.monotonic() - began < 150

    def open_pipes(core, config):
        time.sleep(0.3)
        return sum(
            "pipe:" in os.readlink(f"/proc/self/fd/{fd}")
            for fd in range(3, 256)
            if os.path.exists(f"/proc/self/fd/{fd}")
        )

    before = len(os.listdir("/proc/self/fd"))
    counts = quietly(open_pipes, range(3), cores=3).results
    assert [count - counts[0] for count in counts] == [
        0,
        2,
        4,
    ]  # multiprocessing's own two a process
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("configs", "options", "message"),
    [
        ([], {}, "needs at least one config, got none\n  fix:   pass a list"),
        ([1], {"cores": 0}, "cores must be the number of jobs at a time, at least 1, got 0"),
        ([1], {"backend": "tpu"}, "backend must be one of None"),
        ([1], {"timeout": 0}, "timeout must be a number of seconds above 0"),
        ([1], {"matmul_precision": "low"}, "matmul_precision must be 'high', 'highest'"),
    ],
)
def test_what_cannot_be_had_is_refused(configs, options, message):
    with pytest.raises(ValueError, match=message):
        quietly(lambda core, config: config, configs, **options)


def test_the_number_of_jobs_at_a_time_may_be_numpys():
    numpy = pytest.importorskip("numpy")
    done = quietly(lambda core, config: config, [1, 2], cores=numpy.int64(2), backend="cpu")
    assert done.results == [1, 2]


def test_more_jobs_at_a_time_than_chips_are_refused():
    refused = pytest.raises(
        ValueError,
        match="cores=9 is not supported: this machine runs at most 8 jobs at a time\n  found: Kaggle",
    )
    with on_machine(KAGGLE), refused:
        quietly(lambda core, config: config, [1], cores=9)


def test_a_job_is_one_bar_with_its_name_whatever_loops_it_has(capsys):
    def work(core, config):
        for _ in core.progress(range(2), "epochs"):
            for _ in core.progress(range(20), "train"):
                pass

    launch_each(work, [0, 1], progress="text")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("job")]
    assert sorted(line.split("  ")[:2] for line in lines) == [
        ["job 0", "2/2"],
        ["job 1", "2/2"],
        ["jobs", "2/2"],
    ]
    assert all("steps/s" not in line for line in lines)  # they are epochs
