"""A resumable folder: the same plan continues, another begins again, and nobody's files are touched."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.files import contents, flip

from tpukit.datasets.checked_files import write_file
from tpukit.datasets.resumable import ResumableFolder

KIT = Path(__file__).parents[2]


class Cake(ResumableFolder):
    kind, version = "cake", 3
    outputs = ("*.layer", "icing")
    make = "bake(folder)"
    repair = "delete it, shutil.rmtree('{folder}'), and bake it again"


def begin(folder, plan, **options):
    cake = Cake(folder, plan)
    with cake.locked():
        cake.begin(**options)
    return cake


def begun(folder, plan=None):
    """Begin a cake of one layer, with something in its work folder."""
    cake = begin(folder, plan or {"eggs": 2})
    (folder / "1.layer").write_text("sponge")
    (cake.work / "bowl").write_text("batter")
    return cake


def test_the_same_plan_goes_on_where_it_was_ended(tmp_path):
    begun(tmp_path)
    cake = begin(tmp_path, {"eggs": 2})
    assert {"1.layer", "unfinished/bowl"} <= contents(tmp_path).keys()
    cake.finish(taste="sweet")
    assert contents(tmp_path).keys() == {"1.layer", "manifest.json"}
    assert cake.read_manifest() == {
        "format": "tpukit cake 3",
        "plan": {"eggs": 2},
        "taste": "sweet",
    }


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("plan", "options"), [({"eggs": 3}, {}), ({"eggs": 2}, {"from_scratch": True})]
)
def test_another_plan_or_the_same_from_scratch_clears_what_is_there_and_says_in_what_it_differs(
    tmp_path, plan, options, finished
):
    cake = begun(tmp_path)
    if finished:
        cake.finish()
    other = Cake(tmp_path, {"eggs": 3})
    assert "found: eggs 2, asked for 3\n  fix:" in str(other.differences({"eggs": 2}))
    assert not other.differences({"eggs": 3})
    begin(tmp_path, plan, **options)
    assert contents(tmp_path).keys() == {"unfinished/plan.json"}


def test_what_another_version_has_begun_is_cleared(tmp_path):
    cake = begun(tmp_path)
    plan = cake.work / "plan.json"
    plan.write_text(plan.read_text().replace("cake 3", "cake 2"))
    begin(tmp_path, {"eggs": 2})
    assert contents(tmp_path).keys() == {"unfinished/plan.json"}


@pytest.mark.parametrize(
    "name", ["icing", "1.layer", "notes.txt", "film.part", "unfinished/thesis.txt"]
)
def test_a_folder_with_somebodys_files_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=rf"not a cake's\n  found: \['{name}'\]\n  fix:"):
        begin(tmp_path, {"eggs": 2})
    assert contents(tmp_path) == {name: b"mine"}


CLEAR = """
    import os, pathlib, shutil, signal, sys
    from tpukit.datasets import resumable
    sys.path[:0] = [{tests!r}, {tests!r} + "/datasets"]
    from test_resumable import Cake
    left = int({after})

    def counted(call):
        def instead(*arguments, **options):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        return instead

    resumable.write_file = counted(resumable.write_file)
    pathlib.Path.unlink = counted(pathlib.Path.unlink)
    os.mkdir = counted(os.mkdir)
    cake = Cake(pathlib.Path({folder!r}), {{"eggs": 3}})
    with cake.locked():
        cake.begin()
"""


@pytest.mark.parametrize("finished", [False, True])
def test_killed_at_any_step_of_clearing_it_is_cleared_by_the_next_call_and_never_taken_for_finished(
    tmp_path, finished
):
    for after in range(20):
        folder = tmp_path / str(after)
        folder.mkdir()
        cake = begun(folder)
        write_file(folder / "icing", b"sugar")
        if finished:
            cake.finish()
        code = textwrap.dedent(CLEAR).format(
            tests=str(KIT / "tests"), after=after, folder=str(folder)
        )
        status = subprocess.run([sys.executable, "-c", code], cwd=KIT).returncode
        if cake.is_finished:
            assert {"1.layer", "icing"} <= contents(folder).keys(), after
        begin(folder, {"eggs": 3})
        assert contents(folder).keys() == {"unfinished/plan.json"}, after
        if status == 0:
            break
    assert (status, after > 3) == (0, True)


def test_nobody_can_write_who_is_not_alone(tmp_path):
    cake = Cake(tmp_path, {"eggs": 2})
    code = f"""
        import fcntl, os
        handle = os.open({str(tmp_path)!r}, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    """
    try_to_lock = [sys.executable, "-c", textwrap.dedent(code)]
    with cake.locked():
        assert b"BlockingIOError" in subprocess.run(try_to_lock, stderr=subprocess.PIPE).stderr
    assert subprocess.run(try_to_lock).returncode == 0


def test_a_folder_with_many_finished_files_is_still_said_to_be_begun(tmp_path):
    begun(tmp_path)
    for number in range(9):
        (tmp_path / f"{number}.layer").write_text("sponge")
    with pytest.raises(FileNotFoundError, match="fix:   call bake.folder. as before: it continues"):
        Cake(tmp_path).read_manifest()


NOT_READ = {
    "another's manifest": (
        lambda file: file.write_text('{"name": "app"}'),
        ValueError,
        "of something else, not of tp",
    ),
    "no JSON": (lambda file: file.write_text("hello"), ValueError, "of something else"),
    "a bit changed": (
        flip,
        OSError,
        r"the cake in .* is damaged\n(.|\n)*fix:   delete it, shutil",
    ),
    "cut": (lambda file: os.truncate(file, 40), OSError, "is damaged"),
    "empty": (lambda file: os.truncate(file, 0), OSError, "is damaged"),
    "gone": (
        Path.unlink,
        FileNotFoundError,
        r"holds no finished cake(.|\n)*fix:   pass the folder that bake",
    ),
}


@pytest.mark.parametrize("what", NOT_READ)
def test_a_manifest_that_is_not_what_was_written_is_not_read(tmp_path, what):
    harm, error, message = NOT_READ[what]
    begun(tmp_path).finish()
    harm(tmp_path / "manifest.json")
    with pytest.raises(error, match=message):
        Cake(tmp_path).read_manifest()
