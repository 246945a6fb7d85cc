import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tpukit.essentials.environment.hardware import MachineInfo
from tpukit.essentials.environment.platforms import Machine

V2, V3 = (
    {"device": "0x0027", "subsystem_device": "0x004e"},
    {"device": "0x0027", "subsystem_device": "0x004f"},
)
V4, V5P, V5E, V6E, V7X = ({"device": f"0x00{name}"} for name in ("5e", "62", "63", "6f", "76"))
GVNIC = {"device": "0x0042", "class": "0x020000"}
DISK = {"device": "0x001f", "class": "0x010802"}
BOARD = {"device": "0x0065", "class": "0x088000"}
NEWER = {"device": "0x00ab"}
INTEL = {
    "vendor": "0x8086",
    "device": "0x0063",
    "class": "0xff0000",
}  # a v5e's device number, another vendor's
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


def bus(folder: Path, *devices: dict[str, str]) -> Path:
    """Make a PCI bus as sysfs shows it."""
    folder.mkdir(exist_ok=True)
    for number, device in enumerate(devices):
        slot = folder / f"0000:00:{number:02x}.0"
        slot.mkdir()
        for name, value in ({"vendor": "0x1ae0", "class": "0xff0000"} | device).items():
            (slot / name).write_text(value + "\n")
    return folder


def look(tmp_path: Path, environ=(), devices=(), **arguments):
    """Look at a machine that has nothing but what is given."""
    (tmp_path / "empty").mkdir(exist_ok=True)
    where = {
        "proc": tmp_path / "empty",
        "cgroup": tmp_path / "empty",
        "installed": {}.get,
    } | arguments
    return MachineInfo.read(Machine(dict(environ), bus(tmp_path / "pci", *devices), **where))


@pytest.mark.parametrize(
    ("environ", "devices", "platform"),
    [
        ({}, [], "laptop"),
        ({}, [V5E], "TPU VM"),
        ({"COLAB_RELEASE_TAG": "release-colab_2026"}, [], "Colab"),
        ({"COLAB_TPU_1VM": "1"}, [V5E], "Colab"),
        ({"COLAB_TPU_1VM": ""}, [], "laptop"),  # present but empty
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, [V5E] * 8, "Kaggle"),
        (
            {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "x"},
            [],
            "Kaggle",
        ),  # Kaggle's image is Colab's
        (
            {"COLAB_RELEASE_TAG": "x", "KAGGLE_USERNAME": "me", "KAGGLE_KEY": "k"},
            [],
            "Colab",
        ),  # credentials for the data
        ({"COLAB_RELEASE_TAG": "x", "MODEL_PROXY_HOST": "https://mp.kaggle.net"}, [], "Colab"),
        ({"KAGGLE_USERNAME": "me"}, [], "laptop"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "", "COLAB_RELEASE_TAG": "x"}, [], "Colab"),
        ({"CLOUD_ML_JOB_ID": "7"}, [V5E], "Vertex AI"),
        (
            {"CLOUD_ML_JOB_ID": "7", "COLAB_RELEASE_TAG": "x"},
            [],
            "Vertex AI",
        ),  # a job that runs Colab's image
        ({"VERTEX_PRODUCT": "COLAB_ENTERPRISE"}, [], "Vertex AI"),
    ],
)
def test_the_platform_is_recognised_by_variables_that_only_it_sets(
    tmp_path, environ, devices, platform
):
    assert look(tmp_path, environ, devices).platform == platform


