"""A ResNet that pools before it normalises is the same function, in `fit` too, and is itself again afterwards."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from tpukit import fit, launch
from tpukit.essentials import backends
from tpukit.essentials.backends.cpu import Cpu, CpuRuntime
from tpukit.train.stem import pooling_first


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
    return {"out": out.detach(), **gradients, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_it_is_the_same_function_with_the_same_gradients_and_statistics(block):
    plain, changed = resnet(block).double(), resnet(block).double()
    expected = trained(plain, images())
    with pooling_first(changed) as count:
        found = trained(changed, images())
    assert count == 1
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9, msg=lambda why, at=name: at + why)


def test_one_value_a_channel_is_refused_in_batchnorms_own_words():
    x = torch.zeros(1, 3, 1, 1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as expected:
        resnet().train()(x)
    with pooling_first(model := resnet()), pytest.raises(ValueError, match="Expected more") as found:
        model.train()(x)
    assert str(found.value) == str(expected.value)


def test_in_bfloat16_it_differs_by_rounding_alone():
    plain, changed = resnet(), resnet()
    x = images(8, dtype=torch.float32)
    exact = plain.train()(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        usual = copy.deepcopy(plain).train()(x).float()
        with pooling_first(changed):
            found = changed.train()(x).float()
    assert (found - exact).abs().max() < 2 * (usual - exact).abs().max() + 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_train_as_they_do_without_it(dtype):
    plain, changed = resnet().to(dtype), resnet().to(dtype)
    expected = trained(plain, images(8, dtype=dtype))
    with pooling_first(changed):
        found = trained(changed, images(8, dtype=dtype))
    assert {name: value.dtype for name, value in found.items()} == {name: one.dtype for name, one in expected.items()}
    for name in ("bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked"):
        torch.testing.assert_close(found[name], expected[name], rtol=0.02, atol=0.02)
    assert found["out"].isfinite().all()


def test_it_normalises_a_quarter_of_the_values():
    seen = []

    class Look(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend((func.overloadpacket, out.numel()) for out in [out] if isinstance(out, torch.Tensor))
            return out

    with pooling_first(model := resnet()), torch.no_grad(), Look():
        model.train()(images(4, 32, torch.float32))
    after = [name for name, count in seen if count >= 4 * 64 * 16 * 16]  # as many as the convolution returns
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
    with pooling_first(changed) as count:
        found = changed.train()(images(dtype=torch.float32))
    assert count == 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", ["evaluation", "a frozen stem"])
def test_what_uses_running_statistics_stays_as_it_is(mode):
    plain, changed = resnet(), resnet()
    for model in (plain, changed):
        model.eval() if mode == "evaluation" else model.train().bn1.eval()
    with pooling_first(changed):
        assert torch.equal(changed(images(dtype=torch.float32)), plain(images(dtype=torch.float32)))


def test_afterwards_the_layers_are_what_they_were_also_after_an_error():
    model, names = resnet(), list(resnet().state_dict())
    before = {name: (type(part), set(vars(part))) for name, part in model.named_modules()}

    def fails():
        with pooling_first(model):
            assert list(model.state_dict()) == names
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert {name: (type(part), set(vars(part))) for name, part in model.named_modules()} == before


def test_a_copy_that_is_made_or_pickled_meanwhile_works_on_its_own():
    with pooling_first(model := resnet().double()):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    expected = trained(model, images())
    for one in copies:
        torch.testing.assert_close(trained(one, images()), expected)


class OwnClass(ResNet):
    pass


class OwnForward(ResNet):
    def _forward_impl(self, x):
        return self.bn1(self.conv1(x)).mean((1, 2, 3))


def hooked(model, name, method):
    getattr(getattr(model, name), method)(lambda *_: None)
    return model


def with_layer(name, layer):
    setattr(model := resnet(), name, layer)
    return model


def own_forward_of_one():
    model = resnet()
    model._forward_impl = lambda x: model.bn1(model.conv1(x)).mean((1, 2, 3))
    return model


LEFT_ALONE = {
    "a class of its own": lambda: resnet(kind=OwnClass),
    "a forward of its own": lambda: resnet(kind=OwnForward),
    "a forward of this one object": own_forward_of_one,
    "another network with such layers": lambda: nn.ModuleDict(
        {"conv1": nn.Conv2d(3, 4, 3), "bn1": nn.BatchNorm2d(4), "relu": nn.ReLU(), "maxpool": nn.MaxPool2d(2)}
    ),
    "somebody looks at the BatchNorm": lambda: hooked(resnet(), "bn1", "register_forward_hook"),
    "somebody looks at the pooling's input": lambda: hooked(resnet(), "maxpool", "register_forward_pre_hook"),
    "somebody looks at gradients": lambda: hooked(resnet(), "conv1", "register_full_backward_hook"),
    "no BatchNorm": lambda: with_layer("bn1", nn.GroupNorm(4, 64)),
    "no pooling, for small images": lambda: with_layer("maxpool", nn.Identity()),
    "another activation, which need not keep the order": lambda: with_layer("relu", nn.SiLU()),
    "statistics of the batch alone": lambda: with_layer("bn1", nn.BatchNorm2d(64, track_running_stats=False)),
    "a mean over all steps": lambda: with_layer("bn1", nn.BatchNorm2d(64, momentum=None)),
    "a bias": lambda: with_layer("conv1", nn.Conv2d(3, 64, 7, 2, 3)),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_not_torchvisions_own_order_is_left_alone(case):
    model = LEFT_ALONE[case]()
    before = [type(part) for part in model.modules()]
    with pooling_first(model) as count:
        assert count == 0
        assert [type(part) for part in model.modules()] == before


class InGraph(Cpu):
    """CPU tensors of a core whose collectives are in the graph, as a TPU's are: there `fit` changes the stem."""

    in_graph = True


