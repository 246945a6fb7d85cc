"""Execute a notebook on the machine of its job, and keep the job's folder up to date.

    work/run/            the working directory of the notebook
    work/notebook.ipynb  the executed notebook, written by papermill before and after each cell

A thread copies changed files into the job's folder every two seconds. After a loss of the machine,
another attempt continues with the files of the last copy. result.json is written last, after all
other files are in the folder and were compared with those of this machine.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tpukit.cloud.job_folder import JobFolder, open_folder, read_json, stored_file, write_json
from tpukit.cloud.job_notebook import NUMBER

_BETWEEN_COPIES = 2.0  # seconds; Cloud Storage takes one write per second and name
_BETWEEN_LOOKS = 5.0  # seconds, at the marker that cancels the job
_LONGEST_WAIT = 10.0  # seconds, of a file that changes all the time, for its copy
_CHECKPOINT = re.compile(r"(?:^|/)step-\d{8,}(?:-best)?-[0-9a-f]{8}[.]pt$")  # as `fit` names it
_LOG_PIECE = 256 * 2**10  # characters; a piece is written again until it is full
_LONGEST_LOG = 200 * 2**20  # characters of an attempt
_LONGEST_OUTPUT = 10 * 2**20  # characters of a cell, in the notebook
_FINAL_TRIES = 8  # of the last copy, over about four minutes
_PAPERMILL_ERROR = "papermill-error-cell-tag"  # of the cells that papermill inserts
_Key = tuple[int, int, int]  # of a file: another one after every change
_EXIT_CODES = {"succeeded": 0, "interrupted": 75}  # 75: EX_TEMPFAIL of sysexits.h, "try again"


class _Log:
    """The output of an attempt: to standard output at once, and to the job's folder in pieces."""

    def __init__(self, attempt: int):
        self._attempt = attempt
        self._piece = 1
        self._text = ""  # of this piece
        self._saved = 0  # characters of it in the folder
        self._length = 0  # of the whole log
        self._is_cut = False  # whether the log has its notice
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        """Add text, as papermill does for the output of cells."""
        sys.stdout.write(text)
        with self._lock:
            room = _LONGEST_LOG - self._length
            if len(text) <= room:
                self._length += len(text)
                self._text += text
            elif not self._is_cut:
                self._is_cut = True
                self._length = _LONGEST_LOG
                notice = "tpukit: the log is too long; the rest of this attempt is not kept"
                self._text += f"{text[:room]}\n{notice}\n"

    def flush(self) -> None:
        """Flush standard output to the platform's own log."""
        sys.stdout.flush()

    def save(self, folder: JobFolder) -> None:
        """Write the newest, unfinished piece of the log."""
        with self._lock:
            text = self._text
        if len(text) == self._saved:
            return
        folder.write(f"log/{self._attempt:02}-{self._piece:06}.txt", text.encode(errors="replace"))
        self._saved = len(text)
        if len(text) >= _LOG_PIECE:
            with self._lock:
                self._text = self._text[len(text) :]
            self._piece += 1
            self._saved = 0


class _Change(NamedTuple):
    """A file that differs from its copy, since which time, and its state when last examined."""

    since: float
    key: _Key | None


