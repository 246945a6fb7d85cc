"""Augment and warp: where every pixel goes, whose labels change sides, and that a TPU's graph stays the same."""

import numpy
import pytest

torch = pytest.importorskip("torch")

import tpukit  # noqa: E402
from tpukit.pe import LABELS  # noqa: E402
from tpukit.training.augment import Augment, _gather, _multiply, _read, warp  # noqa: E402

OFF = {"translate": 0, "scale": None, "degrees": 0, "brightness": 0, "contrast": 0, "flip": 0}
SIDES = {"swap_labels": (("leftsided_pe", "rightsided_pe"),), "names": LABELS}
LEFT, RIGHT = LABELS.index("leftsided_pe"), LABELS.index("rightsided_pe")


def noise(*shape):
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def smooth(*shape):
    """Return blobs with edges a few pixels wide, as CT slices have."""
    blurred = torch.nn.functional.avg_pool2d(noise(*shape).float(), 9, 1, 4)
    return ((blurred - 110).clamp(0, 40) * 6).to(torch.uint8)


def numbers(n, *, turn=0.0, zoom=1.0, right=0.0, down=0.0):
    return {
        name: torch.full((n,), float(value))
        for name, value in {"turn": turn, "zoom": zoom, "right": right, "down": down}.items()
    }


def seeded(augment, images, labels=None, seed=0):
    torch.manual_seed(seed)
    return augment(images, labels)


def by_grid_sample(images, *, turn, zoom, right, down):
    """Return what torch's own resampling makes of the same numbers: another way, and other coordinates."""
    (height, width), cos, sin = images.shape[2:], turn.cos() / zoom, turn.sin() / zoom
    # affine_grid counts in halves of the image; the object is where the pixel was before it moved.
    right, down = 2 * right / width, 2 * down / height
    across, along = -sin * height / width, sin * width / height
    x = torch.stack([cos, across, -cos * right - across * down], dim=1)
    y = torch.stack([along, cos, -along * right - cos * down], dim=1)
    grid = torch.nn.functional.affine_grid(
        torch.stack([x, y], dim=1), list(images.shape), align_corners=False
    )
    return torch.nn.functional.grid_sample(images.float(), grid, align_corners=False)


WARPS = {
    "turned": {"turn": 0.17},
    "turned the other way, far": {"turn": -0.7},
    "larger": {"zoom": 1.3},
    "smaller": {"zoom": 0.8},
    "moved by parts of a pixel": {"right": 3.3, "down": -7.6},
    "all of it": {"turn": 0.15, "zoom": 0.9, "right": -6.2, "down": 4.7},
}


@pytest.mark.parametrize("size", [(64, 64), (48, 80), (63, 33)], ids=str)
@pytest.mark.parametrize("change", WARPS)
def test_a_smooth_image_is_what_grid_sample_makes_of_it(change, size):
    images = smooth(4, 3, *size)
    given = numbers(4, **WARPS[change])
    off = (warp(images, **given) - by_grid_sample(images, **given)).abs()
    limit = 3 if abs(WARPS[change].get("turn", 0)) > 0.5 else 1.5
    assert off.mean() < limit
    # Only where a row or column ends inside a pixel do the two differ by more.
    assert off.quantile(0.98) < 20 * limit


@pytest.mark.parametrize("change", ["larger", "smaller", "moved by parts of a pixel"])
def test_an_image_that_is_not_turned_is_grid_samples_to_a_128th_of_a_pixel(change):
    images = noise(2, 3, 64, 64)
    given = numbers(2, **WARPS[change])
    # Half a 128th of a pixel in each direction, between pixels that differ by 255 at most.
    assert (
        warp(images, **given) - by_grid_sample(images, **given)
    ).abs().max() < 2 * 255 / 256 + 0.01


def test_every_image_moves_by_its_own_numbers():
    images = smooth(5, 1, 40, 40)
    given = {
        "turn": torch.tensor([0.0, 0.1, -0.1, 0.0, 0.2]),
        "zoom": torch.tensor([1.0, 1.0, 1.2, 0.9, 1.1]),
        "right": torch.tensor([0.0, 3.0, 0.0, -2.0, 1.0]),
        "down": torch.tensor([0.0, -1.0, 2.5, 0.0, 0.0]),
    }
    together = warp(images, **given)
    for i in range(5):
        alone = warp(images[i : i + 1], **{name: value[i : i + 1] for name, value in given.items()})
        assert torch.equal(together[i : i + 1], alone)


