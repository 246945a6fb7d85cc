"""A stand-in for Vertex AI on this machine, to try a job before it costs anything: it really runs what is submitted.

It answers the few requests that `Job` sends, over HTTP on the loopback interface, and keeps its bucket in a folder.
A job is a process of this machine instead of a container on a TPU: the same bundle, with the same arguments and the
same folders for its checkpoints. What it does not play: images, quotas, permissions, prices, and the queue for a TPU.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_KIT = Path(__file__).parents[2]
_OUTPUT = "output.txt"  # of a job, in its folder


@dataclass
class _LocalJob:
    """A job: what was sent, and the process that runs it."""

    request: dict
    folder: Path
    process: subprocess.Popen
    began: float
    cancelled: bool = False

    @property
    def state(self) -> str:
        code = self.process.poll()
        if self.cancelled:
            return "JOB_STATE_CANCELLING" if code is None else "JOB_STATE_CANCELLED"
        if code is None:
            return "JOB_STATE_RUNNING"
        return "JOB_STATE_FAILED" if code else "JOB_STATE_SUCCEEDED"

    def answer(self) -> dict:
        """Return the job as the API writes it."""
        job = self.request | {"state": self.state, "startTime": _timestamp(self.began)}
        if job["state"] == "JOB_STATE_FAILED":
            words = (self.folder / _OUTPUT).read_text(errors="replace").strip().splitlines()
            job["error"] = {"code": 3, "message": words[-1] if words else f"exit status {self.process.returncode}"}
        return job


class VertexStandIn:
    """A Vertex AI and a Cloud Storage of this machine, until `close`.

    Args:
        folder: where its buckets are, one folder each; a job also keeps there what it printed, `output.txt`.

    Attributes:
        connection: what `job(..., **connection)` takes to reach it.
        requests: (method, path) of what has been asked, in order.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder).absolute()
        self.requests: list[tuple[str, str]] = []
        self._jobs: dict[str, _LocalJob] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cloud": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self._emulator_before = os.environ.get("STORAGE_EMULATOR_HOST")
        os.environ["STORAGE_EMULATOR_HOST"] = self.address  # how Google's client of Cloud Storage is told another one

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def connection(self) -> dict:
        """The keywords with which a job comes here; the credential is none, and none is asked for."""
        with contextlib.suppress(ImportError):  # submit() then says what to install
            from google.auth.credentials import AnonymousCredentials

            anonymous = {"credentials": AnonymousCredentials()}
            return {"project": "stand-in", "transport": "rest", "endpoint": self.address} | anonymous
        return {"project": "stand-in"}

    def close(self) -> None:
        """End its jobs and stop answering."""
        for one in self._jobs.values():
            _end(one.process, signal.SIGKILL)
            one.process.wait()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        os.environ.pop("STORAGE_EMULATOR_HOST", None)
        if self._emulator_before is not None:
            os.environ["STORAGE_EMULATOR_HOST"] = self._emulator_before

    def __enter__(self) -> "VertexStandIn":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, method: str, address: str, content_type: str, body: bytes) -> tuple[int, dict]:
        """Return the HTTP status and the JSON for a request."""
        path, query = urlsplit(address).path, parse_qs(urlsplit(address).query)
        self.requests.append((method, path))
        if path.startswith("/upload/storage/v1/b/"):
            return self._upload(path.split("/")[5], content_type, body, once=query.get("ifGenerationMatch") == ["0"])
        collection = re.fullmatch("/v1/(projects/[^/]+/locations/[^/]+/customJobs)", path)
        if collection and method == "POST":
            return 200, self._create(collection[1], json.loads(body))
        if collection:
            return 200, {"customJobs": [one.answer() for one in self._jobs.values() if _is_meant(one, query)]}
        resource, _, verb = unquote(path).removeprefix("/v1/").partition(":")
        there = self._jobs.get(resource)
        if there is None:
            return _refusal(404, f"{resource} does not exist")
        if verb == "cancel":
            return self._cancel(there)
        return 200, there.answer()

    def _upload(self, bucket: str, content_type: str, body: bytes, once: bool) -> tuple[int, dict]:
        boundary = re.search('boundary="?([^";]+)', content_type)[1].encode()
        _, about, data, _ = body.split(b"--" + boundary)  # its name, then the file, as multipart/related
        name = json.loads(about.partition(b"\r\n\r\n")[2])["name"]
        path = self.folder / bucket / name
        if once and path.exists():
            return _refusal(412, f"{name} is there")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n"))
        return 200, {"name": name, "bucket": bucket, "generation": "1", "metageneration": "1"}

    def _create(self, parent: str, request: dict) -> dict:
        resource = f"{parent}/{len(self._jobs) + 1}"
        spec = request["jobSpec"]
        container = spec["workerPoolSpecs"][0]["containerSpec"]
        folder = self._here(spec["baseOutputDirectory"]["outputUriPrefix"])
        folder.mkdir(parents=True, exist_ok=True)
        variables = {one["name"]: one["value"] for one in container.get("env", []) if one["name"] != "PJRT_DEVICE"}
        variables |= {"AIP_CHECKPOINT_DIR": f"{folder}/checkpoints", "AIP_MODEL_DIR": f"{folder}/model"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_KIT), os.environ.get("PYTHONPATH")]))
        command = [self._here(word) if word.startswith("/gcs/") else word for word in container["command"]]
        with (folder / _OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command[1:], *container.get("args", [])],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        self._jobs[resource] = _LocalJob(request | {"name": resource}, folder, process, time.time())
        return request | {"name": resource, "state": "JOB_STATE_PENDING"}

    def _cancel(self, there: _LocalJob) -> tuple[int, dict]:
        if there.process.poll() is not None:
            return _refusal(400, f"{there.request['name']} is over")
        there.cancelled = True
        _end(there.process, signal.SIGTERM)
        return 200, {}

    def _here(self, address: str) -> Path:
        """Return where an object of a bucket is on this machine: gs://bucket/name, or as it is mounted there."""
        return self.folder / address.removeprefix("gs://").removeprefix("/gcs/")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cloud: VertexStandIn

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            status, answer = self.cloud.answer(self.command, self.path, self.headers.get("Content-Type", ""), body)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            status, answer = _refusal(400, f"this is no request that the stand-in knows: {error!r}")
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing for each request."""


def _is_meant(one: _LocalJob, query: dict[str, list[str]]) -> bool:
    wanted = re.fullmatch('labels.([^=]+)="(.*)"', query.get("filter", [""])[0])
    return wanted is None or one.request.get("labels", {}).get(wanted[1]) == wanted[2]


def _refusal(status: int, message: str) -> tuple[int, dict]:
    return status, {"error": {"code": status, "message": message}}


def _timestamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _end(process: subprocess.Popen, number: int) -> None:
    """Signal the job; with SIGKILL all that is in its session's group, since nothing else would end them."""
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
