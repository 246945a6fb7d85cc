import gzip
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tpukit import WorkerError, launch
from tpukit.profiling.profiler import profile

ROOT = Path(__file__).parents[2]
XLA = pytest.mark.xla
REHEARSALS = ["cpu", pytest.param("xla:cpu", marks=XLA)]


def record(folder, *, backend, cores=1, steps=3, then=lambda step: None, progress="off", **options):
    """Profile some steps; return the files of every core."""

    def work(core):
        model = core.model(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train():
            with core.step():
                model(torch.ones(4, 3, device=core.device)).sum().backward()
                core.optimizer_step(optimizer)

        train()  # what compiles is not recorded
        with profile(core, folder, **options) as recording:
            for step in range(steps):
                train()
                then(step)
        train()
        return recording.files

    return launch(work, cores=cores, backend=backend, progress=progress).results


def events(files):
    (chrome,) = [file for file in files if file.name.endswith(".json.gz")]
    with gzip.open(chrome) as file:
        return json.load(file)["traceEvents"]


def names(files):
    return {event.get("name") for event in events(files)}


def test_on_a_cpu_the_trace_has_the_operations_and_the_steps(tmp_path):
    (files,) = record(tmp_path, backend="cpu")
    assert {
        "aten::addmm",
        "aten::mm",
        "Optimizer.step#SGD.step",
        "step 0",
        "step 1",
        "step 2",
    } <= names(files)


@XLA
def test_on_xla_the_trace_has_the_graphs_operations_and_the_steps_and_tensorboards_file(tmp_path):
    (files,) = record(tmp_path, backend="xla:cpu")
    assert {"dot", "SyncTensorsGraph", "PjRtComputationClient::ExecuteComputation"} <= names(files)
    numbers = [event["args"]["step_num"] for event in events(files) if event.get("name") == "step"]
    assert numbers[:3] == ["0", "1", "2"]
    (plane,) = [file for file in files if file.name.endswith(".xplane.pb")]
    assert b"SyncTensorsGraph" in plane.read_bytes()
    assert plane.parents[1].relative_to(tmp_path) == Path(
        "core-0/plugins/profile"
    )  # where TensorBoard looks


@pytest.mark.parametrize("backend", REHEARSALS)
def test_core_0_is_recorded_or_those_that_are_named_each_in_its_folder(backend, tmp_path):
    first, second = record(tmp_path / "a", backend=backend, cores=2)
    assert (bool(first), second) == (True, [])
    first, second = record(tmp_path / "b", backend=backend, cores=2, ranks=(0, 1))
    assert [
        {file.relative_to(tmp_path / "b").parts[0] for file in files} for files in (first, second)
    ] == [
        {"core-0"},
        {"core-1"},
    ]


@pytest.mark.parametrize("backend", REHEARSALS)
def test_it_says_where_the_files_are_and_how_to_open_them(backend, tmp_path, capfd):
    folder = tmp_path / "my trace"
    (files,) = record(folder, backend=backend, progress="text")
    said = capfd.readouterr().out
    assert "recorded 3 steps: open " in said
    assert "https://ui.perfetto.dev" in said
    assert all(str(file) in said for file in files if file.name.endswith(".json.gz"))
    command = shlex.join(["tensorboard", "--logdir", str(folder)])
    assert (command in said) == (backend == "xla:cpu")


@pytest.mark.parametrize("backend", REHEARSALS)
def test_an_error_in_the_block_is_reported_and_the_trace_is_written(backend, tmp_path):
    def fail(step):
        if step == 1:
            raise KeyError("in the block")

    with pytest.raises(WorkerError, match="raised KeyError: 'in the block'"):
        record(tmp_path, backend=backend, then=fail)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"step 0", "step"} & names(files)


@pytest.mark.parametrize("backend", REHEARSALS)
def test_a_second_recording_is_beside_the_first_or_in_its_place(backend, tmp_path):
    def work(core):
        found = []
        for _ in range(2):
            with profile(core, tmp_path) as recording, core.step():
                torch.ones(3, device=core.device).sum()
            found.append((sorted(tmp_path.rglob("*.json.gz")), recording.files))
        return found

    (first, files), (second, files_of_second) = launch(
        work, cores=1, backend=backend, progress="off"
    ).results[0]
    assert first
    assert set(first) <= set(second)
    assert files
    assert files_of_second


def test_one_inside_of_another_is_refused_and_the_outer_goes_on(tmp_path):
    def work(core):
        with profile(core, tmp_path) as outer:
            with (
                pytest.raises(RuntimeError, match=r"already being recorded.*\n  fix:   "),
                profile(core, tmp_path),
            ):
                pass
            with core.step():
                torch.ones(3).sum()
        return outer.files

    assert "step 0" in names(launch(work, cores=1, backend="cpu", progress="off").results[0])


@pytest.mark.parametrize("folder", ["/proc/trace", "/dev/null/trace"])
def test_a_folder_that_cannot_be_written_is_reported_before_the_block_runs(folder):
    def work(core):
        ran = []
        with (
            pytest.raises(OSError, match="cannot be written into") as raised,
            profile(core, folder),
        ):
            ran.append(True)
        return str(raised.value), ran

    message, ran = launch(work, cores=1, backend="cpu", progress="off").results[0]
    assert f"cannot be written into {folder}/core-0\n  found: " in message
    assert "\n  fix:   choose a folder of your own" in message
    assert not ran


@pytest.mark.parametrize("backend", REHEARSALS)
def test_a_folder_lost_meanwhile_is_reported_and_the_next_recording_works(backend, tmp_path):
    def lose(folder):
        shutil.rmtree(folder)
        folder.write_text("in its place")

    def work(core):
        with (
            pytest.raises(OSError, match="cannot be written into") as raised,
            profile(core, tmp_path / "a") as lost,
        ):
            lose(lost.folder)
        with profile(core, tmp_path / "b") as recording:
            pass
        return str(raised.value), recording.files

    message, files = launch(work, cores=1, backend=backend, progress="off").results[0]
    assert "directory" in message
    assert files


FULL = """
import sys, torch
from tpukit import launch
from tpukit.profiling.profiler import profile

def work(core):
    try:
        with profile(core, sys.argv[1]):
            for _ in range(500):
                with core.step():
                    torch.ones(3).add(torch.rand(3)).relu().sum()
    except OSError as error:
        return str(error)

print(launch(work, cores=1, backend="cpu", progress="off").results[0])
"""


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs Linux's unshare")
def test_a_disk_that_fills_up_is_reported(tmp_path):
    script = f'mount -t tmpfs -o size=16k tmpfs {tmp_path} && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("it takes the right to mount a file system")
    code = [sys.executable, "-c", FULL, tmp_path]
    done = subprocess.run([*inside, *code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "cannot be written into" in done.stdout
    assert "No space left on device" in done.stdout
    assert "fix:   choose a folder of your own, on a disk with free space" in done.stdout
