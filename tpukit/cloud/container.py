"""The start command of a job inside a container, for machines where we start Docker ourselves.

    exec timeout --foreground --kill-after=60 7800 docker run --init ... python:3.12 bash FOLDER/run.sh ADDRESS WORK

`timeout` is the backstop for a runner that does not end. Both `timeout --foreground` and Docker's client pass SIGTERM
on to one process, and `--init` to run.sh alone, so that the kernel can still save when the machine is taken back.
Without the container, SkyPilot would send SIGTERM to the whole process group, and the kernel would be dead.
"""

import shlex

from tpukit.cloud.target import JobPlan


def image_of(plan: JobPlan) -> str:
    """Return the container that the job runs in: the user's, or a plain Python of the caller's version."""
    return plan.options.image or f"python:{plan.python}"


def container_lines(
    plan: JobPlan,
    command: list[str],
    *,
    mounts: list[str],
    seconds: str,
    docker: str = "docker",
) -> str:
    """Return the lines of a shell script that replace the shell by the container.

    Args:
        plan: of the job.
        command: what the container runs.
        mounts: folders of the machine, seen under the same path in the container.
        seconds: until the container is ended, as a shell word.
        docker: the command, such as "sudo docker".
    """
    name = f"tpukit-{plan.name}"
    # Chips need --privileged. The metadata server, which has the credentials, needs the host's network.
    options = ["--rm", "--init", "--privileged", "--network=host", f"--name={name}"]
    options += [f"--volume={folder}:{folder}" for folder in mounts]
    options += [f"--env={variable}" for variable in plan.secrets if "env:" in plan.secrets[variable]]
    image = image_of(plan)
    lines = []
    registry = image.partition("/")[0]
    if registry.endswith((".pkg.dev", "gcr.io")):
        lines.append(f"gcloud auth configure-docker {registry} --quiet")
        lines.append(f"sudo gcloud auth configure-docker {registry} --quiet" if "sudo" in docker else "")
    # A container that lost its client would still hold the chips.
    lines.append(f"{docker} rm --force {name} > /dev/null 2>&1")
    words = shlex.join([*options, image, *command])
    lines.append(f"exec timeout --foreground --kill-after=60 {seconds} {docker} run {words}")
    return "\n".join(line for line in lines if line)
