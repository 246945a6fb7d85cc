"""Lock files and folders; the system releases a lock when its process dies.

The locks are those of `fcntl`, which Windows does not have, and some network drives do not support.
"""

import contextlib
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Let only one process at a time enter the block.

    On Windows, and on network drives without locks, all processes enter at once.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a drive without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(
                    f"another process writes to {folder}; this call waits until it has finished",
                    flush=True,
                )
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def hold(path: Path, *, seconds: float) -> Iterator[None]:
    """Make and lock a file that only one process can lock at a time; remove it afterwards.

    Args:
        path: the lock file.
        seconds: the longest time to wait for another process.

    Raises:
        BlockingIOError: after `seconds`, another process still has the lock; the message names
            that process.
        OSError: this system or drive does not support such locks, or the file cannot be made.
    """
    if fcntl is None:
        raise OSError("Windows has no fcntl, whose locks are needed here")
    deadline = time.monotonic() + seconds
    while True:
        with path.open("a+") as file:
            try:
                # lockf, not flock: a process that is forked from this one, such as a DataLoader's,
                # would share an flock, and may run a moment longer.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise BlockingIOError(file.read() or "another process") from error
                time.sleep(0.05)
                continue
            except OSError:
                path.unlink()
                raise
            # Else the previous owner has removed the file after `open`: try again with a new file.
            if _has_path(file, path):
                file.truncate(0)
                since = time.strftime("%X")
                file.write(f"process {os.getpid()} on {platform.node()}, since {since}")
                file.flush()
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


# A lock tells whether the owner of a file still runs. A process id in the name of the file would
# not, because the system reuses process ids.
@contextlib.contextmanager
def claim(unfinished: Path) -> Iterator[None]:
    """Create a file and lock it, so that `remove_unclaimed` of another process does not remove it.

    A file that exists is emptied. The caller may open and close the file in the block. On Windows
    `claim` does nothing, and the caller makes the file: no process can remove an open file there.
    """
    if fcntl is None:
        yield
        return
    while True:
        with unfinished.open("wb") as file:
            with contextlib.suppress(OSError):  # a drive without locks
                # Not `lockf`, whose lock ends when the caller closes the file.
                fcntl.flock(file, fcntl.LOCK_EX)
            if _has_path(file, unfinished):
                yield
                return
        # Between `open` and the lock another process removed the file as a leftover, so try again.


def remove_unclaimed(files: Iterable[Path]) -> None:
    """Remove the files that no running process has claimed.

    On Windows, these are the files that no process has open. On a drive without locks, no file is
    removed.
    """
    for path in files:
        # OSError: a running process has the lock, the file does not exist, or there are no locks.
        with contextlib.suppress(OSError):
            if fcntl is None:
                path.unlink()
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _has_path(file, path):
                    path.unlink()


def _has_path(file, path: Path) -> bool:
    """Return True if an open file is still the file at this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
