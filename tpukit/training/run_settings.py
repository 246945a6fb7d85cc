"""Store the settings of a run in its folder, so that no run with other settings uses the folder."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, SystemFailureError
from tpukit.essentials.environment import write_whole
from tpukit.training.backup import UrlPlace, refuse_unmounted

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
        backup_dir: the backup folder, whose parent must exist, or its URL, as for `Checkpoints`.
            Its settings are compared as well, and written if it is empty. None: no backup.

    Returns:
        the path of settings.json in the folder.

    Raises:
        ValueError: the folder or the backup has other settings, and the message names those
            that differ; or one of them has checkpoints or best.pt, but no settings; or `folder` is
            a URL.
        TypeError: JSON does not support a value, such as a number of numpy.
        OSError: the folder or the backup cannot be read or written.
        NotInstalledError: the package for the URL of the backup is missing.
    """
    _refuse_url(folder)
    # Convert as JSON does, so that the settings equal those in a file: a tuple becomes a list.
    asked = json.loads(json.dumps(settings))
    own = _Folder(folder)
    places = [own]
    if backup_dir is not None:
        if "://" in os.fspath(backup_dir):
            backup = _Bucket(os.fspath(backup_dir))
        else:
            backup = _Folder(backup_dir)
            refuse_unmounted(backup.folder)
        places.append(backup)
    # Check all folders before writing into any, so that an error changes nothing.
    stored = {place: place.read() for place in places}
    for place, text in stored.items():
        if text is None:
            _check_untrained(place)
        else:
            _check_same(place, text, asked)
    # An empty folder gets the file: that of a new machine, or a new backup.
    for place, text in stored.items():
        if text is None:
            place.write(json.dumps(asked, indent=1).encode() + b"\n")
    return own.folder / FILE


class _Folder:
    """A folder with settings on this machine or on a mounted drive."""

    def __init__(self, folder):
        self.folder = Path(folder).expanduser()  # as `Checkpoints` does

    def __str__(self) -> str:
        return str(self.folder)

    def read(self) -> bytes | None:
        """Return the settings as JSON; None if there are none."""
        file = self.folder / FILE
        return file.read_bytes() if file.is_file() else None

    def write(self, data: bytes) -> None:
        """Write the settings."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with write_whole(self.folder / FILE) as written:
            written.write(data)

    def trained(self) -> str | None:
        """Return the name of a result in the folder; None if there is none."""
        for pattern in _TRAINED:
            for found in self.folder.glob(pattern):
                return str(found.relative_to(self.folder))
        return None


class _Bucket:
    """A folder with settings at a URL, in the same place as the backup of `Checkpoints`."""

    def __init__(self, address: str):
        self._address = address.rstrip("/")
        self._place = UrlPlace(self._address)

    def __str__(self) -> str:
        return self._address

    def read(self) -> bytes | None:
        with self._connected():
            return self._place.read(FILE)

    def write(self, data: bytes) -> None:
        with self._connected():
            self._place.write(FILE, data)

    def trained(self) -> str | None:
        with self._connected():
            return self._place.find(_TRAINED)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            self._place.connect()
            yield
        except Exception as error:  # buckets and networks raise errors of any type
            raise SystemFailureError(
                f"the settings in {self} cannot be read or written",
                found=f"{type(error).__name__}: {error}",
                fix="check the address, and that this machine may write there; "
                "or leave out backup_dir= in keep_settings and in `Checkpoints`",
            ) from error


def _refuse_url(folder) -> None:
    """Raise ValueError for a URL; used as a path, it would create a folder "gs:" here."""
    if "://" in os.fspath(folder):
        raise InvalidValueError(
            f"folder must be a path on this machine, got {os.fspath(folder)!r}",
            fix=f'keep_settings("run", settings, backup_dir={os.fspath(folder)!r})',
        )


def _check_same(place: _Folder | _Bucket, text: bytes, asked: dict) -> None:
    """Raise ValueError if a folder has other settings than `asked`."""
    differences = _differences(_decoded(place, text), asked)
    if not differences:
        return
    found = "; ".join(differences[:_SHOWN])
    if len(differences) > _SHOWN:
        found += "; and others"
    raise InvalidValueError(
        f"{place} holds a run with other settings",
        found=found,
        fix="use the settings of that run, or another folder "
        "(in tpukit's notebooks: another run_path)",
    )


def _check_untrained(place: _Folder | _Bucket) -> None:
    """Raise ValueError if a folder has results."""
    trained = place.trained()
    if trained:
        raise InvalidValueError(
            f"{place} holds the results of a run, but not its settings",
            found=f"{trained}, and no {FILE}",
            fix=f"put {FILE} back into that folder; or use another folder (in tpukit's notebooks: "
            "another run_path)",
        )


def _decoded(place: _Folder | _Bucket, text: bytes):
    """Return the settings in the JSON of a folder."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidValueError(
            f"{place}/{FILE} is not JSON",
            found=error,
            fix=(
                "put back the file that was written when this run began; or use another folder "
                "(in tpukit's notebooks: another run_path)"
            ),
        ) from None


def _differences(kept, asked, name: str = "") -> list[str]:
    """Return a text for each setting that differs: "images.size 32, asked for 64"."""
    if not isinstance(kept, dict) or not isinstance(asked, dict):
        # In Python NaN does not equal NaN, but their JSON does.
        is_same = kept == asked or json.dumps(kept) == json.dumps(asked)
        return [] if is_same else [f"{name} {kept}, asked for {asked}"]
    differences = []
    for key in {**kept, **asked}:
        inner = f"{name}.{key}".strip(".")
        before = kept.get(key, "unknown")
        differences += _differences(before, asked.get(key, "unknown"), inner)
    return differences
