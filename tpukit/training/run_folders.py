"""Choose the folder of a run, and its backup folder, by the platform.

Colab      /content/run           backup: MyDrive/run in Google Drive
Kaggle     /kaggle/working/run    no backup; results of an earlier version are copied back
elsewhere  ./run                  no backup
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, explain
from tpukit.essentials.environment import THIS_MACHINE, Machine, MachineInfo, write_whole
from tpukit.training.backup import Backup
from tpukit.training.checkpoints import CheckpointStore
from tpukit.training.run_settings import FILE
from tpukit.training.stored_predictions import PLAN


@dataclass(frozen=True)
class RunFolder:
    """The folders of a run, for `Checkpoints(kept.folder, backup_dir=kept.backup_dir)`.

    Attributes:
        folder: the folder of the run on this machine.
        backup_dir: the backup folder, which outlives the machine. None if the platform has none,
            or if Google Drive could not be mounted; `run_folder` has then printed the reason.
    """

    folder: Path
    backup_dir: Path | None = None


def run_folder(name: str | os.PathLike, machine: Machine = THIS_MACHINE) -> RunFolder:
    """Create the folder of a run, and print how long its checkpoints are kept.

        kept = tpukit.training.run_folder("run")
        checkpoints = tpukit.Checkpoints(kept.folder, backup_dir=kept.backup_dir)

    Call it in the notebook, before `launch`. You may call it again. On Colab, it asks for
    permission and mounts Google Drive. On Kaggle, it copies the results of an earlier version of
    the notebook, if that version is attached as an input and has checkpoints.

    Args:
        name: the name of the folder: "run", or "flowers/resnet".
        machine: the machine whose folders are used. The default is this machine; tests pass
            another one.

    Returns:
        the folder, and the backup folder if the platform has one.

    Raises:
        ValueError: the name is empty, absolute or a URL, or contains "..".
    """
    # As a path, a URL would create a folder "gs:" here.
    if "://" in os.fspath(name):
        raise InvalidValueError(
            f"name must be a folder on this machine, got {os.fspath(name)!r}",
            fix="for a backup at this URL, do not call run_folder: "
            f'tpukit.Checkpoints("run", backup_dir={os.fspath(name)!r})',
        )
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise InvalidValueError(
            'name must be a relative path without "..", because the platform decides where the '
            f"folder is, got {str(name)!r}",
            fix='run_folder("run")',
        )
    platform = MachineInfo.read(machine).platform
    if platform == "Colab":
        kept = RunFolder(machine.colab / name, _drive(machine.colab / "drive", name))
        note = _COLAB if kept.backup_dir else ""
    elif platform == "Kaggle":
        kept = RunFolder(machine.kaggle / "working" / name)
        # Kaggle sets "Batch" for Save & Run All, and "Interactive" for the editor.
        is_version = machine.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch"
        note = _KAGGLE_BATCH if is_version else _KAGGLE
    else:
        kept = RunFolder(Path(name).absolute())
        note = _ELSEWHERE
    kept.folder.mkdir(parents=True, exist_ok=True)
    if platform == "Kaggle":
        for earlier in _inputs(machine.kaggle / "input", name):
            _take(earlier, kept.folder)
    if note:
        print(note.format(kept=kept))
    return kept


_COLAB = """\
checkpoints go to {kept.folder}, and a copy of each to Google Drive, {kept.backup_dir}
an interrupted cell and a restarted session lose neither
when Colab takes the machine, Drive has all but the last minutes, because it uploads later"""
_KAGGLE = """\
checkpoints go to {kept.folder}, which is kept as long as this session lasts
to keep them longer, choose before the session ends: Session options > Persistence > Files only
(Kaggle calls that best effort), or Save Version > Save & Run All, which trains on its own machine
to continue from such a version in another session: Add Input > this notebook"""
_KAGGLE_BATCH = """\
checkpoints go to {kept.folder}: this is a saved version, and its files are its output when it ends
to continue from it in another session: Add Input > this notebook
to end in time: fit(..., max_time="8h30m")"""
_ELSEWHERE = """\
checkpoints go to {kept.folder}, and stay as long as this disk does
if the machine may be taken away, add a second place: Checkpoints(..., backup_dir="gs://bucket/run")
or another disk's folder"""


def _drive(drive: Path, name: str | os.PathLike) -> Path | None:
    """Mount Google Drive and return a folder in it; None if it cannot be mounted."""
    try:
        from google.colab import drive as colab

        colab.mount(str(drive))  # if it is mounted already, this only prints so
        folder = drive / "MyDrive" / name
        folder.mkdir(parents=True, exist_ok=True)
    except Exception as error:  # if the user refuses: MessageError, ValueError and others
        print(
            explain(
                "Google Drive is not mounted: checkpoints are lost when Colab takes this machine",
                found=f"{type(error).__name__}: {error}",
                fix=(
                    "run this cell again and allow it, or "
                    'Checkpoints(..., backup_dir="gs://bucket/run")'
                ),
            )
        )
        return None
    return folder


def _take(earlier: Path, folder: Path) -> None:
    """Copy the results of an earlier version of the notebook into the run's folder.

    These are checkpoints, best.pt, settings, features and predictions. Existing files are kept. But
    best.pt is replaced if the earlier version has a newer checkpoint.
    """
    # A run may have subfolders with checkpoints, such as one per fold. `Backup.take` copies the
    # newest complete checkpoint of each, unless the folder has one of the same or a later step.
    checkpoints = (*earlier.glob("step-*.pt"), *earlier.glob("*/step-*.pt"))
    for trained in {path.parent for path in checkpoints}:
        Backup(trained).take(CheckpointStore(folder / trained.relative_to(earlier)))
    for kept in (earlier / FILE, *earlier.glob("*/*.npz"), *earlier.glob(f"*/{PLAN}")):
        target = folder / kept.relative_to(earlier)
        if kept.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with write_whole(target) as written, open(kept, "rb") as read:
                shutil.copyfileobj(read, written)


def _inputs(attached: Path, name: str | os.PathLike) -> list[Path]:
    """Return the folders of this name with checkpoints, in notebooks attached as inputs."""
    found = []
    # Kaggle mounts a notebook's output as input/NOTEBOOK, or as input/notebooks/OWNER/NOTEBOOK.
    for pattern in ("*", "notebooks/*/*"):
        for notebook in attached.glob(pattern):
            folder = notebook / name
            if any((*folder.glob("step-*.pt"), *folder.glob("*/step-*.pt"))):
                found.append(folder)
    return found
