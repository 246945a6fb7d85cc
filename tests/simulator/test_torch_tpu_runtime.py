"""TorchTPU itself on simulated chips: `make torchtpu`, which has it in an environment of its own."""

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.launching import DTYPES, children
from helpers.waiting import interrupt_when
from helpers.workers import Pairs, small_net
from torch import nn

import tpukit
from tpukit import WorkerError, evaluate, fit, launch, predict
from tpukit.accelerators.torch_tpu import INSIDES, SEEN
from tpukit.simulator import build
from tpukit.simulator.torch_tpu_runtime import HARDWARE, show_chips

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_tpu") is None or build.why_not() is not None,
    reason=build.why_not() or "torch_tpu is not installed: make torchtpu has it",
)
ROOT = Path(__file__).parents[2]
MSE = nn.MSELoss()


def on(backend, fn, *args, cores=1, **options):
    return launch(fn, *args, backend=backend, cores=cores, progress="off", seed=1, **options)


def on_chips(fn, *args, **options):
    return on("torch_tpu:simulator", fn, *args, **options)


def test_this_release_has_what_the_kit_uses_inside_it_and_a_part_that_has_moved_is_named():
    def work(core):
        from tpukit.accelerators import inside

        for place in (*INSIDES, *HARDWARE):
            assert inside(place) is not None
        inside("torch_tpu._internal.utils.hardware:_moved")

    with pytest.raises(
        WorkerError, match=f"has no _moved in torch_tpu._internal(.|\n)*torch_tpu=={SEEN}"
    ):
        on_chips(work)


def test_the_programs_own_arguments_are_no_flags_of_torchtpus(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "-v", "--epochs=3"])
    assert on_chips(lambda core: sys.argv[1:]).results == [["-v", "--epochs=3"]]


def test_a_kernel_in_which_torch_tpu_has_another_library_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_tpu", None)
    with pytest.raises(
        RuntimeError, match=r"workers would look for real chips(.|\n)*fix:   restart the kernel"
    ):
        on_chips(lambda core: core.rank)


@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_the_packages_own_running_statistics_still_need_the_correction(name):
    """If this fails, TorchTPU updates them itself: remove the patch of accelerators/torch_patches.py."""

    def work(core):
        mean, variance = torch.zeros(4, device=core.device), torch.ones(4, device=core.device)
        x, normalise = (torch.randn(16, 4, 2) + 3).to(core.device), getattr(torch, name)
        given = (x, None, None, mean, variance, True, 0.1, 1e-5, False)
        normalise.__wrapped__(*given)
        own = mean.tolist(), variance.tolist()
        normalise(*given)
        return own, (mean.cpu() - 0.1 * x.cpu().mean((0, 2))).abs().max() < 1e-6, str(x.device)

    assert on_chips(work).results == [(([0.0] * 4, [1.0] * 4), True, "tpu:0")]


def collectives(core):
    found = []
    for dtype in DTYPES:
        value = (torch.arange(4) * (core.rank + 1) - core.rank).to(dtype).to(core.device)
        found += [
            (dtype, op, core.all_reduce(value, op).double().tolist())
            for op in ("sum", "mean", "min", "max")
        ]
        found.append((dtype, "gather", core.gather(value).double().tolist()))
    part = core.backend.reduce_scatter(torch.arange(8.0, device=core.device) + core.rank)
    tensors = [
        torch.full(size, float(core.rank + 1), device=core.device) for size in ((2,), (600, 600))
    ]
    core.backend.broadcast(tensors)
    core.barrier()
    return (
        found,
        part.tolist(),
        [tensor.cpu().unique().tolist() for tensor in tensors],
        core.mean(core.rank),
    )


def test_every_collective_of_four_processes_gives_the_numbers_of_the_cpu_backend():
    assert on_chips(collectives, cores=4).results == on("cpu", collectives, cores=4).results


def train(core, folder=None, epochs=2):
    torch.set_float32_matmul_precision("highest")
    model = core.model(small_net(True))
    # Not Adam: a bias before BatchNorm has no gradient but rounding, of which Adam makes whole steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = core.batches(Pairs(), batch_size=16 // core.world_size, shuffle=True, drop_last=True)
    valid = core.batches(Pairs(37), batch_size=8)
    history = fit(core, model, optimizer, MSE, batches, valid, epochs=epochs, checkpoints=folder)
    rows = [[row["train_loss"], row["valid_loss"]] for row in history.epochs]
    found = evaluate(core, model, MSE, valid)
    answers = predict(core, model, valid)
    return rows, core.to_host(model.state_dict()), found.loss, found.outputs, answers


@pytest.mark.parametrize("cores", [1, 4])
def test_fit_evaluate_and_predict_are_those_of_the_cpu_backend_and_all_ranks_agree(cores):
    found, expected = on_chips(train, cores=cores).results, on("cpu", train, cores=cores).results
    for rows, state, loss, outputs, answers in found:
        torch.testing.assert_close(
            torch.tensor(rows), torch.tensor(expected[0][0]), atol=1e-5, rtol=1e-5
        )
        for name, value in expected[0][1].items():  # BatchNorm's statistics among them
            torch.testing.assert_close(state[name], value, atol=1e-4, rtol=1e-4)
        assert loss == pytest.approx(expected[0][2], abs=1e-5)
        torch.testing.assert_close(outputs, answers, atol=1e-6, rtol=0)
        assert all(torch.equal(state[name], found[0][1][name]) for name in state)
        assert rows == found[0][0]


