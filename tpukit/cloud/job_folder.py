"""Read and write the folder of a job: a path, or gs://bucket/folder through Google's client.

The files of a job, by their names:

    job.json             the request; created only once, so that a name belongs to one job
    run.sh, in/          the sent files: the start script, the notebook, packages, files/
    handle.json          the target's handle for the platform's job
    cancel               exists if the job should end
    attempts/0001.json   one file for each start on a machine
    state.json           state, attempt, cell and time
    out/                 copies of the new and changed files of the working directory
    log/01-000001.txt    the output of each attempt, in pieces
    notebook.ipynb       the notebook as far as it was executed
    notebook-attempt-1.ipynb       the same of an earlier attempt
    notebook.html, metrics.json    written at the end
    manifest.json        written at the end: size and checksum of all results
    result.json          written last, when the job is over; by `Job.wait`, if the platform ended
                         the job before a machine could write it
"""

import base64
import contextlib
import copy
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from tpukit.cloud.answers import Service
from tpukit.essentials.display import InvalidValueError, NotInstalledError
from tpukit.essentials.environment import write_whole

# Names of buckets have 3 to 63 characters: https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(?:/(.*))?")
_SECONDS = 60.0  # the timeout of a request
# The end of the name of a file that is being written. It is not ".part", because a notebook may
# have such files of its own, and `names` must return them.
_UNFINISHED = ".tpukit-unfinished"


class Stored(NamedTuple):
    """The size and the checksum of a stored file."""

    size: int  # bytes
    crc32c: str  # CRC32C in base64, as in Cloud Storage


def open_folder(
    address: str | os.PathLike, *, project: str | None = None, credentials=None
) -> "JobFolder":
    """Return the folder at an address; the folder need not exist.

    Args:
        address: a path, or gs://bucket/folder.
        project: the Google Cloud project; None for GOOGLE_CLOUD_PROJECT.
        credentials: credentials of google-auth; None for those of this machine.

    Raises:
        InvalidValueError: the address is neither a path nor a bucket.
        NotInstalledError: the address is a bucket, and Google's client is not installed.
    """
    text = os.fspath(address)
    if "://" not in text:
        return PathFolder(Path(text).absolute())
    found = _BUCKET.fullmatch(text.rstrip("/"))
    if not found:
        raise InvalidValueError(
            f"{text!r} is not the address of a bucket", fix='"gs://my-bucket/runs"'
        )
    return BucketFolder(
        found[1], (found[2] or "").strip("/"), project=project, credentials=credentials
    )


def address_of(bucket: str | os.PathLike, name: str) -> str:
    """Return the address of the folder `name` in a bucket or path, without opening it."""
    text = os.fspath(bucket)
    return f"{text.rstrip('/')}/{name}" if "://" in text else str(Path(text).absolute() / name)


def read_json(folder: "JobFolder", name: str) -> dict:
    """Return the JSON object in a file; {} if the file does not exist or is not yet complete."""
    with contextlib.suppress(ValueError):
        return json.loads(folder.read(name) or b"{}")
    return {}


def write_json(folder: "JobFolder", name: str, value: dict) -> None:
    """Write an object as JSON."""
    folder.write(name, json.dumps(value, indent=1).encode())


