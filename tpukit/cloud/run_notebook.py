"""Execute a notebook on the machine of its job, and copy its files to the job's folder.

    work/run/            the working directory of the notebook
    work/notebook.ipynb  the executed notebook, which papermill writes before and after each cell

A thread copies changed files into the job's folder every two seconds. If the machine is lost,
another attempt continues with the files of the last copy. result.json is written last, after the
results in the folder were compared with those of this machine.
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

_BETWEEN_COPIES = 2.0  # seconds; Cloud Storage allows one write per second to a name
_BETWEEN_LOOKS = 5.0  # seconds between two requests for the file "cancel"
_LONGEST_WAIT = 10.0  # seconds after which a file is copied even if it changes all the time
_CHECKPOINT = re.compile(r"(?:^|/)step-\d{8,}(?:-best)?-[0-9a-f]{8}[.]pt$")  # the names by `fit`
_LOG_PIECE = 256 * 2**10  # characters; a piece of the log is written again until it is full
_LONGEST_LOG = 200 * 2**20  # characters of the log of an attempt
_LONGEST_OUTPUT = 10 * 2**20  # characters of a cell's output in the notebook
_FINAL_TRIES = 8  # the number of tries for the last copy, in about four minutes
_PAPERMILL_ERROR = "papermill-error-cell-tag"  # the tag of cells that papermill inserts
_Key = tuple[int, int, int]  # time, size and inode of a file, which differ after every change
_EXIT_CODES = {"succeeded": 0, "interrupted": 75}  # 75: EX_TEMPFAIL of sysexits.h, "try again"


class _Log:
    """The output of an attempt: to standard output at once, and to the job's folder in pieces."""

    def __init__(self, attempt: int):
        self._attempt = attempt
        self._piece = 1
        self._text = ""  # the text of the current piece
        self._saved = 0  # the number of characters of `_text` that are in the folder
        self._length = 0  # the number of characters of the whole log
        self._is_cut = False  # True if the log has reached its limit and has a notice about it
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        """Add text to the log; papermill calls it with the output of cells."""
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
        """Write the current piece of the log into the folder; if it is full, begin the next."""
        # The lock is not held during the upload, so that cells can go on printing.
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
    """A file that differs from its copy in the job's folder."""

    since: float  # when the difference was first seen
    key: _Key | None  # the key of the file when it was last examined


