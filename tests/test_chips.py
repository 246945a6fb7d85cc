import os
import sys
from pathlib import Path

import pytest

from tpukit.machine.chips import ancestors, chip_holders, command, is_chip

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("accel0", True),
        ("accel12", True),
        ("0", True),  # /dev/vfio/0
        ("12", True),
        ("vfio", False),  # the entry to all groups, not a chip
        ("accel", False),
        ("accel0p1", False),
        ("noiommu-0", False),
        ("", False),
    ],
)
def test_a_chip_is_known_by_the_name_of_its_device_node(node, expected):
    assert is_chip(node) == expected


@LINUX
def test_a_process_holds_a_chip_as_long_as_its_device_node_is_open(tmp_path):
    proc, dev = Path("/proc"), tmp_path / "dev"
    (dev / "vfio").mkdir(parents=True)
    for node in ("vfio/3", "vfio/vfio", "null"):
        (dev / node).touch()
    with open(dev / "vfio" / "3"), open(dev / "vfio" / "vfio"), open(dev / "null"):
        assert list(chip_holders(proc, dev)) == [(os.getpid(), str(dev / "vfio" / "3"))]
    assert list(chip_holders(proc, dev)) == []


@LINUX
def test_the_ancestors_of_a_process_begin_with_its_parent_and_end_with_the_first_process():
    above = ancestors(Path("/proc"), os.getpid())
    assert above[0] == os.getppid()
    assert above[-1] in (0, 1)


def test_a_process_that_has_ended_has_no_ancestors_and_no_command(tmp_path):
    assert ancestors(tmp_path, 4321) == []
    assert command(tmp_path, 4321) == "its command cannot be read"
    assert list(chip_holders(tmp_path / "no proc", tmp_path)) == []


def test_a_long_command_is_cut(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"python\0-c\0" + b"x" * 200)
    assert len(command(tmp_path, 7)) == 90
    assert command(tmp_path, 7).startswith("python -c xxx")
