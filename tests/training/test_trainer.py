import contextlib
import json
import math
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pandas
import psutil
import pytest
import torch
from helpers.fit_arguments import grouped
from helpers.launching import DRY_RUNS, quietly
from helpers.sources import Pixels
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tpukit
from tpukit import FitOptions, WorkerError, evaluate, fit
from tpukit.training import History
from tpukit.training.history import steady_mean

ENDS = ["lr", "samples_per_second", "tflops_per_second", "seconds"]  # the last columns of an epoch
XLA_ONCE_MORE = [pytest.mark.xla, pytest.mark.only_soak]


class Dots:
    """A set of images (3, 8, 8) whose two labels can be learned; some may be spoiled."""

    def __init__(self, count=96, spoiled=()):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(count, 3, 8, 8, generator=generator)
        self.labels = torch.stack(
            [self.images[:, c].mean(dim=(1, 2)) > 0 for c in range(2)], 1
        ).float()
        for index in spoiled:
            self.labels[index] = math.nan

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def net(norm=True, dropout=0.2):
    torch.manual_seed(1)
    middle = nn.BatchNorm2d(4) if norm else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), middle, nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(144, 2)
    )


LOSS = nn.BCEWithLogitsLoss()


def train(core, make=net, batch_size=4, lr=0.01, data=None, valid=None, decay=None, **options):
    """Fit a small net with all that has a state: momentum, a schedule, dropout, BatchNorm, a moving average."""
    model = core.model(make())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) if decay else None
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    batches = core.batches(data or Dots(), batch_size=batch_size, shuffle=True, drop_last=True)
    valid = core.batches(valid, batch_size=batch_size) if valid else None
    options = {
        "epochs": 2,
        "log_every": 3,
        "scheduler": schedule,
        "averaged_model": average,
        **options,
    }
    history = fit(core, model, optimizer, LOSS, batches, valid, **grouped(options))
    state = {"model": model.state_dict(), "average": average.state_dict() if average else None}
    return {"state": state, "optimizer": optimizer.state_dict(), "history": history}


def same(first, second):
    """Return whether two results hold the same bits: weights, buffers, averages, optimiser, and what was logged."""
    parts, others = torch.utils._pytree.tree_leaves, []
    for result in (first, second):
        history = result["history"]
        clock = {"seconds": 0, "samples_per_second": 0, "tflops_per_second": 0}
        rows = [{**row, **clock} for row in history.epochs]
        rows += [
            {name: row[name] for name in ("step", "epoch", "train_loss", "lr")}
            for row in history.intervals
        ]
        others.append([parts(result["state"]), parts(result["optimizer"]), parts(rows)])
    pairs = [
        pair for one, other in zip(*others, strict=True) for pair in zip(one, other, strict=True)
    ]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_it_learns_and_all_cores_hold_the_same_model_after_it(backend, tmp_path):
    def work(core):
        return train(
            core,
            valid=Dots(19),
            epochs=4,
            folder=tmp_path,
            metrics={"wrong": lambda o, t: ((o > 0) != t).float().mean()},
        )

    results = quietly(work, backend=backend).results
    history = results[0]["history"]
    assert history.epochs[-1]["train_loss"] < 0.8 * history.epochs[0]["train_loss"]
    assert same(*results)
    assert [row["epoch"] for row in history.epochs] == [1, 2, 3, 4]
    assert history.epochs[0].keys() == {
        "epoch",
        "step",
        "train_loss",
        "valid_loss",
        "valid_wrong",
        *ENDS,
    }
    assert history.best["valid_loss"] == min(row["valid_loss"] for row in history.epochs)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best.keys() == net().state_dict().keys()


def test_the_learning_rate_of_a_row_is_that_of_its_last_step():
    """A schedule is stepped after the step, so the optimiser then holds the rate of the next one."""

    def work(core, every, count):
        model = core.model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, count, 0.5)
        batches = core.batches(Dots(), batch_size=16, shuffle=True, drop_last=True)
        valid = core.batches(Dots(19), batch_size=16)
        options = FitOptions(log_every=2, scheduler_interval=every)
        return fit(
            core,
            model,
            optimizer,
            LOSS,
            batches,
            valid,
            epochs=3,
            scheduler=schedule,
            options=options,
        )

    for every, count in [("step", 3), ("epoch", 1)]:  # an epoch of two cores has 3 steps
        history = quietly(work, every, count).results[0]
        assert [row["lr"] for row in history.epochs] == [1.0, 0.5, 0.25], every
        assert [(row["step"], row["lr"]) for row in history.intervals] == [
            (2, 1.0), (3, 1.0), (5, 0.5), (6, 0.5), (8, 0.25), (9, 0.25)
        ]  # fmt: skip


