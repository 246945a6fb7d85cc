"""Name the TPUs of a host as Google does, and start the container of a job."""

import shlex

from tpukit.cloud.target import JobPlan
from tpukit.profiling import TPUS, Tpu

# Images of TPU VMs. The other generations share the default of `runtime_version`.
_RUNTIMES = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
_TYPES = {"v5e": "ct5lp-hightpu-{}t", "v6e": "ct6e-standard-{}t"}


def _machine_spec(tpu: Tpu) -> dict | None:
    if tpu.generation in _TYPES:
        machine = _TYPES[tpu.generation].format(tpu.chips)
        return {"machineType": machine, "tpuTopology": tpu.topology.partition(":")[2]}
    if tpu.name in ("v2-8", "v3-8"):
        kind = f"TPU_{tpu.generation.upper()}"
        return {"machineType": "cloud-tpu", "acceleratorType": kind, "acceleratorCount": 8}
    return None


# Vertex AI's `machineSpec`; it has none for a v4 or v5p. Only TPUs of one host: no page shows
# how several hosts of a Vertex AI job find each other.
MACHINE_SPECS = {name: spec for name, tpu in TPUS.items() if (spec := _machine_spec(tpu))}


def runtime_version(tpu: Tpu) -> str:
    """Return the image that a TPU VM starts with; SkyPilot's default for a v5e is that of a v5p."""
    return _RUNTIMES.get(tpu.generation, "tpu-ubuntu2204-base")


def image_of(plan: JobPlan) -> str:
    """Return the user's container, or a plain Python of the caller's version."""
    return plan.options.image or f"python:{plan.python}"


def container_lines(
    plan: JobPlan,
    command: list[str],
    *,
    mounts: list[str],
    seconds: str,
    docker: str = "docker",
) -> str:
    """Return the lines of a shell script that replace the shell with the container.

        exec timeout --foreground --kill-after=60 7800 docker run --init ... python:3.12 bash ...

    `timeout` is the backstop for a runner that does not end. It and Docker's client pass SIGTERM on
    to one process, and `--init` to run.sh alone, so that the kernel can save. Without the
    container, SkyPilot would send SIGTERM to the kernel too.

    Args:
        plan: the plan of the job.
        command: the command of the container.
        mounts: folders of the machine, seen under the same path in the container.
        seconds: until the container is ended, as a shell word.
        docker: the command, such as "sudo docker".
    """
    name = f"tpukit-{plan.name}"
    image = image_of(plan)
    # Chips need --privileged. The metadata server, which has the credentials, needs the host's
    # network.
    options = ["--rm", "--init", "--privileged", "--network=host", f"--name={name}"]
    options += [f"--volume={folder}:{folder}" for folder in mounts]
    for variable, reference in plan.secrets.items():
        if reference.startswith("env:"):
            options.append(f"--env={variable}")  # Docker copies the caller's value
    lines = []
    registry = image.partition("/")[0]
    if registry.endswith((".pkg.dev", "gcr.io")):
        login = f"gcloud auth configure-docker {registry} --quiet"
        lines.append(login)
        if "sudo" in docker:
            lines.append(f"sudo {login}")
    # A container that lost its client would still hold the chips.
    lines.append(f"{docker} rm --force {name} > /dev/null 2>&1")
    words = shlex.join([*options, image, *command])
    lines.append(f"exec timeout --foreground --kill-after=60 {seconds} {docker} run {words}")
    return "\n".join(lines)
