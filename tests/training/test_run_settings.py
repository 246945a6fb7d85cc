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


def test_settings_that_a_hand_has_broken_are_named(tmp_path):
    file = keep_settings(tmp_path / "run", SETTINGS)
    file.write_text(file.read_text()[:-9])
    with pytest.raises(ValueError, match=r"run/settings.json is not JSON\n  found: .*\n  fix: "):
        keep_settings(tmp_path / "run", SETTINGS)
