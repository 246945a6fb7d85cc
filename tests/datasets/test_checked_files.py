"""checked_files: what a manifest says of files, and whether it is so."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tpukit.datasets.checked_files import find_fault, remove_parts, seal, size_and_checksum, unseal

KIT = Path(__file__).parents[2]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_killed_process_leaves_the_old_file_and_a_part_that_is_removed_with_nobody_elses(
    tmp_path,
):
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "film.part").write_bytes(b"somebody's")
    code = f"""
        import os, pathlib, signal
        from tpukit.essentials.environment.files import write_whole
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
    "changed": (
        lambda file: file.write_bytes(b"abd"),
        "a is not what was written: its checksum does not match",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_wrong_with_a_file_is_named(tmp_path, what):
    harm, fault = FAULTS[what]
    (tmp_path / "a").write_bytes(b"abc")
    harm(tmp_path / "a")
    assert find_fault(tmp_path / "a", size_and_checksum(b"abc")) == fault
