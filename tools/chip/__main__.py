"""The command `python -m tools.chip`: run every part of tpukit on this machine."""

import argparse
import sys

from tools.chip.command import add_arguments, run
from tools.chip.remote import NotSent


def main(arguments: list[str] | None = None) -> int:
    """Run every part of tpukit here, and print one line of JSON; exit status 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.chip", description=main.__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except (FileNotFoundError, NotSent, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
