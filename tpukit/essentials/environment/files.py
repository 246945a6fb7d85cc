"""Files that are whole or not there."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


def part_of(file: Path) -> Path:
    """Name the file that becomes this one when it is whole; two processes that write the same one do not meet."""
    return file.with_name(f"{file.name}.{os.getpid()}.part")


@contextlib.contextmanager
def write_whole(
    file: Path | Callable[[], Path], *, part: Path | None = None, sync_folder: bool = False
) -> Iterator[BinaryIO]:
    """Open a binary file that gets its name when it is whole and on the disk; otherwise nothing of it is left.

    The old file of that name stays until then, whatever ends this process or the machine.

    Args:
        file: its name; or a function that returns it, called when all is written: a name may hold a checksum.
        part: its name until then; None for `part_of(file)`, and needed where `file` is a function.
        sync_folder: also bring the new name to the disk, so that no power cut brings back the old file.
    """
    part = part or part_of(file)
    try:
        with open(part, "wb") as written:
            yield written
            written.flush()
            os.fsync(written.fileno())
            name = file() if callable(file) else file
            if os.name == "nt":  # Windows renames no open file; elsewhere a lock on it is held until it has its name
                written.close()
            os.replace(part, name)
        if sync_folder:
            _sync_folder(name.parent)
    finally:
        part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # Windows opens no folder, and some network drives sync none
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
