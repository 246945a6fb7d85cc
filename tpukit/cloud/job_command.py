"""`python -m tpukit job`: a trainer as one file, and what a tool of your choice takes to run it on a TPU."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from tpukit.cloud.answers import CloudFailed
from tpukit.cloud.bundle import make_bundle
from tpukit.cloud.handover import TARGETS, check_name
from tpukit.cloud.vertex import arguments, find_bucket, job
from tpukit.essentials.machine import find_tpu
from tpukit.essentials.show import WrongValue

TOLD = (CloudFailed,)  # errors whose text is all that is shown
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
    parser.add_argument("--name", help="of the job (default: the function's)")
    parser.add_argument("--zone", help="gcloud, which needs it, and skypilot: such as us-west4-a")
    parser.add_argument("--project", help="the Google Cloud project")
    parser.add_argument("--bucket", help="vertex, which needs it, and skypilot: where it writes, gs://bucket/folder")
    of_vertex = parser.add_argument_group("vertex")
    of_vertex.add_argument("--image", help="the container, which has torch_xla, libtpu and tpukit")
    of_vertex.add_argument("--region", default="us-central1", help="(default: us-central1)")
    of_vertex.add_argument("--service-account", help="as which it runs")
    of_vertex.add_argument("--timeout", default="1d", help="after which it is ended (default: 1d)")


def parse_args(text: str) -> list:
    """Return what a worker function takes, from the text of `--args`; ValueError where that is no list in JSON."""
    try:
        args = json.loads(text)
    except ValueError:
        args = None
    if not isinstance(args, list):
        raise WrongValue(f"--args is a JSON list, got {text!r}", fix="--args '[3, {\"lr\": 0.1}]'")
    return args


def run(given: argparse.Namespace) -> int:
    """Write the trainer into NAME.zip and print the text: on standard output what the tool reads, the rest beside."""
    args = parse_args(given.args)
    bundle = make_bundle(given.trainer)
    name = check_name(given.name or bundle.name.lower())
    words = arguments(bundle, args)
    if given.target == "vertex":
        text, hint = _for_vertex(given, name, args)
    else:
        if given.target == "gcloud" and not given.zone:
            raise WrongValue("gcloud needs the zone of the TPU VM", fix="--zone us-west4-a, or another with quota")
        place = find_tpu(given.chip)
        bucket = given.bucket and find_bucket(given.bucket)
        where = {"name": name, "zone": given.zone, "project": given.project, "bucket": bucket}
        text, hint = TARGETS[given.target](bundle, place, words, **where), _HINTS[given.target]
        if given.target == "skypilot" and not bucket:
            hint += "; its machine is deleted with all that it wrote: --bucket gs://my-bucket keeps that"
    Path(f"{name}.zip").write_bytes(bundle.to_bytes())
    print(text, end="")
    print(f"wrote {name}.zip; rehearse it here: python {name}.zip {shlex.join(words)}".rstrip(), file=sys.stderr)
    print(f"then: {hint}", file=sys.stderr)
    return 0


def _for_vertex(given: argparse.Namespace, name: str, args: list) -> tuple[str, str]:
    missing = [f"--{one}" for one in ("image", "bucket") if not getattr(given, one)]
    if missing:
        fix = "--image us-docker.pkg.dev/my-project/kit/trainer:1 --bucket gs://my-bucket/runs"
        raise WrongValue(f"vertex needs {' and '.join(missing)}", fix=fix)
    made = job(
        given.trainer,
        given.chip,
        image=given.image,
        bucket=given.bucket,
        args=args,
        name=name,
        service_account=given.service_account,
        region=given.region,
        timeout=given.timeout,
    )
    print(made, file=sys.stderr)
    project = given.project or os.environ.get("GOOGLE_CLOUD_PROJECT") or "PROJECT"
    jobs = f"https://{given.region}-aiplatform.googleapis.com/v1/projects/{project}/locations/{given.region}/customJobs"
    token = '-H "Authorization: Bearer $(gcloud auth print-access-token)" -H "Content-Type: application/json"'
    upload = f"gcloud storage cp {name}.zip {made.folder}/trainer.zip"
    return json.dumps(made.request, indent=2) + "\n", f"{upload} && curl {token} -d @job.json {jobs}"
