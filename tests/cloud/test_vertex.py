"""A custom job of Vertex AI: Google's own SDK sends real requests, over REST and gRPC, to a server on this machine."""

import json
import pickle
import re
import socket
import threading
import time
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from cloud.test_options import RESERVATION, plan
from helpers.loopback import HANG, LOSE, loopback, refusal

from tpukit.cloud.answers import CloudError
from tpukit.cloud.target import JobOptions
from tpukit.cloud.vertex import VertexTarget

sdk = pytest.importorskip(
    "google.cloud.aiplatform_v1",
    reason="a Vertex AI job needs Google's SDK: pip install google-cloud-aiplatform",
)
import grpc  # noqa: E402
from google.auth.credentials import AnonymousCredentials  # noqa: E402
from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceGrpcTransport  # noqa: E402

PARENT = "projects/demo/locations/us-central1"
RESOURCE = f"{PARENT}/customJobs/77"
HANDLE = {"project": "demo", "region": "us-central1", "resource": RESOURCE}
PLAN = plan("vertex", options=JobOptions(project="demo"))
CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
}
CODES |= {429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}
SILENT = "created, and no answer"  # the job is there, its answer is lost


class Cloud:
    """A Vertex AI that holds one job at most.

    Attributes:
        creating: what comes of each request to create: a status that refuses, HANG, LOSE, SILENT, or OK at the end.
        states: the job's states, one a request for it, the last for ever; a status refuses.
        asked: the requests by name, in order, each with its message.
        listing, cancelling: what comes of these requests first.
    """

    def __init__(self, creating=(), states=("JOB_STATE_PENDING",), listing=(), cancelling=()):
        self.creating, self.states = list(creating), list(states)
        self.listing, self.cancelling = list(listing), list(cancelling)
        self.asked, self.job, self.error, self.age = [], None, "", 0

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
        self.job.create_time = {"seconds": int(time.time()) - self.age}
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
        path = request.path.partition("?")[0]
        assert path.startswith(f"/v1/{PARENT}/customJobs"), path
        if request.method == "POST" and path.endswith(":cancel"):
            given = self.cancel(sdk.CancelCustomJobRequest(name=RESOURCE))
        elif request.method == "POST":
            made = sdk.CustomJob.from_json(request.body)
            given = self.create(
                sdk.CreateCustomJobRequest(parent=path[4:].rpartition("/")[0], custom_job=made)
            )
        elif path.endswith("customJobs"):
            given = self.list(
                sdk.ListCustomJobsRequest(filter=re.search("filter=([^&]*)", request.path)[1])
            )
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
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, dict(handlers))]
        )
        return server, server.add_insecure_port("127.0.0.1:0")


@contextmanager
def serving(cloud, transport, **connection):
    """Yield a target that reaches this cloud."""
    connection = {
        "credentials": AnonymousCredentials(),
        "pauses": (0.01, 0.01),
        "request_timeout": 5.0,
    } | connection
    with loopback(cloud.rest) as api:
        if transport == "rest":
            yield VertexTarget(transport="rest", endpoint=api.address, **connection)
            return
        server, port = cloud.over_grpc()
        server.start()
        try:
            channel = grpc.insecure_channel(f"127.0.0.1:{port}")
            yield VertexTarget(transport=JobServiceGrpcTransport(channel=channel), **connection)
            channel.close()
        finally:
            cloud.done.set()
            server.stop(0).wait()


@pytest.fixture(params=["rest", "grpc"])
def transport(request):
    return request.param


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


