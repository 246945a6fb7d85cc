"""Copy a run's checkpoints to a backup folder, which outlives the machine.

A thread copies while training continues. Only the newest checkpoint waits for the thread:

    step 100 is saved    the thread copies step 100
    step 200 is saved    step 200 waits
    step 300 is saved    step 300 waits instead of step 200, which is never copied
    step 100 is copied   the thread copies step 300

So a slow backup gets fewer checkpoints, and training never waits for it. If a copy fails, a line is
printed once, and the next checkpoint is copied when it is complete.
"""

import contextlib
import errno
import os
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tpukit.essentials.display import (
    InvalidValueError,
    NotInstalledError,
    PathNotFoundError,
    SystemFailureError,
    TpukitError,
    TpukitRuntimeError,
)
from tpukit.essentials.environment import is_writable_by_others, part_of, write_whole
from tpukit.training.checkpoints import (
    CheckpointError,
    CheckpointStore,
    DamagedCheckpointError,
    step_of,
)

_BEST = "best.pt"
_COMPILED = "compiled"  # the folder of compiled programs in a run's folder and in its backup
_PIECE = 2**20  # bytes that are read at once
# A copy without progress for this long is given up. Every drive or bucket that took longer was
# gone.
_QUIET_SECONDS = 60.0
# At the end of a run, wait at most this long for a copy that makes progress.
_LONGEST_SECONDS = 600.0


