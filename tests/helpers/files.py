"""Files that are damaged on purpose, and file systems of a few megabytes."""

import shutil
import subprocess
from pathlib import Path

import pytest


def contents(folder):
    """Return the bytes of every file below a folder, by its name from there."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def flip(file, at=None):
    """Change one bit of a file: in its middle, or at a position."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    file.write_bytes(data)


def mounted(folder, options, then=":"):
    """Return a command that runs another one, which sees a new file system on the folder.

    `then` is a line of the shell that prepares it. Skips the test where nothing can be mounted.
    """
    script = f'mount -t tmpfs -o {options} tmpfs "{folder}" && {then} && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    has_unshare = shutil.which("unshare") is not None
    if not has_unshare or subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounting needs Linux and root")
    return command
