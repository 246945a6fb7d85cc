"""`python -m tools.chip`: run everything on this machine, failures included; one line of JSON says what worked."""

import argparse
import sys

from tools.chip.command import add_arguments, run
from tools.chip.remote import NotSent


def main(arguments: list[str] | None = None) -> int:
    """Run every part of the kit here; print, last, one line of JSON; the exit status is 1 where a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.chip", description=main.__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except (FileNotFoundError, NotSent, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
