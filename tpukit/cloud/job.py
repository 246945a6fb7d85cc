"""Send a notebook as a job, follow the job from any process, and fetch its results.

The whole state of a job is in the job's folder, so any kernel can open the job:

    job = submit("train.ipynb", chip="v5e-8", to="vertex", bucket="gs://my-bucket/runs")
    job.state                 "queued", "starting", "running", "interrupted", "succeeded", ...
    job.result().notebook     the executed notebook; raises an error if a cell raised one
    job = find("train-1125-1730-3f2a", "gs://my-bucket/runs")     later, in another kernel
"""

import hashlib
import json
import math
import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from tpukit.cloud.answers import CloudError
from tpukit.cloud.gcloud import GcloudTarget
from tpukit.cloud.job_files import check_allowed, named_files, read_requirements, refuse_secret
from tpukit.cloud.job_folder import (
    JobFolder,
    PathFolder,
    address_of,
    open_folder,
    read_json,
    write_json,
)
from tpukit.cloud.job_notebook import JobNotebook, check_parameters, read_notebook
from tpukit.cloud.local import LocalTarget
from tpukit.cloud.options import check_plan, largest_cost
from tpukit.cloud.skypilot import SkyPilotTarget
from tpukit.cloud.start_script import package_list, start_script
from tpukit.cloud.target import JobOptions, JobPlan, PlatformState, Target, variables_of
from tpukit.cloud.vertex import VertexTarget
from tpukit.cloud.wheel import NAME as WHEEL
from tpukit.cloud.wheel import tpukit_wheel
from tpukit.essentials.display import (
    InvalidValueError,
    PathNotFoundError,
    Table,
    TpukitError,
    as_text,
    human_size,
)
from tpukit.profiling import find_tpu, parse_duration

_TARGETS = {
    target.name: target for target in (LocalTarget, VertexTarget, GcloudTarget, SkyPilotTarget)
}
TARGETS = tuple(_TARGETS)
OVER = ("succeeded", "failed", "cancelled", "timed out")  # states of a job that has ended
_FOLDER = "jobs"  # the default of the argument `bucket`
_LOG_LINES = 30  # an error shows this many lines from the end of the log
_PATIENCE = 900.0  # `wait` raises after this many seconds without an answer of the platform


class JobFailedError(TpukitError, RuntimeError):
    """A job ended without a result, for example because its machine or its installation failed.

    Attributes:
        state: "failed", "cancelled", "timed out" or "interrupted".
    """

    state = ""


class CellFailedError(JobFailedError):
    """A cell of a job raised an error; the message has the cell's traceback as text.

    Attributes:
        cell: the number of the cell among all cells of the notebook that was sent, from 1.
        ename: the name of the error's class.
        evalue: the message of the error.
        traceback: the traceback of the error, as text.
    """

    cell = -1
    ename = ""
    evalue = ""
    traceback = ""


@dataclass(frozen=True)
class Result:
    """The results of a job, on this machine.

    Attributes:
        notebook: the path of the executed notebook; None if the notebook was not started.
        page: the path of the executed notebook as an HTML page; None before the end of the job, or
            if the page could not be made.
        files: the paths of new and changed files of the notebook's working directory, by name.
        metrics: the contents of metrics.json, if the notebook has written this file, and a dict
            "job" with state, attempt and seconds of the job; empty before the end of the job.
    """

    notebook: Path | None
    page: Path | None
    files: dict[str, Path]
    metrics: dict


