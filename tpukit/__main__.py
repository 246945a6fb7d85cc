"""`python -m tpukit check` and `info`: the answers in a terminal; the commands of the other rooms."""

import argparse
import importlib
import importlib.util
import json
import sys

from tpukit.essentials.display import InvalidValueError, NotInstalledError, TpukitError, optional_subpackage
from tpukit.essentials.environment import check, machine_info
from tpukit.essentials.launcher import WorkerError

# By name: the module whose `add_arguments` and `run` make the command (or an object of it, after a colon), what it
# does, and its description.
_OF_ROOMS = {
    "health": (
        "tpukit.cloud.health_command",
        "a computation on every core of this machine, or what the cloud says of a TPU VM",
        "Say whether a TPU is healthy. Exit status: 0, warnings included, or 1.",
    ),
    "job": (
        "tpukit.cloud.job_command",
        "run a notebook on a TPU, on Vertex AI or by gcloud or SkyPilot, or a dry run of that here",
        "Check, show and send a notebook or a script. Exit status: 0, or 1 if it was refused.",
    ),
    "lint": (
        "tpukit.migrate.lint_command",
        "old names of torch_xla and of libraries beside it in notebooks and scripts, and what to write today",
        "Find old names in notebooks and scripts. Exit status: 0 for none, 1 for some, 2 for unreadable input.",
    ),
    "jobs": ("tpukit.cloud.job_command:jobs_command", "list the jobs of a folder", "List jobs and their states."),
    "logs": ("tpukit.cloud.job_command:logs_command", "the output of a job so far", "Print the output of a job."),
    "result": (
        "tpukit.cloud.job_command:result_command",
        "wait for a job and fetch its executed notebook and files",
        "Fetch the results of a job. Exit status: 0, or 1 if the job failed.",
    ),
    "cancel": ("tpukit.cloud.job_command:cancel_command", "end a job", "End a job; the files it saved stay."),
    "preflight": (
        "tpukit.preflight.command",
        "what a TPU will do with a step: memory, time, cost, from its own compiler, without a TPU",
        "Compile a worker function's step for a TPU. Exit status: 0, or 1 where it does not fit.",
    ),
}
# Errors of a command whose text is all that is shown.
_TOLD = (TpukitError, FileNotFoundError, ImportError, TypeError, ValueError, WorkerError)


def main(arguments: list[str] | None = None) -> int:
    """Print what was asked for; the exit status is 1 where the check has a failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m tpukit",
        description="What is this machine, and is it ready to run PyTorch on every TPU core?",
        epilog="check and info start no XLA runtime, import no torch, use no network and open no device.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser(
        "check",
        help="what is wrong and what to do about it; exit status 1 if anything would make a launch fail",
        description="Print every finding with its fix. Exit status: 0, warnings included, or 1 with a failure.",
    )
    commands.add_parser(
        "info",
        help="platform, chips, versions and memory, with the evidence for each",
        description="Print what this machine is, and why we think so. Exit status: 0.",
    )
    module = None
    for name, (place, what, description) in _OF_ROOMS.items():
        place, _, part = place.partition(":")
        room = place.rpartition(".")[0]
        if importlib.util.find_spec(room) is None:
            what = f"needs the part {room}, which this copy of the kit does not have"
        command = commands.add_parser(name, help=what, description=description)
        if name in arguments[:1]:
            try:
                with optional_subpackage(name):
                    module = importlib.import_module(place)
            except NotInstalledError as error:  # before argparse finds fault with arguments that it does not know
                print(error, file=sys.stderr)
                return 1
            module = getattr(module, part) if part else module
            module.add_arguments(command)
    given = parser.parse_args(arguments)
    if given.command == "info":
        print(machine_info())
        return 0
    if given.command == "check":
        outcome = check()
        print(outcome)
        return 0 if outcome.ok else 1
    try:
        if "args" in given:  # of a worker function
            given.args = _arguments(given.args)
        return module.run(given)
    except _TOLD as error:
        print(error, file=sys.stderr)
        return 1


def _arguments(text: str) -> list:
    """Return what a worker function takes from the text of `--args`."""
    try:
        args = json.loads(text)
    except ValueError:
        args = None
    if not isinstance(args, list):
        raise InvalidValueError(f"--args is a JSON list, got {text!r}", fix="--args '[3, {\"lr\": 0.1}]'")
    return args


if __name__ == "__main__":
    sys.exit(main())
