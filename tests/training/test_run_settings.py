"""A folder holds one run: its settings are kept from the beginning, and others are refused by name."""

import json
from pathlib import Path

import pytest

from tpukit.training import keep_settings

SETTINGS = {"images": {"size": 128, "crop": None}, "exam_slices": 96, "mean": (0.5, 0.25)}


def test_a_run_with_the_same_settings_goes_on_in_its_folder(tmp_path):
    for _ in range(2):
        file = keep_settings(tmp_path / "run", SETTINGS)
    assert json.loads(file.read_text()) == {**SETTINGS, "mean": [0.5, 0.25]}


def test_a_setting_that_is_not_a_number_equals_itself(tmp_path):
    for _ in range(2):
        keep_settings(tmp_path / "run", {"fill": float("nan"), "sizes": [1, float("nan")]})
    with pytest.raises(ValueError, match="fill nan, asked for 0"):
        keep_settings(tmp_path / "run", {"fill": 0, "sizes": [1, float("nan")]})


def test_a_run_with_other_settings_is_refused_and_what_differs_is_named(tmp_path):
    file = keep_settings(tmp_path / "run", SETTINGS)
    before = file.read_bytes()
    other = {"images": {"size": 64, "crop": None}, "exam_slices": 96, "folds": 5}
    differ = r"images.size 128, asked for 64; mean \[0.5, 0.25\], asked for unknown; folds unknown, asked for 5"
    with pytest.raises(
        ValueError,
        match=rf"run holds a run with other settings\n  found: {differ}\n  fix: .*run_path",
    ):
        keep_settings(tmp_path / "run", other)
    assert file.read_bytes() == before
    assert keep_settings(tmp_path / "another", other).is_file()  # the fix


def test_on_a_new_machine_the_backup_knows_the_settings(tmp_path):
    keep_settings(tmp_path / "lost", SETTINGS, backup_dir=tmp_path / "drive")
    with pytest.raises(
        ValueError,
        match="drive holds a run with other settings\n  found: exam_slices 96, asked for 8",
    ):
        keep_settings(
            tmp_path / "new", {**SETTINGS, "exam_slices": 8}, backup_dir=tmp_path / "drive"
        )
    assert not (tmp_path / "new").exists()
    assert keep_settings(tmp_path / "new", SETTINGS, backup_dir=tmp_path / "drive").is_file()


def test_a_drive_that_is_not_mounted_is_not_made_on_this_machine(tmp_path):
    drive = tmp_path / "MyDrive"
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*MyDrive\n  fix:   mount"):
        keep_settings(tmp_path / "run", SETTINGS, backup_dir=drive / "run")
    assert not list(tmp_path.iterdir())
    drive.mkdir()  # the fix
    assert keep_settings(tmp_path / "run", SETTINGS, backup_dir=drive / "run").is_file()


@pytest.mark.parametrize("place", ["run", "drive"])
@pytest.mark.parametrize(
    "trained", ["step-00000010.pt", "slices/step-00000010.pt", "slices/best.pt"]
)
def test_what_was_trained_and_lost_its_settings_is_not_given_new_ones(tmp_path, place, trained):
    file = tmp_path / place / trained
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(
        ValueError, match=rf"{place} holds the results of a run, but not its settings"
    ) as refused:
        keep_settings(tmp_path / "run", SETTINGS, backup_dir=tmp_path / "drive")
    assert str(Path(trained)) in str(refused.value)
    assert not list(tmp_path.rglob("settings.json"))
    (tmp_path / place / "settings.json").write_text(json.dumps(SETTINGS))  # the fix
    assert keep_settings(tmp_path / "run", SETTINGS, backup_dir=tmp_path / "drive").is_file()


@pytest.mark.parametrize(("place", "other"), [("run", "drive"), ("drive", "run")])
def test_results_without_settings_do_not_get_those_of_the_other_folder(tmp_path, place, other):
    keep_settings(tmp_path / other, SETTINGS)
    (tmp_path / place).mkdir()
    (tmp_path / place / "step-00000010.pt").touch()
    with pytest.raises(ValueError, match=f"{place} holds the results of a run, but not its set"):
        keep_settings(tmp_path / "run", SETTINGS, backup_dir=tmp_path / "drive")
    assert not (tmp_path / place / "settings.json").exists()


def test_settings_that_a_hand_has_broken_are_named(tmp_path):
    file = keep_settings(tmp_path / "run", SETTINGS)
    file.write_text(file.read_text()[:-9])
    with pytest.raises(ValueError, match=r"run/settings.json is not JSON\n  found: .*\n  fix: "):
        keep_settings(tmp_path / "run", SETTINGS)


@pytest.fixture
def bucket():
    """Return the URL of a backup in fsspec's file system in memory."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    yield "memory://bucket/run"
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)


def test_a_backup_at_a_url_has_the_settings_too(tmp_path, monkeypatch, bucket):
    monkeypatch.chdir(tmp_path)
    keep_settings("run", SETTINGS, backup_dir=bucket)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # and no folder "memory:"
    with pytest.raises(
        ValueError,
        match=f"{bucket} holds a run with other settings\n  found: exam_slices 96, asked for 8",
    ):
        keep_settings("new", {**SETTINGS, "exam_slices": 8}, backup_dir=bucket)
    assert not Path("new").exists()
    assert keep_settings("new", SETTINGS, backup_dir=bucket).is_file()


@pytest.mark.parametrize(
    "trained", ["step-00000010.pt", "slices/step-00000010.pt", "slices/best.pt"]
)
def test_results_in_a_bucket_without_settings_are_refused(tmp_path, bucket, trained):
    import fsspec

    with fsspec.open(f"{bucket}/{trained}", "wb") as file:
        file.write(b"weights")
    with pytest.raises(
        ValueError,
        match=f"{bucket} holds the results of a run, but not its settings\n  found: {trained}",
    ):
        keep_settings(tmp_path / "run", SETTINGS, backup_dir=bucket)
    assert not (tmp_path / "run").exists()


def test_settings_in_a_bucket_that_are_not_json_are_named(tmp_path, bucket):
    import fsspec

    keep_settings(tmp_path / "run", SETTINGS, backup_dir=bucket)
    with fsspec.open(f"{bucket}/settings.json", "wb") as file:
        file.write(b"{")
    with pytest.raises(
        ValueError, match=f"{bucket}/settings.json is not JSON\n  found: .*\n  fix: "
    ):
        keep_settings(tmp_path / "run", SETTINGS, backup_dir=bucket)


def test_a_backup_that_cannot_be_reached_is_named(tmp_path, monkeypatch, bucket):
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(self, *_, **__):
        raise RuntimeError("401, invalid credentials")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
    with pytest.raises(
        OSError,
        match=f"the settings in {bucket} cannot be read or written\n  found: .*401.*\n  fix: ",
    ):
        keep_settings(tmp_path / "run", SETTINGS, backup_dir=bucket)
    assert not (tmp_path / "run").exists()


def test_the_folder_itself_must_be_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"folder must be a path on this machine, got 'gs://b/run'\n  fix: .*backup_dir='gs://b/run'",
    ):
        keep_settings("gs://b/run", SETTINGS)
    assert not list(tmp_path.iterdir())


def test_a_home_folder_is_the_one_that_checkpoints_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    file = keep_settings("~/run", SETTINGS, backup_dir="~/drive")
    assert file == tmp_path / "home" / "run" / "settings.json"
    assert (tmp_path / "home" / "drive" / "settings.json").is_file()
    assert not Path("~").exists()
