"""A proof on a chip elsewhere: the kit in one script, sent with the platforms' own command lines, its result fetched.

Colab (google-colab-cli) and Kaggle (kaggle) both take one Python file and nothing beside it, so the kit travels inside.
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

MOST_BYTES = 1_000_000  # of a script: what Kaggle takes is not documented, so it is kept below a megabyte
_EARLIER = 60.0  # seconds in which what Kaggle says may still be about an earlier run
_UNANSWERED = 5  # questions in a row without an answer, after which nobody is asked any more
_RESULT, _SCRIPT, _TITLE = "result.json", "prove.py", "tpukit proof"
_TEMPLATE = '''\
"""Written by `python -m tools.chip --on {platform}`: the kit, and what proves it on this machine."""

import base64, importlib.util, io, os, subprocess, sys, tarfile, tempfile

kit = tempfile.mkdtemp()
files = io.BytesIO(base64.b64decode(KIT := """
{kit}
"""))
tarfile.open(fileobj=files, mode="r:xz").extractall(kit, filter="data")
if importlib.util.find_spec("array_record") is None:  # Kaggle's image has none; its torch is not touched
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "array_record", "simplejpeg"], check=False)
command = [sys.executable, "-m", "tools.chip", *{arguments}]
path = os.pathsep.join(filter(None, [kit, os.environ.get("PYTHONPATH")]))
environ = {{**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}}
with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
    for line in process.stdout:  # through this process: in a notebook's kernel only its own lines are seen
        print(line, end="", flush=True)
{end}
'''
_END = {
    "colab": "sys.exit(process.returncode)",
    "kaggle": "# no exit status: whether Kaggle keeps the files of a run that fails is not documented",
}


class NotSent(TpukitError, RuntimeError):
    """The platform's command line is missing, refused, or brought no result."""


def script(platform: str, arguments: Sequence[str], *, root: Path | None = None) -> str:
    """Return a Python file that proves this very kit on the machine that it is run on, in an empty folder.

    Raises:
        ValueError: it is larger than a megabyte.
    """
    root = root or Path(__file__).parents[2]
    sent = [path for part in ("tpukit", "tools/chip") for path in (root / part).rglob("*.[pch]*")]
    # Old notebooks are nothing that a chip proves.
    sent = [path for path in sent if path.suffix in (".py", ".c", ".h") and path.parent.name != "migrate"]
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in sent}
    packed = base64.encodebytes(_packed(files)).decode().strip()
    text = _TEMPLATE.format(platform=platform, kit=packed, arguments=list(arguments), end=_END[platform])
    if len(text) > MOST_BYTES:
        raise ValueError(f"the script has {len(text):,} bytes, more than {MOST_BYTES:,}, which Kaggle may refuse")
    return text


def _packed(files: dict[str, bytes]) -> bytes:
    """Return files as a tar archive, compressed as a whole: it has two thirds of the size of a zip."""
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
        "push": ["kaggle", "kernels", "push", "-p", str(folder), "--accelerator", "TpuV5E8", "--timeout", "3600"],
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
    """Write the script and what Kaggle wants to know of it into a folder; return the name of its kernel.

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
    """Run the proof on a machine of Colab, show what it prints, write its JSON, and return its exit status.

    Raises:
        NotSent: colab is missing, or there is no result.
    """
    name = uuid.uuid4().hex[:8]
    written = write_for_colab(result.parent / f"{result.stem}-sent", [*_named(name), *arguments])
    command = _found(colab_command(written, chip))
    print(" ".join(command), flush=True)
    environ, printed = {**os.environ, "PYTHONUNBUFFERED": "1"}, b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as process:
        while data := process.stdout.read1():  # not by lines: at first it asks for a code, in a line without an end
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
    result: Path, *, user: str, arguments: Sequence[str] = (), every: float = 20.0, patience: float = 7200.0
) -> int:
    """Send the proof to Kaggle, wait until it has run, fetch its JSON, and return its exit status.

    Raises:
        NotSent: kaggle is missing or refuses, the run failed, or `patience` seconds are over.
        ValueError: `user` cannot be a name.
    """
    name, folder = uuid.uuid4().hex[:8], result.parent / f"{result.stem}-sent"
    commands = kaggle_commands(folder, write_for_kaggle(folder, user, [*_named(name), *arguments]))
    shutil.rmtree(folder / "output", ignore_errors=True)
    said = _call(commands["push"])
    if "successfully pushed" not in said:  # kaggle exits with 0 also where it was refused
        raise NotSent(_refused(commands["push"], said))
    began, state, unanswered = time.monotonic(), "", 0
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
        except NotSent as error:  # a lost connection must not cost a run that goes on there
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
    """Return a command with the path of its program: beside this Python, or on the path."""
    program = shutil.which(command[0], path=str(Path(sys.executable).parent)) or shutil.which(command[0])
    if program is None:
        package = {"colab": "google-colab-cli, which needs Python 3.12 or newer"}.get(command[0], command[0])
        raise NotSent(
            f"the command {command[0]} is not installed: {package}",
            fix=f"in the clone, pip install '.[chip]'; or, beside any Python: pipx install {package.partition(',')[0]}",
        )
    return [program, *command[1:]]


def _call(command: list[str], run: Callable = subprocess.run) -> str:
    """Run a command of kaggle; return what it says.

    Raises:
        NotSent: it ends with an error.
    """
    print(" ".join(command), flush=True)
    ended = run(_found(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        raise NotSent(_refused(command, ended.stdout))
    return ended.stdout


def _refused(command: list[str], said: str) -> str:
    return explain(
        f"{' '.join(command[:3])} was refused",
        found=f"{' '.join(said.split())[-500:]}",
        fix="sign in with `kaggle auth login`, or put a token where it says; then run this again",
    )
