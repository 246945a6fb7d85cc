"""A folder filled by calls that may be ended at any moment; it is finished when its manifest is there."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tpukit.storage.files import lock_folder, remove_parts, seal, unseal, write_file

UNFINISHED = "unfinished"  # the sub-folder of what is only needed until the manifest is there


@dataclass(frozen=True)
class Kind:
    """What such a folder holds: a pack, a cache or a phantom.

    Attributes:
        name: in messages, and in the manifest's format.
        version: raise it whenever what is written could not be read by what was written before.
        outputs: patterns of the names of the finished files and folders.
        make: the call that makes it, for messages.
        repair: what to do when it is damaged, for messages; {folder} stands for the folder.
        manifest: the name of the file that is written last.
    """

    name: str
    version: int
    outputs: tuple[str, ...]
    make: str
    repair: str
    manifest: str = "manifest.json"

    @property
    def format(self) -> str:
        """What the manifest says it is."""
        return f"tpukit {self.name} {self.version}"

    def is_finished(self, folder: Path) -> bool:
        """Tell whether there is a manifest."""
        return (folder / self.manifest).is_file()

    def read_manifest(self, folder: Path) -> dict:
        """Return the manifest of a finished folder.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is another program's, another kind's or another version's.
            OSError: it is damaged.
        """
        try:
            data = (folder / self.manifest).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            there = sorted(os.listdir(folder))[:4] if folder.is_dir() else "no such folder"
            fix = f"call {self.make} as before: it goes on where it was interrupted"
            if UNFINISHED not in there:
                fix = f"pass the folder that {self.make} has written"
            raise FileNotFoundError(
                f"{folder} holds no finished {self.name}\n  found: {there}\n  fix:   {fix}"
            ) from None
        try:
            manifest = unseal(data)
        except ValueError as error:
            if _is_foreign(data):
                manifest = {}
            else:
                raise self.damaged(folder, f"{self.manifest} is not what was written: {error}") from error
        if manifest.get("format") != self.format:
            raise ValueError(
                f"{folder} holds no {self.name} that this tpukit can read\n"
                f"  found: a {self.manifest} of {manifest.get('format') or 'something else'}, not of {self.format}\n"
                f"  fix:   pass a folder that {self.make} has written, or a new one for it to write"
            )
        return manifest

    def damaged(self, folder: Path, found: str) -> OSError:
        """Return the error to raise for a folder that is no longer what was written."""
        fix = self.repair.format(folder=folder)
        return OSError(f"the {self.name} in {folder} is damaged\n  found: {found}\n  fix:   {fix}")


class ResumableFolder:
    """A folder with a plan: the same plan goes on where an earlier call was ended, even by the machine.

    What is not finished lies in the sub-folder `work`, with the plan; the manifest comes last. Use it in `locked()`.

    Args:
        kind: what the folder is to hold.
        folder: new, empty, or begun with a plan.
        plan: all that decides what is written, as JSON can carry it.
    """

    def __init__(self, kind: Kind, folder: Path, plan: dict):
        self.kind, self.folder, self.plan = kind, folder, plan
        self.work = folder / UNFINISHED

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and be the only process in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.folder):
            yield

    @property
    def is_finished(self) -> bool:
        """True when the manifest is there, of whatever plan."""
        return self.kind.is_finished(self.folder)

    @property
    def outputs(self) -> list[Path]:
        """What is there under the names of finished files."""
        return sorted(path for pattern in self.kind.outputs for path in self.folder.glob(pattern))

    def begun(self) -> dict | None:
        """Return the plan of what is not finished; {} where it is being cleared, None where nothing was begun."""
        try:
            begun = json.loads((self.work / "plan.json").read_bytes())
        except FileNotFoundError:
            return None
        return begun["plan"] if begun.get("format") == self.kind.format else {}

    def differences(self, found: dict) -> str | None:
        """Say in what another plan differs from this one; None if in nothing."""
        differing = [key for key in {**self.plan, **found} if found.get(key) != self.plan.get(key)]
        if not differing:
            return None
        parts = "; ".join(f"{key} {found.get(key)}, asked for {self.plan.get(key)}" for key in differing)
        return (
            f"{self.folder} holds another {self.kind.name}{'' if self.is_finished else ', not finished'}\n"
            f"  found: {parts}\n"
            f"  fix:   name another folder, or delete this one: shutil.rmtree({str(self.folder)!r})"
        )

    def begin(self, *, anew: bool = False) -> None:
        """Clear what an earlier call with another plan has left, and write the plan; with the same plan, go on.

        Args:
            anew: clear what a call with the same plan has left, too.

        Raises:
            FileExistsError: the folder holds somebody's files.
        """
        begun = self.begun()
        if begun is None and not self.is_finished:
            others = sorted(path.name for path in self.folder.iterdir() if path != self.work)
            if self.work.exists():  # ours, if a call was ended before it wrote the plan
                others += [f"{UNFINISHED}/{name}" for name in os.listdir(self.work) if not name.endswith(".part")]
            if others:
                raise FileExistsError(
                    f"{self.folder} holds files that are not a {self.kind.name}'s\n"
                    f"  found: {others[:4]}\n  fix:   name a new or empty folder"
                )
        self.remove_parts()
        if begun == self.plan and not self.is_finished and not anew:
            return
        # In this order, so that the folder is known as ours, and as not finished, whatever ends this process here.
        self.work.mkdir(exist_ok=True)
        plan = self.work / "plan.json"
        write_file(plan, b"{}")
        old = (self.folder / self.kind.manifest, *self.outputs, *(path for path in self.work.iterdir() if path != plan))
        for path in old:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        write_file(plan, json.dumps({"format": self.kind.format, "plan": self.plan}).encode())

    def finish(self, **facts) -> None:
        """Write the manifest, which is the last thing that is missing, and remove what was needed until now."""
        self.remove_parts()
        manifest = {"format": self.kind.format, "plan": self.plan, **facts}
        write_file(self.folder / self.kind.manifest, seal(manifest))
        self.remove_work()

    def remove_work(self) -> None:
        """Remove what was only needed until the folder was finished."""
        shutil.rmtree(self.work, ignore_errors=True)

    def remove_parts(self) -> None:
        """Remove the beginnings of files that killed processes have left."""
        remove_parts(self.folder)
        remove_parts(self.work)


def _is_foreign(data: bytes) -> bool:
    """Tell whether this is whole JSON that was never sealed."""
    try:
        return "crc" not in json.loads(data)
    except (ValueError, TypeError):
        return False