def submit(
    notebook: str | os.PathLike,
    *,
    chip: str | None = None,
    to: str | Target = "local",
    parameters: Mapping[str, object] | None = None,
    files: Sequence[str | os.PathLike] = (),
    requirements: str | os.PathLike | None = None,
    name: str | None = None,
    bucket: str | os.PathLike | None = None,
    timeout: str | float = "1d",
    secrets: Mapping[str, str] | None = None,
    options: JobOptions | None = None,
) -> "Job":
    """Check a notebook or a script, print what is sent, send it, and return its `Job`.

    `submit` does not wait for the machine. The notebook runs from top to bottom in a new kernel, in
    a working directory with the files of `files`. Every few seconds, the job copies new and changed
    files of this directory into its folder in `bucket`, but no links. If the platform starts the
    job again, the copies are restored, and `fit(..., checkpoints="run")` continues from its
    checkpoints.

    Args:
        notebook: the path of an .ipynb or .py file. A script with cells (`# %%`) becomes a
            notebook; any other script runs unchanged.
        chip: the name of the TPU, such as v5e-1, v5e-4, v5e-8, v6e-1, v6e-4, v6e-8, v2-8 or v3-8;
            None only for "local".
        to: the platform: "local" (a dry run of the same start command on this machine), "vertex",
            "gcloud" or "skypilot".
        parameters: new values for names that the cell with the tag "parameters" assigns; None for
            no new values.
        files: files and folders that the notebook needs, inside the notebook's folder. A listed
            folder must not contain hidden files, files with keys, or links out of this folder,
            unless you also list the file or link itself.
        requirements: the path of a requirements.txt with the packages that the notebook needs; None
            for no further packages.
        name: the name of the job; None for the notebook's name and the time. If a job of this name
            with the same contents has not ended, `submit` returns that job. If the job of this name
            has ended, or has other contents, `submit` raises ValueError.
        bucket: where `submit` creates the job's folder: "gs://bucket/folder", or a path for
            "local". None for the path "jobs", which only "local" supports.
        timeout: "8h", "90m" or seconds from the first start; a restart does not reset the limit.
        secrets: for each secret environment variable of the notebook, the place of its value. For
            vertex and gcloud: {"HF_TOKEN": "projects/P/secrets/hf/versions/latest"}, from Secret
            Manager. For skypilot and local: {"HF_TOKEN": "env:HF_TOKEN"}, from the variable
            HF_TOKEN of this process. None for no secrets.
        options: zone, region, spot, image and others; see `JobOptions`. None for the defaults.

    Raises:
        InvalidValueError: the notebook would not run, an option is not supported, or a text looks
            like a secret.
        InvalidTypeError: JSON does not support the value of a parameter.
        PathNotFoundError: a file does not exist.
        CloudError: the platform did not start the job.
    """
    target = _target(to)
    options = options or JobOptions()
    check_allowed(options.not_secret)
    path = Path(notebook).absolute()
    book = read_notebook(path, not_secret=options.not_secret)
    values = check_parameters(book, parameters or {})
    refuse_secret(json.dumps(values), "a parameter", allowed=options.not_secret)
    sent = _sent_files(path, book, files=files, requirements=requirements, options=options)
    name = name or _new_name(path.stem)
    plan = JobPlan(
        name=name,
        target=target.name,
        folder=address_of(bucket or _FOLDER, name),
        tpu=None if chip is None else find_tpu(chip),
        timeout=parse_duration(timeout, "timeout"),
        # The version of this kernel's Python, so that packages and pickles are compatible.
        python="{}.{}".format(*sys.version_info),
        digest="",
        options=options,
        secrets=dict(secrets or {}),
    )
    check_plan(plan)
    variables_of(plan)  # raises if a variable is not set
    sent["packages.txt"] = "".join(f"{line}\n" for line in package_list(options, WHEEL)).encode()
    # A wheel of the running tpukit, with local changes, and not the version on the package index.
    sent[WHEEL] = tpukit_wheel()
    plan = replace(plan, digest=_digest(sent, [values, _plan_as_json(plan)]))
    print(_table(plan, sent), flush=True)
    return _send(target, plan, sent, values)


