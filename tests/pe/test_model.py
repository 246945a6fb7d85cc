"""resnet34 and normalize: ten logits, weights from a file or the cache, never from the network."""

import pytest

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")

from tpukit.pe import LABELS, augment, normalize, resnet34  # noqa: E402


@pytest.fixture(scope="module")
def imagenet():
    """A state dict such as torchvision's file holds: a thousand outputs."""
    torch.manual_seed(1)
    return torchvision.models.resnet34(weights=None).state_dict()


@pytest.fixture(autouse=True)
def empty_cache(tmp_path):
    before = torch.hub.get_dir()
    torch.hub.set_dir(str(tmp_path / "hub"))
    yield tmp_path / "hub" / "checkpoints"
    torch.hub.set_dir(before)


def test_from_scratch_is_said_in_one_line_with_where_to_put_weights(capsys, empty_cache):
    model = resnet34()
    assert model.fc.out_features == 10
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "random weights" in said
    assert str(empty_cache / "resnet34-b627a593.pth") in said


def test_weights_come_from_a_file(imagenet, tmp_path, capsys):
    torch.save(imagenet, tmp_path / "w.pth")
    model = resnet34(tmp_path / "w.pth")
    assert torch.equal(model.layer3[2].conv1.weight, imagenet["layer3.2.conv1.weight"])
    assert model.fc.weight.shape == (10, 512)
    assert capsys.readouterr().out == ""


def test_weights_come_from_the_local_cache(imagenet, empty_cache, capsys):
    empty_cache.mkdir(parents=True)
    torch.save(imagenet, empty_cache / "resnet34-b627a593.pth")
    assert torch.equal(resnet34().conv1.weight, imagenet["conv1.weight"])
    assert capsys.readouterr().out == ""


def test_weights_of_an_old_torch_have_no_counters_of_batches(imagenet, tmp_path):
    old = {name: value for name, value in imagenet.items() if "num_batches" not in name}
    torch.save(old, tmp_path / "w.pth")
    model = resnet34(tmp_path / "w.pth")
    assert torch.equal(model.layer3[2].conv1.weight, imagenet["layer3.2.conv1.weight"])
    assert model.bn1.num_batches_tracked == 0


def test_a_model_saved_by_this_kit_comes_back_with_its_last_layer(tmp_path):
    model = resnet34()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    assert torch.equal(resnet34(tmp_path / "w.pt").fc.weight, model.fc.weight)


BAD_FILES = {  # what the file holds: what the message says
    "another network": (
        lambda _: torchvision.models.resnet18(weights=None).state_dict(),
        "missing or of another shape",
    ),
    "a checkpoint around the weights": (
        lambda good: {"model": good, "epoch": 3},
        "dict of 0 tensors",
    ),
    "a list": (lambda _: [torch.zeros(3)], "list of 0 tensors"),
    "a layer too few": (
        lambda good: {k: v for k, v in good.items() if k != "layer4.2.conv2.weight"},
        "layer4.2.conv2.weight",
    ),
    "a layer too many": (
        lambda good: good | {"layer5.weight": torch.zeros(1)},
        "1 too many (layer5.weight",
    ),
    "a whole model": (lambda _: torch.nn.Linear(2, 2), "cannot be read as weights"),
}


@pytest.mark.parametrize("holding", BAD_FILES)
def test_a_file_that_is_no_resnet34_is_refused(imagenet, tmp_path, holding):
    make, said = BAD_FILES[holding]
    torch.save(make(imagenet), tmp_path / "w.pth")
    with pytest.raises(ValueError, match="fix:") as error:
        resnet34(tmp_path / "w.pth")
    assert said in str(error.value)


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"PK\x03\x04 half a download"])
def test_a_file_that_is_not_even_torchs_is_refused(tmp_path, content):
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read as weights\n  found: .*\n  fix:"):
        resnet34(tmp_path / "w.pth")


def test_a_file_of_code_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save(Trap(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        resnet34(tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="fix:"):
        resnet34(tmp_path / "w.pth")


def test_normalize_agrees_with_torchvision_on_every_byte():
    bytes_ = torch.arange(256, dtype=torch.uint8).repeat(3, 1).reshape(1, 3, 16, 16)
    transform = torchvision.transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    images = normalize(bytes_)
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, transform(bytes_ / 255), atol=2e-6, rtol=0)


BAD_IMAGES = {
    "already floats": torch.zeros(2, 3, 4, 4),
    "one image": torch.zeros(3, 4, 4, dtype=torch.uint8),
    "channels last": torch.zeros(2, 4, 4, 3, dtype=torch.uint8),
}


@pytest.mark.parametrize("images", BAD_IMAGES)
def test_images_in_another_form_are_refused(images):
    with pytest.raises(ValueError, match=r"takes \(N, 3, H, W\) uint8, got \("):
        normalize(BAD_IMAGES[images])


def test_a_flip_changes_the_sides_of_the_labels():
    images, labels = torch.zeros(64, 3, 8, 8, dtype=torch.uint8), torch.zeros(64, 10)
    left, right = LABELS.index("leftsided_pe"), LABELS.index("rightsided_pe")
    labels[:, left] = 1
    changed = augment()(images, labels)[1]
    assert set(changed[:, left].tolist()) == {0, 1}
    assert torch.equal(changed[:, left] + changed[:, right], torch.ones(64))
    assert torch.equal(augment(flip=0)(images, labels)[1], labels)


def test_sizes_vary_as_much_as_the_fields_of_view_of_scanners():
    torch.manual_seed(0)
    images = torch.zeros(256, 3, 32, 32, dtype=torch.uint8)
    images[:, :, 8:24, 8:24] = 200
    changed, _ = augment(brightness=0, contrast=0, translate=0)(images, torch.zeros(256, 10))
    sides = (changed[:, 0].float().sum((1, 2)) / 200).sqrt()
    assert sides.min() < 16 / 1.25 + 0.5
    assert sides.max() > 16 * 1.2 - 0.5
