"""The command line: `python -m tpukit check`, `info`, and the commands of the subpackages."""

import argparse
import importlib
import importlib.util
import json
import sys
from typing import NamedTuple

from tpukit.essentials.display import (
    InvalidTypeError,
    InvalidValueError,
    NotInstalledError,
    PathNotFoundError,
    TpukitError,
    optional_subpackage,
)
from tpukit.essentials.environment import check, machine_info
from tpukit.essentials.launcher import WorkerError


class _Command(NamedTuple):
    """A command that a subpackage defines.

    Attributes:
        place: the module that defines the command's functions `add_arguments` and `run`; or
            "module:object" if an object in the module defines them.
        help: the command's line in `python -m tpukit --help`.
        description: the first lines of `python -m tpukit COMMAND --help`.
    """

    place: str
    help: str
    description: str


_COMMANDS = {
    "health": _Command(
        "tpukit.cloud.tpu_health",
        "compute on every core of this machine, or report the state of a TPU VM",
        "Check the health of a TPU. Exit status: 1 after a failure, otherwise 0.",
    ),
    "job": _Command(
        "tpukit.cloud.job_command",
        "run a notebook on a TPU by Vertex AI, gcloud or SkyPilot, or in a dry run here",
        "Check, show and send a notebook or a script. Exit status: 0, 1 if the job was refused, 2 "
        "for wrong arguments.",
    ),
    "lint": _Command(
        "tpukit.migrate.lint_command",
        "find old names of torch_xla and related libraries in files, and show the new names",
        "Find old names in notebooks and scripts. Exit status: 0 if there are none, 1 if there are "
        "some, 2 for unreadable input.",
    ),
    "jobs": _Command(
        "tpukit.cloud.job_command:jobs_command",
        "list the jobs of a folder",
        "List jobs and their states.",
    ),
    "logs": _Command(
        "tpukit.cloud.job_command:logs_command",
        "print the output of a job so far",
        "Print the output of a job.",
    ),
    "result": _Command(
        "tpukit.cloud.job_command:result_command",
        "wait for a job and fetch its executed notebook and files",
        "Fetch the results of a job. Exit status: 0, or 1 if the job failed.",
    ),
    "cancel": _Command(
        "tpukit.cloud.job_command:cancel_command",
        "end a job",
        "End a job. The files that it has saved remain.",
    ),
    "preflight": _Command(
        "tpukit.preflight.command",
        "estimate memory, time and cost of a step with the TPU's own compiler, without a TPU",
        "Compile a worker function's step for a TPU. Exit status: 0, 1 if the step does not fit "
        "the TPU's memory or cannot be compiled, 2 for wrong arguments.",
    ),
}
# The command line prints the text of these errors without a traceback. The first group is a mistake
# in the arguments, so its exit status is 2.
_WRONG_ARGUMENTS = (InvalidValueError, InvalidTypeError, PathNotFoundError)
_EXPECTED = (TpukitError, FileNotFoundError, ImportError, TypeError, ValueError, WorkerError)
# Exit statuses. argparse itself ends with 2 after wrong arguments.
_FAILED = 1
_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 after a failure, 2 for wrong arguments.

    Without arguments it prints the list of commands. For arguments that argparse refuses, it raises
    `SystemExit(2)`.

    Args:
        arguments: the command line without the program's name; None for `sys.argv[1:]`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m tpukit",
        description="Show this machine, and whether it can run PyTorch on every TPU core.",
        epilog="Example: python -m tpukit check. It opens no device, imports no torch and uses "
        "no network.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser(
        "check",
        help="problems and their fixes; exit status 1 if a launch would fail",
        description="Print every finding with its fix. Exit status: 1 if a finding is a failure, "
        "otherwise 0, also with warnings.",
    )
    commands.add_parser(
        "info",
        help="platform, chips, versions and memory, with the evidence for each",
        description="Print the facts about this machine and their evidence. Exit status: 0.",
    )
    try:
        command = _add_commands(commands, wanted=arguments[:1])
    except NotInstalledError as error:
        # Reported before `parse_args`, which would call the arguments of an absent command unknown.
        print(error, file=sys.stderr)
        return _FAILED
    if not arguments:
        parser.print_help()
        return 0
    given = parser.parse_args(arguments)
    if given.command == "info":
        print(machine_info())
        return 0
    if given.command == "check":
        outcome = check()
        print(outcome)
        return 0 if outcome.ok else 1
    try:
        if "args" in given:  # `--args`: JSON with the arguments of a worker function
            given.args = _worker_arguments(given.args)
        return command.run(given)
    except _WRONG_ARGUMENTS as error:
        print(error, file=sys.stderr)
        return _USAGE
    except _EXPECTED as error:
        print(error, file=sys.stderr)
        return _FAILED


def _add_commands(parsers, *, wanted: list[str]):
    """Add the commands of the subpackages to the parser; return the wanted command, or None.

    Only the module of the wanted command is imported.

    Raises:
        NotInstalledError: the subpackage of the wanted command is absent.
    """
    found = None
    for name, (place, text, description) in _COMMANDS.items():
        module, _, attribute = place.partition(":")
        subpackage = module.rpartition(".")[0]
        if importlib.util.find_spec(subpackage) is None:
            text = f"needs the subpackage {subpackage}, which this copy of tpukit does not have"
        parser = parsers.add_parser(name, help=text, description=description)
        if name in wanted:
            with optional_subpackage(name):
                found = importlib.import_module(module)
            if attribute:
                found = getattr(found, attribute)
            found.add_arguments(parser)
    return found


def _worker_arguments(text: str) -> list:
    """Return the arguments of a worker function from the text of `--args`."""
    try:
        args = json.loads(text)
    except ValueError:
        args = None
    if not isinstance(args, list):
        fix = "--args '[3, {\"lr\": 0.1}]'"
        raise InvalidValueError(f"--args must be a JSON list, got {text!r}", fix=fix)
    return args


if __name__ == "__main__":
    sys.exit(main())