def _send(
    target: Target, plan: JobPlan, sent: Mapping[str, bytes | Path], parameters: dict
) -> "Job":
    """Write the job's folder and start the job, unless it was sent before."""
    folder = open_folder(plan.folder, project=plan.options.project)
    request = {"plan": _plan_as_json(plan), "parameters": parameters, "sent": time.time()}
    # `create` fails if the file exists, so two processes cannot send the same job twice.
    if not folder.create("job.json", json.dumps(request, indent=1).encode()):
        job = _found(folder, target)
        is_over = job is not None and job.state in OVER
        has_other_contents = job is None or job.plan.digest != plan.digest
        if is_over or has_other_contents:
            difference = "it has other contents"
            if is_over:
                difference = f"it has ended: {job.state}"
            raise InvalidValueError(
                f"a job {plan.name} already exists, and {difference}",
                fix="give the new job another name",
            )
        # handle.json is written after the platform has accepted the job. If it is missing, an
        # earlier call was interrupted, and everything is sent again.
        if folder.read("handle.json"):
            print(f"{plan.name} was sent before, and is not sent again")
            return job
    for name, content in sent.items():
        folder.write(f"in/{name}", content)
    folder.write("run.sh", start_script(plan, WHEEL).encode())
    return Job(folder, target, plan).start()