def test_one_run_has_one_rate_of_all_cores_together():
    def work(core):
        slow = {"preprocess": lambda images: time.sleep(0.02) or images}
        return train(core, epochs=3, valid=Dots(64), **slow)["history"]

    history = quietly(work).results[0]
    seconds = sum(row["seconds"] for row in history.intervals)
    assert history.samples_per_second == pytest.approx(3 * 96 / seconds)
    assert (
        history.samples_per_second < 8 / 0.02
    )  # 8 samples of two cores in 20 ms, and more is not possible
    assert f"{history.samples_per_second:,.0f} images/s on 2 cores" in repr(history)
    for row in history.epochs:
        seconds = sum(
            part["seconds"] for part in history.intervals if part["epoch"] == row["epoch"]
        )
        assert row["samples_per_second"] == pytest.approx(96 / seconds)
        assert row["seconds"] > seconds  # with the evaluation, in which nothing is trained


def test_an_interval_that_is_shorter_than_a_tick_of_the_clock_has_a_rate():
    def work(core):
        # On Windows, time.monotonic() of Python 3.11 and 3.12 changes every 16 ms; here, every 1,000 s.
        slow = types.SimpleNamespace(
            **vars(time) | {"monotonic": lambda: time.monotonic() // 1e3 * 1e3}
        )
        modules = tpukit.training.trainer, tpukit.training.epoch_time
        with contextlib.ExitStack() as patched:
            for module in modules:
                patched.enter_context(mock.patch.object(module, "time", slow))
            return train(core, epochs=1)["history"]

    history = quietly(work, cores=1).results[0]
    assert history.samples_per_second > 0
    assert 0 <= history.intervals[0]["data_wait"] <= 1
    assert tpukit.training.show_time(history).axes


def test_what_compiling_takes_is_not_in_the_rate_where_there_is_more():
    first = {"seconds": 50.0, "samples_per_second": 2.0, "compiles": 2}
    later = {"seconds": 1.0, "samples_per_second": 100.0, "compiles": 2}
    slow = {"seconds": 3.0, "samples_per_second": 20.0, "compiles": 2}
    assert History(intervals=[first]).samples_per_second == 2
    assert History(intervals=[first, later, slow]).samples_per_second == (100 + 60) / 4
    resumed = {**first, "compiles": 1}  # a new process, which compiles again
    assert History(intervals=[first, later, slow, resumed]).samples_per_second == (100 + 60) / 4
    assert math.isnan(History().samples_per_second)


def test_the_rate_of_a_later_epoch_has_all_its_intervals_if_no_graph_was_compiled_in_it():
    first = {"epoch": 1, "seconds": 50.0, "samples_per_second": 2.0, "compiles": 2}
    later = {"epoch": 2, "seconds": 3.0, "samples_per_second": 100.0, "compiles": 2}
    short = {"epoch": 2, "seconds": 1.0, "samples_per_second": 20.0, "compiles": 2}
    rows = [first, later, short]
    assert steady_mean(rows, "samples_per_second", epoch=2) == (300 + 20) / 4
    assert steady_mean(rows, "samples_per_second", epoch=1) == 2


@pytest.mark.xla
def test_the_step_that_a_resumed_run_compiles_again_is_counted_and_not_in_its_rate(tmp_path):
    def work(core, epochs):
        options = {"log_every": 6, "checkpoints": tmp_path / "run"}
        return train(core, make=lambda: net(norm=False), epochs=epochs, **options)["history"]

    quietly(work, 1, cores=1, backend="xla:cpu")
    history = quietly(work, 2, cores=1, backend="xla:cpu").results[0]
    assert history.resumed
    assert [row["compiles"] for row in history.intervals] == [1, 1, 1, 1, 2, 2, 2, 2]
    steady = [
        {**row, "compiles": 0} for place, row in enumerate(history.intervals) if place not in (0, 4)
    ]
    assert history.samples_per_second == History(intervals=steady).samples_per_second


def test_the_search_for_the_best_epoch_starts_anew_with_augmentation_even_if_its_first_is_nan():
    scores = iter([0.0, 0.9, math.nan, 0.5])  # the first is that of the trial before epoch 1

    def work(core):
        return train(
            core,
            epochs=3,
            valid=Dots(8),
            metrics={"score": lambda outputs, targets: next(scores)},
            monitor="valid_score",
            mode="max",
            augment=lambda images, labels: (images, labels),
            augment_from=2,
        )["history"]

    assert quietly(work, cores=1).results[0].best["epoch"] == 3


def test_best_weights_that_are_missing_are_named_with_the_fix(tmp_path):
    def work(core, restore):
        options = {"restore_best_weights": restore, "checkpoints": tmp_path / "run"}
        return train(core, epochs=1, **options)["history"]

    quietly(work, True, cores=1)
    (tmp_path / "run/best.pt").unlink()
    with pytest.raises(WorkerError, match=r"best\.pt is missing, and .* epoch 1") as error:
        quietly(work, True, cores=1)
    assert "restore_best_weights=False" in error.value.fix
    assert quietly(work, False, cores=1).results[0].resumed


def test_a_finished_run_that_is_started_again_has_its_unit_and_its_number_of_cores(tmp_path):
    def work(core, epochs):
        return train(core, epochs=epochs, checkpoints=tmp_path / "run")["history"]

    runs = [(1, 2), (1, 1), (2, 1)]  # epochs and cores: trained, over, and trained on
    first, again, more = (quietly(work, epochs, cores=cores).results[0] for epochs, cores in runs)
    assert again.resumed
    assert (first.of, again.of) == ("images", "images")
    assert (first.cores, again.cores, more.cores) == (2, 2, 1)
    assert "images/s on 2 cores" in repr(again)


def test_one_core_with_twice_the_batch_gives_the_curve_of_two():
    def work(core, batch_size):
        return train(
            core, make=lambda: net(norm=False, dropout=0), batch_size=batch_size, epochs=3
        )["history"]

    one = quietly(work, 8, cores=1).results[0]
    two = quietly(work, 4, cores=2).results[0]
    losses = [[row["train_loss"] for row in history.intervals] for history in (one, two)]
    assert len(losses[0]) == 12
    assert np.allclose(*losses, rtol=0.01)


def test_accumulated_batches_are_one_large_batch():
    def work(core, batch_size, accumulate):
        make = lambda: net(norm=False, dropout=0)  # noqa: E731
        return train(
            core,
            make=make,
            batch_size=batch_size,
            accumulate_grad_batches=accumulate,
            max_grad_norm=0.5,
        )

    large, small = (quietly(work, *sizes, cores=1).results[0] for sizes in [(8, 1), (4, 2)])
    assert small["history"].intervals[-1]["step"] == large["history"].intervals[-1]["step"]
    for name, value in large["state"]["model"].items():
        assert torch.allclose(value, small["state"]["model"][name], atol=1e-6)


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_bfloat16_gives_nearly_the_same_curve_and_leaves_the_rest_float32(backend):
    seen = set()

    class Net(nn.Sequential):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            seen.add(outputs.dtype)
            return outputs

    def work(core, bf16):
        result = train(core, make=lambda: Net(*net(dropout=0)), bf16=bf16, epochs=3)
        return result, seen

    full, half = (
        quietly(work, bf16, backend=backend, cores=1).results[0] for bf16 in (False, True)
    )
    assert (full[1], half[1]) == ({torch.float32}, {torch.bfloat16})
    losses = [
        [row["train_loss"] for row in result["history"].intervals] for result, _ in (full, half)
    ]
    assert losses[0] != losses[1]
    assert np.allclose(*losses, rtol=0.02)
    for part in (half[0]["state"], half[0]["optimizer"]):
        floats = [
            t
            for t in torch.utils._pytree.tree_leaves(part)
            if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
        assert {t.dtype for t in floats} == {torch.float32}


def test_augment_and_preprocess_see_what_they_are_for():
    def work(core):
        seen = []
        train(
            core,
            valid=Dots(4),
            epochs=1,
            steps_per_epoch=1,
            preprocess=lambda images: seen.append("preprocess") or images,
            augment=lambda images, labels: seen.append("augment") or (images, labels),
        )
        return seen

    assert quietly(work, cores=1).results[0] == [
        "preprocess",
        "augment",
        "preprocess",
        "preprocess",
    ]  # first a trial


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_the_average_is_evaluated_and_kept_in_place_of_the_model(backend, tmp_path):
    def work(core):
        found = train(core, valid=Dots(19), epochs=1, folder=tmp_path, decay=0.9)
        averaged = core.model(net())
        averaged.load_state_dict(weights(found))
        found_again = evaluate(core, averaged, LOSS, core.batches(Dots(19), batch_size=4))
        return found, found_again.loss

    def weights(found):
        prefix = "module."
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in found["state"]["average"].items()
            if name.startswith(prefix)
        }

    (first, loss), (second, _) = quietly(work, backend=backend).results
    kept = torch.load(tmp_path / "best.pt", weights_only=True)
    assert same(first, second)
    assert kept.keys() == weights(first).keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights(first).items())
    assert not torch.allclose(kept["0.weight"], first["state"]["model"]["0.weight"], atol=1e-3)
    assert first["history"].epochs[0]["valid_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.xla
@pytest.mark.parametrize(("count", "decay"), [(40, None), (56, 0.9)])
def test_no_copy_to_the_host_between_log_points_and_as_few_graphs_as_can_be(count, decay):
    def work(core):
        import torch_xla.debug.metrics as met

        def seen():
            return [
                (met.metric_data(name) or [0])[0]
                for name in ("TransferFromDeviceTime", "CompileTime")
            ]

        copies = []

        def note(inputs):
            copies.append(seen())
            return inputs

        train(
            core,
            epochs=2,
            steps_per_epoch=20,
            log_every=20,
            preprocess=note,
            data=Dots(96),
            decay=decay,
            replay=False,
        )
        before = seen()
        model = core.model(net())
        for size in (count, count + 3):
            evaluate(core, model, LOSS, core.batches(Dots(size), batch_size=4))
        return copies, before, seen()

    copies, before, after = quietly(work, cores=1, backend="xla:cpu").results[0]
    transfers = [there - here for (here, _), (there, _) in zip(copies, copies[1:], strict=False)]
    assert (
        sum(transfers) == 2 == transfers[19]
    )  # between the epochs: what is logged, and a first look at statistics
    # One graph of all steps; with an average of the weights, the first step copies them instead.
    assert before[1] - copies[0][1] == (2 if decay else 1)
    assert after[1] - before[1] <= 2  # evaluation's; the mean of the buffers


@pytest.mark.xla
@pytest.mark.parametrize("data", [Dots(40), Pixels(40)], ids=["floats", "bytes of a source"])
@pytest.mark.parametrize("backend", ["xla:cpu", "xla:simulator"])
def test_fit_with_adam_compiles_one_graph_for_training_and_one_for_evaluation(data, backend):

    def work(core):
        width = 3 * data[0][0].shape[-1] ** 2 if isinstance(data, Dots) else 12
        layers = [nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(width, len(data.labels[0]))]
        model = core.model(nn.Sequential(*layers))
        optimizer = torch.optim.Adam(model.parameters())
        train = core.batches(data, batch_size=4, shuffle=True, drop_last=True)
        valid = core.batches(data, batch_size=4)
        options = {"epochs": 3, "preprocess": torch.Tensor.float}
        before = core.backend.compiles()[0]
        fit(core, model, optimizer, LOSS, train, **options)
        for_training = core.backend.compiles()[0] - before
        evaluate(core, model, LOSS, valid, preprocess=torch.Tensor.float)
        evaluated = core.backend.compiles()[0] - before - for_training
        model = core.model(nn.Sequential(*layers))
        optimizer = torch.optim.Adam(model.parameters())
        before = core.backend.compiles()[0]
        fit(core, model, optimizer, LOSS, train, valid, **options)
        return for_training, evaluated, core.backend.compiles()[0] - before

    assert quietly(work, cores=1, backend=backend).results[0] == (1, 1, 0)


@pytest.mark.xla
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.Adam, {}, [1, 1, 1, 1]),
        (torch.optim.AdamW, {}, [1, 1, 1, 1]),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, [1, 2, 2, 2]),
    ],
    ids=["Adam", "AdamW", "SGD with momentum"],
)
@pytest.mark.parametrize("backend", ["xla:cpu", "xla:simulator"])
def test_a_launch_compiles_one_graph_for_training_or_two_if_step_1_makes_the_optimizers_state(
    backend, kind, options, expected, accumulated
):
    """The count begins with the process, so nothing is compiled to move the model either.

    A model with BatchNorm needs a graph for its counter, because torch_xla sends no scalar 0.
    """

    def work(core):
        model = core.model(net(norm=False))
        data = core.batches(Dots(4 * 4 * accumulated), batch_size=4, shuffle=True)
        history = fit(
            core,
            model,
            kind(model.parameters(), **options),
            LOSS,
            data,
            accumulate_grad_batches=accumulated,
            options=FitOptions(log_every=1),
        )
        return [row["compiles"] for row in history.intervals]

    assert quietly(work, cores=1, backend=backend).results[0] == expected


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("xla:cpu", marks=XLA_ONCE_MORE)])
def test_loss_and_auroc_are_scikit_learns_over_any_number_of_cores(backend, cores):
    from torchmetrics.classification import MultilabelAUROC

    data = Dots(37)

    def work(core):
        model = core.model(net())
        return evaluate(
            core,
            model,
            LOSS,
            core.batches(data, batch_size=4),
            metrics={"auroc": MultilabelAUROC(num_labels=2)},
        )

    for found in quietly(work, cores=cores, backend=backend).results:
        expected = net().eval()(data.images).detach()
        assert torch.equal(found.targets, data.labels)
        assert torch.allclose(found.outputs, expected, atol=1e-5)
        auroc = roc_auc_score(data.labels.numpy(), found.outputs.numpy())
        assert abs(found.loss - LOSS(expected, data.labels).item()) < 1e-6
        assert abs(found.metrics["auroc"] - auroc) < 1e-6


