"""Work in fresh processes: one bar, failures raised as if they had happened here, and nothing is left behind."""

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tpukit.datasets.processes import run_in_processes

KIT = Path(__file__).parents[2]

TASKS = """
import os, pathlib, signal, sys, time

def write(job):
    pathlib.Path(job["file"]).write_text(f"{job['text']} {os.environ['OMP_NUM_THREADS']} {'torch' in sys.modules}")

def refuse(job):
    raise ValueError("the number is 7\\n  fix:   take 8")

def miss(job):
    open("/nowhere/at all")

def own(job):
    class Special(FileExistsError):
        pass
    raise Special(17, "a kind of its own")

def stumble(job):
    print("said before")
    {}["key"]

def misread(job):
    b"\\xff".decode()

def leave(job):
    sys.exit(3)

without_a_name = lambda job: None

def die(job):
    os.kill(os.getpid(), signal.SIGKILL)

def wait(job):
    pathlib.Path(job).write_text(str(os.getpid()))
    time.sleep(900)

def one_fails(job):
    if job is None:
        while True:
            time.sleep(0.1)
    raise OSError(28, "No space left on device")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tpukit.datasets.processes.subprocess", subprocess
    )  # fresh ones, see tests/helpers/forks.py
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    tasks = importlib.import_module("tasks")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def call(task, jobs, **options):
        usual = {
            "label": "try",
            "total": len(jobs),
            "done": lambda: 0,
            "folder": tmp_path,
            "progress": "off",
        }
        run_in_processes(getattr(tasks, task), jobs, environ=environ, **usual | options)

    return call


def test_every_job_is_done_in_a_fresh_process_with_one_thread(run, tmp_path, capsys):
    jobs = [{"file": str(tmp_path / f"{n}.txt"), "text": "é" * 100_000 * n} for n in range(3)]
    run("write", jobs, done=lambda: len(list(tmp_path.glob("*.txt"))), progress="text")
    for n, job in enumerate(jobs):
        assert Path(job["file"]).read_text() == f"{'é' * 100_000 * n} 1 False"
    assert list(tmp_path.glob("*.log")) == []
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("try  3/3")


FAILURES = {
    "refuse": (ValueError, r"^the number is 7\n  fix:   take 8$"),
    "miss": (FileNotFoundError, r"No such file or directory: '/nowhere/at all'"),
    "own": (FileExistsError, "a kind of its own"),
    "misread": (UnicodeError, "'utf-8' codec can't decode byte 0xff in position 0"),
    "stumble": (
        RuntimeError,
        r"a process of 'try' ended with status 1\n(.|\n)*said before(.|\n)*KeyError: 'key'",
    ),
    "leave": (RuntimeError, "a process of 'try' ended with status 3"),
    "die": (RuntimeError, "a process of 'try' ended with status -9"),
    "without_a_name": (RuntimeError, "has no attribute '<lambda>'"),
}


@pytest.mark.parametrize("task", FAILURES)
def test_a_failure_is_told_as_what_it_was(run, task):
    kind, text = FAILURES[task]
    with pytest.raises(kind, match=text) as raised:
        run(task, [1, 2])
    assert type(raised.value) is kind
    if kind is not RuntimeError:
        assert "Traceback" in str(raised.value.__cause__)  # where in the process it was


def test_when_one_fails_all_are_ended_and_the_number_of_the_error_is_kept(run):
    with pytest.raises(OSError, match="No space left") as raised:
        run("one_fails", [None, "x", None])
    assert raised.value.errno == 28


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(run, tmp_path, how):
    psutil = pytest.importorskip("psutil")
    code = f"""
        from tpukit.datasets.processes import run_in_processes
        jobs = [{str(tmp_path / "a.pid")!r}, {str(tmp_path / "b.pid")!r}]
        import tasks
        run_in_processes(tasks.wait, jobs, label="wait", total=2, done=lambda: 0, folder={str(tmp_path)!r})
    """
    call = [sys.executable, "-c", textwrap.dedent(code)]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    parent = subprocess.Popen(call, cwd=KIT, env=environ, stderr=subprocess.PIPE, text=True)
    files = [tmp_path / "a.pid", tmp_path / "b.pid"]
    while not all(file.exists() and file.read_text() for file in files):
        assert parent.poll() is None
        time.sleep(0.02)
    children = [psutil.Process(int(file.read_text())) for file in files]
    parent.send_signal(how)
    error = parent.communicate(timeout=600)[1]
    assert psutil.wait_procs(children, timeout=600)[1] == []
    assert ("KeyboardInterrupt" in error) == (how == signal.SIGINT)


PLUGIN = """
import pathlib
from PIL import Image, ImageFile

