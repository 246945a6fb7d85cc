"""Run jobs on a TPU VM of the user's project, which `gcloud` creates and deletes.

    your machine                       the TPU VM
    queued-resources create  ---->     boot.sh, at every boot, as root: starts a unit of systemd
    (returns; no connection            attempt.sh: copies the job's folder, runs the container
    remains)                           stop.sh, after each attempt: if result.json is in the
                                       bucket, deletes the VM

The runner compares all results with the bucket before it writes result.json, and the VM is deleted
only after that. If the runner dies, systemd starts it again until the time limit. After the time
limit, stop.sh copies the working directory once more, and deletes the VM only if that copy
succeeds.
"""

import json
import shlex
import tempfile
from pathlib import Path

from tpukit.cloud.answers import CloudError
from tpukit.cloud.external_tools import run_tool
from tpukit.cloud.machines import container_lines, runtime_version, seconds_to_stop
from tpukit.cloud.target import JobPlan, PlatformState, Word

# The name of a label of the VM. Its value is the digest of the job, so that a second `start` finds
# the VM of the first.
_LABEL = "tpukit"
# The states of a queued resource in the Cloud TPU API v2.
_WORDS: dict[str, Word] = {
    "CREATING": "queued",
    "ACCEPTED": "queued",
    "WAITING_FOR_RESOURCES": "queued",
    "PROVISIONING": "queued",
    "ACTIVE": "running",
    "FAILED": "failed",
    "SUSPENDING": "gone",  # a spot VM that Google has ended
    "SUSPENDED": "gone",
    "DELETING": "gone",
}


class GcloudTarget:
    """TPU VMs through `gcloud compute tpus queued-resources`."""

    name = "gcloud"

    def start(self, plan: JobPlan) -> dict:
        project = plan.options.project or run_tool(["gcloud", "config", "get", "project"]).strip()
        if not project:
            raise CloudError(
                "the project is not known",
                found="no project=, and none in the configuration of gcloud",
                fix='JobOptions(project="my-project"), or `gcloud config set project my-project`',
            )
        handle = {"name": plan.name, "zone": plan.options.zone, "project": project}
        # A request to create the TPU VM may have succeeded although its answer was lost. So this
        # looks first, and uses a TPU VM that belongs to this job.
        there = self._describe(handle)
        if there is not None:
            if _label_of(there) != plan.digest[:32]:
                raise CloudError(
                    f"another TPU VM is named {plan.name} in {handle['zone']}",
                    found="it does not belong to this job",
                    fix="give this job another name",
                    status=409,
                )
            if _word(there) in ("queued", "running"):
                return handle
            self.clean_up(handle)  # it has ended, and its name must be free for the new one
        self._create(plan, handle)
        price = f"about ${plan.tpu.dollars:.2f} per hour"
        print(
            f"the TPU VM {plan.name} costs {price} until it deletes itself, "
            "after its results are copied\n"
            f"  to delete it yourself: {shlex.join(_delete(handle))}",
            flush=True,
        )
        return handle

    def state(self, handle: dict) -> PlatformState:
        there = self._describe(handle)
        if there is None:
            return PlatformState("gone", "the TPU VM is deleted")
        state = there.get("state", {})
        error = state.get("failedData", {}).get("error", {}).get("message", "")
        reason = " ".join([state.get("state", "no state"), error]).strip()
        return PlatformState(_word(there), reason)

    def logs(self, handle: dict) -> str:
        unit = f"tpukit-{handle['name']}"
        words = _words("ssh", handle)
        command = f"journalctl -u {unit} -u google-startup-scripts --no-pager -n 200"
        return shlex.join([*words, "--worker=0", f"--command=sudo {command}"])

    def cancel(self, handle: dict) -> None:
        """Delete the request if it is still queued.

        `Job.cancel` has written the file `cancel` into the job's folder. If the VM is running, it
        finds this file, ends the job and deletes itself.
        """
        if self.state(handle).word == "queued":
            self.clean_up(handle)

    def clean_up(self, handle: dict) -> None:
        try:
            run_tool(_delete(handle))
        except CloudError as error:
            if error.status != 404:
                raise

    def _describe(self, handle: dict) -> dict | None:
        try:
            answer = run_tool([*_words("describe", handle), "--format=json"])
        except CloudError as error:
            if error.status == 404:
                return None
            raise
        return json.loads(answer)

    def _create(self, plan: JobPlan, handle: dict) -> None:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "boot.sh")
            script.write_text(boot_script(plan, handle))
            try:
                run_tool(
                    [*create_words(plan, handle), f"--metadata-from-file=startup-script={script}"]
                )
            except CloudError as error:
                # Without an answer, the VM may exist and cost money, so look for it.
                if error.answered or self._describe(handle) is None:
                    raise


