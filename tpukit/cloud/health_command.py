"""`python -m tpukit health`: whether this machine's TPU, or one of the cloud, is healthy."""

import argparse

from tpukit.cloud.tpu_health import health


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("name", nargs="?", help="of a TPU VM; without it this machine's TPU")
    parser.add_argument("--zone", help="of the TPU VM")
    parser.add_argument("--project", help="the Google Cloud project")
    parser.add_argument("--wait", default="10m", help="for a TPU VM to become healthy: 10m, 90s, 0 (default: 10m)")


def run(given: argparse.Namespace) -> int:
    """Print the findings; return 0 where there is no failure."""
    wait = 0 if given.wait == "0" else given.wait
    found = health(given.name, zone=given.zone, project=given.project, wait=wait)
    print(found)
    return 0 if found.ok else 1
