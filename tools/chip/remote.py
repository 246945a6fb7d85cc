"""Run the proof on a chip of Colab or Kaggle: send tpukit in one script, and fetch the result.

Colab (google-colab-cli) and Kaggle (kaggle) both take one Python file and no other files, so the
script contains tpukit.
"""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.chip.result import code_that_runs, find_result
from tpukit.essentials.display import InvalidValueError, TpukitError, explain

# of a script: what Kaggle takes is not documented, so it is kept below a megabyte
MOST_BYTES = 1_000_000
_EARLIER = 60.0  # seconds in which what Kaggle says may still be about an earlier run
_UNANSWERED = 5  # requests in a row without an answer, after which no more are sent
_RESULT = "result.json"
_SCRIPT = "prove.py"
_TITLE = "tpukit proof"
_TEMPLATE = '''\
"""Written by `python -m tools.chip --on {platform}`: tpukit, and its proof on this machine."""

import base64, importlib.util, io, os, subprocess, sys, tarfile, tempfile

kit = tempfile.mkdtemp()
files = io.BytesIO(base64.b64decode(KIT := """
{kit}
"""))
tarfile.open(fileobj=files, mode="r:xz").extractall(kit, filter="data")
if importlib.util.find_spec("array_record") is None:  # absent from Kaggle's image
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "array_record", "simplejpeg"], check=False)
command = [sys.executable, "-m", "tools.chip", *{arguments}]
path = os.pathsep.join(filter(None, [kit, os.environ.get("PYTHONPATH")]))
environ = {{**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}}
output = {{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}}
with subprocess.Popen(command, env=environ, **output) as process:
    for line in process.stdout:  # a notebook shows only the lines that its kernel prints
        print(line, end="", flush=True)
{end}
'''
_END = {
    "colab": "sys.exit(process.returncode)",
    "kaggle": "# no exit status: Kaggle does not document whether it keeps a failed run's files",
}


class NotSent(TpukitError, RuntimeError):
    """The platform's command line is missing, refused, or brought no result."""


def script(platform: str, arguments: Sequence[str], *, root: Path | None = None) -> str:
    """Return a Python file that proves this tpukit on the machine that runs it, in an empty folder.

    Raises:
        ValueError: it is larger than a megabyte.
    """
    root = root or Path(__file__).parents[2]
    sent = []
    for part in ("tpukit", "tools/chip"):
        for path in (root / part).rglob("*.[pch]*"):
            # The proof does not use the subpackage for old notebooks.
            if path.suffix in (".py", ".c", ".h") and path.parent.name != "migrate":
                sent.append(path)
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in sent}
    packed = base64.encodebytes(_packed(files)).decode().strip()
    text = _TEMPLATE.format(
        platform=platform, kit=packed, arguments=list(arguments), end=_END[platform]
    )
    if len(text) > MOST_BYTES:
        raise ValueError(
            f"the script has {len(text):,} bytes, more than {MOST_BYTES:,}, which Kaggle may refuse"
        )
    return text


def _packed(files: dict[str, bytes]) -> bytes:
    """Return files as a tar archive, compressed as a whole: two thirds of the size of a zip."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:xz") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()


def colab_command(file: Path, chip: str) -> list[str]:
    """Return what provisions a machine, runs the script on it, and gives the machine back."""
    return ["colab", "run", "--tpu", chip, "--timeout", "3600", str(file)]


def kaggle_commands(folder: Path, kernel: str) -> dict[str, list[str]]:
    """Return what sends the script, asks how it is, and fetches what it wrote."""
    output = ["-p", str(folder / "output"), "--force", "--file-pattern", re.escape(_RESULT)]
    return {
        "push": [
            "kaggle",
            "kernels",
            "push",
            "-p",
            str(folder),
            "--accelerator",
            "TpuV5E8",
            "--timeout",
            "3600",
        ],
        "status": ["kaggle", "kernels", "status", kernel],
        "output": ["kaggle", "kernels", "output", kernel, *output],
        "logs": ["kaggle", "kernels", "logs", kernel],
    }


def write_for_colab(folder: Path, arguments: Sequence[str] = ()) -> Path:
    """Write the script for Colab into a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _SCRIPT
    file.write_text(script("colab", arguments))
    return file


