"""Test doubles of the commands gcloud, sky, docker, sudo and systemctl, as programs on the PATH.

    with CloudTools(folder) as tools:       # tools.buckets is a Cloud Storage, a folder for each
        bucket ...                                 # programs that are started here find the doubles
        first

A TPU VM is a folder: /var/tpukit and /run/systemd/system of its scripts are mapped into it, and its
processes carry a mark in their environment. Its boot script, its unit of systemd and its containers
are executed, as processes of this machine. Deleting the VM ends its processes and its disk.
`tools.fail("storage cp", ...)` makes commands fail.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__)
sys.path.insert(0, str(HERE.parents[1]))
from doubles.vertex_double import MARK, VertexDouble, image_environment, kill_machine, processes_of  # noqa: E402

_HOME = "TPUKIT_TEST_CLOUD"  # the folder of the doubles, in the environment of all of them
_TOOLS = ("gcloud", "sky", "docker", "sudo", "systemctl")


class CloudTools:
    """The commands on the PATH of this process, and a Cloud Storage, until the block ends."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder).absolute()
        self.bin = self.folder / "bin"
        self.bin.mkdir(parents=True)
        for name in _TOOLS:
            program = self.bin / name
            # A `#!` line cannot name a path with a blank, so the shell starts Python.
            python = [sys.executable, "-I", "-c", _PROGRAM.format(file=str(HERE), name=name)]
            program.write_text(f'#!/bin/sh\nexec {shlex.join(python)} "$@"\n')
            program.chmod(0o755)
        self.cloud = VertexDouble(self.folder / "buckets")

    @property
    def buckets(self) -> Path:
        """The folder that has a folder for each bucket."""
        return self.cloud.folder

    def __enter__(self) -> "CloudTools":
        self._before = {name: os.environ.get(name) for name in ("PATH", _HOME)}
        os.environ.update(
            {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", _HOME: str(self.folder)}
        )
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines():
            kill_machine(machine)
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self.cloud.close()

    def machines(self) -> list[str]:
        """Return the names of the machines that exist."""
        return sorted(path.stem for path in self.folder.glob("vm/*.json"))

    def calls(self) -> list[str]:
        """Return all commands so far, one line each."""
        file = self.folder / "calls.txt"
        return file.read_text().splitlines() if file.exists() else []

    def fail(self, *parts: str) -> None:
        """Make every command fail that contains one of these texts; none for no failures."""
        (self.folder / "fail.json").write_text(json.dumps(parts))

    def preempt(self, name: str, *, notice: bool = False) -> None:
        """Take a TPU VM back; with a notice systemd stops its units first."""
        if notice:
            command = [self.bin / "systemctl", "stop", f"tpukit-{name}"]
            subprocess.run(command, env=os.environ | {MARK: name}, check=True)
        kill_machine(name)
        shutil.rmtree(self.folder / "vm" / name, ignore_errors=True)
        record = self.folder / f"vm/{name}.json"
        if record.exists():  # a managed job of SkyPilot has none
            _write(record, _read(record) | {"state": "SUSPENDED"})


_PROGRAM = """import runpy, sys
sys.argv[1:] = ["{name}", *sys.argv[1:]]
runpy.run_path({file!r}, run_name="__main__")
"""


def _read(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {}


def _write(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps(value))
    new.replace(file)


def _options(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the options of a command."""
    plain = [word for word in words if not word.startswith("-")]
    given = (word.lstrip("-").partition("=") for word in words if word.startswith("-"))
    return plain, {name: value for name, _, value in given}


def main(tool: str, words: list[str]) -> int:
    """Act as one of the commands."""
    home = Path(os.environ[_HOME])
    line = shlex.join([tool, *words])
    with open(home / "calls.txt", "a") as calls:
        calls.write(line + "\n")
    if any(part in line for part in _read(home / "fail.json") or ()):
        print("client_loop: send disconnect: Broken pipe", file=sys.stderr)
        return 255
    return {
        "gcloud": _gcloud,
        "sky": _sky,
        "docker": _docker,
        "sudo": _sudo,
        "systemctl": _systemctl,
    }[tool](home, words)


def _sudo(home: Path, words: list[str]) -> int:
    command = words[1:] if words[0].startswith("-") else words
    os.execvp(command[0], command)


# Docker: a container is a process in its own session, which sees the variables of an image and
# those passed to it.


def _docker(home: Path, words: list[str]) -> int:
    count = 1
    while words[count].startswith("--"):
        count += 1
    _, options = _options(words[1:count])
    mark = {MARK: os.environ.get(MARK, "none")}
    if words[0] == "rm":
        kill_machine(f"{mark[MARK]}/{words[count]}")
        return 0
    container = f"{mark[MARK]}/{options['name']}"
    passed = [word.partition("=")[2] for word in words[1:count] if word.startswith("--env=")]
    variables = {name: os.environ[name] for name in passed}
    with open(home / "images.txt", "a") as images:
        images.write(words[count] + "\n")
    environ = image_environment() | variables | {MARK: container, _HOME: str(home)}
    command = words[count + 1 :]
    process = subprocess.Popen(command, env=environ, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # as --init: to one process
    code = process.wait()
    kill_machine(container)
    return code if code >= 0 else 128 - code


# gcloud: TPU VMs, and copies from and to the buckets.


def _gcloud(home: Path, words: list[str]) -> int:
    if words[:2] == ["storage", "cp"]:
        return _copy(home, words[2:])
    if words[:2] == ["storage", "ls"]:
        return 0 if _file(home, words[2]).exists() else 1
    if words[:3] == ["config", "get", "project"]:
        print("demo")
        return 0
    if words[:3] != ["compute", "tpus", "queued-resources"]:
        return 0
    (command, name), options = _options(words[3:])
    record = home / f"vm/{name}.json"
    if command == "create":
        return _create(home, name, options)
    if not record.exists():
        print(
            f"ERROR: (gcloud...{command}) NOT_FOUND: "
            f"Resource 'queuedResources/{name}' was not found",
            file=sys.stderr,
        )
        return 1
    if command == "describe":
        about = _read(record)
        node = {"node": {"labels": about["labels"]}}
        print(
            json.dumps(
                {"name": name, "state": {"state": about["state"]}, "tpu": {"nodeSpec": [node]}}
            )
        )
    elif command == "delete":
        record.unlink()
        shutil.rmtree(home / "vm" / name, ignore_errors=True)
        kill_machine(name)
    return 0


def _create(home: Path, name: str, options: dict[str, str]) -> int:
    if (home / f"vm/{name}.json").exists():
        print(f"ERROR: ALREADY_EXISTS: {name}", file=sys.stderr)
        return 1
    labels = dict([options["labels"].split("=")])
    _write(home / f"vm/{name}.json", {"state": "ACTIVE", "labels": labels, "options": options})
    disk = home / "vm" / name
    (disk / "units").mkdir(parents=True)
    script = Path(options["metadata-from-file"].partition("=")[2]).read_text()
    script = script.replace("/var/tpukit", f"{disk}/var").replace(
        "/run/systemd/system", f"{disk}/units"
    )
    (disk / "boot.sh").write_text(script)
    with open(disk / "boot.txt", "wb") as log:
        environ = os.environ | {MARK: name}
        subprocess.run(
            ["bash", disk / "boot.sh"],
            env=environ,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    return 0


def _file(home: Path, address: str) -> Path:
    return (
        home / "buckets" / address.removeprefix("gs://")
        if address.startswith("gs://")
        else Path(address)
    )


def _copy(home: Path, words: list[str]) -> int:
    places, options = _options(words)
    *sources, target = (_file(home, place) for place in places)
    for source in sources:
        if not source.exists():
            print(
                f"ERROR: (gcloud.storage.cp) The following URLs matched no objects: {source}",
                file=sys.stderr,
            )
            return 1
        into = target / source.name if places[-1].endswith("/") else target
        for file in (
            [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
        ):
            there = into / file.relative_to(source) if source.is_dir() else into
            if "no-clobber" in options and there.exists():
                continue
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, there)
    return 0


# systemd: one service, started by the boot script. It honours KillMode, Restart and ExecStopPost.


def _unit(home: Path) -> tuple[Path, dict[str, str]]:
    disk = home / "vm" / os.environ[MARK]
    (file,) = disk.glob("units/*.service")
    pairs = (
        line.partition("=")
        for line in file.read_text().splitlines()
        if "=" in line and line[0] != "#"
    )
    return disk, {name: value for name, _, value in pairs}


def _systemctl(home: Path, words: list[str]) -> int:
    if words[0] == "start":
        with open(home / "vm" / os.environ[MARK] / "journal.txt", "ab") as log:
            subprocess.Popen(
                [home / "bin/systemctl", "supervise"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
    elif words[0] == "supervise":
        _supervise(home)
    elif words[0] == "stop":
        disk, unit = _unit(home)
        (disk / "stopped").touch()
        main_process = int((disk / "pid").read_text())
        send = os.kill if unit.get("KillMode") == "mixed" else _kill_all
        send(main_process, signal.SIGTERM)
        end = time.monotonic() + float(unit["TimeoutStopSec"])
        while Path(f"/proc/{main_process}").exists() and time.monotonic() < end:
            time.sleep(0.1)
    return 0


def _kill_all(main_process: int, number: int) -> None:
    """Signal every process of the machine and of its containers, as KillMode=control-group does."""
    for process in processes_of(os.environ[MARK]):
        with contextlib.suppress(OSError):
            if b"supervise" not in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, number)


def _supervise(home: Path) -> None:
    disk, unit = _unit(home)
    while not (disk / "stopped").exists():
        process = subprocess.Popen(shlex.split(unit["ExecStart"]), start_new_session=True)
        (disk / "pid").write_text(str(process.pid))
        code = process.wait()
        subprocess.run(shlex.split(unit["ExecStopPost"]))
        if unit.get("Restart") != "always" and not (unit.get("Restart") == "on-failure" and code):
            break
        time.sleep(float(unit["RestartSec"]) / 30)


# SkyPilot: managed jobs, whose records are files. A bucket is mounted by mapping its path in the
# script.


def _sky(home: Path, words: list[str]) -> int:
    arguments, options = _options(words[1:])
    records = [_read(file) for file in sorted(home.glob("sky/*.json"))]
    if arguments[0] == "queue":
        print(json.dumps(records))
        return 0
    if arguments[0] == "supervise":
        _manage(home, arguments[1])
        return 0
    if arguments[0] == "launch":
        secrets = [word.partition("=")[2] for word in words if word.startswith("--secret=")]
        number = len(records) + 1
        shutil.copy(arguments[1], home / f"job-{number}.yaml")
        record = {
            "job_id": number,
            "job_name": options["name"],
            "status": "RUNNING",
            "secrets": secrets,
        }
        _write(home / f"sky/{number}.json", record)
        with open(home / f"sky-{number}.txt", "wb") as log:
            subprocess.Popen(
                [home / "bin/sky", "jobs", "supervise", str(number)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return 0
    (record,) = (one for one in records if one["job_name"] == options["name"])
    number = record["job_id"]
    if arguments[0] == "logs":
        print((home / f"sky-{number}.txt").read_text())
    elif arguments[0] == "cancel":
        _write(home / f"sky/{number}.json", record | {"status": "CANCELLING"})
        with contextlib.suppress(ProcessLookupError):  # it ended a moment ago; `_manage` sees that
            os.kill(int((home / f"sky-{number}.pid").read_text()), signal.SIGTERM)
    return 0


def _manage(home: Path, number: str) -> None:
    import yaml

    file = home / f"sky/{number}.json"
    task = yaml.safe_load((home / f"job-{number}.yaml").read_text())
    ((mount, bucket),) = task["file_mounts"].items()
    script = task["run"].replace(
        mount, str(home / "buckets" / bucket["source"].removeprefix("gs://"))
    )
    names = ("PATH", "HOME", _HOME, *_read(file)["secrets"])
    environ = (
        image_environment() | {name: os.environ[name] for name in names} | {MARK: f"sky-{number}"}
    )
    while True:
        process = subprocess.Popen(["bash", "-c", script], env=environ, start_new_session=True)
        (home / f"sky-{number}.pid").write_text(str(process.pid))
        code = process.wait()
        kill_machine(f"sky-{number}")
        record = _read(file)
        is_lost = code in (
            *task["resources"]["job_recovery"]["recover_on_exit_codes"],
            -signal.SIGKILL,
        )
        if record["status"] == "CANCELLING" or not is_lost:
            break
        _write(file, record | {"status": "RECOVERING"})
    ended = "FAILED" if code else "SUCCEEDED"
    _write(file, record | {"status": "CANCELLED" if record["status"] == "CANCELLING" else ended})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
