"""Ask the Cloud TPU API for the state and health of a TPU VM, through cloud-tpu-client.

The API describes a TPU VM as a node, with these and many other fields:

    {"state": "READY", "health": "HEALTHY", "acceleratorType": "v5litepod-8", "symptoms": [...]}
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping

from tpukit.cloud.answers import CloudError, Service, find_credentials
from tpukit.essentials.display import Finding, NotInstalledError

_REQUEST_SECONDS = 10.0  # the timeout of a request
_SECONDS_BETWEEN_LINES = 20.0  # between two printed lines if the state does not change
# Names of resources of Compute Engine (RFC 1035), and the full names in its API.
_NAME = "[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
_LONG_NAME = re.compile("projects/([^/]+)/locations/([^/]+)/nodes/([^/]+)")

_START = "`gcloud compute tpus tpu-vm start {name} --zone {zone} --project {project}`"
_AGAIN = (
    "delete it and create it again: "
    "`gcloud compute tpus tpu-vm delete {name} --zone {zone} --project {project}`"
)
_LATER = 'ask again, or wait longer: wait="30m"'
# The meaning and the fix of each state in the API. The fix is None if the state is temporary.
_STATES = {
    "READY": ("it is up", None),
    "CREATING": ("it is being created", None),
    "STARTING": ("it is starting", None),
    "RESTARTING": ("it is restarting", None),
    "REIMAGING": ("its image is being replaced", None),
    "REPAIRING": ("the cloud repairs it", None),
    "UNHIDING": ("the cloud brings it back", None),
    "UNKNOWN": ("the cloud does not know its state", None),
    "STATE_UNSPECIFIED": ("the cloud reports no state", None),
    "STOPPING": ("it is being stopped", _START),
    "STOPPED": ("it is stopped", _START),
    "PREEMPTED": ("the cloud took it back, as it may with a spot TPU", _AGAIN),
    "TERMINATED": ("it has ended", _AGAIN),
    "DELETING": ("it is being deleted", "create another when it is gone"),
    "HIDING": ("the cloud takes it out of service", _AGAIN),
    "HIDDEN": ("the cloud has taken it out of service", _AGAIN),
}
_HEALTHS = {
    "TIMEOUT": "it does not answer the cloud in time",
    "UNHEALTHY_TENSORFLOW": "its runtime does not answer the cloud",
    "UNHEALTHY_MAINTENANCE": "it is under maintenance",
}


def node_health(
    name: str,
    *,
    zone: str | None = None,
    project: str | None = None,
    wait: float = 600.0,
    every: float = 15.0,
    say: Callable[[str], None] = print,
    credentials=None,
    endpoint: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[str, list[Finding]]:
    """Return the full name of a TPU VM, and findings about its state, health, kind and symptoms.

    A request without an answer ends after ten seconds. Then `node_health` asks again, until `wait`
    seconds have passed.

    Args:
        name, zone, project, credentials, endpoint: as for `health`.
        wait: the longest wait in seconds while the state is temporary; 0 for a single request.
        every: the seconds between two requests.
        say: a function that prints a line during the wait.
        environ: the environment variables of this process.

    Raises:
        CloudError: the TPU does not exist; the permission, the credentials, the project or the zone
            is missing; or there is no answer.
        NotInstalledError: cloud-tpu-client is not installed.
    """
    project, zone, name = _place(name, zone, project, environ)
    credentials, project = find_credentials(credentials, project, environ)
    full = f"projects/{project}/locations/{zone}/nodes/{name}"
    place = {"name": name, "zone": zone, "project": project}

    def say_with_name(text: str) -> None:
        say(f"{name}: {text}")

    deadline = time.monotonic() + wait
    with _client(place, credentials, endpoint) as ask:
        node = _settled(ask, deadline, every=every, say=say_with_name)
    return full, [*_findings(node, place, wait), *_more_findings(node)]


def _settled(
    ask: Callable[[], dict], deadline: float, *, every: float, say: Callable[[str], None]
) -> dict:
    """Request a node until its state is no longer temporary, or until the deadline; return it.

    Args:
        ask: a function that requests the node once.
        deadline: the time of `time.monotonic` at which the wait ends.
        every: the seconds between two requests.
        say: a function that prints a line during the wait.

    Raises:
        CloudError: the last request failed, or a request failed for a reason that is not temporary.
    """
    printed = None
    printed_at = 0.0
    while True:
        node = None
        error = None
        try:
            node = ask()
        except CloudError as raised:
            error = raised
        left = deadline - time.monotonic()
        is_late = left <= 0
        if error and (is_late or not error.may_pass):
            raise error
        if node is not None and (is_late or not _passes(node)):
            return node
        # A line at each change, and otherwise now and then, so that the user sees that it waits.
        now = "no answer" if error else _state_and_health(node)
        if now != printed or time.monotonic() - printed_at >= _SECONDS_BETWEEN_LINES:
            say(f"{now}; waiting, {left:.0f} s at most")
            printed = now
            printed_at = time.monotonic()
        time.sleep(min(every, left))


def _state_and_health(node: Mapping) -> str:
    known = [node[key] for key in ("state", "health") if node.get(key)]
    return " ".join(known) or "no state"


def _place(name: str, zone: str | None, project: str | None, environ: Mapping[str, str]):
    """Return (project, zone, name) of a TPU VM; a full name has all three.

    Raises:
        CloudError: the name is not valid, or the zone is unknown.
    """
    if long := _LONG_NAME.fullmatch(name):
        project = project or long[1]
        zone = zone or long[2]
        name = long[3]
    if not re.fullmatch(_NAME, name):
        found = "a name is lower-case letters, digits and hyphens, and begins with a letter"
        if ":" in name:
            found = "an address, as of a TPU Node, an architecture that Google has ended"
        raise CloudError(
            f"{name!r} is not the name of a TPU VM",
            found=found,
            fix="`gcloud compute tpus tpu-vm list --zone us-west4-a` shows the names; "
            "without a name, tpukit.cloud.health() checks this machine",
        )
    # gcloud reads the same variable, and puts it before the zone of its configuration.
    zone = zone or environ.get("CLOUDSDK_COMPUTE_ZONE")
    if not zone:
        raise CloudError(
            f"the zone of {name} is not known",
            found="no zone=, no CLOUDSDK_COMPUTE_ZONE",
            fix=f'health("{name}", zone="us-west4-a"), with the zone of your TPU',
        )
    return project, zone, name


@contextlib.contextmanager
def _client(
    place: Mapping[str, str], credentials, endpoint: str | None
) -> Iterator[Callable[[], dict]]:
    """Yield a function that requests the node once per call."""
    try:
        import cloud_tpu_client
        import google_auth_httplib2
        import httplib2
        from googleapiclient import discovery
    # If TensorFlow is loaded, version 0.10 raises DuplicateFlagError of absl on import.
    except Exception as error:
        raise NotInstalledError(
            f"cloud-tpu-client cannot be imported: {error}",
            found="it is one of tpukit's requirements, but installs with --no-deps leave it out",
            fix='`pip install "cloud-tpu-client==0.7"`; 0.8 and 0.10 break TensorFlow',
        ) from error
    # Build the service here, because version 0.7 itself would use oauth2client's credentials, no
    # timeout, and API v1, which does not have TPU VMs.
    plain_http = httplib2.Http(timeout=_REQUEST_SECONDS)
    http = google_auth_httplib2.AuthorizedHttp(credentials, http=plain_http)
    service = discovery.build(
        "tpu",
        "v2",
        http=http,
        cache_discovery=False,
        static_discovery=True,
        client_options={"api_endpoint": endpoint} if endpoint else None,
    )
    client = cloud_tpu_client.Client(
        place["name"], zone=place["zone"], project=place["project"], service=service
    )
    list_command = "`gcloud compute tpus tpu-vm list --zone {zone} --project {project}`"
    cloud = Service(
        name="Cloud TPU",
        api="tpu.googleapis.com",
        role="roles/tpu.viewer",
        project=place["project"],
        fixes={404: list_command.format(**place) + " lists those that exist"},
    )

    def ask() -> dict:
        with cloud.asked("TPU {name} in {zone}".format(**place)):
            try:
                # A private method, because state() and health() would be two requests.
                return client._fetch_cloud_tpu_metadata()
            except ValueError as error:  # the client wraps every exception in a ValueError
                raise error.__context__ or error from None

    with contextlib.closing(http):
        yield ask


def _passes(node: Mapping) -> bool:
    """Return whether a node may become healthy by itself."""
    state = node.get("state", "STATE_UNSPECIFIED")
    if state == "READY":
        return node.get("health") in _HEALTHS
    _, fix = _STATES.get(state, ("", None))
    return fix is None


def _findings(node: Mapping, place: Mapping[str, str], wait: float) -> list[Finding]:
    """Return the findings about the state and the health of a node."""
    state = node.get("state", "STATE_UNSPECIFIED")
    health = node.get("health")
    meaning, fix = _STATES.get(state, ("a state that tpukit does not know", None))
    waited = f" still after {wait:.0f} s" if wait else ""
    findings = []
    if state == "READY":
        findings.append(Finding("state", "ok", "READY"))
    elif fix:
        findings.append(Finding("state", "failure", f"{state}: {meaning}", fix.format(**place)))
    else:
        findings.append(Finding("state", "failure", f"{state}{waited}: {meaning}", _LATER))
    why = f" ({node['healthDescription']})" if node.get("healthDescription") else ""
    if health == "HEALTHY":
        findings.append(Finding("health", "ok", f"HEALTHY{why}"))
    elif health in _HEALTHS:  # the known states that are not healthy
        fact = f"{health}{waited}: {_HEALTHS[health]}{why}"
        fix = f"{_LATER}; if it stays so, {_AGAIN.format(**place)}"
        findings.append(Finding("health", "failure", fact, fix))
    elif state == "READY":
        fact = f"the cloud reports {health or 'no health'}{why}"
        fix = "run `python -m tpukit health` on the TPU VM, which checks its chips"
        findings.append(Finding("health", "warning", fact, fix))
    return findings


def _more_findings(node: Mapping) -> list[Finding]:
    """Return the findings about the kind and the symptoms of a node."""
    findings = []
    kind = [node[key] for key in ("acceleratorType", "runtimeVersion") if node.get(key)]
    if kind:
        findings.append(Finding("kind", "ok", ", ".join(kind)))
    for symptom in node.get("symptoms", ()):
        keys = ("symptomType", "details", "createTime")
        fact = " ".join(symptom[key] for key in keys if symptom.get(key))
        fix = f"look at the log of worker {symptom.get('workerId', 0)} before a long run"
        findings.append(Finding("symptom", "warning", fact, fix))
    return findings
