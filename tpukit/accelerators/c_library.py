"""What the kit has in C, compiled once where it is used and kept in the user's own cache folder."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tpukit.essentials.display import TpukitError

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")
_SHARED = ("-fPIC", "-shared")


class BuildError(TpukitError, RuntimeError):
    """What the kit has in C cannot be compiled on this machine, or kept."""


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the C compiler that CC names, or the first that is on the PATH; None where there is none."""
    names = [environ["CC"]] if environ.get("CC") else ["cc", "gcc", "clang"]
    found = (shutil.which(name, path=environ.get("PATH")) for name in names)
    return next((name for name in found if name), None)


def why_no_compiler(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return that there is no C compiler, and what brings one; None where there is one."""
    if find_compiler(environ):
        return None
    wanted = f"CC={environ['CC']}" if environ.get("CC") else "cc, gcc or clang"
    return f"no C compiler is here ({wanted} is not on the PATH)", "apt-get install gcc libc6-dev"


def compiled(name: str, sources: Path, *, headers: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the library, "….so", or the program that a folder of C files makes; compiled on the first call.

    What is kept is found again by a hash of the sources, of the headers and of the compiler's version, which the
    sources have as the text SOURCES; so a new kit or compiler makes a new one. Two processes may ask at once: each
    compiles, and the file appears whole.

    Args:
        name: of the file, before the hash; with ".so" it is a library.
        sources: the folder of the C sources.
        headers: another folder of headers.
        environ: CC and PATH, for the compiler; XDG_CACHE_HOME and HOME, for the cache folder.

    Raises:
        BuildError: there is no compiler, it failed, or there is no folder to keep what it makes.
    """
    if missing := why_no_compiler(environ):
        raise BuildError(f"{name} cannot be compiled", found=missing[0], fix=missing[1])
    compiler, stem, suffix = find_compiler(environ), *os.path.splitext(name)
    flags = (*_FLAGS, *(_SHARED if suffix else ()), *([f"-I{headers}"] if headers else ()))
    key = _key(compiler, flags, [*(sorted(headers.glob("*.h")) if headers else ()), *sorted(sources.glob("*.[ch]"))])
    kept = cache_folder(environ) / f"{stem}-{key}{suffix}"
    if not kept.is_file():
        _compile([compiler, *flags, f'-DSOURCES="{key}"'], sources, kept)
    return kept


def _key(compiler: str, flags: Iterable[str], files: Iterable[Path]) -> str:
    asked = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=60)
    key = hashlib.sha256(asked.stdout)
    key.update(" ".join(flags).encode())
    for file in files:
        key.update(f"\0{file.name}\0".encode())
        key.update(file.read_bytes())
    return key.hexdigest()[:16]


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the first folder of the user's own that can be written: what is in it will be loaded as code."""
    home = environ.get("XDG_CACHE_HOME") or (environ.get("HOME") and f"{environ['HOME']}/.cache")
    temporary = Path(tempfile.gettempdir()) / f"tpukit-{os.getuid()}"
    tried = []
    for folder in [*([Path(home) / "tpukit"] if home else []), temporary]:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            tried.append(f"{folder}: {error.strerror}")
            continue
        if folder.stat().st_uid != os.getuid() or not os.access(folder, os.W_OK | os.X_OK):
            tried.append(f"{folder}: not this user's, or not writable")
            continue
        return folder
    raise BuildError(
        "what the kit compiles can be kept nowhere",
        found="; ".join(tried),
        fix="set XDG_CACHE_HOME to a folder of your own",
    )


def _compile(command: list[str], sources: Path, to: Path) -> None:
    files = [str(file) for file in sorted(sources.glob("*.c"))]
    # Into a folder beside its place, and moved there whole: another process may be compiling or loading the same.
    with tempfile.TemporaryDirectory(dir=to.parent, prefix="compiling-") as folder:
        made = Path(folder) / to.name
        command = [*command, "-o", str(made), *files, "-ldl", "-lpthread"]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=300)
        if ended.returncode:
            said = ended.stderr.strip().splitlines()
            errors = [line for line in said if "error" in line] or said or ["it said nothing"]
            raise BuildError(
                f"{to.name} does not compile",
                found=f"{command[0]} ended with status {ended.returncode}: {errors[0]}",
                fix="give CC another compiler (GCC 10 or later, or clang), or report this line",
            )
        os.replace(made, to)
