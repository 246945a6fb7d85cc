"""Define the interface between a job and the platform that runs it.

`submit` writes the job's folder, asks a `Target` to start one machine, and stores the answer,
`handle.json`. A target knows the requests of its platform, but nothing about notebooks. On the
machine, it starts one command, which is the same on all platforms:

    bash FOLDER/run.sh [ADDRESS [WORK]]

    FOLDER   the path of the job's folder on the machine: a mounted bucket, or a copy of run.sh and
             in/ (and of result.json, if it exists) on the machine's disk
    ADDRESS  where results are written: a path, or gs://bucket/folder; FOLDER by default
    WORK     a folder on the machine's disk; a new temporary folder by default. If the same folder
             is used again, nothing is installed a second time.

    exit code 0    the notebook has succeeded
    exit code 1    this command must not run again: the job is over, for the reason in result.json;
                   it was cancelled; or another machine runs it
    exit code 75   the job was interrupted: start the same command again, on any machine

result.json exists only when the job is over. run.sh first looks for it, and for the file cancel, in
FOLDER, and in ADDRESS if that is a path. So a second start of a finished job ends in seconds. If
the installation fails, run.sh writes result.json and log/ into FOLDER; a target whose FOLDER is a
copy uploads them to ADDRESS. A platform must send SIGTERM only to the process of this command, not
to its children. SIGTERM interrupts the running cell, which then has `JobOptions.grace` seconds to
save.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tpukit.essentials.display import InvalidValueError
from tpukit.profiling import Tpu

# If the runner has not ended the job at its time limit, the platform ends the machine this many
# seconds later.
BACKSTOP_SECONDS = 600


@dataclass(frozen=True)
class JobOptions:
    """Rare options of a job. If a target does not support an option, `submit` raises an error.

    Attributes:
        zone: the zone of the machine, such as "us-west4-a". gcloud needs it, and skypilot supports
            it; None for any zone.
        region: the region of the machine, such as "us-central1", for vertex and skypilot; None for
            the platform's default.
        project: the Google Cloud project. If it is None, vertex takes GOOGLE_CLOUD_PROJECT or the
            project of the credentials, and gcloud the project of its configuration.
        spot: True for a cheaper machine that the platform may end at any time.
        reservation: the full name of a reservation for vertex, "any" for gcloud; None for none.
        image: the container image; None for a plain image with the caller's version of Python.
        service_account: the account that the job uses on its machine; None for the default.
        torch: the release of torch, which determines torch_xla and libtpu; None for the newest.
            "none" for other frameworks: torch, torch_xla and libtpu are not installed, and tpukit
            is installed without its dependencies.
        grace: the seconds that an interrupted cell has for saving.
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
        folder: the address of the job's folder, "gs://bucket/folder/name" or an absolute path; the
            folder exists.
        tpu: the machine's TPU; None only for `local`.
        timeout: the time limit in seconds from the first start, for all attempts together. The
            runner (`run_notebook`, on the machine) enforces the limit. If the platform supports
            limits, the platform ends the machine somewhat later.
        python: the caller's version of Python, such as "3.12".
        digest: a digest of everything that was sent. It is a label of the platform's job, by which
            tpukit finds the job again if the platform's answer was lost.
        options: see `JobOptions`.
        secrets: for each variable a reference to its value, never the value itself. The runner
            reads "projects/P/secrets/S/versions/V" from Secret Manager (vertex, gcloud). "env:NAME"
            is a variable of the caller's process, which the platform's tool passes on (skypilot,
            local).
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
        """The seconds after which the platform ends the machine, if the runner has not done so."""
        return int(self.timeout) + BACKSTOP_SECONDS

    def command(self, folder: str, *more: str) -> list[str]:
        """Return the start command for a machine that sees the job's folder as `folder`."""
        return ["bash", f"{folder}/run.sh", *more]


def variables_of(plan: JobPlan) -> dict[str, str]:
    """Return the values of all secrets with a reference "env:NAME", from this process.

    Raises:
        ValueError: a variable is not set.
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


# queued: the platform has accepted the job, and there is no machine yet. running: there is a
# machine, or the platform starts the next one. succeeded, failed, cancelled: as the platform
# reports. gone: there is no machine, and the platform starts no other one.
Word = Literal["queued", "running", "succeeded", "failed", "cancelled", "gone"]


@dataclass(frozen=True)
class PlatformState:
    """The platform's report on a job. The state in the job's folder has precedence.

    Attributes:
        word: see `Word`.
        reason: the platform's message, such as a missing quota; "" if there is none.
    """

    word: Word
    reason: str = ""


class Target(Protocol):
    """A platform. `start` returns a small JSON object, the handle, which is stored as handle.json.

    The handle has everything that the other methods need, such as project, region and resource
    name, because another process may call them. All methods raise `CloudError` if the platform does
    not answer.
    """

    name: str

    def start(self, plan: JobPlan) -> dict:
        """Ask for one machine and return its handle, without waiting for the machine.

        If an answer of the platform was lost, a machine with the plan's name and digest may exist
        already. Then the method returns the handle of this machine. It starts another machine if
        the earlier one no longer exists, or if the platform's job is over.
        """

    def state(self, handle: dict) -> PlatformState:
        """Return the state that the platform reports."""

    def logs(self, handle: dict) -> str:
        """Return the platform's own log, or the command that shows it."""

    def cancel(self, handle: dict) -> None:
        """Ask the platform to end the machine; do nothing if it has ended already."""

    def clean_up(self, handle: dict) -> None:
        """Delete everything that costs money; called when all results are in the folder."""
