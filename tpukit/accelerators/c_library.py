"""Compile tpukit's C code on this machine once, and store the result in the user's cache folder."""

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tpukit.essentials.display import TpukitError

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")  # options of the C compiler
_SHARED = ("-fPIC", "-shared")  # further options for a library
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class BuildError(TpukitError, RuntimeError):
    """tpukit's C code cannot be compiled on this machine, or no folder can store the result."""


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of the C compiler; None if there is none.

    It is the compiler that CC names; without CC, the first of cc, gcc and clang on the PATH.
    """
    names = [environ["CC"]] if environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        if found := shutil.which(name, path=environ.get("PATH")):
            return found
    return None


def why_no_compiler(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return (fact, fix) for a message if there is no C compiler; None if there is one."""
    if find_compiler(environ):
        return None
    wanted = "cc, gcc or clang"
    fix = "apt-get install gcc libc6-dev"
    if environ.get("CC"):
        wanted = f"CC={environ['CC']}"
        fix = "set CC to an installed C compiler, or unset it"
    return f"no C compiler is here ({wanted} is not on the PATH)", fix


def compiled(
    name: str,
    sources: Path,
    *,
    headers: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Return the path of a compiled library or program; compile it if no such file exists.

    The file's name contains a hash of the sources, the headers, the options and the compiler's
    version. So a new tpukit or a new compiler makes a new file. The C code has this hash as the
    macro SOURCES. Several processes may call this function at the same time: no process gets the
    path of an incomplete file.

    Args:
        name: the name of the file, without the hash. "NAME.so" makes a library; a name without a
            suffix makes a program.
        sources: the folder of the C sources.
        headers: another folder with headers; None for none.
        environ: environment variables: CC and PATH for the compiler, XDG_CACHE_HOME and HOME for
            the cache folder.

    Raises:
        BuildError: there is no compiler, the compiler failed, or no folder can store the result.
    """
    if missing := why_no_compiler(environ):
        raise BuildError(f"{name} cannot be compiled", found=missing[0], fix=missing[1])
    compiler = find_compiler(environ)
    stem, suffix = os.path.splitext(name)
    flags = [*_FLAGS]
    files = []
    if suffix:  # ".so"
        flags += _SHARED
    if headers:
        flags.append(f"-I{headers}")
        files += sorted(headers.glob("*.h"))
    files += sorted(sources.glob("*.[ch]"))
    key = _key(compiler, flags, files)
    kept = cache_folder(environ) / f"{stem}-{key}{suffix}"
    if not kept.is_file():
        _compile([compiler, *flags, f'-DSOURCES="{key}"'], sources, kept)
    return kept


def _key(compiler: str, flags: Iterable[str], files: Iterable[Path]) -> str:
    """Return a hash of the compiler's version, its options, and the sources."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=False, timeout=60
    ).stdout
    key = hashlib.sha256(version)
    key.update(" ".join(flags).encode())
    for file in files:
        key.update(f"\0{file.name}\0".encode())
        key.update(file.read_bytes())
    return key.hexdigest()[:16]


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for compiled code; create it if it does not exist.

    The folder is XDG_CACHE_HOME/tpukit; without this variable, HOME/.cache/tpukit. Only this user
    may write to the folder, because tpukit loads the files as code. If others can write to it, or
    this user cannot, this function uses a folder in the temporary folder instead.

    Raises:
        BuildError: none of the folders can be used.
    """
    candidates = []
    if environ.get("XDG_CACHE_HOME"):
        candidates.append(Path(environ["XDG_CACHE_HOME"]) / "tpukit")
    elif environ.get("HOME"):
        candidates.append(Path(environ["HOME"]) / ".cache" / "tpukit")
    candidates.append(Path(tempfile.gettempdir()) / f"tpukit-{os.getuid()}")
    # A folder in /tmp may belong to another user who made it first, so check the owner.
    refused = []
    for folder in candidates:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            refused.append(f"{folder}: {error.strerror}")
            continue
        status = folder.stat()
        is_own = status.st_uid == os.getuid() and not status.st_mode & _WRITABLE_BY_OTHERS
        if is_own and os.access(folder, os.W_OK | os.X_OK):
            return folder
        refused.append(f"{folder}: not this user's alone, or not writable")
    raise BuildError(
        "no folder can hold the C code that tpukit compiles",
        found="; ".join(refused),
        fix="set XDG_CACHE_HOME to your own folder",
    )


def _compile(command: list[str], sources: Path, to: Path) -> None:
    files = [str(file) for file in sorted(sources.glob("*.c"))]
    # The compiler writes into a temporary folder, and `os.replace` then moves the finished file to
    # its place in one step: another process may be compiling or loading the same file.
    with tempfile.TemporaryDirectory(dir=to.parent, prefix="compiling-") as folder:
        made = Path(folder) / to.name
        command = [*command, "-o", str(made), *files, "-ldl", "-lpthread"]
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=300
        )
        if ended.returncode:
            # The first line with "error" is the cause; warnings often come before it.
            lines = ended.stderr.strip().splitlines()
            errors = [line for line in lines if "error" in line]
            first = [*errors, *lines, "it printed nothing"][0]
            raise BuildError(
                f"{to.name} does not compile",
                found=f"{command[0]} ended with status {ended.returncode}: {first}",
                fix="set CC to another compiler: GCC 10 or later, or clang",
            )
        os.replace(made, to)
