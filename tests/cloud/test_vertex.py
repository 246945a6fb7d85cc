"""A Vertex AI job: Google's own SDK sends real requests, over REST and gRPC, to a server on the loopback interface."""

import io
import json
import pickle
import re
import socket
import threading
import time
import zipfile
from concurrent import futures
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopback import HANG, LOSE, loopback, refusal

from tpukit.cloud.answers import CloudFailed
from tpukit.cloud.vertex import job

sdk = pytest.importorskip(
    "google.cloud.aiplatform_v1", reason="a Vertex AI job needs Google's SDK: pip install google-cloud-aiplatform"
)
import grpc  # noqa: E402
from google.auth.credentials import AnonymousCredentials  # noqa: E402
from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceGrpcTransport  # noqa: E402

PARENT = "projects/demo/locations/us-central1"
RESOURCE = f"{PARENT}/customJobs/77"
IMAGE = "us-docker.pkg.dev/demo/kit/trainer:1"
CODES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
CODES |= {429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}
SILENT = "created, and no answer"  # the job is there, its answer is lost


class Cloud:
    """A Vertex AI and a Cloud Storage that hold one job at most.

    Attributes:
        creating: what comes of each request to create: a status that refuses, HANG, LOSE, SILENT, or OK at the end.
        states: the job's states, one a request for it, the last for ever; a status refuses.
        asked: the requests by name, in order, each with its message.
        storing, listing, cancelling: what comes of these requests first.
        uploads: paths of files and their content.
    """

    def __init__(self, creating=(), states=("JOB_STATE_PENDING",), storing=(), listing=(), cancelling=()):
        self.creating, self.states, self.storing = list(creating), list(states), list(storing)
        self.listing, self.cancelling = list(listing), list(cancelling)
        self.asked, self.uploads, self.job, self.error = [], {}, None, ""
        self.headers, self.paths = {}, []

    def names(self):
        return [name for name, _ in self.asked]

    def create(self, request):
        self.asked.append(("create", request))
        fate = self.creating.pop(0) if self.creating else "OK"
        if fate in ("OK", SILENT):
            self.job = sdk.CustomJob.to_dict(request.custom_job) | {"name": RESOURCE, "state": 2}
            self.job = sdk.CustomJob(self.job)
        return self.job if fate == "OK" else LOSE if fate == SILENT else fate

    def list(self, request):
        self.asked.append(("list", request))
        if self.listing and (fate := self.listing.pop(0)):
            return fate
        return sdk.ListCustomJobsResponse(custom_jobs=[self.job] if self.job else [])

    def get(self, request):
        self.asked.append(("get", request))
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if not isinstance(state, str) or state in (HANG, LOSE):
            return state
        self.job.state = sdk.JobState[state]
        if state not in ("JOB_STATE_PENDING", "JOB_STATE_QUEUED"):
            self.job.start_time = {"seconds": int(time.time()) - 1800}
        if self.error:
            self.job.error = {"code": 3, "message": self.error}
        return self.job

    def cancel(self, request):
        self.asked.append(("cancel", request))
        if self.cancelling:
            return self.cancelling.pop(0)
        if "JOB_STATE_SUCCEEDED" in self.states:
            return 400
        self.states = ["JOB_STATE_CANCELLING"]
        return sdk.CustomJob()

    def rest(self, request):
        self.headers |= request.headers
        self.paths.append(request.path)
        if request.path.startswith("/upload/"):
            fate = self.storing.pop(0) if self.storing else "OK"
            if fate != "OK":
                return fate if isinstance(fate, str) else refusal(fate, "refused")
            content_type = request.headers.get("content-type") or request.headers.get("Content-Type")
            boundary = re.search(rb"boundary=\"?([^\";]+)", content_type.encode())[1]
            _, about, data, _ = request.body.split(b"--" + boundary)
            name = json.loads(about.partition(b"\r\n\r\n")[2])["name"]
            self.uploads[name] = data.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
            return 200, {"name": name, "bucket": "demo-bucket", "generation": "1", "metageneration": "1"}
        path = request.path.partition("?")[0]
        if path.startswith(
            ("/storage/", "/download/")
        ):  # the client of buckets asks for the bucket's place, beside the upload
            return refusal(403, "not for you")
        assert path.startswith(f"/v1/{PARENT}/customJobs"), path
        if request.method == "POST" and path.endswith(":cancel"):
            given = self.cancel(sdk.CancelCustomJobRequest(name=RESOURCE))
        elif request.method == "POST":
            made = sdk.CustomJob.from_json(request.body)
            given = self.create(sdk.CreateCustomJobRequest(parent=path[4:].rpartition("/")[0], custom_job=made))
        elif path.endswith("customJobs"):
            given = self.list(sdk.ListCustomJobsRequest(filter=re.search("filter=([^&]*)", request.path)[1]))
        else:
            given = self.get(sdk.GetCustomJobRequest(name=path[4:]))
        if isinstance(given, int):
            return refusal(given, f"refused with {given}")
        return given if isinstance(given, str) else (200, json.loads(type(given).to_json(given)))

    def over_grpc(self):
        """Return a gRPC server, and its port."""
        service = "google.cloud.aiplatform.v1.JobService"

        def method(name, kind, answer):
            def handle(request, context):
                given = answer(kind.deserialize(request))
                if given in (HANG, LOSE):
                    self.done.wait(20 if given == HANG else 0)
                    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                if isinstance(given, int):
                    context.abort(grpc.StatusCode[CODES[given]], f"refused with {given}")
                return b"" if name == "CancelCustomJob" else type(given).serialize(given)

            return name, grpc.unary_unary_rpc_method_handler(handle)

        handlers = [
            method("CreateCustomJob", sdk.CreateCustomJobRequest, self.create),
            method("ListCustomJobs", sdk.ListCustomJobsRequest, self.list),
            method("GetCustomJob", sdk.GetCustomJobRequest, self.get),
            method("CancelCustomJob", sdk.CancelCustomJobRequest, self.cancel),
        ]
        self.done = threading.Event()
        server = grpc.server(futures.ThreadPoolExecutor(4))
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, dict(handlers))])
        return server, server.add_insecure_port("127.0.0.1:0")