def test_standing_still_changes_nothing():
    images = noise(2, 3, 31, 64)
    assert torch.equal(warp(images, **numbers(2)), images.float())


def test_whole_pixels_are_moved_as_they_are_and_zeros_come_in():
    images = noise(1, 3, 20, 30)
    moved = warp(images, **numbers(1, right=4, down=-3))
    assert torch.equal(moved[:, :, :-3, 4:], images[:, :, 3:, :-4].float())
    assert moved[:, :, -3:].eq(0).all()
    assert moved[:, :, :, :4].eq(0).all()


def test_directions_are_those_the_names_say():
    dot = torch.zeros(1, 1, 65, 65)
    dot[0, 0, 32, 52] = 1  # right of the middle

    def at(**change):
        spot = warp(dot, **numbers(1, **change))[0, 0]
        return numpy.unravel_index(int(spot.argmax()), spot.shape)

    assert at() == (32, 52)
    assert at(right=5) == (32, 57)
    assert at(down=5) == (37, 52)
    assert at(zoom=1.5) == (32, 62)
    assert at(turn=numpy.pi / 6) == (22, 49)  # counter-clockwise: up


def test_what_is_moved_out_of_the_picture_is_gone():
    assert warp(noise(1, 1, 16, 16), **numbers(1, right=16)).eq(0).all()
    assert warp(noise(1, 1, 16, 16), **numbers(1, down=-40)).eq(0).all()


def test_a_tpus_way_of_reading_gives_the_same_numbers():
    generator = torch.Generator().manual_seed(1)
    rows = noise(3, 2, 10, 17).float()
    places = (
        (torch.rand(3, 10, 23, generator=generator) * 24 - 4) * 128 // 1 / 128
    )  # beyond both ends
    places[0, 0, :5] = torch.tensor([-1.0, 0.0, 16.0, 17.0, 16.5])
    assert torch.allclose(_multiply(rows, places), _gather(rows, places), atol=1e-4)


def test_weights_are_whole_in_a_tpus_bfloat16():
    places = torch.rand(1, 10, 23, generator=torch.Generator().manual_seed(1)) * 20 - 10
    weights = _read(
        torch.eye(17).view(1, 17, 1, 17).expand(1, 17, 10, 17), places
    )  # of a one in each column
    assert weights.unique().numel() > 50
    assert torch.equal(weights.bfloat16().float(), weights)


def test_a_tpus_products_stay_within_a_grey_level(monkeypatch):
    """They round what is read to bfloat16, here done by hand, and add up in float32."""
    images = smooth(8, 3, 64, 64)
    given = {"turn": torch.linspace(-0.17, 0.17, 8), "zoom": torch.linspace(1.1, 0.9, 8)}
    given |= {"right": torch.linspace(-4, 4, 8), "down": torch.linspace(3, -3, 8)}
    expected = warp(images, **given)
    monkeypatch.setattr(
        "tpukit.training.augment._gather",
        lambda rows, places: _multiply(rows.bfloat16().float(), places),
    )
    assert 0.1 < (warp(images, **given) - expected).abs().max() < 1
    assert torch.equal(warp(images, **numbers(8)), images.float())


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.float64]
)
@pytest.mark.parametrize("shape", [(4, 3, 32, 32), (1, 1, 17, 40), (3, 9, 24, 8)], ids=str)
def test_shape_and_dtype_stay(dtype, shape):
    images = noise(*shape) if dtype == torch.uint8 else (noise(*shape).double() / 255).to(dtype)
    before = images.clone()
    changed, labels = seeded(Augment(flip=0.5), images, "anything")
    assert (changed.shape, changed.dtype, labels) == (images.shape, dtype, "anything")
    assert not torch.equal(changed, images)
    assert torch.equal(images, before)


def test_bytes_and_floats_of_the_same_picture_become_the_same_picture():
    images = smooth(6, 3, 48, 48)
    augment = Augment(flip=0.5)
    as_bytes, _ = seeded(augment, images)
    as_floats, _ = seeded(augment, images.float() / 255)
    assert (as_bytes.float() - 255 * as_floats.clamp(0, 1)).abs().max() <= 0.501
    assert as_floats.min() < 0  # floats are not clamped


