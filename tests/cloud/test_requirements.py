"""What a trainer imports: sent, required with its version, or refused; never a name asked of an index."""

import json
import sys
import textwrap
from importlib import metadata

import pytest

from tpukit.cloud.requirements import Imports


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder of a trainer, and one of installed packages: `install(name, version, *files)` adds one."""
    own, installed = tmp_path / "own", tmp_path / "site-packages"
    own.mkdir()
    installed.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])

    def install(name, version, *files, origin=None):
        for file in files:
            (installed / file).parent.mkdir(parents=True, exist_ok=True)
            (installed / file).write_text("")
        about = installed / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        if origin:
            (about / "direct_url.json").write_text(json.dumps(origin))

    def look(text, **needs):
        found = Imports(own, needs)
        found.add(textwrap.dedent(text), "train.py")
        return sorted(found.requirements), sorted(found.files)

    def write(name, text=""):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)

    look.install, look.write, look.own = install, write, own
    return look


def test_a_requirement_is_the_installed_package_that_owns_the_file_with_its_version(machine):
    machine.install("opencv-python", "4.12.0.88", "cv2/__init__.py")
    machine.install("numpy-of-mine", "1.0+cpu", "of_mine.py")
    machine.install("unused", "1.0", "unused.py")
    assert machine("import cv2, of_mine, json, sys")[0] == ["numpy-of-mine==1.0", "opencv-python==4.12.0.88"]


def test_of_a_folder_that_packages_share_the_one_with_the_module_is_taken(machine):
    machine.install("google-auth-of-mine", "2.0", "googol/auth/__init__.py")
    machine.install("google-cloud-storage-of-mine", "3.1", "googol/cloud/storage/__init__.py")
    machine.install("google-cloud-bigquery-of-mine", "4.1", "googol/cloud/bigquery/__init__.py")
    storage = ["google-cloud-storage-of-mine==3.1"]
    assert machine("from googol.cloud import storage")[0] == storage
    assert machine("import googol.cloud.storage as s")[0] == storage
    assert machine("from googol.cloud.storage import Client")[0] == storage
    assert machine("from googol.cloud import storage, bigquery")[0] == ["google-cloud-bigquery-of-mine==4.1", *storage]
    with pytest.raises(ValueError, match="imports googol.cloud.vision, and no installed package"):
        machine("from googol.cloud import vision")


def test_google_cloud_storage_is_googles(machine):
    pytest.importorskip("google.cloud.storage", reason="google-cloud-storage is not installed")
    version = metadata.version("google-cloud-storage")
    assert machine("from google.cloud import storage")[0] == [f"google-cloud-storage=={version}"]


def test_a_folder_beside_the_trainer_is_sent_with_or_without_an_init(machine):
    machine.write("models/nets.py", "import helpers.deep\n")
    machine.write("helpers/__init__.py")
    machine.write("helpers/deep.py")
    machine.write("beside.py")
    machine.write("data/a.txt")
    sent = ["beside.py", "models/nets.py"]
    assert machine("from models.nets import make\nimport beside") == ([], sent)
    found = Imports(machine.own, {})
    assert found.add("import models.nets", "train.py") == ["models/nets.py"]
    assert found.add("import helpers.deep", "models/nets.py") == ["helpers/__init__.py", "helpers/deep.py"]
    with pytest.raises(ValueError, match="imports data, and no installed package"):  # a folder, and no module in it
        machine("import data")


def test_a_folder_beside_is_sent_and_a_package_of_its_name_that_python_prefers_is_required(machine):
    machine.write("models/nets.py")
    machine.install("models-of-others", "1.0", "models/__init__.py", "models/nets.py")
    assert machine("import models.nets") == (["models-of-others==1.0"], [])
    machine.write("models/__init__.py")
    assert machine("import models.nets") == ([], ["models/__init__.py", "models/nets.py"])


def test_one_folder_may_be_both_beside_and_installed(machine):
    machine.install("company-core", "1.0", "company/core.py")
    machine.write("company/mine.py")
    assert machine("import company.core, company.mine") == (["company-core==1.0"], ["company/mine.py"])


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import nowhere\nexcept ImportError:\n    nowhere = None",
        "try:\n    import nowhere\nexcept (KeyError, ModuleNotFoundError):\n    import nowhere_else",
        "try:\n    import nowhere\nexcept:\n    pass",
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import nowhere",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import nowhere",
        "import typing\nif typing.TYPE_CHECKING:\n    import nowhere\nelse:\n    import json",
    ],
)
def test_what_this_machine_runs_without_is_not_asked_for(machine, text):
    assert machine(text) == ([], [])


@pytest.mark.parametrize(
    "text",
    [
        "import nowhere",
        "from nowhere import thing",
        "def train(core):\n    import nowhere.deep",
        "try:\n    import nowhere\nfinally:\n    pass",
        "try:\n    import nowhere\nexcept KeyError:\n    pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import json\nelse:\n    import nowhere",
    ],
)
def test_a_module_that_nothing_brings_is_refused_by_name_and_the_fix_helps(machine, text):
    with pytest.raises(ValueError, match="train.py imports nowhere.*, and no installed package") as caught:
        machine(text)
    assert "--needs nowhere=PACKAGE==VERSION" in str(caught.value)
    assert machine(text, nowhere="nowhere-at-all==1.0")[0] == ["nowhere-at-all==1.0"]
    assert machine(text, nowhere="") == ([], [])


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (
            {"url": "https://git.example.com/kit", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "mine @ git+https://git.example.com/kit@abc",
        ),
        ({"url": "https://example.com/mine.whl", "archive_info": {}}, "mine @ https://example.com/mine.whl"),
        ({"url": "file:///somewhere/mine", "dir_info": {"editable": True}}, None),
    ],
)
def test_what_came_from_elsewhere_than_an_index_is_not_asked_of_one(machine, origin, requirement):
    machine.install("mine", "1.0", "mine.py", origin=origin)
    if requirement:
        assert machine("import mine")[0] == [requirement]
    else:
        with pytest.raises(ValueError, match="imports mine, and no installed package"):
            machine("import mine")


def test_a_module_that_is_installed_without_a_record_is_refused(machine):
    (machine.own.parent / "site-packages" / "loose.py").write_text("")
    with pytest.raises(ValueError, match="imports loose, and no installed package"):
        machine("import loose")


def test_plain_tensorflow_has_no_tpu(machine):
    machine.install("tensorflow-cpu", "2.21.0", "tensorflow/__init__.py")
    with pytest.raises(ValueError, match="imports tensorflow(.|\n)*--needs tensorflow=tensorflow-tpu=="):
        machine("import tensorflow as tf")
    assert machine("import tensorflow", tensorflow="tensorflow-tpu==2.19.1")[0] == ["tensorflow-tpu==2.19.1"]


def test_a_module_beside_that_is_named_as_pythons_own_is_sent(machine):
    machine.write("random.py")
    assert machine("import random, json") == ([], ["random.py"])