def test_a_compiled_model_has_the_losses_of_an_eager_one():
    def work(core):
        losses = []
        for compiled in (False, True):
            torch.set_float32_matmul_precision("highest")
            model = core.model(small_net(True))
            run = torch.compile(model) if compiled else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for images, targets in core.batches(Pairs(), batch_size=16, drop_last=True):
                with core.step():
                    loss = MSE(run(images), targets)
                    loss.backward()
                    core.optimizer_step(optimizer)
                losses.append(loss.item())
            losses.append(model[1].running_var.sum().item())
        return losses[:5], losses[5:]

    ((eager, compiled),) = on_chips(work).results
    assert eager == pytest.approx(compiled, abs=1e-5)


def test_attention_runs_in_a_dry_run_although_torchtpus_kernel_needs_a_chip():
    def work(core):
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest")
        model = core.model(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
        outputs = model(torch.randn(2, 5, 8).to(core.device))
        outputs.square().sum().backward()
        return outputs, model.self_attn.in_proj_weight.grad

    (found,), (expected,) = on_chips(work).results, on("cpu", work).results
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def raises(core):
    core.mean(core.rank)
    if core.rank == 1:
        raise KeyError("labels")
    core.barrier()


def is_killed(core):
    core.mean(core.rank)
    if core.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    core.barrier()


def differs(core):
    torch.manual_seed(core.rank)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).to(core.device)
    batches = core.batches(Pairs(), batch_size=8, shuffle=True)
    fit(core, model, torch.optim.SGD(model.parameters(), lr=0.01), MSE, batches)


FAILURES = {
    "an exception": (raises, "core 1 of 2 raised KeyError: 'labels'"),
    "a killed core": (is_killed, "core 1 of 2 was killed by SIGKILL"),
    "models of each core's own": (differs, "the cores hold different weights"),
}


@pytest.mark.parametrize(("work", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_named(work, message):
    with pytest.raises(WorkerError, match=message):
        on_chips(work, cores=2)


def test_an_interrupt_ends_the_run_and_the_next_launch_works():
    def work(core):
        core.mean(core.rank)
        if core.is_main:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(900)

    with pytest.raises(tpukit.LaunchInterrupted):
        on_chips(work, cores=2)
    assert on_chips(lambda core: core.mean(core.rank), cores=2).results == [0.5, 0.5]


def keeps(core, count):
    """Train a model that is kept from run to run, and return its losses and the process."""
    state = core.state
    if not hasattr(state, "model"):
        torch.set_float32_matmul_precision("highest")
        torch.manual_seed(0)
        state.model = core.model(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1)))
        state.optimizer = torch.optim.Adam(state.model.parameters(), lr=0.01)
        (state.inputs,) = core.to_device([torch.arange(8.0).reshape(2, 4) / 8 + core.rank])
    losses = []
    for _ in range(count):
        with core.step():
            loss = MSE(state.model(state.inputs), state.inputs[:, :1])
            loss.backward()
            core.optimizer_step(state.optimizer)
        losses.append(loss.detach())
    return [loss.item().hex() for loss in core.to_host(losses)], os.getpid()


def kept_weights(core):
    return [weight.tolist() for weight in core.to_host(list(core.state.model.parameters()))]


def fails_everywhere(core):
    keeps(core, 1)
    raise ValueError("all")


def trains_for_ever(core):
    core.log(loss=0)
    while True:
        keeps(core, 1)


def test_a_session_keeps_its_state_over_runs_an_exception_and_an_interrupt(monkeypatch):
    monkeypatch.setattr("tpukit.essentials.launcher.session._PROMPT_SECONDS", 60.0)
    launched = on_chips(keeps, 6, cores=2).results
    begun = threading.Event()
    with tpukit.Session(2, "torch_tpu:simulator", progress="off", seed=1) as session:
        runs = [session.run(keeps, 2, progress="off").results for _ in range(3)]
        for rank in range(2):
            losses, processes = zip(*(run[rank] for run in runs), strict=True)
            assert sum(losses, []) == launched[rank][0]
            assert len(set(processes)) == 1
        with pytest.raises(WorkerError, match="raised ValueError(.|\n)*the session goes on"):
            session.run(fails_everywhere, progress="off")
        interrupt_when(begun.is_set, later=0.3)
        with pytest.raises(tpukit.LaunchInterrupted, match="the session goes on"):
            session.run(trains_for_ever, progress="off", loggers=lambda row: begun.set())
        first, second = session.run(kept_weights, progress="off").results
        assert first == second  # both stopped after the same step
        assert session.run(keeps, 1, progress="off").results[1][1] == processes[0]
        # A core cannot leave a collective of tpu_dist without the others, and must not hang.
        monkeypatch.setattr("tpukit.essentials.launcher.session._PROMPT_SECONDS", 3.0)
        with pytest.raises(WorkerError, match="core 1 of 2 raised KeyError"):
            session.run(raises, progress="off")
    assert children() == []


