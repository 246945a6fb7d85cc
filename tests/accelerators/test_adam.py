"""Adam recorded as one operation gives what PyTorch's gives on XLA, to the last bit."""

import contextlib
import itertools
import math
from unittest import mock

import pytest
import torch
from torch import nn

from tpukit import launch

pytestmark = pytest.mark.xla


def train(core, name, options, dtype=torch.float32, rest=False):
    """Train six steps; return the weights, what the optimiser keeps, and how often PyTorch's last operation was seen.

    With `rest`, the last layer rests in the first two steps, so it counts fewer.
    """
    from torch_xla.debug import metrics

    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    ).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 10)
    model = core.model(model)
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(6):
        model[-1].requires_grad_(not rest or number > 1)
        drawn = [
            torch.randn(*shape, generator=generator, dtype=dtype)
            for shape in ((4, 3, 8, 8), (4, 4))
        ]
        inputs, targets = core.to_device(drawn)
        with core.step():
            nn.functional.mse_loss(model(inputs), targets).backward()
            core.optimizer_step(optimizer)
        schedule.step()
    kept = [optimizer.state[weight] for weight in model.parameters()]
    tensors = [*model.parameters(), *(one[key] for one in kept for key in sorted(one))]
    return [tensor.detach().cpu() for tensor in tensors], metrics.counter_value("xla::addcdiv") or 0


def on_xla(*args, whole=False):
    kept = mock.patch("tpukit.accelerators.shorten_adam") if whole else contextlib.nullcontext()
    with kept:
        return launch(train, *args, cores=1, backend="xla:cpu", progress="off").results[0]


@pytest.mark.parametrize(
    "args",
    [
        ("Adam", {"lr": 0.01}),
        ("Adam", {"lr": 0.01, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.01}),
        ("AdamW", {"lr": 0.01, "weight_decay": 0}),
        ("Adam", {"lr": 0.01}, torch.float32, True),
    ],
    ids=["Adam", "Adam with decay", "AdamW", "AdamW without decay", "a layer that begins later"],
)
def test_one_operation_gives_the_same(args):
    (ours, recorded), (theirs, of_each) = on_xla(*args), on_xla(*args, whole=True)
    assert all(map(torch.equal, ours, theirs))
    assert (recorded, of_each) == (0, 32 if len(args) == 4 else 36)  # six parameters, six steps


@pytest.mark.parametrize(
    "args",
    [
        ("Adam", {"lr": 0.01, "amsgrad": True}),
        ("Adam", {"lr": 0.01, "maximize": True}),
        ("Adam", {"lr": torch.tensor(0.01)}),
        ("AdamW", {"lr": 0.01}, torch.bfloat16),
    ],
    ids=["amsgrad", "maximize", "lr is a tensor", "bfloat16"],
)
def test_what_is_not_the_usual_case_is_left_to_pytorch(args):
    (ours, recorded), (theirs, of_each) = on_xla(*args), on_xla(*args, whole=True)
    assert all(map(torch.equal, ours, theirs))
    assert recorded == of_each == 36


def every_setting(core):
    """Take eight steps with every combination of settings; return the bits of weights and averages."""
    settings = itertools.product(
        (1e-3, 0.5, 1.0),
        ((0.9, 0.999), (0.5, 0.9), (0.0, 0.0)),
        (1e-8, 1.0, 0.0),
        (0.0, 0.01, 1.0, 2.0),
    )
    names = ("lr", "betas", "eps", "weight_decay")
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(
        [0.0, 1e-30, 1e-12, 1e-4, 1.0, 1e4, 1e30, math.inf, math.nan]
    )  # of gradients
    weights, optimizers = [], []
    groups = [dict(zip(names, one, strict=True)) for one in settings]
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        mine = [
            nn.Parameter(torch.randn(len(sizes), 31, generator=generator).to(core.device))
            for _ in groups
        ]
        optimizers.append(
            kind(
                [{"params": [weight], **group} for weight, group in zip(mine, groups, strict=True)]
            )
        )
        weights += mine
    for _ in range(8):
        gradient = core.to_device(
            [sizes[:, None] * torch.randn(len(sizes), 31, generator=generator)]
        )[0]
        with core.step():
            for weight in weights:
                weight.grad = gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
    kept = [
        one.state[weight]
        for one in optimizers
        for group in one.param_groups
        for weight in group["params"]
    ]
    tensors = [*weights, *(state[name] for state in kept for name in ("exp_avg", "exp_avg_sq"))]
    bits = [tensor.detach().cpu() for tensor in tensors]
    return [one.nan_to_num(12345).view(torch.int32) for one in bits]  # a NaN has many bit patterns


