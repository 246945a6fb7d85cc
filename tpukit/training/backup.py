"""A second folder for checkpoints, which outlives the machine: a thread copies them while training goes on."""

import contextlib
import errno
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tpukit.essentials.display import (
    InvalidValueError,
    NotInstalledError,
    PathNotFoundError,
    SystemFailureError,
    TpukitError,
    TpukitRuntimeError,
)
from tpukit.essentials.environment import part_of, write_whole
from tpukit.training.checkpoints import CheckpointError, CheckpointStore, DamagedCheckpointError, step_of

_BEST = "best.pt"
_COMPILED = "compiled"  # the folder of compiled programs that travels with a run
_PIECE = 2**20  # bytes
_QUIET_SECONDS = 60.0  # without a byte copied: longer than any drive or bucket took that was not gone
_LONGEST_SECONDS = 600.0  # that the end of a run waits for a copy that moves


class Backup:
    """Copies of the newest two checkpoints, of best.pt and of compiled programs; no trouble there ends a training.

    One thread at a time copies, and no step waits for it. While it does, a newer checkpoint takes the place of one that
    waits, so a slow backup has fewer of them and never falls behind. One run at a time has a backup. What
    `launch(compile_cache=folder / "compiled")` keeps in the run's folder goes to the backup, too, and comes back.

    Args:
        address: a folder, whose parent exists; or a URL that fsspec knows, "gs://bucket/run".
        say: called with one line, from the thread as well.
        alive: called while somebody waits for the backup, so that nobody takes the wait for a hang.

    Attributes:
        seconds: that the longest copy took so far.

    Raises:
        NotInstalledError: the package for this kind of URL is missing.
        ValueError: nobody knows this kind of URL.
    """

    def __init__(self, address, *, say: Callable[[str], object] = print, alive: Callable[[], object] = lambda: None):
        self.address, self._say, self._alive = str(address), say, alive
        self._there = _place(self.address)
        self._programs = _place(f"{self.address.rstrip('/')}/{_COMPILED}")
        self._lock, self._thread = threading.Lock(), None
        self._waiting: Path | None = None  # to be copied next
        self._latest: Path | None = None  # the last one that was offered
        self._copied: str | None = None  # the name of the last one that is there
        self._best: int | None = None  # when the best.pt that is there was written
        self._trouble, self._ended, self._abandoned = "", False, False
        self._moved, self.seconds = time.monotonic(), 0.0

    def offer(self, path: Path) -> None:
        """Have a complete checkpoint copied, and the best.pt beside it, and return at once."""
        with self._lock:
            self._waiting = self._latest = path
            if not self._thread:
                self._start(self._copy_all)
            elif time.monotonic() - self._moved > _QUIET_SECONDS:
                self._complain(f"the backup {self.address} has not moved for {time.monotonic() - self._moved:.0f} s")

    def close(self, seconds: float = _LONGEST_SECONDS) -> None:
        """Wait for the last copy, so many seconds if it moves, and say what is missing."""
        self._wait(seconds)
        if self._latest and self._latest.name != self._copied:
            there = f"; the newest there is {self._copied}" * bool(self._copied)
            reason = self._trouble or "it was still being copied"
            self._say(f"the backup {self.address} has not got {self._latest.name}{there} ({reason})")
        self._ended = True

    def _start(self, work: Callable[[], None]) -> None:
        self._moved = time.monotonic()
        # A daemon: a thread that hangs in a drive that is gone must not keep the process from ending.
        self._thread = threading.Thread(target=work, name="tpukit-backup", daemon=True)
        self._thread.start()

    def _wait(self, seconds: float) -> bool:
        """Wait until the thread is done; False where it has not moved for long, or the time is over."""
        thread, began = self._thread, time.monotonic()
        while thread and thread.is_alive():
            thread.join(0.1)
            self._alive()
            now = time.monotonic()
            if thread.is_alive() and (now - self._moved > _QUIET_SECONDS or now - began > seconds):
                return False
        return True

    def _note_move(self, *_: object) -> None:
        self._moved = time.monotonic()

    def _copy_all(self) -> None:
        while True:
            with self._lock:
                path, self._waiting = self._waiting, None
                if path is None:
                    self._thread = None
                    return
            self._note_move()
            if path.name != self._copied:
                self._copy(path)

    def _copy(self, path: Path) -> None:
        began = time.monotonic()
        try:
            self._there.connect()
            # First, so that a run that resumes from the checkpoint finds the weights that it calls the best.
            best = path.with_name(_BEST)
            if best.exists() and (written := best.stat().st_mtime_ns) != self._best:
                self._there.put(best, self._note_move)
                self._best = written
            self._there.put(path, self._note_move)
        except Exception as error:  # of any kind: a drive, a bucket, a network, somebody else's code
            if path.exists():  # otherwise a newer one is complete, and waits
                self._complain(f"{path.name} was not copied to the backup {self.address}: {_reason(error)}")
            return
        self._copied, self.seconds = path.name, max(self.seconds, time.monotonic() - began)
        if self._trouble and not self._ended:
            self._say(f"the backup {self.address} works again, and has {path.name}")
        self._trouble = ""
        with contextlib.suppress(Exception):  # the next copy tries again; if it never works, the backup fills up
            self._remove_older(path.name)
        with contextlib.suppress(Exception):  # likewise; without them, the next machine compiles
            self._copy_programs(path.with_name(_COMPILED))

    def _remove_older(self, newest: str) -> None:
        # Those of later steps are left alone: they are damaged, or another run's.
        steps = {name: step_of(name) for name in self._there.names() if name != newest}
        older = {name: step for name, step in steps.items() if step is not None and step <= step_of(newest)}
        second = max((step for step in older.values() if step < step_of(newest)), default=None)
        for name in older:
            if older[name] != second:
                self._there.remove(name)

    def _copy_programs(self, folder: Path) -> None:
        if programs := sorted(folder.glob("*.pjrt")):
            self._programs.connect()
            there = self._programs.names()
            for program in programs:
                if program.name not in there:
                    self._programs.put(program, self._note_move)

    def _complain(self, text: str) -> None:
        if not self._trouble and not self._ended:
            self._say(f"{text}; training goes on, and the next checkpoint is tried again")
        self._trouble = text

    def take(self, checkpoints: CheckpointStore, *, resume: bool = True) -> None:
        """Copy the newest whole checkpoint and best.pt to the folder, where that has none that is as new.

        Raises:
            CheckpointError: the folder's disk is full.
            OSError: the backup cannot be read, and the folder has nothing to continue from.
            ValueError: there is one, and `resume` is False.
        """
        own, errors = checkpoints.newest_step(), []

        def work() -> None:
            try:
                self._take(checkpoints, own, resume)
            except BaseException as error:
                errors.append(error)
            with self._lock:
                self._thread = None

        self._start(work)
        if not self._wait(float("inf")):
            self._abandoned = True  # should it wake up, no old checkpoint may come into the folder
            errors.append(TimeoutError(f"no answer for {_QUIET_SECONDS:g} s"))
        if not errors:
            return
        error = errors[0]
        if isinstance(error, InvalidValueError | CheckpointError) or (own < 0 and isinstance(error, PathNotFoundError)):
            raise error
        if own < 0:  # to begin anew beside a run that may be there would lose that run
            raise SystemFailureError(
                f"the backup {self.address} cannot be read, and {checkpoints.folder} has nothing to continue from",
                found=_reason(error),
                fix="mount it, or sign in, and run this again; to begin anew: another backup_dir, or None",
            ) from error
        self._complain(f"the backup {self.address} cannot be read: {_reason(error)}")

    def _take(self, checkpoints: CheckpointStore, own: int, resume: bool) -> None:
        self._there.connect()
        there = self._there.names()
        if resume and _COMPILED in there:
            with contextlib.suppress(Exception):  # then they are compiled
                self._take_programs(checkpoints.folder / _COMPILED)
        steps = {name: step for name in there if (step := step_of(name)) is not None and step > own}
        if steps and not resume:
            raise InvalidValueError(
                f"resume=False, and the backup {self.address} holds checkpoints",
                found=max(steps, key=steps.get),
                fix="another backup_dir, or empty that one; resume=True continues from there",
            )
        if steps and _BEST in there:
            self._take_best(checkpoints.folder / _BEST)
        for name in sorted(steps, key=steps.get, reverse=True):
            if checkpoints.receive(name, self._pieces(name)):
                self._copied = name
                self._say(f"{name} is taken from the backup {self.address}")
                return
            self._say(f"checkpoint {name} in the backup is skipped: damaged, its checksum is another")

    def _take_programs(self, folder: Path) -> None:
        self._programs.connect()
        folder.mkdir(mode=0o700, exist_ok=True)  # for this user alone: what lies there is loaded as code
        for name in self._programs.names():
            if name.endswith(".pjrt") and not (folder / name).exists():  # its checksum is looked at by who loads it
                with write_whole(folder / name, part=part_of(folder / name)) as file:
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
            self._say(f"{_BEST} in the backup is skipped: damaged; the next better epoch writes it again")

    def _pieces(self, name: str, there=None) -> Iterator[bytes]:
        try:
            for piece in (there or self._there).pieces(name):
                self._note_move()
                yield piece
        except OSError as error:  # in other words, since an OSError of the one who writes is about the folder
            raise TpukitRuntimeError(f"{name} cannot be read: {_reason(error)}") from error
        if self._abandoned:
            raise TpukitRuntimeError("it has come too late")


