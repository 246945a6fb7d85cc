"""`python -m tpukit job`: texts for gcloud, SkyPilot, dstack and Vertex AI, read back by each tool's own reader."""

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tpukit.__main__ import main

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
VERTEX = ["--image", "us-docker.pkg.dev/demo/kit/trainer:1", "--bucket", "gs://demo-bucket/runs"]
ARGS = '[3, {"a": "it\'s $HOME"}]'  # what a shell would change if it could


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        "import yaml\n\ndef learn_it(core, n, config):\n    return [core.world_size, n, config]\n"
    )
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUKIT_SOURCE", "https://git.example.com/somebody/tpukit")
    return tmp_path


def ask(capsys, target, *options, trainer="train.py:learn_it"):
    status = main(["job", trainer, "--target", target, *options])
    said = capsys.readouterr()
    assert status == 0, said.err
    return said.out, said.err


def test_gcloud_gets_a_line_that_a_shell_reads_back_word_for_word(folder, capsys):
    text, told = ask(capsys, "gcloud", "--zone", "us-west4-a", "--project", "demo", "--args", ARGS)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    cost, create, scp, ssh, fetch, delete = text.splitlines()
    assert cost.startswith("# about $9.60 an hour")
    tpu_vm = ["gcloud", "compute", "tpus", "tpu-vm"]
    where = ["learn-it", "--zone", "us-west4-a", "--project", "demo"]
    assert shlex.split(create) == [
        *tpu_vm, "create", *where, "--accelerator-type", "v5litepod-8", "--version", "v2-alpha-tpuv5-lite",
    ]  # fmt: skip
    assert shlex.split(scp) == [*tpu_vm, "scp", "learn-it.zip", "learn-it:", *where[1:], "--worker=all"]
    *words, command = shlex.split(ssh)
    assert words == [*tpu_vm, "ssh", *where, "--worker=all", "--command"]
    *setup, run = command.split(" && ")
    kept = ["AIP_CHECKPOINT_DIR=$HOME/learn-it/checkpoints", "AIP_MODEL_DIR=$HOME/learn-it/model"]
    assert shlex.split(fetch) == [*tpu_vm, "scp", "--recurse", "learn-it:learn-it", ".", *where[1:]]
    assert shlex.split(run) == [
        "PJRT_DEVICE=TPU",
        *kept,
        "kit/bin/python",
        "learn-it.zip",
        json.dumps(json.loads(ARGS)),
    ]
    assert any("'tpukit[tpu] @ git+https://git.example.com/somebody/tpukit'" in line for line in setup)
    assert shlex.split(delete) == [*tpu_vm, "delete", *where]
    assert "rehearse it here: python learn-it.zip" in told


def test_the_file_that_is_written_runs_here_as_it_is_told(folder, capsys):
    _, told = ask(capsys, "dstack", "--args", ARGS)
    line = told.splitlines()[0].partition("rehearse it here: ")[2].replace("python", shlex.quote(sys.executable), 1)
    environ = {**os.environ, "PYTHONPATH": PATHS}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, env=environ, timeout=600)
    assert "core 0: [2, 3, {'a': \"it's $HOME\"}]" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("chip", "accelerator", "runtime"),
    [
        ("v5e-8", "tpu-v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v6e-4", "tpu-v6e-4", "v2-alpha-tpuv6e"),
        ("v3-8", "tpu-v3-8", "tpu-ubuntu2204-base"),
    ],
)
def test_a_task_of_skypilot_holds_what_it_should(folder, capsys, chip, accelerator, runtime):
    yaml = pytest.importorskip("yaml")
    text, told = ask(capsys, "skypilot", "--chip", chip, "--zone", "us-west4-a", "--args", ARGS)
    task = yaml.safe_load(text)
    assert task["name"] == "learn-it"
    assert task["resources"]["accelerators"] == accelerator
    assert task["resources"]["accelerator_args"] == {"runtime_version": runtime}
    assert task["resources"]["infra"] == "gcp/us-west4/us-west4-a"
    assert task["file_mounts"] == {"~/learn-it.zip": "./learn-it.zip"}
    assert shlex.split(task["run"])[-1] == json.dumps(json.loads(ARGS))
    assert "sky launch" in told
    assert "is deleted with all that it wrote" in told
    text, told = ask(capsys, "skypilot", "--bucket", "gs://demo-bucket/runs")
    task = yaml.safe_load(text)
    assert task["file_mounts"]["/bucket"] == {"source": "gs://demo-bucket", "mode": "MOUNT"}
    assert "AIP_CHECKPOINT_DIR=/bucket/runs/learn-it/checkpoints" in task["run"]
    assert "is deleted" not in told


def test_skypilot_itself_reads_its_task(folder, capsys, monkeypatch):
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    sky = pytest.importorskip("sky", reason="skypilot is not installed: its own reader cannot be asked")
    text, _ = ask(capsys, "skypilot", "--args", ARGS)
    (folder / "job.yaml").write_text(text)
    task = sky.Task.from_yaml("job.yaml")
    (resources,) = task.resources
    assert str(resources.cloud) == "GCP"
    assert resources.accelerators == {"tpu-v5litepod-8": 1}
    assert resources.accelerator_args["runtime_version"] == "v2-alpha-tpuv5-lite"


