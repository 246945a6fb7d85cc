"""Launch again and again in one kernel, some runs failing: memory, files and processes must stay as they are.

    python tests/faults/soak.py [--launches 200]

Prints a line now and then and, last, one JSON line. Exits with 1 if something grows.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]
from helpers.kernels import Kernel  # noqa: E402

MOST_MIB = (
    16  # that the kernel's memory may grow after the first tenth; it moves by a few either way
)
MOST_FILES = 2  # an idle kernel's own count moves by one; one leaked a launch would be 200
EVERY = 20

SETUP = """
import gc, os, signal, sys, time
import psutil, torch, tpukit
sys.stdout.flush()

def fine(core):
    core.log(loss=0.5)
    return core.all_reduce(torch.ones(1000))

def raises(core):
    if core.rank == 1: raise KeyError("a")
    core.barrier()

def dies(core):
    if core.rank == 0: os.kill(os.getpid(), signal.SIGKILL)
    core.barrier()

def loads(core):
    return sum(len(batch) for batch in core.batches(range(64), batch_size=8, workers=1))

def once(number):
    work = [fine, fine, raises, fine, loads, fine, dies, fine, fine, fine][number % 10]
    try:
        tpukit.launch(work, cores=2, progress="off")
        return 0
    except tpukit.WorkerError:
        return 1

def state():
    gc.collect()
    me = psutil.Process()
    return me.memory_info().rss / 2**20, me.num_fds(), len(me.children(recursive=True)), me.num_threads()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=200)
    launches = parser.parse_args().launches
    kernel = Kernel({"PYTHONPATH": str(Path(__file__).parents[2])})
    kernel.run(SETUP)
    assert kernel.error is None, kernel.error
    print(
        f"{'launches':>8} {'failed':>7} {'memory':>10} {'files':>6} {'processes':>10} {'threads':>8}"
    )
    states, failed = [], 0
    for number in range(launches):
        failed += int(kernel.run(f"print(once({number}))").strip().splitlines()[-1])
        if (number + 1) % EVERY == 0:
            memory, files, processes, threads = json.loads(kernel.run("print(list(state()))"))
            states.append((memory, files, processes, threads))
            line = f"{number + 1:>8} {failed:>7} {memory:>6.0f} MiB {files:>6} {processes:>10} {threads:>8}"
            print(line, flush=True)
    kernel.close()
    first, last = states[0], states[-1]
    summary = {
        "launches": launches,
        "failed_on_purpose": failed,
        "memory_growth_mib": round(last[0] - first[0], 1),
        "file_growth": last[1] - first[1],
        "processes_left": last[2],
        "thread_growth": last[3] - first[3],
    }
    print(json.dumps(summary))
    expected = sum(number % 10 in (2, 6) for number in range(launches))
    grown = [
        summary["memory_growth_mib"] > MOST_MIB,
        summary["file_growth"] > MOST_FILES,
        last[2] > 0,
    ]
    return any(grown) or summary["thread_growth"] > 0 or failed != expected


if __name__ == "__main__":
    sys.exit(main())
