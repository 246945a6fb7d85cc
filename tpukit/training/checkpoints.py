"""Save checkpoints so that a kill at any moment leaves the earlier checkpoints usable.

A thread writes a checkpoint while training continues. The file gets its final name when it is
complete, and the name contains the checksum of the contents:

    .step-00001200.4711.unfinished       process 4711 is writing it, or was killed while writing
    step-00001200-1a2b3c4d.pt            complete; the CRC-32 of the file is 1a2b3c4d
    step-00001200-best-1a2b3c4d.pt       complete, and the best epoch so far

So every reader can check whether a file is complete, on any machine and without other files.
"""

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

# step-00000120-best-1f3a9c07.pt: the name contains the checksum of the contents, so a truncated
# file is recognised without a second file.
_NAME = re.compile(r"step-(?P<step>\d{8,})(?P<best>-best)?-(?P<crc32>[0-9a-f]{8})\.pt")
# `one_run` waits this long for another run's lock. An interrupted or killed run releases it within
# this time, so the user can run the same cell again at once.
_SECONDS_TO_WAIT = 5.0
_BYTES_PER_READ = 2**20


class CheckpointError(TpukitError, OSError):
    """A checkpoint or the folder of the checkpoints cannot be written, or another run uses it."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that was read, and whose checksum is right.

    Attributes:
        path: the path of the file.
        step: training steps done.
        state: the saved state, with tensors in host memory.
    """

    path: Path
    step: int
    state: dict = field(repr=False)


@dataclass(frozen=True, order=True)
class _File:
    """A checkpoint file with its final name; sorted by step, then by modification time."""

    step: int
    written: int  # modification time in nanoseconds: of two files of one step, the later counts
    best: bool
    crc32: int
    path: Path


