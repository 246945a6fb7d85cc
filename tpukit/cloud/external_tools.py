"""Run the command-line tools of a platform: gcloud and sky, which the user has installed and logged in."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from tpukit.cloud.answers import CloudError
from tpukit.essentials.display import NotInstalledError

_INSTALL = {
    "gcloud": "https://cloud.google.com/sdk/docs/install, then `gcloud auth login`",
    "sky": '`pip install "skypilot[gcp]"`, then `sky check gcp`',
}
# Words in the message of a tool: the HTTP status that they stand for, and the fix.
_MEANINGS = (
    ("NOT_FOUND|was not found|No in-progress managed jobs", 404, "look at the name, the zone and the project"),
    ("ALREADY_EXISTS|already exists", 409, "choose another name"),
    ("RESOURCE_EXHAUSTED|[Qq]uota", 429, "https://console.cloud.google.com/iam-admin/quotas"),
    ("UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|Connection|timed out", 503, "try again in some minutes"),
    ("active account|credentials|gcloud auth login|Reauthentication", 401, "`gcloud auth login`"),
    ("PERMISSION_DENIED|does not have permission|forbidden", 403, "ask for the role: see docs/jobs.md"),
)
_LONGEST_MESSAGE = 400


def run_tool(
    words: Sequence[str],
    *,
    seconds: float = 300,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Run a tool without a shell and return its standard output.

    Raises:
        CloudError: the tool failed, with its own words; `status` is that of the service, if the message has one.
        ImportError: the tool is not installed.
    """
    shown = " ".join(words[:4])
    try:
        done = subprocess.run(
            list(words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env={**os.environ, **(environ or {})},
        )
    except FileNotFoundError as error:
        raise NotInstalledError(
            f"`{words[0]}` is not installed, and this target needs it",
            found=f"no {words[0]} on the PATH",
            fix=_INSTALL[words[0]],
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CloudError(
            f"`{shown} ...` did not end within {seconds:g} s",
            found="it may have done what was asked",
            fix="try again: the job is looked for before it is created again",
            may_pass=True,
            answered=False,
        ) from error
    if done.returncode:
        raise _failure(shown, done)
    return done.stdout


def _failure(shown: str, done: subprocess.CompletedProcess) -> CloudError:
    message = " ".join((done.stderr.strip() or done.stdout.strip()).split())
    if len(message) > _LONGEST_MESSAGE:
        message = "... " + message[-_LONGEST_MESSAGE:]
    status, fix = None, "run the command by hand to see more"
    for pattern, its_status, its_fix in _MEANINGS:
        if re.search(pattern, message):
            status = its_status
            fix = its_fix
            break
    return CloudError(
        f"`{shown} ...` failed with exit code {done.returncode}",
        found=message or "it printed nothing",
        fix=fix,
        status=status,
        may_pass=status in (429, 503),
        answered=status is not None and status != 503,
    )
