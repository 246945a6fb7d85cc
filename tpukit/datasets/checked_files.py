"""Write files that are never incomplete, and check them when they are read."""

import io
import json
import operator
import zlib
from pathlib import Path

from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.environment import write_whole


def write_file(file: Path, data: bytes) -> None:
    """Write a file completely or not at all, even if the power fails."""
    with write_whole(file) as written:
        written.write(data)


def remove_parts(folder: Path) -> None:
    """Remove files of interrupted writes. No process may write to the folder during the call."""
    # Not "*.part", because other programs have files with this ending.
    for part in folder.glob("*.[0-9]*.part"):
        part.unlink(missing_ok=True)


def seal(manifest: dict) -> bytes:
    """Return a manifest as JSON with an entry "crc", the checksum of the other entries."""
    text = json.dumps(manifest, indent=1)
    return json.dumps({**manifest, "crc": zlib.crc32(text.encode())}, indent=1).encode() + b"\n"


def unseal(data: bytes) -> dict:
    """Read the result of `seal`, and return the manifest; ValueError if the bytes have changed."""
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
    """Return size and checksum of a file's contents, in the form that `find_fault` expects."""
    return {"bytes": len(data), "crc": zlib.crc32(data)}


def find_fault(file: Path, expected: dict) -> str | None:
    """Compare a file with its entry in a manifest; return the fault in words, or None.

    Args:
        file: the path of the file.
        expected: the entry: "bytes", the size, and "crc", the checksum. Without "crc", only the
            size is compared.
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


def whole_number(name: str, value, least: int, *, is_optional: bool = True) -> int | None:
    """Check that an argument is a whole number or None, and return it as an int or None.

    Args:
        name: the name of the argument, for the message.
        value: the argument, such as 64 or numpy.int64(64).
        least: the smallest value that is allowed.
        is_optional: False if None is not allowed.

    Raises:
        ValueError: the argument is not a whole number, or it is below `least`.
    """
    if value is None and is_optional:
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
