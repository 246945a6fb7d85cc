"""A notebook alone in an empty folder: the ways in which its first cell finds tpukit, and what it says without one.

Each runs in a Python that has every package of this one but tpukit, without the repository on its path, with a home
folder that does not exist, and with an index of packages that answers nobody.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tools.wheel import BESIDE

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {path.name.partition("_")[0]: path for path in (ROOT / "notebooks").glob("*.ipynb")}
HANGS = 600  # seconds
TELL = "\nprint('from', tpukit.__file__)"
LEARN = """
import torch, tpukit
def train(core):
    layer = core.model(torch.nn.Linear(2, 1))
    return core.mean(layer(torch.ones(1, 2)).sum())
if __name__ == "__main__":
    run = tpukit.launch(train, cores=2, backend="cpu")
    print("results", len(run.results), bool(run.results[0] == run.results[1]))
"""


def cell(number="01", *, kaggle="/kaggle/input", address=""):
    """Return the first cell of a notebook, with another folder of datasets, and as `make headers` writes an address."""
    source = json.loads(NOTEBOOKS[number].read_text())["cells"][1]["source"]
    line = next(line for line in source if line.startswith("kit = "))
    source[source.index(line)] = f'{line.rpartition(", ")[0]}, "{address}")\n'
    return "".join(source).replace("/kaggle/input", str(kaggle))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    made = subprocess.run(
        [sys.executable, ROOT / "tools/wheel.py", folder],
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    if (
        made.returncode
        and "No matching distribution found for setuptools" in made.stdout + made.stderr
    ):
        pytest.skip("building a wheel fetches setuptools, and there is no network")
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The packages of this Python but tpukit, as links."""
    folder = tmp_path_factory.mktemp("packages")
    for where in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(where).iterdir():
            if "tpukit" not in path.name and path.suffix != ".pth":
                (folder / path.name).symlink_to(path)
    return folder


class Bare:
    """A Python without tpukit, and an empty folder."""

    def __init__(self, folder, packages):
        self.folder = folder / "alone"
        self.folder.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        (site,) = (folder / "env").glob("lib/*/site-packages")
        (site / "packages.pth").write_text(f"{packages}\n")
        self.python = folder / "env" / "bin" / "python"
        left = {"PYTHONPATH", "TPUKIT_SOURCE", "VIRTUAL_ENV", "PIP_FIND_LINKS"}
        self.environ = {key: value for key, value in os.environ.items() if key not in left}
        nowhere = {
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_RETRIES": "0",
            "HOME": "/nonexistent",
        }
        self.environ |= {**nowhere, "IPYTHONDIR": str(folder / "ipython")}

    def run(self, *command, **environ):
        done = subprocess.run(
            [self.python, *command],
            cwd=self.folder,
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=HANGS,
        )
        return done.returncode, done.stdout

    def cells(self, *cells, **environ):
        """Return what the cells say, one after the other in one session; the last of it is where tpukit is."""
        code = "\n".join(f"get_ipython().run_cell({one!r}).raise_error()" for one in (*cells, TELL))
        status, said = self.run(
            "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code, **environ
        )
        assert status == 0, said
        return said, Path(said.strip().splitlines()[-1].removeprefix("from "))


@pytest.fixture
def bare(tmp_path, packages):
    return Bare(tmp_path, packages)


def clone(folder):
    """Make what git would bring: the package, and what notebooks read beside it."""
    shutil.copytree(
        ROOT / "tpukit", folder / "tpukit", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in BESIDE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def repository(tmp_path):
    folder = clone(tmp_path / "repository")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"],
    ):
        subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)
    return folder.as_uri()


def test_a_wheel_beside_it_is_installed_the_newest_of_several_twice_and_after_a_restart(
    bare, wheel
):
    shutil.copy(wheel, bare.folder)
    for older in ("0.0.9", "0.0.10"):
        (bare.folder / f"tpukit-{older}-py3-none-any.whl").write_text("no wheel at all")
    said, where = bare.cells(cell(), cell())
    assert said.count(f"tpukit: {bare.folder / wheel.name}\n") == 2
    assert where.is_relative_to(bare.python.parents[1]), "in the environment's own packages"
    assert bare.cells(cell())[1] == where


@pytest.mark.parametrize(
    "place", ["my-kit", "my-kit/wheels", "datasets/jane/my-kit", "datasets/jane/my-kit/wheels"]
)
def test_a_wheel_in_an_attached_dataset_is_found(place, bare, wheel, tmp_path):
    (tmp_path / "input" / place).mkdir(parents=True)
    shutil.copy(wheel, tmp_path / "input" / place)
    said, _ = bare.cells(cell(kaggle=tmp_path / "input"))
    assert f"tpukit: {tmp_path / 'input' / place / wheel.name}\n" in said


