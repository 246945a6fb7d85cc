"""What Google Cloud answers when it does not do what was asked: each answer with its fix, and which may be repeated."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tpukit.essentials.show import Explained

SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_LOGIN = (
    "`gcloud auth application-default login`; on a machine without a browser, GOOGLE_APPLICATION_CREDENTIALS=key.json"
)


class CloudFailed(Explained, RuntimeError):
    """Google Cloud did not do what was asked.

    Attributes:
        status: the HTTP status of its answer; None without an answer.
        may_pass: whether the same request may succeed later.
        answered: whether the service itself has answered; if not, it may have done what was asked.
    """

    status: int | None = None
    may_pass = False
    answered = True


@dataclass(frozen=True)
class Service:
    """An API of the cloud, as errors name it.

    Attributes:
        name: in words.
        api: as `gcloud services enable` takes it.
        role: that allows what is asked of it.
        project: that pays.
        fixes: what to do, by HTTP status, where this API has something of its own to say.
    """

    name: str
    api: str
    role: str
    project: str
    fixes: Mapping[int, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """Turn what the libraries below raise while asking into `CloudFailed`."""
        try:
            yield
        except Exception as error:  # of googleapiclient, google's own, requests, sockets: no common base
            failed = self.explain(what, error)
            if failed is None:
                raise
            raise failed from error

    def explain(self, what: str, error: BaseException) -> CloudFailed | None:
        """Return the error that tells of another; None for one that is no answer of the cloud."""
        status, said = _status(error), _words(error)
        if status is None and not _is_of_the_network(error):
            return None
        if status is None and _is_a_credential(error):
            return CloudFailed(f"{what}: the credential was not accepted", found=said, fix=_LOGIN, status=401)
        answered = f"{self.name} answered {status}" if status else "no answer"
        text = f"{what}: {_MEANINGS.get(status, _MEANINGS[None] if status is None else 'the request failed')}"
        return CloudFailed(
            text,
            found=f"{answered}: {said}",
            fix=self._fix(status, said),
            status=status,
            may_pass=status in (None, 429) or status >= 500,
            answered=status is not None and not (status in (503, 504) and _is_of_grpc(error)),
        )

    def _fix(self, status: int | None, said: str) -> str:
        if status == 403 and re.search("SERVICE_DISABLED|has not been used|is disabled", said):
            return f"`gcloud services enable {self.api} --project {self.project}`, and wait some minutes"
        if status in self.fixes:
            return self.fixes[status]
        return {
            None: "look at the network and its proxy, then try again",
            400: "correct what the answer names",
            401: _LOGIN,
            403: f"give this account the role {self.role} in {self.project}, or name another project",
            404: f"look whether it is in project {self.project}",
            409: "choose another name",
            429: "wait, take another region, or ask for more: https://console.cloud.google.com/iam-admin/quotas",
        }.get(status, "try again in some minutes; https://status.cloud.google.com tells of outages")


_MEANINGS = {
    None: "the cloud did not answer",
    400: "the request was not understood",
    401: "the credential was not accepted",
    403: "not permitted",
    404: "not found",
    409: "there is one of that name already",
    429: "too many requests, or no quota left",
    500: "the service failed",
    503: "the service is not available",
    504: "the service did not answer in time",
}


def find_credentials(given, project: str | None, environ: Mapping[str, str]) -> tuple[object, str]:
    """Return the credentials of this machine, or those given, and the project.

    Raises:
        CloudFailed: there is no credential, or no project.
    """
    import google.auth
    from google.auth.exceptions import GoogleAuthError

    project = project or environ.get("GOOGLE_CLOUD_PROJECT") or environ.get("CLOUDSDK_CORE_PROJECT")
    if given is None:
        try:
            given, of_the_credential = google.auth.default(scopes=SCOPES)
        except GoogleAuthError as error:
            found = " ".join(str(error).split())
            fact = "this machine has no credential for Google Cloud"
            raise CloudFailed(fact, found=found, fix=_LOGIN, status=401) from error
        project = project or of_the_credential
    if not project:
        raise CloudFailed(
            "the project is not known",
            found="no project=, no GOOGLE_CLOUD_PROJECT, none in the credential",
            fix='project="my-project"; `gcloud projects list` shows yours',
        )
    return given, project


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an answer: googleapiclient keeps it in `resp`, google.api_core in `code`."""
    status = getattr(getattr(error, "resp", None), "status", None) or getattr(error, "code", None)
    return int(status) if isinstance(status, int) else None


def _is_of_grpc(error: BaseException) -> bool:
    """Say whether gRPC made it: where no answer comes, it says UNAVAILABLE or DEADLINE_EXCEEDED as a service would."""
    return callable(getattr(getattr(error, "response", None), "code", None))


def _words(error: BaseException) -> str:
    """Return what was said, in one line of at most 300 characters."""
    said = getattr(error, "reason", None) or getattr(error, "message", None) or str(error) or type(error).__name__
    line = re.sub("^(GET|POST|PUT) [^ ]+: ", "", " ".join(str(said).split()))
    details = str(getattr(error, "error_details", ""))
    line += " (SERVICE_DISABLED)" if "SERVICE_DISABLED" in details and "SERVICE_DISABLED" not in line else ""
    return line if len(line) <= 300 else line[:299] + "…"


def _is_of_the_network(error: BaseException) -> bool:
    """Say whether the request or its credential was lost on the way; requests' and httplib2's errors are no OSError."""
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(modules & {"requests", "httplib2", "http"}) or _is_a_credential(error)


def _is_a_credential(error: BaseException) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "google.auth.exceptions"}
    return bool(kinds) and "TransportError" not in kinds
