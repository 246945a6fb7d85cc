"""A type checker finds no error in the programs that the pages show, and knows what tpukit returns.

Editors (VS Code, Colab) underline what pyright finds. basedpyright is pyright with the Node.js that
it runs on, so this test needs no network.
"""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("basedpyright", reason="the package basedpyright is not installed")

ROOT = Path(__file__).parents[1]
# Names that a page has shown before, or leaves to the reader, are undefined in a block. Its `loss`
# after a loop is unbound for pyright if the loop has no batch. Pages use packages that are not
# installed here, such as transformers.
SETTINGS = {
    "typeCheckingMode": "standard",
    "reportUndefinedVariable": "none",
    "reportMissingImports": "none",
    "reportPossiblyUnbound": "none",
    "reportPossiblyUnboundVariable": "none",
    "pythonVersion": f"{sys.version_info.major}.{sys.version_info.minor}",
    "extraPaths": [str(ROOT)],
}
PREAMBLE = "import torch\nimport tpukit\ncore: tpukit.Core = tpukit.current_core()\n"

# What users write who annotate their programs; `assert_type` fails if tpukit's types are lost.
USER = """
    from typing import Any, assert_type

    import numpy
    import torch
    from torch import nn
    from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

    import tpukit
    from tpukit import Augment, Checkpoints, EarlyStopping, FitOptions

    packed = tpukit.PackedImages("pack")
    images = tpukit.cached_images(packed, size=64)
    train_part, valid_part = images.split(valid=0.25)
    train_set = Subset(images, train_part)
    first, second = random_split(packed, [0.5, 0.5])
    DataLoader(packed, 4)


    class Rows(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.zeros(3), 1


    class NoDataset:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(3), 1


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x):
            return self.head(x)


    def train(core: tpukit.Core, lr: float = 0.1):
        model = core.model(Net())
        assert_type(model, Net)
        core.model(torch.compile(Net()))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        loss = core.model(nn.CrossEntropyLoss())
        value = torch.zeros(())
        for inputs, targets in core.batches(train_set, batch_size=4, shuffle=True):
            with core.step():
                value = loss(model(inputs), targets)
                value.backward()
                core.optimizer_step(optimizer)
            core.log(loss=value, lr=numpy.float32(1))
        for batch in core.batches(Rows(), batch_size=2):
            batch["image"].float()
        for number in core.progress(range(3), "epochs"):
            print(number + 1)
        core.batches(ConcatDataset([images, packed]), batch_size=4)
        core.batches(first, batch_size=4, weights=numpy.ones(4), mask=True)
        core.batches(NoDataset(), batch_size=4)
        core.batches(TensorDataset(torch.zeros(4, 2)), batch_size=4, buckets=[64, 128])
        core.batches(torch.zeros(4, 3), batch_size=4)
        core.batches([1, 2, 3], batch_size=1)
        core.batches((number for number in range(9)), batch_size=1, steps=3)
        assert_type(core.all_reduce(torch.ones(2), "max"), torch.Tensor)
        assert_type(core.gather(torch.ones(2)), torch.Tensor)
        assert_type(core.rank, int)
        print(core.mean(value) + 1, core.mean({"a": 1.0})["a"], core.to_host({"a": value})["a"].numpy())
        valid = core.batches(Subset(images, valid_part), batch_size=4)
        history = tpukit.fit(
            core,
            model,
            optimizer,
            loss,
            core.batches(train_set, batch_size=4),
            valid,
            epochs=3,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
            metrics={"accuracy": lambda outputs, targets: 0.0},
            augment=Augment(flip=True),
            early_stopping=EarlyStopping(3),
            checkpoints=Checkpoints("run", keep_last=2),
            options=FitOptions(log_every=3),
        )
        print(history.epochs[-1]["train_loss"] + 1)
        found = tpukit.evaluate(core, model, lambda outputs, targets: outputs.mean(), valid)
        print(found.loss + 1, found.metrics["a"], found.targets.shape)
        core.save(model.state_dict(), "model.pt")
        return {"loss": core.mean(value), "classes": tpukit.predict(core, model, valid).argmax(1)}


    run = tpukit.launch(train, 0.1, cores=2, progress="off", limits=tpukit.Limits())
    assert_type(run.results, list[Any])
    print(run.results[0]["loss"].item(), run.seconds + 1)
    tpukit.show_history(run.results[0])
    tpukit.show_batch(torch.zeros(4, 3, 8, 8), torch.zeros(4))
"""


def blocks():
    """Yield (name, code) of each block of Python of the README and the pages, as a program."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        text = page.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            code = re.sub(r"(def \w+\(core)(?=[,)])", r"\1: tpukit.Core", match[1])
            has_left_out_arguments = re.search(r"\w\([^)]*\.\.\.", code)
            if not has_left_out_arguments:
                yield f"{page.stem}_{text[: match.start()].count(chr(10)) + 1}", PREAMBLE + code


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The errors of all programs, found in one run of the type checker."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "pyrightconfig.json").write_text(json.dumps(SETTINGS))
    (folder / "user.py").write_text(textwrap.dedent(USER))
    for name, code in blocks():
        (folder / f"{name}.py").write_text(code)
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", folder]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable], capture_output=True, text=True, timeout=600
    )
    found: dict[str, list[str]] = {path.stem: [] for path in folder.glob("*.py")}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        if one["severity"] == "error":
            line = one["range"]["start"]["line"] + 1
            found[Path(one["file"]).stem].append(f"line {line}: {one['message']}")
    return found


def test_a_users_program_has_no_error_in_an_editor(errors):
    assert errors["user"] == []


@pytest.mark.parametrize("name", [name for name, _ in blocks()])
def test_a_block_of_the_pages_has_no_error_in_an_editor(name, errors):
    assert errors[name] == []