@contextmanager
def serving(cloud, transport, monkeypatch, **connection):
    """Yield the keywords with which `job` reaches this cloud."""
    connection = {"credentials": AnonymousCredentials(), "pauses": (0.01, 0.01), "request_timeout": 5.0} | connection
    with loopback(cloud.rest) as api:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", api.address)
        if transport == "rest":
            yield {"transport": "rest", "endpoint": api.address, **connection}
            return
        server, port = cloud.over_grpc()
        server.start()
        try:
            channel = grpc.insecure_channel(f"127.0.0.1:{port}")
            yield {"transport": JobServiceGrpcTransport(channel=channel), **connection}
            channel.close()
        finally:
            cloud.done.set()
            server.stop(0).wait()


@pytest.fixture(params=["rest", "grpc"])
def transport(request):
    return request.param


@pytest.fixture
def trainer(tmp_path):
    (tmp_path / "train.py").write_text("import psutil\n\ndef train(core, epochs, config):\n    pass\n")
    return f"{tmp_path}/train.py:train"


def make(trainer, **options):
    given = {"image": IMAGE, "bucket": "gs://demo-bucket/runs", "project": "demo", "name": "flowers-1"} | options
    return job(trainer, **given)


def test_the_request_arrives_field_by_field_and_the_trainer_in_the_bucket(trainer, transport, monkeypatch):
    cloud = Cloud()
    account = "trainer@demo.iam.gserviceaccount.com"
    with serving(cloud, transport, monkeypatch) as connection:
        sent = make(
            trainer, chip="v5e-4", args=[3, {"lr": 0.1}], service_account=account, timeout="6h", **connection
        ).submit()
    assert cloud.names() == ["list", "create"]  # it may be there already
    request = cloud.asked[-1][1]
    assert request.parent == PARENT
    made = request.custom_job
    assert made.display_name == "flowers-1"
    assert re.fullmatch("[0-9a-f]{12}", made.labels["tpukit-job"])
    spec = made.job_spec
    (pool,) = spec.worker_pool_specs
    assert (pool.machine_spec.machine_type, pool.machine_spec.tpu_topology) == ("ct5lp-hightpu-4t", "2x2")
    assert (pool.machine_spec.accelerator_type, pool.machine_spec.accelerator_count) == (0, 0)
    assert pool.replica_count == 1
    assert pool.container_spec.image_uri == IMAGE
    assert list(pool.container_spec.command) == ["python", "/gcs/demo-bucket/runs/flowers-1/trainer.zip"]
    assert list(pool.container_spec.args) == ['[3, {"lr": 0.1}]']
    variables = {one.name: one.value for one in pool.container_spec.env}
    assert variables == {"PJRT_DEVICE": "TPU", "TPUKIT_JOB": made.labels["tpukit-job"]}
    assert spec.scheduling.timeout.total_seconds() == 6 * 3600
    assert spec.service_account == account
    assert spec.base_output_directory.output_uri_prefix == "gs://demo-bucket/runs/flowers-1"
    assert cloud.uploads == {"runs/flowers-1/trainer.zip": sent.bundle.to_bytes()}
    assert (sent.resource, sent.state) == (RESOURCE, "PENDING")


