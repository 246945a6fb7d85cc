"""The user's files, kept as they are while preflight looks at what a worker function does."""

import contextlib
import ctypes
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path

from tpukit.essentials.show import Explained

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Python's audit events of functions that change files, and where their arguments name one: an "r+" is an open, too.
_CHANGES = {
    **{"os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,)},
    **{"os.truncate": (0,), "os.chmod": (0,), "sqlite3.connect": (0,)},
}
_DEVICES = ("/dev", "/proc")  # /dev/shm, where processes meet, among them
# linux/landlock.h: rights to change anything in a folder, by the version of the interface that brought them.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _NO_NEW_PRIVILEGES = 444, 445, 446, 38
_RIGHTS = {1: 0x1FF2, 2: 0x2000, 3: 0x4000}


class ChangesFiles(Explained, PermissionError):
    """A function that preflight looks at would change a file, and what comes back from the device is no result."""


def guard_files(folder: Path) -> None:
    """Refuse, in this process from here on, to change files outside of `folder`, where temporary ones go from now on.

    The user's cache folder may be written as well, since a download of weights belongs there. It cannot be undone.
    Python's own functions and `torch.save` are refused with the line that tried. What libraries in C and other programs
    write is refused by the kernel, where that has Landlock (Linux 5.13), with a PermissionError of theirs.
    """
    import torch.serialization

    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    sys.dont_write_bytecode = True
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    allowed = tuple(os.path.realpath(one) for one in (folder, caches, *_DEVICES))

    def check(path: object) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # the number of a file that is open
        path = os.fsdecode(path)
        if path != ":memory:" and not _is_in(os.path.realpath(path), allowed):
            raise _refusal(path)

    def audit(event: str, arguments: tuple) -> None:
        if event == "open":
            if isinstance(arguments[2], int) and arguments[2] & _WRITES:
                check(arguments[0])
        elif event == "os.mkdir":
            if not os.path.isdir(arguments[0]):  # mkdir(exist_ok=True) of one that is there changes nothing
                check(arguments[0])
        elif event in _CHANGES:
            for place in _CHANGES[event]:
                check(arguments[place])

    sys.addaudithook(audit)
    opened = torch.serialization._open_zipfile_writer  # what torch.save calls, by whatever name it was imported

    def open_checked(name_or_buffer):
        check(name_or_buffer)  # C++ opens it, of which Python's audit hooks hear nothing
        return opened(name_or_buffer)

    torch.serialization._open_zipfile_writer = open_checked
    _restrict_by_the_kernel(allowed)


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}{os.sep}") for folder in folders)


def _refusal(path: str) -> ChangesFiles:
    import torch

    folders = (Path(__file__).parents[1], Path(os.__file__).parent)
    inside = [f"{folder}{os.sep}" for folder in folders]
    inside.append(str(Path(torch.__file__).parent))  # and torchvision, torch_xla, which stand beside it
    lines = (one for one in reversed(traceback.extract_stack()) if not one.filename.startswith((*inside, "<")))
    line = next(lines, None)
    return ChangesFiles(
        f"preflight only looks at a function, and keeps it from writing {path}",
        found=f"{Path(line.filename).name}:{line.lineno}: {line.line}" if line else "",
        fix="core.save(value, path), which writes nothing meanwhile; or write below tempfile.gettempdir()",
    )


def _restrict_by_the_kernel(allowed: Iterable[str]) -> None:
    """Have Linux refuse what this thread, its threads and its programs change elsewhere; nothing where it cannot."""
    call = ctypes.CDLL(None).syscall
    version = call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    rights = sum(added for since, added in _RIGHTS.items() if since <= version)
    if version < 1:
        return
    ruleset = call(_LANDLOCK_CREATE, ctypes.byref(ctypes.c_uint64(rights)), ctypes.c_size_t(8), 0)
    for folder in allowed:
        with contextlib.suppress(OSError):  # there is no such folder
            place = os.open(folder, os.O_PATH)
            rule = rights.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
            call(_LANDLOCK_ADD, ruleset, 1, rule, 0)
            os.close(place)
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