class Job:
    """A job. Any process that can read the job's folder can open the job with `find`.

    Attributes:
        name: the name of the job, and of its folder.
        address: the address of the folder.
        plan: the machine, the time limit and the options of the job.
    """

    def __init__(self, folder: JobFolder, target: Target, plan: JobPlan):
        self.folder = folder
        self.target = target
        self.plan = plan
        self.name = plan.name
        self.address = folder.address

    def __repr__(self) -> str:
        return f"<job {self.name}: {self.state}, {self.plan.target}, {self.address}>"

    @property
    def state(self) -> str:
        """The state of the job.

        - "queued": the platform has no machine for the job yet.
        - "starting": the job is being sent, or its machine installs packages.
        - "running": the notebook runs.
        - "interrupted": the machine was lost, and the platform does not start another one. Call
          `start()` to start one.
        - "succeeded", "failed", "cancelled", "timed out": the job is over.
        """
        return self._look()[0]

    def start(self) -> "Job":
        """Start the job again after an interruption, and return the job.

        For the first start, `submit` calls this method.

        Raises:
            InvalidValueError: the job has ended.
            CloudError: the platform did not start the job.
        """
        # The platform may have ended the job before a machine could write result.json. A new
        # machine would only install packages.
        state = self.state
        if state in OVER:
            raise InvalidValueError(
                f"{self.name} has ended: {state}",
                fix="submit() the notebook under another name",
            )
        handle = self.target.start(self.plan)
        # With the handle, `find` can follow and cancel the job from another machine.
        write_json(self.folder, "handle.json", handle)
        command = f"python -m tpukit logs {self.name}"
        if self.address != address_of(_FOLDER, self.name):
            bucket, _, _ = self.address.rpartition("/")
            command += f" --bucket {shlex.quote(bucket)}"
        print(f"{self.name} was started; follow it: {command}", flush=True)
        return self

    def logs(self) -> str:
        """Return the output of the job so far.

        Before the first output, return the platform's log, or the command that shows this log.
        """
        pieces = [self.folder.read(name) or b"" for name in self.folder.names("log/")]
        text = b"".join(pieces).decode(errors="replace")
        handle = read_json(self.folder, "handle.json")
        if not text and handle:
            return self.target.logs(handle)
        return text

    def wait(self, timeout: str | float | None = None, *, every: float = 5.0) -> str:
        """Wait until the job is over and return its state; print a line when the state changes.

        An interrupt (Ctrl-C) ends the waiting, not the job. When the job is over, `wait` checks
        that all results are in the folder, and deletes the machine.

        Args:
            timeout: the longest time to wait, such as "2h", or seconds; None for no limit.
            every: the seconds between two requests for the state.

        Raises:
            TimeoutError: the job is not over after `timeout`.
            JobFailedError: the machine was lost, and the platform does not start another one.
            CloudError: the platform rejected a request, or did not answer for 15 minutes; or a
                result is not complete.
        """
        state, _ = self._wait(timeout, every=every)
        return state

    def _wait(self, timeout: str | float | None, *, every: float = 5.0) -> tuple[str, str]:
        """Wait as `wait` does; return the state and the reason for it."""
        limit = math.inf if timeout is None else parse_duration(timeout, "timeout")
        began = time.monotonic()
        answered = began
        shown = ""
        while True:
            try:
                state, reason = self._look()
                line = f"{self.name}: {state}{self._cell(state)} {reason}".rstrip()
                if state == "interrupted":
                    fix = "job.start() continues from the files that were saved"
                    raise self._failure(state, reason, fix=fix)
                # If the job has ended before the first request, as often with `result`, print
                # nothing.
                if state not in OVER or shown:
                    shown = _print_change(line, shown)
                if state in OVER:
                    self._keep_reason(state, reason)
                    self._clean_up()
                    return state, reason
                answered = time.monotonic()
            except CloudError as error:  # a request may fail while the job runs on
                if not error.may_pass or time.monotonic() - answered > _PATIENCE:
                    raise
                state = "without an answer"
                shown = _print_change(f"{self.name}: no answer {error.fact}", shown)
            left = began + limit - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.name} is {state} after {limit:g} s")
            time.sleep(min(every, left))

    def cancel(self) -> "Job":
        """End the job; files that are in its folder remain there.

        The running cell is interrupted, and has `JobOptions.grace` seconds for saving.
        """
        if not self._is_over():
            self.folder.create("cancel", b"{}")
            handle = read_json(self.folder, "handle.json")
            if handle:
                self.target.cancel(handle)
        return self

    def result(
        self, folder: str | os.PathLike | None = None, *, timeout: str | float | None = None
    ) -> Result:
        """Wait until the job is over, download its files, and return their paths.

        Args:
            folder: the folder for the files; None for jobs/<name>, or for the job's own folder if
                it is on this machine.
            timeout: as for `wait`.

        Raises:
            CellFailedError: a cell raised an error; the message has the traceback.
            JobFailedError: the job failed in another way, was cancelled, or reached its time limit.
            TimeoutError, CloudError: as for `wait`.
        """
        state, reason = self._wait(timeout)
        # The error of a cell says more than the state "failed", so it comes first.
        result = read_json(self.folder, "result.json")
        if "ename" in result:
            raise CellFailedError(
                f"cell {result['cell']} of {self.name} raised "
                f"{result['ename']}: {result['evalue']}",
                found=result["traceback"],
                fix=(
                    "correct the cell, and submit the notebook again; "
                    "to fetch the files that the job has saved: job.download()"
                ),
                cell=result["cell"],
                ename=result["ename"],
                evalue=result["evalue"],
                traceback=result["traceback"],
                state=state,
            )
        if state != "succeeded":
            fix = "read all output with job.logs(), and fetch the files with job.download()"
            raise self._failure(state, reason, fix=fix)
        return self.download(folder)

    def download(self, folder: str | os.PathLike | None = None) -> Result:
        """Download the notebook and the files as they are now, without waiting; return their paths.

        Args:
            folder: as for `result`.
        """
        outputs = self.folder.names("out/")
        known = ("notebook.ipynb", "notebook.html", "metrics.json")
        records = [name for name in known if self.folder.names(name)]
        # The files of a dry run are on this machine already, so they need no copy.
        is_here = isinstance(self.folder, PathFolder) and folder is None
        if is_here:
            place = Path(self.address)
        else:
            place = Path(folder or Path("jobs", self.name))
            for name in outputs + records:
                self.folder.download(name, place / name)

        def path_of(name: str) -> Path | None:
            return place / name if name in records else None

        return Result(
            notebook=path_of("notebook.ipynb"),
            page=path_of("notebook.html"),
            files={name.removeprefix("out/"): place / name for name in outputs},
            metrics=read_json(self.folder, "metrics.json"),
        )

    def _is_over(self) -> bool:
        return bool(read_json(self.folder, "result.json"))

    def _look(self) -> tuple[str, str]:
        """Return the state, see `state`, and the reason for it."""
        handle = read_json(self.folder, "handle.json")
        # Ask the platform before reading the result, because the job may end in between.
        platform = PlatformState("gone")
        if handle and not self._is_over():
            platform = self.target.state(handle)
        result = read_json(self.folder, "result.json")
        if result:
            return result["state"], result.get("error", "")
        if not handle:
            is_cancelled = self.folder.read("cancel") is not None
            return "cancelled" if is_cancelled else "starting", "it was not started yet"
        if platform.word == "queued":
            return "queued", platform.reason
        if platform.word == "running":
            is_running = read_json(self.folder, "state.json").get("state") == "running"
            return "running" if is_running else "starting", platform.reason
        if platform.word == "cancelled" or self.folder.read("cancel") is not None:
            return "cancelled", platform.reason
        if platform.word == "gone":
            return "interrupted", platform.reason or "the machine is gone"
        missing = f"the platform reports {platform.word}, and the notebook left no result"
        return "failed", platform.reason or missing

    def _cell(self, state: str) -> str:
        if state != "running":
            return ""
        about = read_json(self.folder, "state.json")
        if not about.get("cell"):
            return ""
        return f", cell {about['cell']} of {about['cells']}"

    def _keep_reason(self, state: str, reason: str) -> None:
        """Write result.json, if the platform has ended the job and no machine has written it.

        Otherwise the state would change to "interrupted" when the platform's job is deleted.
        """
        if not self._is_over():
            end = {"state": state, "phase": "platform", "error": reason}
            write_json(self.folder, "result.json", end)

    def _clean_up(self) -> None:
        """Let the target delete the machine, if all files of manifest.json are in the folder.

        Raises:
            CloudError: a file in the folder differs from its entry in manifest.json.
        """
        handle = read_json(self.folder, "handle.json")
        if not handle or handle.get("is_cleaned_up"):
            return
        for name, stored in read_json(self.folder, "manifest.json").items():
            if self.folder.stored(name) != tuple(stored):
                raise CloudError(
                    f"the machine of {self.name} was not deleted: "
                    f"{name} is not complete in the folder",
                    found=f"the size or checksum of {self.address}/{name} is not the one that the "
                    "machine has written into manifest.json",
                    fix=(
                        "copy the files from the machine yourself, and then delete the machine; "
                        "or try once more: job.wait()"
                    ),
                )
        self.target.clean_up(handle)
        write_json(self.folder, "handle.json", handle | {"is_cleaned_up": True})

    def _failure(self, state: str, reason: str, *, fix: str) -> JobFailedError:
        end = "\n".join(self.logs().splitlines()[-_LOG_LINES:])
        why = f"; {reason}" if reason else ""
        fact = f"the job {self.name} has no result: {state}{why}"
        return JobFailedError(fact, found=end, fix=fix, state=state)


