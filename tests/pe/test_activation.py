"""Where a network looked: the map against the formula, the share inside a mask, the figure, and a run on two cores."""

import numpy as np
import pytest
import torch

import tpukit
from tpukit import pe
from tpukit.pe.activation import enlarge


def small_network(seed=0):
    """Return a network of two layers whose outputs are ten."""
    torch.manual_seed(seed)
    body = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.BatchNorm2d(4), torch.nn.ReLU()
    )
    head = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 10)
    )
    return torch.nn.Sequential(body, head)


def test_a_map_is_the_sum_of_places_times_what_they_add_to_the_output():
    network, images = small_network().eval(), torch.randn(5, 3, 12, 8)
    places = network[0](images)
    weights = (
        network[1][2].weight[3].detach() / places[0, 0].numel()
    )  # the gradient of a mean and a linear layer
    expected = (places.detach() * weights.clamp(min=0)[None, :, None, None]).sum(1)
    with torch.no_grad():
        found = pe.class_activation(network, pe.LABELS[3], layer="0")(images)
    assert found.shape == (5, 6, 4)
    assert torch.allclose(found, expected, atol=1e-6)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_map_points_at_what_the_network_was_made_to_see():
    network = small_network().eval()
    with torch.no_grad():
        network[0][0].weight.zero_()
        network[0][0].weight[0, 1, 1, 1] = 1.0  # green
        network[1][2].weight.zero_()
        network[1][2].weight[0, 0] = 1.0
    images = torch.zeros(1, 3, 16, 16)
    images[0, 1, 4:6, 10:12] = 5.0
    masks = np.zeros((1, 16, 16), bool)
    masks[0, 2:8, 8:14] = True
    inside = pe.attention_in_mask(pe.class_activation(network, layer="0")(images), masks)
    assert inside.in_mask[0] > 0.9
    assert inside.mask_area[0] == pytest.approx(36 / 256)


class Corner(torch.nn.Module):
    """A network whose first output is the mean of the first rows and columns of an image."""

    def forward(self, images):
        seen = images[:, 0, :8, :16].mean((1, 2))
        return torch.stack([seen] + [0 * seen] * 9, dim=1)


def test_occlusion_finds_what_the_output_depends_on():
    images = torch.rand(3, 3, 32, 64, generator=torch.Generator().manual_seed(0))
    found = pe.occlusion(Corner(), patches=4)(images)
    assert found.shape == (3, 32, 64)
    assert torch.allclose(found[:, :8, :16], images[:, 0, :8, :16].mean((1, 2))[:, None, None])
    assert found[:, 8:].abs().max() == found[:, :, 16:].abs().max() == 0
    masks = np.zeros((3, 32, 64), bool)
    masks[:, :8, :16] = True
    shares = pe.attention_in_mask(found, masks)
    assert (shares.in_mask > 0.9).all()
    odd = pe.occlusion(Corner(), patches=5)(images[..., :33])
    assert odd.shape == (3, 32, 33)
    assert pe.occlusion(Corner(), pe.LABELS[1])(images).abs().max() == 0
    with pytest.raises(ValueError, match="there is no label"):
        pe.occlusion(Corner(), "heart")


def test_occlusion_runs_in_predict():
    images = torch.rand(5, 3, 16, 32, generator=torch.Generator().manual_seed(0))

    def work(core):
        batches = core.batches(torch.utils.data.TensorDataset(images), batch_size=1)
        return tpukit.predict(core, pe.occlusion(core.model(small_network())), batches)

    found = tpukit.launch(work, cores=2, progress="off").results[0]
    expected = pe.occlusion(small_network().eval())(images).detach()
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 128)])
def test_a_map_lies_at_the_centre_of_the_receptive_field(stages, height, width):
    layers = [torch.nn.Conv2d(1, 1, 3, 2, 1, bias=False) for _ in range(stages)]
    network = torch.nn.Sequential(*layers)
    for layer in layers:
        layer.weight.data = torch.ones(1, 1, 3, 3)
    stride = 2**stages
    places = [(3 * stride, 4 * stride), (2 * stride, 3 * stride)]
    images = torch.zeros(2, 1, height, width)
    for image, (row, column) in zip(images, places, strict=True):
        image[0, row, column] = 1.0
    with torch.no_grad():
        maps = network(images)[:, 0]
    large = enlarge(maps, (2, height, width))
    for found, (row, column) in zip(large, places, strict=True):
        middle = [(found.sum(1 - axis) * np.arange(found.shape[axis])).sum() for axis in (0, 1)]
        assert np.array(middle) / found.sum() == pytest.approx([row, column], abs=0.5)