@pytest.mark.parametrize(
    ("chip", "machine"),
    [
        ("v2-8", {"machine_type": "cloud-tpu", "accelerator_type": "TPU_V2", "accelerator_count": 8}),
        ("v3-8", {"machine_type": "cloud-tpu", "accelerator_type": "TPU_V3", "accelerator_count": 8}),
        ("v5e-1", {"machine_type": "ct5lp-hightpu-1t", "tpu_topology": "1x1"}),
        ("v5litepod-8", {"machine_type": "ct5lp-hightpu-8t", "tpu_topology": "2x4"}),
        ("v6e-8", {"machine_type": "ct6e-standard-8t", "tpu_topology": "2x4"}),
    ],
)
def test_every_tpu_is_a_machine_that_the_sdk_knows(trainer, chip, machine, monkeypatch):
    cloud = Cloud()
    with serving(cloud, "rest", monkeypatch) as connection:
        make(trainer, chip=chip, **connection).submit()
    assert cloud.asked[-1][1].custom_job.job_spec.worker_pool_specs[0].machine_spec == sdk.MachineSpec(machine)


def test_show_tells_everything_before_anything_is_sent(trainer, capsys):
    shown = make(trainer, chip="v5e-8", args=[1, {}], timeout="10h")
    shown.show()
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "flowers-1: not sent, v5e-8 in us-central1",
        "machineType ct5lp-hightpu-8t, tpuTopology 2x4",
        "about $9.60 an hour",
        "Compute Engine's list prices in the US, November 2026",
        "at most 10 h, $96.00",
        f"psutil=={metadata.version('psutil')}, torch-xla=={metadata.version('torch-xla')}, torch==",
        "tried here imported in an interpreter of its own",
        "gs://demo-bucket/runs/flowers-1/checkpoints",
    ):
        assert words in text
    assert "<table" in shown._repr_html_()


