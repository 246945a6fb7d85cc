"""Every notebook, with small numbers: from top to bottom twice in one kernel, and once more after a restart.

Between the two times a long training of the notebook is interrupted, as with the stop button. The second time the
exercises are filled in with their folded answers, and their checks have to say so.
The second kernel finds the files of the first; a notebook that leaves none has nothing to find. Of BY_PROGRAMS
papermill runs the first kernel and nbconvert the second, as people do; the others are run from here, where no program
has to start, and after a restart by `make soak`: the walkthrough's is killed and run again in any case. They run in an
empty folder: tpukit is found where it is installed, and files go where they can be thrown away.
"""

import ast
import copy
import dataclasses
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas
import psutil
import pytest
import torch
from helpers.notebook_parameters import small
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS_A_CELL = 800
BY_PROGRAMS = "01_setup"

# What each notebook's parameters cell is given instead of its own values, so that a run takes seconds.
SMALL = {
    "00_quickstart": {"images_per_class": 12, "image_size": 32, "batch_size": 4, "epochs": 1},
    "01_setup": {"size": 64},
    "04_look_at_ct": {"studies": 8, "slices": 8, "image_size": 32},
    "02_every_core": {"epochs": 2},
    "05_resnet_on_slices": {
        "studies": 10,
        "slices": 8,
        "num_folds": 2,
        "image_size": 32,
        "batch_size": 8,
        "num_epochs": 2,
        "plain_epochs": 1,
    },
    "06_exams_and_submission": {
        "studies": 16,
        "slices": 6,
        "phantom_size": 64,
        "num_folds": 3,
        "image_size": 32,
        "batch_size": 8,
        "slice_epochs": 2,
        "exam_slices": 8,
        "exam_batch_size": 2,
        "exam_epochs": 2,
        "keep": "kept/exams",
    },
    "09_feed_the_chip": {
        "studies": 8,
        "slices": 8,
        "image_size": 64,
        "batch_size": 4,
        "rounds": 2,
        "seconds": 0.05,
    },
    "08_your_own_images": {
        "flowers": 12,
        "image_size": 32,
        "epochs": 1,
        "batch_size": 4,
    },
    "10_profile_a_step": {
        "image_size": 32,
        "train_images": 32,
        "valid_images": 8,
        "batch_size": 4,
        "steps": 2,
        "epochs": 1,
    },
    "12_lightning": {"epochs": 1},
    "11_why_is_it_slow": {
        "steps": 8,
        "batch_size": 32,
        "shape_steps": 8,
        "short_run": 8,
        "long_run": 12,
        "input_steps": 8,
        "input_batch": 16,
        "epochs": 2,
        "seeds": 1,
    },
    # The compiler is taken where it is already; what the notebook says without it is tested in test_preflight.py.
    "03_before_you_have_a_tpu": {
        "fetch": False,
        "other_chips": [],
        "image_size": 16,
        "channels": 8,
        "batch_size": 8,
        "compiles": 2,
    },
    "15_run_it_as_a_job": {
        "job_parameters": {
            "images_per_class": 12,
            "image_size": 32,
            "batch_size": 4,
            "epochs": 1,
        },
        "epochs": 4,
    },
    "13_text": {"texts": 300, "width": 16, "heads": 2, "layers": 1, "epochs": 1},
    "14_larger_than_a_chip": {
        "texts": 300,
        "vocab_size": 256,
        "width": 16,
        "heads": 2,
        "layers": 1,
        "length": 32,
        "epochs": 1,
        "fine_epochs": 1,
    },
    "07_your_own_ct_exams": {
        "studies": 20,
        "slices": 6,
        "phantom_size": 64,
        "num_folds": 3,
        "image_size": 32,
        "batch_size": 8,
        "slice_epochs": 1,
        "exam_slices": 6,
        "exam_batch_size": 2,
        "exam_epochs": 2,
    },
}

# The parameter that makes the first training of a notebook so long that it is interrupted for sure.
LONG = {
    "00_quickstart": "epochs",
    "02_every_core": "epochs",
    "05_resnet_on_slices": "num_epochs",
    "06_exams_and_submission": "slice_epochs",
    "07_your_own_ct_exams": "slice_epochs",
    "08_your_own_images": "epochs",
    "10_profile_a_step": "epochs",
    "11_why_is_it_slow": "steps",
    "12_lightning": "epochs",
    "13_text": "epochs",
    "14_larger_than_a_chip": "epochs",
}
TRAINING = r"^\S.*(tpukit\.launch\((train|work)|= measure\()"  # a line that is not in a function
PRESS_STOP = """
def press_stop():
    import _thread, contextlib, psutil, time
    kernel = psutil.Process()

    def forks():
        found = set()
        for child in kernel.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.cmdline() == kernel.cmdline():  # processes that read images have another
                    found.add(child)
        return found

    known = forks()
    seen = set()
    while not seen & forks():  # a program that is started is a fork for a moment
        seen = forks() - known
        time.sleep(1)
    _thread.interrupt_main()

import threading
threading.Thread(target=press_stop, daemon=True).start()
"""
# A run with other parameters in the same folder would be refused.
RUN_FOLDERS = ("run_path", "folder")

