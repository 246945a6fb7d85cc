"""Write a file so that it is either complete or absent; read notebooks; check permissions."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tpukit.essentials.display import InvalidValueError

_WRITABLE_BY_OTHERS = 0o022  # by the group, or by everybody
_NOTEBOOK_FORMAT = 4  # of Jupyter since 2015


def part_of(file: Path) -> Path:
    """Return the temporary path of a file while this process writes the file.

    Its name contains the process id, so that two processes can write the same file at once; two
    threads of a process cannot.
    """
    return file.with_name(f"{file.name}.{os.getpid()}.part")


def is_installed_file(path: str) -> bool:
    """Return whether a file is in site-packages, or in dist-packages as on Colab and Debian."""
    return "site-packages" in path or "dist-packages" in path


@contextlib.contextmanager
def write_whole(
    file: Path | Callable[[], Path], *, part: Path | None = None, sync_folder: bool = False
) -> Iterator[BinaryIO]:
    """Open a binary file that gets its name only when it is complete and on the disk.

    Until then an old file of that name remains, even if this process or the machine dies. If the
    block raises an error, the new file is removed.

    Args:
        file: the path of the file; or a function that returns the path, such as one with a
            checksum in its name. The function is called after the last write.
        part: the path while the file is written; None for `part_of(file)`. Required if `file` is a
            function.
        sync_folder: also write the folder to the disk, so that the old file cannot return after a
            power failure. Default False.
    """
    part = part or part_of(file)
    try:
        with open(part, "wb") as written:
            yield written
            written.flush()
            os.fsync(written.fileno())
            name = file() if callable(file) else file
            # Windows cannot rename an open file. On other systems the file stays open, so that a
            # lock of the caller on it remains until the file has its name.
            if os.name == "nt":
                written.close()
            os.replace(part, name)
        if sync_folder:
            _sync_folder(name.parent)
    finally:
        part.unlink(missing_ok=True)


def is_writable_by_others(path: Path) -> bool:
    """Return whether other users (except root) can change a file or a folder.

    If True, tpukit must not load code from there. If neither this user nor root owns the path, the
    result is False only on a read-only file system, such as that of Kaggle's inputs.
    """
    if os.name == "nt":  # Windows has no such mode
        return False
    facts = path.stat()
    if facts.st_mode & _WRITABLE_BY_OTHERS:
        return True
    is_ours = facts.st_uid in (os.getuid(), 0)
    is_read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return not (is_ours or is_read_only)


def _sync_folder(folder: Path) -> None:
    # Windows cannot open a folder, and some network drives cannot sync one.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load_notebook(path: Path) -> dict:
    """Return the content of a notebook's file in Jupyter's format 4.

    Raises:
        InvalidValueError: the file is not a notebook, or has another format.
    """
    try:
        book = json.loads(path.read_text(encoding="utf-8"))
        version = int(book["nbformat"])
        # Format 3 has "worksheets" instead of "cells", and gets its own error below.
        if version >= _NOTEBOOK_FORMAT:
            iter(book["cells"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(
            f"{path.name} is not a notebook",
            found=f"{type(error).__name__}: {error}",
            fix="open it in Jupyter and save it",
        ) from error
    if version != _NOTEBOOK_FORMAT:
        file = f'"{path}"' if " " in str(path) else path
        raise InvalidValueError(
            f"{path.name} has notebook format {version}, but tpukit supports only format "
            f"{_NOTEBOOK_FORMAT}",
            fix=f"jupyter nbconvert --to notebook --inplace {file}",
        )
    return book