def test_bytes_do_not_wrap_around():
    white, black = (
        torch.full((64, 1, 8, 8), 255, dtype=torch.uint8),
        torch.zeros((64, 1, 8, 8), dtype=torch.uint8),
    )
    augment = Augment(**OFF | {"brightness": 1, "contrast": 1})
    for images in (white, black):
        changed, _ = seeded(augment, images)
        values = changed.float().flatten(1)
        assert values.std(dim=1).eq(0).all()
        assert {0, 255} <= set(values[:, 0].tolist())


def test_brightness_adds_and_contrast_turns_about_mid_grey():
    images = torch.rand(200, 1, 2, 2)
    changed, _ = seeded(Augment(**OFF | {"brightness": 0.2, "contrast": 0.2}), images)
    gain = (changed[:, 0, 0, 0] - changed[:, 0, 1, 1]) / (images[:, 0, 0, 0] - images[:, 0, 1, 1])
    added = changed[:, 0, 0, 0] - 0.5 - gain * (images[:, 0, 0, 0] - 0.5)
    for found, middle in ((gain, 1), (added, 0)):
        assert found.min() > middle - 0.2001
        assert found.min() < middle - 0.18
        assert found.max() < middle + 0.2001
        assert found.max() > middle + 0.18
    assert abs(numpy.corrcoef(gain, added)[0, 1]) < 0.25


@pytest.mark.parametrize("name", OFF)
def test_zero_switches_each_off(name):
    images = noise(8, 1, 32, 32)
    assert torch.equal(seeded(Augment(**OFF), images)[0], images)
    assert not torch.equal(
        seeded(Augment(**OFF | {name: (0.5, 1.5) if name == "scale" else 0.5}), images)[0], images
    )


def test_what_is_switched_off_leaves_the_others_as_they_were():
    images = noise(8, 1, 32, 32).float() / 255
    moved, lit = (seeded(Augment(brightness=most, contrast=most), images)[0] for most in (0, 0.1))
    for one, other in zip(moved.flatten(1), lit.flatten(1), strict=True):
        assert numpy.corrcoef(one, other)[0, 1] > 0.9999


def test_each_image_draws_its_own_numbers_within_the_ranges():
    """A lone dot tells where its image went, a square beside the middle how far it turned and grew."""

    def middle(images):
        weight = images.sum(dim=(1, 2, 3))
        (down, right) = (torch.arange(float(size)) - size // 2 for size in images.shape[2:])
        return images.sum(dim=(1, 2)) @ right / weight, images.sum(dim=(1, 3)) @ down / weight

    images = torch.zeros(400, 1, 65, 97)
    images[:, :, 32, 48] = 1
    right, down = middle(seeded(Augment(**OFF | {"translate": 0.1}), images)[0])
    for found, most in ((right, 9.7), (down, 6.5)):
        assert 0.97 * most < found.abs().max() <= most + 0.01
        assert abs(found.mean()) < 0.12 * most  # its deviation is most / sqrt(3 x 400), 0.03 of it
        assert found.unique().numel() > 300
    assert abs(numpy.corrcoef(right, down)[0, 1]) < 0.2

    images = torch.nn.functional.pad(
        torch.ones(400, 1, 5, 5), (50, 10, 30, 30)
    )  # 20 right of the middle
    right, down = middle(seeded(Augment(**OFF | {"degrees": 20, "scale": (0.8, 1.2)}), images)[0])
    angle, size = torch.rad2deg(torch.atan2(-down, right)), torch.hypot(down, right) / 20
    assert 19 < angle.abs().max() <= 20.1
    assert abs(angle.mean()) < 2.4  # 20 / sqrt(3 x 400) is 0.58
    assert 1.18 < size.max() < 1.21
    assert 0.79 < size.min() < 0.82
    assert abs(numpy.corrcoef(angle, size)[0, 1]) < 0.2

    mirrored, _ = seeded(Augment(**OFF | {"degrees": 20, "scale": (0.8, 1.2), "flip": 0.5}), images)
    flipped = middle(mirrored)[0] < 0
    assert 140 < int(flipped.sum()) < 260
    assert abs(numpy.corrcoef(angle, flipped)[0, 1]) < 0.2


@pytest.mark.parametrize(
    ("chance", "low", "high"), [(0, 0, 0), (0.25, 180, 320), (0.5, 430, 570), (1, 1000, 1000)]
)
def test_as_many_images_are_flipped_as_the_chance_says(chance, low, high):
    images = noise(1, 1, 4, 4).expand(1000, -1, -1, -1)
    changed, _ = seeded(Augment(**OFF | {"flip": chance}), images)
    flipped = (changed == images.flip(3)).flatten(1).all(dim=1)
    assert low <= int(flipped.sum()) <= high
    assert torch.equal(changed[~flipped], images[~flipped])


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool, torch.int64])
@pytest.mark.parametrize(
    "swap",
    [
        SIDES,
        {"swap_labels": ((LEFT, RIGHT),)},
        {"swap_labels": [["rightsided_pe", LEFT]], "names": list(LABELS)},
    ],
    ids=["names", "columns", "both, in lists"],
)
def test_sides_change_exactly_where_an_image_is_flipped(swap, dtype):
    images = noise(1, 1, 4, 4).expand(500, -1, -1, -1)
    labels = (noise(500, len(LABELS)) % 2).to(dtype)
    before = labels.clone()
    changed, given = seeded(Augment(**OFF | {"flip": 0.5}, **swap), images, labels)
    flipped = (changed == images.flip(3)).flatten(1).all(dim=1)
    assert 200 < int(flipped.sum()) < 300
    assert given.dtype == dtype
    assert torch.equal(given[~flipped], before[~flipped])
    assert torch.equal(given[flipped][:, LEFT], before[flipped][:, RIGHT])
    assert torch.equal(given[flipped][:, RIGHT], before[flipped][:, LEFT])
    others = [column for column in range(len(LABELS)) if column not in (LEFT, RIGHT)]
    assert torch.equal(given[:, others], before[:, others])
    assert torch.equal(labels, before)