@pytest.mark.soak
@pytest.mark.parametrize(
    ("backend", "few", "many"), [("cpu", 3, 20), pytest.param("xla:cpu", 2, 4, marks=XLA_ONCE_MORE)]
)
def test_killed_at_random_moments_it_ends_as_if_nothing_had_happened(
    backend, few, many, tmp_path, how_often
):
    """Core 0, which writes the checkpoints, is killed; each log point saves, so some moments are within a save."""
    steps, times = (
        mmap.mmap(-1, 8),
        how_often(few, many),
    )  # steps of core 0 since its start, seen by the kernel

    def work(core, folder):
        def counted(inputs, labels):
            if core.is_main:
                steps[:] = struct.pack("q", struct.unpack("q", steps)[0] + 1)
            return inputs, labels

        options = {"decay": 0.9, "save_every": 0, "augment": counted}
        return train(core, valid=Dots(10), epochs=3, folder=folder, lr=0.02, **options)

    def kill(after_steps, seconds):
        before = set(psutil.Process().children())
        while struct.unpack("q", steps)[0] < after_steps:
            time.sleep(0.001)
        time.sleep(seconds)
        first = min(
            set(psutil.Process().children()) - before, key=lambda child: child.pid, default=None
        )
        if first and first.name() != "":
            first.kill()

    undisturbed = quietly(work, tmp_path / "once", backend=backend).results[0]
    generator, killed, result = random.Random(5), 0, None
    for attempt in range(5 * times):
        if attempt == 0 or result:
            folder = tmp_path / f"after-{killed}"
        steps[:] = bytes(8)
        killer = threading.Thread(
            target=kill, args=(generator.randint(1, 14), generator.uniform(0, 0.03))
        )
        killer.start()
        try:
            result = quietly(work, folder, backend=backend).results[0]
            assert same(undisturbed, result)
        except WorkerError as failure:
            assert "was killed by SIGKILL" in str(failure)  # noqa: PT017
            killed, result = killed + 1, None
        steps[:] = struct.pack("q", 99)
        killer.join()
        if killed >= times and result:
            break
    assert killed >= times