class Backup:
    """Copies new checkpoints, best.pt and compiled programs to a backup.

    The backup keeps the newest checkpoint and the one before it. Training continues if a copy
    fails. Only one run at a time may use a backup.
    Compiled programs are copied if `launch(compile_cache=folder / "compiled")` stores them in the
    run's folder. `take` copies checkpoints and programs back.

    Args:
        address: a folder whose parent exists; or a URL that fsspec supports, "gs://bucket/run".
        say: function that is called with one line of text. The background thread that copies may
            call it, too.
        alive: function that is called repeatedly while a core waits for the backup, so that the
            watchdog does not report a hang.

    Attributes:
        seconds: duration of the longest copy so far.

    Raises:
        NotInstalledError: the package for this kind of URL is missing.
        ValueError: this kind of URL is not supported.
    """

    def __init__(
        self,
        address,
        *,
        say: Callable[[str], object] = print,
        alive: Callable[[], object] = lambda: None,
    ):
        self.address = str(address)
        self.seconds = 0.0
        self._say = say
        self._alive = alive
        self._place = _place(self.address)
        self._programs = _place(f"{self.address.rstrip('/')}/{_COMPILED}")
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting: Path | None = None  # the checkpoint to copy next
        self._latest: Path | None = None  # the last checkpoint that was offered
        self._copied: str | None = None  # the name of the newest checkpoint that the backup has
        self._best: int | None = None  # modification time of the best.pt that the backup has
        self._problem = ""  # the last error, until a copy succeeds
        self._is_ended = False  # the run has ended: print nothing more
        self._is_abandoned = False  # `take` has given up: its thread must not write any more
        self._moved = time.monotonic()  # time of the last progress of a copy

    def offer(self, path: Path) -> None:
        """Copy a complete checkpoint, and the best.pt in its folder, in the background."""
        with self._lock:
            self._waiting = self._latest = path
            quiet = time.monotonic() - self._moved
            if not self._thread:
                self._start(self._copy_all)
            elif quiet > _QUIET_SECONDS:
                self._complain(f"the backup {self.address} has not moved for {quiet:.0f} s")

    def close(self, seconds: float = _LONGEST_SECONDS) -> None:
        """Wait at most `seconds` for the last copy; print a line if it is not complete."""
        self._wait(seconds)
        if self._latest and self._latest.name != self._copied:
            missing = self._latest.name
            if self._copied:
                missing += f"; the newest there is {self._copied}"
            reason = self._problem or "it was still being copied"
            self._say(f"the backup {self.address} lacks {missing} ({reason})")
        self._is_ended = True

    def _start(self, work: Callable[[], None]) -> None:
        self._moved = time.monotonic()
        # A daemon, because a thread that hangs in a lost drive must not keep the process alive.
        self._thread = threading.Thread(target=work, name="tpukit-backup", daemon=True)
        self._thread.start()

    def _wait(self, seconds: float) -> bool:
        """Wait until the thread ends.

        Returns False if it has not ended after `seconds`, or has made no progress for
        `_QUIET_SECONDS`.
        """
        thread = self._thread
        began = time.monotonic()
        while thread and thread.is_alive():
            thread.join(0.1)
            self._alive()
            now = time.monotonic()
            is_late = now - self._moved > _QUIET_SECONDS or now - began > seconds
            # It may have ended between the two lines above.
            if thread.is_alive() and is_late:
                return False
        return True

    def _note_move(self, *_: object) -> None:
        self._moved = time.monotonic()

    def _copy_all(self) -> None:
        while True:
            with self._lock:
                path = self._waiting
                self._waiting = None
                if path is None:
                    self._thread = None
                    return
            self._note_move()
            if path.name != self._copied:
                self._copy(path)

    def _copy(self, path: Path) -> None:
        began = time.monotonic()
        try:
            self._place.connect()
            # Copy best.pt first: a run that resumes from the checkpoint needs the weights of the
            # epoch that its history calls the best.
            self._copy_best(path.with_name(_BEST))
            self._place.put(path, self._note_move)
        except Exception as error:  # drives, buckets, networks and fsspec raise errors of any type
            if path.exists():  # otherwise it was replaced by a newer checkpoint, which is next
                self._complain(
                    f"{path.name} was not copied to the backup {self.address}: {_reason(error)}"
                )
            return
        self._copied = path.name
        self.seconds = max(self.seconds, time.monotonic() - began)
        if self._problem and not self._is_ended:
            self._say(f"the backup {self.address} works again, and has {path.name}")
        self._problem = ""
        # Ignore errors of both, because the next copy tries them again. If removing never works,
        # the backup fills up, and a copy fails. Without the programs, the next machine compiles.
        with contextlib.suppress(Exception):
            self._remove_older(path.name)
        with contextlib.suppress(Exception):
            self._copy_programs(path.with_name(_COMPILED))

    def _copy_best(self, best: Path) -> None:
        if not best.exists():
            return
        written = best.stat().st_mtime_ns
        if written != self._best:
            self._place.put(best, self._note_move)
            self._best = written

    def _remove_older(self, newest: str) -> None:
        """Remove old checkpoints: keep `newest`, and the newest of the steps before it.

        Checkpoints of later steps are not removed: they are damaged, or belong to another run.
        """
        last = step_of(newest)
        older = {}
        for name in self._place.names():
            step = step_of(name)
            if name != newest and step is not None and step <= last:
                older[name] = step
        # Keep one checkpoint of an earlier step: the newest one may turn out to be damaged.
        kept = max((step for step in older.values() if step < last), default=None)
        for name, step in older.items():
            if step != kept:
                self._place.remove(name)

    def _copy_programs(self, folder: Path) -> None:
        programs = sorted(folder.glob("*.pjrt"))
        if not programs:
            return
        self._programs.connect()
        # A program's name is its key, so a file with this name has the same contents.
        copied = self._programs.names()
        for program in programs:
            if program.name not in copied:
                self._programs.put(program, self._note_move)

    def _complain(self, text: str) -> None:
        """Print a problem, unless the previous copy failed as well."""
        if not self._problem and not self._is_ended:
            self._say(f"{text}; training goes on, and the next checkpoint will be copied")
        self._problem = text

    def take(self, checkpoints: CheckpointStore, *, resume: bool = True) -> None:
        """Copy the backup's newest complete checkpoint and best.pt to the folder of the run.

        The folder's own best.pt is replaced. Neither file is copied if the folder has a complete
        checkpoint of the same or a later step, or if the backup has no complete checkpoint.

        Compiled programs that the folder lacks are copied even if no checkpoint is. They are not
        copied if `resume` is False, or if other users can write to them in the backup. An error of
        this copy is ignored.

        Args:
            checkpoints: the checkpoints in the folder of the run.
            resume: whether the run may continue from the backup.

        Raises:
            CheckpointError: the checkpoint or best.pt cannot be written to the folder of the run.
            OSError: the backup cannot be read, and the folder has no complete checkpoint.
            ValueError: the backup has a newer checkpoint, and `resume` is False.
        """
        own = checkpoints.newest_step()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self._take(checkpoints, own, resume=resume)
            except BaseException as error:
                errors.append(error)
            self._copy_all()  # a checkpoint that was offered after `take` gave up

        self._start(work)
        if not self._wait(float("inf")):
            self._is_abandoned = True
            errors.append(TimeoutError(f"no answer for {_QUIET_SECONDS:g} s"))
        if not errors:
            return
        error = errors[0]
        # Without a checkpoint in the folder the run would start from scratch, and its checkpoints
        # would later replace those in the backup.
        is_lost = own < 0
        if isinstance(error, InvalidValueError | CheckpointError):
            raise error
        if is_lost and isinstance(error, PathNotFoundError):
            raise error
        if is_lost:
            raise SystemFailureError(
                f"the backup {self.address} cannot be read, and "
                f"{checkpoints.folder} has nothing to continue from",
                found=_reason(error),
                fix=(
                    "mount the backup drive, or sign in, and run this again; to start from "
                    "scratch, pass another backup_dir, or None"
                ),
            ) from error
        self._complain(f"the backup {self.address} cannot be read: {_reason(error)}")

    def _take(self, checkpoints: CheckpointStore, own: int, *, resume: bool) -> None:
        self._place.connect()
        names = self._place.names()
        if resume and _COMPILED in names:
            with contextlib.suppress(Exception):  # without the cache, the programs are compiled
                self._take_programs(checkpoints.folder / _COMPILED)
        # Checkpoints of later steps than the folder's newest; the newest of them that is complete
        # is copied.
        newer = {}
        for name in names:
            step = step_of(name)
            if step is not None and step > own:
                newer[name] = step
        if newer and not resume:
            raise InvalidValueError(
                f"resume=False, and the backup {self.address} holds checkpoints",
                found=max(newer, key=newer.get),
                fix="pass another backup_dir, or empty this one; resume=True continues from the "
                "checkpoint",
            )

        def take_best() -> None:
            if _BEST in names:
                self._take_best(checkpoints.folder / _BEST)

        # best.pt belongs to the checkpoint, so it is copied only if the checkpoint is complete. It
        # comes first: after an interrupt between the two, the next start takes both again.
        for name in sorted(newer, key=newer.get, reverse=True):
            if checkpoints.receive(name, self._pieces(name), before_rename=take_best):
                self._copied = name
                self._say(f"{name} is taken from the backup {self.address}")
                return
            self._say(f"checkpoint {name} in the backup is skipped: damaged, its checksum is wrong")

    def _take_programs(self, folder: Path) -> None:
        self._programs.connect()
        if unsafe := self._programs.first_unsafe():
            self._say(
                "compiled programs are not taken from the backup: other users can write to "
                f"{unsafe}, and a program is code; use a backup_dir of your own"
            )
            return
        # Only this user may write to the folder, because its files are loaded as code.
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in self._programs.names():
            path = folder / name
            # The loader of the programs compares their checksums.
            if name.endswith(".pjrt") and not path.exists():
                with write_whole(path, part=part_of(path)) as file:
                    file.writelines(self._pieces(name, self._programs))

    def _take_best(self, path: Path) -> None:
        part = part_of(path)
        try:
            with write_whole(path, part=part) as file:
                file.writelines(self._pieces(_BEST))
                file.flush()
                if not _is_whole_zip(part):
                    raise DamagedCheckpointError
        except DamagedCheckpointError:
            self._say(
                f"{_BEST} in the backup is skipped: damaged; the next better epoch writes it again"
            )
        except OSError as error:  # of the run's folder: `_pieces` has another type for the backup
            explained = CheckpointError(
                f"{path} could not be written: {error.strerror or error}",
                fix=f"free some space in {path.parent}, or use a folder on another disk",
            )
            explained.errno = error.errno
            raise explained from error

    def _pieces(self, name: str, place=None) -> Iterator[bytes]:
        try:
            for piece in (place or self._place).pieces(name):
                self._note_move()
                yield piece
        # Raise another type: the writer reports an OSError as an error of the run's own folder.
        except OSError as error:
            raise TpukitRuntimeError(f"{name} cannot be read: {_reason(error)}") from error
        if self._is_abandoned:
            raise TpukitRuntimeError(f"reading {name} from the backup took too long")


