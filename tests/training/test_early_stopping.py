"""What `fit` does between two epochs: schedules, stopping early, the best weights."""

import mmap

import pytest
import torch
from helpers.fit_arguments import grouped
from helpers.launching import DRY_RUNS
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training.test_trainer import LOSS, Dots, net, quietly, same

from tpukit import WorkerError, evaluate, fit


def train(core, make=lambda optimizer: None, *, decay=None, lr=0.01, valid=True, **options):
    model = core.model(net())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) if decay else None
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = make(optimizer)
    batches = core.batches(Dots(), batch_size=4, shuffle=True, drop_last=True)
    batches_valid = core.batches(Dots(19), batch_size=4) if valid else None
    options = {
        "epochs": 4,
        "log_every": 3,
        "scheduler": schedule,
        "averaged_model": average,
        **options,
    }
    history = fit(core, model, optimizer, LOSS, batches, batches_valid, **grouped(options))
    again = evaluate(
        core, average.module if average else model, LOSS, core.batches(Dots(19), batch_size=4)
    ).loss
    state = {
        "model": model.state_dict(),
        "average": None,
        "schedule": schedule and schedule.state_dict(),
    }
    return {"state": state, "optimizer": optimizer.state_dict(), "history": history, "loss": again}


def rates(result):
    return [row["lr"] for row in result["history"].epochs]


def scripted(numbers):
    """Return a metric that is the next of these numbers in every evaluation after an epoch."""
    rest = iter([0.0, *numbers])  # the first batch is tried before the first step
    return lambda outputs, targets: torch.tensor(next(rest))


def test_a_schedule_counts_steps_or_epochs_as_it_is_told():
    make = lambda optimizer: StepLR(optimizer, 1, 0.5)  # noqa: E731
    by_epoch = quietly(lambda core: train(core, make, scheduler_interval="epoch")).results
    assert [rates(result) for result in by_epoch] == [[0.01, 0.005, 0.0025, 0.00125]] * 2
    by_step = quietly(lambda core: train(core, make)).results[0]
    assert rates(by_step) == pytest.approx(
        [0.01 * 0.5 ** (12 * epoch - 1) for epoch in range(1, 5)]
    )


