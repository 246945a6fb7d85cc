"""Forks in place of the fresh processes that make packs, so that no test waits for their imports."""

import json
import os
import subprocess
import sys
import traceback
import warnings
from types import SimpleNamespace


class Fork:
    """What `tpukit.datasets.processes` takes of `subprocess.Popen`, as a fork of this process."""

    def __init__(self, command, *, stdin, stdout, stderr, env):
        pipes = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # Python 3.12: of the threads that pytest-xdist has
            self.pid = os.fork()
        (for_child, to_child), (from_child, of_child) = pipes
        if not self.pid:
            os.close(to_child), os.close(from_child)
            _become(command, (for_child, of_child, stderr.fileno()), env)
        os.close(for_child), os.close(of_child)
        self.returncode, self.stdin, self.stdout = (
            None,
            os.fdopen(to_child, "wb"),
            os.fdopen(from_child, "rb"),
        )

    def poll(self, options=os.WNOHANG):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        return self.poll(0)

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, 9)


def _become(command, files, env):
    """Run the command's task in this fork and end it."""
    *_, package, task = command
    status = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, "rw"[number > 0]) for number in range(3)
        )
        os.environ.clear()
        os.environ.update(env)
        sys.path.insert(0, package)
        from tpukit.datasets.processes import _run

        _run(task, json.loads(sys.stdin.buffer.readline()))
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


in_place_of_subprocess = SimpleNamespace(Popen=Fork, PIPE=subprocess.PIPE)
