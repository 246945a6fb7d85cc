"""Run the command-line tools `gcloud` and `sky`, which the user has installed."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpukit.cloud.answers import CloudError
from tpukit.essentials.display import NotInstalledError

_INSTALL = {
    "gcloud": "https://cloud.google.com/sdk/docs/install, then `gcloud auth login`",
    "sky": '`pip install "skypilot[gcp]"`, then `sky check gcp`',
}


class _Meaning(NamedTuple):
    """The meaning of a message of a tool."""

    pattern: str  # a regular expression for a part of the message
    status: int  # the HTTP status with this meaning
    fix: str


# The first pattern that occurs in a message counts.
_MEANINGS = (
    _Meaning(
        "NOT_FOUND|was not found|No in-progress managed jobs",
        status=404,
        fix="check the name, the zone and the project",
    ),
    _Meaning("ALREADY_EXISTS|already exists", status=409, fix="choose another name"),
    _Meaning(
        "RESOURCE_EXHAUSTED|[Qq]uota",
        status=429,
        fix="https://console.cloud.google.com/iam-admin/quotas",
    ),
    _Meaning(
        "UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|Connection|timed out",
        status=503,
        fix="try again in some minutes",
    ),
    _Meaning(
        # Not "the active account", which the message of any service may name.
        "an active account|credentials|gcloud auth login|Reauthentication",
        status=401,
        fix="`gcloud auth login`",
    ),
    _Meaning(
        "PERMISSION_DENIED|does not have permission|forbidden",
        status=403,
        fix="ask for the role: see docs/jobs.md",
    ),
)
_LONGEST_MESSAGE = 400  # characters of a tool's message in an error


def run_tool(
    words: Sequence[str],
    *,
    seconds: float = 300,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Run a tool without a shell, and return its standard output.

    Args:
        words: the tool and its arguments.
        seconds: the timeout, after which the tool is killed.
        environ: variables for the tool in addition to those of this process; None for none.

    Raises:
        CloudError: the tool failed or did not end in time. `found` has the tool's message, and
            `status` the HTTP status for it, such as 403 for a missing permission.
        NotInstalledError: the tool is not installed.
    """
    shown = " ".join(words[:4])  # enough to recognise the command; the rest may be long
    try:
        done = subprocess.run(
            list(words),
            stdin=subprocess.DEVNULL,  # a question of the tool would otherwise wait forever
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env={**os.environ, **(environ or {})},
        )
    except FileNotFoundError as error:
        raise NotInstalledError(
            f"the command `{words[0]}` is not installed",
            found=f"no {words[0]} on the PATH",
            fix=_INSTALL[words[0]],
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CloudError(
            f"`{shown} ...` did not end within {seconds:g} s",
            found="the command may have succeeded",
            fix="try again: tpukit first looks for the job, so it does not create a second one",
            may_pass=True,
            answered=False,
        ) from error
    if done.returncode:
        raise _failure(shown, done)
    return done.stdout


def _failure(shown: str, done: subprocess.CompletedProcess) -> CloudError:
    message = " ".join((done.stderr.strip() or done.stdout.strip()).split())
    # Without this text, `error` is "" and `details` is the whole message.
    _, error, details = message.rpartition("ERROR: (gcloud.")
    message = error + details
    if error and len(message) > _LONGEST_MESSAGE:
        # gcloud prints the reason first, then details in YAML.
        message = message[:_LONGEST_MESSAGE] + " ..."
    elif len(message) > _LONGEST_MESSAGE:
        # Other tools print the reason at the end, after warnings and progress.
        message = "... " + message[-_LONGEST_MESSAGE:]
    status = None
    fix = "run the command by hand to see more"
    for meaning in _MEANINGS:
        if re.search(meaning.pattern, message):
            status = meaning.status
            fix = meaning.fix
            break
    return CloudError(
        f"`{shown} ...` failed with exit code {done.returncode}",
        found=message or "it printed nothing",
        fix=fix,
        status=status,
        may_pass=status in (429, 503),
        answered=status is not None and status != 503,
    )
