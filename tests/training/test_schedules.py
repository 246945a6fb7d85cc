import math

import pytest
import torch

from tpukit import launch
from tpukit.training.schedules import constant, cosine, stepped


def an_optimizer(lr=0.4, kind=torch.optim.SGD, **options):
    return kind([torch.nn.Parameter(torch.ones(1))], lr=lr, **options)


def rates(optimizer, schedule, steps: int) -> list[float]:
    """Return the rate of each of the next steps."""
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_a_warmup_rises_linearly_and_then_stays():
    optimizer = an_optimizer()
    assert rates(optimizer, constant(optimizer, warmup=3), 6) == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    )


def test_without_a_warmup_the_first_step_has_the_full_rate():
    optimizer = an_optimizer()
    assert rates(optimizer, constant(optimizer), 2) == [0.4, 0.4]


@pytest.mark.parametrize("every", [1, 3])
def test_stepped_is_torchs_steplr(every):
    ours, theirs = an_optimizer(), an_optimizer()
    schedule = torch.optim.lr_scheduler.StepLR(theirs, every, 0.5)
    assert rates(ours, stepped(ours, every), 10) == pytest.approx(rates(theirs, schedule, 10))


@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_cosine_is_torchs_cosine_until_its_end(floor):
    ours, theirs = an_optimizer(), an_optimizer()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 20, eta_min=floor * 0.4)
    assert rates(ours, cosine(ours, 20, floor=floor), 20) == pytest.approx(
        rates(theirs, schedule, 20)
    )


def test_cosine_after_a_warmup_falls_from_the_full_rate_and_never_rises_again():
    optimizer = an_optimizer()
    seen = rates(optimizer, cosine(optimizer, 12, warmup=4), 40)
    assert seen[:5] == pytest.approx([0.08, 0.16, 0.24, 0.32, 0.4])
    assert seen[8] == pytest.approx(0.2)  # half of the fall
    assert all(later < earlier for earlier, later in zip(seen[4:11], seen[5:12], strict=True))
    assert set(seen[12:]) == {seen[11]}


@pytest.mark.parametrize(
    "make", [constant, lambda o: stepped(o, 5), lambda o: cosine(o, 50, warmup=10)]
)
def test_no_step_has_a_rate_of_zero_which_would_be_a_graph_of_its_own(make):
    optimizer = an_optimizer()
    assert min(rates(optimizer, make(optimizer), 60)) > 0


def test_every_group_keeps_its_own_rate():
    backbone, head = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [backbone], "lr": 0.1}, {"params": [head], "lr": 1.0}])
    schedule = cosine(optimizer, 10, warmup=1)
    assert schedule.get_last_lr() == pytest.approx([0.05, 0.5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: constant(o, warmup=-1), "warmup must be a number of steps, 0 for none, got -1"),
        (lambda o: stepped(o, 0), "every=0"),
        (lambda o: stepped(o, 5, factor=0), "factor=0"),
        (lambda o: stepped(o, 5, factor=float("nan")), "factor=nan"),
        (
            lambda o: cosine(o, 100, warmup=100),
            "steps=100 and warmup=100\n  fix:   both count optimizer steps",
        ),
        (lambda o: cosine(o, 0), "steps=0"),
        (lambda o: cosine(o, 10, floor=1.0), "fraction of the full rate, 0 to below 1, got 1.0"),
    ],
)
def test_a_wrong_number_is_refused_with_what_came(call, message):
    with pytest.raises(ValueError, match=message):
        call(an_optimizer())


