"""Checkpoints that survive a kill at any moment: written by a thread, renamed when whole, the checksum in the name."""

import contextlib
import errno
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.datasets import locks
from tpukit.essentials.display import InvalidTypeError, InvalidValueError, TpukitError
from tpukit.essentials.environment import write_whole
from tpukit.essentials.launcher import save_tensors

_NAME = re.compile(r"step-(\d{8,})(-best)?-([0-9a-f]{8})\.pt")
# A run that was interrupted or killed is gone within this time, so that the same cell can be run again at once.
_SECONDS_TO_WAIT = 5.0


class CheckpointError(TpukitError, OSError):
    """A checkpoint, or its folder, cannot be written."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that was read and whose checksum is right; `state` is what was saved, tensors in host memory."""

    path: Path
    step: int
    state: dict = field(repr=False)


@dataclass(frozen=True, order=True)
class _File:
    step: int
    written: int  # nanoseconds; of two files of one step the later one counts
    best: bool
    crc32: int
    path: Path


class Checkpoints:
    """The checkpoints in a folder, saved in the background; the newest few and the best are kept.

    A file is `step-00001200-1a2b3c4d.pt`, or `step-00001200-best-1a2b3c4d.pt`: a plain `torch.save` whose CRC-32 is in
    its name, so that every reader can check whether it is whole; `torch.load(path, weights_only=True)` reads it on any
    machine. Other files in the folder are left alone. One process at a time saves there, core 0; others may read. Call
    `close()` before the worker function returns: a save that is not complete by then is lost.

    Args:
        folder: created if it does not exist. Unfinished files of processes that were killed are removed from it.
        keep: how many of the newest to keep, 1 or more; the best is kept in addition. Nothing is removed before a new
            one is complete, so the disk holds up to `keep` + 2.
        on_saved: called with every file that is complete, from the thread that wrote it.

    Raises:
        CheckpointError: the folder cannot be made or written to.
        ValueError: `keep` is less than 1.
    """

    def __init__(
        self, folder: str | os.PathLike, keep: int = 3, *, on_saved: Callable[[Path], object] = lambda path: None
    ):
        if keep < 1:
            raise ValueError(f"keep is how many of the newest checkpoints stay, at least 1, got {keep}")
        self.folder = Path(folder).expanduser().absolute()
        self.keep, self._on_saved = keep, on_saved
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._damaged: set[Path] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            reason = None if os.access(self.folder, os.R_OK | os.W_OK | os.X_OK) else "it cannot be written to"
        except OSError as error:
            reason = error.strerror
        if reason:
            raise CheckpointError(
                f"no checkpoints can be saved in {self.folder}: {reason}",
                fix=(
                    "a folder that can be written; to resume from checkpoints in this one, copy it first:"
                    f"\nshutil.copytree({str(folder)!r}, 'checkpoints')"
                ),
            )
        locks.remove_unclaimed(self.folder.glob(".step-*.unfinished"))

    @property
    def paths(self) -> list[Path]:
        """The complete files, the newest last; their checksums are not checked here."""
        return [file.path for file in self._files()]

    def save(self, state: dict, *, step: int, best: bool = False) -> None:
        """Save a state in the background; waits only for a save that is still under way.

        The state is written while training continues, so pass tensors that nothing will change: copies, not the model's
        own. A second save of a step replaces the first.

        Args:
            state: dicts, lists and tuples of plain values and tensors in host memory; what state_dicts are made of.
            step: training steps done, 0 or more.
            best: whether this is the best so far: it is kept until a better one is saved.

        Raises:
            CheckpointError: the save before this one failed, for example on a full disk; this one was not begun.
            TypeError: the state holds something that `torch.load(weights_only=True)` would refuse; the key is named.
            ValueError: the folder holds a later step, or a tensor is not in host memory.
        """
        _check_state(state, "state")
        if step < 0:
            raise ValueError(f"step is the number of training steps done, 0 or more, got {step}")
        self.close()
        later = [file for file in self._files() if file.step > step and file.path not in self._damaged]
        if later:  # then this one would neither be found by `newest` nor survive the next pruning
            raise InvalidValueError(
                f"step {step:,} cannot be saved after a later one, of step {later[-1].step:,}",
                found=later[-1].path,
                fix="resume from that one, or give this run a folder of its own",
            )
        # A new thread for each save, not a pool: a pool made before a fork has no thread in the child, and its first
        # task there would wait for ever.
        self._thread = threading.Thread(target=self._write, args=(state, step, best), name="tpukit-checkpoint")
        self._thread.start()

    def close(self) -> None:
        """Wait until the last save is complete; saving again afterwards is allowed.

        Raises:
            CheckpointError: it failed, as is said once: the disk is full, or the folder is gone; the message names the
                newest complete checkpoint.
        """
        if self._thread:
            self._thread.join()
        error, self._error = self._error, None
        if error:
            raise error

    def _write(self, state: dict, step: int, best: bool) -> None:
        unfinished = self._unfinished(step)
        file = None

        def path() -> Path:
            return self.folder / f"step-{step:08}{'-best' * best}-{file.crc32:08x}.pt"

        try:
            with locks.claim(unfinished), write_whole(path, part=unfinished, sync_folder=True) as binary:
                file = _ChecksummedFile(binary)
                save_tensors(state, file)
            # A resumed run that reaches this step again writes the same bytes, so the file is whole again.
            self._damaged.discard(path())
            self._prune()
            self._on_saved(path())
        except Exception as error:  # of any kind: `save` and `close` raise it where the caller sees it
            # The disk's own error: torch raises another one in its place, about positions in the file.
            self._error = self._explained((file and file.error) or error, step, file.bytes if file else 0)

    def receive(self, name: str, pieces: Iterable[bytes]) -> bool:
        """Write a checkpoint that comes from elsewhere, under its name; return whether it was whole, keep it only then.

        Raises:
            CheckpointError: it could not be written.
        """
        step, wanted, file = step_of(name), int(name[-11:-3], 16), None
        unfinished = self._unfinished(step)
        try:
            with locks.claim(unfinished), write_whole(self.folder / name, part=unfinished, sync_folder=True) as binary:
                file = _ChecksummedFile(binary)
                for piece in pieces:
                    file.write(piece)
                if file.crc32 != wanted:
                    raise DamagedCheckpointError
        except DamagedCheckpointError:
            return False
        except OSError as error:
            raise self._explained(error, step, file.bytes if file else 0) from error
        return True

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".step-{step:08}.{os.getpid()}.unfinished"

    def _explained(self, error: Exception, step: int, written: int) -> Exception:
        """Turn an error of the thread into a message with fact, evidence and fix."""
        paths = self.paths
        facts = f"the newest complete one is {paths[-1].name if paths else 'none'}"
        if not isinstance(error, OSError):
            error.add_note(f"this was the checkpoint of step {step:,}; {facts}")
            return error
        fix = "create that folder again, or use another; then save again"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = f"free some space there, or keep=1 (now {self.keep}), or a folder on another disk; then save again"
        explained = CheckpointError(
            f"the checkpoint of step {step:,} could not be written: {(error.strerror or str(error)).lower()}",
            found=f"{written / 1e6:,.1f} MB were written to {self.folder}; {facts}",
            fix=fix,
        )
        explained.errno, explained.__cause__ = error.errno, error
        return explained

    def _prune(self) -> None:
        files = [file for file in self._files() if file.path not in self._damaged]
        last = list({file.step: file for file in files}.values())[-self.keep :]
        best = [file for file in files if file.best][-1:]
        for file in files:
            if file not in (*last, *best):
                # Windows does not remove a file that another process reads; the next save tries again.
                with contextlib.suppress(OSError):
                    file.path.unlink()

    def newest(self, *, say: Callable[[str], object] = print) -> Checkpoint | None:
        """Load the newest checkpoint that is whole, or return None where there is none.

        Damaged ones are left where they are, and `say` gets a line for each.
        """
        import torch

        file = self._newest_whole(say)
        if file is None:
            return None
        # The file is whole, so an error here has another cause, such as too little memory, and loading an older
        # checkpoint instead would only hide it.
        state = torch.load(file.path, map_location="cpu", weights_only=True)
        return Checkpoint(file.path, file.step, state)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint that is whole, -1 where there is none; nothing is loaded or said."""
        file = self._newest_whole(lambda line: None)
        return file.step if file else -1

    def _newest_whole(self, say: Callable[[str], object]) -> _File | None:
        if self._thread:  # its error, if it had one, is raised by `save` or `close`, not here
            self._thread.join()
        for file in reversed(self._files()):
            try:
                found = _crc32(file.path)
                reason = f"damaged, its checksum is {found:08x}" if found != file.crc32 else None
            except OSError as error:
                reason = f"it cannot be read, {str(error.strerror).lower()}"
            if reason is None:
                return file
            self._damaged.add(file.path)
            say(f"checkpoint {file.path.name} is skipped: {reason}")
        return None

    def _files(self) -> list[_File]:
        """List the complete files, the newest last."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():  # the folder may have been removed
            if match := _NAME.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another process has just pruned it
                    step, best, crc32 = int(match[1]), bool(match[2]), int(match[3], 16)
                    found.append(_File(step, path.stat().st_mtime_ns, best, crc32, path))
        return sorted(found)


