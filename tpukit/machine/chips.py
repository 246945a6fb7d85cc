"""Who holds the chips: processes with a chip's device node open, read from /proc."""

import os
import re
from collections.abc import Iterator
from pathlib import Path


def is_chip(node: str) -> bool:
    """Say whether a name in /dev or /dev/vfio is a chip's: accel0 to v4, a number (the IOMMU group) from v5e."""
    return re.fullmatch(r"(accel)?\d+", node) is not None


def chip_holders(proc: Path, dev: Path) -> Iterator[tuple[int, str]]:
    """Yield (process, device node) for every chip that is open somewhere, as far as this user may look."""
    folders = (str(dev.resolve()), str((dev / "vfio").resolve()))
    for process in entries(proc):
        if not process.name.isdigit():
            continue
        for fd in entries(process / "fd"):
            try:
                target = os.readlink(fd)
            except OSError:  # closed a moment ago
                continue
            folder, _, node = target.rpartition("/")
            if folder in folders and is_chip(node):
                yield int(process.name), target


def entries(folder: Path) -> list[Path]:
    """List a folder; empty where it is missing, another user's, or that of a process that has just ended."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def ancestors(proc: Path, pid: int) -> list[int]:
    """Return the processes above a process, its parent first."""
    above = []
    while pid > 1:
        try:
            status = (proc / str(pid) / "status").read_text(errors="replace")
        except OSError:
            break
        pid = int(re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE).group(1))
        above.append(pid)
    return above


def command(proc: Path, pid: int) -> str:
    """Return the command line of a process, shortened."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return "its command cannot be read"
    line = " ".join(words)
    return line if len(line) <= 90 else line[:89] + "…"