@pytest.mark.parametrize("place", ["around", "beside", "attached"])
def test_a_clone_around_it_beside_it_or_attached_is_taken_before_a_wheel(place, bare, tmp_path):
    (bare.folder / "tpukit-9.9.9-py3-none-any.whl").write_text("no wheel at all")
    home = {
        "around": tmp_path,
        "beside": bare.folder / "tpukit",
        "attached": tmp_path / "input/datasets/jane/kit",
    }[place]
    clone(home)
    said, where = bare.cells(cell(kaggle=tmp_path / "input"), cell(kaggle=tmp_path / "input"))
    assert where == home / "tpukit/__init__.py"
    assert f"tpukit: {home}\n" in said


@pytest.mark.parametrize(
    "form", ["a clone", "a wheel", "a wheel's URL", "a git URL", "pip's git URL"]
)
def test_tpukit_source_is_any_of_these(form, bare, wheel, repository, tmp_path):
    source = {
        "a clone": str(tmp_path / "repository"),
        "a wheel": str(wheel),
        "a wheel's URL": wheel.as_uri(),
        "a git URL": repository,
        "pip's git URL": f"git+{repository}",
    }[form]
    said, where = bare.cells(cell(), cell(), TPUKIT_SOURCE=source)
    assert f"tpukit: {source}\n" in said
    assert bare.cells(cell(), TPUKIT_SOURCE=source)[1] == where, "after a restart"
    if "git" in form:
        assert where == bare.folder / "tpukit/tpukit/__init__.py"


def test_the_address_that_make_headers_wrote_is_the_last_resort(bare, repository):
    said, where = bare.cells(cell(address=repository), cell(address=repository))
    assert where == bare.folder / "tpukit/tpukit/__init__.py"
    assert f"tpukit: {repository}\n" in said


@pytest.mark.parametrize("source", ["", "/nonexistent/kit", "file:///nonexistent/kit.git"])
def test_where_there_is_none_one_sentence_says_what_was_looked_for_and_the_one_thing_to_do(
    source, bare
):
    code = f"get_ipython().run_cell({cell()!r}).raise_error()"
    status, said = bare.run(
        "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code, TPUKIT_SOURCE=source
    )
    assert status != 0
    looked = f"nothing at {source}" if source else "no TPUKIT_SOURCE"
    assert (
        f"no tpukit: no clone or wheel of it in {bare.folder} or a dataset, {looked}. "
        f"Put tpukit-*.whl into {bare.folder} and run this cell again."
    ) in said
    assert "127.0.0.1" not in said, "no index was asked"


def test_without_array_record_and_without_internet_it_says_so_and_goes_on(bare, wheel):
    shutil.copy(wheel, bare.folder)
    said, _ = bare.cells("import sys; sys.modules['array_record'] = None", cell())
    assert "; no array_record, which packs need: no internet?\n" in said


@pytest.mark.parametrize(("number", "name"), [("07", "Scenes"), ("11", "VertexDouble")])
@pytest.mark.parametrize("way", ["a wheel", "a git URL"])
def test_what_a_notebook_reads_beside_the_kit_comes_with_it(
    number, name, way, bare, wheel, repository
):
    cells = ["".join(one["source"]) for one in json.loads(NOTEBOOKS[number].read_text())["cells"]]
    (reads,) = [text for text in cells if "sys.path += " in text]
    lines = reads[reads.index("kit = ") :].splitlines()
    taken = "\n".join(line for line in lines if line.startswith(("kit = ", "sys.path", "from ")))
    said, _ = bare.cells(
        cell(number),
        f"{taken}\n{name}",
        TPUKIT_SOURCE=str(wheel) if way == "a wheel" else repository,
    )
    assert "tpukit: " in said


def test_a_whole_notebook_runs_from_a_wheel_beside_it(bare, wheel, monkeypatch):
    shutil.copy(wheel, bare.folder)
    spec = bare.folder.parent / "jupyter/kernels/bare/kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [str(bare.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "bare", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(spec.parents[2]))
    notebook = nbformat.read(NOTEBOOKS["01"], as_version=4)
    client = NotebookClient(
        notebook, timeout=HANGS, kernel_name="bare", resources={"metadata": {"path": bare.folder}}
    )
    for name in ("PYTHONPATH", "TPUKIT_SOURCE"):
        monkeypatch.delenv(name, raising=False)
    client.execute(env=bare.environ)
    assert wheel.name in "".join(output.get("text", "") for output in notebook.cells[1].outputs)


def test_the_wheel_in_a_fresh_environment_checks_launches_and_has_what_it_compiles(bare, wheel):
    status, said = bare.run("-m", "pip", "install", "--no-deps", "--no-index", wheel)
    assert status == 0, said
    status, said = bare.run("-m", "tpukit", "check")
    assert status == 0, said
    assert "versions" in said
    assert "Traceback" not in said
    (bare.folder / "learn.py").write_text(LEARN)
    status, said = bare.run("learn.py")
    assert status == 0, said
    assert "results 2 True" in said
    code = (
        "from pathlib import Path; import tpukit.simulator as s; "
        "print(len([*Path(s.__file__).parent.glob('*.[ch]')]))"
    )
    there = len([*(ROOT / "tpukit/simulator").glob("*.[ch]")])
    assert bare.run("-c", code)[1].strip() == str(there)
