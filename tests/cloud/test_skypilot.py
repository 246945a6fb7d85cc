"""A managed job of SkyPilot: its file, read by SkyPilot's own reader where it is installed, and its states."""

import json
import os
import shlex
from dataclasses import replace

import pytest
import yaml
from cloud.test_options import plan

from tpukit.cloud.answers import CloudError
from tpukit.cloud.skypilot import SkyPilotTarget, job_name, job_yaml
from tpukit.cloud.target import JobOptions
from tpukit.profiling import find_tpu

SECRETS = {"HF_TOKEN": "env:MY_TOKEN"}


@pytest.fixture
def sky(tmp_path, monkeypatch):
    """Return a function that installs a `sky` which prints and exits as it is told."""

    def install(output="", code=0):
        program = tmp_path / "bin/sky"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f"#!/bin/sh\necho $* >> {tmp_path}/calls\necho {shlex.quote(output)}\nexit {code}\n"
        )
        program.chmod(0o755)
        return tmp_path / "calls"

    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    return install


@pytest.mark.parametrize(
    ("chip", "options", "accelerator", "runtime", "infra"),
    [
        ("v5e-8", {}, "tpu-v5litepod-8", "v2-alpha-tpuv5-lite", "gcp"),
        ("v6e-4", {"region": "us-east5"}, "tpu-v6e-4", "v2-alpha-tpuv6e", "gcp/us-east5"),
        (
            "v3-8",
            {"zone": "us-central1-a"},
            "tpu-v3-8",
            "tpu-ubuntu2204-base",
            "gcp/us-central1/us-central1-a",
        ),
    ],
)
def test_the_file_holds_the_machine_and_the_command_and_no_value_of_a_secret(
    chip, options, accelerator, runtime, infra, monkeypatch
):
    monkeypatch.setenv("MY_TOKEN", "value-of-the-secret")
    text = job_yaml(
        plan("skypilot", tpu=find_tpu(chip), options=JobOptions(**options), secrets=SECRETS)
    )
    task = yaml.safe_load(text)
    assert task["resources"]["accelerators"] == accelerator
    assert task["resources"]["accelerator_args"] == {"runtime_version": runtime}
    assert task["resources"]["infra"] == infra
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert task["file_mounts"] == {"/bucket": {"source": "gs://demo-bucket", "mode": "MOUNT"}}
    assert task["secrets"] == {"HF_TOKEN": None}
    words = shlex.split(task["run"].splitlines()[-1])
    assert words[:5] == ["exec", "timeout", "--foreground", "--kill-after=115", "7800"]
    assert words[-4:] == ["--env=HF_TOKEN", "python:3.12", "bash", "/bucket/jobs/train-1/run.sh"]
    assert "value-of-the-secret" not in text


def test_skypilot_itself_reads_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    sky = pytest.importorskip(
        "sky", reason="skypilot is not installed: its own reader cannot be asked"
    )
    (tmp_path / "job.yaml").write_text(
        job_yaml(plan("skypilot", options=JobOptions(spot=True, zone="us-west4-a")))
    )
    task = sky.Task.from_yaml(str(tmp_path / "job.yaml"))
    (resources,) = task.resources
    assert (str(resources.cloud), resources.zone, resources.use_spot) == ("GCP", "us-west4-a", True)
    assert resources.accelerators == {"tpu-v5litepod-8": 1}
    assert resources.accelerator_args["runtime_version"] == "v2-alpha-tpuv5-lite"
    from sky.jobs.state import ManagedJobStatus

    from tpukit.cloud.skypilot import _WORDS

    assert {one.value for one in ManagedJobStatus} <= _WORDS.keys()


@pytest.mark.parametrize(
    ("status", "word"),
    [
        ("PENDING", "queued"),
        ("RECOVERING", "running"),
        ("SUCCEEDED", "succeeded"),
        ("FAILED_NO_RESOURCE", "failed"),
    ],
)
def test_the_newest_job_of_the_name_has_the_state(sky, status, word):
    handle = {"name": job_name(plan("skypilot"))}
    named = [
        {"job_id": number, "job_name": handle["name"], "status": "CANCELLED"} for number in (1, 2)
    ]
    newest = {"job_id": 3, "job_name": handle["name"], "status": status, "failure_reason": "why"}
    others = [{"job_id": 9, "job_name": "other", "status": "FAILED"}]
    # The colours of a terminal contain brackets, too.
    for notice in ("a notice\n", "\033[33ma notice\033[0m\n", "[info] a notice\033[0m"):
        sky(notice + json.dumps([*named, newest, *others], indent=2))
        state = SkyPilotTarget().state(handle)
        assert (state.word, state.reason) == (word, f"{status} why")


def test_without_a_controller_the_job_is_gone_and_another_failure_is_an_error(sky):
    sky("sky.exceptions.ClusterNotUpError: No in-progress managed jobs.", code=1)
    assert SkyPilotTarget().state({"name": "a"}).word == "gone"
    sky("[]")
    assert SkyPilotTarget().state({"name": "a"}).word == "gone"
    sky("Could not connect to SkyPilot API server", code=1)
    with pytest.raises(CloudError, match="Could not connect"):
        SkyPilotTarget().state({"name": "a"})


def test_a_launch_that_fails_is_an_error_and_a_missing_secret_ends_it_before(sky, monkeypatch):
    calls = sky("[]")
    with pytest.raises(ValueError, match=r"MY_TOKEN is not set(.|\n)*export MY_TOKEN="):
        SkyPilotTarget().start(plan("skypilot", secrets=SECRETS))
    assert "launch" not in calls.read_text()
    monkeypatch.setenv("MY_TOKEN", "value-of-the-secret")
    handle = SkyPilotTarget().start(replace(plan("skypilot"), secrets=SECRETS))
    assert handle == {"name": "train-1-abababab"}
    (launch,) = [line for line in calls.read_text().splitlines() if "launch" in line]
    assert "--secret=HF_TOKEN" in launch
    assert "value-of-the-secret" not in launch