def create_words(plan: JobPlan, handle: dict) -> list[str]:
    """Return the command that creates the TPU VM, without its startup script."""
    options = plan.options
    words = [
        *_words("create", handle),
        f"--node-id={plan.name}",
        f"--accelerator-type={plan.tpu.accelerator_type}",
        f"--runtime-version={runtime_version(plan.tpu)}",
        "--scopes=cloud-platform",
        f"--labels={_LABEL}={plan.digest[:32]}",
    ]
    if options.spot:
        words.append("--spot")
    if options.reservation:
        words.append("--reserved")
    if options.service_account:
        words.append(f"--service-account={options.service_account}")
    return words


def boot_script(plan: JobPlan, handle: dict) -> str:
    """Return the startup script of the TPU VM: the template `_BOOT`, filled in for the job."""
    home = f"/var/tpukit/{plan.name}"
    job = f"{home}/job"
    container = container_lines(
        plan,
        [*plan.command(job), plan.folder, f"{home}/work"],
        mounts=[home],
        seconds="$left",  # a variable of attempt.sh, see _BOOT
    )
    return _BOOT.format(
        name=plan.name,
        home=home,
        job=job,
        work=f"{home}/work",
        address=plan.folder,
        seconds=plan.platform_timeout,
        seconds_to_stop=seconds_to_stop(plan),
        container=container,
        delete=shlex.join([*_delete(handle), "--async"]),
    )


def _words(command: str, handle: dict) -> list[str]:
    words = ["gcloud", "compute", "tpus", "queued-resources", command, handle["name"]]
    return [*words, f"--zone={handle['zone']}", f"--project={handle['project']}", "--quiet"]


def _delete(handle: dict) -> list[str]:
    # --force deletes the VM together with the request.
    return [*_words("delete", handle), "--force"]


def _word(there: dict) -> Word:
    return _WORDS.get(there.get("state", {}).get("state"), "running")


def _label_of(there: dict) -> str | None:
    specs = there.get("tpu", {}).get("nodeSpec") or [{}]
    return specs[0].get("node", {}).get("labels", {}).get(_LABEL)


# A template for str.format, so braces of the shell are doubled.
_BOOT = """#!/bin/bash
# The startup script of the job {name}. Google runs it at every boot.
# It starts a unit of systemd and ends.
export PATH="$PATH:/snap/bin"
mkdir -p {home}
# The time limit counts from the first start, also after a reboot.
[ -s {home}/deadline ] || echo $(($(date +%s) + {seconds})) > {home}/deadline

cat > {home}/attempt.sh <<'ATTEMPT'
export PATH="$PATH:/snap/bin"
left=$(($(cat {home}/deadline) - $(date +%s)))
[ "$left" -gt 0 ] || exit 1  # `timeout 0` would be no limit
mkdir -p {job} {work}
gcloud storage cp {address}/run.sh {address}/in {job}/ --recursive || exit 75
gcloud storage cp {address}/result.json {job}/ 2> /dev/null
{container}
ATTEMPT

cat > {home}/stop.sh <<'STOP'
export PATH="$PATH:/snap/bin"
there() {{ gcloud storage ls {address}/result.json > /dev/null 2>&1; }}
# run.sh leaves the reason of a failed installation here.
if [ -e {job}/result.json ] && ! there; then
  [ ! -d {job}/log ] || gcloud storage cp {job}/log {address}/ --recursive --no-clobber || exit
  gcloud storage cp {job}/result.json {address}/ --no-clobber || exit
fi
# The runner writes result.json last, when all files are in the bucket. Nothing is deleted before.
if there; then
  {delete}
elif [ "$(date +%s)" -ge "$(cat {home}/deadline)" ]; then
  # There is no result. Without this copy the VM stays, and its log has the reason.
  [ ! -d {work}/run ] ||
    gcloud storage cp {work}/run {address}/left-on-the-machine/ --recursive || exit
  {delete}
fi
STOP

cat > /run/systemd/system/tpukit-{name}.service <<'UNIT'
[Unit]
Description=tpukit job {name}
After=network-online.target docker.service
StartLimitIntervalSec=0
[Service]
ExecStart=/bin/bash {home}/attempt.sh
ExecStopPost=/bin/bash {home}/stop.sh
# SIGTERM reaches the runner only: a kernel that gets it is dead before a cell can save.
KillMode=mixed
TimeoutStopSec={seconds_to_stop}
Restart=always
RestartSec=30
UNIT
systemctl daemon-reload
systemctl start --no-block tpukit-{name}
"""
