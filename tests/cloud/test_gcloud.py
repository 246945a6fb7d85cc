"""TPU VMs through gcloud: real commands, a boot script that is executed, and nothing deleted before it is copied."""

import json
import shlex
import shutil
import subprocess
import time
from dataclasses import replace

import pytest
from cloud.test_options import ZONE, plan
from doubles.cloud_tools import CloudTools

from tpukit.cloud.answers import CloudError
from tpukit.cloud.external_tools import run_tool
from tpukit.cloud.gcloud import GcloudTarget, boot_script, create_words
from tpukit.cloud.machines import container_lines

pytest.importorskip(
    "google_crc32c", reason="the double of Cloud Storage needs it: pip install google-crc32c"
)
ADDRESS = "demo-bucket/jobs/train-1"
# In place of tpukit's run.sh: what the test writes into the file is the runner's work.
RUN = """#!/bin/bash
address={buckets}/demo-bucket/jobs/train-1
mkdir -p $2/run; echo weights > $2/run/model.pt
{work}
"""
DONE = 'mkdir -p $address/out; cp $2/run/model.pt $address/out/; echo \'{"state": "succeeded"}\' > $address/result.json'


@pytest.fixture
def cloud(tmp_path):
    with CloudTools(tmp_path / "cloud") as tools:
        (tools.buckets / ADDRESS / "in").mkdir(parents=True)
        (tools.buckets / ADDRESS / "in/notebook.ipynb").write_text("{}")
        yield tools


def start(cloud, work, *, fail=(), **changes):
    text = RUN.replace("{buckets}", str(cloud.buckets)).replace("{work}", work)
    (cloud.buckets / ADDRESS / "run.sh").write_text(text)
    cloud.fail(*fail)
    return GcloudTarget().start(plan("gcloud", **changes))


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def tries(cloud):
    return sum(line.startswith("docker run") for line in cloud.calls())


def test_the_machine_deletes_itself_when_the_result_is_in_the_bucket(cloud):
    handle = start(cloud, DONE)
    wait_for(lambda: not cloud.machines())
    assert (cloud.buckets / ADDRESS / "out/model.pt").read_text() == "weights\n"
    assert GcloudTarget().state(handle).word == "gone"
    GcloudTarget().clean_up(handle)  # a second deletion is no error


@pytest.mark.parametrize(
    "work",
    ["exit 1", "exit 75", "kill -9 $$", "cp -r $2/run $address/out; exit 0"],
    ids=["failed", "interrupted", "killed", "copied but without a result"],
)
def test_without_a_result_nothing_is_deleted_and_the_job_starts_again(cloud, work):
    handle = start(cloud, work)
    wait_for(lambda: tries(cloud) >= 3)
    assert GcloudTarget().state(handle).word == "running"
    assert not any(" delete " in line for line in cloud.calls())
    (model,) = (cloud.folder / "vm").rglob("run/model.pt")
    wait_for(lambda: model.read_text() == "weights\n")  # each start writes it again


@pytest.mark.parametrize("broken", ["storage ls", "storage cp"])
def test_a_lost_connection_to_the_bucket_deletes_nothing(cloud, broken):
    start(cloud, DONE if broken == "storage ls" else "exit 1", fail=[broken])
    wait_for(lambda: sum(broken in line for line in cloud.calls()) >= 4)
    assert cloud.machines() == ["train-1"]


@pytest.mark.parametrize("is_broken", [False, True])
def test_after_the_time_limit_the_files_are_copied_once_more_or_the_machine_stays(cloud, is_broken):
    # The limit begins when there is a file to copy, however long that takes, and ends the second attempt.
    soon = "echo $(($(date +%s) + 3)) > $2/../deadline"
    work = f"[ -e $2/again ] && sleep 600; touch $2/again; {soon}; exit 1"
    start(cloud, work, fail=["left-on-the-machine"] if is_broken else [])
    if is_broken:
        wait_for(lambda: sum("left-on-the-machine" in line for line in cloud.calls()) >= 3)
        assert cloud.machines() == ["train-1"]
    else:
        wait_for(lambda: not cloud.machines())
        assert (cloud.buckets / ADDRESS / "left-on-the-machine/run/model.pt").exists()


def test_a_failed_installation_leaves_its_reason_in_the_bucket_and_no_machine(cloud):
    start(
        cloud,
        'cd "$(dirname "$0")"; mkdir log; echo why > log/00-setup.txt; echo "{}" > result.json; exit 1',
    )
    wait_for(lambda: not cloud.machines())
    assert (cloud.buckets / ADDRESS / "log/00-setup.txt").read_text() == "why\n"
    assert tries(cloud) == 1


def test_a_job_that_is_over_does_not_run_again_after_a_reboot(cloud):
    (cloud.buckets / ADDRESS / "result.json").write_text('{"state": "succeeded"}')
    start(cloud, 'test -e "$(dirname "$0")/result.json" && exit 0; touch $address/ran-again')
    wait_for(lambda: not cloud.machines())
    assert not (cloud.buckets / ADDRESS / "ran-again").exists()


def test_a_lost_answer_finds_the_machine_and_a_preempted_one_is_created_again(cloud):
    handle = start(cloud, "sleep 600")
    assert GcloudTarget().start(plan("gcloud")) == handle
    with pytest.raises(CloudError, match="another TPU VM is named train-1"):
        GcloudTarget().start(plan("gcloud", digest="cd" * 32))
    cloud.preempt("train-1")
    assert GcloudTarget().state(handle).word == "gone"
    assert GcloudTarget().start(plan("gcloud")) == handle
    assert GcloudTarget().state(handle).word == "running"
    assert sum(" create " in line for line in cloud.calls()) == 2


