"""Compiled programs kept in a folder: what one session's compiler has made, the next one loads."""

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tpukit.accelerators.c_library import BuildError, compiled
from tpukit.essentials.display import InvalidValueError, counted

_SOURCES = Path(__file__).parent / "kept"
_LIMIT = 2 * 10**9  # bytes
_DAY = 86400.0  # seconds, after which a file that is not whole is nobody's any more


class Done(ctypes.Structure):
    """What a process has done with the programs of a launch; `keeper.c` writes it."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("loaded", "compiled", "doing")),
        *((name, ctypes.c_double) for name in ("loading_seconds", "compiling_seconds", "waiting_seconds")),
    ]
    _WORDS = ("compiling", "loading", "compiling", "waiting for another process to compile")

    def now(self) -> tuple[str, bool]:
        """Return what it does right now, in words, and whether another process does it."""
        doing = self.doing
        return self._WORDS[doing], doing == 3


class _Page(ctypes.Structure):
    _fields_ = [("processes", ctypes.c_int64), ("told", ctypes.c_int64 * 4), ("done", Done * 256)]


@dataclass(frozen=True)
class CompileCache:
    """The folders of compiled programs of a launch.

    Attributes:
        folders: the first is written, all are read.
        library: between torch_xla and its plugin; None where a backend has a way of its own.
        page: what the processes of the launch share.
    """

    folders: tuple[Path, ...]
    library: ctypes.CDLL | None = None
    page: int = 0

    def enter(self) -> Done:
        """Put the library in front of the plugin that this worker's client will load; return what it counts."""
        # torch_xla reads the one when the client starts (2.8 and 2.9); its import has set the other to libtpu's file.
        plugin = os.environ.get("TPU_LIBRARY_PATH") or os.environ["PTXLA_TPU_LIBRARY_PATH"]
        os.environ["TPU_LIBRARY_PATH"] = self.library._name
        return Done.from_address(self.library.kept_join(os.fsencode(plugin)))

    def summary(self) -> str:
        """Say in one line what the processes of the launch have compiled and loaded; "" if nothing."""
        if not self.library:
            return ""
        page = _Page.from_address(self.page)
        done = page.done[: min(page.processes, len(page.done))]
        made, had = sum(one.compiled for one in done), sum(one.loaded for one in done)
        if not made + had:
            return ""
        seconds = sum(one.loading_seconds - one.waiting_seconds for one in done)
        compiling = sum(one.compiling_seconds for one in done)
        each = f" by {len(done)} processes" if len(done) > 1 else ""
        words = [f"{counted(had, 'program')} loaded in {seconds:.1f} s"] * bool(had)
        words += [f"{made} compiled in {compiling:.1f} s"] * bool(made)
        return f"compiled programs{each}: {', '.join(words)} ({self.folders[0]})"

    def close(self) -> None:
        """End what the processes share, and remove the programs that nobody has used for longest."""
        if self.library:
            self.library.kept_close(self.page)
            with contextlib.suppress(OSError):
                remove_oldest(self.folders[0])


def open_compile_cache(folders: Iterable[Path], say: Callable[[str], object]) -> CompileCache | None:
    """Make the folders and the library ready for the workers of a launch; None where that fails, which is said.

    Raises:
        ValueError: others can write to a folder, whose files would be loaded as code.
    """
    folders = own_folders(folders)
    try:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise BuildError("libtpu is for Linux on x86-64")
        library = ctypes.CDLL(str(compiled("libtpukit-kept.so", _SOURCES)))
    except (BuildError, OSError) as error:
        say(
            f"compile_cache: this launch goes on without it: {getattr(error, 'fact', error)}; nothing is kept or loaded"
        )
        return None
    library.kept_open.restype = library.kept_join.restype = ctypes.c_void_p
    library.kept_close.argtypes = [ctypes.c_void_p]
    page = library.kept_open(os.fsencode("\n".join(map(str, folders))))
    return CompileCache(folders, library, page)


def own_folders(folders: Iterable[Path]) -> tuple[Path, ...]:
    """Make the first folder, for this user alone, and return those that are there.

    Raises:
        ValueError: others can write to one of them.
        OSError: the first cannot be made.
    """
    first, *others = folders
    first.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = (first, *(folder for folder in others if folder.is_dir()))
    for folder in found:
        facts = folder.stat()
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY  # as Kaggle's inputs are: whoever named it, attached it
        if facts.st_mode & 0o022 or (facts.st_uid not in (os.getuid(), 0) and not read_only):
            raise InvalidValueError(
                f"compile_cache loads what is in {folder} as code, and others can write there",
                found=f"it is of user {facts.st_uid}, mode {facts.st_mode & 0o777:o}; this is user {os.getuid()}",
                fix=f"a folder of your own: chmod 700 {folder}, if it is yours and you know what is in it",
            )
    return found


def remove_oldest(folder: Path, limit: int = _LIMIT) -> None:
    """Remove the programs that nobody has used for longest, until the folder has no more than so many bytes."""
    files = [(file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir() if file.is_file()]
    newest, kept = max((when for when, *_ in files), default=0.0), 0
    for when, size, file in sorted(files, reverse=True):
        kept += size
        unfinished = file.suffix in (".part", ".lock") and when < newest - _DAY  # of a process that was killed
        if unfinished or (file.suffix == ".pjrt" and kept > limit):
            file.unlink(missing_ok=True)