class Bytes(Pairs):
    def __getitem__(self, index):
        image, targets = super().__getitem__(index)
        return (image * 60 + 125).clamp(0, 255).to(torch.uint8), targets


def train_until(core, folder, ends=None, batch=0):
    torch.set_float32_matmul_precision("highest")
    model = core.model(nn.Sequential(small_net(True), nn.Dropout(0.3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = core.batches(Bytes(), batch_size=8, shuffle=True, drop_last=True, workers=2)
    valid, trained = core.batches(Bytes(37), batch_size=8), itertools.count(1)

    def prepare(images):
        if ends and core.rank == 1 and model.training and next(trained) == batch:
            os.kill(os.getpid() if ends == signal.SIGKILL else os.getppid(), ends)
            time.sleep(900)
        return images.float() / 255

    history = fit(
        core,
        model,
        optimizer,
        MSE,
        batches,
        valid,
        epochs=3,
        augment=tpukit.Augment(flip=0.5),
        preprocess=prepare,
        checkpoints=tpukit.Checkpoints(folder, save_every=0),
        options=tpukit.FitOptions(log_every=1),
    )
    rows = [[row["train_loss"], row["valid_loss"]] for row in history.epochs]
    return history.resumed, rows, core.to_host(model.state_dict())


def test_killed_in_an_epoch_and_interrupted_in_the_next_it_ends_as_a_run_that_never_was(tmp_path):
    """With worker processes, `Augment` and dropout, to the bit."""
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        on_chips(train_until, tmp_path / "run", signal.SIGKILL, 8, cores=2)
    with pytest.raises(tpukit.LaunchInterrupted):
        on_chips(train_until, tmp_path / "run", signal.SIGINT, 4, cores=2)
    (resumed, rows, state), _ = on_chips(train_until, tmp_path / "run", cores=2).results
    (_, its_rows, its_state), _ = on_chips(train_until, tmp_path / "once", cores=2).results
    assert 8 < int(resumed.split("-")[1].partition(".")[0]) < 12  # within the third epoch
    assert rows == its_rows
    assert all(torch.equal(state[name], its_state[name]) for name in its_state)


def test_a_second_session_compiles_little_where_what_was_compiled_is_kept(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("SIMULATOR_LOG", "1")
    compiles = []
    for session in (
        "one",
        "two",
    ):  # what the processes of a host share in memory does not outlive a restart of it
        monkeypatch.setenv("TORCH_TPU_TIER2_COMPILATION_CACHE", f"tpukit-{os.getpid()}-{session}")
        on_chips(train, None, 1, compile_cache=tmp_path)
        compiles.append(len(re.findall("compiled a program", "".join(capfd.readouterr()))))
    assert compiles[0] > 3 * compiles[1], compiles


CROSSING = """
import json, os, sys
import torch, tpukit
from simulator.test_torch_tpu_runtime import train
folder, backend, epochs = sys.argv[1:]
rows = tpukit.launch(train, folder, int(epochs), backend=backend, cores=2, progress="off", seed=1).results[0][0]
print(json.dumps(rows))
"""


def test_a_checkpoint_goes_from_torch_xla_to_torchtpu_and_back(tmp_path):
    """With TORCH_XLA_PYTHON, a Python that has torch_xla; without it the CPU backend writes and reads."""
    other = os.environ.get("TORCH_XLA_PYTHON")
    theirs = (other, "xla:simulator") if other else (sys.executable, "cpu")
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    rows = []
    for epochs, (python, backend) in enumerate(
        [theirs, (sys.executable, "torch_tpu:simulator"), theirs], 1
    ):
        command = [
            python,
            "-W",
            "ignore",
            "-c",
            CROSSING,
            str(tmp_path / "run"),
            backend,
            str(epochs),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environ, check=False, timeout=900
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        assert epochs == 1 or "resumed from step-" in done.stdout
        rows = json.loads(done.stdout.splitlines()[-1])
    expected = on("cpu", train, None, 3, cores=2).results[0][0]
    (losses, valid), (its_losses, its_valid) = torch.tensor(rows).T, torch.tensor(expected).T
    torch.testing.assert_close(losses, its_losses, atol=1e-4, rtol=1e-4)
    # torch_xla's running variance of images is of n samples: its epochs validate with a little less.
    torch.testing.assert_close(valid, its_valid, atol=0, rtol=5e-3)


def test_the_simulator_shows_its_chips_where_torch_tpu_looks_for_them():
    def work(core):
        from torch_tpu._internal.utils import hardware

        show_chips(4)
        return (
            hardware.get_tpu_device_count(),
            hardware.get_tpu_topology(2),
            hardware.get_tpu_device_name(),
        )

    assert on_chips(work).results == [(4, "1,2,1", "TPU v4")]
