"""Jobs as custom jobs of Vertex AI: a container on one TPU host, with the bucket mounted at /gcs.

    gs://my-bucket/jobs/train-1/run.sh     the file in the bucket
    /gcs/my-bucket/jobs/train-1/run.sh     the same file in the container; `bash` starts it

Vertex AI starts the container again after a failure or a preemption. run.sh then finds result.json and ends, or the
runner resumes from the files in the bucket.
"""

import os
import time
import uuid
from collections.abc import Mapping

from tpukit.cloud.answers import CloudFailed, find_credentials
from tpukit.cloud.container import image_of
from tpukit.cloud.options import BACKSTOP_SECONDS
from tpukit.cloud.slices import MACHINE_SPECS
from tpukit.cloud.target import JobPlan, PlatformState, Word
from tpukit.cloud.vertex_api import DIGEST, LABEL, VertexApi

DEFAULT_REGION = "us-central1"
_QUOTAS = "https://console.cloud.google.com/iam-admin/quotas"
_SECONDS_UNTIL_HINT = 300  # in the queue, before the state mentions the quota

# All states that Vertex AI reports. Google's own SDK does not end its wait at the last two.
_WORDS: dict[str, Word] = {
    "UNSPECIFIED": "queued",
    "QUEUED": "queued",
    "PENDING": "queued",
    "RUNNING": "running",
    "CANCELLING": "running",
    "PAUSED": "running",
    "UPDATING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "EXPIRED": "failed",
    "PARTIALLY_SUCCEEDED": "failed",
}


class VertexTarget:
    """Custom jobs of Vertex AI, through Google's own SDK.

    Args:
        environ: of this process; GOOGLE_CLOUD_PROJECT is the default project.
        **connection: `credentials`, `endpoint`, `transport`, `pauses`, `request_timeout`; see `VertexApi`.
    """

    name = "vertex"

    def __init__(self, environ: Mapping[str, str] = os.environ, **connection: object):
        self._environ = environ
        self._connection = connection

    def start(self, plan: JobPlan) -> dict:
        """Create the custom job, or return the one that runs for this folder and digest."""
        region = plan.options.region or DEFAULT_REGION
        api, project = self._connect(plan.options.project, region)
        there = _running(api, plan)
        if there is None:
            label = uuid.uuid4().hex[:12]
            there = api.create(custom_job(plan, label), label)
        return {"project": project, "region": region, "resource": there.name}

    def state(self, handle: dict) -> PlatformState:
        """Return the state of the custom job, with Vertex AI's reason."""
        try:
            job = self._api(handle).get(handle["resource"])
        except CloudFailed as error:
            if error.status != 404:
                raise
            return PlatformState("gone", "Vertex AI has deleted the job")
        state = _state_of(job)
        return PlatformState(_WORDS[state], _reason(job, state, handle))

    def logs(self, handle: dict) -> str:
        """Return the command that shows the platform's log."""
        words = f"gcloud ai custom-jobs stream-logs {handle['resource']}"
        return f"{words} --region={handle['region']} --project={handle['project']}"

    def cancel(self, handle: dict) -> None:
        """Ask Vertex AI to end the job; the container gets SIGTERM."""
        try:
            self._api(handle).cancel(handle["resource"])
        except CloudFailed as error:
            if error.status == 404:
                return
            # Vertex AI answers 400 for a job that is over.
            if error.status != 400 or self.state(handle).word in ("queued", "running"):
                raise

    def clean_up(self, handle: dict) -> None:
        """Do nothing: Vertex AI deletes the machine when the container ends."""

    def _api(self, handle: dict) -> VertexApi:
        return self._connect(handle["project"], handle["region"])[0]

    def _connect(self, project: str | None, region: str) -> tuple[VertexApi, str]:
        options = dict(self._connection)
        given = options.pop("credentials", None)
        credentials, project = find_credentials(given, project, self._environ)
        return VertexApi(project, region, credentials=credentials, **options), project


def custom_job(plan: JobPlan, label: str) -> dict:
    """Return the request for a custom job, as the API writes it."""
    options = plan.options
    machine = dict(MACHINE_SPECS[plan.tpu.name])
    if options.reservation:
        machine["reservationAffinity"] = {
            "reservationAffinityType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [options.reservation],
        }
    mounted = plan.folder.replace("gs://", "/gcs/", 1)
    scheduling = {
        "timeout": f"{plan.timeout + BACKSTOP_SECONDS:.0f}s",
        # After a preemption the container starts again. A job that is over ends in a second.
        "disableRetries": False,
    }
    if options.spot:
        scheduling["strategy"] = "SPOT"
    pool = {
        "machineSpec": machine,
        "replicaCount": 1,
        "containerSpec": {"imageUri": image_of(plan), "command": plan.command(mounted)},
    }
    spec = {
        "workerPoolSpecs": [pool],
        "scheduling": scheduling,
        "baseOutputDirectory": {"outputUriPrefix": plan.folder},
    }
    if options.service_account:
        spec["serviceAccount"] = options.service_account
    return {
        "displayName": plan.name,
        "jobSpec": spec,
        "labels": {LABEL: label, DIGEST: plan.digest[:32]},
    }


def _running(api: VertexApi, plan: JobPlan):
    """Return the job of the same folder and digest that is not over; None if there is none."""
    for job in api.named(plan.name):
        is_same_folder = job.job_spec.base_output_directory.output_uri_prefix == plan.folder
        is_same_work = job.labels.get(DIGEST) == plan.digest[:32]
        is_over = _WORDS[_state_of(job)] not in ("queued", "running")
        if is_same_folder and is_same_work and not is_over:
            return job
    return None


def _state_of(job) -> str:
    state = job.state.name.removeprefix("JOB_STATE_")
    return state if state in _WORDS else "UNSPECIFIED"


def _reason(job, state: str, handle: dict) -> str:
    message = " ".join(job.error.message.split())
    reason = f"{state}: {message}" if message else state
    if state != "QUEUED" or not job.create_time:
        return reason
    waited = time.time() - job.create_time.timestamp()
    if waited < _SECONDS_UNTIL_HINT:
        return reason
    quotas = f"{_QUOTAS}?project={handle['project']}"
    missing = f"Vertex AI keeps a job queued until there is quota for its TPUs in {handle['region']}"
    return f"{reason} for {waited / 60:.0f} min; {missing}: {quotas}"
