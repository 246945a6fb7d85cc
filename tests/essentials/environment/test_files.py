"""files: whole or not there."""

import shlex
from pathlib import Path

import pytest

from tpukit.essentials.environment.files import load_notebook, write_whole

KIT = Path(__file__).parents[3]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("ended_by", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_is_not_written_to_its_end_leaves_the_old_one_and_nothing_else(
    tmp_path, ended_by
):
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


def test_the_fix_for_an_old_notebook_is_a_command_for_its_path(tmp_path):
    old = tmp_path / "my notebook.ipynb"
    old.write_text('{"worksheets": [], "nbformat": 3, "metadata": {}}')
    with pytest.raises(ValueError, match="has notebook format 3") as refused:
        load_notebook(old)
    assert shlex.split(refused.value.fix)[-1] == str(old)
