"""The commands `job`, `jobs`, `logs`, `result` and `cancel` of `python -m tpukit`."""

import argparse
import json
import re
from pathlib import Path

from tpukit.cloud.job import TARGETS, find, jobs, submit
from tpukit.cloud.job_notebook import parse_parameters, read_notebook
from tpukit.cloud.target import JobOptions
from tpukit.essentials.display import InvalidValueError

# The help of the options in `JobOptions` whose values are texts.
_TEXT_OPTIONS = {
    "zone": "zone of the machine, such as us-west4-a; gcloud needs it",
    "region": "region of the machine, such as us-central1; for vertex and skypilot",
    "project": "project of Google Cloud (default: for vertex $GOOGLE_CLOUD_PROJECT, for gcloud the "
    "project of its configuration)",
    "reservation": "reservation of TPUs: its full name for vertex, any for gcloud",
    "image": "container image (default: a plain Python image)",
    "service_account": "account that the job uses on its machine",
    "torch": "release of torch (default: the newest)",
}
_EXAMPLE = "Example: python -m tpukit job train.ipynb --to vertex --chip v5e-8 -p epochs 3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `job` to a parser."""
    parser.usage = "python -m tpukit job notebook [options]"
    parser.epilog = _EXAMPLE
    # The pattern of Python 3.14 (gh-124693). Earlier ones take -1e-3 for an option.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    # The notebook is optional here, so that `run` can explain why it is missing.
    parser.add_argument("notebook", nargs="?", help="train.ipynb or train.py; before the options")
    parser.add_argument(
        "--to", default="local", choices=TARGETS, help="local is a dry run (default: local)"
    )
    parser.add_argument("--chip", help="TPU, such as v5e-8 or v6e-1; required except for local")
    parser.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="new value of a parameter of the notebook; may be repeated",
    )
    parser.add_argument(
        "--files",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files and folders that the notebook needs",
    )
    parser.add_argument("--requirements", metavar="FILE", help="a requirements.txt")
    parser.add_argument("--name", help="name of the job (default: the notebook's and the time)")
    parser.add_argument(
        "--bucket", help="gs://bucket/folder for the results; for local a folder (default: jobs)"
    )
    parser.add_argument(
        "--timeout", default="1d", help="limit for all attempts together: 8h, 90m (default: 1d)"
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME=REFERENCE",
        help="variable with a secret, by reference: HF_TOKEN=projects/P/secrets/hf/...",
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait until the job is over; exit status 1 if it failed"
    )
    rare = parser.add_argument_group("the machine (tpukit.cloud.JobOptions)")
    for name, text in _TEXT_OPTIONS.items():
        rare.add_argument(f"--{name.replace('_', '-')}", metavar="TEXT", help=text)
    rare.add_argument(
        "--spot", action="store_true", help="a cheaper machine that the platform may end any time"
    )
    rare.add_argument(
        "--grace",
        type=float,
        default=JobOptions.grace,
        help="seconds that an interrupted cell has for saving",
    )
    rare.add_argument(
        "--not-secret",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that looks like a secret, but is not",
    )


def run(given: argparse.Namespace) -> int:
    """Submit the notebook; with --wait, print the paths of its files as JSON at the end.

    Raises:
        TpukitError: as for `submit`; with --wait, also as for `Job.result`.
    """
    if given.notebook is None:
        # --files takes all words up to the next option, and so also a notebook after it.
        found = f"--files has {' '.join(given.files)}" if given.files else ""
        fix = "name it before the options: python -m tpukit job train.ipynb --files data.csv"
        raise InvalidValueError("the notebook is missing", found=found, fix=fix)
    wrong = [pair for pair in given.secret if "=" not in pair]
    if wrong:
        fix = "--secret HF_TOKEN=projects/my-project/secrets/hf/versions/latest"
        raise InvalidValueError(f"--secret must be NAME=REFERENCE, got {wrong[0]!r}", fix=fix)
    not_secret = tuple(given.not_secret)
    names = (*_TEXT_OPTIONS, "spot", "grace")
    # The defaults in the notebook decide whether the text of a parameter is a number.
    book = read_notebook(Path(given.notebook).absolute(), not_secret=not_secret)
    job = submit(
        given.notebook,
        chip=given.chip,
        to=given.to,
        parameters=parse_parameters(book, given.parameter),
        files=given.files,
        requirements=given.requirements,
        name=given.name,
        bucket=given.bucket,
        timeout=given.timeout,
        secrets=dict(pair.split("=", 1) for pair in given.secret),
        options=JobOptions(not_secret=not_secret, **{name: getattr(given, name) for name in names}),
    )
    if given.wait:
        paths = {name: str(path) for name, path in job.result().files.items()}
        print(json.dumps(paths, indent=1))
    return 0


class _OfJobs:
    """A command for jobs that were submitted: `jobs`, `logs`, `result` or `cancel`."""

    def __init__(self, name: str):
        self._name = name

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command to a parser."""
        if self._name != "jobs":
            parser.add_argument("name", help="name of the job")
        parser.add_argument(
            "--bucket", default="jobs", help="the bucket or folder of the job (default: jobs)"
        )
        if self._name == "result":
            parser.add_argument(
                "--folder",
                help="folder for the results (default: jobs/NAME, or the folder of a local job)",
            )

    def run(self, given: argparse.Namespace) -> int:
        """Run the command and print its result."""
        if self._name == "jobs":
            print(jobs(given.bucket))
            return 0
        job = find(given.name, given.bucket)
        if self._name == "logs":
            print(job.logs(), end="")
        elif self._name == "result":
            found = job.result(given.folder)
            print(found.notebook, *found.files.values(), sep="\n")
        else:
            print(job.cancel())
        return 0


jobs_command = _OfJobs("jobs")
logs_command = _OfJobs("logs")
result_command = _OfJobs("result")
cancel_command = _OfJobs("cancel")
