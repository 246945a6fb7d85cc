"""One run at a time in a folder."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tpukit.packs import locks
from tpukit.train.checkpoints import CannotSave

# A run that was interrupted or killed is gone within this time, so that the same cell can be run again at once.
_SECONDS_TO_WAIT = 5.0


@contextlib.contextmanager
def one_run(folder: Path, *, say: Callable[[str], object]) -> Iterator[None]:
    """Keep other runs out of a folder; without locks, on some network drives and on Windows, say so and go on.

    Raises:
        CannotSave: another run holds the folder; the message names its process.
    """
    path = folder / ".run.lock"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locks.hold(path, seconds=_SECONDS_TO_WAIT))
        except BlockingIOError as error:
            raise CannotSave(
                f"another run saves in {folder}",
                found=f"{error} holds {path.name}",
                fix="wait until that run is over, or give this one a folder of its own",
            ) from error
        except OSError as error:
            say(f"{folder} cannot be locked ({error}): make sure that no other run saves there")
        yield
