"""A worker function as a Vertex AI custom job: looked at first, then sent, watched, and cancelled if need be."""

import hashlib
import json
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpukit.cloud.answers import CloudFailed, find_credentials
from tpukit.cloud.bundle import Bundle, make_bundle
from tpukit.cloud.handover import check_place
from tpukit.cloud.slices import MACHINE_SPECS
from tpukit.cloud.vertex_api import LABEL, TRAINER, VertexApi
from tpukit.essentials.machine import PRICES_OF
from tpukit.essentials.show import Table, WrongType, WrongValue, running_shell
from tpukit.measure import Tpu, find_tpu, parse_duration

_SECONDS_BETWEEN_LINES = 60.0  # of watch, while nothing changes
_SHORTEST = 60.0  # seconds: below it a job ends before its machine has begun
_OVER = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
_BUCKET = "[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
_ACCOUNT = "[^@ ]+@[^@ ]+[.]gserviceaccount[.]com"
_IMAGE = "[a-z0-9.-]+[.][a-z]+(:[0-9]+)?/[A-Za-z0-9._/-]+(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?"


def job(
    trainer: Callable | str | Path,
    chip: str = "v5e-8",
    *,
    image: str,
    bucket: str,
    args: Sequence[object] = (),
    name: str | None = None,
    continues: str | None = None,
    needs: Mapping[str, str] | None = None,
    service_account: str | None = None,
    project: str | None = None,
    region: str = "us-central1",
    timeout: str | float = "1d",
    environ: Mapping[str, str] = os.environ,
    **connection: object,
) -> "Job":
    """Make a custom job of a worker function, which is launched on every core of one TPU host; nothing is sent yet.

    The job writes into gs://<bucket>/<name>. Its working directory there is its own checkpoint folder, so `fit` with
    the relative folder of a notebook saves in the bucket, and continues when Vertex AI starts the job again;
    `tpukit.cloud.folders` has what else a trainer needs.

    Args:
        trainer: the function, "train.py:train", or a script of any framework, "train.py"; see `make_bundle`.
        chip: v5e-1, v5e-4, v5e-8, v6e-1, v6e-4, v6e-8, v2-8 or v3-8.
        image: a container with Python, torch_xla, libtpu and what the trainer imports; tpukit comes with the trainer.
        bucket: "gs://bucket", or a folder of it, in the same region.
        args: passed to the function after its `Core`, as JSON: numbers, text, lists, dicts. Of a script: its arguments.
        name: None for the function's name and the time. A name is one job's: sent again, it finds the job that runs.
        continues: the name of an earlier job, whose folder and checkpoints this one goes on with; trainer and arguments
            must be the same.
        needs: what brings a module that this machine does not have; see `make_bundle`.
        service_account: as which it runs; None for Vertex AI's own.
        project: None for GOOGLE_CLOUD_PROJECT, or the credential's own.
        region: with TPUs of that kind, and quota for them.
        timeout: after which Vertex AI ends the job, which limits what it can cost.
        environ: of this process.
        **connection: `credentials`, `endpoint`, `transport`, `pauses`, `request_timeout`; see `VertexApi`.

    Raises:
        ValueError: an argument is none that Vertex AI takes.
        TypeError: the trainer or its arguments cannot be sent.
    """
    place = find_tpu(chip, among=MACHINE_SPECS, without="Vertex AI trains on no")
    if name and continues:
        raise WrongValue(f"a job with name={name!r} and continues={continues!r} has two names", fix="give one of them")
    for argument, given in (("name", name), ("continues", continues)):
        if given is not None:
            _check(argument, given, "[A-Za-z0-9][A-Za-z0-9._-]{0,127}", f'{argument}="train-1"')
    check_place("region", region)
    check_place("project", project)
    seconds = parse_duration(timeout, "timeout")
    if not _SHORTEST <= seconds < math.inf:
        raise WrongValue(
            f"timeout is the time after which a job is ended, of at least a minute; got {timeout!r}",
            found="Vertex AI does not say what none would be, and a number is of seconds",
            fix='timeout="8h", or timeout="7d" for Vertex AI\'s longest default',
        )
    bundle = make_bundle(trainer, needs=needs)
    words = arguments(bundle, args)
    _check("image", image, _IMAGE, 'image="us-docker.pkg.dev/my-project/kit/trainer:1"')
    if service_account is not None:
        _check("service_account", service_account, _ACCOUNT, 'service_account="me@my-project.iam.gserviceaccount.com"')
    label, own_name = uuid.uuid4().hex[:12], continues or name or new_name(bundle.name)
    folder = f"{find_bucket(bucket)}/{own_name}"
    digest = hashlib.sha256(bundle.to_bytes() + json.dumps(words).encode()).hexdigest()[:12]
    file = f"trainer-{digest}.zip" if continues else "trainer.zip"
    variables = {"PJRT_DEVICE": "TPU", "TPUKIT_JOB": label} | ({"TPUKIT_CONTINUE": "1"} if continues else {})
    request = {
        "displayName": own_name,
        "jobSpec": {
            "workerPoolSpecs": [
                {
                    "machineSpec": dict(MACHINE_SPECS[place.name]),
                    "replicaCount": 1,  # the SDK: TPU jobs allow one
                    "containerSpec": {
                        "imageUri": image,
                        "command": ["python", f"/gcs/{folder.removeprefix('gs://')}/{file}"],
                        "args": words,
                        "env": [{"name": one, "value": value} for one, value in variables.items()],
                    },
                }
            ],
            "scheduling": {"timeout": f"{seconds:.0f}s"},
            "baseOutputDirectory": {"outputUriPrefix": folder},
        },
        "labels": {LABEL: label, TRAINER: digest},
    }
    if service_account is not None:
        request["jobSpec"]["serviceAccount"] = service_account
    return Job(request, bundle, place, project, region, environ, connection, bool(name or continues))


