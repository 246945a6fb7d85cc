"""`python -m tpukit prove`: every part on this machine, and one line of JSON."""

import argparse
import contextlib
import datetime
import json
import re
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from tpukit.distributed.topology import choose_topology
from tpukit.machine.host import host
from tpukit.proof.result import PARTS, summarize
from tpukit.proof.supervisor import run_parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--backend", help="as in launch: cpu, xla, xla:cpu, xla:standin (default: the best there is)")
    parser.add_argument("--cores", type=int, help="as in launch (default: all there are)")
    parser.add_argument("--parts", help=f"some of them, with commas between (default: all: {','.join(PARTS)})")
    parser.add_argument("--folder", help="an empty folder, which keeps checkpoints and the trace (default: none)")
    parser.add_argument("--result", metavar="FILE", help="write the line of JSON there as well")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which a launch is ended (default: 600)")
    parser.add_argument("--code", help="what the JSON calls the code that runs (default: the commit of its clone)")
    parser.add_argument("--run", help="what the JSON calls this run (default: a random name)")


def run(given: argparse.Namespace) -> int:
    """Run the parts; print, last, one line of JSON; return 0 where all have passed.

    Raises:
        ValueError: an argument is none that this machine or the command takes.
    """
    parts = _chosen(given.parts)
    with contextlib.ExitStack() as stack:
        folder = _empty(given.folder) if given.folder else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        began, machine = time.monotonic(), host()
        topology = choose_topology(machine, given.cores, given.backend)
        stands = " in place of TPU cores" if topology.rehearsal else ""
        print(f"{len(parts)} parts on {topology.cores} x {topology.device}{stands}; {machine.summary}", flush=True)
        outcomes = run_parts(parts, folder=folder, backend=given.backend, cores=given.cores, seconds=given.seconds)
    for name, one in outcomes.items():
        seconds = "" if one["seconds"] is None else f", {one['seconds']} s"
        print(f"{name}: {'passed' if one['passed'] else 'FAILED: ' + one['error']}{seconds}")
    summary = summarize(
        machine,
        topology,
        outcomes,
        run=given.run or uuid.uuid4().hex[:8],
        code=given.code or code_that_runs(),
        date=datetime.date.today().isoformat(),
        seconds=time.monotonic() - began,
    )
    line = json.dumps(summary)
    if given.result:
        Path(given.result).parent.mkdir(parents=True, exist_ok=True)
        Path(given.result).write_text(line + "\n")
    print(line, flush=True)
    return 0 if summary["passed"] else 1


def code_that_runs() -> str:
    """Return the commit of the clone that the kit is in, with "+" where files of it have changed; else its version."""
    from tpukit import __version__

    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    try:
        at = subprocess.run([*git, "rev-parse", "--show-toplevel", "--short", "HEAD"], capture_output=True, text=True)
        if at.returncode or Path(at.stdout.split("\n")[0]).resolve() != root.resolve():
            return f"version {__version__}"
        changed = subprocess.run([*git, "status", "--porcelain", "--", "tpukit"], capture_output=True, text=True)
    except OSError:  # no git here
        return f"version {__version__}"
    return f"commit {at.stdout.split()[-1]}" + "+" * bool(changed.stdout.strip())


def _chosen(parts: str | None) -> list[str]:
    chosen = re.split(r"\s*,\s*", parts.strip()) if parts else [*PARTS]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        raise ValueError(f"no such part: {', '.join(unknown)}\n  found: the parts are {', '.join(PARTS)}")
    return [name for name in PARTS if name in chosen]


def _empty(folder: str) -> Path:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ValueError(f"--folder {folder} is not empty\n  fix:   a new one, or remove what is in it")
    return path.resolve()