class Raw8(ImageFile.ImageFile):
    format = "RAW8"

    def _open(self):
        if self.fp.read(4) != b"RAW8":
            raise SyntaxError("no RAW8")
        self._size, self._mode = tuple(self.fp.read(2)), "RGB"
        self.tile = [ImageFile._Tile("raw", (0, 0, *self._size), 6, ("RGB", 0, 1))]

def starts(start):
    return start[:4] == b"RAW8"

def register():
    Image.register_open("RAW8", Raw8, starts)
    Image.register_extension("RAW8", ".raw8")

def opens(job):
    with Image.open(job["image"]) as image:
        pathlib.Path(job["file"]).write_text(f"{image.format} {image.size}")
"""


@pytest.fixture
def raw8(tmp_path, monkeypatch):
    """A plugin of Pillow in a folder of `sys.path`, as a package of a notebook without internet."""
    from PIL import Image

    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "raw8_plugin.py").write_text(PLUGIN)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    Image.init()  # first, because it registers Pillow's own plugins once only
    for registry in ("OPEN", "EXTENSION"):
        monkeypatch.setattr(Image, registry, dict(getattr(Image, registry)))
    monkeypatch.setattr(Image, "ID", list(Image.ID))
    import raw8_plugin

    yield raw8_plugin
    del sys.modules["raw8_plugin"]


def fill_with_raw8(folder):
    for kind in ("cat", "dog"):
        (folder / kind).mkdir(parents=True)
        (folder / kind / "0.raw8").write_bytes(b"RAW8" + bytes([4, 4]) + kind[:1].encode() * 48)
    return folder


def test_a_process_has_the_path_and_the_plugins_of_this_one(tmp_path, monkeypatch, raw8):
    monkeypatch.setattr("tpukit.datasets.processes.subprocess", subprocess)
    image = fill_with_raw8(tmp_path / "in") / "cat" / "0.raw8"
    raw8.register()
    job = {"image": str(image), "file": str(tmp_path / "seen")}
    run_in_processes(
        raw8.opens,
        [job],
        label="open",
        total=1,
        done=lambda: 0,
        folder=tmp_path,
        progress="off",
    )
    assert (tmp_path / "seen").read_text() == "RAW8 (4, 4)"


def test_a_folder_is_packed_by_a_plugin_that_is_registered_after_the_first_look(
    tmp_path, monkeypatch, raw8
):
    pytest.importorskip("array_record")
    from tpukit.datasets import pack

    monkeypatch.setattr("tpukit.datasets.processes.subprocess", subprocess)
    folder = fill_with_raw8(tmp_path / "in")
    with pytest.raises(ValueError, match="holds no image that pack can read"):
        pack(folder, tmp_path / "pack", progress="off")
    raw8.register()
    packed = pack(folder, tmp_path / "pack", progress="off")
    assert packed.take([0, 1]).shape == (2, 4, 4, 3)


def test_a_plugin_of_the_notebook_itself_is_refused_until_it_is_in_a_module(tmp_path, raw8):
    from PIL import Image

    from tpukit.datasets.pack_sources import describe_source

    class Raw8(raw8.Raw8):
        """A class that no other process can import."""

    raw8.register()
    Image.register_open("RAW8", Raw8, raw8.starts)
    folder = fill_with_raw8(tmp_path / "in")
    with pytest.raises(ValueError, match=r"cat/0\.raw8 needs a plugin(.|\n)*fix:.*%%writefile"):
        describe_source(folder)
    data = (folder / "cat" / "0.raw8").read_bytes()
    with pytest.raises(ValueError, match=r"the first item needs a plugin"):
        describe_source([(data, 0)])
    Image.register_open("RAW8", raw8.Raw8, raw8.starts)  # as the fix says
    assert describe_source(folder).count == 2
    assert describe_source([(data, 0)]).count == 1
