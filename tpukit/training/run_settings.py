"""The settings of a run, kept in its folder from its beginning: one folder, one run."""

import json
from collections.abc import Mapping
from pathlib import Path

from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.environment import write_whole

FILE = "settings.json"


def keep_settings(folder, settings: Mapping, *, backup_dir=None) -> Path:
    """Write the settings of a run into its folder before it trains; refuse a folder that holds another run's.

    What is trained there goes on only under the settings it began with: finished weights, found by a run with another
    size of images, would be scored at that size, and said to be of it. Put in what the weights depend on, not what may
    change on the way, such as the number of epochs.

    Args:
        folder: of the run.
        settings: as JSON can carry them.
        backup_dir: the folder that outlives the machine, see `run_folder`; it knows and gets them, too.

    Returns:
        The file, settings.json in the folder.

    Raises:
        ValueError: the folder, or the backup, holds other settings, and those that differ are named; or checkpoints,
            and no settings that say what of.
    """
    asked = json.loads(json.dumps(settings))  # as they will be read: a tuple is a list
    files = [Path(place) / FILE for place in (folder, backup_dir) if place is not None]
    if not any(file.is_file() for file in files):
        _check_untrained(files)
    for file in files:
        if file.is_file():
            kept = _read(file)
            if other := _differences(kept, asked):
                few = "; ".join(other[:6]) + ("; and others" if len(other) > 6 else "")
                raise InvalidValueError(
                    f"{file.parent} holds a run with other settings",
                    found=few,
                    fix="run_path of another folder for this run, or the settings that this one has",
                )
    for file in files:
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            with write_whole(file) as written:
                written.write(json.dumps(asked, indent=1).encode() + b"\n")
    return files[0]


def _check_untrained(files: list[Path]) -> None:
    """Raise ValueError where a folder whose settings are gone holds checkpoints: they may be of other ones."""
    for file in files:
        names = ("step-*.pt", "best.pt", "*/step-*.pt", "*/best.pt")  # its own, and no other run's further down
        for trained in (found for name in names for found in file.parent.glob(name)):
            raise InvalidValueError(
                f"{file.parent} holds what a run has trained, and not its settings",
                found=f"{trained.relative_to(file.parent)}, and no {FILE}",
                fix=f"put its {FILE} back there; or run_path of another folder for this run",
            )


def _read(file: Path):
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        fix = "put back the file that was written when this run began; or run_path of another folder"
        raise InvalidValueError(f"{file} is no JSON", found=error, fix=fix) from None


def _differences(kept, asked, name: str = "") -> list[str]:
    """Say which settings differ, by their names: "images.size 32, asked for 64"."""
    if isinstance(kept, dict) and isinstance(asked, dict):
        return [
            words
            for key in {**kept, **asked}
            for words in _differences(kept.get(key, "unknown"), asked.get(key, "unknown"), f"{name}.{key}".strip("."))
        ]
    return [] if kept == asked else [f"{name} {kept}, asked for {asked}"]