class _WorkingDirectory:
    """The working directory of the notebook, and its copy in the job's folder, out/.

    A file is copied if it has not changed since it was last examined, because a half-written file
    is useless. Checkpoints of `fit` get their names when they are whole, so they are copied at
    once. A file that changes all the time is copied every ten seconds, unless it changes during the
    copy.

    Attributes:
        path: the path of the directory.
        copied: the names of all files in out/.
        deleted: the names of files that were sent and that the notebook has deleted.
    """

    def __init__(self, folder: JobFolder, work: Path):
        self.path = work / "run"
        self.copied: set[str] = set()
        self.deleted: list[str] = read_json(folder, "state.json").get("deleted", [])
        self._folder = folder
        self._spare = work / "changing"
        self._sent: set[str] | None = None  # files that came with the job; None before `restore`
        self._saved: dict[str, _Key] = {}  # the files as another attempt would get them
        self._changes: dict[str, _Change] = {}

    def restore(self, sent: JobFolder) -> None:
        """Copy the sent files, and those of earlier attempts, into the working directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        names = set(sent.names())
        for name in names.difference(self.deleted):
            sent.download(name, self.path / name)
            self._saved[name] = _key(self.path / name)
        for saved in self._folder.names("out/"):
            name = saved.removeprefix("out/")
            self._folder.download(saved, self.path / name)
            self._saved[name] = _key(self.path / name)
            self.copied.add(name)
        self._sent = names

    def copy(self, *, is_final: bool) -> None:
        """Copy changed files, and delete deleted ones."""
        if self._sent is None:
            return  # a file that is missing was not deleted
        there = _files(self.path)
        for name, key in there.items():
            if key != self._saved.get(name):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    self._copy_changed(name, key, is_final=is_final)
        for name in self.copied - there.keys():
            self._folder.delete(f"out/{name}")
            self.copied.discard(name)
            del self._saved[name]  # it may come back unchanged
        self.deleted = sorted(self._sent - there.keys())

    def _copy_changed(self, name: str, key: _Key, *, is_final: bool) -> None:
        now = time.monotonic()
        change = self._changes.get(name) or _Change(now, None)
        self._changes[name] = _Change(change.since, key)
        is_whole = is_final or change.key == key or _CHECKPOINT.search(name)
        if not is_whole and now - change.since < _LONGEST_WAIT:
            return
        file = self.path / name
        if not is_whole:
            shutil.copyfile(file, self._spare)
            if _key(file) != key:
                return
            file = self._spare
        self._folder.write(f"out/{name}", file)
        self.copied.add(name)
        self._saved[name] = key
        del self._changes[name]


class _Attempt:
    """One start of a job on a single machine.

    Attributes:
        number: from 1. The machine that makes the file of the next number takes over the job.
        reason: why the notebook must end: "timed out", "cancelled", "replaced"; empty for a signal
            of the platform.
    """

    def __init__(self, folder: JobFolder, work: Path):
        self.folder = folder
        self.work = work
        self.reason = ""
        self.cell = 0
        self.cells = 0
        self.number, self.first_start = _take_number(folder)
        self.log = _Log(self.number)
        self.files = _WorkingDirectory(folder, work)
        self._notebook: _Key | None = None
        self._lock = threading.Lock()

    @property
    def directory(self) -> Path:
        """The working directory of the notebook."""
        return self.files.path

    def restore(self, source: Path) -> None:
        """Copy all files to this machine; keep the last attempt's notebook under its number."""
        self.files.restore(open_folder(source / "in" / "files"))
        if self.number == 1:
            return
        count = len(self.files.copied)
        self.log.write(
            f"tpukit: attempt {self.number}, with {count} files of the attempts before\n"
        )
        earlier = self.folder.read("notebook.ipynb")
        if earlier:
            self.folder.write(f"notebook-attempt-{self.number - 1}.ipynb", earlier)

    def save(self, state: str = "running", *, is_final: bool = False) -> None:
        """Copy changed files to the folder; raise `_Replaced` if another machine has taken over."""
        with self._lock:
            if self.folder.read(_attempt_file(self.number + 1)) is not None:
                self.reason = "replaced"
                raise _Replaced
            self._copy_notebook()
            self.log.save(self.folder)
            self.files.copy(is_final=is_final)
            about = {
                "state": state,
                "attempt": self.number,
                "cell": self.cell,
                "cells": self.cells,
                "time": time.time(),
                "deleted": self.files.deleted,
            }
            write_json(self.folder, "state.json", about)

    def _copy_notebook(self) -> None:
        notebook = self.work / "notebook.ipynb"
        key = _key(notebook) if notebook.exists() else None
        if key and key != self._notebook:
            self.folder.write("notebook.ipynb", notebook)
            self._notebook = key

    def manifest(self) -> dict[str, list]:
        """Return size and checksum of all results on this machine, by name."""
        files = {f"out/{name}": self.directory / name for name in self.files.copied}
        for name in ("notebook.ipynb", "notebook.html", "metrics.json"):
            if (self.work / name).exists():
                files[name] = self.work / name
        return {name: list(stored_file(path)) for name, path in files.items()}