def test_several_pairs_change_sides_together():
    labels = torch.arange(6.0).expand(3, -1)
    _, given = seeded(Augment(flip=1, swap_labels=((0, 3), (5, 1))), noise(3, 1, 8, 8), labels)
    assert given.tolist() == [[3, 5, 2, 0, 4, 1]] * 3


def test_the_same_seed_gives_the_same_and_the_next_step_another():
    images, augment = noise(16, 3, 24, 24), Augment(flip=0.5)
    first, _ = seeded(augment, images)
    second, _ = augment(images, None)
    assert torch.equal(seeded(augment, images)[0], first)
    assert not torch.equal(seeded(augment, images, seed=1)[0], first)
    assert (first != second).flatten(1).any(dim=1).all()


def test_neither_gradients_nor_autocast_reach_it():
    images = noise(4, 3, 24, 24).float() / 255
    plain, _ = seeded(Augment(flip=0.5), images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = seeded(Augment(flip=0.5), images.clone().requires_grad_())
    assert torch.equal(cast, plain)
    assert not cast.requires_grad
    assert torch.is_grad_enabled()


def test_a_view_of_whole_images_as_batches_give_it_is_the_same():
    images = noise(4, 24, 32, 3).permute(0, 3, 1, 2)
    assert torch.equal(seeded(Augment(), images)[0], seeded(Augment(), images.contiguous())[0])


def test_an_empty_batch_stays_empty():
    images, labels = Augment(flip=0.5, **SIDES)(torch.zeros(0, 3, 8, 8), torch.zeros(0, 10))
    assert (tuple(images.shape), tuple(labels.shape)) == ((0, 3, 8, 8), (0, 10))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"translate": 8},
            "translate must be 0 (off) to 0.5, got 8\n  fix:   translate=0.06, a share of the image",
        ),  # pixels
        ({"translate": -0.1}, "translate must be 0 (off) to 0.5, got -0.1"),
        (
            {"scale": 0.1},
            "to 1.5, or None (off), got 0.1\n  fix:   for images 0.9 to 1.1 times as large: scale=(0.9, 1.1)",
        ),  # a share
        (
            {"scale": (0.4, 1.1)},
            "scale must be (smallest, largest) from 0.5 to 1.5, or None (off), got (0.4, 1.1)",
        ),
        ({"scale": (1.1, 0.9)}, "scale must be (smallest, largest) from 0.5"),
        ({"scale": (0.9, 1.6)}, "scale must be (smallest, largest) from 0.5"),
        ({"scale": (0.9, 1, 1.1)}, "scale must be (smallest, largest) from 0.5"),
        ({"scale": (True, 1.1)}, "scale must be (smallest, largest) from 0.5"),
        ({"scale": ("0.9", "1.1")}, "scale must be (smallest, largest) from 0.5"),
        ({"scale": (float("nan"), 1.1)}, "scale must be (smallest, largest) from 0.5"),
        ({"degrees": 90}, "degrees must be 0 (off) to 45, got 90"),
        (
            {"brightness": 20},
            "brightness must be 0 (off) to 1, got 20\n  fix:   brightness=0.1, a share of white",
        ),  # grey levels
        ({"contrast": -1}, "contrast must be 0 (off) to 1, got -1"),
        ({"flip": True}, "flip must be 0 (off) to 1, got True\n  fix:   flip=0.5, a probability"),
        ({"flip": float("nan")}, "flip must be 0 (off) to 1, got nan"),
        ({"flip": None}, "flip must be 0 (off) to 1, got None"),
        (
            {"swap_labels": (6, 8)},
            "swap_labels must be pairs of labels, got (6, 8)\n  fix:   swap_labels=((one, other),)",
        ),
        ({"swap_labels": ("ab", "cd")}, "swap_labels must be pairs of labels, got ('ab', 'cd')"),
        ({"swap_labels": ((1, 2, 3),)}, "swap_labels must be pairs of labels"),
        (
            {"swap_labels": (("left", "right"),)},
            "swap_labels=(('left', 'right'),), but there is no label 'left'; names=[]",
        ),
        (
            {"swap_labels": (("left", "right"),), "names": ["left", "rihgt"]},
            "there is no label 'right'; names=['left', 'rih",
        ),
        ({"swap_labels": ((0, 2),), "names": ["a", "b"]}, "there is no label 2"),
        ({"swap_labels": ((0, -1),)}, "there is no label -1"),
        ({"swap_labels": ((0, 0),)}, "swap_labels=((0, 0),) has a label twice"),
        (
            {"swap_labels": ((0, 1), (1, 2))},
            "has a label twice\n  fix:   name each label in one pair at most",
        ),
    ],
    ids=str,
)
def test_an_augment_that_makes_no_sense_is_refused_when_it_is_made(arguments, said):
    with pytest.raises(ValueError, match="fix:") as error:
        Augment(**arguments)
    assert said in str(error.value)


