import errno
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from training.test_checkpoints import DAMAGE, a_state, in_tiny, path_step, steps
from training.test_trainer import Dots, quietly, same, train

from tpukit import WorkerError
from tpukit.essentials.display import NotInstalledError
from tpukit.training import backup as backup_module
from tpukit.training.backup import Backup
from tpukit.training.checkpoints import CheckpointError, CheckpointStore

ROOT = Path(__file__).parents[2]


class Stuck(MemoryFileSystem):
    """A bucket that answers nothing while its gate is closed."""

    protocol = "stuck"
    store, pseudo_dirs = {}, [""]
    gate = threading.Event()

    def ls(self, path, **options):
        self.gate.wait()
        return super().ls(path, **options)

    def put_file(self, local, remote, **options):
        self.gate.wait()
        super().put_file(local, remote, **options)


class Away(MemoryFileSystem):
    """A bucket that refuses everything."""

    protocol = "away"

    def ls(self, path, **options):
        raise PermissionError("403: forbidden")


fsspec.register_implementation("stuck", Stuck)
fsspec.register_implementation("away", Away)


@pytest.fixture
def buckets():
    """Empty all buckets, and open the gate of the one that hangs."""
    MemoryFileSystem.store.clear()
    Stuck.store.clear()
    Stuck.gate.set()
    yield
    Stuck.gate.set()
    MemoryFileSystem.store.clear()


@pytest.fixture
def soon(monkeypatch):
    """Return what makes a backup be called stuck after half a second, from there on."""
    return lambda: monkeypatch.setattr(backup_module, "_QUIET_SECONDS", 0.5)


def backed_up(folder, backup_dir, *saved, best=(), keep=3):
    """Save steps in a folder with a backup, each copied before the next; return what was said."""
    said = []
    there = Backup(backup_dir, say=said.append)
    checkpoints = CheckpointStore(folder, keep, on_saved=there.offer)
    for step in saved:
        if step in best:
            torch.save({"weight": torch.full((999,), float(step))}, checkpoints.folder / "best.pt")
        checkpoints.save(a_state(step), step=step, best=step in best)
        checkpoints.close()
        there._wait(60)
    there.close()
    return said


def taken(folder, backup_dir, **options):
    """Return the step that a run in this folder would continue from, and what was said."""
    said = []
    checkpoints = CheckpointStore(folder)
    Backup(backup_dir, say=said.append).take(checkpoints, **options)
    found = checkpoints.newest(say=said.append)
    return found and found.step, said


def best_of(folder):
    return torch.load(folder / "best.pt", weights_only=True)["weight"][0].item()


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_the_newest_two_and_the_best_weights_are_there_and_come_back(kind, tmp_path, buckets):
    address = {"folder": tmp_path / "drive", "bucket": "memory://bucket/run"}[kind]
    assert backed_up(tmp_path / "run", address, 1, 2, 3, 4, best=[2]) == []
    files = fsspec.core.url_to_fs(str(address))[0]
    names = sorted(Path(name).name for name in files.ls(str(address), detail=False))
    assert [name[:13] for name in names] == ["best.pt", "step-00000003", "step-00000004"]
    shutil.rmtree(tmp_path / "run")
    step, said = taken(tmp_path / "run", address)
    assert step == 4
    assert said == [f"{names[-1]} is taken from the backup {address}"]
    assert best_of(tmp_path / "run") == 2
    assert taken(tmp_path / "run", address) == (4, [])  # what is there already is not copied again


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_compiled_programs_in_the_runs_folder_travel_with_it(kind, tmp_path, buckets):
    backup_dir = tmp_path / "drive" if kind == "folder" else "memory://bucket/run"
    first, second = tmp_path / "a", tmp_path / "b"
    (first / "compiled").mkdir(parents=True)
    (first / "compiled/0a.pjrt").write_bytes(b"a program")
    (first / "compiled/0b.lock").touch()
    assert backed_up(first, backup_dir, 5) == []
    assert taken(second, backup_dir)[0] == 5
    assert [file.name for file in (second / "compiled").iterdir()] == ["0a.pjrt"]
    assert (second / "compiled/0a.pjrt").read_bytes() == b"a program"
    assert (
        second / "compiled"
    ).stat().st_mode & 0o777 == 0o700  # else the launch refuses to load code from there