# What a notebook installs itself where it is missing; without a network its test is skipped.
NEEDS = {
    "06_exams_and_submission": "pydicom",
    "12_lightning": "lightning",
    "07_your_own_ct_exams": "pydicom",
}

PROBE = """
import contextlib, json, sys, psutil
xla = sys.modules.get("torch_xla")
children = []
for child in psutil.Process().children(recursive=True):
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since, as a job may
        children.append(" ".join(child.cmdline()))
print(json.dumps({
    # Python's own, one a kernel; and torch 2.8's, which the import of Lightning starts in the notebook that has it.
    "processes": [one for one in children if not ("resource_tracker" in one or "/_inductor/compile_worker/" in one)],
    "runtime": bool(xla and xla._XLAC._xla_runtime_is_initialized()),
}))
"""


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def twice(request, tmp_path_factory):
    """Run a notebook twice in one kernel; return its folder, the notebook, what was found after each time, and checks.

    The checks are what those of the exercises said, in two lists: before and after the answers were filled in.
    """
    if needed := NEEDS.get(request.param.stem):
        pytest.importorskip(needed, reason=f"the notebook needs {needed}: pip install {needed}")
    folder = tmp_path_factory.mktemp(request.param.stem)
    notebook = nbformat.read(request.param, as_version=4)
    small(notebook, SMALL.get(request.param.stem, {}))
    both = copy.deepcopy(notebook)
    once = [*both.cells, nbformat.v4.new_code_cell(PROBE)]
    again = [nbformat.from_dict({**copy.deepcopy(cell), "id": f"{cell.id}-again"}) for cell in once]
    fill_in_the_answers(again)
    both.cells = once + interrupted_training(notebook, request.param.stem) + again
    if request.param.stem == BY_PROGRAMS:
        nbformat.write(both, folder / "twice.ipynb")
        timeout = f"--execution-timeout={SECONDS_A_CELL}"
        run(
            [
                "papermill",
                "twice.ipynb",
                "ran.ipynb",
                "--kernel=python3",
                "--no-progress-bar",
                timeout,
            ],
            folder,
        )
        both = nbformat.read(folder / "ran.ipynb", as_version=4)
    else:
        execute(both, folder)
    first = both.cells[: len(notebook.cells)]
    nbformat.write(nbformat.from_dict({**notebook, "cells": first}), executed_copy(folder))
    probes = [
        json.loads(said(cell).splitlines()[-1]) for cell in both.cells if cell.source == PROBE
    ]
    checks = [said(cell) for cell in both.cells if "check" in cell.metadata.get("tags", [])]
    errors = [
        output.ename
        for cell in both.cells
        for output in cell.get("outputs", [])
        if "ename" in output
    ]
    halves = [checks[: len(checks) // 2], checks[len(checks) // 2 :]]
    return folder, notebook, probes, errors, halves


def interrupted_training(notebook, name):
    """Return the cells up to the first training, which is long and interrupted, and a probe after it."""
    if name not in LONG:
        return []
    long = copy.deepcopy(notebook)
    (parameters,) = [cell for cell in long.cells if "parameters" in cell.metadata.get("tags", [])]
    other = {
        folder: "interrupted" for folder in RUN_FOLDERS if f"\n{folder} = " in parameters.source
    }
    if "keep" in SMALL[name]:
        other["keep"] = "kept/interrupted"
    small(long, {**SMALL[name], **other, LONG[name]: 100_000})
    code = [cell for cell in long.cells if cell.cell_type == "code"]
    number = next(
        n for n, cell in enumerate(code) if re.search(TRAINING, cell.source, re.MULTILINE)
    )
    cells = code[: number + 1]
    for cell in cells:
        cell.id = f"{cell.id}-long"
    cells[-1].source = PRESS_STOP + cells[-1].source
    cells[-1].metadata["tags"] = ["raises-exception"]
    return [*cells, nbformat.v4.new_code_cell(PROBE)]


def executed_copy(folder):
    """Return the path of the notebook after its first run: beside its folder."""
    return folder.with_suffix(".ipynb")


def fill_in_the_answers(cells):
    """Put the folded answer, two cells on, into the cell of each exercise."""
    for place, cell in enumerate(cells):
        if "exercise" in cell.metadata.get("tags", []):
            (cell.source,) = re.findall(
                r"^```python\n(.*?)^```$", cells[place + 2].source, re.MULTILINE | re.DOTALL
            )


def run(command, folder):
    """Run a module of Python in a folder as a program; its status has to be 0."""
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=with_the_kit(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]


def with_the_kit():
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def execute(notebook, folder):
    client = NotebookClient(
        notebook,
        timeout=SECONDS_A_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": folder}},
    )
    client.execute(env=with_the_kit())


def said(cell):
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def test_every_notebook_has_small_numbers_for_its_test():
    assert {path.stem for path in NOTEBOOKS} == set(SMALL)


def test_it_runs_from_top_to_bottom_twice_in_one_kernel(twice):
    folder, _, probes, *_ = twice
    assert len(probes) == (3 if was_interrupted(folder) else 2)


def was_interrupted(folder):
    return any(folder.name.startswith(name) for name in LONG)


def test_its_training_is_interrupted_between_the_two(twice):
    folder, _, _, errors, _ = twice
    assert errors == ["LaunchInterrupted"] * was_interrupted(folder)


def test_every_notebook_that_trains_is_interrupted():
    training = {
        path.stem
        for path in NOTEBOOKS
        if re.search(r"^def (train|work)\w*\(core", source_of(path), re.MULTILINE)
    }
    # A preflight trains nothing, and notebook 15 kills a host itself.
    assert training - {"01_setup", "03_before_you_have_a_tpu", "15_run_it_as_a_job"} == set(LONG)


def source_of(path):
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def test_the_check_of_an_exercise_says_not_yet_before_the_folded_answer_and_right_after_it(twice):
    *_, (before, after) = twice
    assert before
    assert [text for text in before if not text.splitlines()[-1].startswith("not yet")] == []
    assert [text for text in after if not text.splitlines()[-1].startswith("right")] == []


def parameters_of(name):
    """Return the names and values of a notebook's parameters cell."""
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    (cell,) = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    values = {}
    exec(cell, {}, values)
    return values


def test_the_sizes_for_a_tpu_replace_parameters_that_there_are_by_values_of_their_kind():
    page = (ROOT / "docs" / "tpu_sizes.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for name, block in zip(["05_resnet_on_slices", "06_exams_and_submission"], blocks, strict=True):
        parameters = parameters_of(name)
        sizes = {}
        exec(block, {}, sizes)
        assert (sizes["image_size"], sizes["batch_size"]) == (256, 128)
        for key, value in sizes.items():
            assert parameters[key] is None or type(value) is type(parameters[key]), key


def names_of_the_large_model():
    """Return the names that notebook 14 defines for its presets, the network and the tokenizer."""
    name = "14_larger_than_a_chip"
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    defined = parameters_of(name) | {
        "dataclasses": dataclasses,
        "torch": torch,
        "nn": torch.nn,
        "math": math,
    }
    for start in ("@dataclasses.dataclass", "class Conv1D", "class GPT(", "def count_weights"):
        (source,) = [cell.source for cell in cells if cell.source.startswith(start)]
        exec(source, defined)
    (tokens,) = [
        cell.source for cell in cells if cell.source.startswith("class CharacterTokenizer")
    ]
    return defined, tokens


def test_the_large_preset_of_notebook_14_is_gpt2_xl(capsys):
    defined, _ = names_of_the_large_model()
    large = defined["PRESETS"]["large"]
    with torch.device("meta"):
        shapes = {
            name: tuple(one.shape) for name, one in defined["GPT"](large).state_dict().items()
        }
    assert shapes["transformer.wte.weight"] == (50_304, 1600)
    assert shapes["transformer.wpe.weight"] == (1024, 1600)
    assert shapes["transformer.h.47.attn.c_attn.weight"] == (1600, 4800)
    assert shapes["transformer.h.47.mlp.c_proj.weight"] == (6400, 1600)
    assert len([name for name in shapes if name.endswith("ln_1.weight")]) == 48
    # The published model has 1,557,611,200 weights; 47 rows of padding are added.
    assert defined["count_weights"](large) == 1_557_611_200 + 47 * 1600
    assert 12 * defined["count_weights"](large) > 16e9, "one chip could hold it"
    assert large.vocab_size % 8 == large.width % 8 == large.batch_size % 8 == 0


class TokenizerOfGPT2:
    """Has as many tokens as that of Hugging Face, which would be downloaded."""

    eos_token_id = 50_256

    @classmethod
    def from_pretrained(cls, name):
        assert name == "gpt2"
        return cls()

    def __len__(self):
        return 50_257

    def encode(self, text):
        return [13615, 262]

    def decode(self, tokens):
        return "Return the"


@pytest.mark.parametrize("vocab_size", [128, 50_257])
def test_a_vocabulary_that_is_too_small_for_the_tokenizer_is_refused(vocab_size, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=TokenizerOfGPT2))
    defined, tokens = names_of_the_large_model()
    config = dataclasses.replace(
        defined["PRESETS"]["small"], tokenizer="gpt2", vocab_size=vocab_size
    )
    if vocab_size < len(TokenizerOfGPT2()):
        with pytest.raises(AssertionError, match="set vocab_size to 50304 or more"):
            exec(tokens, defined | {"config": config})
    else:
        exec(tokens, defined | {"config": config})


@pytest.mark.parametrize("folds", [{"test_fold": 1}, {"test_fold": 5}, {"valid_fold": -1}])
def test_one_fold_for_the_choices_and_the_scores_is_refused_before_the_training(folds):
    name = "06_exams_and_submission"
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    (check,) = [cell.source for cell in cells if "two different folds" in cell.source]
    exec(check, parameters_of(name))
    with pytest.raises(AssertionError, match="two different folds"):
        exec(check, parameters_of(name) | folds)


def test_the_messages_that_the_page_on_forms_of_data_explains_are_those_of_tpukit():
    page = (ROOT / "docs" / "data_forms.md").read_text()
    _, table = page.split("| words of the message |")
    said_by_the_kit = "".join(
        node.value
        for path in (ROOT / "tpukit").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(messages) >= 10
    assert [message for message in messages if message not in said_by_the_kit] == []


def test_no_worker_process_is_left(twice):
    _, _, probes, *_ = twice
    assert [probe["processes"] for probe in probes] == [[]] * len(probes)


def test_the_kernel_never_started_the_xla_runtime(twice):
    _, _, probes, *_ = twice
    assert [probe["runtime"] for probe in probes] == [False] * len(probes)


@pytest.mark.parametrize(
    "twice",
    [
        pytest.param(path, marks=[pytest.mark.only_soak] * (path.stem != BY_PROGRAMS))
        for path in NOTEBOOKS
    ],
    ids=[path.stem for path in NOTEBOOKS],
    indirect=True,
)
def test_after_a_restart_it_runs_again(twice):
    folder, notebook, *_ = twice
    if folder.name.startswith(BY_PROGRAMS):
        nbformat.write(notebook, folder / "notebook.ipynb")
        timeout = f"--ExecutePreprocessor.timeout={SECONDS_A_CELL}"
        run(
            ["nbconvert", "--to=notebook", "--inplace", "--execute", timeout, "notebook.ipynb"],
            folder,
        )
    elif any(folder.iterdir()):
        execute(notebook, folder)


def test_it_becomes_a_page(twice):
    folder, *_ = twice
    page, _ = HTMLExporter().from_filename(executed_copy(folder))
    assert page.count("jp-CodeCell") >= 8
    assert '<div class="jp-RenderedText jp-OutputArea-output' in page
    if folder.name.startswith("06"):
        the_submission_of_its_own_test_exams_is_the_notebooks(folder)


def the_submission_of_its_own_test_exams_is_the_notebooks(folder):
    """Answer the notebook's test exams with what it left, as Kaggle would, and compare."""
    made = runpy.run_path(str(ROOT / "examples" / "kaggle_bundle.py"))["NETWORKS"]
    networks = folder / "networks"
    networks.mkdir()
    for name, source in made.items():
        shutil.copy(folder / SMALL["06_exams_and_submission"]["keep"] / source, networks / name)
    (data,) = (folder / "data" / "06-phantoms").iterdir()
    own = pandas.read_csv(folder / "runs/06/submission.csv", index_col="id")
    table = pandas.read_csv(data / "train.csv", dtype=str).iloc[:, :3]
    table[table.SOPInstanceUID.isin(own.index)].to_csv(folder / "test.csv", index=False)
    script = [
        ROOT / "examples" / "submission.py",
        "--table",
        "test.csv",
        "--images",
        data / "train",
    ]
    ended = subprocess.run(
        [sys.executable, *script, "--networks", networks, "--cores", "1"],
        cwd=folder,
        env=with_the_kit(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    other = pandas.read_csv(folder / "submission.csv", index_col="id")
    assert (own.label - other.label).abs().max() < 1e-5
    assert len(own) == len(other)


def test_a_walkthrough_whose_kernel_is_killed_half_way_finishes_when_it_is_run_again(tmp_path):
    def notebook():
        walkthrough = nbformat.read(ROOT / "notebooks" / "05_resnet_on_slices.ipynb", as_version=4)
        small(walkthrough, {**SMALL["05_resnet_on_slices"], "num_epochs": 4})
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
    code = [cell for cell in again.cells if cell.cell_type == "code"]
    (run,) = [said(cell) for cell in code if "tpukit.launch(train, network" in cell.source]
    assert "resumed from step-" in run
    assert "epoch 4:" in run
    assert "epoch 1:" not in run
    assert json.loads((tmp_path / "runs" / "metrics.json").read_text())["cores"] == 2
