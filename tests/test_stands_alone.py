"""The essentials without the other subpackages: the public API and the command line, in an empty folder."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = """
import sys

import torch

import tpukit

tpukit.setup()
assert tpukit.check().ok
images, labels = torch.zeros(4, 3, 16, 16, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
tpukit.show_batch(images, labels, names=["no", "yes"])
dataset = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randn(64, 2))


def train(core):
    model = core.model(torch.nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in core.batches(dataset, batch_size=8, shuffle=True, drop_last=True):
        with core.step():
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            core.optimizer_step(optimizer)
    return {"loss": core.mean(loss), "weights": core.to_host(model.state_dict())}


for backend in BACKENDS:
    run = tpukit.launch(train, cores=2, backend=backend, progress="off")
    first, second = run.results
    assert len(run.results) == 2 and float(first["loss"]) > 0
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    print(backend, "trained")
for name in ("fit", "pe"):
    try:
        getattr(tpukit, name)
    except AttributeError as error:
        print(error)
print(sorted(name for name in sys.modules if name.startswith("tpukit.") and not name.startswith("tpukit.essentials")))
"""
ASKED = """
import sys
from dataclasses import replace

import tpukit
from tpukit.essentials.backends import runtimes

sys.path.append(FOLDER_OF_TESTS)
from helpers.machines import KAGGLE, on_machine

HOST, TORCH_TPU = KAGGLE, {{"torch": "2.11.0", "torch_tpu": "0.2.0"}}


def loop(core):
    return core.batches([1, 2], batch_size=1, buckets=(4, 8))


{call}
""".replace("FOLDER_OF_TESTS", repr(str(ROOT / "tests")))
# An editable install finds the subpackages that a copy lacks in the repository.
WITHOUT_THE_INSTALLED_COPY = """
import sys

sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in getattr(one, "__module__", "")]
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(
        ROOT / "tpukit/essentials", folder / "tpukit/essentials", ignore=lambda *_: ["__pycache__"]
    )
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / "tpukit" / name, folder / "tpukit")
    (folder / "sitecustomize.py").write_text(WITHOUT_THE_INSTALLED_COPY)
    return folder


def run(folder, *command):
    environ = {**os.environ, "PYTHONPATH": str(folder), "MPLBACKEND": "agg"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True
    )


def test_a_notebook_that_needs_no_more_than_the_essentials_runs(alone):
    backends = ["cpu", *["xla"] * bool(find_spec("torch_xla"))]
    (alone / "notebook.py").write_text(NOTEBOOK.replace("BACKENDS", str(backends)))
    done = run(alone, "notebook.py")
    assert done.returncode == 0, done.stderr
    *printed, fit, pe, others = done.stdout.splitlines()
    assert [line for line in printed if line.endswith("trained")] == [
        f"{backend} trained" for backend in backends
    ]
    assert (
        fit
        == "tpukit.fit needs the subpackage tpukit.training, which this copy of tpukit does not have"
    )
    assert pe == "tpukit.pe needs the subpackage tpukit.pe, which this copy of tpukit does not have"
    assert others == "[]"


def test_the_command_line_names_the_missing_subpackage_and_to_copy_it_helps(alone, tmp_path):
    folder = shutil.copytree(alone, tmp_path / "copied")
    assert "memory" in run(folder, "-m", "tpukit", "info").stdout
    assert "needs the subpackage tpukit.preflight" in run(folder, "-m", "tpukit", "--help").stdout
    missing = []
    while (printed := run(folder, "-m", "tpukit", "preflight", "--help")).returncode:
        fact, fix = printed.stderr.splitlines()
        needed = (
            r"preflight needs the subpackage tpukit\.(\w+), which this copy of tpukit does not have"
        )
        name = re.fullmatch(needed, fact)[1]
        copied = (
            f"copy the folder tpukit/{name} from a complete clone or wheel into this copy, "
            "next to tpukit/essentials"
        )
        assert fix == f"  fix:   {copied}"
        assert name not in missing
        missing.append(name)
        shutil.copytree(
            ROOT / "tpukit" / name, folder / "tpukit" / name, ignore=lambda *_: ["__pycache__"]
        )
    assert {"preflight", "simulator"} <= set(missing)
    assert printed.stdout.startswith("usage: python -m tpukit preflight")
    for arguments in (
        ["job", "train.py", "--on", "vertex"],
        ["health"],
    ):  # whatever else is asked of it
        assert "needs the subpackage tpukit.cloud" in run(alone, "-m", "tpukit", *arguments).stderr


def test_a_backend_of_a_missing_subpackage_is_named(alone):
    program = "import tpukit; tpukit.launch(print, backend='xla:simulator')"
    printed = run(alone, "-c", program).stderr
    needed = "the xla:simulator backend needs the subpackage tpukit.simulator"
    assert f"{needed}, which this copy of tpukit does not have" in printed


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (
            "tpukit.launch(print, backend='torch_tpu')",
            "the torch_tpu backend needs the subpackage tpukit.accelerators",
        ),
        (
            "with on_machine(HOST): tpukit.launch(print, shard='fsdp')",
            "launch(shard=...) needs the subpackage tpukit.accelerators",
        ),
        (
            "with on_machine(replace(HOST, versions=TORCH_TPU)): tpukit.launch(print)",
            "the torch_tpu backend needs the subpackage",
        ),
        (
            "tpukit.launch(loop, cores=1, backend='cpu')",
            "core.batches(buckets=...) needs the subpackage tpukit.training",
        ),
        (
            "runtimes()['xla'].open_compile_cache([], print)",
            "compile_cache needs the subpackage tpukit.accelerators",
        ),
        ("tpukit.Augment()", "tpukit.Augment needs the subpackage tpukit.training"),
    ],
)
def test_an_argument_names_the_subpackage_that_it_needs(alone, call, needed):
    done = run(alone, "-c", ASKED.format(call=call))
    printed = done.stdout + done.stderr
    assert needed in printed
    assert "which this copy of tpukit does not have" in printed


def test_a_subpackage_that_lacks_another_is_left_out(alone, tmp_path):
    folder = shutil.copytree(alone, tmp_path / "copied")
    shutil.copytree(
        ROOT / "tpukit/simulator", folder / "tpukit/simulator", ignore=lambda *_: ["__pycache__"]
    )
    program = (
        "import tpukit; print(tpukit.check().ok); tpukit.launch(print, backend='xla:simulator')"
    )
    done = run(folder, "-c", program)
    assert done.stdout == "True\n"
    assert (
        "the xla:simulator backend needs the subpackage tpukit.accelerators, which this copy"
        in done.stderr
    )