class InGraphRuntime(CpuRuntime):
    name = "in graph"
    backend = InGraph


@pytest.fixture(autouse=True)
def _in_graph(monkeypatch):
    monkeypatch.setitem(backends.runtimes(), "in graph", InGraphRuntime())


class Shades:
    """Images (3, 32, 32) and whether each is light."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 32, 32, generator=generator) + (index % 2) - 0.5
        return image, torch.tensor([index % 2.0, (index + 1) % 2.0])


def training(core, options, *, epochs=2, on_epoch=None):
    """Return the history, the weights, and the class of the model during and after the training."""
    model = core.model(resnet(seed=3))
    kinds = []

    def look(history):
        kinds.append(type(model).__name__)
        return on_epoch and on_epoch(history)

    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if options.pop("ema", False) else None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = Shades(options.pop("count", 48))
    train = core.batches(data, batch_size=8, shuffle=True, drop_last=True)
    valid = core.batches(data, batch_size=8)
    loss = nn.BCEWithLogitsLoss()
    options = {"average": average, "on_epoch": look, "log_every": 1, "epochs": epochs, **options}
    found = fit(core, model, optimizer, loss, train, valid, **options)
    kinds.append(type(model).__name__)
    return found, {name: value.clone() for name, value in model.state_dict().items()}, kinds


def run(backend, epochs=2, **options):
    def train(core):
        return training(core, dict(options), epochs=epochs)

    return launch(train, cores=1, backend=backend, progress="off").results[0]


def test_fit_uses_it_where_the_step_is_a_graph_and_training_is_the_same():
    usual, weights, kinds = run("cpu")
    assert kinds == ["ResNet"] * 3
    found, changed, kinds = run("in graph")
    assert kinds == ["PoolingFirst", "PoolingFirst", "ResNet"]
    assert changed.keys() == weights.keys()
    for one, other in zip(found.intervals, usual.intervals, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=0.02)
    assert found.epochs[-1]["valid_loss"] == pytest.approx(usual.epochs[-1]["valid_loss"], rel=0.05)


def test_with_bfloat16_training_stays_near_float32():
    usual, _, _ = run("cpu", epochs=1, count=16)
    found, _, _ = run("in graph", epochs=1, bf16=True, count=16)  # eight times slower on a CPU
    for one, other in zip(found.epochs, usual.epochs, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=0.1, abs=0.02)


@pytest.mark.parametrize("ema", [False, True], ids=["the model", "its average"])
def test_a_resumed_training_equals_the_uninterrupted_one(tmp_path, ema):
    whole, weights, _ = run("in graph", epochs=2, ema=ema)
    run("in graph", epochs=1, ema=ema, folder=tmp_path)
    resumed, continued, _ = run("in graph", epochs=2, ema=ema, folder=tmp_path)
    assert resumed.resumed
    assert all(torch.equal(continued[name], weights[name]) for name in weights)
    assert resumed.epochs[-1]["valid_loss"] == whole.epochs[-1]["valid_loss"]
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    resnet().load_state_dict(best)


def test_the_best_weights_come_back_after_an_early_stop():
    found, weights, kinds = run("in graph", epochs=6, patience=1, restore_best=True)
    assert kinds[-1] == "ResNet"
    model = resnet()
    model.load_state_dict(weights)
    with torch.no_grad():
        rows = [Shades(48)[index] for index in range(48)]
        out = model.eval()(torch.stack([row[0] for row in rows]))
        loss = nn.functional.binary_cross_entropy_with_logits(out, torch.stack([row[1] for row in rows]))
    assert loss.item() == pytest.approx(found.best["valid_loss"], rel=1e-3)