def _print_change(line: str, shown: str) -> str:
    """Print a line unless it equals `shown`, the line that was printed last; return the line."""
    if line != shown:
        print(line, flush=True)
    return line


class Jobs(Table, list):
    """A list of jobs; notebooks and `print` show it as a table."""

    def rows(self) -> list[tuple[str, ...]]:
        """Return (name, state, target, chip, time of `submit`) of each job."""
        rows = []
        for job in self:
            sent = read_json(job.folder, "job.json").get("sent", 0)
            moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(sent))
            chip = job.plan.tpu.name if job.plan.tpu else "no TPU"
            rows.append((job.name, job.state, job.plan.target, chip, moment))
        return rows


def find(name: str, bucket: str | os.PathLike = "jobs", *, to: Target | None = None) -> Job:
    """Return a job by its name, from any process.

    Args:
        name: the name of the job.
        bucket: the argument `bucket` of `submit`.
        to: a `Target` for requests to the platform, such as a `VertexTarget` with credentials; None
            for the job's target. The bucket is always read with the credentials of this machine.

    Raises:
        PathNotFoundError: the job does not exist; the message lists all jobs of the bucket.
    """
    folder = open_folder(bucket)
    job = _found(folder.below(name), to)
    if job is None:
        names = ", ".join(folder.folders())
        found = f"there are {names}" if names else "there is no job"
        fix = "pass one of these names" if names else "pass the bucket of `submit`: bucket=..."
        raise PathNotFoundError(f"no job {name} in {folder.address}", found=found, fix=fix)
    return job


