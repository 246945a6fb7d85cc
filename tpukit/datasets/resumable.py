"""A folder filled by calls that may be ended at any moment; it is finished when its manifest is there."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tpukit.datasets import locks
from tpukit.datasets.checked_files import remove_parts, seal, unseal, write_file
from tpukit.essentials.display import InvalidValueError, PathExistsError, PathNotFoundError, SystemFailureError, explain

UNFINISHED = "unfinished"  # the sub-folder of what is only needed until the manifest is there

_OPENED_BY = {
    "pack": ("PackedImages(folder)", "tpukit.cached_images(PackedImages(folder), ...)"),
    "cache": ("CachedImages(folder)",),
}


def fact(words: str, data: bytes) -> dict:
    """Return an entry of a plan that stands for much data: two are the same if their data is, and are told in words."""
    return {"words": words, "digest": hashlib.sha256(data).hexdigest()}


class ResumableFolder:
    """A folder with a plan: the same plan continues where an earlier call was ended, even by the machine.

    What is not finished lies in the sub-folder `work`, with the plan; the manifest is written last. A subclass says
    what the folder holds. To write, be in `locked()`: `begin()`, then the outputs, then `finish()`.

    Args:
        folder: new, empty, or begun with a plan.
        plan: all that decides what is written, as JSON can carry it; not needed for reading.

    Attributes:
        kind: what it holds, in messages and in the manifest's format.
        version: raise it whenever what is written could not be read by what was written before.
        outputs: patterns of the names of the finished files and folders.
        make: the call that makes it, for messages.
        repair: what to do when it is damaged, for messages; {folder} stands for the folder.
        manifest_name: of the file that is written last.
    """

    kind: str
    version: int
    outputs: tuple[str, ...]
    make: str
    repair: str
    manifest_name = "manifest.json"

    def __init__(self, folder: Path, plan: dict | None = None):
        self.folder, self.plan, self.work = folder, plan, folder / UNFINISHED
        self.format = f"tpukit {self.kind} {self.version}"

    @property
    def is_finished(self) -> bool:
        """True when a manifest is there, of whatever plan."""
        return (self.folder / self.manifest_name).is_file()

    def read_manifest(self) -> dict:
        """Return the manifest.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is of something else, or of another version.
            OSError: it is damaged.
        """
        try:
            data = (self.folder / self.manifest_name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            there = sorted(os.listdir(self.folder))[:4] if self.folder.is_dir() else "no such folder"
            fix = f"pass the folder that {self.make} has written"
            if UNFINISHED in there:
                fix = f"call {self.make} as before: it continues where it was interrupted"
            raise PathNotFoundError(f"{self.folder} holds no finished {self.kind}", found=there, fix=fix) from None
        try:
            manifest = unseal(data)
        except ValueError as error:
            if not data or b'"format": "tpukit' in data:
                raise self.damaged(f"{self.manifest_name} is not what was written: {error}") from error
            manifest = {}
        if manifest.get("format") != self.format:
            found = manifest.get("format", "something else")
            fix = f"pass a folder that {self.make} has written, or a new one for it to write"
            if found.startswith(f"tpukit {self.kind} "):
                fix = f"call {self.make} again with a new folder; or use the tpukit that wrote this one"
            elif found.startswith("tpukit "):
                fix = f"this folder is for another call: {' or '.join(_OPENED_BY.get(found.split()[1], ()))}"
            raise InvalidValueError(
                f"{self.folder} holds no {self.kind} that this tpukit can read",
                found=f"a {self.manifest_name} of {found}, not of {self.format}",
                fix=fix,
            )
        return manifest

    def damaged(self, found: str) -> OSError:
        """Return the error to raise where the folder is no longer what was written."""
        fix = self.repair.format(folder=self.folder)
        return SystemFailureError(f"the {self.kind} in {self.folder} is damaged", found=found, fix=fix)

    def differences(self, plan: dict) -> str | None:
        """Say in what the plan of this folder, as it was found there, is not the one asked for; None: in nothing."""
        keys = {**self.plan, **plan}
        differing = [key for key in keys if _identity(plan.get(key)) != _identity(self.plan.get(key))]
        return self.another("; ".join(_difference(key, plan.get(key), self.plan.get(key)) for key in differing))

    def another(self, found: str | None) -> str | None:
        """Return the text of the error to raise where something else was found in the folder; None: nothing was."""
        return found and explain(
            f"{self.folder} holds another {self.kind}{'' if self.is_finished else ', not finished'}",
            found=found,
            fix=f"name another folder, or delete this one: shutil.rmtree({str(self.folder)!r})",
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and be the only process in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locks.lock_folder(self.folder):
            yield

    def find_outputs(self) -> list[Path]:
        """Return what is there under the names of finished files."""
        return [path for pattern in self.outputs for path in self.folder.glob(pattern)]

    def unfinished_plan(self) -> dict | None:
        """Return the plan of what is not finished; {} where it is being cleared, None where nothing was begun."""
        try:
            begun = json.loads((self.work / "plan.json").read_bytes())
        except FileNotFoundError:
            return None
        return begun["plan"] if begun.get("format") == self.format else {}

    def begin(self, *, from_scratch: bool = False) -> None:
        """Clear what an earlier call with another plan has left, and write the plan; with the same plan, go on.

        Args:
            from_scratch: clear what a call with the same plan has left, too.

        Raises:
            FileExistsError: the folder holds somebody's files.
        """
        begun = self.unfinished_plan()
        if begun is None and not self.is_finished:
            others = sorted(path.name for path in self.folder.iterdir() if path != self.work)
            if self.work.exists():  # ours, if a call was ended before it had written the plan
                others += [f"{UNFINISHED}/{name}" for name in os.listdir(self.work) if not name.endswith(".part")]
            if others:
                fact = f"{self.folder} holds files that are not a {self.kind}'s"
                raise PathExistsError(fact, found=others[:4], fix="name a new or empty folder")
        self.remove_parts()
        if begun == self.plan and not self.is_finished and not from_scratch:
            return
        # In this order, so that the folder is known as ours, and as not finished, whatever ends this process here.
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

    def finish(self, **facts) -> None:
        """Write the manifest, the last thing that is missing, and remove what was needed until now."""
        self.remove_parts()
        write_file(self.folder / self.manifest_name, seal({"format": self.format, "plan": self.plan, **facts}))
        self.remove_work()

    def remove_work(self) -> None:
        """Remove what was only needed until the folder was finished."""
        shutil.rmtree(self.work, ignore_errors=True)

    def remove_parts(self) -> None:
        """Remove the beginnings of files that killed processes have left."""
        remove_parts(self.folder)
        remove_parts(self.work)


def _identity(value):
    return value["digest"] if isinstance(value, dict) else value


def _difference(key: str, found, asked) -> str:
    """Say in what an entry of a plan differs."""
    if not (isinstance(found, dict) and isinstance(asked, dict)):
        found, asked = (value["words"] if isinstance(value, dict) else f"{key} {value}" for value in (found, asked))
        return f"{found}, asked for {asked.removeprefix(f'{key} ')}"
    if found["words"] == asked["words"]:
        return f"other {key}" if key == found["words"] else f"other {key} under the same names: {found['words']}"
    return f"{found['words']}, asked for {asked['words']}"
