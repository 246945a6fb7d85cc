"""Run jobs as custom jobs of Vertex AI: a container on one TPU host, with the bucket at /gcs.

    gs://my-bucket/jobs/train-1/run.sh     the file in the bucket
    /gcs/my-bucket/jobs/train-1/run.sh     the same file in the container; `bash` starts it

Vertex AI starts the container again after a failure or a preemption. If result.json exists, run.sh
ends at once. Otherwise the runner resumes from the files in the bucket.
"""

import json
import os
import time

from tpukit.cloud.answers import CloudError, Service, find_credentials
from tpukit.cloud.machines import MACHINE_SPECS, image_of
from tpukit.cloud.target import JobPlan, PlatformState, Word
from tpukit.essentials.display import NotInstalledError

DEFAULT_REGION = "us-central1"
# The name of the label with the digest of everything that was sent. A job is found again by it if
# the answer to its creation was lost.
_DIGEST = "tpukit-digest"
_QUOTAS = "https://console.cloud.google.com/iam-admin/quotas"
_SECONDS_UNTIL_HINT = 300  # after this time in the queue, the reason mentions quotas

# All states of Vertex AI. Google's SDK does not treat the last two as the end of a job.
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
    """Custom jobs of Vertex AI, through Google's SDK.

    Args:
        credentials: the credentials of google-auth; None for those of this machine.
        endpoint: the endpoint of the API; None for the endpoint of the region.
        transport: "grpc", "rest", or a transport of the SDK's JobServiceClient.
        pauses: the seconds before each repetition of a create request that failed temporarily.
        request_timeout: the timeout of a request in seconds.
    """

    name = "vertex"

    def __init__(
        self,
        *,
        credentials=None,
        endpoint: str | None = None,
        transport="grpc",
        pauses: tuple[float, ...] = (1.0, 2.0, 4.0),
        request_timeout: float = 30.0,
    ):
        self._credentials = credentials
        self._endpoint = endpoint
        self._transport = transport
        self._pauses = pauses
        self._timeout = request_timeout

    def start(self, plan: JobPlan) -> dict:
        region = plan.options.region or DEFAULT_REGION
        api = self._connect(plan.options.project, region)
        job = api.running(plan) or self._create(api, plan)
        return {"project": api.project, "region": region, "resource": job.name}

    def state(self, handle: dict) -> PlatformState:
        try:
            job = self._of(handle).get(handle["resource"])
        except CloudError as error:
            if error.status != 404:
                raise
            return PlatformState("gone", "Vertex AI has deleted the job")
        state = _state_of(job)
        return PlatformState(_WORDS[state], _reason(job, state, handle))

    def logs(self, handle: dict) -> str:
        """Return the command that shows the logs of the machine."""
        words = f"gcloud ai custom-jobs stream-logs {handle['resource']}"
        return f"{words} --region={handle['region']} --project={handle['project']}"

    def cancel(self, handle: dict) -> None:
        """Ask Vertex AI to end the job; the container gets SIGTERM."""
        try:
            self._of(handle).cancel(handle["resource"])
        except CloudError as error:
            if error.status == 404:
                return
            # Vertex AI answers with status 400 if the job is over, which is no error here.
            if error.status != 400 or self.state(handle).word in ("queued", "running"):
                raise

    def clean_up(self, handle: dict) -> None:
        """Do nothing: Vertex AI deletes the machine when the container ends."""

    def _create(self, api: "_CustomJobs", plan: JobPlan):
        """Create the custom job; after an error, look for it, because it may exist all the same.

        Raises:
            CloudError: the job was not created, or it is unknown whether it was.
        """
        pauses = iter(self._pauses)
        while True:
            try:
                return api.create(plan)
            except CloudError as error:
                if not error.may_pass:
                    raise
                job = _look_again(api, plan, error)
                if job is not None:
                    return job
                pause = next(pauses, None)
                # Vertex AI has answered: without an answer, `_look_again` returns a job or raises.
                is_refused_for_now = error.status in (429, 503)
                if pause is None or not is_refused_for_now:
                    raise
                time.sleep(pause)

    def _of(self, handle: dict) -> "_CustomJobs":
        return self._connect(handle["project"], handle["region"])

    def _connect(self, project: str | None, region: str) -> "_CustomJobs":
        credentials, project = find_credentials(self._credentials, project, os.environ)
        options = {"api_endpoint": self._endpoint or f"{region}-aiplatform.googleapis.com"}
        given = {"transport": self._transport, "client_options": options}
        if isinstance(self._transport, str):
            given["credentials"] = credentials
        return _CustomJobs(project, region, timeout=self._timeout, **given)


