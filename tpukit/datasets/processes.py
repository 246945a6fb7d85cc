"""Run a task in several new Python processes with a progress bar, and raise their errors.

Each process gets the state of the kernel and its job as two lines of JSON on stdin. Its output goes
into a log, and it reports an error as a line of JSON on stdout. It ends when its parent ends, even
if the parent is killed.
"""

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

from tpukit.datasets import kernel_state
from tpukit.essentials.display import screen
from tpukit.essentials.environment import cpus

# Not joblib's loky (1.6.0): 15 s after a SIGKILL of the kernel, its 2 workers and 2 trackers still
# ran. With a thread in each that watches the parent, KernelManager.restart_kernel(now=True) left
# its 8 semaphores in /dev/shm.
# The process sets the kernel's `sys.path` before it imports any package except tpukit. tpukit comes
# first, from the folder argv[1], so that it is the version of the kernel.
_CODE = """
import json, sys
kernel = json.loads(sys.stdin.buffer.readline())
own = sys.path[:]
sys.path.insert(0, sys.argv[1])
import tpukit
sys.path[:] = kernel["path"] + [entry for entry in own if entry not in kernel["path"]]
from tpukit.datasets.processes import _run
_run(sys.argv[2], kernel)
"""
_PARENT_OF_TPUKIT = str(Path(__file__).resolve().parents[2])
# One thread per process, because threads of numpy's libraries would compete with other processes.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_LOG_SHOWN = 2000  # an error shows this many characters from the end of a log
_SECONDS_PER_ROUND = 0.1  # between two checks of the processes


def how_many(pieces: int, workers: int | None) -> int:
    """Return the number of processes: `workers`, or one per CPU, but at most `pieces`."""
    return min(pieces, workers or cpus())


def run_in_processes(
    task: Callable[[object], None],
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
    """Run one new Python process per job, all at the same time, and wait for the last to end.

    The processes have the `sys.path` and the Pillow plugins of this process.

    Args:
        task: a function at the top level of a module, called with the job as its only argument.
        jobs: one job per process, of values that JSON supports.
        label: the name of the progress bar.
        total: the result of `done()` when all jobs are finished.
        done: returns the progress of all processes together; called about ten times per second.
        folder: the folder for `process-<n>.log`, the output of a process. The logs are removed if
            all processes end without an error.
        progress: "panel", "line", "text" or "off"; None chooses as `launch` does.
        environ: the environment of the processes. Variables that limit each process to one thread
            are added.
        feeds: one iterator per process. The process reads the iterator's bytes from
            `sys.stdin.buffer`. () if the processes read nothing.

    Raises:
        ValueError, OSError: a task raised such an error. All other processes were ended.
        RuntimeError: a process ended in any other way; the text has the end of its log.
        Exception: an iterator of `feeds`, which this process runs, raised this error.
    """
    # No fork, because the kernel of a notebook has threads and may use a device. No spawn of
    # multiprocessing either, because spawn runs the caller's script again.
    logs = [Path(folder) / f"process-{rank}.log" for rank in range(len(jobs))]
    with contextlib.ExitStack() as running:
        processes = []
        for job, log in zip(jobs, logs, strict=True):
            processes.append(running.enter_context(_started(name_of(task), job, log, environ)))
        open_feeds = []
        if feeds:
            open_feeds = list(zip(processes, feeds, strict=True))
        display = running.enter_context(screen(progress))
        while True:
            # The statuses come first: a process that ends after this line is seen in the next pass,
            # with its last items counted.
            statuses = [process.poll() for process in processes]
            display.bar(label, done(), total, unit="items")
            display.draw()
            for status, process, log in zip(statuses, processes, logs, strict=True):
                if status:  # `running` ends the other processes on the way out
                    raise _failure(label, status, process.stdout.read(), log)
            if None not in statuses:
                break
            _feed(open_feeds)
    for log in logs:
        log.unlink()


def name_of(task: Callable) -> str:
    """Return "package.module:name" of a function or class, for `by_name` in another process."""
    return f"{task.__module__}:{task.__qualname__}"


def by_name(name: str) -> Callable:
    """Return the function or class that `name_of` named."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def _feed(open_feeds: list) -> None:
    """Write the next pieces of the feeds to their processes in turn, for 0.1 s.

    If all feeds have ended, only wait for this time.
    """
    until = time.monotonic() + _SECONDS_PER_ROUND
    while open_feeds and time.monotonic() < until:
        for process, feed in list(open_feeds):
            piece = next(feed, None)
            if piece is None:
                open_feeds.remove((process, feed))
                continue
            try:
                process.stdin.write(piece)
                process.stdin.flush()
            except BrokenPipeError:  # the process has ended; its status shows why
                open_feeds.remove((process, feed))
    time.sleep(max(0, until - time.monotonic()))


@contextlib.contextmanager
def _started(task: str, job: object, log: Path, environ: Mapping[str, str]):
    """Start a process and send it its job; kill it at the end of the block if it still runs."""
    with log.open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, _PARENT_OF_TPUKIT, task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            env={**environ, **_ONE_THREAD},
        )
    try:
        with contextlib.suppress(BrokenPipeError):  # the process has ended; its status shows why
            for line in (kernel_state.state(), job):
                process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _failure(label: str, status: int, report: bytes, log: Path) -> Exception:
    """Return the exception to raise for a process that failed.

    Args:
        label: the name of the progress bar.
        status: the exit status.
        report: the line that `_as_report` made; b"" if the process reported no error.
        log: the file with its output.
    """
    printed = log.read_text(errors="replace")[-_LOG_SHOWN:]
    error = RuntimeError(f"a process of {label!r} ended with status {status}\n{printed}")
    if not report:
        return error
    raised = json.loads(report)
    # The same error as if the task had run in this process; the log of the process is its cause.
    again = getattr(builtins, raised["type"])(raised["text"])
    again.errno = raised["errno"]
    again.__cause__ = error
    return again


def _run(task: str, kernel: dict) -> None:
    """Do the job that is the next line of stdin; the task may read the rest.

    Args:
        task: "package.module:function".
        kernel: the state of the parent, which was the first line.
    """
    # Ctrl-C sends SIGINT to all processes of a terminal. Ignore it, because the parent ends these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # from now on, stdout is the log, and `report` is the pipe to the parent
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, args=[report.fileno()], daemon=True).start()
    try:
        kernel_state.restore(kernel)
        by_name(task)(job)
    except (ValueError, OSError) as error:
        print(json.dumps(_as_report(error)), file=report, flush=True)
        with contextlib.suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
        sys.exit(1)


def _as_report(error: Exception) -> dict:
    """Return an error as a dict for JSON, for `_failure`.

    Its type is the nearest built-in one that can be made from a text alone. UnicodeDecodeError and
    UnicodeEncodeError cannot, so they become their base UnicodeError.
    """
    for base in type(error).__mro__:
        is_built_in = getattr(builtins, base.__name__, None) is base
        if is_built_in and UnicodeError not in base.__bases__:
            break
    return {"type": base.__name__, "text": str(error), "errno": getattr(error, "errno", None)}


def _end_with_parent(report: int) -> None:
    """End this process when the parent dies or closes its side of the pipe `report`."""
    poll = select.poll()
    poll.register(report, 0)  # 0: errors only, which are always reported
    poll.poll()
    os._exit(1)
