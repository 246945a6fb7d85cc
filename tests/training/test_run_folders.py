import sys
import types
from pathlib import Path

import pytest
import torch

from tpukit.essentials.environment import Machine
from tpukit.training import RunFolder, run_folder
from tpukit.training.checkpoints import CheckpointStore


def machine(tmp_path, **environ):
    return Machine(environ, pci=tmp_path, colab=tmp_path / "content", kaggle=tmp_path / "kaggle")


@pytest.fixture
def colab(monkeypatch):
    """Return what `drive.mount` of Colab was called with; `refuse` in it is what it raises."""
    calls, module = [], types.ModuleType("google.colab")

    def mount(path):
        calls.append(path)
        if errors := [call for call in calls if isinstance(call, Exception)]:
            raise errors[0]
        Path(path, "MyDrive").mkdir(parents=True, exist_ok=True)

    module.drive = types.SimpleNamespace(mount=mount)
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", module)
    return calls


def test_on_colab_drive_is_mounted_and_is_the_backup(tmp_path, colab, capsys):
    for _ in range(2):
        kept = run_folder("flowers/run", machine(tmp_path, COLAB_RELEASE_TAG="x"))
        content = tmp_path / "content"
        assert kept == RunFolder(content / "flowers/run", content / "drive/MyDrive/flowers/run")
        assert kept.folder.is_dir()
        assert kept.backup_dir.is_dir()
    assert colab == [str(content / "drive")] * 2
    text = capsys.readouterr().out
    assert "an interrupted cell and a restarted session lose neither" in text
    assert "Drive has all but the last minutes" in text


REFUSALS = [
    ValueError("mount failed"),
    NotImplementedError("unsupported in this environment"),
    RuntimeError("no"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_refusal_is_said_and_asked_again_next_time(error, tmp_path, colab, capsys):
    colab.append(error)
    kept = run_folder("run", machine(tmp_path, COLAB_RELEASE_TAG="x"))
    assert kept == RunFolder(tmp_path / "content/run", None)
    text = capsys.readouterr().out
    assert text.startswith(
        "Google Drive is not mounted: checkpoints are lost when Colab takes this machine\n"
    )
    assert "fix:   run this cell again and allow it" in text
    colab.clear()
    assert run_folder("run", machine(tmp_path, COLAB_RELEASE_TAG="x")).backup_dir  # the fix


def test_colabs_image_without_colab_is_a_refusal(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "google.colab", None)
    assert run_folder("run", machine(tmp_path, COLAB_RELEASE_TAG="x")).backup_dir is None
    assert "Google Drive is not mounted" in capsys.readouterr().out


def test_on_kaggle_it_says_what_keeps_it_in_kaggles_words(tmp_path, capsys):
    kept = run_folder("run", machine(tmp_path, KAGGLE_KERNEL_RUN_TYPE="Interactive"))
    assert kept == RunFolder(tmp_path / "kaggle/working/run", None)
    assert kept.folder.is_dir()
    text = capsys.readouterr().out
    for words in (
        "as long as this session",
        "Persistence > Files only",
        "Save Version > Save & Run All",
        "Add Input",
    ):
        assert words in text
    run_folder("run", machine(tmp_path, KAGGLE_KERNEL_RUN_TYPE="Batch"))
    assert "this is a saved version" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["run", "run [2]"])
@pytest.mark.parametrize("where", ["my-notebook", "notebooks/me/my-notebook"])
def test_on_kaggle_the_output_of_an_earlier_version_is_gone_on_from(where, name, tmp_path, capsys):
    attached = tmp_path / "kaggle/input" / where / name
    attached.parent.mkdir(parents=True)
    checkpoints = CheckpointStore(attached)
    for step in (1, 2):
        checkpoints.save({"step": step}, step=step)
    checkpoints.close()
    torch.save({}, attached / "best.pt")
    # Of the same name, and no checkpoints; and a file beside the notebooks.
    (tmp_path / "kaggle/input/flowers" / name).mkdir(parents=True)
    (tmp_path / "kaggle/input/labels.csv").write_text("")
    before = sorted(attached.iterdir())
    for _ in range(2):
        kept = run_folder(name, machine(tmp_path, KAGGLE_KERNEL_RUN_TYPE="Interactive"))
    assert [path.name[:13] for path in sorted(kept.folder.glob("step-*"))] == ["step-00000002"]
    assert (kept.folder / "best.pt").exists()
    assert sorted(attached.iterdir()) == before
    assert capsys.readouterr().out.count("is taken from the backup") == 1


def test_on_kaggle_a_run_of_several_networks_takes_all_of_them_and_what_lies_beside(tmp_path):
    attached = tmp_path / "kaggle/input/my-notebook/exams"
    for part in ("slices", "exams"):
        checkpoints = CheckpointStore(attached / part)
        checkpoints.save({"step": 1}, step=1)
        checkpoints.close()
    for name in (
        "settings.json",
        "features/predictions.json",
        "features/000000000.npz",
        "features/other",
    ):
        (attached / name).parent.mkdir(exist_ok=True)
        (attached / name).write_text(name)
    for _ in range(2):
        kept = run_folder("exams", machine(tmp_path, KAGGLE_KERNEL_RUN_TYPE="Interactive"))
    assert all(
        len(list((kept.folder / part).glob("step-00000001-*"))) == 1 for part in ("slices", "exams")
    )
    there = {
        path.relative_to(kept.folder).as_posix()
        for path in kept.folder.rglob("*")
        if path.suffix != ".pt"
    }
    assert there - {"slices", "exams", "features"} == {
        "settings.json",
        "features/predictions.json",
        "features/000000000.npz",
    }


def test_elsewhere_it_is_a_plain_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_folder("run", machine(tmp_path)) == RunFolder(tmp_path / "run", None)
    assert (tmp_path / "run").is_dir()
    assert "as long as this disk does" in capsys.readouterr().out


def test_a_url_is_a_backup_and_no_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="got 'gs://b/run'\n  fix: .*backup_dir='gs://b/run'"):
        run_folder("gs://b/run", machine(tmp_path))
    assert not (tmp_path / "gs:").exists()


@pytest.mark.parametrize("name", ["/content/run", "../run", "", "."])
def test_a_name_is_below_the_platforms_folder(name, tmp_path):
    with pytest.raises(ValueError, match="the platform decides where the folder is"):
        run_folder(name, machine(tmp_path))
