"""A trainer as one file: what travels, what is refused, and that it runs elsewhere."""

import functools
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from kernels import Kernel

from tpukit.cloud.bundle import make_bundle
from tpukit.cloud.folders import checkpoint_folder, model_folder, mounted

PATHS = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
TRAINER = """
    import torch
    from helpers.data import Pairs
    from tpukit import fit

    def train(core, epochs):
        model = core.model(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = core.batches(Pairs(), batch_size=4, shuffle=True, drop_last=True)
        history = fit(core, model, optimizer, torch.nn.MSELoss(), batches, epochs=epochs, folder="saved")
        return {"epochs": len(history.epochs), "resumed": bool(history.resumed)}
"""
DATA = """
    import torch
    from helpers import SIZE

    class Pairs:
        def __len__(self):
            return SIZE

        def __getitem__(self, index):
            return torch.full((3,), float(index)), torch.ones(1)
"""


def write(folder, **files):
    for name, text in files.items():
        path = folder / (name.replace("__", "/").replace("//", "__") + ".py")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text))
    return folder


@pytest.fixture
def trainer(tmp_path):
    """A trainer in a file, with a package beside it."""
    write(tmp_path, train=TRAINER, helpers__data=DATA, other="raise SystemExit('not imported')")
    (tmp_path / "helpers" / "__init__.py").write_text("SIZE = 32\n")
    return tmp_path / "train.py"


def run(bundle, folder, *arguments, **environ):
    (folder / "trainer.zip").write_bytes(bundle.to_bytes())
    return subprocess.run(
        [sys.executable, folder / "trainer.zip", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PATHS, **environ},
        timeout=600,
    )


def test_a_function_of_a_file_brings_what_it_imports_from_beside_it_and_no_more(trainer):
    bundle = make_bundle(f"{trainer}:train")
    assert sorted(bundle.files) == ["__main__.py", "helpers/__init__.py", "helpers/data.py", "train.py"]
    assert (bundle.name, bundle.needs) == ("train", ("torch", "tpukit"))


def test_the_same_trainer_makes_the_same_bytes(trainer):
    assert make_bundle(f"{trainer}:train").to_bytes() == make_bundle(f"{trainer}:train").to_bytes()
    archive = zipfile.ZipFile(io.BytesIO(make_bundle(f"{trainer}:train").to_bytes()))
    assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_DEFLATED}
    names = archive.namelist()
    assert "__main__.py" in names


def test_a_bundle_trains_elsewhere_saves_in_the_jobs_folder_and_resumes_there(trainer, tmp_path_factory):
    elsewhere, saved = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("bucket") / "checkpoints"
    bundle = make_bundle(f"{trainer}:train")
    first = run(bundle, elsewhere, "[1]", AIP_CHECKPOINT_DIR=f"{saved}/")
    assert first.returncode == 0, first.stderr
    assert "core 0: {'epochs': 1, 'resumed': False}" in first.stdout
    assert list((saved / "saved").glob("*"))
    again = run(bundle, elsewhere, "[2]", AIP_CHECKPOINT_DIR=f"{saved}/")
    assert again.returncode == 0, again.stderr
    assert "core 0: {'epochs': 2, 'resumed': True}" in again.stdout
    assert not (elsewhere / "saved").exists()


def test_a_trainer_that_fails_fails_the_job_and_names_the_core(tmp_path):
    write(tmp_path, bad="def train(core):\n    raise KeyError('labels')\n")
    done = run(make_bundle(f"{tmp_path}/bad.py:train"), tmp_path)
    assert done.returncode == 1
    assert re.search(r"core \d of \d raised KeyError: 'labels'", done.stderr), done.stderr
    assert "KeyError: 'labels'" in done.stderr
    assert "bad.py" in done.stderr


def test_a_script_is_run_as_it_is_without_tpukit(tmp_path):
    write(tmp_path, script="import sys\nimport beside\nprint(sys.argv[1:], beside.HERE, 'tpukit' in sys.modules)\n")
    write(tmp_path, beside="HERE = 'beside'\n")
    bundle = make_bundle(tmp_path / "script.py")
    assert (bundle.launches, bundle.needs) == (False, ())
    done = run(bundle, tmp_path, "--steps", "3")
    assert done.stdout.split() == ["['--steps',", "'3']", "beside", "False"], done.stderr


def test_a_function_of_an_imported_module_brings_its_package(trainer, monkeypatch):
    package = trainer.parent / "packaged"
    write(trainer.parent, packaged__train="from . import deep\n\ndef learn(core):\n    pass\n", packaged__deep="")
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(trainer.parent)
    from packaged.train import learn

    files = make_bundle(learn).files
    assert sorted(files) == ["__main__.py", "packaged/__init__.py", "packaged/deep.py", "packaged/train.py"]
    assert 'run_trainer("packaged.train", "learn"' in files["__main__.py"]


