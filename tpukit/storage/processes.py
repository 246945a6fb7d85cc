"""Share work out to fresh Python processes: a bar while they run, their failure told as if it had happened here."""

import builtins
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tpukit.display.progress import screen

_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from tpukit.storage.processes import _run; _run(sys.argv[2])"


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
) -> None:
    """Run one fresh Python process for each job, all at once, and wait until the last has ended.

    Not forks: a notebook's kernel has threads and may hold a device. Not multiprocessing's spawn: it runs the caller's
    script again, which needs a guard the caller may not have. The processes end when this one does, however it ends.

    Args:
        task: "package.module:function", called with the job as its one argument.
        jobs: what JSON can carry, one for each process.
        label: what the bar is called.
        total: what `done()` returns at the end.
        done: how far the processes have come together; asked ten times a second.
        folder: where `process-<n>.log` holds what they print, until all have ended well.
        progress: "widgets", "line", "text" or "off", as for `launch`; None decides by where this runs.
        environ: their environment; each is told to use one thread.

    Raises:
        ValueError, OSError: a task raised it, and all processes were ended; the text is the task's own.
        RuntimeError: a process ended in any other way; the text holds the end of its log.
    """
    kit = str(Path(__file__).resolve().parents[2])  # the folder that tpukit is in
    # One thread each: numpy's own threads would only get in each other's way.
    environ = {**environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    logs = [Path(folder) / f"process-{rank}.log" for rank in range(len(jobs))]
    running = []
    try:
        for job, log in zip(jobs, logs, strict=True):
            with log.open("wb") as printed:
                process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, kit, task],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=printed,
                    env=environ,
                )
            running.append(process)
            with contextlib.suppress(BrokenPipeError):  # it has died already, which is told below
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
        with screen(progress) as display:
            while True:
                ended = [process.poll() for process in running]
                display.bar(label, done(), total)
                display.draw()
                for status, process, log in zip(ended, running, logs, strict=True):
                    if status:
                        raise _failure(label, status, process.stdout.read(), log)
                if None not in ended:
                    break
                time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
    for log in logs:
        log.unlink()


@contextlib.contextmanager
def lock_folder(folder) -> Iterator[None]:
    """Let one process at a time into a folder; the system opens the lock when a process dies."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network drives have none either
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _failure(label: str, status: int, report: bytes, log: Path) -> Exception:
    """Make the exception of a process again: its own type and text where a caller can act on them."""
    printed = log.read_text(errors="replace")[-2000:]
    error = RuntimeError(f"a process of {label!r} ended with status {status}\n{printed}")
    if report:
        told = json.loads(report)
        found = getattr(builtins, told["type"])(told["text"])
        found.errno = told["errno"]
        found.__cause__ = error
        return found
    return error


def _run(task: str) -> None:
    """Be such a process: the job is the first line of stdin, whose end says that the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of a terminal; the parent ends its processes
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, function = task.split(":")
    try:
        getattr(importlib.import_module(module), function)(job)
    except (ValueError, OSError) as error:
        kind = next(base for base in type(error).__mro__ if getattr(builtins, base.__name__, None) is base)
        told = {"type": kind.__name__, "text": str(error), "errno": getattr(error, "errno", None)}
        print(json.dumps(told), file=report, flush=True)
        with contextlib.suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
        sys.exit(1)


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)
