"""`python -m tools.chip`: every part, on this machine or a chip elsewhere, and one line of JSON."""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tools.chip.remote import prove_on_colab, prove_on_kaggle
from tools.chip.result import PARTS, code_that_runs, summarize
from tools.chip.supervisor import run_parts
from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.environment import MachineInfo
from tpukit.essentials.launcher import choose_topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--backend",
        help="as in launch: cpu, xla, xla:cpu, xla:simulator (default: the best there is)",
    )
    parser.add_argument("--cores", type=int, help="as in launch (default: all there are)")
    parser.add_argument(
        "--parts", help=f"some of them, with commas between (default: all: {','.join(PARTS)})"
    )
    parser.add_argument(
        "--folder", help="an empty folder, which keeps checkpoints and the trace (default: none)"
    )
    parser.add_argument("--result", metavar="FILE", help="write the line of JSON there as well")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="after which a launch is ended (default: 600)"
    )
    parser.add_argument(
        "--code", help="what the JSON calls the code that runs (default: the commit of its clone)"
    )
    parser.add_argument("--run", help="what the JSON calls this run (default: a random name)")
    elsewhere = parser.add_argument_group(
        "on a chip elsewhere, with the platform's own command line and your account"
    )
    elsewhere.add_argument(
        "--on", choices=["colab", "kaggle"], help="send tpukit there, run it, fetch the result"
    )
    elsewhere.add_argument(
        "--chip", default="v5e1", choices=["v5e1", "v6e1"], help="of Colab (default: v5e1)"
    )
    elsewhere.add_argument("--user", help="your name on Kaggle")


def run(given: argparse.Namespace) -> int:
    """Run the parts; print, last, one line of JSON; return 0 where all have passed.

    Raises:
        InvalidValueError: this machine or the command does not support an argument.
        NotSent: a chip elsewhere was asked for, and there is no result.
    """
    parts = _chosen(given.parts)
    if given.on:
        arguments = ["--parts", ",".join(parts), "--seconds", str(given.seconds)]
        result = Path(given.result or f"runs/proof-{given.on}.json")
        if given.on == "colab":
            return prove_on_colab(result, chip=given.chip, arguments=arguments)
        return prove_on_kaggle(result, user=given.user, arguments=arguments)
    if given.result:
        _try_to_write(Path(given.result))
    if not hasattr(os, "fork"):
        raise InvalidValueError(
            "prove ends and interrupts launches, for which it needs Linux or macOS", fix="WSL"
        )
    if importlib.util.find_spec("torch") is None:
        fix = "in a clone .venv/bin/python, after a make command; else the Python of the notebooks"
        raise InvalidValueError(
            "torch is not installed in this Python", found=sys.executable, fix=fix
        )
    with contextlib.ExitStack() as stack:
        folder = (
            _empty(given.folder)
            if given.folder
            else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        )
        began = time.monotonic()
        host = MachineInfo.read()
        topology = choose_topology(host, given.cores, given.backend)
        stands = " in place of TPU cores" if topology.is_dry_run else ""
        print(
            f"{len(parts)} parts on {topology.cores} x {topology.device}{stands}; {host.summary}",
            flush=True,
        )
        outcomes = run_parts(
            parts, folder=folder, backend=given.backend, cores=given.cores, seconds=given.seconds
        )
    for name, one in outcomes.items():
        seconds = "" if one["seconds"] is None else f", {one['seconds']} s"
        print(f"{name}: {'passed' if one['passed'] else 'FAILED: ' + one['error']}{seconds}")
    summary = summarize(
        host,
        topology,
        outcomes,
        run=given.run or uuid.uuid4().hex[:8],
        code=given.code or code_that_runs(),
        date=datetime.date.today().isoformat(),
        seconds=time.monotonic() - began,
    )
    line = json.dumps(summary)
    print(line, flush=True)  # first: the disk may have become full
    if given.result:
        Path(given.result).write_text(line + "\n")
    return 0 if summary["passed"] else 1


def _chosen(parts: str | None) -> list[str]:
    chosen = re.split(r"\s*,\s*", parts.strip()) if parts else [*PARTS]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        raise InvalidValueError(
            f"no such part: {', '.join(unknown)}", found=f"the parts are {', '.join(PARTS)}"
        )
    return [name for name in PARTS if name in chosen]


def _try_to_write(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        fix = "a file in a folder that can be written"
        raise InvalidValueError(
            f"--result {file} cannot be written: {error.strerror.lower()}", fix=fix
        ) from error


def _empty(folder: str) -> Path:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise InvalidValueError(
            f"--folder {folder} is not empty", fix="name a new folder, or empty this one"
        )
    return path.resolve()