class CheckpointStore:
    """The checkpoints in a folder: saves in the background, keeps the newest few and the best.

    `torch.save` writes each file, and `torch.load(path, weights_only=True)` reads it on any
    machine. Other files in the folder are left alone. Only one process at a time may save, usually
    core 0; other processes may read. Call `close()` before the worker function returns: a save that
    is not complete by then is lost.

    Args:
        folder: created if it does not exist. Unfinished files of killed processes are removed.
        keep_last: number of newest checkpoints to keep, at least 1, in addition to the best. An
            old checkpoint is removed when a new one is complete, so the disk needs space for
            `keep_last` + 2 checkpoints.
        on_saved: function that the writing thread calls with the path of each complete file.

    Raises:
        CheckpointError: the folder cannot be created, or cannot be written to.
        ValueError: `keep_last` is less than 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        keep_last: int = 3,
        *,
        on_saved: Callable[[Path], object] = lambda path: None,
    ):
        if keep_last < 1:
            raise ValueError(
                f"keep_last must be a number of checkpoints, at least 1, got {keep_last}"
            )
        self.folder = Path(folder).expanduser().absolute()
        self.keep_last = keep_last
        self._on_saved = on_saved
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None  # of the thread, until `close` raises it
        self._damaged: set[Path] = set()  # files whose checksum was wrong when they were read
        reason = _make_writable(self.folder)
        if reason is not None:
            raise CheckpointError(
                f"no checkpoints can be saved in {self.folder}: {reason}",
                fix=(
                    "pass a folder that you can write to; to resume from checkpoints in this one, "
                    f"copy it first:\nshutil.copytree({str(folder)!r}, 'checkpoints')"
                ),
            )
        locks.remove_unclaimed(self.folder.glob(".step-*.unfinished"))

    @property
    def paths(self) -> list[Path]:
        """The paths of the complete files, the newest last; checksums are not compared."""
        return [file.path for file in self._files()]

    def save(self, state: dict, *, step: int, best: bool = False) -> None:
        """Save a state in the background; wait only for an earlier save that is not complete.

        A thread writes the file while training continues. So pass copies of tensors, not the
        model's own tensors. A second save of the same step replaces the first.

        Args:
            state: dicts, lists and tuples of plain values and tensors in host memory, as in a
                state_dict.
            step: number of training steps done, 0 or more.
            best: whether this is the best checkpoint so far. It is kept until a better checkpoint
                is saved.

        Raises:
            CheckpointError: the previous save failed, for example because the disk is full. The
                new save has not started.
            TypeError: the state contains a value that `torch.load(weights_only=True)` does not
                load. The message names the key of this value.
            ValueError: `step` is negative; the folder has a checkpoint of a later step (known
                damaged ones do not count); or a tensor is not in host memory.
        """
        _check_state(state, "state")
        if step < 0:
            raise ValueError(f"step must be a number of training steps, 0 or more, got {step}")
        self.close()
        self._check_order(step)
        # Each save has a new thread. A thread pool that was made before a fork has no thread in the
        # child process, and its first task there would wait forever.
        self._thread = threading.Thread(
            target=self._write, args=(state, step, best), name="tpukit-checkpoint"
        )
        self._thread.start()

    def close(self) -> None:
        """Wait until the last save is complete. You may save again afterwards.

        Raises:
            CheckpointError: the last save failed, for example because the disk is full or the
                folder was removed. This error is raised only once. It names the newest complete
                checkpoint.
        """
        if self._thread:
            self._thread.join()
        error = self._error
        self._error = None
        if error:
            raise error

    def _check_order(self, step: int) -> None:
        """Raise if the folder has a checkpoint of a later step.

        Otherwise `newest` would return the later checkpoint and not the new one, and the next save
        would remove the new one.
        """
        later = [
            file for file in self._files() if file.step > step and file.path not in self._damaged
        ]
        if later:
            raise InvalidValueError(
                f"step {step:,} cannot be saved: the folder holds a later checkpoint, of step "
                f"{later[-1].step:,}",
                found=later[-1].path,
                fix="resume from the later checkpoint, or give this run another folder",
            )

    def _write(self, state: dict, step: int, best: bool) -> None:
        """Write a checkpoint in the thread; store an error, so that `close` can raise it."""
        unfinished = self._unfinished(step)
        mark = "-best" if best else ""
        file = None

        def path() -> Path:
            return self.folder / f"step-{step:08}{mark}-{file.crc32:08x}.pt"

        try:
            with (
                locks.claim(unfinished),
                write_whole(path, part=unfinished, sync_folder=True) as binary,
            ):
                file = _ChecksummedFile(binary)
                save_tensors(state, file)
            # A resumed run may write the same bytes, and so the same name, as a damaged file had.
            self._damaged.discard(path())
            self._prune()
            self._on_saved(path())
        except Exception as error:
            written = file.bytes if file else 0
            # If the disk raises an error, torch replaces it by one about positions in the file.
            cause = file.error if file and file.error else error
            self._error = self._explained(cause, step=step, written=written)

    def receive(
        self, name: str, pieces: Iterable[bytes], *, before_rename: Callable[[], object]
    ) -> bool:
        """Write a checkpoint from another folder, such as the backup, into this folder.

        Args:
            name: the name of the checkpoint's file.
            pieces: the contents of the file, in order.
            before_rename: function that is called if the checksum is right, before the file gets
                its name.

        Returns:
            whether the checksum is right; if it is wrong, no file is written.

        Raises:
            CheckpointError: the file could not be written.
        """
        described = _NAME.fullmatch(name)
        step = int(described["step"])
        unfinished = self._unfinished(step)
        file = None
        # `locks.claim` shows other processes that this unfinished file is in use. `write_whole`
        # renames it when the block ends, and removes it after an error, such as a wrong checksum.
        try:
            with (
                locks.claim(unfinished),
                write_whole(self.folder / name, part=unfinished, sync_folder=True) as binary,
            ):
                file = _ChecksummedFile(binary)
                for piece in pieces:
                    file.write(piece)
                if file.crc32 != int(described["crc32"], 16):
                    raise DamagedCheckpointError
                before_rename()
        except DamagedCheckpointError:
            return False
        except CheckpointError:  # of `before_rename`
            raise
        except OSError as error:
            written = file.bytes if file else 0
            raise self._explained(error, step=step, written=written) from error
        return True

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".step-{step:08}.{os.getpid()}.unfinished"

    def _explained(self, error: Exception, *, step: int, written: int) -> Exception:
        """Convert an OSError of a write to a `CheckpointError`; add a note to any other error."""
        paths = self.paths
        newest = f"the newest complete one is {paths[-1].name if paths else 'none'}"
        # Not an error of the disk: keep its type, because it may be a defect to report.
        if not isinstance(error, OSError):
            error.add_note(f"this was the checkpoint of step {step:,}; {newest}")
            return error
        fix = "create that folder again, or use another; then save again"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fewer = f" keep_last=1 (now {self.keep_last}), or" if self.keep_last > 1 else ""
            fix = f"free some space there, or{fewer} a folder on another disk; then save again"
        reason = error.strerror or str(error)
        explained = CheckpointError(
            f"the checkpoint of step {step:,} could not be written: {reason.lower()}",
            found=f"{written / 1e6:,.1f} MB were written to {self.folder}; {newest}",
            fix=fix,
        )
        explained.errno = error.errno
        explained.__cause__ = error
        return explained

    def _prune(self) -> None:
        """Remove all checkpoints except the newest `keep_last` and the best.

        Damaged files are left alone.
        """
        files = [file for file in self._files() if file.path not in self._damaged]
        # A step may have two files, for example with and without "-best": the later file counts.
        last_of_step = {file.step: file for file in files}
        last = list(last_of_step.values())[-self.keep_last :]
        best = [file for file in files if file.best][-1:]
        for file in files:
            if file not in (*last, *best):
                # Windows cannot remove a file that another process reads. The next save tries
                # again.
                with contextlib.suppress(OSError):
                    file.path.unlink()

    def newest(self, *, say: Callable[[str], object] = print) -> Checkpoint | None:
        """Load the newest checkpoint whose checksum is right; None if there is none.

        Damaged checkpoints are skipped but not removed, and `say` is called with a line for each.
        """
        import torch

        file = self._newest_whole(say)
        if file is None:
            return None
        # The checksum is right. So an error here has another cause, such as too little memory, and
        # must not be hidden by loading an older checkpoint.
        state = torch.load(file.path, map_location="cpu", weights_only=True)
        return Checkpoint(file.path, file.step, state)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint whose checksum is right; -1 without one."""
        file = self._newest_whole(lambda line: None)
        return file.step if file else -1

    def _newest_whole(self, say: Callable[[str], object]) -> _File | None:
        if self._thread:  # `save` and `close` raise its error, if it has one
            self._thread.join()
        # From the newest file back, until a checksum is right.
        for file in reversed(self._files()):
            reason = _damage(file)
            if reason is None:
                return file
            self._damaged.add(file.path)
            say(f"checkpoint {file.path.name} is skipped: {reason}")
        return None

    def _files(self) -> list[_File]:
        """Return the complete files, the newest last; none if the folder was removed."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name is None:
                continue
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                file = _File(
                    step=int(name["step"]),
                    written=path.stat().st_mtime_ns,
                    best=bool(name["best"]),
                    crc32=int(name["crc32"], 16),
                    path=path,
                )
                found.append(file)
        return sorted(found)


@contextlib.contextmanager
def one_run(folder: Path, *, say: Callable[[str], object]) -> Iterator[None]:
    """Lock a folder during the block, so that no other run saves in it.

    Some network drives and Windows do not support locks. There, `say` is called with a line, and
    the run continues.

    Raises:
        CheckpointError: another run has locked the folder; the message names that run's process.
    """
    path = folder / ".run.lock"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locks.hold(path, seconds=_SECONDS_TO_WAIT))
        except BlockingIOError as error:
            raise CheckpointError(
                f"another run saves in {folder}",
                found=f"{error} holds {path.name}",
                fix="wait until that run has ended, or give this run another folder",
            ) from error
        except OSError as error:
            say(f"{folder} cannot be locked ({error}): make sure that no other run saves there")
        yield


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's file; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match["step"]) if match else None


class DamagedCheckpointError(TpukitError):
    """The contents of a file do not match its checksum."""


def _make_writable(folder: Path) -> str | None:
    """Create a folder; return None, or the reason why it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "it cannot be written to"
    return None


