"""benchmarks/robustness.py changes images as it says, and leaves those at home as they are."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tpukit
from tpukit import pe
from tpukit.datasets import decode

FOUND = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "robustness.py"))
CHANGES = FOUND["CHANGES"]


@pytest.fixture
def image():
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[64:192, 64:192] = (200, 100, 50)
    pixels[64:192, 64:96] = 250  # on the left
    return Image.fromarray(pixels)


def sides(image):
    """Return the first and last column that shows anything, and the mean of the left and of the right half."""
    pixels = np.asarray(image, float)
    seen = np.flatnonzero(pixels.max(axis=(0, 2)) > 60)
    return seen[0], seen[-1], pixels[:, :128].mean(), pixels[:, 128:].mean()


def test_a_wider_field_of_view_shows_a_smaller_patient_in_the_middle(image):
    first, last, *_ = sides(CHANGES["field of view +25 %"][0](image))
    assert last - first + 1 == pytest.approx(128 / 1.25, abs=2)
    assert first + last == pytest.approx(255, abs=2)


def test_left_and_right_are_exchanged(image):
    before, after = sides(image), sides(CHANGES["mirrored"][0](image))
    assert after[2:] == before[:1:-1]


def test_grey_levels_come_a_fifth_nearer_to_the_middle(image):
    levels = np.unique(np.asarray(CHANGES["contrast -20 %"][0](image)))
    assert levels.tolist() == [26, 66, 106, 186, 226]


def test_grain_has_no_mean_and_is_the_same_every_time(image):
    grey = Image.new("RGB", (64, 64), (128, 128, 128))
    noisy = np.asarray(CHANGES["noise"][0](grey), float)
    assert noisy.std() == pytest.approx(20, abs=1)
    assert noisy.mean() == pytest.approx(128, abs=1)
    assert (noisy == np.asarray(CHANGES["noise"][0](grey))).all()


def test_at_home_the_files_are_prepared_as_they_are_and_elsewhere_they_are_not(image, tmp_path):
    file = tmp_path / "slice.jpg"
    image.save(file, quality=90)
    made = {change: FOUND["prepared"]([file], change) for change in CHANGES}
    assert all(pixels.shape == (1, 64, 64, 3) for pixels in made.values())
    assert (made["home"][0] == decode(file.read_bytes(), 64)).all()
    assert all(
        (pixels != made["home"]).any() for change, pixels in made.items() if change != "home"
    )


def test_two_networks_are_compared_on_the_same_resampled_exams():
    random = np.random.default_rng(0)
    present, exams = random.integers(0, 2, 600), np.repeat(np.arange(100), 6)
    said = present + random.normal(0, 1, 600)
    better, same = said + 0.5 * present, 3 * said
    first, other, difference = FOUND["compare"](present, exams, better, said, draws=100)
    assert difference[0] == pytest.approx(first[0] - other[0])
    assert 0 < difference[1] < difference[0] < difference[2]
    assert difference[2] - difference[1] < other[2] - other[1], (
        "what is hard in an exam is hard for both"
    )
    assert FOUND["compare"](present, exams, same, said, draws=10)[2] == [0, 0, 0]


def test_a_network_is_asked_about_images_as_they_are_prepared(image, tmp_path):
    image.save(tmp_path / "slice.jpg")
    torch.save(pe.resnet34().state_dict(), tmp_path / "best.pt")
    pixels = FOUND["prepared"]([tmp_path / "slice.jpg"] * 3, "home")
    run = tpukit.launch(
        FOUND["ask"], tmp_path / "best.pt", pixels, cores=1, backend="cpu", progress="off"
    )
    assert run.results[0].shape == (3, 10)