def test_the_request_arrives_field_by_field(transport):
    cloud = Cloud()
    account = "trainer@demo.iam.gserviceaccount.com"
    options = JobOptions(project="demo", service_account=account, spot=True)
    with serving(cloud, transport) as target:
        assert target.start(replace(PLAN, options=options, timeout=6 * 3600.0)) == HANDLE
    assert cloud.names() == ["list", "create"]  # it may be there already
    request = cloud.asked[-1][1]
    assert request.parent == PARENT
    made = request.custom_job
    assert (made.display_name, made.labels["tpukit-digest"]) == ("train-1", "ab" * 16)
    spec = made.job_spec
    (pool,) = spec.worker_pool_specs
    assert (pool.machine_spec.machine_type, pool.machine_spec.tpu_topology) == (
        "ct5lp-hightpu-8t",
        "2x4",
    )
    assert (pool.machine_spec.accelerator_type, pool.machine_spec.accelerator_count) == (0, 0)
    assert pool.replica_count == 1
    assert pool.container_spec.image_uri == "python:3.12"
    assert list(pool.container_spec.command) == ["bash", "/gcs/demo-bucket/jobs/train-1/run.sh"]
    assert list(pool.container_spec.env) == list(pool.container_spec.args) == []
    assert spec.scheduling.timeout.total_seconds() == 6 * 3600 + 600
    assert spec.scheduling.strategy == sdk.Scheduling.Strategy.SPOT
    assert not spec.scheduling.disable_retries
    assert spec.service_account == account
    assert spec.base_output_directory.output_uri_prefix == "gs://demo-bucket/jobs/train-1"


def test_region_project_reservation_and_machine_are_those_of_the_plan():
    cloud = Cloud()
    options = JobOptions(project="demo", reservation=RESERVATION)
    with serving(cloud, "rest") as target:
        target.start(replace(PLAN, options=options))
    machine = cloud.asked[-1][1].custom_job.job_spec.worker_pool_specs[0].machine_spec
    assert list(machine.reservation_affinity.values) == [RESERVATION]
    for place in ({"region": "us-west4"}, {"project": "other"}):
        with (
            serving(cloud, "rest") as target,
            pytest.raises(CloudError),
        ):  # the double serves one place only
            target.start(replace(PLAN, options=replace(options, **place)))


@pytest.mark.parametrize(
    ("status", "words", "requests"),
    [
        (400, ["the request is not valid", "correct the value that the answer names"], ["create"]),
        (401, ["the credential was not accepted", "application-default login"], ["create"]),
        (403, ["not permitted", "the role roles/aiplatform.user in demo"], ["create"]),
        (404, ["not found"], ["create"]),
        (429, ["no quota left", "iam-admin/quotas"], ["create", "list"] * 3),
        (500, ["the service failed"], ["create", "list"]),
    ],
)
def test_a_refusal_is_an_error_with_its_fix_and_only_quota_is_asked_for_again(
    transport, status, words, requests
):
    cloud = Cloud(creating=[status] * 5)
    with serving(cloud, transport) as target, pytest.raises(CloudError) as caught:
        target.start(PLAN)
    fact, found, fix = str(caught.value).splitlines()
    assert fact.startswith("job train-1: ")
    if (transport, status) != (
        "rest",
        401,
    ):  # there the SDK renews the credential first, and this one cannot be
        assert f"Vertex AI answered {status}: " in found
    assert fix.startswith("  fix:   ")
    assert [word for word in words if word not in str(caught.value)] == []
    assert (caught.value.status, cloud.names()) == (status, ["list", *requests])
    assert pickle.loads(pickle.dumps(caught.value)).status == status


def test_a_service_that_is_not_available_is_asked_again_after_a_look_for_the_job():
    cloud = Cloud(creating=[503])
    with serving(cloud, "rest") as target:
        assert target.start(PLAN) == HANDLE
    assert cloud.names() == ["list", "create", "list", "create"]


@pytest.mark.parametrize("fate", [HANG, LOSE])
def test_without_an_answer_it_is_not_sent_twice_and_the_error_names_the_doubt(transport, fate):
    cloud = Cloud(creating=[fate])
    with serving(cloud, transport, request_timeout=3.0) as target:
        with pytest.raises(
            CloudError, match="; it is not known whether Vertex AI created the job\n"
        ) as caught:
            target.start(PLAN)
        assert "the list of jobs does not have it" in caught.value.found
        assert 'find("train-1", "gs://demo-bucket/jobs").start()' in caught.value.fix
        assert cloud.names() == ["list", "create", "list"]
        assert not caught.value.answered
        assert target.start(PLAN) == HANDLE  # as the fix says


def test_a_job_whose_answer_was_lost_is_found_by_its_digest_and_not_made_again(transport):
    cloud = Cloud(creating=[SILENT])
    with serving(cloud, transport) as target:
        assert target.start(PLAN) == HANDLE
    assert cloud.names() == ["list", "create", "list"]