def test_a_script_of_any_framework_gets_its_arguments_as_words_and_arrives_as_it_is(monkeypatch):
    cloud, script = Cloud(), Path(__file__).parents[2] / "examples" / "train_tensorflow.py"
    needs = dict.fromkeys(("tensorflow", "keras"), "tensorflow-tpu==2.19.1")
    with serving(cloud, "rest", monkeypatch) as connection:
        sent = make(script, args=["gs://demo-bucket/*.tfrec", "--epochs", 3], needs=needs, **connection).submit()
    (pool,) = cloud.asked[-1][1].custom_job.job_spec.worker_pool_specs
    assert list(pool.container_spec.args) == ["gs://demo-bucket/*.tfrec", "--epochs", "3"]
    assert "tensorflow-tpu==2.19.1" in sent.bundle.needs
    (uploaded,) = cloud.uploads.values()
    with zipfile.ZipFile(io.BytesIO(uploaded)) as files:
        assert files.namelist() == ["__main__.py", "tpukit.json", "train_tensorflow.py"]
        assert files.read("train_tensorflow.py") == script.read_bytes()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"chip": "v5e-7"}, ValueError, "there is no TPU 'v5e-7'"),
        ({"chip": "v4-8"}, ValueError, "Vertex AI trains on no v4-8"),
        ({"chip": "v5e-256"}, ValueError, "no TPU of one host"),
        ({"bucket": "My Bucket"}, ValueError, "bucket is none that Vertex AI takes"),
        ({"bucket": "s3://x"}, ValueError, "bucket is none"),
        ({"bucket": "gs://"}, ValueError, "bucket is none"),
        ({"image": "python"}, ValueError, "image is none"),
        ({"image": "not an image"}, ValueError, "image is none"),
        ({"image": ""}, ValueError, "image is none"),
        ({"name": "a job:1"}, ValueError, "name is none"),
        ({"service_account": "me@gmail.com"}, ValueError, "service_account is none"),
        ({"timeout": "soon"}, ValueError, 'timeout="8h30m"'),
        ({"timeout": 0}, ValueError, "of at least a minute; got 0"),
        ({"timeout": 0.4}, ValueError, "of at least a minute; got 0.4"),
        ({"timeout": "59s"}, ValueError, "of at least a minute; got '59s'"),
        ({"timeout": float("inf")}, ValueError, "of at least a minute; got inf"),
        ({"region": "us-west4; echo"}, ValueError, "is no region of Google Cloud"),
        ({"project": "mine\n"}, ValueError, "is no project of Google Cloud"),
        ({"continues": "first"}, ValueError, "has two names"),
        ({"name": None, "continues": "a b"}, ValueError, "continues is none"),
        ({"needs": ["cv2"]}, TypeError, "needs is a dict of module and package"),
        ({"args": "3"}, TypeError, "args is a list"),
        ({"args": {"epochs": 3}}, TypeError, "args is a list"),
        ({"args": [object()]}, TypeError, "args travel as JSON"),
        ({"args": [(1, 2)]}, TypeError, "args travel as JSON"),
        ({"args": [{1: 2}]}, TypeError, "args travel as JSON"),
        ({"args": [float("nan")]}, TypeError, "args travel as JSON"),
    ],
)
def test_an_argument_that_vertex_ai_would_not_take_is_refused_here(trainer, options, error, words):
    with pytest.raises(error) as caught:
        make(trainer, **options)
    assert words in str(caught.value)
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "words", "requests"),
    [
        (400, ["the request was not understood", "correct what the answer names"], ["create"]),
        (401, ["the credential was not accepted", "application-default login"], ["create"]),
        (403, ["not permitted", "the role roles/aiplatform.user in demo"], ["create"]),
        (404, ["not found"], ["create"]),
        (500, ["the service failed"], ["create", "list"]),
    ],
)
def test_a_refusal_is_an_error_with_its_fix_and_is_not_repeated(
    trainer, transport, status, words, requests, monkeypatch
):
    cloud = Cloud(creating=[status] * 5)
    with serving(cloud, transport, monkeypatch) as connection, pytest.raises(CloudFailed) as caught:
        make(trainer, **connection).submit()
    assert cloud.names()[0] == "list"
    fact, found, fix = str(caught.value).splitlines()
    assert fact.startswith("job flowers-1: ")
    if (transport, status) != ("rest", 401):  # there the SDK renews the credential first, and this one cannot be
        assert f"Vertex AI answered {status}: " in found
        assert f"refused with {status}" in found
    assert fix.startswith("  fix:   ")
    assert [word for word in words if word not in str(caught.value)] == []
    assert (caught.value.status, cloud.names()[1:]) == (status, requests)
    assert pickle.loads(pickle.dumps(caught.value)).status == status


def test_without_quota_it_is_asked_again_and_the_error_names_the_page(trainer, transport, monkeypatch):
    cloud = Cloud(creating=[429] * 5)
    with (
        serving(cloud, transport, monkeypatch) as connection,
        pytest.raises(CloudFailed, match="no quota left(.|\n)*quotas"),
    ):
        make(trainer, **connection).submit()
    assert cloud.names().count("create") == 3
    cloud = Cloud(creating=[429, 429])
    with serving(cloud, transport, monkeypatch) as connection:
        assert make(trainer, **connection).submit().resource == RESOURCE


def test_a_service_that_says_it_is_not_available_is_asked_again_after_a_look_for_the_job(trainer, monkeypatch):
    cloud = Cloud(creating=[503])
    with serving(cloud, "rest", monkeypatch) as connection:
        assert make(trainer, **connection).submit().resource == RESOURCE
    assert cloud.names() == ["list", "create", "list", "create"]


