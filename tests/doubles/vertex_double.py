"""A test double of Vertex AI and Cloud Storage, which executes jobs on this machine.

It answers the requests of Google's own SDKs over HTTP on the loopback interface, and keeps each
bucket in a folder. A job is a process of this machine instead of a container on a TPU, with /gcs
mapped to that folder. A container that fails or loses its machine is started again, as by Vertex
AI. It has no images, quotas, permissions, prices or queue.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

MARK = "TPUKIT_TEST_MACHINE"  # in the environment of every process of one machine
_RESTARTS = 3
# The configuration of an image and of its network; a container sees nothing else of this process.
_OF_THE_IMAGE = (
    "PATH|HOME|LANG|TPUKIT_ENVIRONMENT|(UV|PIP|SSL_CERT)_.*|STORAGE_EMULATOR_HOST|GCE_METADATA_HOST"
)
_OF_THE_IMAGE += "|(?i:https?|no)_(?i:proxy)"


def image_environment() -> dict[str, str]:
    """Return the variables that a container has without anything passed to it."""
    return {name: value for name, value in os.environ.items() if re.fullmatch(_OF_THE_IMAGE, name)}


def kill_machine(mark: str) -> None:
    """Kill all processes of a machine at once, containers included, as a loss of power does."""
    for process in processes_of(mark):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def processes_of(mark: str) -> list[int]:
    """Return the processes of a machine, without this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for variable in (process / "environ").read_bytes().decode(errors="replace").split("\0"):
                if (
                    f"{variable}/".startswith(f"{MARK}={mark}/")
                    and int(process.name) != os.getpid()
                ):
                    found.append(int(process.name))
    return found


