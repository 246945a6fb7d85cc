"""A resumed run has the scheduler that it began with, and values that nobody gave are not named."""

import re

import pytest
import torch
from helpers.launching import quietly
from torch import nn
from torch.optim import lr_scheduler as torchs

from tpukit import FitOptions, WorkerError, fit

INPUTS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


class Fall:
    """A factor with an attribute, which a LambdaLR saves and loads."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, step):
        return max(0.0, 1 - step / self.steps)


def warm(optimizer, length):
    parts = [torchs.LinearLR(optimizer, total_iters=1), torchs.CosineAnnealingLR(optimizer, length)]
    return torchs.SequentialLR(optimizer, parts, milestones=[1])


# How a scheduler is made for a length, and the argument that is named when the length changes.
OF_A_LENGTH = {
    "a cosine": (lambda o, n: torchs.CosineAnnealingLR(o, T_max=n), "T_max"),
    "restarts": (lambda o, n: torchs.CosineAnnealingWarmRestarts(o, T_0=n), "T_0"),
    "one cycle": (lambda o, n: torchs.OneCycleLR(o, 0.1, total_steps=4 * n), "total_steps"),
    "a polynomial": (lambda o, n: torchs.PolynomialLR(o, total_iters=n), "total_iters"),
    "milestones": (lambda o, n: torchs.MultiStepLR(o, [n, 2 * n]), "milestones"),
    "steps": (lambda o, n: torchs.StepLR(o, n), "step_size"),
    "a plateau": (lambda o, n: torchs.ReduceLROnPlateau(o, patience=n), "patience"),
    "a factor with attributes": (lambda o, n: torchs.LambdaLR(o, Fall(n)), "lr_lambdas.0.steps"),
    "one after another": (warm, "_schedulers.1.T_max"),
    "several at once": (
        lambda o, n: torchs.ChainedScheduler([torchs.StepLR(o, n)], optimizer=o),
        "_schedulers.0.step_size",
    ),
}


def train(core, folder, epochs, make, length, steps=4):
    torch.manual_seed(0)
    model = core.model(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(INPUTS, INPUTS[:, :2])
    batches = core.batches(data, batch_size=8, shuffle=True, drop_last=True)
    scheduler = make(optimizer, length)
    by_step = isinstance(scheduler, torchs.OneCycleLR)
    history = fit(
        core,
        model,
        optimizer,
        nn.MSELoss(),
        batches,
        epochs=epochs,
        steps_per_epoch=steps,
        scheduler=scheduler,
        monitor="train_loss",
        checkpoints=folder,
        options=FitOptions(scheduler_interval="step" if by_step else "epoch"),
    )
    return [row["lr"] for row in history.epochs]


def run(*arguments, **options):
    def work(core):
        return train(core, *arguments, **options)

    return quietly(work, cores=1, backend="cpu").results[0]


@pytest.mark.parametrize("kind", OF_A_LENGTH)
def test_a_scheduler_of_another_length_is_refused_with_both_and_the_stored_one_goes_on(
    kind, tmp_path, capsys
):
    make, argument = OF_A_LENGTH[kind]
    run(tmp_path, 2, make, 5)
    with pytest.raises(WorkerError) as refused:
        run(tmp_path, 4, make, 7)
    text = str(refused.value)
    assert re.search(rf"found: +{re.escape(argument)}=.*, here {re.escape(argument)}=", text), text
    capsys.readouterr()
    rates = run(tmp_path, 4, make, 5)  # the fix
    assert "is used, not" not in capsys.readouterr().out
    assert rates == run(tmp_path / "without interruption", 4, make, 5)


def test_the_line_in_the_fix_is_one_to_type(tmp_path):
    make, _ = OF_A_LENGTH["a cosine"]
    run(tmp_path, 1, make, 5)
    with pytest.raises(WorkerError, match="T_max=5, here T_max=7") as refused:
        run(tmp_path, 2, make, 7)
    line = re.search(r"CosineAnnealingLR\(.*?\)", str(refused.value))[0]
    run(tmp_path, 2, lambda optimizer, n: eval(line, vars(torchs) | {"optimizer": optimizer}), 7)


def test_a_function_of_the_step_is_the_users_own(tmp_path):
    def make(optimizer, length):
        return torchs.LambdaLR(optimizer, lambda step: 1 - step / length)

    run(tmp_path, 2, make, 2)
    rates = run(tmp_path, 4, make, 4)
    assert rates[2:] == pytest.approx([0.1 * (1 - 2 / 4), 0.1 * (1 - 3 / 4)])


SHORT = {
    "one cycle": lambda o, n: torchs.OneCycleLR(o, 0.1, total_steps=n),
    "within another": lambda o, n: torchs.SequentialLR(
        o, [torchs.ConstantLR(o), torchs.OneCycleLR(o, 0.1, total_steps=n)], milestones=[1]
    ),
    "before another": lambda o, n: torchs.SequentialLR(
        o, [torchs.OneCycleLR(o, 0.1, total_steps=n), torchs.ConstantLR(o)], milestones=[8]
    ),
}


@pytest.mark.parametrize("kind", SHORT)
def test_a_scheduler_that_ends_before_the_run_is_refused_before_the_first_step(kind, tmp_path):
    with pytest.raises(WorkerError, match="ends after 2 steps, but the run needs") as refused:
        run(tmp_path, 9, SHORT[kind], 2, steps=1)
    assert not list(tmp_path.glob("step-*"))
    needed = int(re.search(r"total_steps=(\d+), or", str(refused.value))[1])
    run(tmp_path, 9, SHORT[kind], needed, steps=1)
    with pytest.raises(WorkerError, match="ends after"):
        run(tmp_path / "another", 9, SHORT[kind], needed - 1, steps=1)