@pytest.mark.parametrize("fate", [503, HANG, LOSE])
def test_where_the_jobs_cannot_be_listed_either_it_is_not_sent_again(transport, fate):
    cloud = Cloud(creating=[503] * 3, listing=[None, fate])
    unknown = pytest.raises(CloudError, match=r"is not known(.|\n)*cannot be listed either")
    with serving(cloud, transport, request_timeout=2.0) as target, unknown:
        target.start(PLAN)
    assert cloud.names() == ["list", "create", "list"]


def test_a_job_that_runs_is_taken_and_one_that_is_over_or_another_is_not():
    cloud = Cloud()
    with serving(cloud, "rest") as target:
        target.start(PLAN)
        assert target.start(PLAN) == HANDLE
        assert cloud.names().count("create") == 1
        target.start(replace(PLAN, digest="cd" * 32))
        assert cloud.names().count("create") == 2
        cloud.job.state = sdk.JobState.JOB_STATE_FAILED
        target.start(replace(PLAN, digest="cd" * 32))
    assert cloud.names().count("create") == 3


@pytest.mark.parametrize("opens", [False, True])
def test_a_server_that_is_not_there_or_closes_the_connection_is_an_error_with_a_fix(opens):
    with a_door_that_shuts(opens) as port:
        address = f"http://127.0.0.1:{port}"
        credentials = AnonymousCredentials()
        target = VertexTarget(
            transport="rest", endpoint=address, credentials=credentials, pauses=(0.01,)
        )
        with pytest.raises(CloudError, match="no answer: (.|\n)*the network and its proxy"):
            target.start(PLAN)


STATES = {
    "QUEUED": "queued",
    "PENDING": "queued",
    "RUNNING": "running",
    "CANCELLING": "running",
    "PAUSED": "running",
    "UPDATING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "EXPIRED": "failed",  # the SDK's own wait never ends here
    "PARTIALLY_SUCCEEDED": "failed",  # nor here
}


def test_every_state_of_vertex_ai_has_a_word(transport):
    known = {one.name.removeprefix("JOB_STATE_") for one in sdk.JobState}
    assert STATES.keys() == known - {"UNSPECIFIED"}
    for state, word in STATES.items():
        cloud = Cloud(states=[f"JOB_STATE_{state}"])
        cloud.error = "Internal error occurred" if state == "FAILED" else ""
        with serving(cloud, transport) as target:
            seen = target.state(target.start(PLAN))
        assert (seen.word, seen.reason.partition(":")[0]) == (word, state)
        assert ("Internal error occurred" in seen.reason) == (state == "FAILED")


@pytest.mark.parametrize(("age", "is_hinted"), [(60, False), (1200, True)])
def test_a_job_that_stays_in_the_queue_mentions_the_quota(age, is_hinted):
    cloud = Cloud(states=["JOB_STATE_QUEUED"])
    cloud.age = age
    with serving(cloud, "rest") as target:
        reason = target.state(target.start(PLAN)).reason
    assert ("QUEUED for 20 min" in reason) == is_hinted
    assert (
        "quota for its TPUs in us-central1: https://console.cloud.google.com/" in reason
    ) == is_hinted


def test_a_job_is_cancelled_and_one_that_is_over_stays_as_it_is(transport):
    cloud = Cloud()
    with serving(cloud, transport) as target:
        target.start(PLAN)
        target.cancel(HANDLE)
        assert target.state(HANDLE).reason == "CANCELLING"
        cloud.states = ["JOB_STATE_SUCCEEDED"]
        target.cancel(HANDLE)
        cloud.states, cloud.cancelling = ["JOB_STATE_RUNNING"], [400, 403]
        for _ in range(2):
            with pytest.raises(CloudError):
                target.cancel(HANDLE)


def test_a_deleted_job_is_gone_and_the_log_is_a_command():
    with loopback(lambda request: refusal(404, "no such job")) as api:
        target = VertexTarget(
            transport="rest", endpoint=api.address, credentials=AnonymousCredentials()
        )
        assert target.state(HANDLE).word == "gone"
        target.cancel(HANDLE)
        assert target.logs(HANDLE).startswith(
            f"gcloud ai custom-jobs stream-logs {RESOURCE} --region=us-central1"
        )