def test_a_plateau_is_stepped_every_epoch_with_the_best_column():
    def work(core, best, mode, **options):
        seen = []

        class Noting(ReduceLROnPlateau):
            def step(self, metrics, *rest):
                seen.append(metrics)
                super().step(metrics, *rest)

        make = lambda optimizer: Noting(optimizer, mode, patience=0, factor=0.1)  # noqa: E731
        return train(core, make, monitor=best, mode=mode, **options), seen

    options = {"metrics": {"score": scripted([0.5, 0.4, 0.6, 0.6])}}
    (result, seen), (other, _) = quietly(
        lambda core: work(core, "valid_score", "max", **options)
    ).results
    assert same(result, other)
    assert seen == [row["valid_score"] for row in result["history"].epochs]
    assert rates(result) == pytest.approx([0.01, 0.01, 0.001, 0.001])
    result, seen = quietly(lambda core: work(core, "valid_loss", "min", valid=False)).results[0]
    assert seen == [row["train_loss"] for row in result["history"].epochs]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: StepLR(optimizer, 2, 0.5),
        lambda optimizer: CosineAnnealingLR(optimizer, 4),
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    ],
)
def test_a_schedule_by_the_epoch_is_resumed_bit_for_bit(make, tmp_path):
    def work(core, folder, cut=None):
        def fail(inputs, labels):
            steps.append(1)
            if len(steps) == cut:
                raise KeyError
            return inputs, labels

        steps = []
        return train(
            core, make, folder=folder, scheduler_interval="epoch", augment=fail, save_every=0
        )

    once = quietly(work, tmp_path / "once").results[0]
    for cut in (25, 32):  # between two epochs, and within one
        folder = tmp_path / str(cut)
        with pytest.raises(WorkerError, match="KeyError"):
            quietly(work, folder, cut)
        again = quietly(work, folder).results[0]
        assert again["history"].resumed
        assert same(once, again)
        assert once["state"]["schedule"] == again["state"]["schedule"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scheduler_interval": "batch"},
            "scheduler_interval must be .step. or .epoch., got 'batch'",
        ),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        (
            {
                "make": ReduceLROnPlateau,
                "monitor": "valid_right",
                "mode": "max",
                "metrics": {"right": lambda o, t: (o > 0).float().mean()},
            },
            "would lower the learning rate while valid_right gets better",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_first_step(options, message):
    def work(core):
        return train(core, augment=lambda *batch: pytest.fail("a step was made"), **options)

    with pytest.raises(WorkerError, match=message):
        quietly(work, cores=1)


def test_an_optimiser_that_needs_a_closure_is_refused_by_name():
    def work(core, kind):
        model = core.model(net())
        batches = core.batches(Dots(), batch_size=4)
        return fit(core, model, kind(model.parameters()), LOSS, batches)

    with pytest.raises(WorkerError, match="LBFGS.step needs a closure\n.*fix:   Adam or SGD"):
        quietly(work, torch.optim.LBFGS, cores=1)
    assert quietly(work, torch.optim.SGD, cores=1).results[0].epochs


SCORES = [0.5, 0.7, 0.6, 0.7, 0.9]


@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (2, 4), (3, 5), (None, 5)])
def test_it_stops_after_so_many_epochs_that_are_not_better(patience, epochs, tmp_path):
    def work(core, scores, patience=patience):
        options = {
            "epochs": 5,
            "metrics": {"score": scripted(scores)},
            "monitor": "valid_score",
            "mode": "max",
            "folder": tmp_path,
        }
        return train(core, patience=patience, **options)["history"]

    histories = quietly(work, SCORES).results
    for history in histories:
        assert len(history.epochs) == epochs
        expected = (
            f"no better valid_score since epoch 2, patience={patience}" if epochs < 5 else None
        )
        assert history.stopped == expected
    if epochs < 5:  # it stays so when the cell is run again, and more patience goes on
        again = quietly(work, []).results[0]
        assert (len(again.epochs), again.stopped) == (epochs, histories[0].stopped)
        longer = quietly(work, SCORES[epochs:], None).results[0]
        assert [row["valid_score"] for row in longer.epochs] == pytest.approx(SCORES)


def test_a_hook_sees_the_history_on_every_core_and_one_core_is_enough_to_stop(tmp_path):
    calls = mmap.mmap(-1, 2)

    def work(core, stop_at):
        def hook(history):
            calls[core.rank] = len(history.epochs)
            return core.rank == 1 and len(history.epochs) >= stop_at

        return train(core, epochs=3, on_epoch_end=hook, folder=tmp_path)["history"]

    for expected in (2, 2):  # run again, it stays stopped
        for history in quietly(work, 2).results:
            assert (len(history.epochs), history.stopped) == (
                expected,
                "on_epoch_end returned True after epoch 2",
            )
        assert list(calls[:]) == [2, 2]
    for history in quietly(work, 3).results:  # after the last epoch there is nothing to stop
        assert (len(history.epochs), history.stopped) == (3, None)
    assert list(calls[:]) == [3, 3]


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("with_folder", [True, False])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_the_best_weights_come_back(decay, with_folder, backend, tmp_path):
    def work(core):
        options = {
            "metrics": {"score": scripted([0.1, 0.9, 0.2])},
            "monitor": "valid_score",
            "mode": "max",
            "epochs": 3,
        }
        return train(
            core,
            restore_best_weights=True,
            folder=tmp_path if with_folder else None,
            decay=decay,
            **options,
        )

    for found in quietly(work, backend=backend).results:
        first, best, last = (row["valid_loss"] for row in found["history"].epochs)
        assert found["loss"] == pytest.approx(best, rel=1e-6)
        assert len({round(loss, 5) for loss in (first, best, last)}) == 3
