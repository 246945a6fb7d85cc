"""Compare a whole small job with tpukit, accelerate and Lightning, on two CPU processes.

Each job is a program in `benchmarks/jobs/`, as the documentation of its library writes it: train a
small network for two epochs, evaluate it after each, and save. Images, network and loss are the
same. The jobs take turns, each in a new process and an empty folder.

    lines          lines of code of the program, without blank lines, comments and docstrings
    first step     seconds from the start of the command to the end of the first training step
    whole          seconds of the command
    message        lines that the command prints after one sample has raised on one of the cores,
                   and whether they name the core and the line that raised

The seconds are medians over the rounds.
"""

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOBS = Path(__file__).parent / "jobs"
NAMES = ("tpukit", "accelerate", "lightning")
# `accelerate launch --cpu --num_processes 2` starts a single process (1.15.0, without MPI).
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
LONGEST = 300  # seconds of a command; a job that hangs after an error ends here


def main() -> None:
    """Measure the jobs, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each job")
    options = parser.parse_args()
    runs = {name: [] for name in NAMES}
    for _ in range(options.rounds):
        for name in NAMES:
            runs[name].append(timed(name))
    found = {}
    for name in NAMES:
        firsts, wholes = zip(*runs[name], strict=True)
        found[name] = {
            "lines": code_lines(JOBS / f"with_{name}.py"),
            "first_step_s": round(statistics.median(firsts), 1),
            "whole_s": round(statistics.median(wholes), 1),
            **message(name),
        }
    print(table(found))
    print(json.dumps(found))


def timed(name: str) -> tuple[float, float]:
    """Run a job; return the seconds to the end of its first step, and of the whole."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Path(folder, "clock")
        began = time.time()
        done = run(name, folder, CLOCK=str(clock))
        whole = time.time() - began
        if done.returncode:
            raise RuntimeError(f"the job with {name} failed:\n{done.stdout}")
        return float(clock.read_text()) - began, whole


def message(name: str) -> dict[str, object]:
    """Run a job with a sample that raises; return what its output tells."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(name, folder, CLOCK=str(Path(folder, "clock")), BAD_SAMPLE="1")
    text = done.stdout
    if not done.returncode:
        raise RuntimeError(f"the job with {name} did not fail:\n{text}")
    return {
        "message_lines": sum(bool(line.strip()) for line in text.splitlines()),
        "names_core": bool(re.search(r"core [01] of 2|\[rank[01]\]|local_rank: [01]", text)),
        "names_line": bool(re.search(r"parts\.py\"?, line \d+", text)),
    }


def run(name: str, folder: str, **environ: str) -> subprocess.CompletedProcess:
    """Run the command of a job in a folder; its output and errors are one text."""
    program = [str(JOBS / f"with_{name}.py")]
    if name == "accelerate":
        program = [*TORCHRUN, *program]
    # Without the first, accelerate uses torch_xla, which is installed here, and not the CPU.
    own = os.environ | {"USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOBS)}
    own["PYTHONPATH"] += os.pathsep + str(JOBS.parents[1])
    return subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        env=own | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
    )


def code_lines(path: Path) -> int:
    """Return the lines of code of a program, without blank lines, comments and docstrings."""
    text = path.read_text()
    counted = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text:
            counted |= set(range(node.lineno, node.end_lineno + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            counted -= set(range(node.lineno, node.end_lineno + 1))
    lines = text.splitlines()
    return sum(bool(lines[number - 1].strip()) for number in counted)


def table(found: dict[str, dict]) -> str:
    """Return a row per property, and a column per library."""
    lines = ["".ljust(16) + "".join(name.rjust(12) for name in found)]
    for part in next(iter(found.values())):
        cells = "".join(str(row[part]).rjust(12) for row in found.values())
        lines.append(part.ljust(16) + cells)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
