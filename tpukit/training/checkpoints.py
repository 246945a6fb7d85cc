"""Checkpoints that survive: one rename makes a file whole, its name holds its checksum, a thread writes it."""

import contextlib
import errno
import os
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.display.tables import human_size

_NAME = re.compile(r"step-(\d{8,})(-best)?-([0-9a-f]{8})\.pt")


class CannotSave(OSError):
    """A checkpoint, or its folder, cannot be written."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that was read and found whole; `state` is what was saved, its tensors in host memory."""

    path: Path
    step: int
    best: bool
    state: dict = field(repr=False)


@dataclass(frozen=True, order=True)
class _File:
    step: int
    written: int  # nanoseconds; of two files of a step the later one counts
    best: bool
    crc32: int
    bytes: int
    path: Path


class Checkpoints:
    """The checkpoints in a folder, saved in the background; the last few and the best are kept.

    A file is `step-00001200-1a2b3c4d.pt`, or `step-00001200-best-1a2b3c4d.pt`: a plain `torch.save` whose CRC-32 is in
    its name, so that whoever finds it can tell whether it is whole; `torch.load(path, weights_only=True)` reads it on
    any machine. Whatever else lies in the folder is left alone. One process at a time saves there, core 0; others may
    read. `close()` before the worker function returns: a save that still goes on then is lost.

    Args:
        folder: made if it is not there. What writers that were killed have left in it is removed.
        keep: how many of the last to keep, 1 or more; the best is kept besides. Nothing is removed before a new one is
            complete, so the disk holds up to `keep` + 2.

    Raises:
        CannotSave: the folder cannot be made or written to.
        ValueError: `keep` is less than 1.
    """

    def __init__(self, folder: str | os.PathLike, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep is how many of the last checkpoints stay, at least 1, got {keep}")
        self.folder = Path(folder).expanduser().absolute()
        self.keep = keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._damaged: set[Path] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            reason = None if os.access(self.folder, os.R_OK | os.W_OK | os.X_OK) else "it cannot be written to"
        except OSError as error:
            reason = error.strerror
        if reason:
            raise CannotSave(
                f"no checkpoints can be saved in {self.folder}: {reason}\n"
                "  fix:   a folder that can be written; to go on from checkpoints in one that cannot, copy it first:\n"
                f"         shutil.copytree({str(folder)!r}, 'checkpoints')"
            )
        _remove_leftovers(self.folder)

    @property
    def paths(self) -> list[Path]:
        """The complete files, the newest last; they were whole when they were written and are not read here."""
        return [file.path for file in self._files()]

    def __repr__(self) -> str:
        files = self._files()
        steps = ", ".join(f"{file.step:,}" + " (best)" * file.best for file in files)
        there = f"{human_size(sum(file.bytes for file in files))} of steps {steps}" if files else "none yet"
        saving = "; one is being saved" if self._thread and self._thread.is_alive() else ""
        return f"Checkpoints({str(self.folder)!r}, keep={self.keep}): {there}{saving}"

    # ---- writing -----------------------------------------------------------------------------------------------

    def save(self, state: dict, *, step: int, best: bool = False) -> None:
        """Save a state in the background; waits only for a save that is still under way.

        The state is written while training goes on: hand over tensors that nothing will change, not the live ones.
        A second save of a step takes the place of the first.

        Args:
            state: dicts, lists and tuples of plain values and tensors in host memory; what state_dicts are made of.
            step: training steps done, 0 or more.
            best: the best so far: it stays until another is, and `best()` finds it.

        Raises:
            CannotSave: the save before this one failed, the disk being full; this one was not begun.
            TypeError: the state holds something that `torch.load(weights_only=True)` would refuse; the key is named.
            ValueError: the folder holds a later step, or a tensor is not in host memory.
        """
        _check_state(state, "state")
        if step < 0:
            raise ValueError(f"step is the number of training steps done, 0 or more, got {step}")
        self.close()
        later = [file for file in self._files() if file.step > step and file.path not in self._damaged]
        if later:  # beside it this one would be neither the newest nor kept
            raise ValueError(
                f"step {step:,} cannot be saved beside a later one of step {later[-1].step:,}\n"
                f"  found: {later[-1].path}\n"
                "  fix:   go on from that one, or give this run a folder of its own"
            )
        # A thread a save, not a pool: a pool made before a fork has no thread in the child, and would wait for ever.
        self._thread = threading.Thread(target=self._write, args=(state, step, best), name="tpukit-checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a save that has failed, once; does not wait for one that is under way.

        Raises:
            CannotSave: the disk is full, or the folder is gone; the message names the newest complete checkpoint.
        """
        error, self._error = self._error, None
        if error:
            raise error

    def close(self) -> None:
        """Wait until the last save is complete; saving again afterwards is allowed.

        Raises:
            CannotSave: as `check`.
        """
        if self._thread:
            self._thread.join()
        self.check()

    def _write(self, state: dict, step: int, best: bool) -> None:
        import torch

        unfinished = self.folder / f".step-{step:08}.{os.getpid()}.unfinished"
        through = None
        try:
            with _open_locked(unfinished) as file:
                through = _Through(file)
                torch.save(state, through)
                file.flush()
                os.fsync(file.fileno())
                if os.name == "nt":  # which renames no open file; elsewhere it stays locked until it has its name
                    file.close()
                path = self.folder / f"step-{step:08}{'-best' * best}-{through.crc32:08x}.pt"
                os.replace(unfinished, path)
            self._damaged.discard(path)  # a resumed run comes to the same bytes, and so mends it
            _sync_folder(self.folder)
            self._prune()
        except Exception as error:  # of any kind: it is raised where the caller sees it
            # torch turns an error of the file into one of its own, about positions.
            self._error = self._explained((through and through.error) or error, step, through.bytes if through else 0)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _explained(self, error: Exception, step: int, written: int) -> Exception:
        """Make an error of the thread into fact, evidence, fix."""
        paths = self.paths
        facts = f"the newest complete one is {paths[-1].name if paths else 'none'}"
        if not isinstance(error, OSError):
            error.add_note(f"this was the checkpoint of step {step:,}; {facts}")
            return error
        fix = "make that folder again, or take another; then save again"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = f"make room there, or keep=1 (now {self.keep}), or a folder on another disk; then save again"
        explained = CannotSave(
            f"the checkpoint of step {step:,} could not be written: {(error.strerror or str(error)).lower()}\n"
            f"  found: {written / 1e6:,.1f} MB were written to {self.folder}; {facts}\n"
            f"  fix:   {fix}"
        )
        explained.errno, explained.__cause__ = error.errno, error
        return explained

    def _prune(self) -> None:
        files = [file for file in self._files() if file.path not in self._damaged]
        last = list({file.step: file for file in files}.values())[-self.keep :]
        best = [file for file in files if file.best][-1:]
        for file in files:
            if file not in (*last, *best):
                with contextlib.suppress(OSError):  # Windows, while another process reads it: the next save tries again
                    file.path.unlink()

    # ---- reading -----------------------------------------------------------------------------------------------

    def newest(self, *, say: Callable[[str], object] = print) -> Checkpoint | None:
        """Load the newest checkpoint that is whole, or return None where there is none.

        Damaged ones are left where they are, and told.

        Args:
            say: is called with one line for every checkpoint that is skipped.
        """
        return self._first_whole(lambda file: True, say)

    def best(self, *, say: Callable[[str], object] = print) -> Checkpoint | None:
        """Load the last checkpoint that was saved as the best, or return None; otherwise as `newest`."""
        return self._first_whole(lambda file: file.best, say)

    def _first_whole(self, wanted: Callable[[_File], bool], say: Callable[[str], object]) -> Checkpoint | None:
        import torch

        if self._thread:  # an error of it waits for `save`, `check` or `close`
            self._thread.join()
        for file in filter(wanted, reversed(self._files())):
            try:
                found = _crc32(file.path)
                reason = f"damaged, its checksum is {found:08x}" if found != file.crc32 else None
            except OSError as error:
                reason = f"it cannot be read, {str(error.strerror).lower()}"
            if reason is None:
                # Whole, so an error from here is no damage (too little memory, say), and an older one no answer to it.
                state = torch.load(file.path, map_location="cpu", weights_only=True)
                return Checkpoint(file.path, file.step, file.best, state)
            self._damaged.add(file.path)
            say(f"checkpoint {file.path.name} is skipped: {reason}")
        return None

    def _files(self) -> list[_File]:
        """List the complete files, the newest last."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():  # it may have been removed
            if match := _NAME.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another process has just pruned it
                    status = path.stat()
                    step, best, crc32 = int(match[1]), bool(match[2]), int(match[3], 16)
                    found.append(_File(step, status.st_mtime_ns, best, crc32, status.st_size, path))
        return sorted(found)


def check_architecture(model_state: Mapping, saved_state: Mapping, *, saved: str = "the checkpoint") -> None:
    """Refuse a saved `state_dict` whose names or shapes are not the model's.

    Raises:
        ValueError: it is of another architecture; says how many differ, and the first few.
    """
    common = [name for name in model_state if name in saved_state]
    shapes = {name: (_shape(saved_state[name]), _shape(model_state[name])) for name in common}
    differences = {
        "missing in it": [name for name in model_state if name not in saved_state],
        "unknown to the model": [name for name in saved_state if name not in model_state],
        "of another shape": [f"{name} {its} for {own}" for name, (its, own) in shapes.items() if its != own],
    }
    lines = [f"  found: {len(names)} {how}: {_first(names)}\n" for how, names in differences.items() if names]
    if lines:
        raise ValueError(
            f"{saved} is of another architecture than the model, which has {len(model_state)} tensors\n"
            + "".join(lines)
            + "  fix:   make the model as it was when that was saved, or give this run a folder of its own"
        )


def _shape(value: object) -> tuple:
    return tuple(getattr(value, "shape", ()))


def _first(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + ", ..." * (len(names) > count)


def _check_state(value: object, where: str) -> None:
    """Raise for what `torch.load(weights_only=True)` would not load, before an hour's work depends on it."""
    import collections

    import torch

    # By exact type: numpy.float64 is a float, a namedtuple a tuple, and neither loads.
    kind = type(value)
    if kind in (dict, collections.OrderedDict, collections.Counter):
        for key, part in value.items():
            _check_state(key, f"the key {key!r} of {where}")
            _check_state(part, f"{where}[{key!r}]")
    elif kind in (list, tuple, set, torch.Size):
        for index, part in enumerate(value):
            _check_state(part, f"{where}[{index}]")
    elif kind in (torch.Tensor, torch.nn.Parameter) and not value.__dict__:
        if value.device.type != "cpu":
            raise ValueError(
                f"{where} is on {value.device}, and a checkpoint is written while the device goes on\n"
                "  fix:   save copies in host memory: tensor.cpu()"
            )
    elif kind not in (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device):
        kind = f"{kind.__module__}.{kind.__qualname__}" + " with attributes" * isinstance(value, torch.Tensor)
        raise TypeError(
            f"{where} is a {kind}, which torch.load(weights_only=True) does not load\n"
            "  fix:   save plain values and tensors: float(number), torch.from_numpy(array), module.state_dict()"
        )


class _Through:
    """A file for `torch.save` that knows the CRC-32 of what went through it, which is all of it and in order."""

    def __init__(self, file):
        self._file = file
        self.crc32, self.bytes, self.error = 0, 0, None

    def write(self, data) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(2**20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk, too; where a folder cannot be synced, the system does it in its own time."""
    with contextlib.suppress(OSError):  # Windows opens no folder, some network drives sync none
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _lock(file, *, wait: bool) -> None:
    """Lock an open file until it is closed, by its process's death at the latest.

    Better than the number of the process in the file's name, which another process may have by now.

    Raises:
        OSError: another has it locked, or the drive knows no locks.
    """
    with contextlib.suppress(ImportError):  # Windows: no locks, and no file is deleted while it is open
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _open_locked(path: Path):
    """Open a file to write to, which nobody takes for a leftover while this process lives."""
    while True:
        file = path.open("wb")
        with contextlib.suppress(OSError):
            _lock(file, wait=True)
        if _is_at(file, path):
            return file
        file.close()  # somebody took it for a leftover before it was locked


def _is_at(file, path: Path) -> bool:
    """Say whether an open file still bears the name it was opened by."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(".step-*.unfinished"):
        with contextlib.suppress(OSError):  # a living process has it, or it is gone already
            if os.name == "nt":
                path.unlink()
                continue
            with path.open("rb") as file:
                _lock(file, wait=False)
                if _is_at(file, path):
                    path.unlink()
