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

import tpukit
from notebooks import headers
from tools.wheel import BESIDE

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {path.name.partition("_")[0]: path for path in (ROOT / "notebooks").glob("*.ipynb")}
HANGS = 600  # seconds
HUB = "github.com"  # apart from the name: no address that somebody made up stands in the repository
VERSION = tpukit.__version__
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


def cell(number="01", *, dataset="", address=""):
    """Return the install cell of a notebook, with a Kaggle dataset, and as `make headers` writes an address."""
    source = "".join(json.loads(NOTEBOOKS[number].read_text())["cells"][1]["source"])
    if address:
        source = headers.install_cell("jane/kit").replace(f"https://{HUB}/jane/kit", address)
    return source.replace('KAGGLE_DATASET = ""', f'KAGGLE_DATASET = "{dataset}"')


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
        left = {"PYTHONPATH", "VIRTUAL_ENV", "PIP_FIND_LINKS"}
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

    def ipython(self, *cells, **environ):
        """Run cells one after the other in one session, until one fails; return its status and output."""
        code = "\n".join(f"get_ipython().run_cell({text!r}).raise_error()" for text in cells)
        ipython = ("-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code)
        return self.run(*ipython, **environ)

    def cells(self, *cells, **environ):
        """Return what the cells say, one after the other in one session; the last of it is where tpukit is."""
        status, said = self.ipython(*cells, TELL, **environ)
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
    for name in (*BESIDE, "notebooks/first_cell.txt"):
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


def test_a_wheel_beside_it_is_installed_twice_and_after_a_restart(bare, wheel):
    shutil.copy(wheel, bare.folder)
    for older in ("0.0.9", "0.0.10"):
        (bare.folder / f"tpukit-{older}-py3-none-any.whl").write_text("no wheel at all")
    said, where = bare.cells(cell(), cell())
    assert said.count(f"tpukit {VERSION} from {bare.python.parents[1]}") == 2
    assert where.is_relative_to(bare.python.parents[1]), "in the environment's own packages"
    assert bare.cells(cell())[1] == where


def test_a_wheel_in_the_named_dataset_is_installed(bare, wheel, tmp_path):
    dataset = tmp_path / "input/my-tpukit"
    dataset.mkdir(parents=True)
    shutil.copy(wheel, dataset)
    said, _ = bare.cells(cell(dataset=dataset))
    assert f"tpukit {VERSION} from {bare.python.parents[1]}" in said


@pytest.mark.parametrize("place", ["around", "beside"])
def test_a_clone_around_it_or_beside_it_is_taken_before_a_wheel(place, bare, tmp_path):
    if place == "around":
        home = tmp_path / "my-clone"
        clone(home)
        bare.folder = home / "notebooks"
    else:
        home = clone(bare.folder / "tpukit")
    (bare.folder / "tpukit-9.9.9-py3-none-any.whl").write_text("no wheel at all")
    said, where = bare.cells(cell(), cell())
    assert where == home / "tpukit/__init__.py"
    assert said.count(f"tpukit {VERSION} from {home}\n") == 2


def stranger(folder):
    """Make a package tpukit that must not be imported."""
    (folder / "tpukit").mkdir(parents=True)
    (folder / "tpukit/__init__.py").write_text("print('THE CODE OF A STRANGER')")


def test_no_folder_above_and_no_other_dataset_is_searched(bare, wheel, tmp_path):
    shutil.copy(wheel, bare.folder)
    stranger(bare.folder.parent)
    stranger(bare.folder / "input/images")
    stranger(bare.folder.parent / "notebooks")
    said, where = bare.cells(cell(dataset=bare.folder))
    assert "STRANGER" not in said
    assert where.is_relative_to(bare.python.parents[1])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no mode of a folder")
@pytest.mark.parametrize("place", ["the notebook's folder", "the clone"])
def test_a_folder_that_others_can_write_to_is_refused_with_its_name(place, bare, wheel, tmp_path):
    shared = bare.folder
    if place == "the clone":
        shared = tmp_path / "shared"
        clone(shared)
        stranger(shared / "elsewhere")
        bare.folder = shared / "notebooks"
    else:
        shutil.copy(wheel, shared)
    shared.chmod(0o1777)  # as /tmp has it
    status, said = bare.ipython(cell())
    assert status != 0
    assert f"other users can write to {shared}: move the notebook to a folder of your own" in said
    assert "tpukit 0" not in said


def test_a_wheel_newer_than_the_loaded_version_stops_with_restart_the_runtime(bare, wheel):
    shutil.copy(wheel, bare.folder)
    newer = bare.folder / "tpukit-9.9.0-py3-none-any.whl"
    code = f"from pathlib import Path; Path({str(newer)!r}).write_text('another one')"
    status, said = bare.ipython(cell(), code, cell())
    assert status != 0
    assert f"has loaded tpukit {VERSION}, and {newer.name} is newer" in said
    assert "restart the runtime: " in said


def test_the_address_that_make_headers_wrote_is_the_last_resort(bare, repository):
    said, where = bare.cells(cell(address=repository), cell(address=repository))
    home = bare.folder / "tpukit-clone"
    assert where == home / "tpukit/__init__.py"
    assert said.count(f"tpukit {VERSION} from {home}\n") == 2
    assert "ERROR" not in said


def test_the_clone_is_found_although_the_shell_imports_something_meanwhile(bare, repository):
    # Python remembers a folder of sys.path that is not there at the next import. A kernel's first
    # shell command imports pexpect.
    source = cell(address=repository)
    shell = "from IPython.core.interactiveshell import InteractiveShell as Shell"
    code = f"{shell}; Shell.instance().run_cell({source!r}).raise_error()"
    status, said = bare.run("-c", code)
    assert status == 0, said
    assert f"tpukit {VERSION} from {bare.folder / 'tpukit-clone'}\n" in said


def test_a_wheel_is_taken_before_the_address(bare, wheel, repository):
    shutil.copy(wheel, bare.folder)
    _, where = bare.cells(cell(address=repository))
    assert where.is_relative_to(bare.python.parents[1])


def test_without_any_the_error_says_where_a_wheel_comes_from(bare):
    status, said = bare.ipython(cell())
    assert status != 0
    assert "ModuleNotFoundError" in said
    assert "Put the file tpukit-*.whl, which `make wheel` builds in a clone, beside" in said
    assert "127.0.0.1" not in said, "no index was asked"


def test_without_array_record_and_without_internet_it_says_so_and_goes_on(bare, wheel):
    shutil.copy(wheel, bare.folder)
    said, _ = bare.cells("import sys; sys.modules['array_record'] = None", cell())
    assert "; without array_record and simplejpeg, which `pack` needs\n" in said


@pytest.mark.parametrize(
    ("number", "name"),
    [("07", "export_phantoms"), ("08", "draw_flowers")],
)
@pytest.mark.parametrize("way", ["a wheel", "a git URL"])
def test_what_a_notebook_reads_beside_tpukit_comes_with_it(
    number, name, way, bare, wheel, repository
):
    cells = ["".join(one["source"]) for one in json.loads(NOTEBOOKS[number].read_text())["cells"]]
    (reads,) = [text for text in cells if "sys.path += " in text]
    lines = reads[reads.index("root = ") :].splitlines()
    taken = "\n".join(line for line in lines if line.startswith(("root = ", "sys.path", "from ")))
    address = ""
    if way == "a wheel":
        shutil.copy(wheel, bare.folder)
    else:
        address = repository
    said, _ = bare.cells(cell(number, address=address), f"import pathlib\n{taken}\n{name}")
    assert f"tpukit {VERSION} from " in said


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
    monkeypatch.delenv("PYTHONPATH", raising=False)
    client.execute(env=bare.environ)
    printed = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert f"tpukit {VERSION} from {bare.python.parents[1]}" in printed


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