@pytest.mark.parametrize("number", [numpy.float32(0.25), numpy.float64(0.25), numpy.int64(0), 0, 1])
def test_numbers_of_any_kind_are_numbers(number):
    Augment(flip=number, swap_labels=((0, 1),))(noise(2, 1, 8, 8), torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (
            torch.zeros(2, 8, 8, 3),
            "got Tensor (2, 8, 8, 3) torch.float32\n  fix:   if the batch is (N, H, W, C)",
        ),
        (torch.zeros(3, 8, 8), "takes (N, C, H, W) tensors, got Tensor (3, 8, 8)"),
        (
            numpy.zeros((2, 3, 8, 8), "uint8"),
            "takes (N, C, H, W) tensors, got ndarray (2, 3, 8, 8) uint8",
        ),
        ([1], "got list ()"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), "takes uint8 in [0, 255] or floats in [0, 1]"),
    ],
    ids=["channels last", "one image", "numpy", "a list", "int64"],
)
def test_images_of_another_kind_are_refused(images, said):
    with pytest.raises(ValueError, match="fix:") as error:
        Augment()(images, None)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("labels", "swap", "said"),
    [
        (torch.zeros(4), ((LEFT, RIGHT),), "labels must be (4, 7), got Tensor (4,)"),
        (torch.zeros(4, 6), ((LEFT, RIGHT),), "must be (4, 7), got Tensor (4, 6)"),
        (torch.zeros(3, 10), ((LEFT, RIGHT),), "must be (4, 10), got Tensor (3, 10)"),
        (torch.zeros(4, 11), SIDES["swap_labels"], "must be (4, 10), got Tensor (4, 11)"),
        (torch.tensor(1.0), ((LEFT, RIGHT),), "got Tensor ()"),
        (None, ((LEFT, RIGHT),), "got NoneType ()"),
    ],
    ids=[
        "class numbers",
        "too few columns",
        "of another batch",
        "not the columns of the names",
        "a number",
        "none",
    ],
)
def test_labels_that_cannot_change_sides_are_refused(labels, swap, said):
    augment = Augment(
        flip=0.5, swap_labels=swap, names=LABELS if swap == SIDES["swap_labels"] else ()
    )
    with pytest.raises(ValueError, match="fix:") as error:
        augment(noise(4, 1, 8, 8), labels)
    assert said in str(error.value)


