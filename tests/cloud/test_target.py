"""The same jobs on a double of each platform: executed by its own start command, preempted, cancelled, failing."""

import csv
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import papermill
import pytest
import torch
from doubles.cloud_tools import CloudTools
from doubles.vertex_double import processes_of
from helpers.executed import outputs

from tpukit.cloud.job import CellFailedError, JobFailedError, find, submit
from tpukit.cloud.job_folder import read_json
from tpukit.cloud.target import JobOptions
from tpukit.cloud.vertex import VertexTarget

pytest.importorskip(
    "google.cloud.aiplatform_v1", reason="needs Google's SDK: pip install google-cloud-aiplatform"
)
WALKTHROUGH = Path(__file__).parents[2] / "notebooks" / "05_resnet_on_slices.ipynb"
# A checkpoint of it has 340 MB, so two epochs.
SMALL = {
    "studies": 8,
    "slices": 6,
    "num_folds": 2,
    "image_size": 32,
    "batch_size": 4,
    "num_epochs": 2,
}
SMALL |= {"plain_epochs": 1, "seed": 7}
OPTIONS = JobOptions(torch="none", grace=5.0)
ACCOUNT = "trainer@demo.iam.gserviceaccount.com"
PLACES = {
    "vertex": {"region": "us-west4", "service_account": ACCOUNT},
    "gcloud": {"zone": "us-west4-a", "service_account": ACCOUNT},
    "skypilot": {"zone": "us-west4-a", "spot": True},
}
COUNT = """import os, time
done = int(open('checkpoint').read()) if os.path.exists('checkpoint') else 0
resumed = done
while done < steps:
    done += 1
    open('checkpoint.tmp', 'w').write(str(done)); os.replace('checkpoint.tmp', 'checkpoint')
    print('step', done, flush=True)
    if not resumed and done == 20:
        time.sleep(600)"""  # the machine is lost here
SAVE = """import time
try:
    print('begun', flush=True)
    time.sleep(0 if os.path.exists('saved') else 600)
except KeyboardInterrupt:
    time.sleep(1)
    open('saved', 'w').write('in time')
    raise
print('second attempt')"""


@pytest.fixture
def cloud(tmp_path, machine, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "demo")
    with CloudTools(tmp_path / "cloud") as tools:
        yield tools


@pytest.fixture(params=list(PLACES))
def platform(request, cloud):
    """A platform: `send` submits to it, `preempt` loses the machine of a job, `processes` are those of its machines."""
    name = request.param
    target = VertexTarget(**cloud.cloud.connection) if name == "vertex" else name

    def send(notebook, parameters=None, **others):
        options = replace(OPTIONS, **PLACES[name])
        given = {
            "chip": "v5e-8",
            "bucket": "gs://demo-bucket/jobs",
            "timeout": "2h",
            "options": options,
        } | others
        return submit(notebook, to=target, parameters=parameters, **given)

    def machine_of(job):
        if name == "vertex":
            return cloud.cloud.jobs[read_json(job.folder, "handle.json")["resource"]].mark
        return job.name if name == "gcloud" else "sky-1"

    def preempt(job):
        if name == "vertex":
            cloud.cloud.preempt(read_json(job.folder, "handle.json")["resource"])
        else:
            cloud.preempt(machine_of(job))

    return SimpleNamespace(
        name=name,
        target=target,
        send=send,
        preempt=preempt,
        processes=lambda job: processes_of(machine_of(job)),
    )


def wait_for(condition, job):
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end, f"{job.state}\n{job.logs()}"
        time.sleep(0.1)


def step(job):
    return int(job.folder.read("out/checkpoint") or 0)


def test_the_executed_notebook_and_its_files_are_those_of_a_local_job(
    platform, cloud, make_notebook, tmp_path
):
    (tmp_path / "helper.py").write_text("def twice(x):\n    return 2 * x\n")
    cells = ["import helper; print(helper.twice(n))", "open('made.txt', 'w').write(name); {'n': n}"]
    book = make_notebook(*cells, parameters="n = 1\nname = 'a'")
    parameters = {"n": 21, "name": "001"}
    job = platform.send(book, parameters, files=["helper.py"])
    result = job.result(tmp_path / "results", timeout="5m")
    local = submit(book, parameters=parameters, files=["helper.py"], options=OPTIONS).result(
        timeout="5m"
    )
    assert outputs(result.notebook) == outputs(local.notebook)
    assert result.files["made.txt"].read_text() == "001" == local.files["made.txt"].read_text()
    assert sorted(result.files) == sorted(local.files)
    assert result.page.read_text().count("42") > 0
    again = find(
        job.name,
        "gs://demo-bucket/jobs",
        to=None if isinstance(platform.target, str) else platform.target,
    )
    assert (again.state, again.logs().count("42")) == ("succeeded", 1)
    assert cloud.machines() == [], "a machine is left that costs money"
    assert not platform.processes(job)


