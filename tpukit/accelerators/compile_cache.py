"""Store compiled programs in a folder, so that the next session loads them instead of compiling.

Before the kernel forks the workers, it calls `open_compile_cache`, which builds a small C library
(`kept/`). Each worker calls `CompileCache.enter` before its XLA client starts. From then on,
torch_xla calls this library instead of its plugin, which is libtpu or the simulator:

    torch_xla  ->  libtpukit-kept.so  ->  libtpu
                     |- if a folder has the program: load it
                     |- otherwise: let libtpu compile it, then write it to the first folder

In a page of shared memory, each process counts the programs that it has compiled and loaded. The
kernel prints the sums at the end of the launch.
"""

import contextlib
import ctypes
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tpukit.accelerators.c_library import BuildError, compiled
from tpukit.essentials.display import InvalidValueError, counted
from tpukit.essentials.environment import is_writable_by_others

_SOURCES = Path(__file__).parent / "kept"
_MOST_BYTES = 2 * 10**9  # limit of all programs in a folder
# An unfinished file that is older than this number of seconds belongs to a killed process.
_ONE_DAY = 86400.0
_WAITING = 3  # keeper.c's number for the state "waiting for another process to compile"


class Done(ctypes.Structure):
    """The programs that one process of the launch has compiled and loaded, in shared memory.

    `keeper.c` defines the same struct and writes the fields.
    """

    _fields_ = [
        ("loaded", ctypes.c_int64),
        ("compiled", ctypes.c_int64),
        ("doing", ctypes.c_int64),
        ("loading_seconds", ctypes.c_double),
        ("compiling_seconds", ctypes.c_double),
        ("waiting_seconds", ctypes.c_double),
    ]
    # By `doing`. While torch_xla prepares a compilation, before it calls the library, `doing` is 0.
    _WORDS = ("compiling", "loading", "compiling", "waiting for another process to compile")

    def now(self) -> tuple[str, bool]:
        """Return what the process does now, in words, and whether it waits for another process."""
        doing = self.doing
        return self._WORDS[doing], doing == _WAITING


class _Page(ctypes.Structure):
    """The memory that the processes of a launch share: the struct Page of `keeper.c`."""

    _fields_ = [
        ("processes", ctypes.c_int64),
        ("warned", ctypes.c_int64 * 4),
        ("done", Done * 256),
    ]


@dataclass(frozen=True)
class CompileCache:
    """The folders of compiled programs of a launch.

    Attributes:
        folders: programs are written to the first folder, and read from all folders.
        library: tpukit's C library, which stores and loads the programs; None if the backend has
            its own cache, as TorchTPU has.
        page: the address of the `_Page` in which all processes count their programs.
    """

    folders: tuple[Path, ...]
    library: ctypes.CDLL | None = None
    page: int = 0

    def enter(self) -> Done:
        """Make torch_xla load `library`, which itself loads libtpu; return the process's `Done`.

        Call this method in a worker, before the XLA client of the worker starts.
        """
        # torch_xla 2.8 and 2.9 read TPU_LIBRARY_PATH when the client starts. Their import has set
        # PTXLA_TPU_LIBRARY_PATH to the path of libtpu.
        plugin = os.environ.get("TPU_LIBRARY_PATH") or os.environ["PTXLA_TPU_LIBRARY_PATH"]
        os.environ["TPU_LIBRARY_PATH"] = self.library._name
        return Done.from_address(self.library.kept_join(os.fsencode(plugin)))

    def summary(self) -> str:
        """Return a line about the compiled and loaded programs of the launch; "" without any."""
        if not self.library:
            return ""
        page = _Page.from_address(self.page)
        processes = page.done[: min(page.processes, len(page.done))]
        compiled_count = sum(process.compiled for process in processes)
        loaded_count = sum(process.loaded for process in processes)
        parts = []
        if loaded_count:
            # If a process waits for another process to compile and then loads the program, its
            # loading time includes the wait. If it then compiles by itself, it does not.
            times = (done.loading_seconds - done.waiting_seconds for done in processes)
            seconds = sum(max(0.0, time) for time in times)
            parts.append(f"{counted(loaded_count, 'program')} loaded in {seconds:.1f} s")
        if compiled_count:
            seconds = sum(process.compiling_seconds for process in processes)
            parts.append(f"{compiled_count} compiled in {seconds:.1f} s")
        if not parts:
            return ""
        by = f" by {len(processes)} processes" if len(processes) > 1 else ""
        return f"compiled programs{by}: {', '.join(parts)} ({self.folders[0]})"

    def close(self) -> None:
        """Free the shared memory; if the first folder is too large, remove its oldest programs."""
        if self.library:
            self.library.kept_close(self.page)
            with contextlib.suppress(OSError):
                remove_oldest(self.folders[0])


def open_compile_cache(
    folders: Iterable[Path], say: Callable[[str], object]
) -> CompileCache | None:
    """Open the compilation cache of a launch: its folders, and the C library that uses them.

    Args:
        folders: the folders. Programs are read from all of them, and written to the first. The
            first is created if it does not exist.
        say: function that prints a line.

    Returns:
        the cache. If the C library cannot be built or loaded on this machine, this function prints
        a line, and the result is None.

    Raises:
        InvalidValueError: other users can write to a folder, whose files would be loaded as code.
        OSError: the first folder cannot be created.
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
    # Pointers: the default result type of ctypes is a 32-bit int, which would cut them.
    library.kept_open.restype = ctypes.c_void_p
    library.kept_join.restype = ctypes.c_void_p
    library.kept_close.argtypes = [ctypes.c_void_p]
    names = "\n".join(map(str, folders))
    return CompileCache(folders, library, page=library.kept_open(os.fsencode(names)))


def own_folders(folders: Iterable[Path]) -> tuple[Path, ...]:
    """Create the first folder, with access for this user only; return the folders that exist.

    Raises:
        InvalidValueError: other users can write to a folder.
        OSError: the first folder cannot be created.
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
        fix=f"use your own folder; or chmod 700 {shlex.quote(str(folder))}, if it is yours and you "
        "know its files",
    )


def remove_oldest(folder: Path, limit: int = _MOST_BYTES) -> None:
    """Remove the least recently used programs until the size of the rest is within a limit.

    Abandoned temporary files are removed as well.

    Args:
        folder: a folder with a file per program. The modification time of a file is the time of its
            last use.
        limit: the limit in bytes, 2 GB by default.
    """
    files = []
    for file in folder.iterdir():
        if file.is_file():
            facts = file.stat()
            files.append((facts.st_mtime, facts.st_size, file))
    files.sort(reverse=True)
    # A file's age is counted from the newest file, so the clock of this machine does not matter.
    newest = files[0][0] if files else 0.0
    total = 0
    for used, size, file in files:
        total += size
        is_temporary = file.suffix in (".part", ".lock")
        is_abandoned = is_temporary and used < newest - _ONE_DAY
        is_too_much = file.suffix == ".pjrt" and total > limit
        if is_abandoned or is_too_much:
            file.unlink(missing_ok=True)