def test_the_folder_of_a_url_is_made_where_files_need_one(tmp_path):
    address = (tmp_path / "server/runs/first").as_uri()  # as of sftp, and not as of a bucket
    (tmp_path / "a/compiled").mkdir(parents=True)
    (tmp_path / "a/compiled/0a.pjrt").write_bytes(b"a program")
    assert backed_up(tmp_path / "a", address, 5, best=[5]) == []
    assert taken(tmp_path / "b", address)[0] == 5
    assert best_of(tmp_path / "b") == 5
    assert (tmp_path / "b/compiled/0a.pjrt").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no mode of a folder")
@pytest.mark.parametrize("unsafe", ["compiled", "compiled/0a.pjrt"])
def test_compiled_programs_that_others_can_replace_are_not_taken(unsafe, tmp_path):
    (tmp_path / "a/compiled").mkdir(parents=True)
    (tmp_path / "a/compiled/0a.pjrt").write_bytes(b"a program")
    assert backed_up(tmp_path / "a", tmp_path / "drive", 5) == []
    (tmp_path / "drive" / unsafe).chmod(0o777)
    step, said = taken(tmp_path / "b", tmp_path / "drive")
    assert step == 5, "checkpoints are no code"
    assert f"other users can write to {tmp_path / 'drive' / unsafe}" in said[0]
    assert not (tmp_path / "b/compiled").exists()


def test_a_backup_that_takes_no_programs_takes_checkpoints(tmp_path):
    (tmp_path / "a/compiled").mkdir(parents=True)
    (tmp_path / "a/compiled/0a.pjrt").write_bytes(b"a program")
    (tmp_path / "drive").mkdir()
    (tmp_path / "drive/compiled").write_text("somebody's file, where the folder would be")
    assert backed_up(tmp_path / "a", tmp_path / "drive", 5) == []
    assert taken(tmp_path / "b", tmp_path / "drive")[0] == 5


def test_a_step_saved_twice_is_there_once_beside_the_one_before(tmp_path):
    there = Backup(tmp_path / "drive")
    checkpoints = CheckpointStore(tmp_path / "run", on_saved=there.offer)
    for step, history in [(3, 0), (7, 0), (7, 1), (7, 2)]:
        checkpoints.save({**a_state(step), "history": history}, step=step)
        checkpoints.close()
        there._wait(60)
    assert steps(tmp_path / "drive") == ["3", "7"]
    assert taken(tmp_path / "other", tmp_path / "drive")[0] == 7


