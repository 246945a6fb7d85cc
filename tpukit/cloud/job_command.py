"""`python -m tpukit job`: a trainer as one file, and what a tool of your choice takes to run it on a TPU."""

import argparse
import json
import os
import shlex
import sys

from tpukit.cloud.bundle import make_bundle
from tpukit.cloud.handover import TARGETS, check_name, check_place
from tpukit.cloud.vertex import Job, arguments, find_bucket, job, new_name
from tpukit.essentials.show import WrongValue
from tpukit.measure import find_tpu

_HINTS = {
    "gcloud": "one line after the other",
    "skypilot": "sky launch job.yaml",
    "dstack": "dstack apply -f .dstack.yml; what it writes is lost with its machine, unless you add a volume",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("trainer", help="train.py:train, a worker function; or train.py, a script of any framework")
    parser.add_argument("--target", required=True, choices=[*TARGETS, "vertex"], help="the tool that shall run it")
    parser.add_argument("--chip", default="v5e-8", help="such as v5e-1, v5e-8, v6e-8, v3-8 (default: v5e-8)")
    parser.add_argument("--args", default="[]", metavar="JSON", help="what the function takes, as a list: '[3, 0.1]'")
    parser.add_argument("--name", help="with which the job's begins (default: the function's); the time is added")
    parser.add_argument("--continue", dest="continues", metavar="NAME", help="go on from the checkpoints of that job")
    parser.add_argument("--needs", action="append", default=[], metavar="MODULE=PACKAGE", help="what brings a module")
    parser.add_argument("--zone", help="gcloud, which needs it, and skypilot: such as us-west4-a")
    parser.add_argument("--project", help="the Google Cloud project")
    parser.add_argument("--bucket", help="vertex, which needs it, and skypilot: where it writes, gs://bucket/folder")
    of_vertex = parser.add_argument_group("vertex")
    of_vertex.add_argument("--image", help="the container, which has torch_xla, libtpu and tpukit")
    of_vertex.add_argument("--region", default="us-central1", help="(default: us-central1)")
    of_vertex.add_argument("--service-account", help="as which it runs")
    of_vertex.add_argument("--timeout", default="1d", help="after which it is ended (default: 1d)")


def parse_needs(pairs: list[str]) -> dict[str, str]:
    """Return what `--needs` names, by module; ValueError where one has no "="."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise WrongValue(f"--needs is a module and a package, got {wrong[0]!r}", fix="--needs cv2=opencv-python")
    return dict(pair.split("=", 1) for pair in pairs)


def run(given: argparse.Namespace) -> int:
    """Write the trainer into NAME.zip and print the text: on standard output what the tool reads, the rest beside."""
    args, needs = given.args, parse_needs(given.needs)
    for what in ("zone", "region", "project"):
        check_place(what, getattr(given, what))
    bucket = given.bucket and find_bucket(given.bucket)
    if given.continues and not (bucket and given.target in ("vertex", "skypilot")):
        raise WrongValue("--continue goes on from checkpoints in a bucket", fix="--bucket, with vertex or skypilot")
    if given.target == "vertex":
        made = _of_vertex(given, args, needs)
        bundle, name = made.bundle, made.request["displayName"]
        text, hint = _for_vertex(given, made)
    else:
        if given.target == "gcloud" and not given.zone:
            raise WrongValue("gcloud needs the zone of the TPU VM", fix="--zone us-west4-a, or another with quota")
        place, bundle = find_tpu(given.chip), make_bundle(given.trainer, needs=needs)
        name = check_name(given.continues or new_name(check_name(given.name or bundle.name.lower())))
        where = {"name": name, "zone": given.zone, "project": given.project, "bucket": bucket}
        text = TARGETS[given.target](bundle, place, arguments(bundle, args), continues=bool(given.continues), **where)
        hint = _HINTS[given.target]
        if given.target == "skypilot" and not bucket:
            hint += "; its machine is deleted with all that it wrote: --bucket gs://my-bucket keeps that"
    bundle.save(f"{name}.zip")
    print(text, end="")
    words = shlex.join(arguments(bundle, args))
    print(f"wrote {name}.zip ({bundle.tried}); rehearse it here: python {name}.zip {words}".rstrip(), file=sys.stderr)
    print(f"then: {hint}", file=sys.stderr)
    return 0


def _of_vertex(given: argparse.Namespace, args: list, needs: dict[str, str]) -> Job:
    missing = [f"--{one}" for one in ("image", "bucket") if not getattr(given, one)]
    if missing:
        fix = "--image us-docker.pkg.dev/my-project/kit/trainer:1 --bucket gs://my-bucket/runs"
        raise WrongValue(f"vertex needs {' and '.join(missing)}", fix=fix)
    settings = ("image", "bucket", "service_account", "project", "region", "timeout", "continues")
    return job(
        given.trainer,
        given.chip,
        args=args,
        name=new_name(check_name(given.name)) if given.name and not given.continues else None,
        needs=needs,
        **{name: getattr(given, name) for name in settings},
    )


def _for_vertex(given: argparse.Namespace, made: Job) -> tuple[str, str]:
    print(made, file=sys.stderr)
    project = given.project or check_place("project", os.environ.get("GOOGLE_CLOUD_PROJECT")) or "PROJECT"
    jobs = f"https://{given.region}-aiplatform.googleapis.com/v1/projects/{project}/locations/{given.region}/customJobs"
    token = '-H "Authorization: Bearer $(gcloud auth print-access-token)" -H "Content-Type: application/json"'
    once = "" if given.continues else "--if-generation-match=0 "  # another job's file is never replaced
    upload = f"gcloud storage cp {once}{made.request['displayName']}.zip {made.file}"
    return json.dumps(made.request, indent=2) + "\n", f"{upload} && curl {token} -d @job.json {jobs}"
