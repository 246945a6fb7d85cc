"""A loss that is a weighted mean gives the step of the joined batch, however it is divided."""

import pytest
import torch
from helpers.launching import DRY_RUNS, quietly
from torch import nn
from torch.nn import functional as F

from tpukit import FitOptions, WorkerError, evaluate, fit
from tpukit.training.weighted_loss import as_loss

WEIGHTS = [0.2, 1.0, 5.0]


class Sentences(torch.utils.data.Dataset):
    """Samples of 8 tokens with 1 to 8 labels each; the others are ignored."""

    def __init__(self, count=16):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        numbers = torch.Generator().manual_seed(index)
        labels = torch.randint(3, (8,), generator=numbers)
        labels[1 + index * 5 % 8 :] = -100
        return torch.randn(8, 5, generator=numbers), labels


def tokens(outputs, labels):
    total = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def of_classes(outputs, labels):
    weights = torch.tensor(WEIGHTS, device=outputs.device)
    labels = labels.flatten()
    total = F.cross_entropy(outputs.flatten(0, 1), labels, weight=weights, reduction="sum")
    return total, (weights[labels.clamp(min=0)] * (labels != -100)).sum()


class Counted(nn.Module):
    """Its weight is a number of Python, as for a sum over all that has one size."""

    def forward(self, outputs, labels):
        is_label = labels != -100
        total = (outputs.mean(2).square() * is_label).sum() / 8
        return total, len(labels)


def mean_of(loss):
    def mean(outputs, labels):
        total, weight = loss(outputs, labels)
        return total / weight

    return mean