class PathFolder:
    """A folder of this machine, or of a mounted bucket."""

    def __init__(self, path: Path):
        self.address = str(path)
        self._path = path

    def read(self, name: str) -> bytes | None:
        """Return the contents of a file; None if it does not exist."""
        try:
            return (self._path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes | Path) -> None:
        """Write bytes, or a copy of a file of this machine; replace an old file atomically."""
        place = self._place(name)
        # With the process id, because two processes may write the same file at the same time.
        part = place.with_name(f"{place.name}.{os.getpid()}{_UNFINISHED}")
        with write_whole(place, part=part) as written:
            if isinstance(content, bytes):
                written.write(content)
                return
            with open(content, "rb") as source:
                shutil.copyfileobj(source, written)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists; return True if it was written."""
        # The file is created before it is written, so a reader may see an empty file for a moment.
        try:
            with open(self._place(name), "xb") as written:
                written.write(content)
        except FileExistsError:
            return False
        return True

    def download(self, name: str, file: Path) -> None:
        """Copy a file of the folder to this machine."""
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._path / name, file)

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        (self._path / name).unlink(missing_ok=True)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all files that begin with a prefix, sorted."""
        place = self._path / prefix.rpartition("/")[0]
        files = [
            path
            for path in place.rglob("*")
            if path.is_file() and not path.name.endswith(_UNFINISHED)
        ]
        names = sorted(path.relative_to(self._path).as_posix() for path in files)
        return [name for name in names if name.startswith(prefix)]

    def stored(self, name: str) -> Stored | None:
        """Return size and checksum of a file; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return stored_file(self._path / name)
        return None

    def folders(self) -> list[str]:
        """Return the names of the folders directly in this one, sorted."""
        if not self._path.is_dir():
            return []
        return sorted(path.name for path in self._path.iterdir() if path.is_dir())

    def below(self, name: str) -> "PathFolder":
        """Return a subfolder by its name. The subfolder need not exist."""
        return PathFolder(self._path / name)

    def _place(self, name: str) -> Path:
        place = self._path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place


class BucketFolder:
    """A folder in a bucket, with the methods of `PathFolder`; errors are `CloudError`."""

    def __init__(self, bucket: str, path: str, *, project: str | None = None, credentials=None):
        try:
            from google.api_core.exceptions import NotFound, PreconditionFailed
            from google.cloud import storage
            from google.cloud.storage.retry import DEFAULT_RETRY
        except ImportError as error:
            raise NotInstalledError(
                f"a job's folder in a bucket needs Google's client: {error}",
                fix="`pip install google-cloud-storage`",
            ) from error
        self.address = f"gs://{bucket}/{path}".rstrip("/")
        self._path = path
        self._no_file = NotFound
        self._file_exists = PreconditionFailed
        self._repeated = {"timeout": _SECONDS, "retry": DEFAULT_RETRY}
        project = project or os.environ.get("GOOGLE_CLOUD_PROJECT")
        role = "roles/storage.objectAdmin"
        self._service = Service(
            "Cloud Storage", "storage.googleapis.com", role, project or "the project"
        )
        with self._service.asked(self.address):
            # Requests for objects need no project. But without one, the client would search for
            # it, and raise an error if it finds none.
            client = storage.Client(project=project or "none", credentials=credentials)
            self._bucket = client.bucket(bucket)

    def below(self, name: str) -> "BucketFolder":
        folder = copy.copy(self)
        folder.address = f"{self.address}/{name}"
        folder._path = self._full(name)
        return folder

    def read(self, name: str) -> bytes | None:
        with self._asked(name), contextlib.suppress(self._no_file):
            return self._blob(name).download_as_bytes(timeout=_SECONDS)
        return None

    def write(self, name: str, content: bytes | Path) -> None:
        with self._asked(name):
            if isinstance(content, bytes):
                self._blob(name).upload_from_string(content, **self._repeated)
            else:
                self._blob(name).upload_from_filename(str(content), **self._repeated)

    def create(self, name: str, content: bytes) -> bool:
        with self._asked(name):
            try:
                self._blob(name).upload_from_string(
                    content, timeout=_SECONDS, if_generation_match=0
                )
            except self._file_exists:
                # If an earlier request has written this file but its answer was lost, the contents
                # are the same.
                return self._blob(name).download_as_bytes(timeout=_SECONDS) == content
        return True

    def download(self, name: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with self._asked(name):
            self._blob(name).download_to_filename(str(file), timeout=_SECONDS)

    def delete(self, name: str) -> None:
        with self._asked(name), contextlib.suppress(self._no_file):
            self._blob(name).delete(timeout=_SECONDS)

    def names(self, prefix: str = "") -> list[str]:
        before = self._full("")
        with self._asked(prefix):
            blobs = list(self._bucket.list_blobs(prefix=before + prefix, timeout=_SECONDS))
        # Google's console creates empty objects whose names end in a slash, to show folders.
        names = [blob.name for blob in blobs if not blob.name.endswith("/")]
        return sorted(name.removeprefix(before) for name in names)

    def stored(self, name: str) -> Stored | None:
        with self._asked(name):
            blob = self._bucket.get_blob(self._full(name), timeout=_SECONDS)
        return Stored(blob.size, blob.crc32c) if blob else None

    def folders(self) -> list[str]:
        before = self._full("")
        with self._asked(""):
            listing = self._bucket.list_blobs(prefix=before, delimiter="/", timeout=_SECONDS)
            list(listing)  # read all pages, because `prefixes` is complete only then
        return sorted(one.removeprefix(before).rstrip("/") for one in listing.prefixes)

    def _asked(self, name: str) -> contextlib.AbstractContextManager:
        return self._service.asked(f"{self.address}/{name}".rstrip("/"))

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}".lstrip("/")

    def _blob(self, name: str):
        return self._bucket.blob(self._full(name))


JobFolder = PathFolder | BucketFolder


def stored_file(file: Path) -> Stored:
    """Return size and checksum of a file of this machine."""
    import google_crc32c

    checksum = google_crc32c.Checksum()
    size = 0
    with open(file, "rb") as opened:
        while piece := opened.read(2**20):
            checksum.update(piece)
            size += len(piece)
    return Stored(size, base64.b64encode(checksum.digest()).decode())