class Buckets:
    """Cloud Storage: each bucket is a folder, each object a file."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._uploads: dict[str, tuple[str, str, dict, bytes]] = {}
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, query: dict, headers, body: bytes):
        """Return (status, JSON or bytes, headers) for a request of the JSON API."""
        upload = re.fullmatch("/upload/storage/v1/b/([^/]+)/o", path)
        if upload:
            return self._upload(upload[1], query, headers, body)
        place = re.fullmatch("(/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", path)
        if place is None:
            return refusal(404, f"no such request: {path}")
        bucket = place[2]
        name = unquote(place[3] or "")
        if not name:
            is_list = path.endswith("/o")
            return (
                self._list(bucket, query)
                if is_list
                else (200, {"name": bucket, "location": "HERE"}, {})
            )
        file = self.folder / bucket / name
        if not file.is_file():
            return refusal(404, f"No such object: {bucket}/{name}")
        if method == "DELETE":
            file.unlink()
            return 204, b"", {}
        about = self._about(bucket, name)
        if place[1] or query.get("alt") == ["media"]:
            return 200, file.read_bytes(), {"X-Goog-Hash": f"crc32c={about['crc32c']}"}
        return 200, about, {}

    def _upload(self, bucket: str, query: dict, headers, body: bytes):
        kind = query.get("uploadType", [""])[0]
        if kind == "multipart":
            boundary = re.search('boundary="?([^";]+)', headers["Content-Type"])[1].encode()
            _, about, data, _ = body.split(b"--" + boundary)
            name = json.loads(about.partition(b"\r\n\r\n")[2])["name"]
            return self._write(
                bucket, name, query, data.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
            )
        if "upload_id" not in query:
            number = str(len(self._uploads))
            self._uploads[number] = (bucket, json.loads(body)["name"], query, b"")
            place = f"http://{headers['Host']}/upload/storage/v1/b/{bucket}/o?upload_id={number}"
            return 200, {}, {"Location": place}
        number = query["upload_id"][0]
        bucket, name, asked, before = self._uploads[number]
        self._uploads[number] = (bucket, name, asked, before + body)
        total = headers.get("Content-Range", "/*").rpartition("/")[2]
        if total.isdigit() and len(before + body) < int(total):
            return 308, b"", {"Range": f"bytes=0-{len(before + body) - 1}"}
        return self._write(bucket, name, asked, before + body)

    def _write(self, bucket: str, name: str, query: dict, data: bytes):
        file = self.folder / bucket / name
        with self._lock:
            wanted = query.get("ifGenerationMatch", [None])[0]
            there = str(file.stat().st_mtime_ns) if file.is_file() else "0"
            if wanted not in (None, there):
                return refusal(412, f"{name} has generation {there}")
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                dir=self.folder, prefix=".part-", delete=False
            ) as part:
                part.write(data)
            os.replace(part.name, file)
        return 200, self._about(bucket, name), {}

    def _about(self, bucket: str, name: str) -> dict:
        import google_crc32c

        file = self.folder / bucket / name
        data = file.read_bytes()
        generation = str(file.stat().st_mtime_ns)
        checksum = base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
        about = {"kind": "storage#object", "name": name, "bucket": bucket, "generation": generation}
        return about | {"size": str(len(data)), "crc32c": checksum, "metageneration": "1"}

    def _list(self, bucket: str, query: dict):
        prefix, delimiter = (query.get(one, [""])[0] for one in ("prefix", "delimiter"))
        top = self.folder / bucket
        items = []
        folders = set()
        for file in sorted(top.rglob("*")):
            name = file.relative_to(top).as_posix()
            if file.is_dir() or not name.startswith(prefix) or name.startswith(".part-"):
                continue
            rest = name.removeprefix(prefix)
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            with contextlib.suppress(FileNotFoundError):  # it was replaced at this moment
                items.append(self._about(bucket, name))
        return 200, {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}, {}


@dataclass
class _LocalJob:
    """A custom job: its request, and the container that runs now."""

    request: dict
    command: list[str]
    mark: str
    disk: Path
    output: Path
    began: float = field(default_factory=time.time)
    starts: int = 0
    state: str = "JOB_STATE_RUNNING"
    process: subprocess.Popen | None = None

    def answer(self) -> dict:
        """Return the job as the API writes it."""
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began))
        job = self.request | {"state": self.state, "createTime": began, "startTime": began}
        if self.state == "JOB_STATE_FAILED":
            code = self.process.returncode
            words = f"The replica workerpool0-0 exited with a non-zero status of {code}."
            job["error"] = {"code": 3, "message": words}
        return job

    def start(self) -> None:
        """Start the container on an empty disk."""
        self.starts += 1
        self.disk.mkdir(parents=True, exist_ok=True)
        given = self.request["jobSpec"]["workerPoolSpecs"][0]["containerSpec"].get("env", [])
        variables = {one["name"]: one["value"] for one in given}
        variables |= {MARK: self.mark, "TMPDIR": str(self.disk), "CLOUD_ML_JOB_ID": self.mark}
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=image_environment() | variables,
                start_new_session=True,
            )

    def watch(self) -> None:
        """Start the container again until it succeeds, is cancelled, or has failed too often."""
        while True:
            code = self.process.wait()
            kill_machine(self.mark)
            shutil.rmtree(self.disk, ignore_errors=True)
            if self.state == "JOB_STATE_CANCELLING":
                self.state = "JOB_STATE_CANCELLED"
                return
            if code == 0 or self.starts > _RESTARTS:
                self.state = "JOB_STATE_FAILED" if code else "JOB_STATE_SUCCEEDED"
                return
            self.start()


class VertexDouble:
    """A Vertex AI and a Cloud Storage of this machine, until `close`.

    Args:
        folder: for its buckets, one folder each.

    Attributes:
        connection: the keywords with which `VertexTarget` reaches it.
        requests: (method, path) of all requests, in order.
        jobs: the custom jobs by their resource name.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.buckets = Buckets(self.folder)
        self.requests: list[tuple[str, str]] = []
        self.jobs: dict[str, _LocalJob] = {}
        self._scratch = Path(tempfile.mkdtemp(prefix="machines-"))
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"cloud": self})
        )
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()
        self._emulator_before = os.environ.get("STORAGE_EMULATOR_HOST")
        # Google's client of Cloud Storage reads it
        os.environ["STORAGE_EMULATOR_HOST"] = self.address

    @property
    def address(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def connection(self) -> dict:
        """The keywords that lead a target to this server; credentials are not checked."""
        with contextlib.suppress(ImportError):  # submit() then says which package is missing
            from google.auth.credentials import AnonymousCredentials

            anonymous = {"credentials": AnonymousCredentials()}
            return {"transport": "rest", "endpoint": self.address} | anonymous
        return {}

    def preempt(self, resource: str) -> None:
        """Take the machine of a job back without notice: all processes and the disk are lost."""
        kill_machine(self.jobs[resource].mark)

    def close(self) -> None:
        """End all jobs and the server."""
        for job in self.jobs.values():
            job.state = "JOB_STATE_CANCELLING"
            kill_machine(job.mark)
            job.process.wait()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        shutil.rmtree(self._scratch, ignore_errors=True)
        os.environ.pop("STORAGE_EMULATOR_HOST", None)
        if self._emulator_before is not None:
            os.environ["STORAGE_EMULATOR_HOST"] = self._emulator_before

    def __enter__(self) -> "VertexDouble":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, method: str, address: str, headers, body: bytes):
        """Return (status, JSON or bytes, headers) for a request."""
        path = urlsplit(address).path
        query = parse_qs(urlsplit(address).query)
        self.requests.append((method, path))
        if "/storage/v1/b/" in path:
            return self.buckets.answer(method, path, query, headers, body)
        collection = re.fullmatch("/v1/(projects/[^/]+/locations/[^/]+/customJobs)", path)
        if collection and method == "POST":
            return 200, self._create(collection[1], json.loads(body)), {}
        if collection:
            asked = query.get("filter", [""])[0]
            found = [job.answer() for job in self.jobs.values() if _is_meant(job.request, asked)]
            return 200, {"customJobs": found}, {}
        resource, _, verb = unquote(path).removeprefix("/v1/").partition(":")
        job = self.jobs.get(resource)
        if job is None:
            return refusal(404, f"{resource} does not exist")
        if verb == "cancel":
            return self._cancel(job)
        return 200, job.answer(), {}

    def _create(self, parent: str, request: dict) -> dict:
        number = len(self.jobs) + 1
        resource = f"{parent}/{number}"
        container = request["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
        mounted = str(self.folder) + "/"
        words = [*container["command"], *container.get("args", [])]
        command = [word.replace("/gcs/", mounted) for word in words]
        disk = self._scratch / str(number)
        job = _LocalJob(
            request | {"name": resource}, command, f"{disk}", disk, self._scratch / f"{number}.txt"
        )
        job.start()
        self.jobs[resource] = job
        threading.Thread(target=job.watch, daemon=True).start()
        return job.answer() | {"state": "JOB_STATE_PENDING"}

    def _cancel(self, job: _LocalJob):
        if job.state not in ("JOB_STATE_RUNNING", "JOB_STATE_CANCELLING"):
            return refusal(400, f"{job.request['name']} is over")
        job.state = "JOB_STATE_CANCELLING"
        job.process.terminate()
        return 200, {}, {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cloud: VertexDouble

    def do_GET(self) -> None:
        body = self._body()
        try:
            status, answer, more = self.cloud.answer(self.command, self.path, self.headers, body)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            status, answer, more = refusal(400, f"not a request that this server knows: {error!r}")
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        kind = (
            "application/octet-stream"
            if isinstance(answer, bytes)
            else "application/json; charset=UTF-8"
        )
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_PUT = do_DELETE = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *_: object) -> None:
        """Print nothing for each request."""


def refusal(status: int, message: str):
    """Return an answer as Google's APIs refuse."""
    return status, {"error": {"code": status, "message": message}}, {}


def _is_meant(request: dict, asked: str) -> bool:
    wanted = re.fullmatch('(?:labels.([^=]+)|display_name)="(.*)"', asked)
    if wanted is None:
        return True
    value = request.get("labels", {}).get(wanted[1]) if wanted[1] else request["displayName"]
    return value == wanted[2]