CELLS = [
    """
    import math
    import beside
    import torch
    import torch.nn.functional as F
    from dataclasses import dataclass
    from torch import nn
    RATE = 0.5
    SIZES = {"in": 3, "out": (2, 1)}
    images = torch.ones(3)
    """,
    """
    @dataclass
    class Config:
        width: int = 2

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(SIZES["in"], 2)

        def forward(self, x):
            return halve(self.layer(x))
    """,
    """
    def halve(x):
        "Halves."
        return x * RATE if math.isfinite(RATE) else F.relu(x)

    def train(core, scale):
        images = torch.ones(4, 3) * scale  # a name of its own, although the notebook has one, too
        torch.manual_seed(0)
        return [Config().width, tuple(core.model(Net())(images).shape), halve(scale), images.mean().item()]

    def with_helper(core):
        return beside.HERE

    def careless(core):
        return images.sum()
    """,
    """
    import tpukit
    from tpukit.cloud.bundle import make_bundle
    bundle = make_bundle(train)
    open("trainer.zip", "wb").write(bundle.to_bytes())
    print(bundle.files["from_the_notebook.py"])
    print("NEEDS", bundle.needs)
    print("BESIDE", sorted(make_bundle(with_helper).files), sorted(bundle.files))
    try:
        make_bundle(careless)
    except TypeError as error:
        print(error)
    """,
]


def test_a_function_of_a_notebook_brings_what_it_uses_and_runs_elsewhere(tmp_path):
    write(tmp_path, beside="HERE = 1\n")
    kernel = Kernel(environ={"PYTHONPATH": PATHS})
    try:
        kernel.run(f"import os; os.chdir({str(tmp_path)!r})")
        for cell in CELLS:
            text = kernel.run(textwrap.dedent(cell))
            assert kernel.error is None, kernel.error
    finally:
        kernel.close()
    assert "NEEDS ('torch', 'tpukit')" in text
    both = "['__main__.py', 'beside.py', 'from_the_notebook.py'] ['__main__.py', 'from_the_notebook.py']"
    assert f"BESIDE {both}" in text
    assert "careless uses images, which cannot be sent with it" in text
    assert "images is a Tensor that another cell has made" in text
    assert "def careless" not in text
    done = subprocess.run(
        [sys.executable, "trainer.zip", "[3.0]"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PATHS},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "core 0: [2, (4, 2), 1.5, 3.0]" in done.stdout


@pytest.mark.parametrize(
    ("trainer", "error", "words"),
    [
        (lambda core: None, TypeError, "a lambda, a method"),
        (functools.partial(print, 1), TypeError, "a lambda, a method"),
        (print, TypeError, "a lambda, a method"),
        (7, TypeError, "got 7"),
        ("nowhere.py", FileNotFoundError, "no such file: nowhere.py"),
        ("nowhere.py:train", FileNotFoundError, "no such file: nowhere.py"),
        ("train", FileNotFoundError, '"train.py:train"'),
    ],
)
def test_what_cannot_be_sent_is_refused_with_what_can(trainer, error, words):
    with pytest.raises(error) as caught:
        make_bundle(trainer)
    assert words in str(caught.value)
    assert "fix:" in str(caught.value)


def test_a_file_without_that_function_is_refused_with_those_it_has(trainer):
    with pytest.raises(ValueError, match=r"defines no function learn\n  found: train\n  fix:   .*train.py:train"):
        make_bundle(f"{trainer}:learn")


def test_a_trainer_of_many_megabytes_is_refused(trainer):
    (trainer.parent / "helpers" / "table.py").write_text("X = '" + "x" * 11 * 2**20 + "'\n")
    with pytest.raises(ValueError, match=r"more than 10 MiB(.|\n)*helpers/table.py"):
        make_bundle(f"{trainer}:train")


def test_the_folders_of_a_job_are_the_mounted_buckets_and_elsewhere_what_was_given():
    environ = {"AIP_CHECKPOINT_DIR": "gs://b/run/checkpoints/", "AIP_MODEL_DIR": "gs://b/run/model/"}
    assert checkpoint_folder("runs/x", environ=environ) == Path("/gcs/b/run/checkpoints")
    assert model_folder("runs/x", environ=environ) == Path("/gcs/b/run/model")
    assert checkpoint_folder("runs/x", environ={}) == Path("runs/x")
    assert model_folder("runs/x", environ={"AIP_MODEL_DIR": ""}) == Path("runs/x")
    assert mounted("gs://b/data", mount=Path("/mnt")) == Path("/mnt/b/data")
    assert json.dumps(str(mounted("data"))) == '"data"'