def test_a_task_of_dstack_holds_what_it_should(folder, capsys):
    yaml = pytest.importorskip("yaml")
    text, told = ask(capsys, "dstack", "--chip", "v6e-1", "--args", ARGS)
    task = yaml.safe_load(text)
    assert (task["type"], task["name"], task["python"]) == ("task", "learn-it", "3.12")
    assert task["files"] == ["learn-it.zip"]
    assert task["resources"] == {"gpu": "tpu:v6e-1"}
    assert shlex.split(task["commands"][-1])[-1] == json.dumps(json.loads(ARGS))
    assert "dstack apply" in told


def test_dstack_itself_reads_its_task(folder, capsys):
    configurations = pytest.importorskip(
        "dstack._internal.core.models.configurations", reason="dstack is not installed: its own reader cannot be asked"
    )
    import yaml

    for chip in ("v5e-8", "v6e-4", "v2-8"):
        text, _ = ask(capsys, "dstack", "--args", ARGS, "--chip", chip)
        task = configurations.parse_apply_configuration(yaml.safe_load(text))
        task = getattr(task, "root", task)
        assert task.resources.gpu.vendor.value == "google"
        assert task.resources.gpu.name == [chip.replace("v5e", "v5litepod")]


def test_vertex_gets_a_custom_job_and_the_lines_that_send_it(folder, capsys):
    text, told = ask(capsys, "vertex", *VERTEX, "--args", ARGS, "--chip", "v5e-4", "--project", "demo")
    made = json.loads(text)
    (pool,) = made["jobSpec"]["workerPoolSpecs"]
    assert made["displayName"] == "learn-it"
    assert pool["machineSpec"] == {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "2x2"}
    assert pool["containerSpec"]["command"] == ["python", "/gcs/demo-bucket/runs/learn-it/trainer.zip"]
    assert "gcloud storage cp learn-it.zip gs://demo-bucket/runs/learn-it/trainer.zip" in told
    assert "https://us-central1-aiplatform.googleapis.com/v1/projects/demo/locations/us-central1/customJobs" in told
    assert "about $4.80 an hour" in told


def test_googles_sdk_reads_the_custom_job(folder, capsys):
    sdk = pytest.importorskip(
        "google.cloud.aiplatform_v1", reason="needs Google's SDK: pip install google-cloud-aiplatform"
    )
    text, _ = ask(capsys, "vertex", *VERTEX)
    made = sdk.CustomJob.from_json(text)
    assert made.job_spec.worker_pool_specs[0].machine_spec.machine_type == "ct5lp-hightpu-8t"


@pytest.mark.parametrize(
    ("source", "origin", "requirement"),
    [
        ("https://example.com/a/tpukit-1.0-py3-none-any.whl", "", "https://example.com/a/tpukit-1.0-py3-none-any.whl"),
        ("git+https://example.com/a/kit@v1", "", "git+https://example.com/a/kit@v1"),
        ("wheels/here", "https://name:secret@example.com/a/kit.git", "git+https://example.com/a/kit.git"),
        ("", "https://example.com/a/kit", "git+https://example.com/a/kit"),
        ("", "git@example.com:a/kit", None),
        ("", "", None),
    ],
)
def test_the_kit_comes_from_an_address_that_is_known_and_never_by_its_name(
    source, origin, requirement, folder, capsys, monkeypatch
):
    (folder / "git").write_text(f"#!/bin/sh\necho {origin}\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("TPUKIT_SOURCE", source)
    status = main(["job", "train.py:learn_it", "--target", "dstack"])
    said = capsys.readouterr()
    if requirement:
        assert f"'tpukit[tpu] @ {requirement}'" in said.out
    else:
        assert status != 0
        assert "fix:   TPUKIT_SOURCE=https://" in said.err
        assert "tpukit[tpu]" not in said.out


def test_a_script_needs_no_tpukit_where_it_runs(folder, capsys):
    text, _ = ask(capsys, "gcloud", "--zone", "us-west4-a", "--args", '["--steps", 3]', trainer="script.py")
    assert "tpukit[tpu]" not in text
    assert "script.zip --steps 3" in text
    assert zipfile.ZipFile("script.zip").namelist() == ["__main__.py"]


def test_a_script_in_tensorflow_gets_the_one_that_has_tpus(folder, capsys):
    (folder / "keras_train.py").write_text("import tensorflow as tf\n")
    text, _ = ask(capsys, "gcloud", "--zone", "us-west4-a", trainer="keras_train.py")
    (image,) = (ROOT / "examples").glob("*.tensorflow")
    (release,) = re.findall("tensorflow-tpu==[0-9.]+", image.read_text())
    assert f"--torch-backend cpu {release} &&" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "gcloud"], "gcloud needs the zone"),
        (["--target", "vertex"], "vertex needs --image and --bucket"),
        (["--target", "vertex", *VERTEX, "--chip", "v4-8"], "Vertex AI trains on no v4-8"),
        (["--target", "dstack", "--chip", "v5e-3"], "there is no TPU 'v5e-3'"),
        (["--target", "dstack", "--args", "3"], "--args is a JSON list"),
        (["--target", "dstack", "--args", "[3"], "--args is a JSON list"),
        (["--target", "skypilot", "--bucket", "s3://b"], "bucket is none"),
        (["--target", "dstack", "--name", "My Job"], "'My Job' is no name of a job"),
    ],
)
def test_what_a_tool_would_not_take_is_refused_and_nothing_is_written(folder, capsys, options, words):
    assert main(["job", "train.py:learn_it", *options]) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert "fix:" in said.err
    assert (said.out, list(folder.glob("*.zip"))) == ("", [])
