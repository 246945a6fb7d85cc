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
from importlib import metadata
from pathlib import Path

import pytest
from cloud.bundles import CASES
from kernels import Kernel

import tpukit
from tpukit.cloud import job_start
from tpukit.cloud.bundle import make_bundle
from tpukit.cloud.folders import checkpoint_folder, model_folder, mounted

PATHS = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
TORCH = tuple(sorted(f"{name}=={metadata.version(name).partition('+')[0]}" for name in ("torch", "torch-xla")))
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
        env={**os.environ, "PYTHONPATH": "", **environ},  # the bundle brings the kit
        timeout=600,
    )


def test_a_function_of_a_file_brings_what_it_imports_from_beside_it_and_no_more(trainer):
    bundle = make_bundle(f"{trainer}:train")
    assert sorted(bundle.files) == ["__main__.py", "helpers/__init__.py", "helpers/data.py", "train.py"]
    assert (bundle.name, bundle.needs) == ("train", TORCH)
    assert bundle.tried == "imported in an interpreter of its own"
    told = json.loads(bundle.contents["tpukit.json"])
    assert (told["python"], tuple(told["needs"])) == ("{}.{}".format(*sys.version_info), TORCH)


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
    again = run(bundle, elsewhere, "[1]", AIP_CHECKPOINT_DIR=f"{saved}/", TPUKIT_JOB="")
    assert again.returncode == 0, again.stderr
    assert "core 0: {'epochs': 1, 'resumed': True}" in again.stdout
    assert not (elsewhere / "saved").exists()


SHOWS = "import os, sys, tpukit\nprint(sys.argv[1:], os.path.basename(__file__), tpukit.__file__)\n"


def test_checkpoints_are_one_jobs_and_are_gone_on_with_by_the_same_trainer_and_arguments_alone(tmp_path):
    write(tmp_path, first="print('first')\n", other="print('other')\n")
    first, other = (make_bundle(tmp_path / name) for name in ("first.py", "other.py"))
    place = {"AIP_CHECKPOINT_DIR": f"{tmp_path}/saved"}
    assert run(first, tmp_path, "1", **place, TPUKIT_JOB="a").stdout == "first\n"
    assert run(first, tmp_path, "1", **place, TPUKIT_JOB="a").stdout == "first\n", "started again"
    for bundle, argument, environ, words in (
        (first, "2", {"TPUKIT_JOB": "a"}, r"are of other arguments: \['1'\], and now \['2'\]; fix: "),
        (first, "2", {"TPUKIT_JOB": "b", "TPUKIT_CONTINUE": "1"}, "are of other arguments"),
        (other, "1", {"TPUKIT_JOB": "b", "TPUKIT_CONTINUE": "1"}, "are of other trainer"),
        (first, "1", {"TPUKIT_JOB": "b"}, "are of another job, a; fix: another name, or --continue"),
    ):
        done = run(bundle, tmp_path, argument, **place, **environ)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.search(words, done.stderr), done.stderr
    assert run(first, tmp_path, "1", **place, TPUKIT_JOB="b", TPUKIT_CONTINUE="1").stdout == "first\n"


