"""A folder for what a run trains, and where the platform lets it outlive the machine."""

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
    """Where a run keeps what it trains: `Checkpoints(kept.folder, backup_dir=kept.backup_dir)`.

    Attributes:
        folder: on this machine.
        backup_dir: the folder that outlives the machine; None where there is none, and why has been said.
    """

    folder: Path
    backup_dir: Path | None = None


def run_folder(name: str | os.PathLike, machine: Machine = THIS_MACHINE) -> RunFolder:
    """Make a folder ready for `fit`, and say what of it survives what; call it in the notebook, before `launch`.

    On Colab it asks for Google Drive and mounts it. On Kaggle it takes what an earlier version of the notebook trained,
    if that is attached as an input. Calling it again is fine.

    Args:
        name: of the folder: "run", or "flowers/resnet".
        machine: where the platform's own folders are.

    Raises:
        ValueError: the name is not one of a folder below another.
    """
    if not Path(name).parts or Path(name).is_absolute() or ".." in Path(name).parts:
        raise InvalidValueError(f"the platform decides where the folder is, got {str(name)!r}", fix='run_folder("run")')
    platform = MachineInfo.read(machine).platform
    if platform == "Colab":
        kept = RunFolder(machine.colab / name, _drive(machine.colab / "drive", name))
        says = _COLAB if kept.backup_dir else None
    elif platform == "Kaggle":
        kept = RunFolder(machine.kaggle / "working" / name)
        says = _KAGGLE_BATCH if machine.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch" else _KAGGLE
    else:
        kept = RunFolder(Path(name).absolute())
        says = _ELSEWHERE
    kept.folder.mkdir(parents=True, exist_ok=True)
    if platform == "Kaggle":
        for earlier in _inputs(machine.kaggle / "input", name):
            _take(earlier, kept.folder)
    if says:
        print(says.format(kept=kept))
    return kept


_COLAB = """\
checkpoints go to {kept.folder}, and a copy of each to Google Drive, {kept.backup_dir}
an interrupted cell and a restarted session lose neither
when Colab takes the machine, Drive has all but the last minutes, since it sends files on when it likes"""
_KAGGLE = """\
checkpoints go to {kept.folder}, which is there as long as this session
to keep them beyond it, before it ends: Session options > Persistence > Files only (best effort, says Kaggle)
or Save Version > Save & Run All, which trains on a machine of its own
to go on from such a version in another session: Add Input > this notebook"""
_KAGGLE_BATCH = """\
checkpoints go to {kept.folder}: this is a saved version, and what lies there when it ends is its output
to go on from it in another session: Add Input > this notebook; end in time, with fit(..., max_time="8h30m")"""
_ELSEWHERE = """\
checkpoints go to {kept.folder}, and stay as long as this disk does
a machine that may be taken away needs a second place: Checkpoints(..., backup_dir="gs://bucket/run"),
or another disk's folder"""


def _drive(drive: Path, name: str | os.PathLike) -> Path | None:
    """Mount Google Drive and return a folder in it; None where that is refused."""
    try:
        from google.colab import drive as colab

        colab.mount(str(drive))  # says that it is mounted, where it is
        folder = drive / "MyDrive" / name
        folder.mkdir(parents=True, exist_ok=True)
    except Exception as error:  # MessageError, ValueError, NotImplementedError: whatever Colab makes of a "no"
        print(
            explain(
                "Google Drive is not mounted: what is trained is lost when Colab takes this machine",
                found=f"{type(error).__name__}: {error}",
                fix='run this cell again and allow it, or Checkpoints(..., backup_dir="gs://bucket/run")',
            )
        )
        return None
    return folder


def _take(earlier: Path, folder: Path) -> None:
    """Take what an earlier version has trained there, in the folder and in those in it, and what it has kept beside."""
    for trained in {path.parent for path in (*earlier.glob("step-*.pt"), *earlier.glob("*/step-*.pt"))}:
        Backup(trained).take(CheckpointStore(folder / trained.relative_to(earlier)))
    for kept in (earlier / FILE, *earlier.glob("*/*.npz"), *earlier.glob(f"*/{PLAN}")):
        target = folder / kept.relative_to(earlier)
        if kept.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with write_whole(target) as written, open(kept, "rb") as read:
                shutil.copyfileobj(read, written)


def _inputs(attached: Path, name: str | os.PathLike) -> list[Path]:
    """Return where the output of a notebook, attached as an input, holds such a folder."""
    found = [folder for pattern in ("*", "notebooks/*/*") for folder in attached.glob(f"{pattern}/{Path(name)}")]
    return [folder for folder in found if any((*folder.glob("step-*.pt"), *folder.glob("*/step-*.pt")))]