def _damage(file: _File) -> str | None:
    """Return the reason why a file cannot be used, or None."""
    try:
        found = _crc32(file.path)
    except OSError as error:
        return f"it cannot be read, {str(error.strerror).lower()}"
    if found != file.crc32:
        return f"damaged, its checksum is {found:08x}"
    return None


def _check_state(value: object, place: str) -> None:
    """Raise for values that `torch.load(weights_only=True)` does not load, and device tensors."""
    import collections

    import torch

    plain = (
        *(type(None), bool, int, float, complex, str, bytes, bytearray),
        *(torch.dtype, torch.device),
    )
    # Compare exact types: numpy.float64 is a subclass of float, and a namedtuple is a subclass of
    # tuple, but torch.load loads neither.
    kind = type(value)
    if kind in (dict, collections.OrderedDict, collections.Counter):
        for key, part in value.items():
            _check_state(key, f"the key {key!r} of {place}")
            _check_state(part, f"{place}[{key!r}]")
    elif kind in (list, tuple, set, torch.Size):
        for index, part in enumerate(value):
            _check_state(part, f"{place}[{index}]")
    elif kind in (torch.Tensor, torch.nn.Parameter) and not value.__dict__:
        if value.device.type != "cpu":
            raise InvalidValueError(
                f"{place} is on {value.device}, and it would change while it is written",
                fix="save copies in host memory: tensor.cpu()",
            )
    elif kind not in plain:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, torch.Tensor):
            name += " with attributes"
        raise InvalidTypeError(
            f"{place} is a {name}, which torch.load(weights_only=True) does not load",
            fix=(
                "save plain values and tensors: float(number), "
                "torch.from_numpy(array), module.state_dict()"
            ),
        )


class _ChecksummedFile:
    """A file for `torch.save` that computes the CRC-32 of the bytes that are written to it.

    Attributes:
        crc32: the CRC-32 of all bytes so far.
        bytes: the number of bytes so far.
        error: the disk's first error, because torch replaces it by an error of its own.
    """

    def __init__(self, file):
        self._file = file
        self.crc32 = 0
        self.bytes = 0
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
        while piece := file.read(_BYTES_PER_READ):
            checksum = zlib.crc32(piece, checksum)
    return checksum