def new_name(name: str) -> str:
    """Return a name that no other job has: it begins as given, and goes on with the time and four random letters."""
    return f"{name[:20].rstrip('-')}-{time.strftime('%m%d-%H%M')}-{uuid.uuid4().hex[:4]}"


@dataclass(eq=False, repr=False)
class Job(Table):
    """A custom job: shows itself as a table, in any notebook, before anything is sent.

    Attributes:
        request: what is sent, as the API writes it.
        bundle: the trainer's files.
        resource: the name that Vertex AI has given it; None before `submit`.
        state: QUEUED, PENDING, RUNNING, SUCCEEDED, ... as last seen; None before.
    """

    request: dict
    bundle: Bundle
    _tpu: Tpu
    _project: str | None
    _region: str
    _environ: Mapping[str, str]
    _connection: dict
    _may_be_there: bool
    resource: str | None = None
    state: str | None = None
    _api: VertexApi | None = None
    _sent: bool = False

    @property
    def title(self) -> str:
        """What it is, in one line."""
        return f"{self.request['displayName']}: {self.state or 'not sent'}, {self._tpu.name} in {self._region}"

    @property
    def folder(self) -> str:
        """The folder in the bucket that it writes into."""
        return self.request["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"]

    @property
    def file(self) -> str:
        """Where the trainer goes, in the bucket."""
        spec = self.request["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
        return spec["command"][1].replace("/gcs/", "gs://", 1)

    def rows(self) -> list[tuple[str, str]]:
        """Return (what, value) of all that is sent, and what it costs."""
        spec = self.request["jobSpec"]
        pool = spec["workerPoolSpecs"][0]
        hours = parse_duration(int(spec["scheduling"]["timeout"][:-1])) / 3600
        most = f"at most {hours:g} h, ${hours * self._tpu.dollars:,.2f}"
        return [
            ("job", self.resource or "not sent: submit() sends it"),
            ("machine", ", ".join(f"{key} {value}" for key, value in pool["machineSpec"].items())),
            ("cost", f"about ${self._tpu.dollars:.2f} an hour ({PRICES_OF}; Vertex AI has its own); {most}"),
            ("image", pool["containerSpec"]["imageUri"]),
            ("it must have", ", ".join(self.bundle.needs) or "Python alone"),
            ("tried here", self.bundle.tried),
            ("trainer", f"{len(self.bundle.files)} files: {', '.join(sorted(self.bundle.files))}"),
            ("command", " ".join([*pool["containerSpec"]["command"], *pool["containerSpec"]["args"]])),
            ("writes", f"{self.folder}, checkpoints in {self.folder}/checkpoints"),
            ("runs as", spec.get("serviceAccount", "Vertex AI's own account")),
        ]

    def show(self) -> None:
        """Show what would be sent, and what it costs: as a table in a notebook, as text elsewhere."""
        if running_shell() is None:
            print(self)
            return
        from IPython.display import display

        display(self)

    def save(self, path: str | Path) -> Path:
        """Write the trainer's bundle to a file, to rehearse it: `python trainer.zip`; never over another file."""
        return self.bundle.save(path)

    def submit(self) -> "Job":
        """Upload the trainer and create the job; one of its name that runs is taken, and not sent again.

        Raises:
            CloudFailed: it was not created; or whether it was is not known, and the message says so.
            ValueError: a job of this name was sent before, with another trainer or other arguments, or is over.
            ImportError: the SDK is not installed.
        """
        if self.resource is None:
            api, label = self._connect(), self.request["labels"][LABEL]
            there = api.find(label) if self._sent else self._of_that_name(api) if self._may_be_there else None
            if there is None:
                bucket, _, path = self.file.removeprefix("gs://").partition("/")
                api.upload(self.bundle.to_bytes(), bucket, path)
                self._sent = True
                there = api.create(self.request, label)
            self._is_now(there)
            print(f"{self.title}\n  cancel: .cancel(), or `gcloud ai custom-jobs cancel {self.resource}`")
        return self

    def _of_that_name(self, api: VertexApi):
        """Return the job of this name and folder that is not over, None where there is none; refuse to share one."""
        name, continues = self.request["displayName"], "TPUKIT_CONTINUE" in json.dumps(self.request)
        named = ((one, one.job_spec.base_output_directory) for one in api.named(name))
        found = [one for one, output in named if output.output_uri_prefix == self.folder]
        running = [one for one in found if one.state.name.removeprefix("JOB_STATE_") not in _OVER]
        for one in running:
            if one.labels.get(TRAINER) == self.request["labels"][TRAINER]:
                print(f"{name} runs already, and is not sent again")
                return one
        if running or (found and not continues):
            over = "is over" if not running else "runs, with another trainer or other arguments"
            raise WrongValue(
                f"a job {name} is there, and {over}: {(running or found)[0].name}",
                found=f"both would write into {self.folder}",
                fix=f'another name; or continues="{name}" once it is over, with the same trainer and arguments',
            )
        return None

    def watch(self, *, every: float = 15.0, patience: str | float = "15m") -> "Job":
        """Wait until the job is over, with a line when its state changes, and every minute; return it.

        An interrupt ends the watching, not the job. Answers that do not come are asked for again for `patience`.

        Raises:
            CloudFailed: the job failed or expired, with Vertex AI's words; or its state cannot be had.
        """
        api, resource = self._begun()
        try:
            now = self._watched(api, resource, every, parse_duration(patience, "patience"))
        except KeyboardInterrupt:
            print(f"the watching ends, the job goes on; .cancel() ends it: {resource}")
            raise
        if self.state in ("FAILED", "EXPIRED"):
            words = " ".join(now.error.message.split()) or "Vertex AI gives no reason"
            raise CloudFailed(
                f"job {self.request['displayName']} {self.state.lower()}",
                found=words,
                fix=f"read what it printed: `gcloud ai custom-jobs stream-logs {resource}`; checkpoints are in "
                f"{self.folder}",
            )
        return self

    def cancel(self) -> "Job":
        """Ask Vertex AI to end the job; one that is over stays as it is. `watch` sees its end."""
        api, resource = self._begun()
        try:
            api.cancel(resource)
        except CloudFailed as error:
            if error.status != 400:
                raise
            self._is_now(api.get(resource))
            if self.state not in _OVER:
                raise
        else:
            self._is_now(api.get(resource))
        print(self.title)
        return self

    def _watched(self, api: VertexApi, resource: str, every: float, patience: float):
        said, said_at, heard = None, 0.0, time.monotonic()
        while True:
            now = None
            try:
                now = api.get(resource)
                heard = time.monotonic()
                self._is_now(now)
            except CloudFailed as error:
                if not error.may_pass or time.monotonic() - heard > patience:
                    raise
            shown = self.state if now else "no answer"
            if shown != said or time.monotonic() - said_at >= _SECONDS_BETWEEN_LINES:
                print(f"{self.request['displayName']}: {shown}{self._so_far(now)}", flush=True)
                said, said_at = shown, time.monotonic()
            if now and self.state in _OVER:
                return now
            time.sleep(every)

    def _connect(self) -> VertexApi:
        if self._api is None:
            options = dict(self._connection)
            credentials, project = find_credentials(options.pop("credentials", None), self._project, self._environ)
            self._api = VertexApi(project, self._region, credentials=credentials, **options)
        return self._api

    def _begun(self) -> tuple[VertexApi, str]:
        if self.resource is None:
            raise CloudFailed("this job was not sent", found="no answer to it", fix=".submit(), then this")
        return self._connect(), self.resource

    def _is_now(self, answer) -> None:
        self.resource, self.state = answer.name, answer.state.name.removeprefix("JOB_STATE_")

    def _so_far(self, answer) -> str:
        if not answer or not answer.start_time:
            return ""
        ended = answer.end_time.timestamp() if answer.end_time else time.time()
        hours = max(0.0, ended - answer.start_time.timestamp()) / 3600
        return f", {hours * 60:.0f} min, about ${hours * self._tpu.dollars:.2f}"


def arguments(bundle: Bundle, args: Sequence[object]) -> list[str]:
    """Return a trainer's arguments as they stand in a command: one JSON list for a function, words for a script.

    A text is a word as it is; what else a script gets is JSON: null, true, {"lr": 0.1}.

    Raises:
        TypeError: JSON would lose or change one.
    """
    if isinstance(args, str | Mapping):
        raise WrongType(f"args is a list of arguments, got {args!r}", fix=f"args=[{args!r}]")
    try:
        same = json.loads(text := json.dumps(list(args), allow_nan=False)) == list(args)
    except (TypeError, ValueError):
        same = False
    if not same:
        raise WrongType(
            f"args travel as JSON, which cannot carry {list(args)!r}",
            found="it has numbers, text, True, None, lists, and dicts with text as keys",
            fix="pass a path or a dict of settings, and make the objects inside the function",
        )
    if bundle.launches:
        return [text] if args else []
    words = [one if isinstance(one, str) else json.dumps(one) for one in args]
    if any("\0" in one for one in words):
        raise WrongValue(
            "no command takes an argument with a zero character in it", found=repr(args), fix="leave it out"
        )
    return words


def find_bucket(bucket: str) -> str:
    """Return a bucket, or a folder of one, as gs://bucket/folder; ValueError for anything else."""
    address = (bucket if bucket.startswith("gs://") else f"gs://{bucket}").rstrip("/")
    _check("bucket", address, f"gs://{_BUCKET}(/[A-Za-z0-9._-]+)*", 'bucket="gs://my-bucket/runs"')
    return address


def _check(argument: str, given: str, pattern: str, example: str) -> None:
    if not re.fullmatch(pattern, given):
        raise WrongValue(f"{argument} is none that Vertex AI takes: {given!r}", fix=example)