def draws(core):
    images = torch.full((8, 1, 16, 16), 200, dtype=torch.uint8, device=core.device)
    drawn = []
    for _ in range(2):
        with core.step():  # in which each core draws its own
            drawn.append(Augment()(images, None)[0])
    return core.to_host(drawn)


def test_cores_and_steps_draw_differently_and_a_run_can_be_repeated():
    one, again, other = (
        tpukit.launch(draws, cores=2, seed=seed, progress="off").results for seed in (5, 5, 7)
    )
    for rank in range(2):
        for step in range(2):
            assert torch.equal(one[rank][step], again[rank][step])
            assert not torch.equal(one[rank][step], other[rank][step])
    batches = [batch for steps in one for batch in steps]
    assert len({batch.numpy().tobytes() for batch in batches}) == 4


def count_graphs(core):
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    def counted(name):
        return (met.metric_data(name) or (0,))[0]

    augment = Augment(flip=0.5, **SIDES)
    compiled, sent, seen = [], [], []
    images, labels = (
        noise(8, 24, 32, 3).to(core.device).permute(0, 3, 1, 2),
        torch.eye(10)[:8].to(core.device),
    )
    given = numbers(8, **WARPS["all of it"])
    there = {name: value.to(core.device) for name, value in given.items()}
    for _ in range(5):
        with core.step(), torch.autocast("xla", dtype=torch.bfloat16):
            changed, swapped = augment(images, labels)
        torch_xla.sync(wait=True)
        seen.append((changed, swapped))
        compiled.append(counted("CompileTime"))
        sent.append(counted("TransferToDeviceTime"))
    fallbacks = [name for name in met.counter_names() if name.startswith("aten::")]
    graph = xm.get_stablehlo(augment(images, labels))
    warped = warp(images, **there).cpu()
    return compiled, sent, fallbacks, seen, graph, warped, warp(images.cpu(), **given)


@pytest.mark.xla
def test_on_xla_every_step_is_the_same_graph_and_nothing_falls_back_to_the_host():
    run = tpukit.launch(count_graphs, cores=1, backend="xla:cpu", seed=3, progress="off")
    compiled, sent, fallbacks, seen, graph, warped, expected = run.results[0]
    assert fallbacks == []
    assert compiled[1] <= compiled[0] + 1
    assert compiled[4] == compiled[1]
    assert sent[4] - sent[1] == 3  # the seed, with every graph that draws
    assert graph.count("stablehlo.dot_general") == 2
    assert graph.count("stablehlo.rng_bit_generator") == 1
    assert "gather" not in graph
    assert torch.allclose(warped, expected, atol=1e-2)
    pictures = {images.numpy().tobytes() for images, _ in seen}
    assert len(pictures) == 5
    assert {int(labels[LEFT].argmax()) for _, labels in seen} == {LEFT, RIGHT}
    assert all(labels[0].tolist() == torch.eye(10)[0].tolist() for _, labels in seen)
    assert all(images.dtype == torch.uint8 for images, _ in seen)


def blobs(n, size=64):
    """Return (n, 1, size, size) uint8 images of 0 and 255 with a margin of 0, and their masks of classes 0 and 7."""
    images = (smooth(n, 1, size, size) > 127).to(torch.uint8) * 255
    images[:, :, :12], images[:, :, -12:], images[..., :12], images[..., -12:] = 0, 0, 0, 0
    return images, (images[:, 0] > 0).long() * 7


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"flip": 1.0}, {"degrees": 45.0, "scale": (0.7, 1.3)}, {**OFF, "flip": 0.5}]
)
def test_a_mask_moves_with_its_image(options, dtype):
    images, masks = blobs(16)
    changed, moved = seeded(
        Augment(**{"brightness": 0, "contrast": 0, **options}), images, masks.to(dtype)
    )
    assert (moved.dtype, moved.shape) == (dtype, masks.shape)
    assert set(moved.unique().tolist()) == {0, 7}
    assert not torch.equal(moved, masks.to(dtype))
    assert (
        (moved == 7) != (changed[:, 0] > 127)
    ).float().mean() < 0.02  # of the pixels, those at edges
    still = seeded(Augment(**OFF), images, masks.to(dtype))[1]
    assert torch.equal(still, masks.to(dtype))


