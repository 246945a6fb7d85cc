import errno
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tpukit.essentials.environment.chip_holders import (
    DeviceBusyError,
    ancestors,
    chip_holders,
    command,
    wait_for_chips,
)
from tpukit.essentials.environment.platforms import Machine

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


@LINUX
def test_the_ancestors_of_a_process_begin_with_its_parent_and_end_with_the_first_process():
    above = ancestors(Path("/proc"), os.getpid())
    assert above[0] == os.getppid()
    assert above[-1] in (0, 1)


def test_a_process_that_has_ended_has_no_ancestors_and_no_command(tmp_path):
    assert ancestors(tmp_path, 4321) == []
    assert command(tmp_path, 4321) == "its command cannot be read"
    assert list(chip_holders(Machine(proc=tmp_path / "no proc", dev=tmp_path))) == []


def test_a_chip_that_a_process_has_opened_twice_is_yielded_once(dev, tmp_path):
    files = tmp_path / "proc" / "77" / "fd"
    files.mkdir(parents=True)
    for descriptor in ("3", "4"):
        (files / descriptor).symlink_to(dev / "vfio" / "0")
    found = list(chip_holders(Machine(proc=tmp_path / "proc", dev=dev)))
    assert found == [(77, str((dev / "vfio" / "0").resolve()))]


def test_a_long_command_is_cut(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"python\0-c\0" + b"x" * 200)
    assert len(command(tmp_path, 7)) == 90
    assert command(tmp_path, 7).startswith("python -c xxx")


@pytest.fixture
def dev(tmp_path):
    """A folder of device nodes like a v5e's with two chips."""
    (tmp_path / "dev" / "vfio").mkdir(parents=True)
    for node in ("vfio/0", "vfio/1", "vfio/vfio"):
        (tmp_path / "dev" / node).touch()
    return tmp_path / "dev"


def busy_until(moment, *nodes):
    """Return what opens files, but answers EBUSY for these until then, as Linux does for a VFIO group in use."""

    def open_node(path, flags):
        if Path(path).name in nodes and time.monotonic() < moment:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        return os.open(path, flags)

    return open_node


def wait(dev, needed=2, environ=None, open_node=os.open, **options):
    said = []
    began = time.monotonic()
    wait_for_chips(
        needed, said.append, machine=Machine(environ or {}, dev=dev, open_node=open_node), **options
    )
    return said, time.monotonic() - began


def test_free_chips_are_not_waited_for_and_stay_closed(dev):
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    said, _ = wait(dev)
    assert said == []
    assert not before or len(os.listdir("/proc/self/fd")) == before


@LINUX
def test_a_chip_that_is_busy_at_first_is_waited_for_with_one_line_that_names_its_holder(dev):
    with open(dev / "vfio" / "1"):
        said, seconds = wait(dev, open_node=busy_until(time.monotonic() + 1.2, "1"))
    (line,) = said
    assert line.startswith(
        f"waiting for 1 of 2 chips to become free, 60 s at most: {dev}/vfio/1 by process {os.getpid()}"
    )
    assert seconds >= 1.2


def test_chips_that_stay_busy_are_an_error_with_node_and_holder(dev):
    with pytest.raises(DeviceBusyError) as caught:
        wait(dev, seconds=1.0, open_node=busy_until(float("inf"), "0", "1"))
    fact, found, *fix = str(caught.value).splitlines()
    assert fact == "2 of 2 chips are still busy after 1 s"
    assert sorted(re.findall(r"vfio/\d", found)) == ["vfio/0", "vfio/1"]
    assert found.endswith(" by no process that is visible from here")
    assert fix[0].startswith(
        "  fix:   shut down the notebook or program that holds the chips; tpukit.cleanup()"
    )


def test_a_run_of_one_core_needs_one_free_chip(dev):
    assert wait(dev, needed=1, open_node=busy_until(float("inf"), "0"))[0] == []


@pytest.mark.parametrize(
    ("chip", "node"), [(1, "1"), (2, "10")]
)  # by number: as text "10" comes before "2"
def test_one_chosen_chip_is_waited_for_and_the_others_may_be_busy(dev, chip, node):
    (dev / "vfio" / "10").touch()
    others = {"0", "1", "10"} - {node}
    assert wait(dev, needed=1, chip=chip, open_node=busy_until(float("inf"), *others))[0] == []
    said, seconds = wait(
        dev, needed=1, chip=chip, open_node=busy_until(time.monotonic() + 0.6, node)
    )
    assert seconds >= 0.6
    assert said[0].startswith(
        f"waiting for 1 of 1 chips to become free, 60 s at most: {dev}/vfio/{node} by "
    )


def test_a_chosen_chip_that_stays_busy_is_left_to_libtpu_which_may_count_the_nodes_otherwise(dev):
    said, _ = wait(dev, needed=1, chip=0, seconds=0.5, open_node=busy_until(float("inf"), "0"))
    assert len(said) == 1


@pytest.mark.parametrize("error", [errno.EACCES, errno.ENXIO, errno.EPERM])
def test_a_node_that_cannot_be_opened_for_another_reason_is_left_to_libtpu(dev, error):
    def refuse(path, flags):
        raise OSError(error, os.strerror(error), path)

    assert wait(dev, open_node=refuse)[0] == []


def test_shared_chips_and_machines_without_nodes_are_not_waited_for(dev, tmp_path):
    never = busy_until(float("inf"), "0", "1")
    assert wait(dev, environ={"TPU_VISIBLE_CHIPS": "0"}, open_node=never)[0] == []
    assert wait(tmp_path / "nothing", open_node=never)[0] == []


def test_the_wait_can_be_interrupted(dev):
    threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        wait(dev, seconds=600, open_node=busy_until(float("inf"), "0", "1"))