def _place(address: str) -> "_Folder | UrlPlace":
    if "://" in address:
        return UrlPlace(address)
    return _Folder(Path(address).expanduser().absolute())


def refuse_unmounted(folder: Path) -> None:
    """Raise PathNotFoundError if neither a backup folder nor its parent exists.

    If the drive is not mounted, a new folder would be on this machine, and be lost with it.
    """
    if not folder.is_dir() and not folder.parent.is_dir():
        raise PathNotFoundError(
            f"the backup cannot be made: there is no folder {folder.parent}",
            fix=(
                "mount the drive; or, if the path is right, make the folder: "
                f"os.makedirs({str(folder)!r})"
            ),
        )


class _Folder:
    """A backup in a folder of a mounted drive or bucket, or of another disk."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._is_connected = False

    def connect(self) -> None:
        if self._is_connected:
            return
        refuse_unmounted(self.folder)
        self.folder.mkdir(mode=0o755, exist_ok=True)
        # Remove incomplete copies of a machine that was taken away.
        for part in self.folder.glob(".*.unfinished"):
            with contextlib.suppress(OSError):
                part.unlink()
        self._is_connected = True

    def names(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()]

    def pieces(self, name: str) -> Iterator[bytes]:
        with (self.folder / name).open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def put(self, file: Path, moved: Callable[[], object]) -> None:
        part = self.folder / f".{file.name}.unfinished"
        whole = write_whole(self.folder / file.name, part=part, sync_folder=True)
        with file.open("rb") as source, whole as copy:
            while piece := source.read(_PIECE):
                copy.write(piece)
                moved()
        # `_take_programs` does not load programs that other users can change. Some drives have no
        # modes and raise an error.
        with contextlib.suppress(OSError):
            os.chmod(self.folder / file.name, 0o644)

    def first_unsafe(self) -> Path | None:
        """Return the folder, or the first file in it, that other users can write to."""
        for path in (self.folder, *self.folder.iterdir()):
            if is_writable_by_others(path):
                return path
        return None

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()


class UrlPlace:
    """A backup at a URL, through fsspec.

    A bucket shows no object before its upload is complete. Elsewhere, as over sftp, an interrupted
    upload leaves a damaged file, which `take` skips.
    """

    def __init__(self, address: str):
        self.address = address
        try:
            import fsspec

            fsspec.get_filesystem_class(address.partition("://")[0])
        except ImportError as error:
            named = re.search(r"(?i)install ([\w-]+)", str(error))  # "Please install gcsfs"
            package = named[1] if named else "fsspec"
            raise NotInstalledError(
                f"the backup {address} needs {package}, which is missing",
                found=error,
                fix=f"%pip install {package}",
            ) from error
        except ValueError as error:
            raise InvalidValueError(
                f"a backup cannot be stored at {address}",
                found=error,
                fix='a folder, or a URL such as "gs://bucket/run"',
            ) from error

        self._files = None
        self._folder = ""

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"

    def connect(self) -> None:
        """Sign in to the bucket once."""
        from fsspec.core import url_to_fs

        if self._files is None:
            self._files, self._folder = url_to_fs(self.address)  # signs in, so it may wait

    def names(self) -> list[str]:
        """Return the names of the files."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._folder, detail=False)
        except FileNotFoundError:  # a bucket has no empty folders
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file, piece by piece."""
        with self._files.open(self._path(name), "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def put(self, file: Path, moved: Callable[[], object]) -> None:
        """Copy a file of this machine, and call `moved` after each piece."""
        from fsspec.callbacks import Callback

        class Moves(Callback):
            def call(self, *_: object, **__: object) -> None:
                moved()

        target = self._path(file.name)
        self._in_folder(lambda: self._files.put_file(str(file), target, callback=Moves()))

    def first_unsafe(self) -> None:
        """Return None: tpukit does not check who can write to the files at a URL."""
        return

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._files.rm_file(self._path(name))

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file; None if it does not exist."""
        self._files.invalidate_cache()
        try:
            return self._files.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        self._in_folder(lambda: self._files.pipe_file(self._path(name), data))

    def _in_folder(self, write: Callable[[], object]) -> None:
        """Write a file; create the folder if it is missing."""
        try:
            write()
        except FileNotFoundError:  # not in a bucket, which has no folders
            self._files.makedirs(self._folder, exist_ok=True)
            write()

    def find(self, patterns: Iterable[str]) -> str | None:
        """Return the name of a file that matches one of the patterns; None if none does."""
        for pattern in patterns:
            for path in self._files.glob(self._path(pattern)):
                return path.removeprefix(self._path(""))
        return None


def _is_whole_zip(path: Path) -> bool:
    """Return whether the checksums in a file of `torch.save` are right.

    `torch.load` does not compare them.
    """
    try:
        return zipfile.ZipFile(path).testzip() is None
    except Exception:  # a damaged file raises BadZipFile, EOFError, NotImplementedError and others
        return False


def _reason(error: BaseException) -> str:
    """Return an error of the backup as one short line."""
    if isinstance(error, TpukitError):
        return error.fact
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "it is full; it needs room for three checkpoints and best.pt"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"{type(error).__name__}: {error}".splitlines()[0]