MAKERS = {
    "constant": lambda o: constant(o, warmup=7),
    "stepped": lambda o: stepped(o, 4, warmup=7),
    "cosine": lambda o: cosine(o, 30, warmup=7),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("stop", [0, 3, 7, 8, 20, 29], ids="after {} steps".format)
@pytest.mark.parametrize("first", ["optimizer", "schedule"])
def test_a_resumed_run_has_the_very_same_rates(make, stop, first, tmp_path):
    whole = an_optimizer(momentum=0.9)
    expected = rates(whole, make(whole), 30)

    optimizer = an_optimizer(momentum=0.9)
    schedule = make(optimizer)
    before = rates(optimizer, schedule, stop)
    torch.save(
        {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()},
        tmp_path / "state.pt",
    )

    again = an_optimizer(momentum=0.9)
    parts = {"optimizer": again, "schedule": make(again)}
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for name in sorted(parts, key=lambda name: name != first):
        parts[name].load_state_dict(state[name])
    assert before + rates(again, parts["schedule"], 30 - stop) == expected


def test_a_longer_run_resumes_with_its_own_length_not_the_saved_one():
    short, long = an_optimizer(), an_optimizer()
    schedule = cosine(short, 10)
    rates(short, schedule, 5)
    longer = cosine(long, 100)
    longer.load_state_dict(schedule.state_dict())
    long.step()
    longer.step()
    assert longer.get_last_lr() == pytest.approx([0.4 * (1 + math.cos(math.pi * 0.06)) / 2])


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
    "Adam": (torch.optim.Adam, {"lr": 1e-3}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
}


def count(
    steps: int,
    kind,
    options: dict,
    make=lambda optimizer: cosine(optimizer, 100, warmup=3),
    jump=None,
):
    """Return, of each step, how many graphs it compiled and how often it copied to the host."""

    def work(core):
        import torch_xla.debug.metrics as met

        def metrics():
            return [
                (met.metric_data(name) or [0])[0]
                for name in ("CompileTime", "TransferFromDeviceTime")
            ]

        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
        ).to(core.device)
        inputs = torch.ones(5, 3).to(core.device)
        optimizer = kind(model.parameters(), **options)
        schedule = make(optimizer)
        seen = []
        for step in range(steps):
            if jump and step in jump:
                for state in optimizer.state.values():
                    state["step"].fill_(jump[step])
                core.backend.sync()
            before = metrics()
            with core.step():
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
            seen.append(
                tuple(after - earlier for after, earlier in zip(metrics(), before, strict=True))
            )
        return seen

    return launch(work, cores=1, backend="xla:cpu", progress="off").results[0]


@pytest.mark.xla
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_rate_that_changes_every_step_compiles_and_copies_nothing(kind, options):
    seen = count(6, kind, options)
    assert [compiled for compiled, _ in seen] == [
        1,
        1,
        0,
        0,
        0,
        0,
    ]  # the first step makes the optimiser's state
    assert sum(copied for _, copied in seen) == 0


@pytest.mark.xla
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 0), ({"capturable": True}, 0), ({"amsgrad": True}, 1)],
    ids=["", "capturable", "amsgrad"],
)
def test_adam_compiles_nothing_at_step_16_628_unless_it_is_pytorchs_own(options, expected):
    """There sqrt(1 - 0.999 ** step) rounds to 1.0f, which torch_xla compiles in as a constant.

    After the first 160 steps the rate is that of the beginning: 0.001, as 1 - 0.999 is to float32.
    """
    jump = {3: 160, 4: 16_500, 5: 16_700, 6: 40_000}
    seen = count(7, torch.optim.Adam, {"lr": 1e-3, **options}, constant, jump=jump)
    assert [compiled for compiled, _ in seen] == [1, 1, 0, 0, 0, expected, 0]


@pytest.mark.xla
@pytest.mark.parametrize(
    ("amsgrad", "floor", "expected"), [(False, 0.0, 0), (True, 0.0, 1), (True, 0.5, 0)]
)
def test_adamw_compiles_nothing_where_its_weight_decay_vanishes_unless_it_is_pytorchs_own(
    amsgrad, floor, expected
):
    """1 - lr * weight_decay is 1.0f below 2 ** -25: here from the fifth step on, in a long cosine near its end."""
    options = {"lr": 1e-5, "weight_decay": 0.01, "amsgrad": amsgrad}
    seen = count(6, torch.optim.AdamW, options, lambda optimizer: cosine(optimizer, 6, floor=floor))
    assert [compiled for compiled, _ in seen] == [1, 1, 0, 0, expected, 0]


@pytest.mark.xla
def test_a_rate_on_the_device_is_refused_since_it_would_be_copied_to_the_host_every_step():
    def work(core):
        weight = torch.nn.Parameter(torch.ones(1, device=core.device))
        rate = torch.tensor(0.1, device=core.device)
        optimizer = torch.optim.Adam([weight], lr=rate, capturable=True)
        with pytest.raises(ValueError, match="tensor on the XLA device") as raised:
            constant(optimizer)
        return str(raised.value)

    assert "such as lr=0.1" in launch(work, cores=1, backend="xla:cpu", progress="off").results[0]


@pytest.mark.xla
@pytest.mark.parametrize("name", ["Lars", "Lamb"])
def test_timms_lars_and_lamb_stay_in_the_graph(name):
    optim = pytest.importorskip(
        "timm.optim", reason="timm is on Kaggle's image; elsewhere: pip install timm"
    )
    options = {"lr": 0.1, "weight_decay": 1e-4} | ({"momentum": 0.9} if name == "Lars" else {})
    seen = count(6, getattr(optim, name), options)
    assert [compiled for compiled, _ in seen] == [1, 1, 0, 0, 0, 0]
    assert sum(copied for _, copied in seen) == 0
