"""Run a job on this machine: a dry run of the start command that every other target uses."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tpukit.cloud.target import JobPlan, PlatformState, variables_of

# Settings of the machine. Nothing else of this process's environment is passed on.
_OF_THE_MACHINE = re.compile(
    "PATH|HOME|TMPDIR|LANG|LC_ALL|TPUKIT_ENVIRONMENT|(UV|PIP|SSL_CERT|REQUESTS)_.*"
    "|(?i:https?|no|all)_(?i:proxy)"
)
_LOG = "machine.log"
_KILL_SECONDS = 5.0


class LocalTarget:
    """Processes of this machine, detached from the one that submits the job."""

    name = "local"

    def start(self, plan: JobPlan) -> dict:
        """Start run.sh in its own session, with a temporary folder as the machine's disk."""
        work = tempfile.mkdtemp(prefix="tpukit-job-")
        environment = variables_of(plan)
        for name, value in os.environ.items():
            if _OF_THE_MACHINE.fullmatch(name):
                environment.setdefault(name, value)
        with open(Path(work, _LOG), "wb") as log:
            process = subprocess.Popen(
                plan.command(plan.folder, plan.folder, work),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.returncode = 0  # it may outlive this process, of which Popen would warn
        handle = {"pid": process.pid, "started": _start_time(process.pid), "work": work}
        return handle | {"grace": plan.options.grace}

    def state(self, handle: dict) -> PlatformState:
        """Return running or gone: the result is in the job's folder."""
        return PlatformState("running" if _is_alive(handle) else "gone")

    def logs(self, handle: dict) -> str:
        log = Path(handle["work"], _LOG)
        return log.read_text(errors="replace") if log.exists() else ""

    def cancel(self, handle: dict) -> None:
        """Interrupt the cell, give it its time to save, then end all processes of the job."""
        # After the grace period the kernel is killed, and the results are copied.
        waits = (
            (signal.SIGTERM, 2 * handle["grace"] + _KILL_SECONDS),
            (signal.SIGKILL, _KILL_SECONDS),
        )
        for number, seconds in waits:
            if not _is_alive(handle):
                return
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(handle["pid"], number)
                else:
                    os.kill(handle["pid"], number)
            deadline = time.monotonic() + seconds
            while _is_alive(handle) and time.monotonic() < deadline:
                time.sleep(0.1)

    def clean_up(self, handle: dict) -> None:
        """Delete the temporary folder, which has the job's environment."""
        deadline = time.monotonic() + _KILL_SECONDS
        while _is_alive(handle) and time.monotonic() < deadline:
            time.sleep(0.1)  # the process ends a moment after it has written the result
        shutil.rmtree(handle["work"], ignore_errors=True)


def _is_alive(handle: dict) -> bool:
    """Compare the start time as well, because another process may have the same number now."""
    started = _start_time(handle["pid"])
    return started is not None and started == handle["started"]


def _start_time(pid: int) -> str | None:
    """Return the start time of a process; None for one that has ended.

    A process of ours that has ended is a zombie until somebody waits for it, which is done here.
    """
    state, started = _state_and_start_time(pid)
    if state in ("Z", "X", ""):
        with contextlib.suppress(ChildProcessError):  # it was started by another process
            os.waitpid(pid, os.WNOHANG)
        return None
    return started


def _state_and_start_time(pid: int) -> tuple[str, str]:
    """Return the letter of a process's state, and its start time; ("", "") if there is none."""
    if Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return fields[0], fields[19]
        return "", ""
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    shown = subprocess.run(command, capture_output=True, text=True).stdout.split()
    if not shown:
        return "", ""
    return shown[0][0], " ".join(shown[1:])
