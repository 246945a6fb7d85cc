"""One run at a time in a folder: a lock that the system releases when the process that holds it dies."""

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tpukit.train.checkpoints import CannotSave, has_path

_NAME = ".run.lock"
# A run that was interrupted or killed is gone within this time, so that the same cell can be run again at once.
_SECONDS_TO_WAIT = 5.0


@contextlib.contextmanager
def one_run(folder: Path, *, say: Callable[[str], object]) -> Iterator[None]:
    """Keep other runs out of a folder; without locks, on some network drives and on Windows, say so and go on.

    Raises:
        CannotSave: another run holds the folder; the message names its process.
    """
    file = _lock(folder / _NAME, say)
    try:
        yield
    finally:
        if file is not None:
            (folder / _NAME).unlink(missing_ok=True)
            file.close()


def _lock(path: Path, say: Callable[[str], object]):
    """Return the file, open and locked; None where there are no locks."""
    deadline = time.monotonic() + _SECONDS_TO_WAIT
    while True:
        # lockf, not flock: processes that this one forks, a DataLoader's, would hold an flock as well, and may live
        # a moment longer.
        file = path.open("a+")
        try:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() >= deadline:
                file.seek(0)
                raise CannotSave(_in_use(path, file.read())) from error
            time.sleep(0.05)
        except (ImportError, OSError) as error:
            say(f"{path.parent} cannot be locked ({error}): make sure that no other run saves there")
            file.close()
            path.unlink()
            return None
        else:
            if has_path(file, path):  # otherwise the run before has just removed it
                file.truncate(0)
                file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%X')}")
                file.flush()
                return file
        file.close()


def _in_use(path: Path, holder: str) -> str:
    return (
        f"another run saves in {path.parent}\n"
        f"  found: {holder or 'another process'} holds {path.name}\n"
        "  fix:   wait until that run is over, or give this one a folder of its own"
    )
