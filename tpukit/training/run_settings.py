"""Store the settings of a run in its folder, so that no run with other settings uses the folder."""

import json
from collections.abc import Mapping
from pathlib import Path

from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.environment import write_whole

FILE = "settings.json"  # in the folder of the run
# Results of a run. Deeper folders may belong to another run, so they are not searched.
_TRAINED = ("step-*.pt", "best.pt", "*/step-*.pt", "*/best.pt")
_SHOWN = 6  # differences in an error


def keep_settings(folder, settings: Mapping, *, backup_dir=None) -> Path:
    """Write a run's settings into its folder, or raise if the folder has other settings.

        keep_settings("run", {"image_size": 256, "network": "resnet34"})

    Call it before the training. Without it, a run with another image size would resume from the
    finished weights in the folder, evaluate them at the wrong size, and report this result. Include
    the settings that the weights depend on. Leave out settings that may change during a run, such
    as the number of epochs.

    Args:
        folder: the folder of the run.
        settings: a dict with values that JSON supports.
        backup_dir: the backup folder; see `run_folder`. Its settings are compared as well, and
            written if they are missing. None: no backup.

    Returns:
        the path of settings.json in the folder.

    Raises:
        ValueError: the folder or the backup has other settings, and the message names those
            that differ; or it has checkpoints but no settings.
    """
    # Convert as JSON does, so that the settings equal those in a file: a tuple becomes a list.
    asked = json.loads(json.dumps(settings))
    files = [Path(place) / FILE for place in (folder, backup_dir) if place is not None]
    # Check all folders before writing into any, so that an error changes nothing.
    if not any(file.is_file() for file in files):
        _check_untrained(files)
    for file in files:
        if file.is_file():
            _check_same(file, asked)
    # A folder without the file gets it: the new machine after a resume, or a new backup.
    for file in files:
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            with write_whole(file) as written:
                written.write(json.dumps(asked, indent=1).encode() + b"\n")
    return files[0]


def _check_same(file: Path, asked: dict) -> None:
    """Raise ValueError if a file contains other settings than `asked`."""
    differences = _differences(_read(file), asked)
    if not differences:
        return
    found = "; ".join(differences[:_SHOWN])
    if len(differences) > _SHOWN:
        found += "; and others"
    raise InvalidValueError(
        f"{file.parent} holds a run with other settings",
        found=found,
        fix="use the settings of that run, or another folder (run_path) for this run",
    )


def _check_untrained(files: list[Path]) -> None:
    """Raise ValueError if a folder has results, though no folder has settings."""
    for file in files:
        for pattern in _TRAINED:
            for trained in file.parent.glob(pattern):
                raise InvalidValueError(
                    f"{file.parent} holds the results of a run, but not its settings",
                    found=f"{trained.relative_to(file.parent)}, and no {FILE}",
                    fix=f"put {FILE} back into that folder; or use another folder (run_path) "
                    "for this run",
                )


def _read(file: Path):
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise InvalidValueError(
            f"{file} is not JSON",
            found=error,
            fix=(
                "put back the file that was written when this run began; or use another folder "
                "(run_path)"
            ),
        ) from None


def _differences(kept, asked, name: str = "") -> list[str]:
    """Return a text for each setting that differs: "images.size 32, asked for 64"."""
    if not isinstance(kept, dict) or not isinstance(asked, dict):
        return [] if kept == asked else [f"{name} {kept}, asked for {asked}"]
    differences = []
    for key in {**kept, **asked}:
        inner = f"{name}.{key}".strip(".")
        before = kept.get(key, "unknown")
        differences += _differences(before, asked.get(key, "unknown"), inner)
    return differences