def test_on_another_number_of_cores_it_goes_on_with_the_samples_that_are_left(tmp_path):
    seen = []

    class Noting(Dots):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    def work(core, **options):
        train(core, data=Noting(), epochs=1, folder=tmp_path, save_every=0, batch_size=4, **options)
        return seen

    def cut_short(core):
        def after_six(inputs, labels):
            if len(seen) > 24:
                raise KeyError
            return inputs, labels

        return work(core, augment=after_six)

    with pytest.raises(WorkerError):
        quietly(cut_short)
    later = [index for samples in quietly(work, cores=3).results for index in samples]
    order = np.random.default_rng((0, 0)).permutation(96)
    assert sorted(later) == sorted(order[48:])  # six steps of eight were saved


@pytest.mark.parametrize("backend", ["cpu", pytest.param("xla:cpu", marks=XLA_ONCE_MORE)])
def test_when_the_time_is_up_it_saves_and_a_second_call_finishes(backend, tmp_path):
    def work(core, folder, max_time=None, pause=0.0):
        def slowly(inputs, labels):
            time.sleep(pause)
            return inputs, labels

        return train(core, folder=folder, max_time=max_time, augment=slowly, epochs=2)

    once = quietly(work, tmp_path / "once", backend=backend).results[0]
    part = quietly(work, tmp_path / "twice", 2.5, 0.25, backend=backend).results[0]["history"]
    assert "the time is up after" in part.stopped
    again = quietly(work, tmp_path / "twice", backend=backend).results[0]
    assert again["history"].stopped is None
    assert again["history"].resumed
    assert same(once, again)


