"""What `python trainer.zip` does: it unpacks the bundle, looks whose checkpoints are there, and runs the trainer.

A bundle has it as its `__main__.py`, so it imports the standard library alone.
"""

import atexit
import hashlib
import json
import os
import runpy
import shutil
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

_KEPT = "tpukit-job.json"  # beside the checkpoints: whose they are


def main() -> None:
    """Run the bundle that this is a part of."""
    with zipfile.ZipFile(sys.argv[0]) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
        job = json.loads(files["tpukit.json"])
        folder = Path(tempfile.mkdtemp(prefix="job-"))  # unpacked: a trainer may read what lies beside it
        archive.extractall(folder)
    process = os.getpid()  # a worker is forked from this process, and ends before it
    atexit.register(lambda: os.getpid() == process and shutil.rmtree(folder, ignore_errors=True))
    sys.path[0] = str(folder)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder / ".kit")
        sys.path.insert(1, str(folder / ".kit"))
    _say_what_differs(job)
    _look_whose_checkpoints(files, sys.argv[1:])
    if job["function"]:
        from tpukit.cloud.run_trainer import run_trainer

        run_trainer(job["module"], job["function"], sys.argv[1:])
        return
    sys.argv[0] = str(folder / f"{job['module']}.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


def _say_what_differs(job: dict) -> None:
    here = "{}.{}".format(*sys.version_info)
    if here != job["python"]:
        print(f"the notebook had Python {job['python']}, this machine has {here}", file=sys.stderr)
    for name, _, version in (one.partition("==") for one in job["needs"]):
        try:
            there = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            there = "none"
        if version and there != version:
            print(f"the notebook had {name} {version}, this machine has {there}", file=sys.stderr)


def _look_whose_checkpoints(files: dict[str, bytes], arguments: list[str]) -> None:
    """End where the folder of the checkpoints is another job's; keep there what this one is."""
    folder = os.environ.get("AIP_CHECKPOINT_DIR")
    if not folder:
        return
    folder = Path(f"/gcs/{folder[5:]}" if folder.startswith("gs://") else folder)  # where Vertex AI mounts buckets
    trainer = hashlib.sha256()
    for name, content in sorted(files.items()):
        if not name.endswith(".whl"):
            trainer.update(f"{name} {len(content)} ".encode() + content)
    this = {"trainer": trainer.hexdigest(), "arguments": arguments, "job": os.environ.get("TPUKIT_JOB", "")}
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / _KEPT
    if not kept.exists():
        new = folder / f"{_KEPT}.{os.getpid()}"  # whole or not at all
        new.write_text(json.dumps(this))
        new.replace(kept)
        return
    before = json.loads(kept.read_text())
    for what in ("trainer", "arguments"):
        if before[what] != this[what]:
            words = f": {before[what]}, and now {this[what]}" if what == "arguments" else ""
            sys.exit(f"the checkpoints in {folder} are of other {what}{words}; fix: give this job another name")
    if before["job"] != this["job"] and not os.environ.get("TPUKIT_CONTINUE"):
        sys.exit(f"the checkpoints in {folder} are of another job, {before['job']}; fix: another name, or --continue")


if __name__ == "__main__":
    main()