class _WorkingDirectory:
    """The working directory of the notebook, and its copy in the job's folder, out/.

    A changed file is copied when two examinations in a row find the same size and time, because a
    partly written file is useless. Checkpoints of `fit` are copied at once, because `fit` gives
    them their names when they are complete. A file that changes all the time is copied every ten
    seconds, unless it changes during the copy.

    Attributes:
        path: the path of the directory.
        copied: the names of all files in out/.
        deleted: the names of the sent files that the notebook has deleted.
    """

    def __init__(self, folder: JobFolder, work: Path):
        self.path = work / "run"
        self.copied: set[str] = set()
        self.deleted: list[str] = read_json(folder, "state.json").get("deleted", [])
        self._folder = folder
        self._spare = work / "changing"  # a copy of a file that changes all the time
        self._sent: set[str] | None = None  # names of the sent files; None before `restore`
        self._saved: dict[str, _Key] = {}  # the key of each file that is in in/ or out/
        self._changes: dict[str, _Change] = {}

    def restore(self, sent: JobFolder) -> None:
        """Copy the sent files and the files of earlier attempts into the working directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        names = set(sent.names())
        for name in names.difference(self.deleted):
            sent.download(name, self.path / name)
            self._saved[name] = _key(self.path / name)
        # After the sent files, because an earlier attempt may have changed them.
        for saved in self._folder.names("out/"):
            name = saved.removeprefix("out/")
            self._folder.download(saved, self.path / name)
            self._saved[name] = _key(self.path / name)
            self.copied.add(name)
        self._sent = names

    def copy(self, *, is_final: bool) -> None:
        """Copy changed files to out/, and delete files from out/ that the notebook has deleted.

        Args:
            is_final: True to copy all changed files, because nothing writes to them any more.
        """
        if self._sent is None:
            return  # before `restore`, a missing file is not one that the notebook has deleted
        there = _files(self.path)
        for name, key in there.items():
            if key != self._saved.get(name):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    self._copy_changed(name, key, is_final=is_final)
        for name in self.copied - there.keys():
            self._folder.delete(f"out/{name}")
            self.copied.discard(name)
            del self._saved[name]  # so that it is copied if the notebook restores it unchanged
        self.deleted = sorted(self._sent - there.keys())

    def _copy_changed(self, name: str, key: _Key, *, is_final: bool) -> None:
        """Copy a changed file to out/, if it is complete or has changed for ten seconds."""
        now = time.monotonic()
        change = self._changes.get(name) or _Change(now, None)
        self._changes[name] = _Change(change.since, key)
        is_whole = is_final or change.key == key or _CHECKPOINT.search(name)
        if not is_whole and now - change.since < _LONGEST_WAIT:
            return
        file = self.path / name
        if not is_whole:
            shutil.copyfile(file, self._spare)
            if _key(file) != key:  # changed during the copy: try again at the next call
                return
            file = self._spare
        self._folder.write(f"out/{name}", file)
        self.copied.add(name)
        self._saved[name] = key
        del self._changes[name]


class _Attempt:
    """One start of a job on a single machine.

    Attributes:
        number: the number of the attempt, from 1. The machine that creates the file of the next
            number takes over the job.
        cell: the number of the running cell in the user's notebook, from 1; 0 before the first.
        cells: the number of the last cell; 0 before the first.
        reason: why the notebook must end: "timed out", "cancelled" or "replaced"; "" for a signal
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
        """Copy all files to this machine; rename the notebook of the last attempt in the folder."""
        self.files.restore(open_folder(source / "in" / "files"))
        if self.number == 1:
            return
        count = len(self.files.copied)
        self.log.write(f"tpukit: attempt {self.number}, with {count} files of earlier attempts\n")
        earlier = self.folder.read("notebook.ipynb")
        if earlier:
            self.folder.write(f"notebook-attempt-{self.number - 1}.ipynb", earlier)

    def save(self, state: str = "running", *, is_final: bool = False) -> None:
        """Copy changed files to the folder; raise `_Replaced` if another machine has taken over."""
        with self._lock:
            # After an interruption the platform may start the job elsewhere while this machine
            # still runs. The later attempt wins, so this one must not overwrite its files.
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
    """Run a job, and return the exit code; see `tpukit.cloud.target`.

    Args:
        arguments: the address of the job's folder, the path of this folder or of its copy on this
            machine, and the work folder.
    """
    address, source, work = arguments
    folder = open_folder(address)
    attempt = _Attempt(folder, Path(work))
    attempt.log.write((attempt.work / "setup.log").read_text(errors="replace"))
    request = read_json(folder, "job.json")
    signal.signal(signal.SIGTERM, _interrupt)
    over = threading.Event()
    try:
        result = _run(attempt, request, Path(source), over)
        # The notebook is over. From here on SIGTERM must not stop the last copy.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except KeyboardInterrupt:
        result = {"state": attempt.reason or "interrupted"}
    except Exception as error:  # without a result, the platform would start the job again
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
    """Set variables, with the secrets; restore files, start two threads, execute the notebook."""
    plan = request["plan"]
    threading.Thread(
        target=_watch, args=(attempt, float(plan["timeout"]), over), daemon=True
    ).start()
    # The thread above runs already, so that the time limit also bounds the downloads below.
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
            iopub_timeout=60,  # seconds; nbclient's default of 4 s is too short for a busy machine
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
    """Return the error of the first cell without the tag "raises-exception"; {} if there is none.

    If there is none, the cells that papermill has inserted for an error are removed.
    """
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
    # papermill has inserted an error cell for a cell that may fail.
    book["cells"] = [cell for cell in book["cells"] if _PAPERMILL_ERROR not in _tags(cell)]
    _WholeFiles(attempt).write(json.dumps(book, indent=1), str(place))
    return {}


def _is_clean_exit(error: Mapping) -> bool:
    return error["ename"] == "SystemExit" and error["evalue"] in ("", "0")


def _tags(cell: Mapping) -> list[str]:
    return cell["metadata"].get("tags", [])


class _WholeFiles:
    """A writer for papermill that writes notebooks completely or not at all.

    papermill's own writer overwrites the file in place.
    """

    def __init__(self, attempt: _Attempt):
        self._attempt = attempt

    def write(self, text: str, path: str) -> None:
        """Write the executed notebook, and store the number of the running cell."""
        book = json.loads(text)
        for cell in book["cells"]:
            if len(text) > _LONGEST_OUTPUT and "outputs" in cell:
                cell["outputs"] = _limited(cell["outputs"])
            # Cells that papermill has inserted have no number.
            number = cell["metadata"].get(NUMBER, 0)
            self._attempt.cells = max(number, self._attempt.cells)
            if number and cell["metadata"].get("papermill", {}).get("status") == "running":
                self._attempt.cell = number
        place = Path(path.removeprefix("whole:"))
        content = json.dumps(book, indent=1, ensure_ascii=False)
        open_folder(place.parent).write(place.name, content.encode(errors="replace"))

    def pretty_path(self, path: str) -> str:
        """Return a path for messages."""
        return path.removeprefix("whole:")