def script(folder, pause=0.05, pause_after_step=0.0):
    return textwrap.dedent(f"""
        import sys, time, torch
        sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
        from training.test_trainer import train
        import tpukit
        def work(core):
            seen = []
            def wait(seconds):  # after the first epoch longer: however late the signal comes, it is not in the third
                time.sleep(seconds * (6 if len(seen) > 13 else 1))
            def slowly(inputs, labels):
                seen.append(1)
                wait({pause})
                return inputs, labels
            class Slow(torch.optim.lr_scheduler.StepLR):
                def step(self):
                    super().step()
                    wait({pause_after_step} * core.rank)
            torch.optim.lr_scheduler.StepLR = Slow
            return train(core, folder={str(folder)!r}, epochs=20, augment=slowly)["history"].resumed
        print(tpukit.launch(work, cores=2, progress="text").results[0])
    """)


# With the pause after each step of core 1, SIGTERM reaches core 0 one step later than core 1.
@pytest.mark.parametrize(
    ("number", "pause_after_step"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGTERM, 0.1)]
)
def test_a_platform_that_ends_it_and_a_reader_who_interrupts_it_find_it_saved(
    number, pause_after_step, tmp_path
):
    process = subprocess.Popen(
        [sys.executable, "-c", script(tmp_path, 0.05 - pause_after_step / 2, pause_after_step)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    for line in process.stdout:
        if line.startswith(
            "epoch 1: train_loss"
        ):  # on a busy machine a line of progress says "epoch 1", too
            break
    workers = psutil.Process(process.pid).children()
    process.send_signal(number)
    out, _ = process.communicate(timeout=600)
    assert "run this again to continue from there" in out
    assert (
        process.returncode != 0
        if number == signal.SIGINT
        else process.returncode == -signal.SIGTERM
    )
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)
    before, saved = sorted(tmp_path.glob("step-*.pt"))
    assert int(before.name[5:13]) == 12 < int(saved.name[5:13]) < 24


class Pair(nn.Module):
    def forward(self, outputs, targets):
        return ((outputs - targets) ** 2).mean(dim=0)


@pytest.mark.parametrize("cores", [1, 2])
def test_a_label_that_is_no_number_is_named(cores, tmp_path):
    def work(core):
        return train(core, data=Dots(96, spoiled=[41]), folder=tmp_path)

    with pytest.raises(WorkerError) as failure:
        quietly(work, cores=cores)
    text = str(failure.value)
    order = np.random.default_rng((0, 0)).permutation(96).tolist()
    step = order.index(41) // (4 * cores) + 1
    rank = order.index(41) % (4 * cores) // 4
    assert (
        f"core {rank} of {cores} raised NonFiniteLossError: the loss is nan at step {step} on core {rank}"
        in text
    )
    message = text.partition("its traceback:")[0]
    assert "\n  found: sample 41 holds nan or infinity" in message
    assert message.count("fix:") == 1
    assert ("last checkpoint: none" in text) == (not list(tmp_path.glob("step-*")))


def test_a_learning_rate_that_explodes_is_told_from_bad_samples():
    with pytest.raises(WorkerError, match="none of its samples, .*, holds nan or infinity itself"):
        quietly(
            lambda core: train(
                core, make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), lr=1e37
            ),
            cores=1,
        )


