"""Write files that are whole or not there, check them later, and let one process at a time into a folder."""

import contextlib
import io
import json
import operator
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


def part_of(file: Path) -> Path:
    """Name the file that becomes this one when it is whole; two processes that write the same one do not meet."""
    return file.with_name(f"{file.name}.{os.getpid()}.part")


def remove_parts(folder: Path) -> None:
    """Remove what `write_whole` of killed processes left in a folder; no process may be writing there."""
    for part in folder.glob("*.[0-9]*.part"):  # not all that end so: others have such files, too
        part.unlink(missing_ok=True)


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


def write_file(file: Path, data: bytes) -> None:
    """Write a file that is whole or not there."""
    with write_whole(file) as written:
        written.write(data)


def seal(manifest: dict) -> bytes:
    """Return a manifest as JSON that holds its own checksum."""
    text = json.dumps(manifest, indent=1)
    return json.dumps({**manifest, "crc": zlib.crc32(text.encode())}, indent=1).encode() + b"\n"


def unseal(data: bytes) -> dict:
    """Return a sealed manifest, without its checksum.

    Raises:
        ValueError: it is not what was sealed.
    """
    manifest = json.loads(data)
    checked = {key: value for key, value in manifest.items() if key != "crc"} if isinstance(manifest, dict) else {}
    if seal(checked) != data:
        raise ValueError("its checksum does not fit")
    return checked


def npy(array) -> bytes:
    """Return an array as the bytes of an .npy file."""
    import numpy

    written = io.BytesIO()
    numpy.save(written, array, allow_pickle=False)
    return written.getvalue()


def size_and_checksum(data: bytes) -> dict:
    """Return what a manifest holds of a file with these contents, for `find_fault`."""
    return {"bytes": len(data), "crc": zlib.crc32(data)}


def find_fault(file: Path, expected: dict) -> str | None:
    """Say what is wrong with a file whose size, and checksum if there is one, a manifest holds; None: nothing is."""
    try:
        size = file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return f"{file.name} is missing"
    if size != expected["bytes"]:
        return f"{file.name} has {size:,} bytes where {expected['bytes']:,} were written"
    if "crc" in expected and zlib.crc32(file.read_bytes()) != expected["crc"]:
        return f"{file.name} is not what was written: its checksum does not fit"
    return None


def whole_number(name: str, value, least: int) -> int | None:
    """Return an argument as an int, which JSON can carry; None stays None.

    Raises:
        ValueError: it is no whole number, or below the least.
    """
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name} is a whole number, {least} or more, got {value!r}")
    return number


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Let one process at a time into a folder; the system releases the lock when a process dies."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network drives have none either
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{folder}: another process writes here, and this one waits for it to end", flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # Windows opens no folder, and some network drives sync none
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
