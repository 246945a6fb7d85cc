"""The errors of Google's libraries as `CloudError`, by what happened, however often it was tried."""

import errno
import socket
import sys
from types import SimpleNamespace

import pytest

from tpukit.cloud.answers import CloudError, Service, find_credentials
from tpukit.cloud.job_folder import open_folder

exceptions = pytest.importorskip(
    "google.api_core.exceptions", reason="needs Google's client: pip install google-api-core"
)
SERVICE = Service("Cloud Storage", "storage.googleapis.com", "roles/storage.objectAdmin", "demo")


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


def asked(error):
    with pytest.raises(CloudError) as caught, SERVICE.asked("gs://bucket/jobs"):
        raise error
    assert caught.value.__cause__ is error
    return caught.value


def test_a_network_that_is_away_is_no_answer_and_may_pass():
    from google.auth.exceptions import RefreshError, TransportError

    for error in (
        TransportError(ConnectionError("no route to host")),
        exceptions.RetryError("Timeout of 120.0s exceeded", ConnectionError("no route to host")),
        exceptions.RetryError("Timeout of 120.0s exceeded", TransportError("no route to host")),
        exceptions.RetryError("no route to host", None),
        RefreshError("no route to host", retryable=True),
    ):
        found = asked(error)
        assert (found.status, found.may_pass, found.answered) == (None, True, False)
        assert "the cloud did not answer" in str(found)
        assert "no answer: no route to host" in str(found)


@pytest.mark.parametrize(
    ("kind", "status", "may_pass", "words"),
    [
        (exceptions.ServiceUnavailable, 503, True, "answered 503: closed for a moment"),
        (exceptions.TooManyRequests, 429, True, "answered 429: closed for a moment"),
        (exceptions.Forbidden, 403, False, "give this account the role roles/storage.objectAdmin"),
    ],
)
def test_after_many_tries_the_last_answer_decides(kind, status, may_pass, words):
    retried = exceptions.RetryError("Timeout of 120.0s exceeded", kind("closed for a moment"))
    found = asked(retried)
    assert (found.status, found.may_pass) == (status, may_pass)
    assert words in str(found)


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("no access to gs://team-billing/jobs", "give this account the role"),
        (
            "Cloud Storage API has not been used in project 1 before",
            "gcloud services enable storage",
        ),
        (
            "The billing account for the owning project is disabled in state absent",
            "billing account",
        ),
        (
            "This API method requires billing to be enabled",
            "link a billing account to the project demo",
        ),
    ],
)
def test_an_api_and_a_billing_account_that_are_not_enabled_have_their_own_fixes(message, fix):
    assert fix in str(asked(exceptions.Forbidden(message))).partition("fix:")[2]


def test_an_answer_that_the_client_of_storage_did_not_read_has_its_status():
    pytest.importorskip("google.cloud.storage", reason="pip install google-cloud-storage")
    from google.cloud.storage.exceptions import InvalidResponse
    from requests import Response

    response = Response()
    for response.status_code in (408, 502):
        retried = exceptions.RetryError("Timeout", InvalidResponse(response, "request failed"))
        found = asked(retried)
        assert (found.status, found.may_pass) == (response.status_code, True)


def test_without_google_auth_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(ImportError, match="fix:   `pip install google-auth`"):
        find_credentials(None, "demo", {})


def test_a_credential_that_is_not_accepted_does_not_pass():
    from google.auth.exceptions import RefreshError

    found = asked(RefreshError("invalid_grant"))
    assert (found.status, found.may_pass) == (401, False)
    assert "application-default login" in str(found)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "out/a.csv"),
        PermissionError(13, "Permission denied", "out/a.csv"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_an_error_of_this_machines_disk_is_no_lost_network(error):
    with pytest.raises(type(error)) as caught, SERVICE.asked("gs://bucket/jobs"):
        raise error
    assert caught.value is error


def test_an_error_of_the_program_is_left_as_it_is():
    with pytest.raises(KeyError), SERVICE.asked("gs://bucket/jobs"):
        raise KeyError("a")


def test_a_bucket_behind_a_network_that_is_away_is_an_error_that_may_pass(closed_port, monkeypatch):
    from google.auth.credentials import AnonymousCredentials

    pytest.importorskip("google.cloud.storage", reason="pip install google-cloud-storage")
    from google.cloud.storage.retry import DEFAULT_RETRY
    from google.oauth2.credentials import Credentials

    monkeypatch.setattr(DEFAULT_RETRY, "_timeout", 0.2)  # seconds, instead of 120
    monkeypatch.setattr(DEFAULT_RETRY, "_initial", 0.01)
    nowhere = f"http://127.0.0.1:{closed_port}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", nowhere)
    # The second has no token yet, so that the request for a token fails.
    account = Credentials(
        None, refresh_token="r", token_uri=nowhere, client_id="c", client_secret="s"
    )
    for credentials in (AnonymousCredentials(), account):
        folder = open_folder("gs://bucket/jobs", project="demo", credentials=credentials)
        requests = (
            (folder.read, ["result.json"]),
            (folder.write, ["result.json", b"{}"]),
            (folder.names, []),
        )
        for request, arguments in requests:
            with pytest.raises(CloudError, match="the cloud did not answer") as caught:
                request(*arguments)
            assert caught.value.may_pass


def test_the_project_of_given_credentials_is_known():
    given = SimpleNamespace(project_id="mine")
    assert find_credentials(given, None, {}) == (given, "mine")
    assert find_credentials(given, None, {"GOOGLE_CLOUD_PROJECT": "other"}) == (given, "other")
    with pytest.raises(CloudError, match="the project is not known"):
        find_credentials(object(), None, {})
