import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.machines import COLAB, on_machine
from helpers.machines import KAGGLE as EIGHT

from tpukit import check, launch
from tpukit.essentials.environment.platforms import Machine
from tpukit.essentials.environment.session import Changes, install_line, needed_changes, setup

ROOT = Path(__file__).parents[3]
LAPTOP = replace(EIGHT, platform="laptop", chips=0, generation=None, versions={"python": "3.11.7"})

# What Kaggle's TPU image sets, as one user's dump and its Dockerfile have it.
KAGGLE = {
    "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
    "ISTPUVM": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_PROCESS_ADDRESSES": "local",
    "CLOUD_TPU_TASK_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "PATH": "/usr/bin",
}


@pytest.mark.parametrize(
    ("environ", "machine", "changes", "reason"),
    [
        ({}, LAPTOP, {}, "nothing to do"),
        (
            {"TPU_PROCESS_ADDRESSES": "local"},
            EIGHT,
            {"TPU_PROCESS_ADDRESSES": None, "PJRT_DEVICE": "TPU"},
            "Kaggle",
        ),
        (
            {"TPU_PROCESS_ADDRESSES": ""},
            LAPTOP,
            {"TPU_PROCESS_ADDRESSES": None},
            "torch_xla keeps an empty one too",
        ),
        (
            {"CLOUD_TPU_TASK_ID": "0", "PJRT_DEVICE": "TPU"},
            EIGHT,
            {"CLOUD_TPU_TASK_ID": None},
            "metadata has the number",
        ),
        (
            {"CLOUD_TPU_TASK_ID": "3", "TPU_SKIP_MDS_QUERY": "1"},
            LAPTOP,
            {"CLOUD_TPU_TASK_ID": None, "TPU_WORKER_ID": "3"},
            "nothing else says which host this is",
        ),
        (
            {"CLOUD_TPU_TASK_ID": "0", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "2"},
            LAPTOP,
            {"CLOUD_TPU_TASK_ID": None},
            "something else says it",
        ),
        (
            {"XRT_TPU_CONFIG": "tpu_worker;0;10.0.0.2:8470", "XRT_WORKERS": ""},
            LAPTOP,
            {"XRT_TPU_CONFIG": None, "XRT_WORKERS": None},
            "dead",
        ),
        (
            {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.9"},
            LAPTOP,
            {"MEGASCALE_NUM_SLICES": None, "MEGASCALE_COORDINATOR_ADDRESS": None},
            "of a job that has ended",
        ),
        ({"PJRT_DEVICE": ""}, COLAB, {"PJRT_DEVICE": "TPU"}, "present but empty is not chosen"),
        ({"PJRT_DEVICE": "CPU"}, COLAB, {}, "somebody's choice: check names it"),
        ({"PJRT_DEVICE": "TPU"}, LAPTOP, {}, "a lie that check names"),
        (
            {"XLA_USE_BF16": "1", "COLAB_TPU_ADDR": "10.0.0.2:8470"},
            LAPTOP,
            {},
            "somebody may mean it: check names it",
        ),
        (
            {"TPU_VISIBLE_CHIPS": "0,1", "PJRT_DEVICE": "TPU"},
            EIGHT,
            {},
            "two notebooks may share the chips",
        ),
        ({"KAGGLE_XRT_TPU": "1", "PATH": "/usr/bin"}, LAPTOP, {}, "other names are none of ours"),
    ],
)
def test_only_what_stops_a_fork_or_is_dead_is_changed(environ, machine, changes, reason, capsys):
    after = dict(environ)
    made = setup(Machine(after), info=machine)
    assert {change.variable: change.after for change in made.changes} == changes, reason
    untouched = {name: value for name, value in environ.items() if name not in changes}
    assert after == untouched | {
        name: value for name, value in changes.items() if value is not None
    }
    assert all(change.why for change in made.changes)
    printed = capsys.readouterr().out
    assert all(name in printed for name in changes)


@pytest.mark.parametrize("torch", [None, "2.7.1"])
@pytest.mark.parametrize("machine", [COLAB, EIGHT, LAPTOP])
def test_setup_check_and_launch_report_the_same_of_no_torch_and_of_an_old_one(torch, machine):
    versions = {name: text for name, text in machine.versions.items() if name != "torch"}
    if torch:
        versions["torch"] = torch
    info = replace(machine, versions=versions)
    found = next(finding for finding in check(info=info).failures if finding.name == "versions")
    changes = setup(Machine({}), info=info)
    assert changes.title == f"not ready to launch: {found.fact}; {found.fix}"
    with on_machine(info), pytest.raises((ValueError, ModuleNotFoundError)) as caught:
        launch(lambda core: core.rank)
    assert (caught.value.fact, caught.value.fix) == (found.fact, found.fix)


def test_kaggles_image_for_cpus_is_named_with_its_fix_by_setup_and_check():
    versions = {"python": "3.12.12", "torch": "2.10.0+cpu", "tensorflow-cpu": "2.19.0"}
    info = replace(EIGHT, versions=versions)
    checked = check(Machine({}), info=info)
    found = {finding.name: finding for finding in checked.findings}
    fact = (
        "torch 2.10.0+cpu, no torch_xla: this is Kaggle's image for CPUs, in a session with 8 chips"
    )
    assert (found["versions"].state, found["versions"].fact) == ("failure", fact)
    # That image shows the chips on the bus, and has no nodes to open them.
    for name in ("versions", "TPU"):
        assert "delete docker_image from kernel-metadata.json" in found[name].fix
        assert "Factory reset" not in found[name].fix
    changes = setup(Machine({}), info=info)
    assert changes.title == f"not ready to launch: {fact}; {found['versions'].fix}"
    gpu = replace(info, versions=versions | {"torch": "2.10.0+cu128"})
    (versions,) = (row for row in check(Machine({}), info=gpu).findings if row.name == "versions")
    assert "Kaggle's image for GPUs" in versions.fact


def test_a_second_time_there_is_nothing_to_do(capsys):
    environ = dict(KAGGLE)
    assert len(setup(Machine(environ), info=EIGHT)) > 0
    once = dict(environ)
    assert len(setup(Machine(environ), info=EIGHT)) == 0
    assert environ == once
    assert capsys.readouterr().out.endswith("this session is ready: nothing had to be changed\n")


def test_what_was_set_and_what_was_removed_is_shown():
    made = Changes(needed_changes({"TPU_PROCESS_ADDRESSES": "local"}, EIGHT))
    assert "removed  TPU_PROCESS_ADDRESSES=local" in str(made)
    assert "set      PJRT_DEVICE=TPU" in str(made)
    assert repr(made) == "<Changes: 2>"  # a Python prompt has it printed already


@pytest.mark.skipif(not find_spec("torch_xla"), reason="torch_xla has no wheel for this system")
@pytest.mark.xla
def test_torch_xla_itself_gives_eight_workers_eight_addresses_only_after_prepare():
    program = f"""
import json, os
os.environ.update({KAGGLE!r}, PJRT_DEVICE="CPU")  # CPU: this machine has no chip for the import to look for
from torch_xla._internal import tpu
import tpukit.essentials.environment.session

def worker(rank):
    before = dict(os.environ)
    tpu.configure_topology(rank, 8)
    seen = os.environ["TPU_PROCESS_ADDRESSES"], os.environ["CLOUD_TPU_TASK_ID"]
    os.environ.clear(); os.environ.update(before)
    return seen

before = [worker(rank) for rank in range(8)]
tpukit.essentials.environment.session.setup()
print(json.dumps([before, [worker(rank) for rank in range(8)]]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before == [["local", "0"]] * 8
    assert {addresses for addresses, _ in after} == {
        ",".join(f"localhost:{port}" for port in range(8476, 8484))
    }
    assert [task for _, task in after] == [str(rank) for rank in range(8)]


def test_a_notebook_shows_the_changes_exactly_once_wherever_the_call_stands():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    sources = [
        "from os import environ; from tpukit import setup; environ['XRT_WORKERS'] = 'x'; setup()",
        "environ['XRT_WORKERS'] = 'x'; changes = setup(); before = 1",  # not the last expression
        "changes",  # later, and on purpose
        "setup()",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    ).execute()
    for cell in notebook.cells:
        assert [output.output_type for output in cell.outputs] == ["display_data"], cell.source
    shown = [cell.outputs[0]["data"] for cell in notebook.cells]
    assert all(
        "<table" in data["text/html"] and "XRT_WORKERS" in data["text/plain"] for data in shown[:3]
    )
    assert "nothing had to be changed" in shown[3]["text/html"]


@pytest.mark.parametrize(
    ("versions", "machine", "line"),
    [
        ({}, COLAB, ""),  # the images are complete
        ({}, EIGHT, ""),
        ({"torch_xla": None, "libtpu": None}, COLAB, "torch_xla==2.9.0 libtpu==0.0.21.1"),
        ({"torch_xla": None, "libtpu": None}, EIGHT, "torch_xla==2.8.0 libtpu==0.0.17"),
        ({"torch_xla": "2.8.1"}, EIGHT, ""),
        ({"libtpu": None}, EIGHT, "libtpu==0.0.17"),
        ({"libtpu": "0.0.30"}, COLAB, "libtpu==0.0.21.1"),
        ({"torch_xla": "2.9.0"}, EIGHT, "torch_xla==2.8.0"),
        ({"torch": "2.15.0"}, COLAB, ""),  # an image's torch is never replaced
        ({"torch": "2.15.0"}, EIGHT, ""),
        (
            {"torch": "2.15.0"},
            replace(COLAB, platform="TPU VM"),
            "torch==2.9.0 torchvision==0.24.0",
        ),
        (
            {"torch": None, "torch_xla": None, "libtpu": None},
            replace(COLAB, platform="TPU VM"),
            "torch==2.9.0 torchvision==0.24.0 torch_xla==2.9.0 libtpu==0.0.21.1",
        ),
        ({}, LAPTOP, "torch==2.9.0 torchvision==0.24.0 torch_xla==2.9.0"),
        ({"torch": "2.15.0"}, LAPTOP, ""),  # enough for a dry run
        ({"torch": "2.15.0", "torch_xla": "2.9.0"}, LAPTOP, "torch==2.9.0 torchvision==0.24.0"),
        ({}, replace(LAPTOP, system="Darwin arm64"), "torch torchvision"),  # no torch_xla wheel
        ({}, replace(LAPTOP, system="Linux aarch64"), "torch torchvision"),
        ({"python": "3.14.0"}, LAPTOP, "torch torchvision"),
        ({"torch": "2.9.0"}, replace(LAPTOP, system="Windows AMD64"), ""),
        # A torch that is too old for any launch
        ({"torch": "2.7.1"}, LAPTOP, "torch==2.9.0 torchvision==0.24.0"),
        ({"torch": "2.7.1"}, replace(LAPTOP, system="Darwin arm64"), "--upgrade torch torchvision"),
        ({"torch": "2.7.1"}, replace(LAPTOP, platform="Colab", system="Linux aarch64"), ""),
        ({"torch": "2.7.1"}, COLAB, ""),
    ],
)
def test_the_install_line_adds_what_belongs_to_the_torch_that_is_there(versions, machine, line):
    machine = replace(machine, versions=dict(machine.versions) | versions)
    assert install_line(machine) == (f"pip install {line}" if line else "")


@pytest.mark.parametrize(
    ("versions", "system", "line"),
    [
        ({"torch": "2.9.0"}, "Linux x86_64", "torch_xla==2.9.0"),
        ({"torch": "2.8.0+cpu"}, "Linux x86_64", "torch_xla==2.8.0"),
        ({"torch": "2.15.0"}, "Linux x86_64", "torch==2.9.0 torchvision==0.24.0 torch_xla==2.9.0"),
        ({"torch": "2.9.0"}, "Darwin arm64", ""),
    ],
)
def test_for_a_dry_run_of_graphs_torch_xla_is_added_where_there_is_no_chip(versions, system, line):
    versions = {"python": "3.12.3", "torch": None, "torch_xla": None, "libtpu": None} | versions
    machine = replace(LAPTOP, system=system, versions=versions)
    assert install_line(machine, for_graphs=True) == (f"pip install {line}" if line else "")


def test_torchtpu_is_kept_out_of_the_kernel_before_torch_is_imported():
    there = replace(
        EIGHT,
        platform="TPU VM",
        versions={"python": "3.12.1", "torch": "2.15.0", "torch_tpu": "0.2.0"},
    )
    environ = {"PJRT_DEVICE": "TPU"}
    (change,) = setup(Machine(environ), info=there).changes
    assert (change.variable, change.after) == ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert len(setup(Machine(environ), info=there)) == 0
    assert len(setup(Machine({"PJRT_DEVICE": "TPU"}), info=EIGHT)) == 0
