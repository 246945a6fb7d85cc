"""files: whole or not there, checked when read, and one process at a time in a folder."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tpukit.essentials.machine.files import (
    find_fault,
    lock_folder,
    remove_parts,
    seal,
    size_and_checksum,
    unseal,
    write_whole,
)

KIT = Path(__file__).parents[3]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("ended_by", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_is_not_written_to_its_end_leaves_the_old_one_and_nothing_else(tmp_path, ended_by):
    (tmp_path / "a").write_bytes(b"old")

    def write_some():
        with write_whole(tmp_path / "a") as file:
            file.write(b"new")
            assert (tmp_path / "a").read_bytes() == b"old"
            raise ended_by

    with pytest.raises(type(ended_by)):
        write_some()
    assert (names(tmp_path), (tmp_path / "a").read_bytes()) == (["a"], b"old")


def test_a_name_may_be_known_only_when_all_is_written(tmp_path):
    checksum = []
    name, part = lambda: tmp_path / f"step-{checksum[0]}.pt", tmp_path / ".unfinished"
    with write_whole(name, part=part, sync_folder=True) as file:
        file.write(b"weights")
        assert names(tmp_path) == [".unfinished"]
        checksum.append(7)
    assert names(tmp_path) == ["step-7.pt"]


def test_a_killed_process_leaves_the_old_file_and_a_part_that_is_removed_with_nobody_elses(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "film.part").write_bytes(b"somebody's")
    code = f"""
        import os, pathlib, signal
        from tpukit.essentials.machine.files import write_whole
        with write_whole(pathlib.Path({str(tmp_path / "a")!r})) as file:
            file.write(b"new")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=KIT)
    assert killed.returncode == -9
    assert len(names(tmp_path)) == 3
    remove_parts(tmp_path)
    assert (names(tmp_path), (tmp_path / "a").read_bytes()) == (["a", "film.part"], b"old")


def test_no_changed_byte_of_a_sealed_manifest_passes():
    sealed = seal({"format": "tpukit pack 2", "count": 3})
    assert unseal(sealed) == {"format": "tpukit pack 2", "count": 3}
    for place in range(len(sealed)):
        with pytest.raises(ValueError):  # noqa: PT011 (of JSON, of its encoding, or of the checksum)
            unseal(sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :])
        with pytest.raises(ValueError):  # noqa: PT011
            unseal(sealed[:place])


FAULTS = {
    "nothing": (lambda file: None, None),
    "gone": (Path.unlink, "a is missing"),
    "cut": (lambda file: os.truncate(file, 2), "a has 2 bytes where 3 were written"),
    "changed": (lambda file: file.write_bytes(b"abd"), "a is not what was written: its checksum does not fit"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_wrong_with_a_file_is_named(tmp_path, what):
    harm, fault = FAULTS[what]
    (tmp_path / "a").write_bytes(b"abc")
    harm(tmp_path / "a")
    assert find_fault(tmp_path / "a", size_and_checksum(b"abc")) == fault


def test_one_process_at_a_time_is_alone_in_a_folder(tmp_path):
    code = f"""
        import os, time
        from tpukit.essentials.machine.files import lock_folder
        for _ in range(5):
            with lock_folder({str(tmp_path)!r}):
                os.mkdir({str(tmp_path / "held")!r})  # raises if another one is in
                time.sleep(0.02)
                os.rmdir({str(tmp_path / "held")!r})
    """
    started = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=KIT) for _ in range(3)]
    assert [process.wait(30) for process in started] == [0, 0, 0]


def test_the_lock_of_a_killed_process_is_open(tmp_path):
    code = (
        "from tpukit.essentials.machine.files import lock_folder\n"
        f"with lock_folder({str(tmp_path)!r}): print('in', flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=KIT, **pipes) as process:
        assert process.stdout.readline() == b"in\n"
        process.kill()
    with lock_folder(tmp_path):
        pass
