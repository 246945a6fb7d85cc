"""What several tests of jobs need: one environment for jobs that need no fresh one, and notebooks."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import nbformat
import pytest

BIN = str(Path(sys.executable).parent)  # uv is there; on another machine run.sh installs it


@pytest.fixture(scope="session")
def job_environment(tmp_path_factory):
    """Return an environment that has the packages of the runner; run.sh adds tpukit to it."""
    return make_environment(tmp_path_factory.mktemp("job") / "environment")


@pytest.fixture(scope="session")
def training_environment(tmp_path_factory):
    """Return one that also finds the packages of this Python, torch among them, but not its tpukit."""
    place = make_environment(tmp_path_factory.mktemp("training") / "environment")
    (packages,) = place.glob("lib/*/site-packages")
    # A link to tpukit's source lies in a .pth file, and Python reads none in a folder that a .pth file names.
    (packages / "of_this_python.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return place


def make_environment(place):
    uv = [sys.executable, "-m", "uv"]
    python = f"{sys.base_prefix}/bin/python3"
    packages = [
        "papermill>=2.6,<3",
        "ipykernel>=6.29,<8",
        "nbconvert>=7.16,<8",
        "google-cloud-storage>=2.14,<4",
    ]
    subprocess.run([*uv, "venv", "--quiet", "--seed", "--python", python, place], check=True)
    command = [
        *uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        place / "bin/python",
        "google-crc32c>=1.5",
        *packages,
    ]
    subprocess.run(command, check=True)
    return place


@pytest.fixture
def machine(job_environment, monkeypatch):
    """Make this machine one that has the packages of the runner already, as an image may."""
    monkeypatch.setenv("TPUKIT_ENVIRONMENT", str(job_environment))
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def make_notebook(tmp_path):
    """Return a function that writes book.ipynb from the sources of its cells."""

    def make(*sources, parameters=None, tags=(), name="book.ipynb"):
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        for number, tag in tags:
            cells[number].metadata["tags"] = [tag]
        if parameters:
            cells.insert(
                0, nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
            )
        kernel = {"name": "mine", "display_name": "mine", "language": "python"}
        nbformat.write(
            nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), tmp_path / name
        )
        return tmp_path / name

    return make
