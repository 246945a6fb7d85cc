"""The stand-in for Vertex AI: Google's own SDK submits to it, and what it was sent really runs."""

import pytest
from rehearsals.vertex_stand_in import VertexStandIn

from tpukit.cloud.answers import CloudFailed
from tpukit.cloud.vertex import job

pytest.importorskip(
    "google.cloud.aiplatform_v1", reason="a Vertex AI job needs Google's SDK: pip install google-cloud-aiplatform"
)
IMAGE = "us-docker.pkg.dev/demo/kit/trainer:1"
TRAINER = """
import os, pathlib, sys, time

folder = pathlib.Path(os.environ["AIP_CHECKPOINT_DIR"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "arguments").write_text(" ".join(sys.argv[1:]))
if sys.argv[1] == "long":
    time.sleep(60)
if sys.argv[1] == "wrong":
    sys.exit("no such column: age")
"""


@pytest.fixture
def cloud(tmp_path):
    with VertexStandIn(tmp_path / "cloud") as cloud:
        yield cloud


def make(cloud, tmp_path, *args, name="flowers"):
    (tmp_path / "train.py").write_text(TRAINER)
    bucket = "gs://demo-bucket/runs"
    return job(f"{tmp_path}/train.py", image=IMAGE, bucket=bucket, args=args, name=name, **cloud.connection)


def test_a_job_runs_with_its_arguments_and_writes_into_the_bucket(cloud, tmp_path):
    sent = make(cloud, tmp_path, "3", "fast").submit()
    assert sent.state == "PENDING"
    assert sent.watch(every=0.1).state == "SUCCEEDED"
    assert (cloud.folder / "demo-bucket/runs/flowers/checkpoints/arguments").read_text() == "3 fast"
    assert ("POST", "/upload/storage/v1/b/demo-bucket/o") in cloud.requests


def test_a_job_that_fails_says_its_last_line(cloud, tmp_path):
    with pytest.raises(CloudFailed, match="no such column: age"):
        make(cloud, tmp_path, "wrong").submit().watch(every=0.1)


def test_a_cancelled_job_is_ended(cloud, tmp_path):
    sent = make(cloud, tmp_path, "long").submit().cancel()
    assert sent.watch(every=0.1).state == "CANCELLED"
    assert [one.process.returncode for one in cloud._jobs.values()] == [-15]


def test_a_job_that_is_over_stays_as_it_is(cloud, tmp_path):
    sent = make(cloud, tmp_path, "3").submit().watch(every=0.1)
    assert sent.cancel().state == "SUCCEEDED"


def test_closing_it_ends_its_jobs(tmp_path):
    with VertexStandIn(tmp_path / "cloud") as cloud:
        make(cloud, tmp_path, "long").submit()
        (there,) = cloud._jobs.values()
    assert there.process.returncode == -9