@contextlib.contextmanager
def one_run(folder: Path, *, say: Callable[[str], object]) -> Iterator[None]:
    """Keep other runs out of a folder; without locks, on some network drives and on Windows, say so and go on.

    Raises:
        CheckpointError: another run holds the folder; the message names its process.
    """
    path = folder / ".run.lock"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locks.hold(path, seconds=_SECONDS_TO_WAIT))
        except BlockingIOError as error:
            raise CheckpointError(
                f"another run saves in {folder}",
                found=f"{error} holds {path.name}",
                fix="wait until that run is over, or give this one a folder of its own",
            ) from error
        except OSError as error:
            say(f"{folder} cannot be locked ({error}): make sure that no other run saves there")
        yield


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's file, None of any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class DamagedCheckpointError(TpukitError):
    """A file does not hold what was written to it."""


def _check_state(value: object, where: str) -> None:
    """Raise for what `torch.load(weights_only=True)` would refuse: when it is saved, not when it is needed."""
    import collections

    import torch

    # By exact type: numpy.float64 is a subclass of float and a namedtuple one of tuple, and neither loads.
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
            raise InvalidValueError(
                f"{where} is on {value.device}, but a checkpoint is written while the device works on",
                fix="save copies in host memory: tensor.cpu()",
            )
    elif kind not in (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device):
        kind = f"{kind.__module__}.{kind.__qualname__}" + " with attributes" * isinstance(value, torch.Tensor)
        raise InvalidTypeError(
            f"{where} is a {kind}, which torch.load(weights_only=True) does not load",
            fix="save plain values and tensors: float(number), torch.from_numpy(array), module.state_dict()",
        )


class _ChecksummedFile:
    """A file for `torch.save` that keeps the CRC-32 of what is written to it, which is all of it and in order.

    Attributes:
        crc32: of everything so far.
        bytes: written so far.
        error: the first error of the disk; torch raises another one in its place.
    """

    def __init__(self, file):
        self._file = file
        self.crc32, self.bytes = 0, 0
        self.error: OSError | None = None

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