@pytest.mark.parametrize("fate", [HANG, LOSE])
def test_without_an_answer_it_is_not_sent_twice_and_the_error_says_what_is_not_known(
    trainer, transport, fate, monkeypatch
):
    cloud = Cloud(creating=[fate])
    began = time.monotonic()
    with serving(cloud, transport, monkeypatch, request_timeout=3.0) as connection:
        sent = make(trainer, **connection)
        with pytest.raises(CloudFailed) as caught:
            sent.submit()
        assert time.monotonic() - began < 300
        fact, found, fix = str(caught.value).splitlines()
        assert fact.endswith("; whether it was created is not known")
        assert "no job is labelled tpukit-job=" in found
        assert "submit() again, which looks for flowers-1 first" in fix
        assert cloud.names() == ["list", "create", "list"]
        assert not caught.value.answered
        assert sent.submit().resource == RESOURCE  # as the fix says
        assert cloud.names() == ["list", "create", "list", "list", "create"]


def test_a_job_whose_answer_was_lost_is_found_by_its_label_and_not_made_again(trainer, transport, monkeypatch):
    cloud = Cloud(creating=[SILENT])
    with serving(cloud, transport, monkeypatch) as connection:
        sent = make(trainer, **connection).submit()
    assert (sent.resource, cloud.names()) == (RESOURCE, ["list", "create", "list"])
    assert sent.request["labels"]["tpukit-job"] in str(cloud.asked[2][1].filter)


@pytest.mark.parametrize("fate", [503, HANG, LOSE])
def test_where_the_jobs_cannot_be_listed_either_it_is_not_sent_again(trainer, transport, fate, monkeypatch):
    cloud = Cloud(creating=[503] * 3, listing=[None, *[fate] * 3])
    with (
        serving(cloud, transport, monkeypatch, request_timeout=2.0) as connection,
        pytest.raises(CloudFailed, match=r"is not known(.|\n)*cannot be listed either(.|\n)*submit\(\) again"),
    ):
        make(trainer, **connection).submit()
    assert cloud.names() == ["list", "create", "list", "list", "list"]


def test_submitting_twice_sends_once(trainer, transport, monkeypatch):
    cloud = Cloud()
    with serving(cloud, transport, monkeypatch) as connection:
        sent = make(trainer, **connection).submit()
        assert sent.submit() is sent
    assert cloud.names() == ["list", "create"]


def test_a_cell_run_again_finds_its_job_and_another_trainer_gets_another_name(trainer, transport, monkeypatch, capsys):
    cloud = Cloud()
    with serving(cloud, transport, monkeypatch) as connection:
        sent = make(trainer, args=[1], **connection).submit()
        again = make(trainer, args=[1], **connection).submit()
        assert (again.resource, again.state) == (sent.resource, "PENDING")
        assert "flowers-1 runs already, and is not sent again" in capsys.readouterr().out
        for name in ({"name": "flowers-1"}, {"name": None, "continues": "flowers-1"}):
            with pytest.raises(
                ValueError, match="a job flowers-1 is there, and runs, with another(.|\n)*fix: .*another name"
            ):
                make(trainer, args=[2], **name, **connection).submit()
        cloud.job.state = sdk.JobState.JOB_STATE_SUCCEEDED
        with pytest.raises(ValueError, match='a job flowers-1 is there, and is over(.|\n)*continues="flowers-1"'):
            make(trainer, args=[1], **connection).submit()
        assert cloud.names().count("create") == 1
        goes_on = make(trainer, args=[1], name=None, continues="flowers-1", **connection).submit()
    assert cloud.names().count("create") == 2
    assert goes_on.folder == sent.folder
    assert "TPUKIT_CONTINUE" in [one.name for one in cloud.job.job_spec.worker_pool_specs[0].container_spec.env]
    assert len(cloud.uploads) == 2, "the first trainer is as it was"
    assert cloud.uploads["runs/flowers-1/trainer.zip"] == sent.bundle.to_bytes()


def test_a_job_without_a_name_gets_one_of_its_own_and_nothing_is_looked_for(trainer, monkeypatch):
    cloud = Cloud()
    with serving(cloud, "rest", monkeypatch) as connection:
        names = {make(trainer, name=None, **connection).request["displayName"] for _ in range(3)}
        make(trainer, name=None, **connection).submit()
    assert len(names) == 3
    assert cloud.names() == ["create"]