def _place(address: str) -> "_Folder | _Url":
    return _Url(address) if "://" in address else _Folder(Path(address).expanduser().absolute())


class _Folder:
    """A backup in a folder: of a mounted drive or bucket, or of another disk."""

    def __init__(self, folder: Path):
        self.folder, self._connected = folder, False

    def connect(self) -> None:
        if self._connected:
            return
        # Not its parents, too: below a drive that is not mounted they would be made on this machine, and lost with it.
        if not self.folder.is_dir() and not self.folder.parent.is_dir():
            raise PathNotFoundError(
                f"no backup can be made in {self.folder.parent}, which is not there",
                fix=f"mount its drive, or, if that is where it belongs, make it: os.makedirs({str(self.folder)!r})",
            )
        self.folder.mkdir(exist_ok=True)
        for part in self.folder.glob(".*.unfinished"):  # of a machine that was taken
            with contextlib.suppress(OSError):
                part.unlink()
        self._connected = True

    def names(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()]

    def pieces(self, name: str) -> Iterator[bytes]:
        with (self.folder / name).open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def put(self, file: Path, moved: Callable[[], object]) -> None:
        part = self.folder / f".{file.name}.unfinished"
        with file.open("rb") as source, write_whole(self.folder / file.name, part=part, sync_folder=True) as copy:
            while piece := source.read(_PIECE):
                copy.write(piece)
                moved()

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()