def test_the_mean_map_is_the_baseline_of_a_network_that_answers_by_position():
    masks = np.zeros((4, 32, 32), bool)
    for number, mask in enumerate(masks):
        mask[8 * number : 8 * number + 4, :4] = True
    same = np.zeros((4, 4, 4))
    same[:, 1, 0] = [1, 2, 3, 4]
    inside = pe.attention_in_mask(same, masks)
    assert inside.in_mask.tolist() == pytest.approx(inside.mean_map.tolist())
    images = np.full((4, 1, 32, 32), 90, np.uint8)
    assert "no better than the mean map" in _note(pe.show_activation(images, same, masks))
    sharp = np.zeros((4, 4, 4))
    sharp[range(4), range(4), 0] = 1
    inside = pe.attention_in_mask(sharp, masks)
    assert (inside.in_mask > 2 * inside.mean_map).all()
    assert "no better" not in _note(pe.show_activation(images, sharp, masks))
    alone = pe.attention_in_mask(sharp[:1], masks[:1], others=sharp)
    assert alone.mean_map[0] == pytest.approx(inside.mean_map[0])


def _note(figure):
    return " ".join(text.get_text() for text in figure.texts)


def work(core, network, dataset):
    model = core.model(network)
    batches = core.batches(dataset, batch_size=4)
    maps = tpukit.predict(
        core, pe.class_activation(model, layer="0"), batches, preprocess=pe.normalize
    )
    outputs = tpukit.predict(core, model, batches, preprocess=pe.normalize)
    return {"maps": maps, "outputs": outputs}


def test_every_core_maps_its_share_and_all_come_back_in_order():
    images = torch.randint(
        0, 256, (11, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    network = small_network()
    dataset = torch.utils.data.TensorDataset(images, torch.zeros(11, 10))
    run = tpukit.launch(work, network, dataset, cores=2, progress="off")
    network.eval()
    expected = pe.class_activation(network, layer="0")(pe.normalize(images))
    for result in run.results:
        assert torch.allclose(result["maps"], expected, atol=1e-5)
        assert torch.allclose(result["outputs"], network(pe.normalize(images)), atol=1e-5)


def only_maps(core, network, dataset):
    batches = core.batches(dataset, batch_size=4)
    return tpukit.predict(
        core, pe.class_activation(core.model(network), layer="0"), batches, preprocess=pe.normalize
    )


@pytest.mark.xla
def test_on_xla_the_gradient_is_taken_within_the_step():
    pytest.importorskip("torch_xla")
    images = torch.randint(
        0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    network, dataset = small_network(), torch.utils.data.TensorDataset(images, torch.zeros(4, 10))
    maps = tpukit.launch(
        only_maps, network, dataset, cores=1, backend="xla", progress="off"
    ).results[0]
    expected = pe.class_activation(network.eval(), layer="0")(pe.normalize(images))
    assert torch.allclose(maps, expected, atol=1e-5)


def test_the_share_inside_is_the_area_where_a_map_knows_nothing_and_nan_where_there_is_none():
    masks = np.zeros((3, 20, 20), bool)
    masks[0, :5], masks[2, 0, 0] = True, True
    maps = np.ones((3, 4, 4))
    maps[2] = 0
    inside = pe.attention_in_mask(torch.from_numpy(maps), masks)
    assert inside.in_mask[0] == pytest.approx(inside.mask_area[0]) == pytest.approx(0.25)
    assert inside.in_mask[1:].isna().all()
    assert np.isnan(inside.mask_area[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pe.attention_in_mask(np.ones((2, 4, 4)), np.ones((3, 8, 8))),
            r"got \(2, 4, 4\) and \(3, 8, 8\)",
        ),
        (
            lambda: pe.attention_in_mask(-np.ones((2, 4, 4)), np.ones((2, 8, 8))),
            "0 or more, got -1 to -1",
        ),
        (
            lambda: pe.class_activation(small_network(), "embolism"),
            "no label 'embolism'\n  fix:   one of pe_present",
        ),
        (lambda: pe.class_activation(small_network()), "no layer 'layer2'\n  found: 0, 1"),
        (
            lambda: pe.show_activation(np.zeros((3, 1, 8, 8), np.uint8), np.ones((2, 2, 2))),
            "3 images, and 2 maps",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_figure_says_the_share_of_each_image_beside_chance(tmp_path):
    images, masks = np.full((7, 1, 16, 16), 90, np.uint8), np.zeros((7, 32, 32), bool)
    masks[1:, 8:16, 8:16] = True
    maps = np.zeros((7, 2, 2))
    maps[:, 0, 0] = 1
    figure = pe.show_activation(
        images, maps, masks, probabilities=np.linspace(0.1, 0.7, 7), notes=list("abcdefg")
    )
    share = 100 * pe.attention_in_mask(maps, masks).in_mask[1]
    assert f"probability 0.20 {share:.1f} % inside chance: 6.2 %" in figure.alt
    assert "probability 0.10 no embolus" in figure.alt
    assert len(figure.axes) == 3 * 5
    figure.savefig(tmp_path / "figure.png")
    pe.show_activation(images[:1], maps[:1]).savefig(tmp_path / "without.png")


def test_a_layer_whose_output_the_next_layer_overwrites_has_maps():
    torch.manual_seed(0)
    images = torch.rand(2, 3, 8, 8)
    maps = []
    for inplace in (False, True):
        layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(inplace=inplace)
        network = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(144, 10)).eval()
        for index, weights in enumerate(network.parameters()):
            torch.nn.init.normal_(weights, generator=torch.Generator().manual_seed(index))
        maps.append(pe.class_activation(network, layer="1")(images))
    assert maps[0].any()
    assert torch.equal(*maps)