def test_another_file_in_the_bucket_is_not_replaced(trainer, monkeypatch):
    cloud = Cloud(storing=[412])
    with serving(cloud, "rest", monkeypatch) as connection, pytest.raises(CloudFailed):
        make(trainer, **connection).submit()
    assert (cloud.uploads, cloud.names()) == ({}, ["list"])
    assert any("ifGenerationMatch=0" in path for path in cloud.paths)


@contextmanager
def a_door_that_shuts(opens):
    """Yield the port of a server that takes connections and closes them at the first byte; or of none."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]

        def shut():
            with suppress(OSError):
                while True:
                    with door.accept()[0] as visitor:
                        visitor.recv(1)

        if opens:
            threading.Thread(target=shut, daemon=True).start()
        else:
            door.close()
        yield port
        with suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("opens", [False, True])
def test_a_server_that_is_not_there_or_closes_the_connection_is_told(trainer, transport, opens, monkeypatch):
    cloud = Cloud()
    with serving(cloud, transport, monkeypatch, request_timeout=3.0) as connection, a_door_that_shuts(opens) as port:
        if transport == "rest":
            connection["endpoint"] = f"http://127.0.0.1:{port}"
        else:
            connection["transport"] = JobServiceGrpcTransport(channel=grpc.insecure_channel(f"127.0.0.1:{port}"))
        with pytest.raises(CloudFailed, match="whether it was created is not known") as caught:
            make(trainer, name=None, **connection).submit()
    assert "network and its proxy" in str(caught.value) or "status.cloud.google.com" in str(caught.value)


@pytest.mark.parametrize(
    ("storing", "words"),
    [([403], "roles/storage.objectAdmin in demo"), ([404], "gs://demo-bucket/runs/flowers-1/trainer.zip: not found")],
)
def test_a_bucket_that_refuses_ends_it_before_a_job_is_made(trainer, storing, words, monkeypatch):
    cloud = Cloud(storing=storing)
    with serving(cloud, "rest", monkeypatch) as connection, pytest.raises(CloudFailed) as caught:
        make(trainer, **connection).submit()
    assert words in str(caught.value)
    assert cloud.names() == ["list"]


@pytest.mark.parametrize("fate", [429, 503, LOSE, HANG])
def test_an_upload_that_may_be_repeated_is(trainer, fate, monkeypatch):
    cloud = Cloud(storing=[fate])
    with serving(cloud, "rest", monkeypatch, request_timeout=3.0) as connection:
        make(trainer, **connection).submit()
    assert list(cloud.uploads) == ["runs/flowers-1/trainer.zip"]


RUNNING = ["JOB_STATE_QUEUED", "JOB_STATE_PENDING", "JOB_STATE_RUNNING", "JOB_STATE_RUNNING"]


def watched(cloud, trainer, transport, monkeypatch, do=lambda sent: sent.watch(every=0.01), **connection):
    with serving(cloud, transport, monkeypatch, **connection) as reach:
        sent = make(trainer, **reach).submit()
        cloud.asked.clear()
        return do(sent)


def test_watching_says_every_state_once_with_time_and_cost(trainer, transport, monkeypatch, capsys):
    cloud = Cloud(states=[*RUNNING, "JOB_STATE_SUCCEEDED"])
    sent = watched(cloud, trainer, transport, monkeypatch)
    assert sent.state == "SUCCEEDED"
    assert capsys.readouterr().out.splitlines()[2:] == [
        "flowers-1: QUEUED",
        "flowers-1: PENDING",
        "flowers-1: RUNNING, 30 min, about $4.80",
        "flowers-1: SUCCEEDED, 30 min, about $4.80",
    ]


@pytest.mark.parametrize("state", ["FAILED", "EXPIRED"])
def test_a_job_that_fails_is_an_error_with_its_words_and_the_line_that_shows_its_log(
    trainer, transport, state, monkeypatch
):
    cloud = Cloud(states=[*RUNNING, f"JOB_STATE_{state}"])
    cloud.error = "The replica workerpool0-0 exited with a non-zero status of 1."
    with pytest.raises(CloudFailed) as caught:
        watched(cloud, trainer, transport, monkeypatch)
    assert str(caught.value).splitlines()[0] == f"job flowers-1 {state.lower()}"
    assert "exited with a non-zero status of 1" in str(caught.value)
    assert f"`gcloud ai custom-jobs stream-logs {RESOURCE}`" in str(caught.value)


@pytest.mark.parametrize("fate", [429, 500, 503, HANG, LOSE])
def test_answers_that_do_not_come_do_not_end_the_watching(trainer, transport, fate, monkeypatch, capsys):
    cloud = Cloud(states=["JOB_STATE_RUNNING", fate, fate, "JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED"])
    assert watched(cloud, trainer, transport, monkeypatch, request_timeout=2.0).state == "SUCCEEDED"
    assert "flowers-1: no answer" in capsys.readouterr().out


def test_watching_a_cloud_that_never_answers_ends(trainer, transport, monkeypatch):
    with pytest.raises(CloudFailed):
        watched(
            Cloud(states=[503]), trainer, transport, monkeypatch, do=lambda sent: sent.watch(every=0.05, patience=0.3)
        )


def test_watching_ends_at_once_where_nothing_will_change(trainer, transport, monkeypatch):
    cloud = Cloud(states=[403])
    with pytest.raises(CloudFailed, match="not permitted"):
        watched(cloud, trainer, transport, monkeypatch)
    assert cloud.names() == ["get"]


def test_an_interrupt_ends_the_watching_and_says_that_the_job_goes_on(trainer, monkeypatch, capsys):
    import signal

    cloud = Cloud(states=["JOB_STATE_RUNNING"])

    def interrupt(sent):
        main = threading.main_thread().ident
        threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            sent.watch(every=600)

    began = time.monotonic()
    watched(cloud, trainer, "rest", monkeypatch, do=interrupt)
    assert time.monotonic() - began < 500
    assert f"the job goes on; .cancel() ends it: {RESOURCE}" in capsys.readouterr().out
    assert "cancel" not in cloud.names()


def test_cancelling_asks_and_tells_the_state(trainer, transport, monkeypatch):
    cloud = Cloud(states=["JOB_STATE_RUNNING"])
    sent = watched(cloud, trainer, transport, monkeypatch, do=lambda sent: sent.cancel())
    assert (sent.state, cloud.names()) == ("CANCELLING", ["cancel", "get"])
    assert cloud.asked[0][1].name == RESOURCE


@pytest.mark.parametrize("fate", [429, 503, HANG, LOSE])
def test_a_cancellation_without_an_answer_is_asked_for_again(trainer, transport, fate, monkeypatch):
    cloud = Cloud(states=["JOB_STATE_RUNNING"], cancelling=[fate])
    sent = watched(cloud, trainer, transport, monkeypatch, do=lambda sent: sent.cancel(), request_timeout=2.0)
    assert (sent.state, cloud.names()) == ("CANCELLING", ["cancel", "cancel", "get"])


def test_cancelling_a_job_that_is_over_leaves_it_as_it_is(trainer, transport, monkeypatch):
    cloud = Cloud(states=["JOB_STATE_SUCCEEDED"])
    assert watched(cloud, trainer, transport, monkeypatch, do=lambda sent: sent.cancel()).state == "SUCCEEDED"


@pytest.mark.parametrize("do", ["watch", "cancel"])
def test_what_was_not_sent_can_be_neither_watched_nor_cancelled(trainer, do):
    with pytest.raises(CloudFailed, match=r"was not sent(.|\n)*fix:   .submit\(\)"):
        getattr(make(trainer, credentials=SimpleNamespace()), do)()


def test_without_the_extra_the_error_names_it(trainer, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "google.cloud.aiplatform_v1", None)
    monkeypatch.delattr("google.cloud.aiplatform_v1")
    with pytest.raises(ImportError, match="pip install 'google-cloud-aiplatform>=1.165,<3'"):
        make(trainer, credentials=AnonymousCredentials()).submit()


def test_no_credential_and_no_project_are_told(trainer, monkeypatch, tmp_path):
    for variable in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(CloudFailed, match="the project is not known"):
        make(trainer, project=None, credentials=AnonymousCredentials()).submit()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(CloudFailed, match="no credential"):
        make(trainer).submit()