def trained(
    core, loss, size, accumulated=1, count=16, epochs=1, adam=False, shuffle=True, **options
):
    torch.manual_seed(1)
    model = core.model(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    data = Sentences(count)
    lines = []
    core.print = lines.append
    try:
        history = fit(
            core,
            model,
            optimizer,
            loss,
            core.batches(data, batch_size=size, shuffle=shuffle),
            core.batches(data, batch_size=2),
            epochs=epochs,
            accumulate_grad_batches=accumulated,
            **options,
        )
    finally:
        del core.print
    found = evaluate(core, model, loss, core.batches(data, batch_size=3), keep_outputs=False)
    losses = [history.epochs[-1][name] for name in ("train_loss", "valid_loss")]
    return core.to_host([*model.parameters()]), [*losses, found.loss], lines


def assert_close(found, wanted):
    for mine, other in zip(found[0], wanted[0], strict=True):
        assert (mine - other).abs().max() < 1e-6
    assert found[1] == pytest.approx(wanted[1], abs=1e-6)


DIVISIONS = {
    "two batches in a step": (1, 8, 2),
    "two cores": (2, 8, 1),
    "two cores and two batches": (2, 4, 2),
    "two cores and batches of one sample": (2, 1, 8),
}


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("loss", [tokens, of_classes, Counted()])
@pytest.mark.parametrize("division", DIVISIONS)
def test_every_division_is_the_step_of_the_joined_batch(division, loss, backend):
    cores, size, accumulated = DIVISIONS[division]
    limit = 0.5 if loss is of_classes else None

    def run(core, loss, size, accumulated):
        return trained(core, loss, size, accumulated, max_grad_norm=limit)

    whole = quietly(run, mean_of(loss), 16, 1, cores=1, backend="cpu").results[0]
    results = quietly(run, loss, size, accumulated, cores=cores, backend=backend).results
    # A mean over parts is not the mean of all, so the last number is that of the weighted loss.
    whole[1][2] = whole[1][1]
    for found in results:
        assert_close(found, whole)
        assert [line for line in found[2] if "(total, weight)" in line]


def test_a_last_step_with_fewer_batches_trains_on_the_mean_of_its_own():
    def reference():
        """Three steps of PyTorch: 8, 8 and 4 samples."""
        torch.manual_seed(1)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        data = Sentences(20)
        losses = []
        for places in (range(8), range(8, 16), range(16, 20)):
            inputs, labels = torch.utils.data.default_collate([data[place] for place in places])
            total, weight = tokens(model(inputs), labels)
            (total / weight).backward()
            losses.append((total.item(), weight.item()))
            optimizer.step()
            optimizer.zero_grad()
        totals, weights = zip(*losses, strict=True)
        return list(model.parameters()), sum(totals) / sum(weights)

    weights, loss = reference()
    result = quietly(trained, tokens, 2, 4, 20, 1, False, False, cores=1, backend="cpu").results[0]
    for mine, other in zip(result[0], weights, strict=True):
        assert (mine - other).abs().max() < 1e-6
    assert result[1][0] == pytest.approx(loss, abs=1e-6)
    assert any("the last step of an epoch has 2 of 4 batches" in line for line in result[2])


def test_a_plain_mean_of_a_last_step_with_fewer_batches_is_over_its_own():
    def train(core, size, accumulated, shuffle=False):
        torch.manual_seed(1)
        model = core.model(nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(10, 5, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
        batches = core.batches(data, batch_size=size, shuffle=shuffle)
        options = {"accumulate_grad_batches": accumulated, "epochs": 2}
        history = fit(core, model, optimizer, nn.MSELoss(), batches, **options)
        assert [row["step"] for row in history.epochs] == [3, 6]
        return core.to_host(model.weight.detach())

    torch.manual_seed(1)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(10, 5, generator=torch.Generator().manual_seed(0))
    for part in 2 * [inputs[:4], inputs[4:8], inputs[8:]]:
        optimizer.zero_grad()
        F.mse_loss(model(part), part[:, :1]).backward()
        optimizer.step()
    result = quietly(train, 2, 2, cores=1, backend="cpu").results[0]
    assert (result - model.weight).abs().max() < 1e-6
    one, two = (
        quietly(train, 2 // cores, 2, True, cores=cores, backend="cpu").results[0]
        for cores in (1, 2)
    )
    assert (one - two).abs().max() < 1e-6


@pytest.mark.xla
@pytest.mark.parametrize("accumulated", [1, 2, 3])
def test_a_replayed_step_divides_by_the_weight_of_its_own_batches(accumulated):
    def both(core):
        runs = {}
        for replay in (True, False):
            runs[replay] = trained(
                core, tokens, 2, accumulated, 64, 3, adam=True, replay=replay,
                options=FitOptions(log_every=4),
            )  # fmt: skip
        return runs

    runs = quietly(both, cores=1, backend="xla:cpu").results[0]
    assert any("replayed from step" in line for line in runs[True][2]), "\n".join(runs[True][2])
    for mine, other in zip(runs[True][0], runs[False][0], strict=True):
        assert torch.equal(mine, other)
    assert runs[True][1] == runs[False][1]
    if accumulated == 3:
        return  # its last step has fewer batches, which no batch size of one step has
    plain = quietly(
        trained, mean_of(tokens), 2 * accumulated, 1, 64, 3, True, cores=1, backend="cpu"
    ).results[0]
    for mine, other in zip(runs[True][0], plain[0], strict=True):
        assert (mine - other).abs().max() < 1e-4  # Adam divides by a small number


def test_the_loss_of_an_interval_counts_each_step_by_its_weight():
    def train(core):
        model = core.model(nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        batches = core.batches(Sentences(16), batch_size=4)
        history = fit(core, model, optimizer, tokens, batches)
        return history.epochs[0]["train_loss"], evaluate(core, model, tokens, batches).loss

    train_loss, evaluated = quietly(train, cores=2, backend="cpu").results[0]
    assert train_loss == pytest.approx(evaluated, abs=1e-6)


def test_a_core_without_any_target_adds_nothing_and_a_step_without_any_is_an_error():
    class Half(Sentences):
        """The second core of two has no labels."""

        def __getitem__(self, index):
            inputs, labels = super().__getitem__(index)
            if index >= 8:
                labels = torch.full_like(labels, -100)
            return inputs, labels

    def train(core, data, size):
        torch.manual_seed(1)
        model = core.model(nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        fit(core, model, optimizer, tokens, core.batches(data, batch_size=size))
        return core.to_host(model.weight.detach())

    divided = quietly(train, Half(), 2, cores=2, backend="cpu").results[0]
    whole = quietly(train, Sentences(8), 2, cores=1, backend="cpu").results[0]
    assert (divided - whole).abs().max() < 1e-6
    with pytest.raises(WorkerError) as failed:
        quietly(train, Half(), 2, cores=1, backend="cpu")
    assert "the weight of the loss is 0 at step 5" in str(failed.value)


CROSS_ENTROPY = nn.functional.cross_entropy
PARTS = {
    "a dict": (lambda o, t: {"class": CROSS_ENTROPY(o, t)}, "sum("),
    "a tuple with a dict": (lambda o, t: (CROSS_ENTROPY(o, t), {"size": 1.0}), "[0]"),
    "a tuple with outputs": (lambda o, t: (CROSS_ENTROPY(o, t), o), "[0]"),
    "three parts": (lambda o, t: (CROSS_ENTROPY(o, t), 1.0, 2.0), "[0]"),
    "item": (lambda o, t: CROSS_ENTROPY(o, t).item(), ".item()"),
    "detached": (lambda o, t: CROSS_ENTROPY(o, t).detach(), ".detach()"),
    "several numbers": (lambda o, t: CROSS_ENTROPY(o, t, reduction="none"), ".mean()"),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_loss_in_parts_is_refused_with_a_fix_for_its_kind(kind):
    loss, fix = PARTS[kind]

    def train(core):
        model = core.model(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.zeros(16).long())
        fit(core, model, optimizer, loss, core.batches(data, batch_size=4))

    with pytest.raises(WorkerError) as failed:
        quietly(train, cores=1, backend="cpu")
    lines = str(failed.value).split("\n\n")[0].splitlines()
    assert fix in [line for line in lines if "fix:" in line][0]


def test_a_loss_of_two_kinds_is_refused():
    def loss(outputs, targets):
        total, weight = tokens(outputs, targets)
        return (total, weight) if weight > 16 else total / weight

    with pytest.raises(WorkerError, match="for some batches"):
        quietly(trained, loss, 4, cores=1, backend="cpu")


def test_a_loop_of_ones_own_divides_by_the_weight_of_all_cores():
    def train(core, size):
        torch.manual_seed(1)
        model = core.model(nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for inputs, labels in core.batches(Sentences(), batch_size=size, shuffle=True):
            with core.step():
                total, weight = tokens(model(inputs), labels)
                total.backward()
                core.optimizer_step(optimizer, weight=weight.float())
        return core.to_host(model.weight.detach())

    whole, divided = (
        quietly(train, 8 // cores, cores=cores, backend="cpu").results[0] for cores in (1, 2)
    )
    assert (whole - divided).abs().max() < 1e-6


class Masks(torch.utils.data.Dataset):
    """Segmentation: 6 x 6 masks of 3 classes, of which a part that varies is 255, not labelled."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        numbers = torch.Generator().manual_seed(index)
        mask = torch.randint(3, (6, 6), generator=numbers)
        mask[: index % 6] = 255
        return torch.randn(3, 6, 6, generator=numbers), mask


def of_pixels(outputs, masks):
    weights = torch.tensor(WEIGHTS, device=outputs.device)
    total = F.cross_entropy(outputs, masks, weight=weights, ignore_index=255, reduction="sum")
    return total, weights[masks.where(masks != 255, 0)].where(masks != 255, 0).sum()


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_segmentation_with_a_clipped_norm_and_momentum_equals_pytorch_over_epochs(backend):
    def network():
        torch.manual_seed(1)
        return nn.Conv2d(3, 3, 1)

    def work(core):
        model = core.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        batches = core.batches(Masks(), batch_size=1, shuffle=True)
        history = fit(
            core, model, optimizer, of_pixels, batches,
            epochs=2, accumulate_grad_batches=4, max_grad_norm=0.3,
        )  # fmt: skip
        order = [batches.indices(epoch) for epoch in range(2)]
        return core.to_host([*model.parameters()]), order, history.epochs[-1]["train_loss"]

    results = quietly(work, cores=2, backend=backend).results
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    data = Masks()
    loss = nn.CrossEntropyLoss(torch.tensor(WEIGHTS), ignore_index=255)
    for epoch in range(2):
        cores = [order[epoch] for _, order, _ in results]
        totals = torch.zeros(2)
        for step in (slice(0, 4), slice(4, 6)):
            samples = []
            for one in cores:
                samples += [batch[0] for batch in one[step]]
            images, masks = torch.utils.data.default_collate([data[one] for one in samples])
            outputs = model(images)
            totals += torch.tensor([part.item() for part in of_pixels(outputs, masks)])
            loss(outputs, masks).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    for weights, _, train_loss in results:
        for mine, other in zip(weights, model.parameters(), strict=True):
            assert (mine - other).abs().max() < 1e-6
        assert train_loss == pytest.approx((totals[0] / totals[1]).item(), abs=1e-6)


def test_a_loss_without_return_is_told_to_return():
    def loss(outputs, targets):
        CROSS_ENTROPY(outputs, targets)

    with pytest.raises(ValueError, match="the loss must return one number, got None") as error:
        as_loss(loss(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)))
    assert error.value.fix.startswith("end the function with `return loss`")
    assert "mean" not in error.value.fix
