"""Prevent changes of the user's files while preflight runs a worker function.

There are three layers, because each detects only some changes:

    Python's audit hook    changes by Python's own functions: open, os.remove, sqlite3.connect, ...
    a patch of torch.save  the file that torch.save opens in C++
    Landlock, in Linux     changes by libraries in C and by other programs
"""

import contextlib
import ctypes
import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from tpukit.essentials.display import TpukitError
from tpukit.preflight.torch_patches import check_torch_save

# Flags of `open` with which a file may be changed or created.
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Python's audit events of functions that change files. For each path, the index of the path in the
# event's arguments, and the index of its `dir_fd`, the open folder to which a relative path
# belongs; None if there is no `dir_fd`. The event "open" also has flags, see `_audit`.
_CHANGES = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "sqlite3.connect": ((0, None),),
}
_NO_FOLDER = -1  # the value of dir_fd in audit events if the caller passed none
# Variables of folders for downloads, by the documentation of huggingface_hub, timm, torch.hub and
# kagglehub.
_CACHE_VARIABLES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "KAGGLEHUB_CACHE",
    "TIMM_HOME",
    "TORCH_HOME",
    "XDG_CACHE_HOME",
)
_PACKAGES = {"site-packages", "dist-packages"}  # names of the folders of installed packages
_DEVICES = ("/dev", "/proc")  # includes /dev/shm, through which processes communicate

# Numbers of system calls, and of an option of prctl.
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_NO_NEW_PRIVILEGES = 38
# The rights to change files and folders, by the Landlock version that introduced them; from
# linux/landlock.h.
_RIGHTS = {1: 0x1FF2, 2: 0x2000, 3: 0x4000}
_VERSION_QUERY = 1  # a flag of _LANDLOCK_CREATE
_RULE_OF_A_FOLDER = 1  # a kind of rule for _LANDLOCK_ADD


class FileChangeError(TpukitError, PermissionError):
    """The worker function has tried to change a file during a preflight."""


def guard_files(folder: Path) -> None:
    """From now on, prevent changes of files outside of `folder` by this process.

    Temporary files are written to `folder`. Changes in /dev, /proc and the user's cache folders are
    also allowed. The caches are for downloaded weights: `~/.cache`, and the folders in `HF_HOME`,
    `TORCH_HOME` and similar variables. Missing caches are made. The guard cannot be removed.

    Python's own functions and `torch.save` raise `FileChangeError` with the user's line. Libraries
    in C and other programs get a PermissionError from Linux, if it has Landlock (Linux 5.13).
    """
    tempfile.tempdir = str(folder)
    os.environ["TMPDIR"] = str(folder)
    sys.dont_write_bytecode = True  # else an import of the function would write .pyc files
    allowed = tuple(os.path.realpath(place) for place in (folder, *_caches(), *_DEVICES))

    def check(path: object, dir_fd: int = _NO_FOLDER) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # the descriptor of an open file, which was checked when it was opened
        path = os.fsdecode(path)
        if dir_fd != _NO_FOLDER:
            path = os.path.join(_folder_of(dir_fd), path)
        if path != ":memory:" and not _is_in(os.path.realpath(path), allowed):
            raise _refusal(path)

    sys.addaudithook(functools.partial(_audit, check))
    check_torch_save(check)
    _restrict_by_the_kernel(allowed)


def _caches() -> list[Path]:
    """Return the folders for downloads: `~/.cache`, and those of the variables that are set."""
    caches = [Path.home() / ".cache"]
    for variable in _CACHE_VARIABLES:
        if os.environ.get(variable):
            caches.append(Path(os.environ[variable]).expanduser())
    for cache in caches:
        # Make the folder, because Landlock supports rules only for folders that exist.
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
    return caches


def _folder_of(descriptor: int) -> str:
    """Return the path of an open folder."""
    if Path("/proc/self/fd").is_dir():
        return os.readlink(f"/proc/self/fd/{descriptor}")
    import fcntl  # macOS has no /proc

    return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))


def _audit(check: Callable[..., None], event: str, arguments: tuple) -> None:
    """Call `check` for each path that an audit event is about to change."""
    if event == "open":
        flags = arguments[2]
        if isinstance(flags, int) and flags & _WRITES:
            check(arguments[0])
    elif event == "os.mkdir":
        path, _, dir_fd = arguments
        # If the folder exists, as with mkdir(exist_ok=True), nothing changes.
        if dir_fd != _NO_FOLDER or not os.path.isdir(path):
            check(path, dir_fd)
    elif event in _CHANGES:
        for path, descriptor in _CHANGES[event]:
            dir_fd = _NO_FOLDER if descriptor is None else arguments[descriptor]
            check(arguments[path], dir_fd)


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}{os.sep}") for folder in folders)


def _refusal(path: str) -> FileChangeError:
    inside = (
        f"{Path(__file__).parents[1]}{os.sep}",
        f"{Path(os.__file__).parent}{os.sep}",
        "<",  # code without a file
    )
    found = ""
    for frame in traceback.extract_stack():
        is_installed = not _PACKAGES.isdisjoint(Path(frame.filename).parts)
        if not is_installed and not frame.filename.startswith(inside):
            found = f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return FileChangeError(
        f"a preflight does not let the function write {path}",
        found=found,
        fix="core.save(value, path), which writes nothing during a preflight; or write below "
        "tempfile.gettempdir(), or to a cache that HF_HOME or TORCH_HOME names",
    )


def _restrict_by_the_kernel(allowed: Iterable[str]) -> None:
    """Let Linux prevent changes outside of the folders `allowed`, if it has Landlock.

    The restriction is for this thread, and for the threads and programs that it starts from now on.
    """
    call = ctypes.CDLL(None).syscall
    version = call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _VERSION_QUERY)
    if version < 1:
        return
    rights = sum(added for since, added in _RIGHTS.items() if since <= version)
    ruleset = call(_LANDLOCK_CREATE, ctypes.byref(ctypes.c_uint64(rights)), ctypes.c_size_t(8), 0)
    for folder in allowed:
        with contextlib.suppress(OSError):  # the folder does not exist
            place = os.open(folder, os.O_PATH)
            # struct landlock_path_beneath_attr: the rights, then the folder.
            rule = rights.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
            call(_LANDLOCK_ADD, ruleset, _RULE_OF_A_FOLDER, rule, 0)
            os.close(place)
    # Linux requires this option, because a setuid program could misbehave under the restriction.
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
