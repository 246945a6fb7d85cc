"""Google's names of TPU machines, and the shell lines that start the container of a job."""

import shlex

from tpukit.cloud.target import JobPlan
from tpukit.profiling import TPUS, Tpu

# The images of TPU VMs. The other generations have the default of `runtime_version`.
_RUNTIMES = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
# Seconds after SIGTERM until Docker's client is killed, in addition to `JobOptions.grace`: the
# runner copies the last files.
_SECONDS_TO_COPY = 90
_TYPES = {"v5e": "ct5lp-hightpu-{}t", "v6e": "ct6e-standard-{}t"}  # by the number of chips


def _machine_spec(tpu: Tpu) -> dict | None:
    """Return Vertex AI's `machineSpec` for a TPU; None if Vertex AI does not have it."""
    if tpu.generation in _TYPES:
        machine = _TYPES[tpu.generation].format(tpu.chips)
        return {"machineType": machine, "tpuTopology": tpu.topology.partition(":")[2]}
    if tpu.name in ("v2-8", "v3-8"):
        kind = f"TPU_{tpu.generation.upper()}"
        return {"machineType": "cloud-tpu", "acceleratorType": kind, "acceleratorCount": 8}
    return None


# Vertex AI's `machineSpec` of each TPU; there is none for v4 and v5p. All TPUs have one host:
# Google does not document how several hosts of a Vertex AI job find each other.
MACHINE_SPECS = {name: spec for name, tpu in TPUS.items() if (spec := _machine_spec(tpu))}


def runtime_version(tpu: Tpu) -> str:
    """Return the name of the image with which a TPU VM starts."""
    return _RUNTIMES.get(tpu.generation, "tpu-ubuntu2204-base")


def image_of(plan: JobPlan) -> str:
    """Return the user's container image, or a plain image with the caller's version of Python."""
    return plan.options.image or f"python:{plan.python}"


def seconds_to_stop(plan: JobPlan) -> int:
    """Return the seconds after SIGTERM until the container's Docker client is killed."""
    return int(plan.options.grace) + _SECONDS_TO_COPY


def container_lines(
    plan: JobPlan,
    command: list[str],
    *,
    mounts: list[str],
    seconds: str,
    docker: str = "docker",
) -> str:
    """Return the last lines of a shell script, which run a command in a container.

        exec timeout --foreground --kill-after=115 7800 docker run --init ... python:3.12 bash ...

    Args:
        plan: the plan of the job.
        command: the command to run in the container.
        mounts: folders of the machine to mount, at the same path in the container.
        seconds: the time limit of the container in seconds, such as "7800", or a shell variable
            with this limit, such as "$left".
        docker: the Docker command; with sudo, "sudo --preserve-env docker", because the options
            refer to secrets by the names of variables.
    """
    name = f"tpukit-{plan.name}"
    image = image_of(plan)
    # Chips need --privileged. The metadata server, which has the credentials, needs the host's
    # network.
    options = ["--rm", "--init", "--privileged", "--network=host", f"--name={name}"]
    options += [f"--volume={folder}:{folder}" for folder in mounts]
    for variable, reference in plan.secrets.items():
        if reference.startswith("env:"):
            options.append(f"--env={variable}")  # without a value, Docker copies the caller's
    lines = []
    registry = image.partition("/")[0]
    if registry.endswith((".pkg.dev", "gcr.io")):
        login = f"gcloud auth configure-docker {registry} --quiet"
        lines.append(login)
        if "sudo" in docker:
            lines.append(f"sudo {login}")
    # A container of an earlier attempt whose client was killed may still run and use the chips.
    lines.append(f"{docker} rm --force {name} > /dev/null 2>&1")
    words = shlex.join([*options, image, *command])
    # SIGTERM reaches only run.sh, so the notebook's kernel can save: `timeout`, Docker's client and
    # --init each pass the signal to one process. SkyPilot alone would send it to the kernel too.
    # `timeout` also counts --kill-after from a SIGTERM that it passes on.
    limits = f"--kill-after={seconds_to_stop(plan)} {seconds}"
    lines.append(f"exec timeout --foreground {limits} {docker} run {words}")
    return "\n".join(lines)
