"""A job as a text for the tools that others use: commands of gcloud, a task of SkyPilot or dstack."""

import re
import shlex
import sys

from tpukit.cloud.bundle import Bundle
from tpukit.cloud.kit_wheel import NAME
from tpukit.cloud.slices import runtime_version
from tpukit.essentials.machine import PRICES_OF, RELEASES
from tpukit.essentials.show import WrongValue
from tpukit.measure import Tpu


def gcloud(
    bundle: Bundle, place: Tpu, arguments: list[str], *, name: str, zone: str, project: str | None, **_: object
) -> str:
    """Return the commands that create a TPU VM, run a bundle on it over ssh, fetch what it wrote, and delete it."""
    vm = f"{name} --zone {zone}" + (f" --project {project}" if project else "")
    tpu_vm = "gcloud compute tpus tpu-vm"
    # The machine's own Python is 3.10, so the environment brings one.
    setup = " && ".join(["python3 -m pip install -q --user uv", *_setup(bundle, "python3 -m uv", "kit", f"{name}.zip")])
    run = _run("kit/bin/python", f"{name}.zip", arguments, name, f"$HOME/{name}")
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
    bundle: Bundle,
    place: Tpu,
    arguments: list[str],
    *,
    name: str,
    zone: str | None,
    bucket: str | None,
    continues: bool = False,
    **_: object,
) -> str:
    """Return a task for `sky launch`; its TPU VM is deleted ten minutes after the end, with all but the bucket."""
    bucket, _, inside = (bucket or "").removeprefix("gs://").strip("/").partition("/")
    folder = "/".join(filter(None, ("/bucket", inside, name))) if bucket else f"$HOME/{name}"
    setup = ["python3 -m pip install -q uv", *_setup(bundle, "python3 -m uv", "~/kit", f"~/{name}.zip")]
    mounts: dict[str, object] = {f"~/{name}.zip": f"./{name}.zip"}
    if bucket:
        mounts["/bucket"] = {"source": f"gs://{bucket}", "mode": "MOUNT"}
    task = {
        "name": name,
        "resources": {
            "infra": f"gcp/{zone.rpartition('-')[0]}/{zone}" if zone else "gcp",
            "accelerators": f"tpu-{place.accelerator_type}",
            # SkyPilot's own choice for a v5e is that of a v5p.
            "accelerator_args": {"runtime_version": runtime_version(place)},
            "autostop": {"idle_minutes": 10, "down": True},
        },
        "file_mounts": mounts,
        "setup": "\n".join(setup),
        "run": _run("~/kit/bin/python", f"~/{name}.zip", arguments, name, folder, continues),
    }
    return _yaml(place, task)


def dstack(bundle: Bundle, place: Tpu, arguments: list[str], *, name: str, **_: object) -> str:
    """Return a task for `dstack apply`."""
    run = _run("kit/bin/python", f"{name}.zip", arguments, name, f"$PWD/{name}")
    task = {
        "type": "task",
        "name": name,
        "python": "3.12",  # of the image; the environment brings its own
        "files": [f"{name}.zip"],
        "commands": [*_setup(bundle, "uv", "kit", f"{name}.zip"), run],
        "backends": ["gcp"],
        "resources": {"gpu": f"tpu:{place.accelerator_type}"},
    }
    return _yaml(place, task)


TARGETS = {"gcloud": gcloud, "skypilot": skypilot, "dstack": dstack}
_NAME = "[a-z]([a-z0-9-]{0,38}[a-z0-9])?"  # what all of them take
_REGION = "[a-z]+(-[a-z]+)+[0-9]+"
_PLACES = {
    "zone": (f"{_REGION}-[a-z0-9]+", "us-west4-a"),
    "region": (_REGION, "us-central1"),
    "project": (r"([a-z0-9.-]+:)?[a-z0-9]([a-z0-9-]*[a-z0-9])?", "my-project"),
}


def check_name(name: str) -> str:
    """Return a name that a TPU VM, SkyPilot and dstack take; ValueError for any other."""
    if not re.fullmatch(_NAME, name):
        raise WrongValue(
            f"{name!r} is no name of a job",
            found="lower-case letters, digits, hyphens; a letter first; 40 at most",
            fix="--name train-1",
        )
    return name


def check_place(what: str, given: str | None) -> str | None:
    """Return a zone, region or project that Google Cloud may have: it stands in commands; ValueError for another."""
    pattern, example = _PLACES[what]
    if given is not None and not re.fullmatch(pattern, given):
        raise WrongValue(f"{given!r} is no {what} of Google Cloud", fix=f"{what} {example}, or another with quota")
    return given


def _run(python: str, file: str, arguments: list[str], name: str, folder: str, continues: bool = False) -> str:
    """Return the line that runs a bundle, which writes where Vertex AI's variables say, here as there."""
    where = f"AIP_CHECKPOINT_DIR={folder}/checkpoints AIP_MODEL_DIR={folder}/model TPUKIT_JOB={name}"
    where += " TPUKIT_CONTINUE=1" if continues else ""
    return f"PJRT_DEVICE=TPU {where} {python} {file} {shlex.join(arguments)}".rstrip()


def _setup(bundle: Bundle, uv: str, environment: str, file: str) -> list[str]:
    """Return the commands that make the environment a bundle needs: this machine's Python, its versions, this kit."""
    packages = [shlex.quote(one) for one in _packages(bundle)]
    lines = [f"{uv} venv -q --python {'{}.{}'.format(*sys.version_info)} {environment}"]
    if NAME in bundle.contents:
        lines.append(f"{environment}/bin/python -m zipfile -e {file} {environment}/bundle")
        packages.insert(0, f"{environment}/bundle/{shlex.quote(f'{NAME}[tpu]')}")
    if packages:
        lines.append(f"{uv} pip install -q --python {environment}/bin/python --torch-backend cpu {' '.join(packages)}")
    return lines


def _packages(bundle: Bundle) -> list[str]:
    """Return what to install: what the bundle needs, and with torch the torch_xla that works with it."""
    needs = list(bundle.needs)
    (torch, *_) = [*(one.partition("==")[2] for one in needs if one.startswith("torch==")), ""]
    if bundle.launches and torch and not any(re.match("torch.xla", one) for one in needs):
        if torch not in RELEASES:
            raise WrongValue(
                f"no torch_xla works with torch {torch}, which this machine has",
                found=f"torch_xla works with torch {' and '.join(RELEASES)}",
                fix=f"--needs torch=torch=={list(RELEASES)[-1]}, and try the trainer with that first",
            )
        needs.append(f"torch_xla=={RELEASES[torch].torch_xla[-1]}")
    return needs


def _yaml(place: Tpu, task: dict) -> str:
    import yaml

    return f"# {_cost(place)}\n" + yaml.safe_dump(task, sort_keys=False, width=10**6)


def _cost(place: Tpu) -> str:
    return f"about ${place.dollars:.2f} an hour ({PRICES_OF})"