def test_a_job_whose_machine_is_lost_resumes_from_its_files(
    platform, cloud, make_notebook, tmp_path
):
    book = make_notebook(
        COUNT, "print('resumed at', resumed, 'reached', done)", parameters="steps = 1"
    )
    job = platform.send(book, {"steps": 80})
    wait_for(lambda: step(job) == 20, job)
    platform.preempt(job)
    if platform.name == "gcloud":  # the Cloud TPU API starts no other machine by itself
        with pytest.raises(JobFailedError, match=r"interrupted; SUSPENDED(.|\n)*job.start\(\)"):
            job.wait()
        job.start()
    result = job.result(tmp_path / "results", timeout="5m")
    (text,) = [one["text"] for one in outputs(result.notebook)[-1][1]]
    assert text == "resumed at 20 reached 80\n"
    assert read_json(job.folder, "result.json")["attempt"] == 2
    assert cloud.machines() == []


def test_a_cell_that_fails_raises_here_and_ends_the_machine(platform, cloud, make_notebook):
    job = platform.send(make_notebook("open('before.txt', 'w').write('kept')", "1 / 0"))
    with pytest.raises(CellFailedError, match="ZeroDivisionError: division by zero") as caught:
        job.result(timeout="5m")
    assert caught.value.cell == 2
    assert job.folder.read("out/before.txt") == b"kept"
    wait_for(lambda: not platform.processes(job), job)
    assert cloud.machines() == []
    assert job.folder.names("attempts/") == ["attempts/0001.json"], "a job that is over runs once"


def test_a_cancelled_job_ends_and_leaves_no_process(platform, cloud, make_notebook):
    job = platform.send(make_notebook("import time; print('go', flush=True); time.sleep(600)"))
    wait_for(lambda: "go" in job.logs(), job)
    job.cancel()
    assert job.wait("3m") == "cancelled"
    wait_for(lambda: not platform.processes(job), job)
    assert cloud.machines() == []
    assert job.cancel().state == "cancelled"


def test_packages_that_cannot_be_installed_are_an_error_with_the_log(
    platform, cloud, make_notebook, tmp_path
):
    (tmp_path / "requirements.txt").write_text("no-such-package-of-anybody==1.0\n")
    job = platform.send(make_notebook("1"), requirements="requirements.txt")
    with pytest.raises(JobFailedError, match="no-such-package-of-anybody"):
        job.result(timeout="5m")
    wait_for(lambda: not platform.processes(job), job)
    assert cloud.machines() == []


def test_sent_again_it_is_the_same_job_on_the_same_machine(platform, cloud, make_notebook):
    book = make_notebook("import time; time.sleep(5)")
    first = platform.send(book, name="once")
    second = platform.send(book, name="once")
    assert second.target.start(second.plan) == read_json(first.folder, "handle.json"), (
        "as if the answer had been lost"
    )
    first.result(timeout="5m")
    assert first.folder.names("attempts/") == ["attempts/0001.json"]
    with pytest.raises(ValueError, match="a job once already exists"):
        platform.send(make_notebook("2"), name="once")


def test_a_notice_before_the_loss_leaves_the_cell_time_to_save(cloud, make_notebook, tmp_path):
    """SIGTERM reaches the runner alone (KillMode=mixed, docker --init): a kernel that gets it is dead at once."""
    options = replace(OPTIONS, **PLACES["gcloud"])
    given = {"chip": "v5e-8", "to": "gcloud", "bucket": "gs://demo-bucket/jobs", "options": options}
    job = submit(make_notebook("import os", SAVE), **given)
    wait_for(lambda: "begun" in job.logs(), job)
    cloud.preempt(job.name, notice=True)
    assert job.folder.read("out/saved") == b"in time"
    assert job.state == "interrupted"
    assert (
        "second attempt"
        in job.start().result(tmp_path / "results", timeout="5m").notebook.read_text()
    )


