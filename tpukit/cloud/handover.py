"""A job as a text for the tools that others use: commands of gcloud, a task of SkyPilot or dstack."""

import json
import os
import re
import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from tpukit.cloud.bundle import Bundle
from tpukit.cloud.slices import runtime_version
from tpukit.essentials.machine import PRICES_OF, Tpu
from tpukit.essentials.show import WrongValue

_IN_TPUKIT = {"tpukit", "torch", "torch_xla", "torchvision"}  # tpukit brings versions of these that work together
_FOR_TPUS = {"tensorflow": "tensorflow-tpu==2.19.1"}  # plain TensorFlow has no TPU; as in examples/


def gcloud(
    bundle: Bundle, place: Tpu, arguments: list[str], *, name: str, zone: str, project: str | None, **_: object
) -> str:
    """Return the commands that create a TPU VM, run a bundle on it over ssh, fetch what it wrote, and delete it."""
    vm = f"{name} --zone {zone}" + (f" --project {project}" if project else "")
    tpu_vm = "gcloud compute tpus tpu-vm"
    # The machine's own Python is 3.10, so the environment brings one.
    setup = " && ".join(["python3 -m pip install -q --user uv", *_setup(bundle, "python3 -m uv", "kit")])
    run = _run("kit/bin/python", f"{name}.zip", arguments, f"$HOME/{name}")
    return "\n".join(
        [
            f"# {_cost(place)}, from `create` until `delete`",
            f"{tpu_vm} create {vm} --accelerator-type {place.accelerator_type} --version {runtime_version(place)}",
            f"{tpu_vm} scp {name}.zip {name}: {vm.partition(' ')[2]} --worker=all",
            f"{tpu_vm} ssh {vm} --worker=all --command {shlex.quote(f'{setup} && {run}')}",
            f"{tpu_vm} scp --recurse {name}:{name} . {vm.partition(' ')[2]}",
            f"{tpu_vm} delete {vm}",
            "",
        ]
    )


def skypilot(
    bundle: Bundle, place: Tpu, arguments: list[str], *, name: str, zone: str | None, bucket: str | None, **_: object
) -> str:
    """Return a task for `sky launch`; its TPU VM is deleted ten minutes after the end, with all but the bucket."""
    bucket, _, inside = (bucket or "").removeprefix("gs://").strip("/").partition("/")
    folder = "/".join(filter(None, ("/bucket", inside, name))) if bucket else f"$HOME/{name}"
    infra = f"gcp/{zone.rpartition('-')[0]}/{zone}" if zone else "gcp"
    setup = ["python3 -m pip install -q uv", *_setup(bundle, "python3 -m uv", "~/kit")]
    run = _run("~/kit/bin/python", f"~/{name}.zip", arguments, folder)
    return "\n".join(
        [
            f"# {_cost(place)}",
            f"name: {json.dumps(name)}",
            "resources:",
            f"  infra: {infra}",
            f"  accelerators: tpu-{place.accelerator_type}",
            "  accelerator_args:",
            f"    runtime_version: {runtime_version(place)}  # SkyPilot's own choice for a v5e is that of a v5p",
            "  autostop:",
            "    idle_minutes: 10",
            "    down: true",
            "file_mounts:",
            f"  ~/{name}.zip: ./{name}.zip",
            *([f"  /bucket: {{source: gs://{bucket}, mode: MOUNT}}"] if bucket else []),
            *_block("setup", setup),
            *_block("run", [run]),
            "",
        ]
    )


def dstack(bundle: Bundle, place: Tpu, arguments: list[str], *, name: str, **_: object) -> str:
    """Return a task for `dstack apply`."""
    commands = [*_setup(bundle, "uv", "kit"), _run("kit/bin/python", f"{name}.zip", arguments, f"$PWD/{name}")]
    return "\n".join(
        [
            f"# {_cost(place)}",
            "type: task",
            f"name: {json.dumps(name)}",
            'python: "3.12"',
            "files:",
            f"  - {name}.zip",
            "commands:",
            *[f"  - {json.dumps(command)}" for command in commands],
            "backends: [gcp]",
            "resources:",
            f"  gpu: tpu:{place.accelerator_type}",
            "",
        ]
    )


TARGETS = {"gcloud": gcloud, "skypilot": skypilot, "dstack": dstack}
_NAME = "[a-z]([a-z0-9-]{0,38}[a-z0-9])?"  # what all of them take


def check_name(name: str) -> str:
    """Return a name that a TPU VM, SkyPilot and dstack take; ValueError for any other."""
    if not re.fullmatch(_NAME, name):
        raise WrongValue(
            f"{name!r} is no name of a job",
            found="lower-case letters, digits, hyphens; a letter first; 40 at most",
            fix="--name train-1",
        )
    return name


def _run(python: str, file: str, arguments: list[str], folder: str) -> str:
    """Return the line that runs a bundle, which writes where Vertex AI's variables say, here as there."""
    where = f"AIP_CHECKPOINT_DIR={folder}/checkpoints AIP_MODEL_DIR={folder}/model"
    return f"PJRT_DEVICE=TPU {where} {python} {file} {shlex.join(arguments)}".rstrip()


def _setup(bundle: Bundle, uv: str, environment: str) -> list[str]:
    """Return the commands that make the environment a bundle needs."""
    packages = _packages(bundle)
    install = f"{uv} pip install -q --python {environment}/bin/python --torch-backend cpu"
    return [
        f"{uv} venv -q --python 3.12 {environment}",
        *([f"{install} {' '.join(map(shlex.quote, packages))}"] if packages else []),
    ]


def _packages(bundle: Bundle) -> list[str]:
    """Return what to install; a module's package may have another name, which this machine knows if it has it."""
    known = metadata.packages_distributions()
    ours = [_this_kit()] if bundle.launches or "tpukit" in bundle.needs else []
    others = [name for name in bundle.needs if not ours or name not in _IN_TPUKIT]
    return [*ours, *(_FOR_TPUS.get(name) or known.get(name, [name])[0] for name in others)]


def _this_kit() -> str:
    """Return what installs this kit where a job runs: from TPUKIT_SOURCE, else from the origin of its clone.

    Never by its name alone: in an index of packages that name may be anybody's.
    """
    origin = ["git", "-C", str(Path(__file__).parents[2]), "config", "remote.origin.url"]
    clone = (Path(__file__).parents[2] / "pyproject.toml").is_file() and shutil.which("git")
    source = os.environ.get("TPUKIT_SOURCE", "")
    if "://" not in source and clone:
        source = subprocess.run(origin, capture_output=True, text=True).stdout.strip()
    if not re.match(r"(git\+)?https://", source):
        raise WrongValue(
            "the machine that runs the job installs tpukit, and no address of it is known here",
            found=f"TPUKIT_SOURCE={os.environ.get('TPUKIT_SOURCE', '')}, and no clone with an origin at https://",
            fix="TPUKIT_SOURCE=https://... before the command: a git repository, or a wheel, that the machine can read",
        )
    source = re.sub("//[^/@]*@", "//", source)  # what stands there may be a token
    return f"tpukit[tpu] @ {'' if '.whl' in source or source.startswith('git+') else 'git+'}{source}"


def _block(key: str, lines: list[str]) -> list[str]:
    return [f"{key}: |", *(f"  {line}" for line in lines)]


def _cost(place: Tpu) -> str:
    return f"about ${place.dollars:.2f} an hour ({PRICES_OF})"