def jobs(bucket: str | os.PathLike = "jobs") -> Jobs:
    """Return all jobs in a folder as a table, the newest last.

    Args:
        bucket: the argument `bucket` of `submit`.
    """
    folder = open_folder(bucket)
    found = [_found(folder.below(name), None) for name in folder.folders()]
    complete = [job for job in found if job is not None]

    def sent_at(job: Job) -> float:
        return read_json(job.folder, "job.json").get("sent", 0)

    return Jobs(sorted(complete, key=sent_at))


def _found(folder: JobFolder, target: Target | None) -> Job | None:
    request = read_json(folder, "job.json")
    if not request:
        return None
    plan = _plan_from_json(request["plan"])
    return Job(folder, target or _target(plan.target), plan)


def _target(to: str | Target) -> Target:
    if not isinstance(to, str):
        return to
    if to not in _TARGETS:
        raise InvalidValueError(
            f"to={to!r} is not a target", found=f"there are {', '.join(_TARGETS)}", fix='to="local"'
        )
    return _TARGETS[to]()


def _sent_files(
    path: Path, book: JobNotebook, *, files, requirements, options: JobOptions
) -> dict[str, bytes | Path]:
    """Return all files to send, by their names in the folder in/: a path, or the contents."""
    if isinstance(files, str | os.PathLike):
        raise InvalidValueError(f"files must be a list, got {files!r}", fix=f'files=["{files}"]')
    named = list(files)
    if book.script:
        named.append(book.script.name)
    found = named_files(path.parent, named, not_secret=options.not_secret)
    sent: dict[str, bytes | Path] = {"notebook.ipynb": book.content}
    sent |= {f"files/{name}": file for name, file in found.items()}
    if requirements is not None:
        sent["requirements.txt"] = read_requirements(
            Path(requirements), package_list(options, WHEEL), not_secret=options.not_secret
        )
    return sent


def _new_name(stem: str) -> str:
    """Return a name that no other job has: the notebook's, the time, and random hex digits."""
    words = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    begin = words[:20].strip("-")
    if not begin[:1].isalpha():
        begin = f"job-{begin}".rstrip("-")
    return f"{begin}-{time.strftime('%m%d-%H%M')}-{uuid.uuid4().hex[:4]}"


def _digest(sent: Mapping[str, bytes | Path], about: list) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, content in sorted(sent.items()):
        digest.update(f"\n{name}\n".encode())
        digest.update(content.read_bytes() if isinstance(content, Path) else content)
    return digest.hexdigest()[:32]


def _plan_as_json(plan: JobPlan) -> dict:
    return asdict(plan) | {"tpu": plan.tpu.name if plan.tpu else None}


def _plan_from_json(value: dict) -> JobPlan:
    """Return the plan in job.json; fields that a later version of tpukit has added are ignored."""
    options = _known_fields(JobOptions, value["options"])
    options["not_secret"] = tuple(options.get("not_secret", ()))
    plan = _known_fields(JobPlan, value)
    plan["options"] = JobOptions(**options)
    plan["tpu"] = find_tpu(value["tpu"]) if value["tpu"] else None
    return JobPlan(**plan)


def _known_fields(kind: type, value: Mapping) -> dict:
    names = {one.name for one in fields(kind)}
    return {name: value[name] for name in value if name in names}


def _table(plan: JobPlan, sent: Mapping[str, bytes | Path]) -> str:
    """Return a table of all files to send with their sizes, the machine, and the largest cost."""
    sizes = {}
    for name, content in sent.items():
        sizes[name] = content.stat().st_size if isinstance(content, Path) else len(content)
    machine = plan.tpu.name if plan.tpu else "this one"
    if plan.target == "local" and plan.tpu:
        machine = f"this one, with the packages for {machine}"
    rows = [(f"in/{name}", human_size(size)) for name, size in sizes.items()]
    rows += [(f"{len(sizes)} files", human_size(sum(sizes.values())))]
    rows += [("to", f"{plan.target}, {plan.folder}"), ("machine", machine)]
    rows += [("secrets", f"{name}, by reference") for name in plan.secrets]
    rows += [("largest cost", largest_cost(plan))]
    return f"{plan.name}\n\n{as_text(rows)}\n"