def other(core, folder):
    return train(core, make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), folder=folder)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            lambda core: fit(core, nn.Flatten(), None, LOSS, core.batches(Dots(), batch_size=4)),
            "no parameters to train",
        ),
        (lambda core: train(core, epochs=0), "epochs must be at least 1, got 0"),
        (
            lambda core: train(core, accumulate_grad_batches=99),
            "an epoch has 12 batches, which is less than accumulate_grad_batches=99",
        ),
        (lambda core: train(core, max_time="soon"), "a time is written"),
        (
            lambda core: train(core, valid=Dots(8), monitor="auroc"),
            "monitor must be a column of the history, got 'auroc'",
        ),
        (
            lambda core: evaluate(
                core, core.model(net()), LOSS, core.batches(Dots(), batch_size=4, shuffle=True)
            ),
            "evaluate needs every sample once, in order",
        ),
        (
            lambda core: train(core, valid=Dots(8), metrics={"each": lambda o, t: o.mean(0)}),
            r"each must return one number, got a Tensor \(2,\)",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_fix(work, message):
    with pytest.raises(WorkerError, match=message) as failure:
        quietly(work)
    assert "fix:" in str(failure.value)


def test_a_loss_that_is_no_number_is_refused_and_the_fix_works():
    def work(core, loss):
        model = core.model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return fit(core, model, optimizer, loss, core.batches(Dots(), batch_size=4, shuffle=True))

    with pytest.raises(WorkerError, match=r"the loss must return one number, got Tensor \(2,\)"):
        quietly(work, Pair())
    assert quietly(work, lambda o, t: Pair()(o, t).mean()).results[0].epochs


def test_checkpoints_of_another_network_are_refused_and_nothing_is_lost(tmp_path):
    quietly(lambda core: train(core, folder=tmp_path))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(WorkerError, match="holds another architecture than the model") as failure:
        quietly(other, tmp_path)
    text = str(failure.value)
    assert 'found: Unexpected key(s) in state_dict: "5.weight", "5.bias", "0.weight"' in text
    assert "size mismatch for 1.bias: copying a param with shape torch.Size([4])" in text
    assert (
        "build the model as it was when the checkpoint was saved, or give this run another folder"
        in text
    )
    with pytest.raises(WorkerError, match="resume=False, and .* holds checkpoints up to step 24"):
        quietly(lambda core: train(core, folder=tmp_path, resume=False))
    assert sorted(tmp_path.iterdir()) == before
    quietly(other, tmp_path / "another")  # the fix


def test_the_history_prints_draws_and_is_a_table(tmp_path):
    history = quietly(lambda core: train(core, valid=Dots(8))["history"]).results[0]
    names, first, *_ = repr(history).splitlines()
    assert (
        names.split()
        == ["epoch", "step", "train_loss", "valid_loss", *ENDS]
        == list(history.epochs[0])
    )
    assert first.split()[:3] == ["1", "12", f"{history.epochs[0]['train_loss']:.4f}"]
    for text in (repr(history), history._repr_html_()):
        assert f"best: epoch {history.best['epoch']}, by valid_loss" in text
        assert f"{history.samples_per_second:,.0f} images/s on 2 cores" in text
    assert repr(History()) == "History: no steps yet"
    assert list(pandas.DataFrame(history.epochs)["epoch"]) == [1, 2]
    tpukit.show_history(history).savefig(tmp_path / "history.png")
    assert json.dumps(history.rows)