def test_what_else_lies_in_the_backup_is_left_alone(tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    (drive / "notes.txt").write_text("mine")
    later = drive / "step-00000099-0badc0de.pt"
    later.write_bytes(b"of another run")
    backed_up(tmp_path / "run", drive, 1, 2, 3)
    assert (drive / "notes.txt").read_text() == "mine"
    assert later.exists()
    assert steps(drive) == ["2", "3", "99"]


def test_a_folder_with_something_newer_is_left_as_it_is_and_one_with_something_older_is_not(
    tmp_path,
):
    backed_up(tmp_path / "run", tmp_path / "drive", 1, 2, best=[1])
    backed_up(tmp_path / "newer", tmp_path / "elsewhere", 3)
    backed_up(tmp_path / "older", tmp_path / "elsewhere", 1)
    assert taken(tmp_path / "newer", tmp_path / "drive") == (3, [])
    assert taken(tmp_path / "older", tmp_path / "drive")[0] == 2


def test_a_damaged_newest_in_the_folder_is_replaced_by_the_backups(tmp_path):
    backed_up(tmp_path / "run", tmp_path / "drive", 1, 2)
    DAMAGE["one bit flipped"](CheckpointStore(tmp_path / "run").paths[-1])
    step, said = taken(tmp_path / "run", tmp_path / "drive")
    assert step == 2
    assert len(said) == 1


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_torn_file_in_the_backup_is_not_taken(damage, tmp_path):
    backed_up(tmp_path / "run", tmp_path / "drive", 1, 2)
    damage(CheckpointStore(tmp_path / "drive").paths[-1])
    damaged = CheckpointStore(tmp_path / "drive").paths[-1]
    step, said = taken(tmp_path / "new", tmp_path / "drive")
    assert step == 1
    assert (
        said[0]
        == f"checkpoint {damaged.name} in the backup is skipped: damaged, its checksum is wrong"
    )
    assert [path_step(path) for path in CheckpointStore(tmp_path / "new").paths] == [1]
    assert damaged.exists()


@pytest.mark.parametrize(
    "kind", [kind for kind in DAMAGE if "name" not in kind and "appended" not in kind]
)
def test_best_weights_that_are_torn_are_not_taken(kind, tmp_path):
    backed_up(tmp_path / "run", tmp_path / "drive", 1, best=[1])
    DAMAGE[kind](tmp_path / "drive" / "best.pt")
    step, said = taken(tmp_path / "new", tmp_path / "drive")
    assert step == 1
    assert "best.pt in the backup is skipped: damaged" in said[0]
    assert steps(tmp_path / "new") == ["1*"]
    assert not (tmp_path / "new" / "best.pt").exists()


def test_best_weights_stay_if_every_newer_checkpoint_in_the_backup_is_torn(tmp_path):
    backed_up(tmp_path / "own", tmp_path / "elsewhere", 1, best=[1])
    backed_up(tmp_path / "run", tmp_path / "drive", 2, 3, best=[3])
    for path in CheckpointStore(tmp_path / "drive").paths:
        DAMAGE["one bit flipped"](path)
    step, said = taken(tmp_path / "own", tmp_path / "drive")
    assert (step, len(said)) == (1, 2)
    assert best_of(tmp_path / "own") == 1, "the history of step 1 names the epoch of step 1"
    assert taken(tmp_path / "new", tmp_path / "drive")[0] is None
    assert not (tmp_path / "new" / "best.pt").exists()


def test_what_a_taken_machine_left_half_written_is_removed(tmp_path):
    left = tmp_path / "drive" / ".step-00000001-0badc0de.pt.unfinished"
    left.parent.mkdir()
    left.write_bytes(b"half")
    assert taken(tmp_path / "run", tmp_path / "drive") == (None, [])
    assert not left.exists()


def test_a_backup_that_goes_away_is_said_once_and_when_it_is_back_too(tmp_path):
    said = []
    there = Backup(tmp_path / "drive", say=said.append)
    checkpoints = CheckpointStore(tmp_path / "run", on_saved=there.offer)

    def save(step):
        checkpoints.save(a_state(step), step=step)
        checkpoints.close()
        there._wait(60)

    save(1)
    shutil.rmtree(tmp_path / "drive")
    save(2)
    save(3)
    names = [path.name for path in checkpoints.paths]
    where = f"the backup {tmp_path / 'drive'}"
    lost = f"{names[1]} was not copied to {where}: no such file or directory"
    assert said == [f"{lost}; training goes on, and the next checkpoint will be copied"]
    assert not (
        tmp_path / "drive"
    ).exists()  # on a drive that is unmounted it would lie on this machine
    (tmp_path / "drive").mkdir()
    save(4)
    assert said[1:] == [f"{where} works again, and has {checkpoints.paths[-1].name}"]
    shutil.rmtree(tmp_path / "drive")
    save(5)
    there.close()
    assert said[3].startswith(
        f"{where} lacks {checkpoints.paths[-1].name}; the newest there is step-00000004"
    )


def test_a_full_backup_is_said_once_and_keeps_what_it_has(tmp_path):
    ran = in_tiny(
        tmp_path,
        """
import torch
from tpukit.training.backup import Backup
there = Backup(folder)
checkpoints = CheckpointStore(folder + "-run", on_saved=there.offer)
for step in range(1, 5):
    checkpoints.save({"x": torch.full((100_000,), float(step))}, step=step)  # 400 kB, in 1 MB
    checkpoints.close()
    there._wait(60)
there.close()
print(sorted(path.name[:13] for path in Path(folder).iterdir()))
again = CheckpointStore(folder + "-again")
Backup(folder).take(again)
print(again.newest().state["x"].mean().item(), checkpoints.newest().step)
""",
    )
    assert ran.returncode == 0, ran.stderr
    full, missing, names, _, found = ran.stdout.splitlines()
    assert re.match(
        r"step-00000003-\w+.pt was not copied to the backup .*: it is full; it needs room for three",
        full,
    )
    assert re.match(
        r"the backup .* lacks step-00000004-.*; the newest there is step-00000002-.* full",
        missing,
    )
    assert names == "['step-00000001', 'step-00000002']"
    assert found == "2.0 4"


def test_a_backup_that_hangs_holds_up_no_save_and_the_end_only_so_long(tmp_path, buckets, soon):
    soon()
    said = []
    there = Backup("stuck://bucket/run", say=said.append)
    checkpoints = CheckpointStore(tmp_path, on_saved=there.offer)
    Stuck.gate.clear()
    for step in (1, 2):
        checkpoints.save(a_state(step), step=step)
        checkpoints.close()
    time.sleep(0.6)
    checkpoints.save(a_state(3), step=3)
    checkpoints.close()  # all this while the gate is closed
    assert len(said) == 1
    assert "the backup stuck://bucket/run has not moved for" in said[0]
    there.close()
    assert f"lacks {checkpoints.paths[-1].name}" in said[1]
    thread = there._thread
    Stuck.gate.set()  # it wakes up: what is copied then is the newest, and nobody hears of it
    thread.join()
    assert len(said) == 2
    assert [Path(name).name[:13] for name in Stuck.store] == ["step-00000001", "step-00000003"]


def test_the_end_of_a_run_that_is_interrupted_waits_less(tmp_path, buckets):
    said, alive = [], []
    there = Backup("stuck://bucket/run", say=said.append, alive=lambda: alive.append(1))
    Stuck.gate.clear()
    checkpoints = CheckpointStore(tmp_path, on_saved=there.offer)
    checkpoints.save(a_state(1), step=1)
    checkpoints.close()
    there.close(0.3)  # and not the minute after which it would be called stuck
    name = checkpoints.paths[0].name
    assert said == [f"the backup stuck://bucket/run lacks {name} (it was still being copied)"]
    assert alive  # so the watchdog calls nobody stuck meanwhile


@pytest.mark.parametrize("address", ["stuck://bucket/run", "away://bucket/run"])
def test_a_start_with_nothing_here_and_a_backup_that_does_not_answer_begins_nothing(
    address, tmp_path, buckets, soon
):
    backed_up(tmp_path / "run", tmp_path / "drive", 1)
    soon()
    Stuck.gate.clear()
    checkpoints = CheckpointStore(tmp_path / "empty")
    with pytest.raises(
        OSError, match=f"backup {address} cannot be read, and .* has nothing to continue from"
    ) as error:
        Backup(address).take(checkpoints)
    assert re.search("found: .*(403: forbidden|no answer for 0.5 s)", str(error.value))
    assert "fix:   mount the backup drive, or sign in" in str(error.value)
    step, said = taken(
        tmp_path / "run", address
    )  # with something here it is said, and the run goes on
    assert step == 1
    assert "cannot be read: " in said[0]
    assert "training goes on" in said[0]


def test_a_backup_that_wakes_up_late_brings_no_old_checkpoint_into_the_folder(
    tmp_path, buckets, soon
):
    backed_up(tmp_path / "first", "stuck://bucket/run", 9)
    backed_up(tmp_path / "run", tmp_path / "drive", 1)
    soon()
    Stuck.gate.clear()
    said = []
    there, checkpoints = (
        Backup("stuck://bucket/run", say=said.append),
        CheckpointStore(tmp_path / "run"),
    )
    there.take(checkpoints)
    thread = there._thread
    Stuck.gate.set()
    thread.join()
    assert steps(tmp_path / "run") == ["1"]


def test_a_checkpoint_that_is_saved_while_the_start_still_hangs_is_copied_later(
    tmp_path, buckets, soon
):
    backed_up(tmp_path / "run", tmp_path / "drive", 1)
    soon()
    Stuck.gate.clear()
    said = []
    there = Backup("stuck://bucket/run", say=said.append)
    checkpoints = CheckpointStore(tmp_path / "run", on_saved=there.offer)
    there.take(checkpoints)
    thread = there._thread
    checkpoints.save(a_state(2), step=2)
    checkpoints.close()
    Stuck.gate.set()
    thread.join()
    there.close()
    assert [Path(name).name[:13] for name in Stuck.store] == ["step-00000002"]
    assert [text.partition(" works again")[1] for text in said] == ["", " works again"]


@pytest.mark.parametrize("own", [(), (1,)])
def test_a_full_disk_of_the_run_is_not_called_an_error_of_the_backup(tmp_path, monkeypatch, own):
    backed_up(tmp_path / "first", tmp_path / "drive", 9, best=(9,))
    checkpoints = CheckpointStore(tmp_path / "run")
    for step in own:
        checkpoints.save(a_state(step), step=step)
        checkpoints.close()
    write_whole = backup_module.write_whole

    def full(file, **options):
        if file.parent == tmp_path / "run":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_whole(file, **options)

    monkeypatch.setattr(backup_module, "write_whole", full)
    with pytest.raises(CheckpointError) as error:
        Backup(tmp_path / "drive").take(checkpoints)
    assert "best.pt could not be written" in str(error.value)
    assert f"free some space in {tmp_path / 'run'}" in str(error.value)
    assert error.value.errno == errno.ENOSPC


def test_a_drive_that_is_not_mounted_is_not_made_on_this_machine_and_the_fix_works(tmp_path):
    folder = tmp_path / "MyDrive" / "run"
    with pytest.raises(
        FileNotFoundError, match=r"the backup cannot be made: there is no folder .*MyDrive"
    ) as error:
        Backup(folder).take(CheckpointStore(tmp_path / "run"))
    assert not folder.parent.exists()
    exec(f"import os; {str(error.value).rpartition('make the folder: ')[2]}")
    assert taken(tmp_path / "run", folder) == (None, [])


def test_resume_false_refuses_a_backup_that_holds_something(tmp_path):
    backed_up(tmp_path / "run", tmp_path / "drive", 1)
    with pytest.raises(
        ValueError,
        match="resume=False, and the backup .* holds checkpoints\n  found: step-00000001-",
    ):
        taken(tmp_path / "new", tmp_path / "drive", resume=False)
    assert steps(tmp_path / "new") == []
    assert taken(tmp_path / "new", tmp_path / "another", resume=False) == (None, [])  # the fix


def test_addresses_that_nobody_knows_and_packages_that_are_missing_say_so(monkeypatch):
    with pytest.raises(ValueError, match="a backup cannot be stored at nosuch://x"):
        Backup("nosuch://x")
    for missing, package in (("gcsfs", "gcsfs"), ("fsspec", "fsspec")):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(
            NotInstalledError,
            match=rf"needs {package}, which is missing(.|\n)*%pip install {package}",
        ):
            Backup("gs://bucket/run")


def test_a_folder_needs_no_fsspec(tmp_path):
    code = f"import sys; from tpukit.training.backup import Backup; Backup({str(tmp_path)!r})"
    code += "; assert 'fsspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=600)


def script(folder, backup_dir):
    """Return a program that trains on two cores and kills itself, core 0 first, in the middle of epoch 2."""
    return textwrap.dedent(f"""
        import os, sys, time
        sys.path[:0] = [{str(ROOT / "tests")!r}]
        from pathlib import Path
        from training.test_trainer import Dots, quietly, train
        def work(core):
            seen = []
            def killed(inputs, labels):
                seen.append(1)
                if len(seen) == 18 and core.is_main:
                    while not any(path.name[5:13] >= "00000012" for path in Path({str(backup_dir)!r}).glob("step-*")):
                        time.sleep(0.01)
                    os.kill(os.getppid(), 9)
                    os.kill(os.getpid(), 9)
                return inputs, labels
            options = dict(epochs=3, valid=Dots(10), decay=0.9, restore_best_weights=True, save_every=0)
            return train(core, folder={str(folder)!r}, backup_dir={str(backup_dir)!r}, augment=killed, **options)
        quietly(work, seed=0)
    """)


def test_the_machine_is_lost_and_another_one_ends_the_run_as_if_nothing_had_happened(tmp_path):
    options = {
        "epochs": 3,
        "valid": Dots(10),
        "decay": 0.9,
        "restore_best_weights": True,
        "save_every": 0,
    }

    def work(core, folder, backup_dir=None):
        return train(core, folder=folder, backup_dir=backup_dir, **options)

    undisturbed = quietly(work, tmp_path / "once", seed=0).results
    code, environ = (
        script(tmp_path / "run", tmp_path / "drive"),
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == -9, ran.stderr
    shutil.rmtree(tmp_path / "run")
    run = quietly(work, tmp_path / "new machine", tmp_path / "drive", seed=0)
    for before, after in zip(undisturbed, run.results, strict=True):
        assert after["history"].resumed
        assert 12 <= path_step(Path(after["history"].resumed)) < 36
        assert same(before, after)
    best = [
        torch.load(tmp_path / place / "best.pt", weights_only=True)
        for place in ("once", "new machine", "drive")
    ]
    for name, tensor in best[0].items():
        assert torch.equal(tensor, best[1][name])
        assert torch.equal(tensor, best[2][name])
    assert len(steps(tmp_path / "drive")) == 2
    assert steps(tmp_path / "drive")[-1] == steps(tmp_path / "new machine")[-1]
    assert not list((tmp_path / "drive").glob(".*"))


def test_a_bucket_holds_what_fit_saved_and_gives_it_back(tmp_path, buckets):
    def work(core, folder, epochs):
        history = train(core, folder=folder, backup_dir="memory://bucket/run", epochs=epochs)[
            "history"
        ]
        return history.resumed, {
            name: bytes(file.getbuffer()) for name, file in MemoryFileSystem.store.items()
        }

    _, there = quietly(work, tmp_path / "run", 1, cores=1).results[0]
    assert sorted(Path(name).name[:13] for name in there) == ["best.pt", "step-00000024"]
    for name, content in there.items():  # the bucket of a worker is gone with it
        fsspec.filesystem("memory").pipe_file(name, content)
    resumed, _ = quietly(work, tmp_path / "new", 2, cores=1).results[0]
    assert resumed in [Path(name).name for name in there]


def test_a_backup_that_hangs_ends_no_training_and_changes_nothing_in_it(
    tmp_path, buckets, soon, capsys
):
    soon()

    def work(core, backup_dir, folder):
        def close(inputs, labels):
            Stuck.gate.clear()  # for ever, after the start, which asks what is there
            return inputs, labels

        return train(core, folder=folder, backup_dir=backup_dir, augment=close, save_every=0)

    alone = quietly(work, None, tmp_path / "alone").results[0]
    hung = quietly(work, "stuck://bucket/run", tmp_path / "run").results[0]
    assert same(alone, hung)
    assert capsys.readouterr().out.count("the backup stuck://bucket/run lacks step-00000024-") == 1


def test_a_backup_that_disappears_ends_no_training(tmp_path, capsys):
    def work(core):
        def remove(history):
            shutil.rmtree(tmp_path / "drive", ignore_errors=True)

        return train(
            core,
            folder=tmp_path / "run",
            backup_dir=tmp_path / "drive",
            on_epoch_end=remove,
            epochs=4,
        )

    history = quietly(work).results[0]["history"]
    assert len(history.epochs) == 4
    text = capsys.readouterr().out
    assert text.count("training goes on, and the next checkpoint will be copied") == 1
    assert text.count("lacks step-00000048-") == 1
    again = quietly(
        lambda core: train(core, folder=tmp_path / "run", backup_dir=tmp_path / "drive", epochs=5)
    )
    assert path_step(Path(again.results[0]["history"].resumed)) == 48
    assert steps(tmp_path / "drive")[-1].startswith("60")


def test_what_an_interrupted_run_did_not_copy_the_next_one_copies(tmp_path):
    quietly(lambda core: train(core, folder=tmp_path / "run", epochs=1))
    quietly(
        lambda core: train(core, folder=tmp_path / "run", backup_dir=tmp_path / "drive", epochs=1)
    )  # nothing to train
    assert [name.rstrip("*") for name in steps(tmp_path / "drive")] == ["12"]
    assert (tmp_path / "drive" / "best.pt").exists()


def test_a_backup_is_a_second_folder(tmp_path):
    drive = tmp_path / "drive"
    with pytest.raises(WorkerError, match="backup_dir and folder must be different folders"):
        quietly(lambda core: train(core, folder=drive, backup_dir=drive))