class _Replaced(Exception):
    """Another machine runs this job now."""


def main(arguments: list[str]) -> int:
    """Run a job; the arguments are its address, the folder with `in/`, and the work folder."""
    address, source, work = arguments
    folder = open_folder(address)
    attempt = _Attempt(folder, Path(work))
    attempt.log.write((attempt.work / "setup.log").read_text(errors="replace"))
    request = read_json(folder, "job.json")
    signal.signal(signal.SIGTERM, _interrupt)
    over = threading.Event()
    try:
        result = _run(attempt, request, Path(source), over)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on, all is copied
    except KeyboardInterrupt:
        result = {"state": attempt.reason or "interrupted"}
    except Exception as error:  # without a result it would start again
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        text = traceback.format_exc()
        result = {
            "state": "failed",
            "phase": "start",
            "error": f"{type(error).__name__}: {error}",
            "traceback": text,
        }
        attempt.log.write(text)
    over.set()
    if result["state"] == "interrupted" and folder.read("cancel") is not None:
        result["state"] = "cancelled"
    return _finish(attempt, result, request)


def _run(attempt: _Attempt, request: Mapping, source: Path, over: threading.Event) -> dict:
    plan = request["plan"]
    threading.Thread(
        target=_watch, args=(attempt, float(plan["timeout"]), over), daemon=True
    ).start()
    os.environ |= read_secrets(plan.get("secrets", {}))
    os.environ |= {"TPUKIT_JOB": plan["name"], "TPUKIT_ATTEMPT": str(attempt.number)}
    attempt.restore(source)
    attempt.save()
    threading.Thread(target=_copy, args=(attempt, over), daemon=True).start()
    return _execute(attempt, request, source)


def _execute(attempt: _Attempt, request: Mapping, source: Path) -> dict:
    """Execute the notebook with papermill and return the result."""
    import papermill
    from jupyter_client import KernelManager
    from nbclient.exceptions import DeadKernelError
    from papermill.iorw import papermill_io

    # Half of this time passes between the interrupt of the cell and SIGTERM for the kernel.
    KernelManager.shutdown_wait_time.default_value = 2 * request["plan"]["options"]["grace"]
    papermill_io.register("whole:", _WholeFiles(attempt))
    try:
        papermill.execute_notebook(
            str(source / "in" / "notebook.ipynb"),
            f"whole:{attempt.work}/notebook.ipynb",
            request["parameters"],
            cwd=str(attempt.directory),
            kernel_name="python3",
            progress_bar=False,
            stdout_file=attempt.log,
            stderr_file=attempt.log,
            start_timeout=300,
            autosave_cell_every=10,
            iopub_timeout=60,  # nbclient's 4 s are short for a machine with a lot to do
        )
    except papermill.PapermillExecutionError:
        failure = _failed_cell(attempt)
        if failure:
            return {"state": "failed", "phase": "cell"} | failure
    except DeadKernelError:
        text = f"the kernel died in cell {attempt.cell}"
        text += ", as it does when the machine has too little memory"
        return {"state": "failed", "phase": "kernel", "error": text}
    return {"state": "succeeded"}


def _failed_cell(attempt: _Attempt) -> dict:
    """Return the error of the first cell that has no tag "raises-exception", if any."""
    place = attempt.work / "notebook.ipynb"
    book = json.loads(place.read_text(encoding="utf-8"))
    for cell in book["cells"]:
        if "raises-exception" in _tags(cell):
            continue
        shown = [output for output in cell.get("outputs", []) if output["output_type"] == "error"]
        errors = [error for error in shown if not _is_clean_exit(error)]
        if errors:
            error = errors[0]
        elif not shown and cell["metadata"].get("papermill", {}).get("exception"):
            # A library such as rich has printed the traceback in its own way.
            text = "the cell failed, and there is no traceback in its output; see the notebook"
            error = {"ename": "Exception", "evalue": text, "traceback": []}
        else:
            continue
        text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
        return {
            "cell": cell["metadata"].get(NUMBER, -1),
            "ename": error["ename"],
            "evalue": error["evalue"],
            "traceback": text,
        }
    # papermill has marked a cell that may fail.
    book["cells"] = [cell for cell in book["cells"] if _PAPERMILL_ERROR not in _tags(cell)]
    _WholeFiles(attempt).write(json.dumps(book, indent=1), str(place))
    return {}