@pytest.mark.parametrize(
    ("devices", "chips", "generation", "cores"),
    [
        ([], 0, None, 0),
        ([V5E], 1, "v5e", 1),
        ([V5E] * 8, 8, "v5e", 8),
        ([V6E], 1, "v6e", 1),
        ([V2] * 4, 4, "v2", 8),
        ([V3] * 4, 4, "v3", 8),
        ([{"device": "0x0027"}] * 4, 4, "v2/v3", 8),  # the subsystem cannot be read
        ([V4] * 4, 4, "v4", 4),
        ([V5P] * 4, 4, "v5p", 4),
        ([V7X] * 4, 4, "7x", 8),
        ([GVNIC], 0, None, 0),
        ([DISK, BOARD, GVNIC], 0, None, 0),
        ([GVNIC, V5E, DISK, INTEL], 1, "v5e", 1),
        ([INTEL], 0, None, 0),
        ([NEWER] * 4, 4, "unknown (0x1ae0:0x00ab)", 4),
        ([{"device": "0x00ab", "class": "0x120000"}], 1, "unknown (0x1ae0:0x00ab)", 1),
        ([NEWER, GVNIC], 1, "unknown (0x1ae0:0x00ab)", 1),
        ([V6E, NEWER], 1, "v6e", 1),  # a helper beside the chips
        ([{"device": "0x00ab", "class": ""}], 0, None, 0),  # nothing says that it computes
    ],
)
def test_chips_are_counted_by_what_is_on_the_bus(tmp_path, devices, chips, generation, cores):
    machine = look(tmp_path, devices=devices)
    assert (machine.chips, machine.generation, machine.cores) == (chips, generation, cores)


def test_a_google_card_that_is_not_a_tpu_is_named_in_the_evidence(tmp_path):
    assert "0x1ae0:0x0042 is not a TPU" in look(tmp_path, devices=[GVNIC]).evidence["chips"]


def test_a_slot_that_cannot_be_read_is_not_a_tpu(tmp_path):
    pci = bus(tmp_path / "pci", V5E)
    (pci / "0000:00:01.0").mkdir()  # no files in it
    (pci / "0000:00:02.0").write_text("not a folder")
    assert MachineInfo.read(Machine({}, pci)).chips == 1


def test_a_machine_without_a_bus_has_no_chips(tmp_path):
    machine = MachineInfo.read(Machine({}, tmp_path / "nowhere"))
    assert machine.chips == 0
    assert "is not there" in machine.evidence["chips"]


def test_versions_come_from_metadata_and_absent_packages_are_none(tmp_path):
    machine = look(tmp_path, installed={"torch": "2.9.0+cpu", "libtpu-nightly": "0.1.dev"}.get)
    assert machine.versions["torch"] == "2.9.0+cpu"
    assert machine.versions["torch_xla"] is None
    assert machine.versions["libtpu"] == "0.1.dev"
    assert machine.versions["python"] == ".".join(map(str, sys.version_info[:3]))


@LINUX
def test_this_very_machine_can_be_described():
    machine = MachineInfo.read()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.memory <= total
    assert 1 <= machine.cpus <= os.cpu_count()
    assert machine.shm > 0
    for word in ("platform", "chips", "torch_xla", "memory", "cpus"):
        assert word in str(machine)
        assert word in machine._repr_html_()


def test_looking_imports_no_torch_and_works_where_linux_is_not():
    program = (
        "import os, sys\n"
        "for name in ('fork', 'sched_getaffinity', 'sysconf', 'statvfs'):\n"
        "    if hasattr(os, name): delattr(os, name)\n"  # as on Windows
        "from pathlib import Path\n"
        "nowhere = Path('nowhere')\n"
        "from tpukit.essentials.environment.hardware import MachineInfo\n"
        "from tpukit.essentials.environment.runtime_check import check\n"
        "from tpukit.essentials.environment.platforms import Machine\n"
        "places = dict.fromkeys(('pci', 'proc', 'cgroup', 'shm', 'dev'), nowhere)\n"
        "there = Machine(**places, system='Windows AMD64')\n"
        "machine = MachineInfo.read(there)\n"
        "findings = check(there)\n"
        "assert machine.memory is None and machine.shm is None and machine.cpus >= 1, machine\n"
        "assert findings.ok or not machine.versions['torch'], findings\n"
        "assert 'Windows AMD64 cannot fork' in str(findings)\n"
        "assert not {'torch', 'torch_xla', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr


def test_one_chip_and_one_core_are_not_plural(tmp_path):
    machine = look(tmp_path, devices=[V5E])
    assert machine.hardware == "1 v5e chip, 1 core"
    assert replace(machine, generation="v3", chips=4).hardware == "4 v3 chips, 8 cores"
