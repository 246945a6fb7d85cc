"""A ResNet that pools before it normalises is the same function."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from tpukit import launch, pe
from tpukit.pe import stem
from tpukit.pe.stem import PoolingFirst


class PoolingFirstOnCpu(PoolingFirst):
    """It pools first on the CPU as well, where these tests run."""

    devices = ("cpu",)


def pooling_first(model):
    """Make a ResNet such a one, as `tpukit.pe.resnet34(pool_first=True)` makes it; return it."""
    model.__class__ = PoolingFirstOnCpu
    return model


def resnet(block=BasicBlock, kind=ResNet, seed=0):
    """Return a small ResNet whose stem has weights and biases of both signs."""
    torch.manual_seed(seed)
    model = kind(block, [1, 1, 1, 1], num_classes=2)
    with torch.no_grad():
        model.bn1.weight.normal_()
        model.bn1.bias.normal_()
    return model


def images(count=4, size=36, dtype=torch.float64):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)


def trained(model, x):
    """Return the output of one step, its gradients, and the buffers after it."""
    out = model.train()(x)
    (out**2).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {
        "out": out.detach(),
        **gradients,
        **{name: buffer.clone() for name, buffer in model.named_buffers()},
    }


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_it_is_the_same_function_with_the_same_gradients_and_statistics(block):
    plain, changed = resnet(block).double(), resnet(block).double()
    expected = trained(plain, images())
    found = trained(pooling_first(changed), images())
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-9, atol=1e-9, msg=lambda why, at=name: at + why
        )


def test_one_value_a_channel_is_refused_in_batchnorms_own_words():
    x = torch.zeros(1, 3, 1, 1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as expected:
        resnet().train()(x)
    with pytest.raises(ValueError, match="Expected more") as found:
        pooling_first(resnet()).train()(x)
    assert str(found.value) == str(expected.value)


def test_in_bfloat16_it_differs_by_rounding_alone():
    plain, changed = resnet(), resnet()
    x = images(8, dtype=torch.float32)
    exact = plain.train()(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        usual = copy.deepcopy(plain).train()(x).float()
        found = pooling_first(changed).train()(x).float()
    assert (found - exact).abs().max() < 2 * (usual - exact).abs().max() + 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_train_as_they_do_without_it(dtype):
    plain, changed = resnet().to(dtype), resnet().to(dtype)
    expected = trained(plain, images(8, dtype=dtype))
    found = trained(pooling_first(changed), images(8, dtype=dtype))
    assert {name: value.dtype for name, value in found.items()} == {
        name: one.dtype for name, one in expected.items()
    }
    for name in ("bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked"):
        torch.testing.assert_close(found[name], expected[name], rtol=0.02, atol=0.02)
    assert found["out"].isfinite().all()


def test_it_normalises_a_quarter_of_the_values():
    seen = []

    class Look(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(
                (func.overloadpacket, out.numel()) for out in [out] if isinstance(out, torch.Tensor)
            )
            return out

    with torch.no_grad(), Look():
        pooling_first(resnet()).train()(images(4, 32, torch.float32))
    after = [
        name for name, count in seen if count >= 4 * 64 * 16 * 16
    ]  # as many as the convolution returns
    aten = torch.ops.aten
    assert after.count(aten.mul) == 1  # of its squares
    assert not {aten.native_batch_norm, aten.relu, aten.relu_, aten.sub, aten.add} & set(after)


def test_who_calls_the_layers_of_a_resnet_sees_no_difference():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = resnet()

        def forward(self, x):
            first = self.encoder.relu(self.encoder.bn1(self.encoder.conv1(x)))
            return first, self.encoder.layer1(self.encoder.maxpool(first))

    plain, changed = Decoder(), Decoder()
    expected = plain.train()(images(dtype=torch.float32))
    pooling_first(changed.encoder)
    found = changed.train()(images(dtype=torch.float32))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", ["evaluation", "a frozen stem"])
def test_what_uses_running_statistics_stays_as_it_is(mode):
    plain, changed = resnet(), resnet()
    for model in (plain, changed):
        model.eval() if mode == "evaluation" else model.train().bn1.eval()
    pooling_first(changed)
    assert torch.equal(changed(images(dtype=torch.float32)), plain(images(dtype=torch.float32)))


def test_a_copy_and_a_pickle_have_the_same_names_and_work_on_their_own():
    model = pooling_first(resnet().double())
    assert list(model.state_dict()) == list(resnet().state_dict())
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    expected = trained(model, images())
    for one in copies:
        torch.testing.assert_close(trained(one, images()), expected)


def hooked(model, name, method):
    getattr(getattr(model, name), method)(lambda *_: None)
    return model


def with_layer(name, layer):
    setattr(model := resnet(), name, layer)
    return model


LEFT_ALONE = {
    "somebody looks at the BatchNorm": lambda: hooked(resnet(), "bn1", "register_forward_hook"),
    "somebody looks at the pooling's input": lambda: hooked(
        resnet(), "maxpool", "register_forward_pre_hook"
    ),
    "somebody looks at gradients": lambda: hooked(resnet(), "conv1", "register_full_backward_hook"),
    "no BatchNorm": lambda: with_layer("bn1", nn.GroupNorm(4, 64)),
    "no pooling, for small images": lambda: with_layer("maxpool", nn.Identity()),
    "another activation, which need not keep the order": lambda: with_layer("relu", nn.SiLU()),
    "statistics of the batch alone": lambda: with_layer(
        "bn1", nn.BatchNorm2d(64, track_running_stats=False)
    ),
    "a mean over all steps": lambda: with_layer("bn1", nn.BatchNorm2d(64, momentum=None)),
    "a bias": lambda: with_layer("conv1", nn.Conv2d(3, 64, 7, 2, 3)),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_a_stem_that_is_not_torchvisions_is_left_alone(case):
    plain = LEFT_ALONE[case]().train()
    changed = pooling_first(copy.deepcopy(plain))
    assert not changed._has_plain_stem()
    assert torch.equal(changed(images(dtype=torch.float32)), plain(images(dtype=torch.float32)))


def test_the_network_of_the_walkthrough_pools_first_only_if_asked_to():
    assert type(pe.resnet34()) is ResNet
    model = pe.resnet34(pool_first=True)
    assert isinstance(model, PoolingFirst)
    assert model._has_plain_stem()


@pytest.mark.xla
def test_on_xla_it_trains_as_torchvisions_does_on_a_cpu():
    def train(core, model):
        seen = []
        whole = stem._stem
        stem._stem = lambda *args: seen.append(args) or whole(*args)
        model = core.model(model.train())
        with core.step():
            (model(core.to_device([images()])[0]) ** 2).sum().backward()
        return len(seen), core.to_host(
            {"variance": model.bn1.running_var, "gradient": model.conv1.weight.grad}
        )

    model = resnet(kind=PoolingFirst).double()
    (none, usual), (once, found) = (
        launch(train, model, cores=1, backend=name, progress="off").results[0]
        for name in ("cpu", "xla:cpu")
    )
    assert (none, once) == (0, 1)
    for name in usual:
        torch.testing.assert_close(found[name], usual[name], rtol=1e-6, atol=1e-6)
