"""The cloud's own word about a TPU VM: Cloud TPU API v2, through cloud-tpu-client."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping

from tpukit.cloud.answers import CloudError, Service, find_credentials
from tpukit.essentials.display import Finding, NotInstalledError

_REQUEST_SECONDS = 10.0  # for one answer
_SECONDS_BETWEEN_LINES = 20.0  # while nothing changes
_NAME = "[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
_LONG_NAME = re.compile("projects/([^/]+)/locations/([^/]+)/nodes/([^/]+)")

_START = "`gcloud compute tpus tpu-vm start {name} --zone {zone} --project {project}`"
_AGAIN = "delete it and create it again: `gcloud compute tpus tpu-vm delete {name} --zone {zone} --project {project}`"
# Every state of the API: what it means, and what to do. None where it passes by itself, so that waiting helps.
_STATES = {
    "READY": ("it is up", None),
    "CREATING": ("it is being created", None),
    "STARTING": ("it is starting", None),
    "RESTARTING": ("it is restarting", None),
    "REIMAGING": ("its image is being replaced", None),
    "REPAIRING": ("the cloud repairs it", None),
    "UNHIDING": ("the cloud brings it back", None),
    "UNKNOWN": ("the cloud does not know", None),
    "STATE_UNSPECIFIED": ("the cloud does not say", None),
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
    """Return the full name of a TPU VM, and what the cloud says of it: state, health, kind, symptoms; see `health`.

    An answer that never comes ends after ten seconds, and is asked for again as long as there is time.

    Raises:
        CloudError: no such TPU, no permission, no credential, no project, no zone, no answer; ImportError without
            cloud-tpu-client.
    """
    project, zone, name = _place(name, zone, project, environ)
    credentials, project = find_credentials(credentials, project, environ)
    full = f"projects/{project}/locations/{zone}/nodes/{name}"
    there = {"name": name, "zone": zone, "project": project}
    with _client(there, credentials, endpoint) as ask:
        node = _settled(ask, time.monotonic() + wait, every, lambda text: say(f"{name}: {text}"))
    return full, _findings(node, there, wait)


def _settled(ask: Callable[[], dict], deadline: float, every: float, say: Callable[[str], None]) -> dict:
    """Return the node once it does not change by itself, or as it is when the time is over."""
    said, said_at = None, 0.0
    while True:
        node, failed = None, None
        try:
            node = ask()
        except CloudError as error:
            failed = error
        left = deadline - time.monotonic()
        if failed and (left <= 0 or not failed.may_pass):
            raise failed
        if node is not None and (left <= 0 or not _passes(node)):
            return node
        now = "no answer" if failed else " ".join(filter(None, (node.get("state"), node.get("health")))) or "no state"
        if now != said or time.monotonic() - said_at >= _SECONDS_BETWEEN_LINES:
            say(f"{now}; waiting, {left:.0f} s at most")
            said, said_at = now, time.monotonic()
        time.sleep(min(every, left))


def _place(name: str, zone: str | None, project: str | None, environ: Mapping[str, str]):
    if long := _LONG_NAME.fullmatch(name):
        project, zone, name = project or long[1], zone or long[2], long[3]
    if not re.fullmatch(_NAME, name):
        old = name.startswith("grpc://") or ":" in name
        address = "an address, as of a TPU Node, an architecture that Google has ended"
        raise CloudError(
            f"{name!r} is no name of a TPU VM",
            found=address if old else "a name is lower-case letters, digits and hyphens, and begins with a letter",
            fix="`gcloud compute tpus tpu-vm list --zone us-west4-a` shows the names; without a name, "
            "tpukit.cloud.health() looks at this machine",
        )
    zone = zone or environ.get("CLOUDSDK_COMPUTE_ZONE")
    if not zone:
        raise CloudError(
            f"the zone of {name} is not known",
            found="no zone=, no CLOUDSDK_COMPUTE_ZONE",
            fix=f'health("{name}", zone="us-west4-a"), or whichever it is in',
        )
    return project, zone, name


@contextlib.contextmanager
def _client(there: Mapping[str, str], credentials, endpoint: str | None) -> Iterator[Callable[[], dict]]:
    """Yield a function that asks for the node, once a call."""
    try:
        import cloud_tpu_client
        import google_auth_httplib2
        import httplib2
        from googleapiclient import discovery
    except Exception as error:  # beside TensorFlow, version 0.10 raises absl's DuplicateFlagError on import
        raise NotInstalledError(
            f"cloud-tpu-client cannot be imported: {error}",
            found="it is one of tpukit's requirements, but installs with --no-deps leave it out",
            fix='`pip install "cloud-tpu-client==0.7"`; 0.8 and 0.10 break TensorFlow',
        ) from error
    # Version 0.7 alone would ask API v1, which knows no TPU VM, with oauth2client's credentials and no time-out.
    http = google_auth_httplib2.AuthorizedHttp(credentials, http=httplib2.Http(timeout=_REQUEST_SECONDS))
    options = {"api_endpoint": endpoint} if endpoint else None
    service = discovery.build(
        "tpu", "v2", http=http, cache_discovery=False, static_discovery=True, client_options=options
    )
    which = "`gcloud compute tpus tpu-vm list --zone {zone} --project {project}` shows which there are"
    fixes = {404: which.format(**there)}
    cloud = Service("Cloud TPU", "tpu.googleapis.com", "roles/tpu.viewer", there["project"], fixes)
    client = cloud_tpu_client.Client(there["name"], zone=there["zone"], project=there["project"], service=service)

    def ask() -> dict:
        with cloud.asked("TPU {name} in {zone}".format(**there)):
            try:
                # state() and health() would be two requests, and of two moments.
                return client._fetch_cloud_tpu_metadata()
            except ValueError as error:  # in which the client wraps whatever was raised
                raise error.__context__ or error from None

    with contextlib.closing(http):
        yield ask


def _passes(node: Mapping) -> bool:
    """Say whether a node may become healthy without anybody's doing."""
    state, health = node.get("state", "STATE_UNSPECIFIED"), node.get("health")
    return health in _HEALTHS if state == "READY" else _STATES.get(state, ("", None))[1] is None


