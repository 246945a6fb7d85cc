"""The CUDA backend on real GPUs; on a machine without one these tests skip with the words a user would read."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.workers import Pairs, small_net
from torch import nn

import tpukit
from tpukit import FitOptions, WorkerError, evaluate, fit, launch
from tpukit.essentials.launcher.topology import choose_topology

ROOT = Path(__file__).parents[2]

try:
    choose_topology(tpukit.machine_info(), None, "cuda")
    NO_GPU = ""
except ValueError as error:
    NO_GPU = str(error)

pytestmark = pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)


def on_gpus(fn, *args, **options):
    return launch(fn, *args, backend="cuda", progress="off", **options)


def train(core, folder=None, epochs=2, **options):
    model = core.model(small_net(True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train = core.batches(Pairs(), batch_size=16, shuffle=True, drop_last=True)
    valid = core.batches(Pairs(37), batch_size=16)
    history = fit(
        core,
        model,
        optimizer,
        nn.functional.mse_loss,
        train,
        valid,
        epochs=epochs,
        checkpoints=folder,
        options=FitOptions(log_every=2),
        **options,
    )
    return {"epochs": history.epochs, "weights": model.state_dict(), "device": str(core.device)}


def test_gpus_are_chosen_where_no_tpu_is():
    assert choose_topology(tpukit.machine_info(), None, None).backend == "cuda"


def test_every_core_has_a_gpu_of_its_own_and_results_come_back_on_the_cpu():
    def work(core):
        return core.rank, str(core.device), torch.ones(2, device=core.device) * core.rank

    for rank, (reported, device, tensor) in enumerate(on_gpus(work).results):
        assert (reported, device, tensor.device.type) == (rank, f"cuda:{rank}", "cpu")


def test_the_kernel_stays_free_of_cuda_so_that_it_can_launch_again():
    code = """
        import torch, tpukit
        for _ in range(3):
            run = tpukit.launch(lambda core: core.mean(torch.ones(2, device=core.device)), progress="off")
        print(run.device, run.results[0].tolist(), torch.cuda.is_initialized())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.strip() == "CUDA GPU [1.0, 1.0] False", done.stderr


def test_a_kernel_that_started_cuda_is_refused():
    code = """
        import torch, tpukit
        torch.ones(1).cuda()
        try:
            tpukit.launch(lambda core: None)
        except tpukit.RuntimeInUseError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT
    )
    assert "this kernel has started the CUDA runtime" in done.stdout, done.stderr


def test_collectives_give_the_numbers_they_give_on_a_cpu():
    def work(core):
        value = torch.arange(3.0, device=core.device) + core.rank
        return [
            core.all_reduce(value, op).cpu() for op in ("sum", "mean", "min", "max")
        ], core.gather(value).cpu()

    run = on_gpus(work)
    every = torch.stack([torch.arange(3.0) + rank for rank in range(run.cores)])
    reduced, gathered = run.results[0]
    expected = [every.sum(0), every.mean(0), every.amin(0), every.amax(0)]
    assert all(torch.equal(one, other) for one, other in zip(reduced, expected, strict=True))
    assert torch.equal(gathered, every.reshape(-1))


def test_a_training_on_gpus_is_that_of_the_dry_run_to_float_tolerance():
    gpus = on_gpus(train).results[0]
    cpu = launch(
        train, backend="cpu", cores=len(on_gpus(lambda core: 0).results), progress="off"
    ).results[0]
    assert gpus["device"] == "cuda:0"
    for ours, theirs in zip(gpus["epochs"], cpu["epochs"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        # The gradient of a bias before BatchNorm is 0 but for rounding, and Adam makes steps of full
        # size of it. BatchNorm removes the bias in training, but not in evaluation.
        assert ours["valid_loss"] == pytest.approx(theirs["valid_loss"], rel=1e-2)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    on_gpus(train, tmp_path, 1)
    assert [row["epoch"] for row in on_gpus(train, tmp_path, 3).results[0]["epochs"]] == [1, 2, 3]


@pytest.mark.parametrize(
    "options", [{"bf16": True}, {"accumulate_grad_batches": 2}, {"max_grad_norm": 1.0}], ids=str
)
def test_the_options_of_fit_run(options):
    assert on_gpus(functools.partial(train, epochs=1, **options)).results[0]["epochs"]


def test_every_sample_is_evaluated_once():
    def work(core):
        model = core.model(small_net(False)).eval()
        found = evaluate(core, model, nn.functional.mse_loss, core.batches(Pairs(37), batch_size=8))
        return found.loss, found.outputs

    loss, outputs = on_gpus(work).results[0]
    data = Pairs(37)
    with torch.no_grad():
        expected = small_net(False)(data.images)
    assert torch.allclose(outputs, expected, atol=1e-4)
    assert loss == pytest.approx(nn.functional.mse_loss(expected, data.targets).item(), rel=1e-4)


def test_memory_is_reported_and_a_trace_is_written(tmp_path):
    def work(core):
        with tpukit.profiling.profile(core, tmp_path) as recording, core.step():
            torch.ones(256, 256, device=core.device).square().sum()
        return str(tpukit.profiling.report(core)), [file.stat().st_size for file in recording.files]

    report, sizes = on_gpus(work).results[0]
    assert "device memory" in report
    assert sizes
    assert min(sizes) > 0


def test_an_out_of_memory_error_names_the_core_and_the_next_launch_works():
    with pytest.raises(WorkerError, match="OutOfMemoryError"):
        on_gpus(lambda core: torch.empty(2**44, device=core.device))
    assert on_gpus(lambda core: core.rank).results[0] == 0


def test_a_killed_worker_is_named():
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        on_gpus(lambda core: os.kill(os.getpid(), signal.SIGKILL))


def test_each_job_has_a_gpu_of_its_own():
    def work(core, config):
        total = core.all_reduce(torch.full((2,), float(config), device=core.device))
        return os.environ["CUDA_VISIBLE_DEVICES"], str(core.device), total.tolist()

    jobs = tpukit.launch_each(work, range(3), backend="cuda", progress="off")
    assert not jobs.failures, jobs
    assert [result[1:] for result in jobs.results] == [("cuda:0", [n, n]) for n in range(3)]


@pytest.mark.parametrize(("precision", "bits"), [(None, 11), ("high", 11), ("highest", 24)])
def test_what_a_gpu_computes_is_explained_by_its_precision(precision, bits):
    images = torch.randn(4, 3, 8, 8)
    found = tpukit.profiling.compare(
        small_net(True), images, backend="cuda", matmul_precision=precision
    )
    assert found.bits == bits
    assert found.first is None, found


def fails(core):
    raise ValueError("on purpose")


def test_a_session_keeps_the_model_on_the_gpu_and_goes_on_after_an_exception():
    def make(core):
        core.state.model = core.model(small_net(True))

    def look(core):
        return next(core.state.model.parameters()).device.type

    with tpukit.Session(backend="cuda", progress="off") as session:
        session.run(make, progress="off")
        for bad in (fails, lambda core: torch.empty(2**44, device=core.device)):
            with pytest.raises(WorkerError, match="the session goes on"):
                session.run(bad, progress="off")
            assert set(session.run(look, progress="off").results) == {"cuda"}