@pytest.mark.parametrize("platform", ["skypilot"], indirect=True)
def test_a_secret_reaches_the_notebook_and_no_file_of_the_job(
    platform, cloud, make_notebook, monkeypatch, tmp_path
):
    monkeypatch.setenv("MY_TOKEN", "value-of-the-secret")
    monkeypatch.setenv("OTHER", "not for others")
    book = make_notebook("import os; print(len(os.environ['HF_TOKEN']), os.environ.get('OTHER'))")
    job = platform.send(book, secrets={"HF_TOKEN": "env:MY_TOKEN"})
    assert "19 None" in job.result(tmp_path / "results", timeout="5m").notebook.read_text()
    for file in (path for path in Path(cloud.folder).rglob("*") if path.is_file()):
        assert b"value-of-the-secret" not in file.read_bytes(), file


class Numbers:
    """All that a run of the walkthrough computes, to the last bit, without its speed."""

    def __init__(self, files):
        self.metrics = json.loads(files["runs/metrics.json"].read_text())
        del self.metrics["images_per_second"]
        (*_, row) = csv.DictReader(files["runs/log.csv"].read_text().splitlines())
        self.last_row = {
            name: value for name, value in row.items() if value
        }  # its loss has all digits
        self.figures = {
            name: path.read_bytes() for name, path in files.items() if name.endswith(".png")
        }
        self.weights = torch.load(files["runs/checkpoints/best.pt"])

    def assert_equal(self, others):
        assert self.metrics == others.metrics
        assert self.last_row == others.last_row
        assert "runs/figures/curves.png" in self.figures, "the losses of all epochs"
        assert self.figures == others.figures
        assert self.weights.keys() == others.weights.keys()
        assert [
            name
            for name in self.weights
            if not torch.equal(self.weights[name], others.weights[name])
        ] == []


@pytest.fixture(scope="module")
def walkthrough(tmp_path_factory):
    """Return the numbers of the walkthrough, executed by papermill in this environment."""
    folder = tmp_path_factory.mktemp("walkthrough")
    given = {"cwd": folder, "kernel_name": "python3", "progress_bar": False}
    papermill.execute_notebook(WALKTHROUGH, folder / "walkthrough.ipynb", SMALL, **given)
    return Numbers({path.relative_to(folder).as_posix(): path for path in folder.rglob("*")})


@pytest.fixture
def trains(machine, training_environment, monkeypatch):
    """Make this machine one whose image has torch."""
    monkeypatch.setenv("TPUKIT_ENVIRONMENT", str(training_environment))


def test_the_walkthrough_as_a_job_of_this_machine_gives_the_numbers_of_a_run_without_one(
    trains, walkthrough, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    job = submit(WALKTHROUGH, parameters=SMALL, options=OPTIONS)
    job.wait("5m", every=0.2)
    Numbers(job.result().files).assert_equal(walkthrough)


@pytest.mark.parametrize("platform", ["vertex", "skypilot"], indirect=True)
def test_the_walkthrough_as_a_job_gives_the_numbers_of_a_local_run(
    platform, trains, walkthrough, tmp_path
):
    job = platform.send(WALKTHROUGH, SMALL)
    job.wait("5m", every=0.2)
    Numbers(job.result(tmp_path / "results").files).assert_equal(walkthrough)


@pytest.mark.parametrize("platform", ["gcloud"], indirect=True)
def test_a_walkthrough_whose_machine_is_lost_gives_the_same_numbers(
    platform, cloud, trains, walkthrough, tmp_path
):
    job = platform.send(WALKTHROUGH, SMALL)
    disk = cloud.folder / "vm" / job.name
    wait_for(lambda: [*disk.rglob("runs/checkpoints/step-*.pt")], job)
    for process in platform.processes(job):  # so that a fast machine does not finish meanwhile
        if b"ipykernel" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGSTOP)
    wait_for(lambda: job.folder.names("out/runs/checkpoints/step-"), job)
    platform.preempt(job)
    with pytest.raises(JobFailedError, match="interrupted"):
        job.wait()
    job.start().wait("5m", every=0.2)
    result = job.result(tmp_path / "results")
    assert "resumed from step-" in result.notebook.read_text()
    assert read_json(job.folder, "result.json")["attempt"] == 2
    Numbers(result.files).assert_equal(walkthrough)
    assert cloud.machines() == []
