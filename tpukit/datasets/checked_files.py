"""Write files that are either complete or absent, and check them when they are read."""

import io
import json
import operator
import zlib
from pathlib import Path

from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.environment import write_whole


def write_file(file: Path, data: bytes) -> None:
    """Write a file so that it is either complete or absent."""
    with write_whole(file) as written:
        written.write(data)


def remove_parts(folder: Path) -> None:
    """Remove unfinished files of `write_whole` in a folder; no process may be writing there."""
    # Not "*.part", because other programs have files with this ending.
    for part in folder.glob("*.[0-9]*.part"):
        part.unlink(missing_ok=True)


def seal(manifest: dict) -> bytes:
    """Return a manifest as JSON that holds its own checksum."""
    text = json.dumps(manifest, indent=1)
    return json.dumps({**manifest, "crc": zlib.crc32(text.encode())}, indent=1).encode() + b"\n"


def unseal(data: bytes) -> dict:
    """Return a sealed manifest without its checksum; ValueError if it has changed."""
    manifest = json.loads(data)
    checked = {}
    if isinstance(manifest, dict):
        checked = {key: value for key, value in manifest.items() if key != "crc"}
    if seal(checked) != data:
        raise ValueError("its checksum does not match")
    return checked


def npy(array) -> bytes:
    """Return an array as the bytes of an .npy file."""
    import numpy

    written = io.BytesIO()
    numpy.save(written, array, allow_pickle=False)
    return written.getvalue()


def size_and_checksum(data: bytes) -> dict:
    """Return the entry of a manifest for a file with these contents, for `find_fault`."""
    return {"bytes": len(data), "crc": zlib.crc32(data)}


def find_fault(file: Path, expected: dict) -> str | None:
    """Return the fault of a file, by its entry in a manifest; None if it has none.

    Args:
        file: the file.
        expected: "bytes", its size, and "crc", its checksum, which is not compared if it is absent.
    """
    try:
        size = file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return f"{file.name} is missing"
    if size != expected["bytes"]:
        return f"{file.name} has {size:,} bytes where {expected['bytes']:,} were written"
    if "crc" in expected and zlib.crc32(file.read_bytes()) != expected["crc"]:
        return f"{file.name} is not what was written: its checksum does not match"
    return None


def whole_number(name: str, value, least: int) -> int | None:
    """Return an argument as an int, which JSON can hold, and None as None.

    Args:
        name: the name of the argument, for the message.
        value: the argument, such as 64 or numpy.int64(64).
        least: the smallest value that is allowed.

    Raises:
        ValueError: the argument is not a whole number, or too small.
    """
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise InvalidValueError(
            f"{name} must be a whole number, {least} or more, got {value!r}",
            fix=f"{name}={max(least, 8)}",
        )
    return number
