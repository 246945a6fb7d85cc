import pytest
import torch
from scenes import ResNetUNet, Scenes, depth_error, mask_and_depth_loss, mask_overlap
from torch.utils.data import default_collate

from tpukit import FitOptions, fit, launch


def test_a_scene_is_an_image_a_mask_and_a_depth_in_bytes():
    image, targets = Scenes(3, size=64)[2]
    assert (image.shape, image.dtype) == ((3, 64, 64), torch.uint8)
    for name in ("mask", "depth"):
        assert (targets[name].shape, targets[name].dtype) == ((1, 64, 64), torch.uint8)
    assert set(targets["mask"].unique().tolist()) == {0, 1}


def test_scenes_are_the_same_for_the_same_seed_and_others_for_another():
    first, again, other = (Scenes(4, seed=seed)[3][0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(Scenes(4)[2][0], first)


def test_every_scene_has_an_object_and_a_depth_that_runs_from_near_to_far():
    for image, targets in (Scenes(60)[index] for index in range(60)):
        mask, depth = targets["mask"][0].bool(), targets["depth"][0]
        assert 0.005 < mask.float().mean() < 0.6
        assert depth[-1][~mask[-1]].max() < 20  # at the camera's feet
        assert depth[0][~mask[0]].min() == 255  # the wall
        assert depth[mask].unique().numel() == 1  # an object stands at one distance
        assert image.float().std() > 5


def test_the_loop_over_scenes_ends():
    assert len(list(Scenes(3, size=32))) == 3


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 3, "size": 16}])
def test_numbers_that_make_no_scene_are_refused_and_the_fix_helps(options):
    with pytest.raises(
        ValueError, match=r"at least one scene of at least 32 pixels, got count=.*\n  fix:   "
    ):
        Scenes(**options)
    Scenes(1000, size=96)


@pytest.mark.parametrize(("join", "millions"), [("add", 30.8), ("concatenate", 32.4)])
def test_the_network_has_its_size_and_answers_for_every_pixel(join, millions):
    model = ResNetUNet(join)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(
        millions, abs=0.05
    )
    outputs = model(torch.zeros(2, 3, 64, 96, dtype=torch.uint8))
    assert {name: tuple(output.shape) for name, output in outputs.items()} == {
        "mask": (2, 1, 64, 96),
        "depth": (2, 1, 64, 96),
    }
    assert 0 <= outputs["depth"].min() <= outputs["depth"].max() <= 1


def test_another_way_to_join_is_refused_and_the_fix_helps():
    with pytest.raises(
        ValueError, match=r"join is \"add\" or \"concatenate\", got 'sum'\n  fix:   "
    ):
        ResNetUNet("sum")
    ResNetUNet(join="add")


def test_the_measures_know_a_perfect_answer_and_a_wrong_one():
    _, targets = default_collate([Scenes(2, size=32)[index] for index in range(2)])
    mask = targets["mask"].float()
    perfect = {"mask": 100 * (2 * mask - 1), "depth": targets["depth"].float() / 255}
    wrong = {"mask": -perfect["mask"], "depth": 1 - perfect["depth"]}
    assert mask_and_depth_loss(perfect, targets) == pytest.approx(0, abs=1e-6)
    assert (mask_overlap(perfect, targets), depth_error(perfect, targets)) == (1, 0)
    assert mask_overlap(wrong, targets) == 0
    assert mask_and_depth_loss(wrong, targets) > 50


def test_fit_trains_it_on_scenes_and_the_loss_falls():
    def work(core):
        model = core.model(ResNetUNet())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        batches = core.batches(Scenes(64, size=32), batch_size=8, shuffle=True, drop_last=True)
        return fit(
            core,
            model,
            optimizer,
            mask_and_depth_loss,
            batches,
            epochs=2,
            options=FitOptions(log_every=1),
        )

    losses = [
        row["train_loss"] for row in launch(work, cores=1, progress="off").results[0].intervals
    ]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
