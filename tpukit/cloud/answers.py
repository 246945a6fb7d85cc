"""Turn the errors of Google Cloud into `CloudError`, with a fix for each HTTP status.

with service.asked("the job train"):     # 403 from the API, as an exception of any library
    client.create(...)                   # CloudError: the job train: not permitted
                                         #   fix: give this account the role ...
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tpukit.essentials.display import TpukitError

SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_LOGIN = (
    "`gcloud auth application-default login`; on a machine without a browser, "
    "GOOGLE_APPLICATION_CREDENTIALS=key.json"
)
_LONGEST_MESSAGE = 300  # characters


class CloudError(TpukitError, RuntimeError):
    """Google Cloud refused a request, or did not answer it.

    Attributes:
        status: the HTTP status of its answer; None without an answer.
        may_pass: whether the same request may succeed later.
        answered: whether the service itself has answered. If not, the request may still have
            succeeded.
    """

    status: int | None = None
    may_pass = False
    answered = True


@dataclass(frozen=True)
class Service:
    """An API of the cloud, as errors name it.

    Attributes:
        name: in words.
        api: the argument of `gcloud services enable`.
        role: the role that allows the requests.
        project: the project that pays.
        fixes: by HTTP status, the fixes that only this API needs.
    """

    name: str
    api: str
    role: str
    project: str
    fixes: Mapping[int, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """Raise `CloudError` for the exceptions of Google's libraries in this block.

        Args:
            what: the subject of the request, with which the message begins.
        """
        try:
            yield
        # The exceptions of googleapiclient, google-api-core, requests and sockets have no common
        # base.
        except Exception as error:
            status = _status(error)
            if status is None and not _is_of_the_network(error):
                raise
            raise self._explained(error, what, status) from error

    def _explained(self, error: Exception, what: str, status: int | None) -> CloudError:
        message = _message(error)
        if status is None and _is_a_credential(error):
            fact = f"{what}: the credential was not accepted"
            return CloudError(fact, found=message, fix=_LOGIN, status=401)
        meaning, fix = _ANSWERS.get(status, ("the request failed", _LATER))
        fix = self.fixes.get(status, fix.format(**vars(self)))
        if status == 403 and re.search("SERVICE_DISABLED|has not been used|is disabled", message):
            enable = f"`gcloud services enable {self.api} --project {self.project}`"
            fix = f"{enable}, and wait some minutes"
        found = f"{self.name} answered {status}: {message}"
        if not status:
            found = f"no answer: {message}"
        # Without an answer, gRPC reports these two as a service would.
        is_lost = status in (503, 504) and _is_of_grpc(error)
        return CloudError(
            f"{what}: {meaning}",
            found=found,
            fix=fix,
            status=status,
            may_pass=status in (None, 429) or status >= 500,
            answered=status is not None and not is_lost,
        )


_LATER = "try again in some minutes; https://status.cloud.google.com lists outages"
_QUOTAS = "https://console.cloud.google.com/iam-admin/quotas"
# By HTTP status: the meaning of an answer, and the fix. None is for no answer.
_ANSWERS = {
    None: ("the cloud did not answer", "look at the network and its proxy, then try again"),
    400: ("the request was not understood", "correct what the answer names"),
    401: ("the credential was not accepted", _LOGIN),
    403: (
        "not permitted",
        "give this account the role {role} in {project}, or name another project",
    ),
    404: ("not found", "check that it is in project {project}"),
    409: ("the name is in use already", "choose another name"),
    429: (
        "too many requests, or no quota left",
        f"wait, take another region, or ask for more: {_QUOTAS}",
    ),
    500: ("the service failed", _LATER),
    503: ("the service is not available", _LATER),
    504: ("the service did not answer in time", _LATER),
}


def find_credentials(given, project: str | None, environ: Mapping[str, str]) -> tuple[object, str]:
    """Return the credentials and the project.

    Args:
        given: credentials of google-auth; None for those of this machine.
        project: None for GOOGLE_CLOUD_PROJECT, CLOUDSDK_CORE_PROJECT or the credential's project.
        environ: the variables of this process.

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
    """Return the HTTP status of an answer.

    googleapiclient keeps it in `resp`, google.api_core in `code`.
    """
    response = getattr(error, "resp", None)
    status = getattr(response, "status", None) or getattr(error, "code", None)
    return int(status) if isinstance(status, int) else None


def _is_of_grpc(error: BaseException) -> bool:
    """Return whether gRPC made the error."""
    return callable(getattr(getattr(error, "response", None), "code", None))


def _message(error: BaseException) -> str:
    """Return the message of an error as a single line."""
    text = getattr(error, "reason", None) or getattr(error, "message", None) or str(error)
    line = " ".join(str(text or type(error).__name__).split())
    line = re.sub("^(GET|POST|PUT) [^ ]+: ", "", line)
    details = str(getattr(error, "error_details", ""))
    if "SERVICE_DISABLED" in details and "SERVICE_DISABLED" not in line:
        line += " (SERVICE_DISABLED)"
    if len(line) > _LONGEST_MESSAGE:
        line = line[: _LONGEST_MESSAGE - 1] + "…"
    return line


def _is_of_the_network(error: BaseException) -> bool:
    """Return whether the request or its credential was lost on the way."""
    # The errors of requests and httplib2 are not all OSErrors.
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    is_of_http = bool(modules & {"requests", "httplib2", "http"})
    return isinstance(error, OSError) or is_of_http or _is_a_credential(error)


def _is_a_credential(error: BaseException) -> bool:
    kinds = set()
    for kind in type(error).__mro__:
        if kind.__module__ == "google.auth.exceptions":
            kinds.add(kind.__name__)
    return bool(kinds) and "TransportError" not in kinds
