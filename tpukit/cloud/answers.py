"""What Google Cloud answers when it does not do what was asked: each answer with its fix, and which may be repeated."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tpukit.essentials.display import TpukitError

SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_LOGIN = (
    "`gcloud auth application-default login`; on a machine without a browser, GOOGLE_APPLICATION_CREDENTIALS=key.json"
)


class CloudError(TpukitError, RuntimeError):
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
        """Turn what the libraries below raise while asking into `CloudError`."""
        try:
            yield
        except Exception as error:  # of googleapiclient, google's own, requests, sockets: no common base
            status, said = _status(error), _words(error)
            if status is None and not _is_of_the_network(error):
                raise
            if status is None and _is_a_credential(error):
                fact = f"{what}: the credential was not accepted"
                raise CloudError(fact, found=said, fix=_LOGIN, status=401) from error
            meaning, fix = _ANSWERS.get(status, ("the request failed", _LATER))
            fix = self.fixes.get(status, fix.format(**vars(self)))
            if status == 403 and re.search("SERVICE_DISABLED|has not been used|is disabled", said):
                fix = f"`gcloud services enable {self.api} --project {self.project}`, and wait some minutes"
            raise CloudError(
                f"{what}: {meaning}",
                found=f"{self.name} answered {status}: {said}" if status else f"no answer: {said}",
                fix=fix,
                status=status,
                may_pass=status in (None, 429) or status >= 500,
                answered=status is not None and not (status in (503, 504) and _is_of_grpc(error)),
            ) from error


_LATER = "try again in some minutes; https://status.cloud.google.com tells of outages"
_QUOTAS = "https://console.cloud.google.com/iam-admin/quotas"
# By HTTP status, what an answer means and what to do; None where none came.
_ANSWERS = {
    None: ("the cloud did not answer", "look at the network and its proxy, then try again"),
    400: ("the request was not understood", "correct what the answer names"),
    401: ("the credential was not accepted", _LOGIN),
    403: ("not permitted", "give this account the role {role} in {project}, or name another project"),
    404: ("not found", "look whether it is in project {project}"),
    409: ("there is one of that name already", "choose another name"),
    429: ("too many requests, or no quota left", f"wait, take another region, or ask for more: {_QUOTAS}"),
    500: ("the service failed", _LATER),
    503: ("the service is not available", _LATER),
    504: ("the service did not answer in time", _LATER),
}


def find_credentials(given, project: str | None, environ: Mapping[str, str]) -> tuple[object, str]:
    """Return the credentials of this machine, or those given, and the project.

    Raises:
        CloudError: there is no credential, or no project.
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
            raise CloudError(fact, found=found, fix=_LOGIN, status=401) from error
        project = project or of_the_credential
    if not project:
        raise CloudError(
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