def test_a_request_that_waits_is_deleted_when_it_is_cancelled_and_a_running_machine_ends_by_itself(
    cloud,
):
    handle = start(cloud, "sleep 600")
    GcloudTarget().cancel(handle)
    assert cloud.machines() == ["train-1"], "it still copies"
    record = cloud.folder / "vm/train-1.json"
    record.write_text(
        json.dumps(json.loads(record.read_text()) | {"state": "WAITING_FOR_RESOURCES"})
    )
    assert GcloudTarget().state(handle).word == "queued"
    GcloudTarget().cancel(handle)
    assert cloud.machines() == []


def test_the_container_is_the_users_or_a_plain_python(cloud):
    start(cloud, DONE)
    wait_for(lambda: not cloud.machines())
    assert (cloud.folder / "images.txt").read_text() == "python:3.12\n"
    lines = container_lines(
        plan("gcloud", options=replace(ZONE, image="us-docker.pkg.dev/demo/kit/t:1")), [], **WHERE
    )
    assert lines.startswith("gcloud auth configure-docker us-docker.pkg.dev --quiet\n")
    assert lines.endswith(" us-docker.pkg.dev/demo/kit/t:1")


WHERE = {"mounts": ["/var/tpukit"], "seconds": "60"}
# gcloud ends the messages of services with this sentence.
ACCOUNT = (
    "This command is authenticated as me@example.com which is the active account specified by "
    "the [core/account] property."
)


def refusal(tmp_path, monkeypatch, message):
    """Return the error of a gcloud that prints a message and ends with status 1."""
    program = tmp_path / "gcloud"
    program.write_text(f"#!/bin/sh\necho {shlex.quote(message)} >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(CloudError) as caught:
        run_tool(["gcloud", "compute", "tpus", "list"])
    return caught.value


@pytest.mark.parametrize(
    ("message", "status", "fix"),
    [
        ("ERROR: NOT_FOUND: Resource 'x' was not found", 404, "check the name"),
        ("ERROR: PERMISSION_DENIED: no tpu.nodes.create", 403, "docs/jobs.md"),
        (
            f"ERROR: (gcloud.compute.tpus) PERMISSION_DENIED: no tpu.nodes.create. {ACCOUNT}",
            403,
            "docs/jobs.md",
        ),
        (
            "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5s' has been exceeded",
            429,
            "iam-admin/quotas",
        ),
        ("You do not currently have an active account selected.", 401, "gcloud auth login"),
        ("ERROR: gcloud crashed (KeyError)", None, "by hand"),
        ("", None, "by hand"),
    ],
)
def test_a_refusal_of_gcloud_is_an_error_with_its_words_and_a_fix(
    tmp_path, monkeypatch, message, status, fix
):
    error = refusal(tmp_path, monkeypatch, message)
    assert (error.status, fix in error.fix) == (status, True)
    assert message in error.found or not message


def test_the_code_of_a_long_error_of_gcloud_counts_and_not_its_end(tmp_path, monkeypatch):
    disabled = "Cloud TPU API has not been used in project demo before or it is disabled."
    lines = [
        "WARNING: the Connection to the metadata server timed out",
        f"ERROR: (gcloud.compute.tpus.list) PERMISSION_DENIED: {disabled} {ACCOUNT}",
        *[f"- '@type': type.googleapis.com/google.rpc.Detail{number}" for number in range(20)],
    ]
    error = refusal(tmp_path, monkeypatch, "\n".join(lines))
    assert (error.status, error.answered) == (403, True)
    assert disabled in error.found
    assert len(error.found) < 500


def test_a_tool_that_is_missing_or_hangs_is_an_error_with_a_fix(tmp_path, monkeypatch):
    program = tmp_path / "sky"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(CloudError, match="did not end within 0.2 s") as caught:
        run_tool(["sky", "jobs"], seconds=0.2)
    assert not caught.value.answered
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ImportError, match="`gcloud` is not installed(.|\n)*cloud.google.com/sdk"):
        run_tool(["gcloud", "version"])


def test_the_boot_script_is_read_by_bash_and_names_no_other_machine():
    handle = {"name": "train-1", "zone": "us-west4-a", "project": "demo"}
    text = boot_script(plan("gcloud"), handle)
    parts = [text, *(part.partition("\n")[2] for part in text.split("<<'")[1:3])]
    for part in parts:
        assert (
            subprocess.run(["bash", "-n"], input=part, text=True, capture_output=True).stderr == ""
        )
    assert "KillMode=mixed" in text
    assert len(text) < 256 * 1024  # the limit of a metadata value


@pytest.mark.skipif(
    not shutil.which("gcloud"), reason="gcloud is not installed: its own parser cannot be asked"
)
def test_gcloud_itself_accepts_the_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    handle = {"name": "train-1", "zone": "us-west4-a", "project": "demo"}
    options = replace(ZONE, spot=True, service_account="a@demo.iam.gserviceaccount.com")
    create = [
        *create_words(plan("gcloud", options=options), handle),
        "--metadata-from-file=startup-script=boot.sh",
    ]
    text = boot_script(plan("gcloud"), handle)
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("gcloud")]
    commands = [
        shlex.join(create),
        GcloudTarget().logs(handle),
        *(line.partition(" ||")[0] for line in lines),
    ]
    assert len(commands) >= 4
    for command in commands:
        words = command.partition(" 2>")[0]
        lint = ["gcloud", "meta", "lint-gcloud-commands", f"--command-string={words}"]
        answer = subprocess.run(lint, capture_output=True, text=True).stdout
        assert json.loads(answer)[0]["success"], words