class _Url:
    """A backup that fsspec reaches. A bucket has an object when all of it has arrived."""

    def __init__(self, address: str):
        self.address = address
        try:
            import fsspec

            fsspec.get_filesystem_class(address.partition("://")[0])
        except ImportError as error:
            package = re.search(r"(?i)install ([\w-]+)|$", str(error))[1] or "fsspec"  # "Please install gcsfs"
            raise NotInstalledError(
                f"the backup {address} needs {package}, which is missing",
                found=error,
                fix=f"%pip install {package}",
            ) from error
        except ValueError as error:
            raise InvalidValueError(
                f"no backup can be at {address}", found=error, fix='a folder, or a URL such as "gs://bucket/run"'
            ) from error

        self._files, self._folder = None, ""

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"

    def connect(self) -> None:
        from fsspec.core import url_to_fs

        if self._files is None:
            self._files, self._folder = url_to_fs(self.address)  # signs in, so it may wait

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            return [path.rstrip("/").rpartition("/")[2] for path in self._files.ls(self._folder, detail=False)]
        except FileNotFoundError:  # a bucket has no empty folders
            return []

    def pieces(self, name: str) -> Iterator[bytes]:
        with self._files.open(self._path(name), "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def put(self, file: Path, moved: Callable[[], object]) -> None:
        from fsspec.callbacks import Callback

        class Moves(Callback):
            def call(self, *_: object, **__: object) -> None:
                moved()

        self._files.put_file(str(file), self._path(file.name), callback=Moves())

    def remove(self, name: str) -> None:
        self._files.rm_file(self._path(name))


def _is_whole_zip(path: Path) -> bool:
    """Return whether what `torch.save` wrote is whole; `torch.load` does not look at the checksums in it."""
    try:
        return zipfile.ZipFile(path).testzip() is None
    except Exception:  # zipfile raises what its damage leads it to: BadZipFile, EOFError, NotImplementedError, ...
        return False


def _reason(error: BaseException) -> str:
    if isinstance(error, TpukitError):
        return error.fact
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "it is full; it needs room for three checkpoints and best.pt"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"{type(error).__name__}: {error}".splitlines()[0]