def write_for_kaggle(folder: Path, user: str, arguments: Sequence[str] = ()) -> str:
    """Write the script and its description for Kaggle into a folder; return its kernel's name.

    Raises:
        ValueError: this cannot be the name of a user.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{1,49}", user or ""):
        raise InvalidValueError(
            f"--user is your name on Kaggle, as in kaggle.com/<name>, got {user!r}",
            fix="make chip-kaggle KAGGLE_USER=your-name",
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _SCRIPT).write_text(script("kaggle", [*arguments, "--result", _RESULT]))
    kernel = f"{user}/{_TITLE.replace(' ', '-')}"
    metadata = {
        "id": kernel,
        "title": _TITLE,
        "code_file": _SCRIPT,
        "language": "python",
        "kernel_type": "script",
        "is_private": True,
        "enable_gpu": False,
        "enable_tpu": True,
        "enable_internet": True,  # for array_record and simplejpeg, which the image lacks
    }
    (folder / "kernel-metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return kernel


def prove_on_colab(result: Path, *, chip: str = "v5e1", arguments: Sequence[str] = ()) -> int:
    """Run the proof on Colab, show its output, write its JSON, and return its exit status.

    Raises:
        NotSent: colab is missing, or there is no result.
    """
    name = uuid.uuid4().hex[:8]
    written = write_for_colab(result.parent / f"{result.stem}-sent", [*_named(name), *arguments])
    command = _found(colab_command(written, chip))
    print(" ".join(command), flush=True)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    printed = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as process:
        # not by lines: at first it asks for a code, in a line without an end
        while data := process.stdout.read1():
            sys.stdout.write(data.decode(errors="replace"))
            sys.stdout.flush()
            printed += data
    return _keep(
        find_result(printed.decode(errors="replace")),
        name,
        result,
        f"colab ended with exit status {process.returncode}",
    )


def prove_on_kaggle(
    result: Path,
    *,
    user: str,
    arguments: Sequence[str] = (),
    every: float = 20.0,
    patience: float = 7200.0,
) -> int:
    """Send the proof to Kaggle, wait until it has run, fetch its JSON, and return its exit status.

    Raises:
        NotSent: kaggle is missing or refuses, the run failed, or `patience` seconds are over.
        ValueError: `user` cannot be a name.
    """
    name = uuid.uuid4().hex[:8]
    folder = result.parent / f"{result.stem}-sent"
    commands = kaggle_commands(folder, write_for_kaggle(folder, user, [*_named(name), *arguments]))
    shutil.rmtree(folder / "output", ignore_errors=True)
    said = _call(commands["push"])
    if "successfully pushed" not in said:  # kaggle exits with 0 also where it was refused
        raise NotSent(_refused(commands["push"], said))
    began = time.monotonic()
    state = ""
    unanswered = 0
    while (waited := time.monotonic() - began) < patience:
        try:
            said = _call(commands["status"])
            state = (re.search(r'status "(?:\w+\.)?(\w+)"', said) or ["", said.strip()])[1].upper()
            print(f"{waited:.0f} s: {state.lower()}", flush=True)
            if state in ("COMPLETE", "ERROR", "CANCEL_ACKNOWLEDGED"):
                _call(commands["output"])
                fetched = folder / "output" / _RESULT
                found = find_result(fetched.read_text()) if fetched.is_file() else None
                if found and found["run"] == name:
                    return _keep(found, name, result, "")
                if waited > _EARLIER:
                    break
            unanswered = 0
        except NotSent as error:  # a lost connection does not end the run
            unanswered += 1
            if unanswered == _UNANSWERED:
                raise
            print(error, flush=True)
        time.sleep(every)
    raise NotSent(
        "Kaggle brought no result of this run",
        found=f"its state is {state.lower()}",
        fix=f"see what it printed: {' '.join(commands['logs'])}",
    )


def _named(name: str) -> list[str]:
    return ["--run", name, "--code", code_that_runs()]


def _keep(found: dict | None, name: str, result: Path, otherwise: str) -> int:
    if not found or found["run"] != name:
        raise NotSent("there is no result", found=otherwise, fix="what it printed above says why")
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(found) + "\n")
    print(f"wrote {result}; into docs/evidence.md with: make chip-report FILE={result}", flush=True)
    return 0 if found["passed"] else 1


def _found(command: list[str]) -> list[str]:
    """Return a command with the path of its program: in the folder of this Python, or on PATH."""
    program = shutil.which(command[0], path=str(Path(sys.executable).parent)) or shutil.which(
        command[0]
    )
    if program is None:
        package = {"colab": "google-colab-cli, which needs Python 3.12 or newer"}.get(
            command[0], command[0]
        )
        raise NotSent(
            f"the command {command[0]} is not installed: {package}",
            fix=f"in the clone, pip install '.[chip]'; "
            f"or, for any Python: pipx install {package.partition(',')[0]}",
        )
    return [program, *command[1:]]


def _call(command: list[str], run: Callable = subprocess.run) -> str:
    """Run a command of kaggle; return what it says.

    Raises:
        NotSent: it ends with an error.
    """
    print(" ".join(command), flush=True)
    ended = run(
        _found(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if ended.returncode:
        raise NotSent(_refused(command, ended.stdout))
    return ended.stdout


def _refused(command: list[str], said: str) -> str:
    return explain(
        f"{' '.join(command[:3])} was refused",
        found=f"{' '.join(said.split())[-500:]}",
        fix="sign in with `kaggle auth login`, or put a token where it says; then run this again",
    )