def _findings(node: Mapping, there: Mapping[str, str], wait: float) -> list[Finding]:
    state, health = node.get("state", "STATE_UNSPECIFIED"), node.get("health")
    meaning, fix = _STATES.get(state, ("a state that this kit does not know", None))
    waited = f" still after {wait:.0f} s" if wait else ""
    later = 'ask again, or wait longer: wait="30m"'
    findings = []
    if state == "READY":
        findings.append(Finding("state", "ok", "READY"))
    elif fix:
        findings.append(Finding("state", "failure", f"{state}: {meaning}", fix.format(**there)))
    else:
        findings.append(Finding("state", "failure", f"{state}{waited}: {meaning}", later))
    why = f" ({node['healthDescription']})" if node.get("healthDescription") else ""
    if health == "HEALTHY":
        findings.append(Finding("health", "ok", f"HEALTHY{why}"))
    elif health in _HEALTHS:
        again = f"{later}; if it stays so, " + _AGAIN.format(**there)
        findings.append(Finding("health", "failure", f"{health}{waited}: {_HEALTHS[health]}{why}", again))
    elif state == "READY":
        on_it = "`python -m tpukit health` on the machine itself looks at its chips"
        findings.append(Finding("health", "warning", f"the cloud says {health or 'nothing'}{why}", on_it))
    kind = [node.get("acceleratorType"), node.get("runtimeVersion")]
    if any(kind):
        findings.append(Finding("kind", "ok", ", ".join(filter(None, kind))))
    for symptom in node.get("symptoms", ()):
        fact = " ".join(filter(None, (symptom.get("symptomType"), symptom.get("details"), symptom.get("createTime"))))
        findings.append(Finding("symptom", "warning", fact, "look at that worker's log before a long run"))
    return findings
