"""The FLOPs of a forward pass, against published and computed values."""

import math

import pytest
import torch
import torchvision
from helpers.launching import DRY_RUNS, quietly
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tpukit.essentials.backends import Topology
from tpukit.essentials.launcher import FlopCounter
from tpukit.essentials.launcher.worker import World


def counted(call, *args):
    counter = FlopCounter()
    with counter.counting():
        call(*args)
    assert not counter.problem
    return counter.flops


# GFLOP of the forward pass of one sample, by FlopCounterMode of torch 2.9. torchvision's table has
# half as many, because it counts a multiplication with its addition once: 3.66 and 17.56.
MODELS = {
    "ResNet-34": (torchvision.models.resnet34, (3, 224, 224), 7.3275),
    "ViT-B/16": (torchvision.models.vit_b_16, (3, 224, 224), 35.1277),
    "a block of GPT": (
        lambda: nn.TransformerEncoderLayer(768, nhead=12, dim_feedforward=3072, batch_first=True),
        (1024, 768),
        17.7167,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_counts_three_forward_passes(name):
    make, shape, gflops = MODELS[name]
    with torch.device("meta"):
        model = make()
        batch = torch.ones(2, *shape)
    assert counted(model, batch) == pytest.approx(3 * 2 * gflops * 1e9, rel=1e-4)


PRODUCTS = {
    "an operator": lambda x: x @ torch.ones(6, 5),
    "an operator the other way": lambda x: torch.ones(5, 4) @ x,
    "mm": lambda x: x.mm(torch.ones(6, 5)),
    "mm by name": lambda x: torch.mm(input=x, mat2=torch.ones(6, 5)),
    "addmm": lambda x: torch.addmm(torch.ones(5), x, torch.ones(6, 5)),
    "einsum": lambda x: torch.einsum("ab,bc->ac", x, torch.ones(6, 5)),
    "tensordot": lambda x: torch.tensordot(x, torch.ones(6, 5), dims=1),
    "in bfloat16": lambda x: x.bfloat16() @ torch.ones(6, 5, dtype=torch.bfloat16),
    "linear": lambda x: F.linear(x, torch.ones(5, 6)),
    "conv1d": lambda x: F.conv1d(x[None], torch.ones(5, 4, 1)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[None], torch.ones(4, 5, 1)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
    "a grouped convolution": lambda x: F.conv1d(x[None], torch.ones(8, 1, 3), groups=4),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_counts_as_torch_counts_it(name):
    product = PRODUCTS[name]
    with torch.device("meta"), FlopCounterMode(display=False) as expected:
        product(torch.ones(4, 6))
    assert expected.get_total_flops()
    assert counted(product, torch.ones(4, 6, requires_grad=True)) == 3 * expected.get_total_flops()


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda make: make.__name__)
def test_a_recurrent_layer_counts_the_products_of_all_its_steps(make):
    # By name, because torch_xla replaces nn.GRU when it is imported.
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[make.__name__]
    steps, batch, features, hidden = 10, 4, 32, 64
    products = 2 * steps * batch * gates * hidden * (features + hidden)
    assert counted(make(features, hidden), torch.ones(steps, batch, features)) == 3 * products


def test_autocast_changes_nothing():
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = counted(model, torch.ones(4, 6))
    assert found == 3 * 2 * 4 * (6 * 7 + 7 * 5)


def frozen(*numbers):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    for number in numbers:
        model[number].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("numbers", "passes"),
    [((), 9), ((0,), 7), ((0, 1), 5), ((1,), 8), ((1, 2), 7), ((0, 1, 2), 3)],
)
def test_a_frozen_weight_has_no_gradient_and_what_lies_below_it_no_backward_pass(numbers, passes):
    forward_pass = 2 * 4 * 6 * 6
    assert counted(frozen(*numbers), torch.ones(4, 6)) == passes * forward_pass


def test_without_gradients_a_pass_counts_once():
    with torch.no_grad():
        assert counted(frozen(), torch.ones(4, 6)) == 3 * 2 * 4 * 6 * 6


def test_a_frozen_bias_changes_nothing():
    layer = nn.Linear(6, 6)
    layer.bias.requires_grad_(False)
    assert counted(layer, torch.ones(4, 6)) == 3 * 2 * 4 * 6 * 6


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("numbers", [(), (1,)])
def test_a_checkpointed_block_counts_as_any_other(use_reentrant, numbers):
    model = frozen(*numbers)
    batch = torch.ones(4, 6, requires_grad=True)
    counter = FlopCounter()
    with counter.counting():
        output = checkpoint(model, batch, use_reentrant=use_reentrant)
    output.sum().backward()
    assert counter.flops == counted(model, batch)


@pytest.mark.xla
def test_a_block_of_torch_xlas_checkpoint_counts_as_any_other():
    def work(core):
        from torch_xla.utils.checkpoint import checkpoint as of_torch_xla

        model = core.model(frozen(1))
        batch = torch.ones(4, 6, device=core.device, requires_grad=True)
        return counted(of_torch_xla, model, batch), counted(model, batch)

    ((checkpointed, plain),) = quietly(work, cores=1, backend="xla:cpu").results
    assert checkpointed == plain == 8 * 2 * 4 * 6 * 6


def test_the_results_and_gradients_are_the_same_bits():
    def step(count):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
        batch = torch.randn(2, 8, 32)
        counter = FlopCounter()
        if count:
            with counter.counting():
                loss = model(batch).square().mean()
        else:
            loss = model(batch).square().mean()
        loss.backward()
        return [loss.detach(), *(one.grad for one in model.parameters()), torch.rand(3)]

    assert all(map(torch.equal, step(count=True), step(count=False)))


def test_an_operation_that_cannot_be_counted_is_a_problem_and_no_error():
    counter = FlopCounter()
    with counter.counting():
        result = torch.mm(torch.eye(3).to_sparse(), torch.ones(3, 3))
    assert result.equal(torch.ones(3, 3))
    problem = "mm cannot be counted: its FLOPs depend on the values of a sparse tensor"
    assert counter.problem == problem


def loop(core, steps=4):
    model = core.model(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = (core.tflops_per_second, core.mfu)
    for _ in range(steps):
        with core.step():
            for _ in range(2):  # accumulated
                with core.counting_flops():
                    loss = model(torch.ones(8, 64, device=core.device)).mean()
                loss.backward()
            core.optimizer_step(optimizer)
    return before, core.internal.flops.flops, core.tflops_per_second, core.mfu


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_a_loop_of_your_own_knows_its_flops_and_a_dry_run_has_no_mfu(backend):
    for before, flops, tflops_per_second, mfu in quietly(loop, backend=backend).results:
        assert before == (None, None)
        assert flops == 2 * 3 * 2 * 8 * 64 * 64
        assert 0 < tflops_per_second < 1
        assert mfu is None


def test_the_peak_is_that_of_the_chip_and_a_dry_run_has_none():
    chip = Topology("xla", "TPU v5e core", cores=8, processes=8, generation="v5e")
    assert World.of(chip).peak_tflops == 197
    simulated = Topology("xla", "x", cores=8, processes=8, generation="v5e", is_dry_run=True)
    assert World.of(simulated).peak_tflops is None
    unknown = Topology("xla", "TPU 7x core", cores=8, processes=4, generation="7x")
    assert World.of(unknown).peak_tflops is None


def test_mfu_is_the_share_of_the_peak():
    def work(core):
        core.peak_tflops = 2.0
        *_, tflops_per_second, mfu = loop(core)
        return tflops_per_second, mfu

    ((tflops_per_second, mfu),) = quietly(work, cores=1).results
    assert math.isclose(mfu, tflops_per_second / 2)
