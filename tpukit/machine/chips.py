"""Which processes hold a chip, that is, have its device node open; read from /proc."""

import os
import re
from collections.abc import Iterator
from pathlib import Path


def is_chip(node: str) -> bool:
    """Return whether a name in /dev or /dev/vfio is a chip: `accel0` up to v4, an IOMMU group's number from v5e on."""
    return re.fullmatch(r"(accel)?\d+", node) is not None


def chip_holders(proc: Path, dev: Path) -> Iterator[tuple[int, str]]:
    """Yield (process id, device node) for every open chip; processes of other users are not visible to all users."""
    folders = (str(dev.resolve()), str((dev / "vfio").resolve()))
    for process in entries(proc):
        if not process.name.isdigit():
            continue
        for fd in entries(process / "fd"):
            try:
                target = os.readlink(fd)
            except OSError:  # closed since it was listed
                continue
            folder, _, node = target.rpartition("/")
            if folder in folders and is_chip(node):
                yield int(process.name), target


def entries(folder: Path) -> list[Path]:
    """List a folder; empty where it is missing, not readable, or belongs to a process that has just ended."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def ancestors(proc: Path, pid: int) -> list[int]:
    """Return the ids of the parent of a process, of its parent's parent, and so on."""
    above = []
    while pid > 1:  # the first process of a machine or container has no parent
        try:
            status = (proc / str(pid) / "status").read_text(errors="replace")
        except OSError:
            break
        pid = int(re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE).group(1))
        above.append(pid)
    return above


def command(proc: Path, pid: int) -> str:
    """Return the command line of a process, cut to 90 characters."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return "its command cannot be read"
    line = " ".join(words)
    return line if len(line) <= 90 else line[:89] + "…"
