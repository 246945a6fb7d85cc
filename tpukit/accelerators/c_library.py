"""Compile tpukit's C code on this machine, once, and keep the result in the user's cache folder."""

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tpukit.essentials.display import TpukitError

# Of the C compiler; _SHARED for a library.
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")
_SHARED = ("-fPIC", "-shared")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class BuildError(TpukitError, RuntimeError):
    """The C code of tpukit cannot be compiled on this machine, or no folder can hold the result."""


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the C compiler that CC names, or the first on the PATH; None if there is none."""
    names = [environ["CC"]] if environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        if found := shutil.which(name, path=environ.get("PATH")):
            return found
    return None


def why_no_compiler(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return (the fact that there is no C compiler, the fix); None if there is a compiler."""
    if find_compiler(environ):
        return None
    wanted = f"CC={environ['CC']}" if environ.get("CC") else "cc, gcc or clang"
    return f"no C compiler is here ({wanted} is not on the PATH)", "apt-get install gcc libc6-dev"


def compiled(
    name: str,
    sources: Path,
    *,
    headers: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Return the library or program of a folder of C files; the first call compiles it.

    A hash of the sources, the headers and the compiler's version is part of the file's name, and
    the sources see it as the text SOURCES. A new tpukit or a new compiler thus makes a new file.
    Two processes may call this at once: each compiles, and the file appears whole.

    Args:
        name: the name of the file, without the hash; "NAME.so" makes a library, any other a
            program.
        sources: the folder of the C sources.
        headers: another folder of headers.
        environ: CC and PATH, for the compiler; XDG_CACHE_HOME and HOME, for the cache folder.

    Raises:
        BuildError: there is no compiler, it failed, or no folder can hold its result.
    """
    if missing := why_no_compiler(environ):
        raise BuildError(f"{name} cannot be compiled", found=missing[0], fix=missing[1])
    compiler = find_compiler(environ)
    stem, suffix = os.path.splitext(name)
    flags = [*_FLAGS]
    files = []
    if suffix:
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
    """Make and return the first folder that only this user can write to.

    Its files are loaded as code.

    Raises:
        BuildError: no folder can be written.
    """
    candidates = []
    if environ.get("XDG_CACHE_HOME"):
        candidates.append(Path(environ["XDG_CACHE_HOME"]) / "tpukit")
    elif environ.get("HOME"):
        candidates.append(Path(environ["HOME"]) / ".cache" / "tpukit")
    candidates.append(Path(tempfile.gettempdir()) / f"tpukit-{os.getuid()}")
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
    # The compiler writes into a folder next to the target, and the finished file is moved there in
    # one step: another process may be compiling or loading the same file.
    with tempfile.TemporaryDirectory(dir=to.parent, prefix="compiling-") as folder:
        made = Path(folder) / to.name
        command = [*command, "-o", str(made), *files, "-ldl", "-lpthread"]
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=300
        )
        if ended.returncode:
            lines = ended.stderr.strip().splitlines()
            errors = [line for line in lines if "error" in line]
            first = [*errors, *lines, "it printed nothing"][0]
            raise BuildError(
                f"{to.name} does not compile",
                found=f"{command[0]} ended with status {ended.returncode}: {first}",
                fix="set CC to another compiler (GCC 10 or later, or clang), or report this line",
            )
        os.replace(made, to)
