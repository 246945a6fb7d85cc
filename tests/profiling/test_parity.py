"""A model on the device beside the same on the host."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tpukit import WorkerError
from tpukit.profiling import compare, parity
from tpukit.simulator.build import why_not

SIMULATOR = pytest.param(
    "xla:simulator",
    marks=[pytest.mark.xla, pytest.mark.skipif(bool(why_not()), reason=why_not() or "")],
)
XLA = [pytest.param("xla:cpu", marks=pytest.mark.xla), SIMULATOR]


class Block(nn.Module):
    """Nested, with a layer used twice, one that works in place, and arithmetic between its layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.relu(self.norm(self.conv(self.conv(x)))) * 2 + x


class Net(nn.Module):
    """Blocks, attention, a recurrent layer; gives a dict of two tensors."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block())
        self.attention = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        self.recurrent = nn.LSTM(16, 5, batch_first=True)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(5, 2)

    def forward(self, images, scale=1.0):
        x = self.blocks(images).flatten(2)[:, :, :16]
        x, (hidden, _) = self.recurrent(self.attention(x))
        return {"labels": self.head(self.drop(x[:, -1])) * scale, "hidden": hidden}


def made(kind=Net):
    torch.manual_seed(0)
    return kind()


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_on_the_cpu_every_layer_is_the_same_and_the_model_is_left_alone():
    model = made()
    before, hooks = copy.deepcopy(model.state_dict()), len(model.head._forward_hooks)
    found = compare(model, IMAGES, backend="cpu")
    assert [layer.difference for layer in found.layers] == [0] * len(found.layers)
    assert found.first is None
    assert found.bits == 24
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert model.drop.training
    assert len(model.head._forward_hooks) == hooks == 0


def test_layers_are_named_in_the_order_of_their_computation():
    names = [layer.name for layer in compare(made(), IMAGES, backend="cpu").layers]
    assert names[:5] == [
        "blocks.0",
        "blocks.1.conv",
        "blocks.1.conv (2)",
        "blocks.1.norm",
        "blocks.1.relu",
    ]
    assert {"attention.linear1", "recurrent[0]", "recurrent[2]", "drop", "head"} <= {*names}
    assert [
        name for name in names if name.startswith("attention.self_attn")
    ]  # which calls no module of its own
    assert names[-2:] == ["the model[0]", "the model[1]"]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("backend", ["cpu", *XLA])
@pytest.mark.parametrize(
    "batch", [IMAGES, (IMAGES,), [IMAGES, 3.0], {"images": IMAGES, "scale": 3.0}]
)
def test_a_batch_is_whatever_the_model_is_called_with(backend, batch):
    class Scaled(nn.Conv2d):
        def forward(self, images, scale=1.0):
            return super().forward(images) * scale

    found = compare(Scaled(3, 2, 3), batch, backend=backend)
    assert [layer.name for layer in found.layers] == ["the model"]
    assert found.first is None


@pytest.mark.parametrize("backend", XLA)
def test_small_differences_through_torch_xla_are_explained(backend):
    found = compare(made(), IMAGES, backend=backend)
    assert found.first is None, found
    assert 0 < max(layer.difference for layer in found.layers) < 1e-4
    assert found.bits == (24 if backend == "xla:cpu" else 8)
    assert "all layers within what" in str(found)
    assert "ok" in found._repr_html_()


class HalfOnTheDevice(nn.Linear):
    def forward(self, x):
        if x.device.type == "xla":
            return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()
        return super().forward(x)


@pytest.mark.xla
def test_a_layer_in_bfloat16_is_the_first_that_is_not_explained_in_float32():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), HalfOnTheDevice(16, 16), nn.GELU(), nn.Linear(16, 2)
    )
    found = compare(model, (torch.randn(4, 8),), backend="xla:cpu")
    assert found.first.name == "2"
    assert 1e-4 < found.first.relative < 0.1
    assert "XLA:CPU beside this host: 2 is the first layer beyond what float32 explains" in str(
        found
    )
    assert [row[0] for row in found.rows()][1:4] == ["ok", "ok", "warning"]


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
@pytest.mark.xla
def test_a_wrong_layer_is_found_where_bfloat16_is_explained():
    class WrongOnTheDevice(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (0.9 if x.device.type == "xla" else 1.0)

    torch.manual_seed(0)
    found = compare(
        nn.Sequential(nn.Linear(8, 16), WrongOnTheDevice(16, 16)),
        torch.randn(4, 8),
        backend="xla:simulator",
    )
    assert found.first.name == "1"


def test_rounding_to_eight_bits_is_bfloat16():
    values = torch.cat(
        [
            torch.randn(10_000),
            torch.tensor([0.0, 1.00390625, 1.01171875, 3e38, math.inf, -math.inf]),
        ]
    )
    assert torch.equal(parity._rounded(values, 8), values.bfloat16().float())
    assert parity._rounded(torch.tensor(math.nan), 8).isnan()


@pytest.mark.parametrize("bits", [8, 11, 14])
def test_a_computer_that_rounds_its_factors_and_adds_up_in_another_order_is_explained(bits):
    """A chip imitated: products rounded as it does, everything else in float64."""
    model = made()
    host = parity._layer_outputs(copy.deepcopy(model), IMAGES)
    with parity._rounded_products(bits):
        rounded = parity._layer_outputs(copy.deepcopy(model), IMAGES)
    chip = chip_outputs(model, bits)

    def judged(layer, rounded, bits):
        return parity._judge(
            layer, host=host[layer], rounded=rounded[layer], device=chip[layer], bits=bits
        )

    layers = [judged(layer, rounded, bits) for layer in host]
    assert [layer.name for layer in layers if not layer.is_explained] == []
    assert max(layer.relative for layer in layers) > 2.0**-bits / 4  # it did round
    strict = [judged(layer, host, 24) for layer in host]
    assert not all(layer.is_explained for layer in strict) or bits == 14


def chip_outputs(model, bits):
    from unittest import mock

    def rounded(value, bits):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
            return value
        return original(value.float(), bits).double()

    original = parity._rounded
    with mock.patch.object(parity, "_rounded", rounded), parity._rounded_products(bits):
        return parity._layer_outputs(copy.deepcopy(model).double(), IMAGES.double())


@pytest.mark.xla
def test_a_model_that_takes_another_way_on_the_device_is_refused_in_words():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return (self.a if x.device.type == "cpu" else self.b)(x)

    with pytest.raises(
        WorkerError, match="uses other layers on xla:0 than on the host\n.*computes a, b"
    ):
        compare(Chooses(), torch.ones(1, 2), backend="xla:cpu")


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"compare takes a torch.nn.Module, got function"):
        compare(lambda x: x, torch.ones(1))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, math.nan], [1.5, math.nan], 0.5),
        ([math.inf], [math.inf], 0),
        ([math.inf], [1.0], math.inf),
        ([math.nan], [1.0], math.inf),
        ([], [], 0),
        ([1 + 1j], [1 + 3j], 2),
    ],
)
def test_numbers_that_are_not_finite_differ_unless_they_are_the_same(one, other, expected):
    assert parity._difference(torch.tensor(one), torch.tensor(other)) == expected


def test_the_imaginary_part_of_an_output_is_compared_too():
    batch = torch.tensor([[0.0, 1.0, 0.0, -1.0]])  # a sine, whose transform has no real part
    compared = compare(nn.Sequential(Transform()), batch, backend="cpu")
    layer = compared.layers[0]
    assert layer.difference == 0
    assert layer.explained == pytest.approx(2 * 2.0**-14)  # a share of the largest value, 2j


class Transform(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x)
