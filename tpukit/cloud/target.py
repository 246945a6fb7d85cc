"""The boundary between a job and the platform that runs it.

`submit` writes the job's folder, asks a `Target` to start one machine, and keeps the answer. A
target knows its platform's requests and nothing about notebooks. On the machine it starts one
command, which is the same everywhere:

    bash FOLDER/run.sh [ADDRESS [WORK]]

    FOLDER   the job's folder as the machine sees it: a mounted bucket, or a copy of run.sh and in/
             (and of result.json, if it exists) on the machine's own disk
    ADDRESS  where results are written: a path, or gs://bucket/folder; FOLDER by default
    WORK     a folder on the machine's own disk; a new temporary one by default. If the same folder
    is used again, nothing is installed a second time.

    exit code 0    the notebook has succeeded
    exit code 1    the job is over and must not run again; result.json has the reason
    exit code 75   interrupted: start the same command again, on any machine

result.json exists only when the job is over. run.sh looks for it first, in FOLDER and ADDRESS if
that is a path, so starting a finished job again takes only seconds. If the installation fails,
run.sh writes result.json and log/ into FOLDER; a target whose FOLDER is a copy uploads them to
ADDRESS. SIGTERM must reach that one process and not its children: it interrupts the running cell,
which then has `JobOptions.grace` seconds to save.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tpukit.essentials.display import InvalidValueError
from tpukit.profiling import Tpu

# A platform ends a machine this many seconds after the time limit, if the runner did not end it.
BACKSTOP_SECONDS = 600


@dataclass(frozen=True)
class JobOptions:
    """The rarer options of a job. If a target does not support an option, `submit` raises an error.

    Attributes:
        zone: the zone of the machine, such as "us-west4-a"; for gcloud, which needs it, and
            skypilot.
        region: the region of the machine, such as "us-central1"; for vertex and skypilot.
        project: the Google Cloud project; None for GOOGLE_CLOUD_PROJECT or the credential's own.
        spot: take a cheaper machine that the platform may take back.
        reservation: for vertex the full name of a reservation, for gcloud "any".
        image: the container; None for a plain Python image of the caller's version.
        service_account: the account that the job uses on its machine.
        torch: the release of torch, with the torch_xla and libtpu that belong to it; None for the
            newest. "none", for other frameworks: torch, torch_xla and libtpu are not installed, and
            tpukit is installed without its dependencies.
        grace: seconds that an interrupted cell has for saving.
        not_secret: texts that look like a secret but are not, such as `"<|endoftext|>"`.
    """

    zone: str | None = None
    region: str | None = None
    project: str | None = None
    spot: bool = False
    reservation: str | None = None
    image: str | None = None
    service_account: str | None = None
    torch: str | None = None
    grace: float = 25.0
    not_secret: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobPlan:
    """The data that a target needs to start a job.

    Attributes:
        name: the name of the job: lower-case letters, digits and hyphens, a letter first, at most
            40 characters.
        target: the name of the target.
        folder: the address of the job's folder, "gs://bucket/folder/name" or an absolute path; it
            exists.
        tpu: the machine's TPU; None only for `local`.
        timeout: seconds from the first start, of all attempts together. The runner counts them; a
            target also passes the limit to its platform, if the platform has one.
        python: the caller's version, such as "3.12".
        digest: the digest of everything that was sent. It is a label of the platform's job, by
            which tpukit finds the job again if the answer was lost.
        options: see `JobOptions`.
        secrets: by the name of the variable, a reference, never the value.
            "projects/P/secrets/S/versions/V" is read by the runner from Secret Manager (vertex,
            gcloud). "env:NAME" is a variable of the caller's process, which the platform's own tool
            passes on (skypilot, local).
    """

    name: str
    target: str
    folder: str
    tpu: Tpu | None
    timeout: float
    python: str
    digest: str
    options: JobOptions = field(default_factory=JobOptions)
    secrets: Mapping[str, str] = field(default_factory=dict)

    @property
    def platform_timeout(self) -> int:
        """The seconds after which the platform ends the machine, if the runner has not ended it."""
        return int(self.timeout) + BACKSTOP_SECONDS

    def command(self, folder: str, *more: str) -> list[str]:
        """Return the start command for a machine that sees the job's folder as `folder`."""
        return ["bash", f"{folder}/run.sh", *more]


def variables_of(plan: JobPlan) -> dict[str, str]:
    """Return the values of the secrets that are variables of this process.

    Raises:
        ValueError: such a variable is not set.
    """
    values = {}
    for name, reference in plan.secrets.items():
        if not reference.startswith("env:"):
            continue
        variable = reference.removeprefix("env:")
        if variable not in os.environ:
            raise InvalidValueError(
                f"the variable {variable} is not set, and a secret of the job refers to it",
                fix=f"export {variable}=..., then submit again",
            )
        values[name] = os.environ[variable]
    return values


# queued: accepted, no machine yet. running: a machine exists, or the platform starts the next.
# succeeded, failed, cancelled: reported by the platform. gone: no machine, and none will follow.
Word = Literal["queued", "running", "succeeded", "failed", "cancelled", "gone"]


@dataclass(frozen=True)
class PlatformState:
    """The platform's report on a job. The state in the job's folder has precedence.

    Attributes:
        word: see `Word`.
        reason: the platform's own words, such as a quota that is missing; empty without any.
    """

    word: Word
    reason: str = ""


class Target(Protocol):
    """A platform. `start` returns a small JSON object, the handle, kept as handle.json.

    A handle has everything that the other methods need (project, region, resource name), because
    another process may call them. All methods raise `CloudError` if the platform does not answer.
    """

    name: str

    def start(self, plan: JobPlan) -> dict:
        """Start one machine and return its handle at once.

        A repeated call for the same name and digest finds the machine whose answer was lost and
        returns its handle. If the machine was lost or the platform's job is over, it starts another
        one.
        """

    def state(self, handle: dict) -> PlatformState:
        """Return the state that the platform reports."""

    def logs(self, handle: dict) -> str:
        """Return the platform's own log, or the command that shows it."""

    def cancel(self, handle: dict) -> None:
        """Ask the platform to end the machine; if it has ended already, nothing happens."""

    def clean_up(self, handle: dict) -> None:
        """Delete everything that costs money. Called when the results are in the folder."""
