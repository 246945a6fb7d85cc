"""Run a job on this machine, as a dry run of the start command of all other targets."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tpukit.cloud.job_folder import PathFolder, read_json
from tpukit.cloud.target import JobPlan, PlatformState, variables_of

# The variables that the job gets from this process: only settings of the machine.
_OF_THE_MACHINE = re.compile(
    "PATH|HOME|TMPDIR|LANG|LC_ALL|TPUKIT_ENVIRONMENT|(UV|PIP|SSL_CERT|REQUESTS)_.*"
    "|(?i:https?|no|all)_(?i:proxy)"
)
_LOG = "machine.log"
_KILL_SECONDS = 5.0  # the longest wait for a process to end


class LocalTarget:
    """Jobs in processes of this machine, which may outlive the process that submits them."""

    name = "local"

    def start(self, plan: JobPlan) -> dict:
        """Start run.sh as a separate process in a new work folder, unless it runs already."""
        earlier = read_json(PathFolder(Path(plan.folder)), "handle.json")
        if earlier and _is_alive(earlier):
            return earlier
        if earlier:
            self.clean_up(earlier)
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
        # Prevents Popen's warning about a process that is still running when Popen is deleted.
        process.returncode = 0
        handle = {"pid": process.pid, "started": _start_time(process.pid), "work": work}
        return handle | {"grace": plan.options.grace}

    def state(self, handle: dict) -> PlatformState:
        """Return "running" until the first process of the job has ended, then "gone"."""
        return PlatformState("running" if _is_alive(handle) else "gone")

    def logs(self, handle: dict) -> str:
        log = Path(handle["work"], _LOG)
        return log.read_text(errors="replace") if log.exists() else ""

    def cancel(self, handle: dict) -> None:
        """Interrupt the cell, and wait until it has saved and the job's processes have ended.

        If the first process of the job does not end in time, all processes of the job are killed.
        """
        # Twice the grace period, because after it the runner ends the kernel and copies results.
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
        """Delete the temporary folder, which has the virtual environment of the job."""
        deadline = time.monotonic() + _KILL_SECONDS
        while _is_alive(handle) and time.monotonic() < deadline:
            time.sleep(0.1)  # the process ends a moment after it has written the result
        shutil.rmtree(handle["work"], ignore_errors=True)


def _is_alive(handle: dict) -> bool:
    """Return whether the process of a handle is running.

    Its start time is compared too, because the system may have given its id to another process.
    """
    started = _start_time(handle["pid"])
    return started is not None and started == handle["started"]


def _start_time(pid: int) -> str | None:
    """Return the start time of a process as text; None if the process has ended.

    A child of this process that has ended remains as a zombie until its parent waits for it. This
    function does that.
    """
    state, started = _state_and_start_time(pid)
    if state in ("Z", "X", ""):
        with contextlib.suppress(ChildProcessError):  # it is not a child of this process
            os.waitpid(pid, os.WNOHANG)
        return None
    return started


def _state_and_start_time(pid: int) -> tuple[str, str]:
    """Return state, as a letter, and start time of a process; ("", "") if it does not exist."""
    if Path("/proc/self/stat").exists():  # Linux: proc(5), fields 3 and 22
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return fields[0], fields[19]
        return "", ""
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    shown = subprocess.run(command, capture_output=True, text=True).stdout.split()
    if not shown:
        return "", ""
    return shown[0][0], " ".join(shown[1:])
