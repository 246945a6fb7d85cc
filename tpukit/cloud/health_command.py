"""The command `python -m tpukit health`: check a TPU of this machine or a TPU VM."""

import argparse

from tpukit.cloud.tpu_health import health


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `health`."""
    parser.add_argument(
        "name", nargs="?", help="of a TPU VM; without a name, the TPU of this machine"
    )
    parser.add_argument("--zone", help="of the TPU VM")
    parser.add_argument("--project", help="the Google Cloud project")
    parser.add_argument(
        "--wait",
        default="10m",
        help="for a TPU VM to become healthy: 10m, 90s, 0 (default: 10m)",
    )


def run(given: argparse.Namespace) -> int:
    """Print the findings; return 0, or 1 if there is a failure."""
    wait = 0 if given.wait == "0" else given.wait
    found = health(given.name, zone=given.zone, project=given.project, wait=wait)
    print(found)
    return 0 if found.ok else 1
