"""Keep compiled programs in a folder, so that the next session loads them instead of compiling.

The kernel builds a small C library (`kept/`) and calls `open_compile_cache` before it forks the
workers. Each worker calls `CompileCache.enter` before its XLA client starts. The library then
stands between torch_xla and its plugin, which is libtpu or the simulator:

    torch_xla  ->  libtpukit-kept.so  ->  libtpu
                     |- program found in a folder: load it
                     |- otherwise: let libtpu compile it, then write it to the first folder

A page of memory that all processes share counts what each of them has compiled and loaded. The
kernel prints the sums at the end of the launch.
"""

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
from tpukit.essentials.environment import is_writable_by_others

_SOURCES = Path(__file__).parent / "kept"
_MOST_BYTES = 2 * 10**9  # per folder
# Seconds after which an unfinished file belongs to a process that was killed.
_ONE_DAY = 86400.0
_WAITING = 3  # the last of the states that keeper.c numbers


class Done(ctypes.Structure):
    """The counts of one process of the launch; `keeper.c` has the same fields and writes them."""

    _fields_ = [
        ("loaded", ctypes.c_int64),
        ("compiled", ctypes.c_int64),
        ("doing", ctypes.c_int64),
        ("loading_seconds", ctypes.c_double),
        ("compiling_seconds", ctypes.c_double),
        ("waiting_seconds", ctypes.c_double),
    ]
    _WORDS = ("compiling", "loading", "compiling", "waiting for another process to compile")

    def now(self) -> tuple[str, bool]:
        """Return the present activity in words, and whether another process compiles."""
        doing = self.doing
        return self._WORDS[doing], doing == _WAITING


class _Page(ctypes.Structure):
    """The memory that the processes of a launch share; `keeper.c` calls it Page."""

    _fields_ = [
        ("processes", ctypes.c_int64),
        ("warned", ctypes.c_int64 * 4),
        ("done", Done * 256),
    ]


@dataclass(frozen=True)
class CompileCache:
    """The folders of compiled programs of a launch.

    Attributes:
        folders: programs are written to the first, and read from all.
        library: the C library; None if the backend has a cache itself, as TorchTPU does.
        page: the address of the memory that the processes of the launch share.
    """

    folders: tuple[Path, ...]
    library: ctypes.CDLL | None = None
    page: int = 0

    def enter(self) -> Done:
        """Put the library before the plugin that this worker will load; return its counts."""
        # torch_xla reads TPU_LIBRARY_PATH when the client starts (2.8 and 2.9). Its import has set
        # PTXLA_TPU_LIBRARY_PATH to the file of libtpu.
        plugin = os.environ.get("TPU_LIBRARY_PATH") or os.environ["PTXLA_TPU_LIBRARY_PATH"]
        os.environ["TPU_LIBRARY_PATH"] = self.library._name
        return Done.from_address(self.library.kept_join(os.fsencode(plugin)))

    def summary(self) -> str:
        """Return a line about the compiled and loaded programs of the launch; "" for none."""
        if not self.library:
            return ""
        page = _Page.from_address(self.page)
        processes = page.done[: min(page.processes, len(page.done))]
        compiled_count = sum(process.compiled for process in processes)
        loaded_count = sum(process.loaded for process in processes)
        parts = []
        if loaded_count:
            # A process that waits for the compiler of another one counts it as loading.
            seconds = sum(done.loading_seconds - done.waiting_seconds for done in processes)
            parts.append(f"{counted(loaded_count, 'program')} loaded in {seconds:.1f} s")
        if compiled_count:
            seconds = sum(process.compiling_seconds for process in processes)
            parts.append(f"{compiled_count} compiled in {seconds:.1f} s")
        if not parts:
            return ""
        by = f" by {len(processes)} processes" if len(processes) > 1 else ""
        return f"compiled programs{by}: {', '.join(parts)} ({self.folders[0]})"

    def close(self) -> None:
        """Free the shared memory, and remove the programs that were unused for longest."""
        if self.library:
            self.library.kept_close(self.page)
            with contextlib.suppress(OSError):
                remove_oldest(self.folders[0])


def open_compile_cache(
    folders: Iterable[Path], say: Callable[[str], object]
) -> CompileCache | None:
    """Prepare the folders and the library for the workers of a launch.

    Args:
        folders: programs are written to the first, which is made, and read from all.
        say: prints a line.

    Returns:
        The cache; None, with a printed line, if the library cannot be built or loaded here.

    Raises:
        InvalidValueError: others can write to a folder, and its files would be loaded as code.
    """
    folders = own_folders(folders)
    try:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise BuildError("libtpu is for Linux on x86-64")
        library = ctypes.CDLL(str(compiled("libtpukit-kept.so", _SOURCES)))
    except (BuildError, OSError) as error:
        reason = getattr(error, "fact", error)
        say(f"compile_cache is off in this launch: {reason}; no program is written or loaded")
        return None
    library.kept_open.restype = ctypes.c_void_p
    library.kept_join.restype = ctypes.c_void_p
    library.kept_close.argtypes = [ctypes.c_void_p]
    names = "\n".join(map(str, folders))
    return CompileCache(folders, library, page=library.kept_open(os.fsencode(names)))


def own_folders(folders: Iterable[Path]) -> tuple[Path, ...]:
    """Make the first folder, for this user alone, and return those that exist.

    Raises:
        InvalidValueError: others can write to a folder.
        OSError: the first folder cannot be made.
    """
    first, *others = folders
    first.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = (first, *(folder for folder in others if folder.is_dir()))
    for folder in found:
        _refuse_writable_by_others(folder)
    return found


def _refuse_writable_by_others(folder: Path) -> None:
    if not is_writable_by_others(folder):
        return
    facts = folder.stat()
    mode = f"{facts.st_mode & 0o777:o}"
    raise InvalidValueError(
        f"compile_cache loads the files of {folder} as code, and other users can write to it",
        found=f"the folder belongs to user {facts.st_uid}, mode {mode}; this is user {os.getuid()}",
        fix=f"use your own folder; or chmod 700 {folder}, if it is yours and you know its files",
    )


def remove_oldest(folder: Path, limit: int = _MOST_BYTES) -> None:
    """Remove the programs that were unused for longest, until the others fit into the limit.

    Args:
        folder: with a file per program; a use sets its modification time.
        limit: bytes.
    """
    files = []
    for file in folder.iterdir():
        if file.is_file():
            facts = file.stat()
            files.append((facts.st_mtime, facts.st_size, file))
    files.sort(reverse=True)
    newest = files[0][0] if files else 0.0
    total = 0
    for used, size, file in files:
        total += size
        is_temporary = file.suffix in (".part", ".lock")
        is_abandoned = is_temporary and used < newest - _ONE_DAY
        is_too_much = file.suffix == ".pjrt" and total > limit
        if is_abandoned or is_too_much:
            file.unlink(missing_ok=True)