def test_the_kit_travels_as_a_wheel_and_is_the_one_that_runs(tmp_path):
    write(tmp_path, script=SHOWS)
    bundle = make_bundle(tmp_path / "script.py")
    done = run(bundle, tmp_path, "a b", PYTHONPATH=PATHS)
    arguments, name, kit = re.fullmatch(r"(\[.*\]) (\S+) (\S+)\n", done.stdout).groups()
    assert (arguments, name) == ("['a b']", "script.py")
    assert "/job-" in kit, "not the one on the path"
    assert not Path(kit).exists(), "what was unpacked is removed"
    (wheel,) = (name for name in bundle.contents if name.endswith(".whl"))
    assert wheel == f"tpukit-{tpukit.__version__}-py3-none-any.whl"
    (tmp_path / wheel).write_bytes(bundle.contents[wheel])
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", tmp_path / "there"]
    done = subprocess.run([*install, tmp_path / wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (about,) = metadata.distributions(path=[str(tmp_path / "there")])
    assert about.version == tpukit.__version__
    assert any(re.match("torch>=.*linux", one) for one in about.requires), about.requires
    assert any(re.match("libtpu.*extra == .tpu", one) for one in about.requires), about.requires
    kit = tmp_path / "there" / "tpukit"
    assert {path.relative_to(kit) for path in kit.rglob("*.[ch]")} > {Path("standin/record.c")}


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
    assert bundle.contents.keys() == {"__main__.py", "tpukit.json", "script.py", "beside.py"}
    assert bundle.contents["__main__.py"] == Path(job_start.__file__).read_bytes()
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
    (package / "deep.py").write_text("X = 1\n")
    (package / "train.py").write_text("from . import deep\n\ndef learn(core):\n    return deep.X\n")
    with pytest.raises(ValueError, match="learn would not be the same in the job: learn is another\n  found: its code"):
        make_bundle(learn)


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
    assert f"NEEDS {TORCH}" in text
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
        ("book.ipynb:train", ValueError, "a function of a notebook is sent from its kernel"),
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def train(core:\n", "Python does not read .*train.py: .*\n  found: line 1: def train"),
        ("async def train(core):\n    pass\n", "train is an async def"),
        ("import sys\ndef train(core):\n    pass\nsys.exit(3)\n", "SystemExit: 3\n  found: train.py, line 4\n  fix: "),
        ("def train(core):\n    return nets.make()\n", "train uses nets, which nothing defines\n  fix: "),
        ("x = open('here.txt')\ndef train(core):\n    pass\n", "FileNotFoundError.*\n  found: train.py, line 1"),
        ("train = 3\n", "'int' object"),
        ("def train(core):\n    import os_of_mine\n", "imports os_of_mine, and no installed package"),
        (b"# coding: latin-9000\n", "is no text that Python reads"),
    ],
)
def test_a_file_that_would_fail_where_it_runs_is_refused_here(tmp_path, text, words):
    (tmp_path / "train.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((ValueError, TypeError, OSError), match=words):
        make_bundle(f"{tmp_path}/train.py:train")


@pytest.mark.parametrize(
    "text", [b"\xef\xbb\xbfprint('\xc3\xa9' == chr(233))\n", b"# coding: latin-1\nprint('\xe9' == chr(233))\n"]
)
def test_files_arrive_byte_for_byte(tmp_path, text):
    (tmp_path / "script.py").write_bytes(text)
    bundle = make_bundle(tmp_path / "script.py")
    assert bundle.contents["script.py"] == text
    assert "é" in bundle.files["script.py"]
    assert run(bundle, tmp_path).stdout == "True\n"


def test_what_a_trainer_reads_beside_itself_comes_with_it(tmp_path):
    inside = "from pathlib import Path\nWORDS = (Path(__file__).parent / 'words').glob('*.txt')\n"
    write(tmp_path, script="import pack\nprint(*[one.read_text() for one in pack.WORDS])\n", pack__words__none="")
    (tmp_path / "pack" / "__init__.py").write_text(inside)
    (tmp_path / "pack" / "words" / "a.txt").write_text("a word")
    (tmp_path / "classes.txt").write_text("nobody names it")
    bundle = make_bundle(tmp_path / "script.py")
    assert "pack/words/a.txt" in bundle.contents
    assert "classes.txt" not in bundle.contents
    assert run(bundle, tmp_path.parent).stdout == "a word\n"


def test_a_package_that_is_named_may_be_missing_here_and_that_is_said(tmp_path):
    (tmp_path / "train.py").write_text("import only_there\n\ndef train(core):\n    pass\n")
    bundle = make_bundle(f"{tmp_path}/train.py:train", needs={"only_there": "only-there==1.0"})
    assert "only-there==1.0" in bundle.needs
    assert bundle.tried == "not imported: only_there is not installed here"


def test_nothing_that_is_there_is_overwritten(tmp_path):
    write(tmp_path, script="print(1)\n")
    bundle = make_bundle(tmp_path / "script.py")
    assert bundle.save(tmp_path / "a.zip") == bundle.save(tmp_path / "a.zip")
    (tmp_path / "train.zip").write_bytes(b"the images of a competition")
    with pytest.raises(ValueError, match="train.zip is there already, and is not this bundle\n  fix: "):
        bundle.save(tmp_path / "train.zip")
    assert (tmp_path / "train.zip").read_bytes() == b"the images of a competition"


QUICK = [
    *("an alias", "an alias of what was defined again", "a builtin that the notebook shadows", "a name deleted since"),
    *("functions that use each other", "a set where set is shadowed", "infinity and its like", "two names of one list"),
    *("one list in another", "a pattern", "a dictionary of functions", "a default of another time", "eval"),
    *("a default that was changed", "a class body of another time", "a closure of another time", "a method set since"),
    *("a cell run again", "import a.b", "import a.b by another name of a", "an import that may fail"),
    *(
        "annotations of the future, and a class",
        "future, lru_cache and a default",
        "two lambdas in a line",
        "a closure",
    ),
    *("two decorators", "lru_cache", "a partial", "a function under an if", "a class with everything", "a dataclass"),
    *("a class that uses a function at once", "%%time", "%%time, an alias and a default", "%%writefile of the same"),
    *("a magic in it", "a form feed", "a module beside that has changed since", "a class's names", "os.environ"),
]
REFUSED = {
    *(
        "an alias of what was defined again",
        "a name deleted since",
        "a set where set is shadowed",
        "one list in another",
    ),
    *(
        "a default of another time",
        "a default that was changed",
        "a class body of another time",
        "a magic in it",
        "eval",
    ),
    *("a closure of another time", "a method set since", "a module beside that has changed since"),
}


def test_a_bundle_does_what_the_notebook_does_or_there_is_none():
    program = f"import json; from cloud.bundles import round_trip; print(json.dumps(round_trip({QUICK}, at_once=40)))"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), PATHS])
    environ = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=600)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    expected = {name: "refused" if name in REFUSED else "equal" for name in QUICK}
    assert {name: what for name, (what, _) in outcome.items()} == expected, outcome
    assert len(CASES) >= 150


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
