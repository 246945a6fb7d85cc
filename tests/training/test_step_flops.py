"""TFLOP/s and MFU of `fit`: of training alone, and without a change of a result."""

import contextlib
import functools
import json
import math

import pytest
import torch
from helpers.launching import DRY_RUNS, quietly
from torch import nn

import tpukit
from tpukit import FitOptions, evaluate, fit
from tpukit.training import History, show_history

FEATURES = 16
BATCH = 4
OF_A_SAMPLE = 3 * 2 * (FEATURES * 8 + 8)  # forward and backward


class Pairs(torch.utils.data.Dataset):
    def __init__(self, count=48):
        self.inputs = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index, :1]


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))


class Log:
    """The lines and the rows of core 0."""

    def __init__(self, core):
        self.lines = []
        self.rows = []
        core.print = self.lines.append
        core.log = self.row

    def row(self, step=None, **values):
        self.rows.append(values)


def train(core, make=network, *, peak=None, loss=nn.functional.mse_loss, log_every=3, **options):
    core.peak_tflops = peak
    log = Log(core)
    model = core.model(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = core.batches(Pairs(), batch_size=BATCH, shuffle=True, drop_last=True)
    valid = core.batches(Pairs(12), batch_size=BATCH)
    options = {"epochs": 2, "options": FitOptions(log_every=log_every), **options}
    history = fit(core, model, optimizer, loss, batches, valid, **options)
    del core.print, core.log  # which hold this core
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return history, log.lines, log.rows, weights


def alone(*args, backend="cpu", **options):
    """Return the result of `train` on one core."""
    work = functools.partial(train, **options)
    return quietly(work, *args, cores=1, backend=backend).results[0]


def flops(history):
    """Return the FLOPs of each log interval, on one core."""
    return [round(row["tflops_per_second"] * row["seconds"] * 1e12) for row in history.intervals]


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_a_history_has_the_flops_of_its_training_and_nothing_of_its_evaluations(backend):
    history, lines, rows, _ = quietly(train, backend=backend).results[0]
    assert flops(history) == [3 * BATCH * OF_A_SAMPLE] * 4
    assert history.tflops_per_second > 0
    assert history.epochs[0]["tflops_per_second"] > 0
    assert "TFLOP/s per chip" in repr(history)
    assert "tflops_per_second" in rows[0]
    # A CPU has no known peak.
    assert not any("mfu" in row for row in [*history.intervals, *history.epochs, *rows])
    assert math.isnan(history.mfu)
    assert "MFU" not in repr(history)
    assert not any("FLOP" in line for line in lines)


def test_accumulated_batches_all_count_and_a_shorter_last_step_counts_less():
    history, *_ = alone(accumulate_grad_batches=5, log_every=1)
    each = BATCH * OF_A_SAMPLE
    assert flops(history) == [5 * each, 5 * each, 2 * each] * 2


@pytest.mark.parametrize(
    "options", [{"bf16": True}, {"augment": lambda x, y: (x @ torch.eye(16), y)}]
)
def test_bfloat16_and_products_of_an_augmentation_change_nothing(options):
    history, *_ = alone(**options)
    assert set(flops(history)) == {3 * BATCH * OF_A_SAMPLE}


def test_mfu_is_in_the_history_its_figure_and_the_rows_of_loggers():
    history, _, rows, _ = alone(peak=1e-6)
    for row in [*history.intervals, *history.epochs, rows[0]]:
        assert row["mfu"] == pytest.approx(row["tflops_per_second"] / 1e-6)
    assert history.mfu == pytest.approx(history.tflops_per_second / 1e-6)
    assert f"MFU {history.mfu:.1%}" in repr(history)
    assert ">mfu<" in history._repr_html_()
    json.dumps(history.epochs)
    titles = [axes.get_title(loc="left") for axes in show_history(history).axes]
    assert "MFU" in titles
    assert "tflops per second" not in titles


class Sparse(nn.Module):
    """A model with a product whose FLOPs depend on values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return torch.mm(torch.eye(len(x)).to_sparse(), self.layer(x))


class Slope(nn.Module):
    """A model without any product."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.slope * x[:, :1]


class Attention(nn.Module):
    """A layer that is in evaluation mode in a training, as when a backbone is frozen."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(FEATURES, 1, batch_first=True)

    def train(self, mode=True):
        return super().train(False)

    def forward(self, x):
        tokens = x.unsqueeze(1)
        return self.layer(tokens, tokens, tokens)[0].squeeze(1)


IMPOSSIBLE = {
    "a sparse product": (
        Sparse,
        "mm cannot be counted: its FLOPs depend on the values of a sparse tensor",
    ),
    "no product": (Slope, "the model has no matrix product, convolution or attention"),
    "attention in evaluation mode": (
        lambda: nn.Sequential(Attention().eval(), nn.Linear(FEATURES, 1)),
        "operations of attention in evaluation mode can be counted on XLA only",
    ),
    "compiled": (
        lambda: torch.compile(network(), backend="eager"),
        "operations of a model or a loss of torch.compile cannot be counted",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_counted_is_said_once_and_trains_as_before(name):
    make, reason = IMPOSSIBLE[name]
    history, lines, rows, _ = alone(make, peak=1.0)
    (line,) = [line for line in lines if "FLOP" in line]
    assert line.startswith(f"FLOP/s and MFU are not known: {reason}")
    for row in [*history.intervals, *history.epochs, *rows]:
        assert not {"tflops_per_second", "mfu"} & row.keys()
    assert math.isnan(history.tflops_per_second)
    assert "FLOP" not in repr(history)


def test_batches_of_several_lengths_count_by_their_lengths():
    class Series(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            length = 8 if index < 8 else 4
            return {"series": torch.ones(length, 3), "labels": torch.ones(1)}

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, series, attention_mask):
            return self.layer(series).mean(1)

    def work(core):
        model = core.model(Mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = core.batches(
            Series(), batch_size=4, buckets=tpukit.Buckets((4, 8), pad={"series": 0})
        )
        options = FitOptions(log_every=1)
        return fit(core, model, optimizer, nn.functional.mse_loss, batches, options=options)

    (history,) = quietly(work, cores=1).results
    each = 3 * 2 * 4 * 3
    assert sorted(flops(history)) == [4 * each, 4 * each, 8 * each, 8 * each]


@pytest.mark.xla
def test_counting_changes_no_graph_and_no_bit(monkeypatch):
    counted = alone(backend="xla:cpu")
    monkeypatch.setattr("tpukit.training.step_flops.FlopCounter", Nothing)
    without = alone(backend="xla:cpu")
    assert math.isnan(without[0].tflops_per_second)
    compiles = [[row["compiles"] for row in one[0].intervals] for one in (counted, without)]
    assert compiles[0] == compiles[1]
    for name, value in counted[3].items():
        assert value.equal(without[3][name])


class Nothing:
    """A counter that watches nothing."""

    flops = 0
    problem = "not wanted"

    def counting(self):
        return contextlib.nullcontext()


def test_an_interval_without_flops_does_not_count_in_the_mean():
    row = {"seconds": 1.0, "samples_per_second": 2.0, "compiles": 0}
    history = History(intervals=[row, {**row, "tflops_per_second": 4.0}])
    assert history.tflops_per_second == 4.0


def loop(core, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in core.batches(Pairs(), batch_size=BATCH, drop_last=True):
        with core.step():
            with core.counting_flops():
                loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            core.optimizer_step(optimizer)


def test_steps_of_an_evaluation_are_no_part_of_the_rate_of_the_core():
    def work(core):
        model = core.model(network())
        loop(core, model)
        before = core.tflops_per_second
        evaluate(core, model, nn.functional.mse_loss, core.batches(Pairs(), batch_size=1))
        return before, core.tflops_per_second

    before, after = quietly(work, cores=1).results[0]
    assert before == after


def test_a_loop_after_fit_counts_its_own_flops():
    def work(core):
        train(core)
        loop(core, core.model(nn.Sequential(nn.Linear(FEATURES, 1000), nn.Linear(1000, 1))))
        return core.internal.flops.flops

    assert quietly(work, cores=1).results[0] == BATCH * 3 * 2 * (FEATURES * 1000 + 1000)
