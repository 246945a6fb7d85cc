"""A real Jupyter kernel for tests: run a cell, get its text, interrupt it, count what it has left behind."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import psutil
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

HANGS = 600  # seconds after which what was waited for does not come; a busy machine needs one for its imports


class Kernel:
    """A kernel of its own process; `run` sends a cell and waits for its end.

    Args:
        environ: variables on top of this process's.
        wrap: a command that starts the kernel's command, `["unshare", "-m", ...]`.
    """

    def __init__(self, environ=None, wrap=()):
        self.manager = KernelManager(
            kernel_name="python3", transport="ipc"
        )  # no port for two kernels to want
        self.folder = tempfile.mkdtemp(prefix="kernel-")  # the path of a socket has to be short
        self.manager.ip = f"{self.folder}/s"
        self.manager.kernel_spec.argv = [*wrap, sys.executable, *self.manager.kernel_spec.argv[1:]]
        self.manager.start_kernel(
            env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1", **(environ or {})}
        )
        self._connect(self.manager.client())

    def _connect(self, client):
        self.client, self.process = client, None
        self.client.start_channels()
        try:
            self._wait_for_ready()
            self.process = psutil.Process(int(self.run("import os; print(os.getpid())")))
        except BaseException:
            self.close()
            raise

    def _wait_for_ready(self):
        self.client.wait_for_ready(timeout=HANGS)

    def run(self, code, timeout=HANGS):
        """Return the text a cell prints or shows; `error` is then (name, traceback), or None."""
        texts, self.error = [], None

        def take(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                texts.append(content["text"])
            elif message["msg_type"] == "error":
                self.error = content["ename"], "\n".join(content["traceback"])
            elif message["msg_type"] in ("execute_result", "display_data"):
                texts.append(content["data"].get("text/plain", ""))

        self.client.execute_interactive(code, output_hook=take, timeout=timeout)
        return "".join(texts)

    def workers(self):
        """Return the processes below the kernel that are alive."""
        try:
            children = self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if is_alive(child)]

    def wait_for_workers(self, count, seconds=HANGS):
        """Return the workers as soon as there are so many."""
        deadline = time.monotonic() + seconds
        while len(workers := self.workers()) < count:
            assert time.monotonic() < deadline, (
                f"{len(workers)} of {count} workers after {seconds} s"
            )
            time.sleep(0.02)
        return workers

    def later(self, seconds, do):
        """Do something in a moment, while a cell runs."""
        threading.Timer(seconds, do).start()

    def close(self):
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        shutil.rmtree(self.folder)


class ServedKernel(Kernel):
    """A kernel whose server is a process of its own, as a notebook server is."""

    SERVER = """
import sys, time
from jupyter_client.manager import KernelManager
manager = KernelManager(kernel_name="python3", transport="ipc", ip=sys.argv[2], connection_file=sys.argv[1])
manager.start_kernel()
time.sleep(3600)
"""

    def __init__(self, environ=None):
        self.folder = tempfile.mkdtemp(prefix="kernel-")
        file = f"{self.folder}/kernel.json"
        command = [sys.executable, "-c", self.SERVER, file, f"{self.folder}/s"]
        self.server = subprocess.Popen(command, env={**os.environ, **(environ or {})})
        while not (os.path.exists(file) and os.path.getsize(file)):
            assert self.server.poll() is None, "the server ended"
            time.sleep(0.1)
        client = BlockingKernelClient()
        client.load_connection_file(file)
        self._connect(client)

    def _wait_for_ready(self):
        """Wait; without a manager of its own the client takes one late heartbeat for the kernel's death."""
        late = time.monotonic() + HANGS
        while True:
            try:
                return self.client.wait_for_ready(timeout=HANGS)
            except RuntimeError:
                if self.server.poll() is not None or time.monotonic() > late:
                    raise

    def close(self):
        """End the server, and the kernel if it is still there."""
        self.client.stop_channels()
        self.server.kill()
        self.server.wait()
        if self.process and is_alive(self.process):
            self.process.kill()
        shutil.rmtree(self.folder)


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
