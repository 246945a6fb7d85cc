"""Turn the errors of Google Cloud into `CloudError`, with a fix for each HTTP status.

with service.asked("the job train"):     # 403 from the API, as an exception of any library
    client.create(...)                   # CloudError: the job train: not permitted
                                         #   fix: give this account the role ...
"""

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tpukit.essentials.display import NotInstalledError, TpukitError

SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_LOGIN = (
    "`gcloud auth application-default login`; on a machine without a browser, "
    "GOOGLE_APPLICATION_CREDENTIALS=key.json"
)
_LONGEST_MESSAGE = 300  # characters of Google's message in an error


class CloudError(TpukitError, RuntimeError):
    """Google Cloud or SkyPilot rejected a request or did not answer, or a setting is missing.

    Attributes:
        status: the HTTP status of the answer; 401 if no valid credential was found; None if there
            was no answer, or if the answer has no status.
        may_pass: True if the same request may succeed later.
        answered: False if it is not known whether the service has done the request.
    """

    status: int | None = None
    may_pass = False
    answered = True


@dataclass(frozen=True)
class Service:
    """The facts about an API of Google Cloud that error messages need.

    Attributes:
        name: the name of the service.
        api: the argument of `gcloud services enable`.
        role: the role that an account needs for the requests.
        project: the project that pays.
        fixes: for an HTTP status, the fix to show in place of the usual one.
    """

    name: str
    api: str
    role: str
    project: str
    fixes: Mapping[int, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """Turn the exceptions of Google's libraries in this block into `CloudError`.

        All other exceptions, such as `FileNotFoundError`, are raised unchanged.

        Args:
            what: the first words of the message, such as "the job train".
        """
        try:
            yield
        # The exceptions of googleapiclient, google-api-core, google-auth, requests and sockets have
        # no common base.
        except Exception as error:
            last = _last_answer(error)
            status = _status(last)
            if status is None and not _is_of_the_network(last):
                raise
            raise self._explained(last, what, status) from error

    def _explained(self, error: Exception, what: str, status: int | None) -> CloudError:
        message = _message(error)
        if status is None and _is_a_credential(error):
            fact = f"{what}: the credential was not accepted"
            return CloudError(fact, found=message, fix=_LOGIN, status=401)
        meaning, fix = _ANSWERS.get(status, ("the request failed", _LATER))
        fix = self.fixes.get(status, fix.format(**vars(self)))
        if status == 403 and re.search("(?i)billing (account|to be )|BILLING_DISABLED", message):
            account = "https://console.cloud.google.com/billing"
            fix = f"link a billing account to the project {self.project}: {account}"
        elif status == 403 and re.search("SERVICE_DISABLED|has not been used|is disabled", message):
            enable = f"`gcloud services enable {self.api} --project {self.project}`"
            fix = f"{enable}, and wait some minutes"
        found = f"{self.name} answered {status}: {message}"
        if not status:
            found = f"no answer: {message}"
        # If there is no answer, gRPC reports 503 or 504, as if the service had answered.
        is_lost = status in (503, 504) and _is_of_grpc(error)
        return CloudError(
            f"{what}: {meaning}",
            found=found,
            fix=fix,
            status=status,
            may_pass=status in (None, 408, 429) or status >= 500,
            answered=status is not None and not is_lost,
        )


_LATER = "try again in some minutes; https://status.cloud.google.com lists outages"
_QUOTAS = "https://console.cloud.google.com/iam-admin/quotas"
# The meaning of an answer and the fix, by HTTP status; None if there was no answer.
_ANSWERS = {
    None: ("the cloud did not answer", "check the network and its proxy, then try again"),
    400: ("the request is not valid", "correct the value that the answer names"),
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
    """Return credentials and a project for Google Cloud.

    Args:
        given: credentials of google-auth; None for those of this machine.
        project: the project; None for GOOGLE_CLOUD_PROJECT, CLOUDSDK_CORE_PROJECT or the project of
            the credentials.
        environ: the environment variables of this process.

    Raises:
        CloudError: this machine has no credentials, or the project is unknown.
        NotInstalledError: google-auth is not installed.
    """
    try:
        import google.auth
        from google.auth.exceptions import GoogleAuthError
    except ImportError as error:
        fact = f"requests to Google Cloud need google-auth, which cannot be imported: {error}"
        raise NotInstalledError(fact, fix="`pip install google-auth`") from error

    project = project or environ.get("GOOGLE_CLOUD_PROJECT") or environ.get("CLOUDSDK_CORE_PROJECT")
    if given is None:
        try:
            given, of_the_credential = google.auth.default(scopes=SCOPES)
        except GoogleAuthError as error:
            found = " ".join(str(error).split())
            fact = "this machine has no credential for Google Cloud"
            raise CloudError(fact, found=found, fix=_LOGIN, status=401) from error
        project = project or of_the_credential
    project = project or getattr(given, "project_id", None)
    if not project:
        raise CloudError(
            "the project is not known",
            found="no project=, no GOOGLE_CLOUD_PROJECT, none in the credentials",
            fix='project="my-project"; `gcloud projects list` shows yours',
        )
    return given, project


def _last_answer(error: BaseException) -> BaseException:
    """Return the exception of the last try, if Google's client has repeated a request in vain.

    For such a request google.api_core raises `RetryError`; for a bucket it does so after two
    minutes. Any other exception is returned unchanged.
    """
    is_retried = ("google.api_core.exceptions", "RetryError") in _kinds(error)
    return (error.cause or error) if is_retried else error


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an exception; None if there is none.

    googleapiclient has it in `resp`, google.api_core in `code`, the client of Cloud Storage in
    `response`.
    """
    for name, attribute in (("resp", "status"), ("response", "status_code")):
        status = getattr(getattr(error, name, None), attribute, None)
        if isinstance(status, int):
            return int(status)
    status = getattr(error, "code", None)
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
    """Return whether an exception is one of the network or of the credentials."""
    # The errors of these libraries are not all OSErrors.
    kinds = _kinds(error)
    packages = {module.partition(".")[0] for module, _ in kinds}
    is_of_http = bool(packages & {"requests", "urllib3", "httplib2", "http"})
    is_of_google = ("google.api_core.exceptions", "RetryError") in kinds or _is_of_auth(error)
    is_of_system = isinstance(error, OSError) and not _is_of_a_file(error)
    return is_of_system or is_of_http or is_of_google


def _is_of_a_file(error: OSError) -> bool:
    """Return whether an OSError is one of the local disk: no such file, no permission, no space."""
    kinds = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
    return isinstance(error, kinds) or error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_a_credential(error: BaseException) -> bool:
    """Return whether the credential was rejected; then the same request never succeeds."""
    is_of_transport = ("google.auth.exceptions", "TransportError") in _kinds(error)
    return _is_of_auth(error) and not is_of_transport and not getattr(error, "retryable", False)


def _is_of_auth(error: BaseException) -> bool:
    """Return whether google-auth made the error."""
    return "google.auth.exceptions" in {module for module, _ in _kinds(error)}


def _kinds(error: BaseException) -> set[tuple[str, str]]:
    """Return module and name of the class of an error and of all its base classes."""
    return {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