def test_masks_are_found_among_several_targets_and_labels_stay_or_change_sides():
    images, masks = blobs(6)
    labels = torch.arange(12.0).view(6, 2)
    augment = Augment(flip=1.0, swap_labels=((0, 1),))
    expected = seeded(Augment(flip=1.0), images, masks)[1]
    given = {"labels": labels, "masks": masks, "several": torch.stack([masks, 7 - masks], dim=1)}
    _, changed = seeded(augment, images, given)
    assert torch.equal(changed["masks"], expected)
    assert torch.equal(changed["several"][:, 0], expected)
    assert torch.equal(changed["labels"], labels.flip(1))
    _, (numbers, moved) = seeded(Augment(flip=1.0), images, (labels, masks))
    assert torch.equal(moved, expected)
    assert torch.equal(numbers, labels)
    assert torch.equal(given["masks"], masks)


def test_pairs_and_names_of_an_iterator_are_read_once_and_kept():
    labels = torch.tensor([[1.0, 0.0, 0.0]]).repeat(4, 1)
    for pairs, names in (([0], [1]), ()), ((["left"], ["right"]), iter(("left", "right", "any"))):
        augment = Augment(flip=1.0, swap_labels=zip(*pairs, strict=True), names=names)
        for _ in range(2):
            _, swapped = seeded(augment, noise(4, 3, 8, 8), labels)
            assert torch.equal(swapped, labels[:, [1, 0, 2]])


@pytest.mark.parametrize("fill", [0, 255, -100])
def test_what_lies_outside_has_a_number_of_its_own(fill):
    masks = torch.full((8, 32, 32), 3)
    _, moved = seeded(Augment(translate=0.5, fill=fill), noise(8, 3, 32, 32), masks)
    assert set(moved.unique().tolist()) == {3, fill}


def test_both_ways_of_reading_give_the_same_nearest_pixels():
    rows, places = torch.randint(-256, 257, (2, 1, 9, 33)).float(), torch.rand(2, 9, 40) * 50 - 25
    places = (places + 16).round() - 16 + 16
    assert torch.equal(_gather(rows, places), _multiply(rows, places))


def move_masks(core):
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    images, masks = (tensor.to(core.device) for tensor in blobs(8, 32))
    augment, compiled = Augment(flip=0.5, brightness=0, contrast=0, fill=255), []
    for _ in range(4):
        with core.step():
            changed, moved = augment(images, {"masks": masks})
        torch_xla.sync(wait=True)
        compiled.append((met.metric_data("CompileTime") or (0,))[0])
    fallbacks = [name for name in met.counter_names() if name.startswith("aten::")]
    return compiled, fallbacks, changed, moved["masks"], xm.get_stablehlo(augment(images, masks))


@pytest.mark.xla
def test_on_an_xla_device_masks_move_with_their_images_in_one_graph():
    pytest.importorskip("torch_xla")
    compiled, fallbacks, images, masks, graph = tpukit.launch(
        move_masks, cores=1, backend="xla"
    ).results[0]
    assert fallbacks == []
    assert compiled[3] == compiled[1]
    assert "gather" not in graph
    assert set(masks.unique().tolist()) <= {0, 7, 255}
    assert ((masks == 7) != (images[:, 0] > 127)).float().mean() < 0.04


def test_images_of_two_bytes_per_pixel_are_refused_and_the_fix_works():
    from tpukit import pe

    images = torch.zeros(2, 2, 8, 8, dtype=torch.uint8)
    labels = torch.zeros(2, 10)
    with pytest.raises(ValueError, match="would mix low and high bytes") as caught:
        pe.augment()(images, labels)
    assert "pe.hounsfield" in caught.value.fix
    moved, _ = pe.augment()((pe.hounsfield(images) + 1024) / 4096, labels)
    assert moved.shape == (2, 1, 8, 8)