def _limited(outputs: list[dict]) -> list[dict]:
    """Return the first outputs of a cell, up to `_LONGEST_OUTPUT` characters, and its error."""
    kept = []
    room = _LONGEST_OUTPUT
    for output in outputs:
        size = len(json.dumps(output))
        if size <= room or output["output_type"] == "error":  # an error is always kept
            kept.append(output)
        elif room > 0:
            begin = "".join(output.get("text", ""))[:room]
            notice = f"more than {_LONGEST_OUTPUT:,} characters; the rest is in the log"
            text = f"{begin}\ntpukit: {notice}\n"
            kept.append({"output_type": "stream", "name": "stdout", "text": text})
        room -= size
    return kept


def _copy(attempt: _Attempt, over: threading.Event) -> None:
    """Copy changed files until the notebook is over; after an error, try again at the next copy."""
    while not over.wait(_BETWEEN_COPIES):
        try:
            attempt.save()
        except _Replaced:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        except Exception as error:  # an error of the disk or the network
            attempt.log.write(f"tpukit: results could not be copied: {error}\n")


def _watch(attempt: _Attempt, timeout: float, over: threading.Event) -> None:
    """End the notebook at the time limit, or if the job was cancelled."""
    folder = None  # opened in this thread, because Google's client is not for several threads
    next_look = 0.0
    while not over.wait(0.5):
        if time.time() > attempt.first_start + timeout:
            attempt.reason = "timed out"
        elif time.monotonic() > next_look:
            next_look = time.monotonic() + _BETWEEN_LOOKS
            with contextlib.suppress(Exception):  # the next request may succeed
                folder = folder or open_folder(attempt.folder.address)
                if folder.read("cancel") is not None:
                    attempt.reason = "cancelled"
        if attempt.reason:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _interrupt(*_: object) -> None:
    """Handle SIGTERM: raise KeyboardInterrupt, so that papermill interrupts the running cell.

    The cell may still save; then papermill ends the kernel.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _finish(attempt: _Attempt, result: dict, request: Mapping) -> int:
    """Copy and compare the last files, write result.json last, and return the exit code."""
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
        except Exception as error:  # an error of the file system or of Google's client
            print(f"tpukit: the results could not be copied: {error}", flush=True)
            time.sleep(pause)
            pause = min(2 * pause, 60.0)
    return 75  # there is no result.json, so another attempt runs the job again


def _copy_rest(attempt: _Attempt, result: dict) -> None:
    """Copy all files; if the job is over, compare them and write manifest.json and result.json."""
    is_interrupted = result["state"] == "interrupted"
    # During the last copy, which may take minutes, the state is still "running".
    attempt.save("interrupted" if is_interrupted else "running", is_final=True)
    if is_interrupted:
        return
    for name in ("notebook.html", "metrics.json"):
        if (attempt.work / name).exists():
            attempt.folder.write(name, attempt.work / name)
    manifest = attempt.manifest()
    for name, stored in manifest.items():
        if attempt.folder.stored(name) != tuple(stored):
            raise OSError(f"the copy of {name} in the job's folder differs from the file here")
    write_json(attempt.folder, "manifest.json", manifest)
    write_json(attempt.folder, "result.json", result)


def _write_page(attempt: _Attempt) -> None:
    """Write the executed notebook as an HTML page; an error is only logged."""
    try:
        from nbconvert import HTMLExporter

        page, _ = HTMLExporter().from_filename(str(attempt.work / "notebook.ipynb"))
        (attempt.work / "notebook.html").write_text(page, encoding="utf-8", errors="replace")
    except Exception as error:
        attempt.log.write(f"tpukit: no HTML page: {type(error).__name__}: {error}\n")


def _write_metrics(attempt: _Attempt, result: Mapping) -> None:
    """Write metrics.json: the notebook's own metrics.json, if there is one, and the job's facts."""
    own = {}
    with contextlib.suppress(OSError, ValueError):
        own = json.loads((attempt.directory / "metrics.json").read_text())
    facts = {name: result[name] for name in ("state", "attempt", "seconds")}
    metrics = (own if isinstance(own, dict) else {"metrics": own}) | {"job": facts}
    (attempt.work / "metrics.json").write_text(json.dumps(metrics, indent=1))


def _take_number(folder: JobFolder) -> tuple[int, float]:
    """Return the number of this attempt, which no other machine gets, and the first start's time.

    The time is in seconds since the epoch.
    """
    started = float(os.environ.get("TPUKIT_STARTED") or time.time())
    number = 1 + len(folder.names("attempts/"))
    # With machine and process, so that two machines never write the same contents.
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
    """Return the key of each file below a folder, by name; links and __pycache__ are left out."""
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
    """Read the values of secrets from Secret Manager, by the account of this machine.

    References "env:NAME" are left out, because the platform has set these variables.

    Args:
        secrets: a reference for each variable.
        open_url: `urllib.request.urlopen`, or a replacement in tests.
    """
    wanted = {
        name: reference for name, reference in secrets.items() if reference.startswith("projects/")
    }
    if not wanted:
        return {}
    # Every machine of Google Cloud can ask the metadata server for a token of its service account.
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
