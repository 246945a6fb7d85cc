import math

import numpy
import pytest
import torch
from torch import nn

import tpukit
from tpukit import launch
from tpukit.training.lars import LARS


def slow(weights, gradients, *, lr, momentum, weight_decay, trust):
    """Take steps with a list of gradients as the paper writes them, number by number; return the last weights."""
    weights, velocity = weights.astype(float), numpy.zeros(weights.shape)
    for gradient in gradients:
        rate, decay = lr, 0.0
        if weights.ndim > 1:
            size = sum(value**2 for value in weights.ravel()) ** 0.5
            slope = sum(value**2 for value in gradient.ravel()) ** 0.5
            decay = weight_decay
            if size > 0 and slope > 0:
                rate = lr * trust * size / (slope + weight_decay * size)
        velocity = momentum * velocity + rate * (gradient + decay * weights)
        weights = weights - velocity
    return weights


CASES = {
    "a matrix": ((4, 3), {}),
    "a convolution": ((2, 3, 3, 3), {"weight_decay": 0.1}),
    "a bias takes plain steps without decay": ((5,), {"weight_decay": 0.1}),
    "no momentum": ((4, 3), {"momentum": 0.0}),
    "another trust": ((4, 3), {"trust": 0.02, "weight_decay": 0.01}),
}


@pytest.mark.parametrize(("shape", "options"), CASES.values(), ids=CASES)
def test_it_takes_the_steps_of_the_paper(shape, options):
    options = {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.0, "trust": 0.001} | options
    random = numpy.random.default_rng(0)
    weights, gradients = random.normal(size=shape), random.normal(size=(5, *shape))
    parameter = nn.Parameter(torch.tensor(weights))
    optimizer = LARS([parameter], **options)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    assert parameter.detach().numpy() == pytest.approx(
        slow(weights, gradients, **options), rel=1e-9
    )


@pytest.mark.parametrize(("weights", "gradient"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_layer_of_zeros_takes_a_plain_step_and_stays_finite(weights, gradient):
    parameter = nn.Parameter(torch.full((2, 2), weights))
    parameter.grad = torch.full((2, 2), gradient)
    LARS([parameter], lr=0.5).step()
    assert parameter.detach().numpy() == pytest.approx(numpy.full((2, 2), weights - 0.5 * gradient))


def test_a_step_does_not_depend_on_the_size_of_the_gradient():
    changes = []
    for scale in (1.0, 1000.0):
        parameter = nn.Parameter(torch.ones(3, 3))
        parameter.grad = torch.full((3, 3), scale)
        LARS([parameter], lr=1.0).step()
        changes.append(1 - parameter.detach().numpy())
    assert changes[0] == pytest.approx(changes[1])


def test_a_saved_state_goes_on_with_the_same_steps():
    def three_steps(through_a_file):
        parameter = nn.Parameter(torch.ones(2, 2))
        optimizer = LARS([parameter], lr=2.0)
        for number in range(3):
            if through_a_file:
                state = optimizer.state_dict()
                optimizer = LARS([parameter], lr=1.0)
                optimizer.load_state_dict(state)
            parameter.grad = torch.full((2, 2), float(number))
            optimizer.step()
        return parameter.detach().tolist()

    assert three_steps(through_a_file=True) == three_steps(through_a_file=False)


WRONG = [{"lr": 0.0}, {"lr": -1.0}, {"lr": 1.0, "momentum": 1.0}, {"lr": 1.0, "trust": 0.0}]


WRONG += [{"lr": math.nan}, {"lr": 1.0, "trust": math.nan}, {"lr": 1.0, "weight_decay": math.nan}]


@pytest.mark.parametrize("options", [*WRONG, {"lr": 1.0, "weight_decay": -1.0}])
def test_a_number_out_of_range_is_refused_and_the_fix_helps(options):
    parameters = [nn.Parameter(torch.ones(1))]
    with pytest.raises(
        ValueError, match=r"LARS takes lr and trust above 0.*\n  found: lr=.*\n  fix:   "
    ):
        LARS(parameters, **options)
    LARS(parameters, lr=1.0)


@pytest.mark.xla
def test_on_xla_a_changing_rate_compiles_nothing_and_copies_nothing_to_the_host():
    def work(core):
        model = core.model(nn.Linear(3, 2))
        optimizer = tpukit.training.LARS(model.parameters(), lr=2.0, weight_decay=0.1)
        schedule = tpukit.training.schedules.constant(optimizer, warmup=20)
        inputs = core.to_device([torch.ones(4, 3)])[0]
        counted = []
        for _ in range(8):
            with core.step():
                model(inputs).square().mean().backward()
                core.optimizer_step(optimizer)
            schedule.step()
            metrics = core.backend.metrics()
            counted.append(
                (core.backend.compiles()[0], metrics.get("TransferFromDeviceTime", (0, 0))[0])
            )
        return counted

    counted = launch(work, cores=1, backend="xla:cpu", progress="off").results[0]
    assert counted[2] == counted[-1]
    assert counted[-1][1] == 0
