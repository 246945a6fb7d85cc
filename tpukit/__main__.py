"""`python -m tpukit check`, `host` and `health`, the same answers in a terminal; `preflight`; `job`, for the cloud."""

import argparse
import sys

from tpukit.cloud import job_command
from tpukit.cloud.answers import CloudFailed
from tpukit.cloud.health import Health, health
from tpukit.distributed.launcher import WorkerFailed
from tpukit.machine.host import host
from tpukit.machine.runtime_check import check
from tpukit.preflight import command as preflight_command
from tpukit.preflight.recording import NoPreflight


def main(arguments: list[str] | None = None) -> int:
    """Print what was asked for; the exit status is 1 where the check has a failure."""
    parser = argparse.ArgumentParser(
        prog="python -m tpukit",
        description="What is this machine, and is it ready to run PyTorch on every TPU core?",
        epilog="check and host start no XLA runtime, import no torch, use no network and open no device.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser(
        "check",
        help="what is wrong and what to do about it; exit status 1 if anything would make a launch fail",
        description="Print every finding with its fix. Exit status: 0, warnings included, or 1 with a failure.",
    )
    commands.add_parser(
        "host",
        help="platform, chips, versions and memory, with the evidence for each",
        description="Print what this machine is, and why we think so. Exit status: 0.",
    )
    of_a_tpu = commands.add_parser(
        "health",
        help="a computation on every core of this machine, or what the cloud says of a TPU VM",
        description="Say whether a TPU is healthy. Exit status: 0, warnings included, or 1.",
    )
    of_a_tpu.add_argument("name", nargs="?", help="of a TPU VM; without it this machine's TPU")
    of_a_tpu.add_argument("--zone", help="of the TPU VM")
    of_a_tpu.add_argument("--project", help="the Google Cloud project")
    of_a_tpu.add_argument("--wait", default="10m", help="for a TPU VM to become healthy: 10m, 90s, 0 (default: 10m)")
    job_command.add_arguments(
        commands.add_parser(
            "job",
            help="a trainer as one file, and what gcloud, SkyPilot, dstack or Vertex AI take to run it",
            description="Write a trainer into one file, and print what the tool takes to run it on a TPU.",
        )
    )
    preflight_command.add_arguments(
        commands.add_parser(
            "preflight",
            help="what a TPU will do with a step: memory, time, cost, from its own compiler, without a TPU",
            description="Compile a worker function's step for a TPU. Exit status: 0, or 1 where it does not fit.",
        )
    )
    given = parser.parse_args(arguments)
    if given.command == "host":
        print(host())
        return 0
    try:
        if given.command == "job":
            return job_command.run(given)
        if given.command == "preflight":
            return preflight_command.run(given)
        outcome = check() if given.command == "check" else _health(given)
    except (CloudFailed, FileNotFoundError, ImportError, NoPreflight, TypeError, ValueError, WorkerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    print(outcome)
    return 0 if outcome.ok else 1


def _health(given: argparse.Namespace) -> Health:
    wait = 0 if given.wait == "0" else given.wait
    return health(given.name, zone=given.zone, project=given.project, wait=wait)


if __name__ == "__main__":
    sys.exit(main())