class _CustomJobs:
    """The custom jobs of a project and region; each request is sent once, with a timeout.

    Args:
        project: the Google Cloud project.
        region: the region of the jobs.
        timeout: the timeout of a request in seconds.
        **client: the arguments of the SDK's JobServiceClient.
    """

    def __init__(self, project: str, region: str, *, timeout: float, **client: object):
        try:
            from google.cloud import aiplatform_v1
        except ImportError as error:
            raise NotInstalledError(
                f"a Vertex AI job needs Google's SDK, which cannot be imported: {error}",
                found="no google-cloud-aiplatform, or one too old",
                fix="`pip install 'google-cloud-aiplatform>=1.165,<3'`",
            ) from error
        self.project = project
        self._parent = f"projects/{project}/locations/{region}"
        # The client would repeat requests by itself. Here only `VertexTarget._create` does.
        self._once = {"retry": None, "timeout": timeout}
        self._new_job = aiplatform_v1.CustomJob.from_json
        role = "roles/aiplatform.user"
        self._service = Service("Vertex AI", "aiplatform.googleapis.com", role, project)
        with self._service.asked("Vertex AI"):
            self._client = aiplatform_v1.JobServiceClient(**client)

    def create(self, plan: JobPlan):
        job = self._new_job(json.dumps(custom_job(plan)))
        with self._service.asked(f"job {plan.name}"):
            return self._client.create_custom_job(parent=self._parent, custom_job=job, **self._once)

    def running(self, plan: JobPlan):
        """Return the job with the same folder and digest that has not ended; None without one."""
        request = {"parent": self._parent, "filter": f'display_name="{plan.name}"'}
        with self._service.asked("the list of jobs"):
            found = list(self._client.list_custom_jobs(request=request, **self._once))
        for job in found:
            is_same_folder = job.job_spec.base_output_directory.output_uri_prefix == plan.folder
            is_same_work = job.labels.get(_DIGEST) == plan.digest[:32]
            is_over = _WORDS[_state_of(job)] not in ("queued", "running")
            if is_same_folder and is_same_work and not is_over:
                return job
        return None

    def get(self, resource: str):
        with self._service.asked(f"job {resource}"):
            return self._client.get_custom_job(name=resource, **self._once)

    def cancel(self, resource: str) -> None:
        with self._service.asked(f"the end of job {resource}"):
            self._client.cancel_custom_job(name=resource, **self._once)


def _look_again(api: _CustomJobs, plan: JobPlan, error: CloudError):
    """Return the job that a failed request has created all the same; None if there is none.

    Args:
        api: the jobs of the project and region.
        plan: the plan of the job.
        error: the error of the request.

    Raises:
        CloudError: it is unknown whether the job was created.
    """
    seen = "the list of jobs does not have it by now"
    # The request may have reached Vertex AI although its answer did not arrive. A second request
    # would then start a second job, which costs money.
    is_known = error.answered
    try:
        job = api.running(plan)
    except CloudError:
        job = None
        seen = "the jobs cannot be listed either"
        is_known = False
    if job is None and not is_known:
        bucket = plan.folder.rpartition("/")[0]
        raise CloudError(
            f"{error.fact}; it is not known whether Vertex AI created the job",
            found=f"{error.found}; {seen}",
            fix=f"{error.fix}; then start the job (if it exists, no second job is created): "
            f'find("{plan.name}", "{bucket}").start()',
            status=error.status,
            may_pass=True,
            answered=False,
        ) from error
    return job


def custom_job(plan: JobPlan) -> dict:
    """Return the JSON body of the API's request for a custom job."""
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
        "timeout": f"{plan.platform_timeout}s",
        # Retries, so that the container starts again after a preemption. If the job is over, the
        # container ends in a second.
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
    labels = {_DIGEST: plan.digest[:32]}
    return {"displayName": plan.name, "jobSpec": spec, "labels": labels}


def _state_of(job) -> str:
    state = job.state.name.removeprefix("JOB_STATE_")
    return state if state in _WORDS else "UNSPECIFIED"


def _reason(job, state: str, handle: dict) -> str:
    message = " ".join(job.error.message.split())
    reason = f"{state}: {message}" if message else state
    if state != "QUEUED" or not job.create_time:
        return reason
    waited = time.time() - job.create_time.timestamp()
    if waited < _SECONDS_UNTIL_HINT:  # a short wait is normal
        return reason
    quotas = f"{_QUOTAS}?project={handle['project']}"
    region = handle["region"]
    missing = f"Vertex AI keeps a job queued until there is quota for its TPUs in {region}"
    return f"{reason} for {waited / 60:.0f} min; {missing}: {quotas}"
