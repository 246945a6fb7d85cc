"""`python -m tpukit check` and `python -m tpukit host`: the same answers in a terminal."""

import argparse
import sys

from tpukit.machine.host import host
from tpukit.machine.runtime_check import check


def main(arguments: list[str] | None = None) -> int:
    """Print what was asked for; the exit status is 1 where the check has a failure."""
    parser = argparse.ArgumentParser(
        prog="python -m tpukit",
        description="What is this machine, and is it ready to run PyTorch on every TPU core?",
        epilog="Neither starts the XLA runtime, imports torch, uses the network or opens a device.",
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
    if parser.parse_args(arguments).command == "host":
        print(host())
        return 0
    outcome = check()
    print(outcome)
    return 0 if outcome.ok else 1


if __name__ == "__main__":
    sys.exit(main())
