"""Run jobs as managed jobs of SkyPilot.

SkyPilot's controller starts another TPU VM when Google ends a spot VM.

    file_mounts:  {/bucket: {source: gs://my-bucket, mode: MOUNT}}
    run:          exec timeout ... docker run ... bash /bucket/jobs/train-1/run.sh

SkyPilot deletes the machine when the job is over. It does not support a time limit for a VM, so the
runner and `timeout` end the job.
"""

import json
import re
import tempfile
from pathlib import Path

from tpukit.cloud.answers import CloudError
from tpukit.cloud.external_tools import run_tool
from tpukit.cloud.machines import container_lines, runtime_version
from tpukit.cloud.target import JobPlan, PlatformState, Word, variables_of

_TRY_AGAIN = 75  # the runner's exit code after an interruption
_SECONDS_TO_LAUNCH = 1800  # a timeout; the first launch also creates SkyPilot's controller
# The word for each state of `sky jobs queue`.
_WORDS: dict[str, Word] = {
    "PENDING": "queued",
    "SUBMITTED": "queued",
    "STARTING": "queued",
    "RUNNING": "running",
    "WINDING_DOWN": "running",
    "RECOVERING": "running",
    "CANCELLING": "running",
    "SUCCEEDED": "succeeded",
    "CANCELLED": "cancelled",
    "FAILED": "failed",
    "FAILED_SETUP": "failed",
    "FAILED_PRECHECKS": "failed",
    "FAILED_NO_RESOURCE": "failed",
    "FAILED_CONTROLLER": "failed",
}


class SkyPilotTarget:
    """Managed jobs, through the command `sky jobs`."""

    name = "skypilot"

    def start(self, plan: JobPlan) -> dict:
        """Submit the managed job if no job of this name and digest is queued or running."""
        handle = {"name": job_name(plan)}
        if self.state(handle).word in ("queued", "running"):
            return handle
        words = ["sky", "jobs", "launch", "--detach-run", "--yes", f"--name={handle['name']}"]
        values = variables_of(plan)
        words += [f"--secret={name}" for name in values]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "job.yaml")
            file.write_text(job_yaml(plan))
            try:
                run_tool([*words, str(file)], seconds=_SECONDS_TO_LAUNCH, environ=values)
            except CloudError as error:
                # Without an answer, the job may exist, so look for it.
                if error.answered or self.state(handle).word not in ("queued", "running"):
                    raise
        return handle

    def state(self, handle: dict) -> PlatformState:
        """Return the state of the newest managed job with this name."""
        try:
            answer = run_tool(["sky", "jobs", "queue", "--refresh", "--all", "--output=json"])
        except CloudError as error:
            if error.status != 404:
                raise
            answer = "[]"  # SkyPilot has not created its controller yet
        # SkyPilot may print notices before the list. Their brackets, also those of a terminal's
        # colours, are not followed by "{" or "]".
        begin = re.search(r"\[(?=\s*[\]{])", answer)
        listed = answer[begin.start() :] if begin else answer
        records, _ = json.JSONDecoder().raw_decode(listed or "[]")
        named = [record for record in records if record.get("job_name") == handle["name"]]
        if not named:
            return PlatformState("gone", "SkyPilot has no job of this name")
        newest = max(named, key=lambda record: record["job_id"])
        status = str(newest.get("status"))
        reason = " ".join([status, newest.get("failure_reason") or newest.get("details") or ""])
        return PlatformState(_WORDS.get(status, "running"), reason.strip())

    def logs(self, handle: dict) -> str:
        try:
            return run_tool(["sky", "jobs", "logs", f"--name={handle['name']}", "--no-follow"])
        except CloudError as error:
            # `sky` exits with the code of the job, 100 if it failed, so an error is not unusual.
            # The log is in the error's message.
            return f"{error.found}\n`sky jobs logs --name {handle['name']} --no-follow` shows all"

    def cancel(self, handle: dict) -> None:
        if self.state(handle).word in ("queued", "running"):
            run_tool(["sky", "jobs", "cancel", "--yes", f"--name={handle['name']}"])

    def clean_up(self, handle: dict) -> None:
        """Do nothing: SkyPilot deletes the machine when the job is over."""


def job_name(plan: JobPlan) -> str:
    """Return the job's name for SkyPilot: the name in the plan, and a part of the digest.

    On other platforms, a label of the job has the digest. SkyPilot does not support labels.
    """
    return f"{plan.name}-{plan.digest[:8]}"


def job_yaml(plan: JobPlan) -> str:
    """Return the contents of the YAML file for `sky jobs launch`."""
    import yaml

    bucket, _, inside = plan.folder.removeprefix("gs://").partition("/")
    container = container_lines(
        plan,
        plan.command(f"/bucket/{inside}"),
        mounts=["/bucket"],
        seconds=str(plan.platform_timeout),
        docker="sudo --preserve-env docker",
    )
    options = plan.options
    resources = {
        "infra": _infra(options.region, options.zone),
        "accelerators": f"tpu-{plan.tpu.accelerator_type}",
        # SkyPilot's default for a v5e is the runtime of a v5p.
        "accelerator_args": {"runtime_version": runtime_version(plan.tpu)},
        "use_spot": options.spot,
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [_TRY_AGAIN]},
    }
    task = {
        "name": job_name(plan),
        "resources": resources,
        "file_mounts": {"/bucket": {"source": f"gs://{bucket}", "mode": "MOUNT"}},
        "run": container,
    }
    if plan.secrets:
        # `start` passes the values by --secret, so they are never in this file.
        task["secrets"] = dict.fromkeys(plan.secrets)
    return yaml.safe_dump(task, sort_keys=False, width=10**6)


def _infra(region: str | None, zone: str | None) -> str:
    if zone:
        return f"gcp/{zone.rpartition('-')[0]}/{zone}"
    if region:
        return f"gcp/{region}"
    return "gcp"
