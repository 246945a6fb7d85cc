"""Every notebook, executed from top to bottom twice in one kernel, as a reader would, with small numbers.

It runs in an empty folder: it finds the kit where it is installed, and its files go where they can be thrown away.
"""

import json
import os
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from notebook_parameters import small

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS_A_CELL = 600

# What each notebook's parameters cell is given instead of its own values, so that a run takes seconds.
SMALL = {
    "01_setup": {"size": 64},
    "02_look_at_the_data": {"studies": 8, "slices": 8, "image_size": 32},
    "03_every_core": {"epochs": 2},
    "04_pulmonary_embolism": {
        "studies": 10,
        "slices": 8,
        "num_folds": 2,
        "image_size": 32,
        "batch_size": 8,
        "num_epochs": 2,
    },
    "05_feed_the_chip": {
        "studies": 8,
        "slices": 8,
        "image_size": 64,
        "batch_size": 4,
        "rounds": 2,
        "seconds": 0.05,
    },
    "06_your_own_data": {"flowers": 16, "epochs": 1, "batch_size": 8, "batch_sizes": [1, 4], "steps": 1},
    "07_how_much_faster": {
        "image_size": 32,
        "train_images": 16,
        "valid_images": 8,
        "batch_size": 4,
        "timed_steps": 1,
        "memory_batches": [2, 3],
        "epochs": 1,
    },
    "08_lightning_on_tpu": {"epochs": 1},
    "09_why_is_it_slow": {
        "steps": 8,
        "shape_steps": 8,
        "short_run": 8,
        "long_run": 12,
        "input_steps": 8,
        "input_batch": 16,
        "epochs": 2,
        "seeds": 1,
    },
    # The compiler is taken where it is already; what the notebook says without it is tested in test_preflight.py.
    "10_before_you_have_a_tpu": {
        "fetch": False,
        "other_chips": [],
        "image_size": 16,
        "channels": 8,
        "batch_size": 8,
        "compiles": 2,
    },
}

# What a notebook installs itself where it is missing; without a network its test is skipped.
NEEDS = {"08_lightning_on_tpu": "lightning"}

PROBE = """
import json, sys, psutil
xla = sys.modules.get("torch_xla")
children = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
print(json.dumps({
    # Python's own, one a kernel; and torch 2.8's, which the import of its compiler starts.
    "processes": [one for one in children if not ("resource_tracker" in one or "/_inductor/compile_worker/" in one)],
    "runtime": bool(xla and xla._XLAC._xla_runtime_is_initialized()),
}))
"""


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def probes(request, tmp_path_factory):
    """Execute a notebook twice in one kernel; return what was found in the kernel after each time."""
    if needed := NEEDS.get(request.param.stem):
        pytest.importorskip(needed, reason=f"the notebook needs {needed}: pip install 'tpukit[{needed}]'")
    notebook = nbformat.read(request.param, as_version=4)
    small(notebook, SMALL.get(request.param.stem, {}))
    once = [cell for cell in notebook.cells if cell.cell_type == "code"]
    again = [nbformat.v4.new_code_cell(cell.source, metadata=cell.metadata) for cell in once]
    after = [nbformat.v4.new_code_cell(PROBE), nbformat.v4.new_code_cell(PROBE)]
    notebook.cells = [*once, after[0], *again, after[1]]

    folder = tmp_path_factory.mktemp(request.param.stem)
    execute(notebook, folder)
    return [json.loads(said(cell).splitlines()[-1]) for cell in after]


def execute(notebook, folder):
    client = NotebookClient(
        notebook, timeout=SECONDS_A_CELL, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def said(cell):
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def test_every_notebook_has_small_numbers_for_its_test():
    assert {path.stem for path in NOTEBOOKS} == set(SMALL)


def test_it_runs_from_top_to_bottom_twice_in_one_kernel(probes):
    assert len(probes) == 2


def test_no_worker_process_is_left(probes):
    assert [probe["processes"] for probe in probes] == [[], []]


def test_the_kernel_never_started_the_xla_runtime(probes):
    assert [probe["runtime"] for probe in probes] == [False, False]


def test_a_walkthrough_whose_kernel_is_killed_half_way_finishes_when_it_is_run_again(tmp_path):
    def notebook():
        walkthrough = nbformat.read(ROOT / "notebooks" / "04_pulmonary_embolism.ipynb", as_version=4)
        small(walkthrough, {**SMALL["04_pulmonary_embolism"], "num_epochs": 4})
        return walkthrough

    def kill_after_two_epochs():
        while len(list((tmp_path / "runs" / "checkpoints").glob("step-*.pt"))) < 2:
            time.sleep(0.02)
        for child in psutil.Process().children():
            if "ipykernel" in " ".join(child.cmdline()):
                child.kill()

    killer = threading.Thread(target=kill_after_two_epochs)
    killer.start()
    with pytest.raises(DeadKernelError):
        execute(notebook(), tmp_path)
    killer.join()
    assert not (tmp_path / "runs" / "metrics.json").exists()

    again = notebook()
    execute(again, tmp_path)
    (run,) = [said(cell) for cell in again.cells if "tpukit.launch(work" in cell.source]
    assert "resumed from step-" in run
    assert "epoch 4:" in run
    assert "epoch 1:" not in run
    assert json.loads((tmp_path / "runs" / "metrics.json").read_text())["cores"] == 2