def test_every_combination_of_settings_gives_the_same_bits():
    def bits(whole):
        with mock.patch("tpukit.accelerators.shorten_adam") if whole else contextlib.nullcontext():
            return launch(every_setting, cores=1, backend="xla:cpu", progress="off").results[0]

    ours, theirs = bits(False), bits(True)
    assert len(ours) == 3 * 2 * 108
    assert [
        number
        for number, pair in enumerate(zip(ours, theirs, strict=True))
        if not torch.equal(*pair)
    ] == []


def test_two_groups_and_two_optimisers_each_keep_their_own_numbers():
    def work(core):
        weights = [nn.Parameter(torch.ones(3, device=core.device)) for _ in range(3)]
        groups = [
            {"params": weights[:1], "lr": 0.1},
            {"params": weights[1:2], "lr": 0.2, "betas": (0.5, 0.5)},
        ]
        optimizers = [
            torch.optim.Adam(groups),
            torch.optim.AdamW(weights[2:], lr=0.3, weight_decay=0.5),
        ]
        for _ in range(3):
            with core.step():
                sum((weight**2).sum() for weight in weights).backward()
                for optimizer in optimizers:
                    core.optimizer_step(optimizer)
        return [weight.detach().cpu().tolist() for weight in weights]

    ours, right = (
        launch(work, cores=1, backend=name, progress="off").results[0]
        for name in ("xla:cpu", "cpu")
    )
    assert [pytest.approx(one, abs=1e-6) for one in right] == ours
    assert len({tuple(one) for one in ours}) == 3


def test_a_schedule_of_any_number_makes_no_other_graph():
    def work(core):
        weight = nn.Parameter(torch.ones(3, device=core.device))
        optimizer = torch.optim.AdamW([weight], weight_decay=0.5)
        compiles = []
        for number in range(6):
            optimizer.param_groups[0] |= {
                "lr": 0.1 + number / 100,
                "betas": (0.5 + number / 100, 0.9 + number / 100),
                "weight_decay": 0.5 + number / 100,
            }
            with core.step():
                (weight**2).sum().backward()
                core.optimizer_step(optimizer)
            core.backend.wait()
            compiles.append((core.backend.compiles() or (0,))[0])
        return compiles[1] == compiles[-1], weight.detach().cpu().tolist()

    (is_one_graph, ours), (_, right) = (
        launch(work, cores=1, backend=name, progress="off").results[0]
        for name in ("xla:cpu", "cpu")
    )
    assert is_one_graph
    assert ours == pytest.approx(right, abs=1e-6)


def test_a_state_of_another_dtype_is_left_to_pytorch():
    def work(core):
        weight = nn.Parameter(torch.ones(3, device=core.device))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        for _ in range(3):
            with core.step():
                (weight**2).sum().backward()
                core.optimizer_step(optimizer)
            state = optimizer.state[weight]
            state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
        return weight.detach().cpu().tolist()

    ours, right = (
        launch(work, cores=1, backend=name, progress="off").results[0]
        for name in ("xla:cpu", "cpu")
    )
    assert ours == pytest.approx(right, abs=1e-3)
