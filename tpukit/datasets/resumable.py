"""Write a folder in calls that may be ended at any moment; a manifest marks it as finished.

    begun       folder/unfinished/plan.json    everything that decides the contents
                folder/unfinished/...          files that are needed only until the end
                folder/00000-of-00002...       finished files
    finished    folder/manifest.json           written last; `unfinished` is removed

A call with the same plan continues. `begin` with another plan removes the files of the first call.
So `pack` compares the plans first, and raises an error if there are finished files.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tpukit.datasets import locks
from tpukit.datasets.checked_files import remove_parts, seal, unseal, write_file
from tpukit.essentials.display import (
    InvalidValueError,
    PathExistsError,
    PathNotFoundError,
    SystemFailureError,
    TpukitError,
)

UNFINISHED = "unfinished"  # the sub-folder of files that are needed until the manifest is there

_OPENED_BY = {
    "pack": ("PackedImages(folder)", "tpukit.cached_images(PackedImages(folder), ...)"),
    "cache": ("CachedImages(folder)",),
}


def fact(words: str, data: bytes) -> dict:
    """Return a plan's entry for large data: `words` for messages, and a digest to compare."""
    return {"words": words, "digest": hashlib.sha256(data).hexdigest()}


class ResumableFolder:
    """A folder whose writing can be interrupted and continued, even after a reboot.

    The folder stores a plan. A later call with an equal plan continues the work of the first.
    A subclass sets the class attributes. To write, enter `locked()` and call `begin()`, write the
    outputs, and call `finish()`.

    Args:
        folder: a new folder, an empty one, or one that an earlier call has begun.
        plan: all settings that determine the contents, as values that JSON supports. None if the
            folder is only read.

    Attributes:
        kind: the kind of the contents, in messages and in the manifest's format.
        version: the version of the format. Increase it if older versions of tpukit cannot read a
            new folder.
        outputs: patterns of the names of the finished files and folders.
        make: the call that makes such a folder, for messages.
        repair: the fix for a damaged folder, for messages; {folder} stands for the folder.
        manifest_name: the name of the file that is written last.
    """

    kind: str
    version: int
    outputs: tuple[str, ...]
    make: str
    repair: str
    manifest_name = "manifest.json"

    def __init__(self, folder: Path, plan: dict | None = None):
        self.folder = folder
        self.plan = plan
        self.work = folder / UNFINISHED
        self.format = f"tpukit {self.kind} {self.version}"

    @property
    def is_finished(self) -> bool:
        """True if the folder has a manifest, even if it was written for another plan."""
        return (self.folder / self.manifest_name).is_file()

    def read_manifest(self) -> dict:
        """Return the manifest.

        Raises:
            FileNotFoundError: there is no manifest.
            ValueError: the manifest is of another kind or version.
            OSError: the manifest is damaged.
        """
        try:
            data = (self.folder / self.manifest_name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise self._not_finished() from None
        try:
            manifest = unseal(data)
        except ValueError as error:
            if not data or b'"format": "tpukit' in data:
                raise self.damaged(
                    f"{self.manifest_name} is not what was written: {error}"
                ) from error
            manifest = {}  # a file of another program
        if manifest.get("format") != self.format:
            raise self._of_another_kind(manifest.get("format", "something else"))
        return manifest

    def _not_finished(self) -> PathNotFoundError:
        """Return the error for a folder without a manifest."""
        found = "no such folder"
        if self.folder.is_dir():
            found = sorted(os.listdir(self.folder))[:4]
        fix = f"pass the folder that {self.make} has written"
        if self.work.is_dir():
            fix = f"call {self.make} as before: it continues where it was interrupted"
        return PathNotFoundError(
            f"{self.folder} holds no finished {self.kind}", found=found, fix=fix
        )

    def _of_another_kind(self, found: str) -> InvalidValueError:
        """Return the error for a manifest of another format."""
        fix = f"pass a folder that {self.make} has written, or a new one for it to write"
        if found.startswith(f"tpukit {self.kind} "):
            fix = f"call {self.make} again with a new folder; or use the tpukit that wrote this one"
        elif found.startswith("tpukit "):
            kind = found.split()[1]
            fix = f"this folder is for another call: {' or '.join(_OPENED_BY.get(kind, ()))}"
        return InvalidValueError(
            f"{self.folder} holds no {self.kind} that this tpukit can read",
            found=f"a {self.manifest_name} of {found}, not of {self.format}",
            fix=fix,
        )

    def damaged(self, found: str) -> OSError:
        """Return the error for a folder that has changed since it was written."""
        return SystemFailureError(
            f"the {self.kind} in {self.folder} is damaged",
            found=found,
            fix=self.repair.format(folder=self.folder),
        )

    def differences(
        self, plan: dict, *, kind: type[TpukitError] = PathExistsError
    ) -> TpukitError | None:
        """Return the error if `plan`, read from the folder, is not `self.plan`; else None."""
        differences = []
        for key in {**self.plan, **plan}:
            found = plan.get(key)
            asked = self.plan.get(key)
            if _identity(found) != _identity(asked):
                differences.append(_difference(key, found, asked))
        return self.another("; ".join(differences), kind=kind)

    def another(
        self, found: str | None, *, kind: type[TpukitError] = PathExistsError
    ) -> TpukitError | None:
        """Return the error for a folder with other contents; None if `found` is empty.

        Args:
            found: the differences in words.
            kind: the class of the error.
        """
        if not found:
            return None
        state = "" if self.is_finished else ", not finished"
        return kind(
            f"{self.folder} holds another {self.kind}{state}",
            found=found,
            fix=f"name another folder, or delete this one: shutil.rmtree({str(self.folder)!r})",
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and lock it against other processes until the block ends."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise PathExistsError(
                f"{self.folder} cannot be created, because it or a part of its path is a file",
                found=error,
                fix="name a new or empty folder",
            ) from error
        with locks.lock_folder(self.folder):
            yield

    def find_outputs(self) -> list[Path]:
        """Return the files in the folder whose names match `outputs`."""
        found = []
        for pattern in self.outputs:
            found += self.folder.glob(pattern)
        return found

    def unfinished_plan(self) -> dict | None:
        """Return the plan of an unfinished folder; None if there is no plan.

        {} means that a call ended while it cleared the folder, or that the plan has another version
        of the format.
        """
        try:
            begun = json.loads((self.work / "plan.json").read_bytes())
        except FileNotFoundError:
            return None
        if begun.get("format") != self.format:
            return {}
        return begun["plan"]

    def begin(self, *, from_scratch: bool = False) -> None:
        """Write the plan; remove the files of an earlier call with another plan.

        Args:
            from_scratch: True to remove also the files of an earlier call with the same plan.

        Raises:
            FileExistsError: the folder holds files that tpukit has not written.
        """
        begun = self.unfinished_plan()
        if begun is None and not self.is_finished:
            self._refuse_other_files()
        self.remove_parts()
        if begun == self.plan and not self.is_finished and not from_scratch:
            return
        # This process may be killed at any line. In this order, the next call always sees a folder
        # of tpukit that is not finished.
        self.work.mkdir(exist_ok=True)
        plan = self.work / "plan.json"
        write_file(plan, b"{}")
        (self.folder / self.manifest_name).unlink(missing_ok=True)
        for path in (*self.find_outputs(), *self.work.iterdir()):
            if path.is_dir():
                shutil.rmtree(path)
            elif path != plan:
                path.unlink()
        write_file(plan, json.dumps({"format": self.format, "plan": self.plan}).encode())

    def _refuse_other_files(self) -> None:
        """Raise FileExistsError if the folder has files that tpukit has not written."""
        others = sorted(path.name for path in self.folder.iterdir() if path != self.work)
        if self.work.exists():
            # An earlier call may have been ended before it had written the plan.
            for name in os.listdir(self.work):
                if not name.endswith(".part"):
                    others.append(f"{UNFINISHED}/{name}")
        if others:
            fact = f"{self.folder} holds files that are not a {self.kind}'s"
            raise PathExistsError(fact, found=others[:4], fix="name a new or empty folder")

    def finish(self, **facts) -> None:
        """Write the manifest with these facts, and remove all temporary files."""
        self.remove_parts()
        manifest = {"format": self.format, "plan": self.plan, **facts}
        write_file(self.folder / self.manifest_name, seal(manifest))
        self.remove_work()

    def remove_work(self) -> None:
        """Remove the files that were needed only until the folder was finished."""
        shutil.rmtree(self.work, ignore_errors=True)

    def remove_parts(self) -> None:
        """Remove the partly written files of killed processes."""
        remove_parts(self.folder)
        remove_parts(self.work)


def _identity(value):
    """Return the value by which two entries of plans are compared."""
    return value["digest"] if isinstance(value, dict) else value


def _in_words(key: str, value) -> str:
    return value["words"] if isinstance(value, dict) else f"{key} {value}"


def _difference(key: str, found, asked) -> str:
    """Return the difference of an entry of two plans in words."""
    found_words = _in_words(key, found)
    asked_words = _in_words(key, asked)
    # The plans of two kinds of sources, such as a folder and items, have other entries.
    if found is None and isinstance(asked, dict):
        return f"no {key}, asked for {asked_words}"
    if asked is None and isinstance(found, dict):
        return f"{found_words}, asked for no {key}"
    if not isinstance(found, dict) or not isinstance(asked, dict):
        return f"{found_words}, asked for {asked_words.removeprefix(f'{key} ')}"
    if found_words != asked_words:
        return f"{found_words}, asked for {asked_words}"
    if found_words == key:
        return f"other {key}"
    return f"other {key} under the same names: {found_words}"