def _is_clean_exit(error: Mapping) -> bool:
    return error["ename"] == "SystemExit" and error["evalue"] in ("", "0")


def _tags(cell: Mapping) -> list[str]:
    return cell["metadata"].get("tags", [])


class _WholeFiles:
    """Write notebooks completely or not at all; papermill itself writes in place."""

    def __init__(self, attempt: _Attempt):
        self._attempt = attempt

    def write(self, text: str, path: str) -> None:
        """Write the executed notebook, and note the cell that runs."""
        book = json.loads(text)
        for cell in book["cells"]:
            if len(text) > _LONGEST_OUTPUT and "outputs" in cell:
                cell["outputs"] = _limited(cell["outputs"])
        statuses = [cell["metadata"].get("papermill", {}).get("status") for cell in book["cells"]]
        self._attempt.cells = len(statuses)
        if "running" in statuses:
            self._attempt.cell = statuses.index("running")
        place = Path(path.removeprefix("whole:"))
        content = json.dumps(book, indent=1, ensure_ascii=False)
        open_folder(place.parent).write(place.name, content.encode(errors="replace"))

    def pretty_path(self, path: str) -> str:
        """Return a path for messages."""
        return path.removeprefix("whole:")


def _limited(outputs: list[dict]) -> list[dict]:
    """Return the outputs of a cell up to `_LONGEST_OUTPUT` characters, and its error."""
    kept = []
    room = _LONGEST_OUTPUT
    for output in outputs:
        size = len(json.dumps(output))
        if size <= room or output["output_type"] == "error":
            kept.append(output)
        elif room > 0:
            begin = "".join(output.get("text", ""))[:room]
            notice = f"more than {_LONGEST_OUTPUT:,} characters; the rest is in the log"
            text = f"{begin}\ntpukit: {notice}\n"
            kept.append({"output_type": "stream", "name": "stdout", "text": text})
        room -= size
    return kept


def _copy(attempt: _Attempt, over: threading.Event) -> None:
    """Copy changed files until the notebook is over. After an error, the next copy is a retry."""
    while not over.wait(_BETWEEN_COPIES):
        try:
            attempt.save()
        except _Replaced:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        except Exception as error:  # of a disk or a network
            attempt.log.write(f"tpukit: results could not be copied: {error}\n")


