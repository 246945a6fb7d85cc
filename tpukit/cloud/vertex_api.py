"""Vertex AI's API for custom jobs: every request has a time-out, and only what is safe is asked twice."""

import json
import time
from collections.abc import Callable
from typing import TypeVar

from tpukit.cloud.answers import CloudFailed, Service
from tpukit.essentials.show import NotInstalled

_T = TypeVar("_T")
_ROLE = "roles/aiplatform.user"
LABEL = "tpukit-job"  # unique: finds a job whose answer was lost
DIGEST = "tpukit-digest"  # of everything that was sent: finds a running job that does the same


class VertexApi:
    """Custom jobs of one project and region, through Google's own SDK.

    Args:
        project: that pays.
        region: where they run.
        credentials: of google-auth.
        endpoint: of the API; None for the region's own.
        transport: "grpc", "rest", or a transport of the SDK's JobServiceClient.
        pauses: seconds before each repetition of a request that is safe to repeat.
        request_timeout: seconds for one answer.

    Raises:
        ImportError: the SDK is not installed.
    """

    def __init__(
        self,
        project: str,
        region: str,
        *,
        credentials=None,
        endpoint: str | None = None,
        transport="grpc",
        pauses: tuple[float, ...] = (1.0, 2.0, 4.0),
        request_timeout: float = 30.0,
    ):
        try:
            from google.cloud import aiplatform_v1
        except ImportError as error:
            raise NotInstalled(
                f"a Vertex AI job needs Google's SDK, which cannot be imported: {error}",
                found="no google-cloud-aiplatform, or one too old",
                fix="`pip install 'google-cloud-aiplatform>=1.165,<3'`",
            ) from error
        self._sdk, self._credentials = aiplatform_v1, credentials
        self._project, self._pauses, self._timeout = project, pauses, request_timeout
        self._parent = f"projects/{project}/locations/{region}"
        self._service = Service("Vertex AI", "aiplatform.googleapis.com", _ROLE, project)
        given = {"credentials": credentials} if isinstance(transport, str) else {}
        options = {"api_endpoint": endpoint or f"{region}-aiplatform.googleapis.com"}
        with self._service.asked("Vertex AI"):
            self._client = aiplatform_v1.JobServiceClient(transport=transport, client_options=options, **given)

    def create(self, request: dict, label: str):
        """Create a job and return it.

        A request is repeated where Vertex AI has answered that it did not do it (429, 503), never where no answer came:
        the job may be there all the same. So it is looked for by its label first, and taken if it is there.

        Raises:
            CloudFailed: it was not created; or it is not known, and the message says so.
        """
        job, pauses = self._sdk.CustomJob.from_json(json.dumps(request)), iter(self._pauses)
        once = {"retry": None, "timeout": self._timeout}
        while True:
            try:
                with self._service.asked(f"job {job.display_name}"):
                    return self._client.create_custom_job(parent=self._parent, custom_job=job, **once)
            except CloudFailed as error:
                if not error.may_pass:
                    raise
                # After a 429 there is nothing to look for: it was refused before anything was done.
                if error.status != 429 and (there := self._look_for(label, job.display_name, error)):
                    return there
                pause = next(pauses, None)
                if pause is None or not error.answered or error.status not in (429, 503):
                    raise
                time.sleep(pause)

    def find(self, label: str):
        """Return the job with that label; None where there is none."""
        found = self._list(f'labels.{LABEL}="{label}"')
        return next((job for job in found if job.labels.get(LABEL) == label), None)

    def named(self, name: str) -> list:
        """Return the jobs that show this name."""
        return [job for job in self._list(f'display_name="{name}"') if job.display_name == name]

    def _list(self, which: str) -> list:
        request = {"parent": self._parent, "filter": which}

        def ask() -> list:
            return list(self._client.list_custom_jobs(request=request, retry=None, timeout=self._timeout))

        return self._repeat("the list of jobs", ask)

    def get(self, resource: str):
        """Return a job as it is now."""
        with self._service.asked(f"job {resource}"):
            return self._client.get_custom_job(name=resource, retry=None, timeout=self._timeout)

    def cancel(self, resource: str) -> None:
        """Cancel a job; for one that is over, Vertex AI answers 400."""
        once = {"retry": None, "timeout": self._timeout}
        self._repeat(f"the end of job {resource}", lambda: self._client.cancel_custom_job(name=resource, **once))

    def _repeat(self, what: str, ask: Callable[[], _T]) -> _T:
        """Ask again, after a pause, what changes nothing when it is asked twice."""
        pauses = iter(self._pauses)
        while True:
            try:
                with self._service.asked(what):
                    return ask()
            except CloudFailed as error:
                pause = next(pauses, None)
                if pause is None or not error.may_pass:
                    raise
                time.sleep(pause)

    def _look_for(self, label: str, name: str, error: CloudFailed):
        """Return the job that was created all the same, None where Vertex AI says it was not; raise if unknown."""
        seen = f"no job is labelled {LABEL}={label} by now"
        try:
            there = self.find(label)
        except CloudFailed:
            there, seen = None, "the jobs cannot be listed either"
        if there is None and not (error.answered and seen.startswith("no job")):
            raise CloudFailed(
                f"{error.fact}; whether it was created is not known",
                found=f"{error.found}; {seen}",
                fix=f"submit() again, which looks for {name} first; {error.fix}",
                status=error.status,
                may_pass=True,
                answered=False,
            ) from error
        return there
