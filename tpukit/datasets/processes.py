"""Run a task in several fresh Python processes, with a progress bar; errors come back as if raised here."""

import builtins
import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tpukit.essentials.display import screen
from tpukit.essentials.environment import cpus

_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from tpukit.datasets.processes import _run; _run(sys.argv[2])"
_KIT = str(Path(__file__).resolve().parents[2])  # the folder that tpukit is in
# One thread each: the threads of numpy's libraries would compete with the other processes.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


# Not joblib's loky (1.6.0): after a kernel's SIGKILL its 2 workers and 2 trackers still ran at 15 s; with a thread in
# each that watches the parent, KernelManager.restart_kernel(now=True) left its 8 semaphores in /dev/shm.
def how_many(pieces: int, workers: int | None) -> int:
    """Return how many processes work on so many pieces: those that were asked for, else one per CPU."""
    return min(pieces, workers or cpus())


def run_in_processes(
    task: str,
    jobs: list,
    *,
    label: str,
    total: int,
    done: Callable[[], int],
    folder,
    progress: str | None = None,
    environ: Mapping[str, str] = os.environ,
    feeds: Sequence[Iterator[bytes]] = (),
) -> None:
    """Run one fresh Python process for each job, all at once, and wait until the last has ended.

    Not forks: a notebook's kernel has threads and may hold a device. Not multiprocessing's spawn: it runs the caller's
    script again, which needs a guard the caller may not have. The processes end when this one does, however it ends.

    Args:
        task: "package.module:function", called with the job as its one argument.
        jobs: what JSON can carry, one for each process.
        label: the name of the progress bar.
        total: what `done()` returns at the end.
        done: how far the processes have come together; asked ten times a second.
        folder: where `process-<n>.log` holds what they print, until all have ended without an error.
        progress: "panel", "line", "text" or "off", as for `launch`; None decides by where this runs.
        environ: their environment; each uses one thread.
        feeds: for each process what it reads from `sys.stdin.buffer`; none if the processes read nothing. This process
            makes them, a piece of each in turn, and raises what they raise.

    Raises:
        ValueError, OSError: a task raised it, and all processes were ended; the text and errno are the task's own.
        RuntimeError: a process ended in any other way; the text holds the end of its log.
    """
    logs = [Path(folder) / f"process-{rank}.log" for rank in range(len(jobs))]
    with contextlib.ExitStack() as running:
        processes = []
        for job, log in zip(jobs, logs, strict=True):
            processes.append(running.enter_context(_started(task, job, log, environ)))
        open_feeds = list(zip(processes, feeds, strict=True)) if feeds else []
        display = running.enter_context(screen(progress))
        while True:
            statuses = [process.poll() for process in processes]
            display.bar(label, done(), total, unit="items")
            display.draw()
            for status, process, log in zip(statuses, processes, logs, strict=True):
                if status:
                    raise _failure(label, status, process.stdout.read(), log)
            if None not in statuses:
                break
            _feed(open_feeds)
    for log in logs:
        log.unlink()


def _feed(open_feeds: list) -> None:
    """Write a piece to each process in turn for a tenth of a second; wait as long if there is nothing to write."""
    until = time.monotonic() + 0.1
    while open_feeds and time.monotonic() < until:
        for process, feed in list(open_feeds):
            piece = next(feed, None)
            if piece is None:
                open_feeds.remove((process, feed))
                continue
            try:
                process.stdin.write(piece)
                process.stdin.flush()
            except BrokenPipeError:  # it has ended, and its status will show why
                open_feeds.remove((process, feed))
    time.sleep(max(0, until - time.monotonic()))


@contextlib.contextmanager
def _started(task: str, job: object, log: Path, environ: Mapping[str, str]):
    """Start a process and give it its job; kill it at the end, if it still runs."""
    with log.open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, _KIT, task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            env={**environ, **_ONE_THREAD},
        )
    try:
        with contextlib.suppress(BrokenPipeError):  # it has died already, which its status will show
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _failure(label: str, status: int, report: bytes, log: Path) -> Exception:
    """Make the exception of a process again: its own type and text where a caller can act on them."""
    printed = log.read_text(errors="replace")[-2000:]
    error = RuntimeError(f"a process of {label!r} ended with status {status}\n{printed}")
    if not report:
        return error
    raised = json.loads(report)
    again = getattr(builtins, raised["type"])(raised["text"])
    again.errno, again.__cause__ = raised["errno"], error
    return again


def _run(task: str) -> None:
    """Do the job that is the first line of stdin; the task may read the rest."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends these
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed goes to the log
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, args=[report.fileno()], daemon=True).start()
    module, function = task.split(":")
    try:
        getattr(importlib.import_module(module), function)(job)
    except (ValueError, OSError) as error:
        kind = next(base for base in type(error).__mro__ if getattr(builtins, base.__name__, None) is base)
        raised = {"type": kind.__name__, "text": str(error), "errno": getattr(error, "errno", None)}
        print(json.dumps(raised), file=report, flush=True)
        with contextlib.suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
        sys.exit(1)


def _end_with_parent(report: int) -> None:
    """End this process when no other can read its report any more, because the parent is gone."""
    poll = select.poll()
    poll.register(report, 0)  # errors are reported always, and nothing else is of interest
    poll.poll()
    os._exit(1)