def _watch(attempt: _Attempt, timeout: float, over: threading.Event) -> None:
    """End the notebook at the time limit, or if the job was cancelled."""
    folder = None  # its own, because a client is for one thread
    next_look = 0.0
    while not over.wait(0.5):
        if time.time() > attempt.first_start + timeout:
            attempt.reason = "timed out"
        elif time.monotonic() > next_look:
            next_look = time.monotonic() + _BETWEEN_LOOKS
            with contextlib.suppress(Exception):  # the next look may succeed
                folder = folder or open_folder(attempt.folder.address)
                if folder.read("cancel") is not None:
                    attempt.reason = "cancelled"
        if attempt.reason:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _interrupt(*_: object) -> None:
    """Handle SIGTERM: papermill interrupts the cell, which may save, and ends the kernel."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _finish(attempt: _Attempt, result: dict, request: Mapping) -> int:
    """Copy the rest, compare it, write result.json last; return the exit code."""
    if result["state"] == "replaced":
        print("tpukit: another machine runs this job now; this one ends", flush=True)
        return 1
    if result["state"] == "timed out":
        result["error"] = (
            f"the time limit of {request['plan']['timeout']:.0f} s, counted from the first start"
        )
    if result["state"] != "interrupted":
        result |= {
            "attempt": attempt.number,
            "seconds": round(time.time() - attempt.first_start, 1),
        }
        _write_page(attempt)
        _write_metrics(attempt, result)
    pause = 2.0
    for _ in range(_FINAL_TRIES):
        try:
            _copy_rest(attempt, result)
            return _EXIT_CODES.get(result["state"], 1)
        except _Replaced:
            return 1
        except Exception as error:  # of the file system or Google's client
            print(f"tpukit: the results could not be copied: {error}", flush=True)
            time.sleep(pause)
            pause = min(2 * pause, 60.0)
    return 75  # without a result, so that another attempt can bring it


def _copy_rest(attempt: _Attempt, result: dict) -> None:
    is_interrupted = result["state"] == "interrupted"
    # A job whose notebook has ended still runs: its last copy may take minutes.
    attempt.save("interrupted" if is_interrupted else "running", is_final=True)
    if is_interrupted:
        return
    for name in ("notebook.html", "metrics.json"):
        if (attempt.work / name).exists():
            attempt.folder.write(name, attempt.work / name)
    manifest = attempt.manifest()
    for name, stored in manifest.items():
        if attempt.folder.stored(name) != tuple(stored):
            raise OSError(f"{name} in the folder differs from the file of this machine")
    write_json(attempt.folder, "manifest.json", manifest)
    write_json(attempt.folder, "result.json", result)


def _write_page(attempt: _Attempt) -> None:
    """Write the executed notebook as an HTML page; without one the result is the same."""
    try:
        from nbconvert import HTMLExporter

        page, _ = HTMLExporter().from_filename(str(attempt.work / "notebook.ipynb"))
        (attempt.work / "notebook.html").write_text(page, encoding="utf-8", errors="replace")
    except Exception as error:
        attempt.log.write(f"tpukit: no HTML page: {type(error).__name__}: {error}\n")


def _write_metrics(attempt: _Attempt, result: Mapping) -> None:
    """Write the notebook's own metrics.json, if it has one, together with the facts of the job."""
    own = {}
    with contextlib.suppress(OSError, ValueError):
        own = json.loads((attempt.directory / "metrics.json").read_text())
    facts = {name: result[name] for name in ("state", "attempt", "seconds")}
    metrics = (own if isinstance(own, dict) else {"metrics": own}) | {"job": facts}
    (attempt.work / "metrics.json").write_text(json.dumps(metrics, indent=1))


def _take_number(folder: JobFolder) -> tuple[int, float]:
    """Return a number that no other machine has, and the time of the first start."""
    started = float(os.environ.get("TPUKIT_STARTED") or time.time())
    number = 1 + len(folder.names("attempts/"))
    # The process is in the content, so that two machines never write the same.
    about = json.dumps(
        {"started": started, "machine": f"{os.uname().nodename} {os.getpid()} {time.time_ns()}"}
    )
    while not folder.create(_attempt_file(number), about.encode()):
        number += 1
    first = read_json(folder, _attempt_file(1)).get("started", started)
    return number, first


def _attempt_file(number: int) -> str:
    return f"attempts/{number:04}.json"


def _files(folder: Path) -> dict[str, _Key]:
    """Return the keys of all files below a folder, by name. Links are left out."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            if path.is_file() and not path.is_symlink() and path.parent.name != "__pycache__":
                found[path.relative_to(folder).as_posix()] = _key(path)
    return found


def _key(path: Path) -> _Key:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_secrets(
    secrets: Mapping[str, str], *, open_url: Callable = urllib.request.urlopen
) -> dict[str, str]:
    """Return the values of secrets in Secret Manager, with the account of this machine.

    References of another kind ("env:NAME") are left out: the platform has put them into the
    environment.
    """
    wanted = {
        name: reference for name, reference in secrets.items() if reference.startswith("projects/")
    }
    if not wanted:
        return {}
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    address = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    token = _get_json(address, {"Metadata-Flavor": "Google"}, open_url)["access_token"]
    values = {}
    for name, reference in wanted.items():
        address = f"https://secretmanager.googleapis.com/v1/{reference}:access"
        answer = _get_json(address, {"Authorization": f"Bearer {token}"}, open_url)
        values[name] = base64.b64decode(answer["payload"]["data"]).decode()
    return values


def _get_json(address: str, headers: Mapping[str, str], open_url: Callable) -> dict:
    try:
        with open_url(urllib.request.Request(address, headers=dict(headers)), timeout=30) as answer:
            return json.load(answer)
    except OSError as error:
        raise OSError(
            f"{address}: {error}; the job's service account needs "
            "roles/secretmanager.secretAccessor"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
