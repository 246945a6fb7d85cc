"""The stand-in's library: compiled once from the C sources beside this file, kept in the user's own cache folder."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpukit.essentials.show import Explained

# PJRT C API versions of the plugin that the sources were compiled for and run with. Within a major version a plugin's
# table of functions only grows, but its answers were seen to differ: 0.106 and 0.115 hung with an early form of this.
BUILT_FOR = ((0, 81),)

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")
_SHARED = ("-fPIC", "-shared")
_INSTALL = "pip install xla_cpu_pjrt==0.0.1"


class NoStandIn(Explained, RuntimeError):
    """The stand-in cannot be had on this machine."""


@dataclass(frozen=True)
class Plugin:
    """The PJRT plugin for the CPU that the library hands its calls on to."""

    library: Path
    headers: Path  # the folder of pjrt_c_api.h
    version: tuple[int, int] | None  # of its PJRT C API; None if the header does not say


def find_plugin(path: Iterable[str] | None = None) -> Plugin | None:
    """Return the plugin that the package xla_cpu_pjrt brings, or None; `path` is where to look, else `sys.path`."""
    for entry in sys.path if path is None else path:
        folder = Path(entry or ".").absolute() / "xla_plugins" / "xla_cpu_pjrt"
        library, header = folder / "xla_cpu_pjrt.so", folder / "include" / "pjrt_c_api.h"
        if library.is_file() and header.is_file():
            found = re.findall(r"^#define PJRT_API_(?:MAJOR|MINOR) (\d+)$", header.read_text(), re.MULTILINE)
            return Plugin(library, header.parent, (int(found[0]), int(found[1])) if len(found) == 2 else None)
    return None


def why_not(
    *,
    path: Iterable[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    system: str = sys.platform,
    machine: str | None = None,
) -> str | None:
    """Return why this machine cannot have the stand-in and what would change that, in one line; None if it can.

    Compiles nothing, so a compiler that fails is found by `library` only.

    Args:
        path, environ: as in `library`.
        system, machine: as Python calls this machine; None for the one it runs on.
    """
    found = _obstacle(path, environ, system, machine or platform.machine())
    return found and ": ".join(found)


def _obstacle(path: Iterable[str] | None, environ: Mapping[str, str], system: str, machine: str) -> tuple | None:
    """Return the first thing that is missing, and what brings it."""
    if (system, machine) != ("linux", "x86_64"):
        return f"torch_xla runs on Linux on x86-64 only, and this is {system} on {machine}", "use such a machine"
    plugin = find_plugin(path)
    if plugin is None:
        return "the PJRT plugin for the CPU is not installed", _INSTALL
    if plugin.version not in BUILT_FOR:
        found = ".".join(map(str, plugin.version)) if plugin.version else "no version"
        known = ", ".join(f"{major}.{minor}" for major, minor in BUILT_FOR)
        return f"the installed plugin has PJRT {found}, and the stand-in was built for {known}", _INSTALL
    if _compiler(environ) is None:
        wanted = f"CC={environ['CC']}" if environ.get("CC") else "cc, gcc or clang"
        return f"no C compiler is here ({wanted} is not on the PATH)", "apt-get install gcc libc6-dev"
    return None


def library(
    *, path: Iterable[str] | None = None, environ: Mapping[str, str] = os.environ, sources: Path = _SOURCES
) -> Path:
    """Return the compiled library's file, which is compiled on the first call: about three seconds.

    What is kept is found again by a hash of the sources, the plugin's header and the compiler's version, so a new kit
    or compiler makes a new one. Two processes may ask at once: each compiles, and the file appears whole.

    Args:
        path: where packages are, else `sys.path`.
        environ: CC and PATH, for the compiler; XDG_CACHE_HOME and HOME, for the cache folder.
        sources: the folder of the C sources.

    Raises:
        NoStandIn: the machine cannot have it (see `why_not`), or the compiler failed.
    """
    return _built("libtpu-standin", ".so", sources, path=path, environ=environ)


def program(
    name: str, sources: Path, *, path: Iterable[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Path:
    """Return a program compiled from a folder of C sources, which may use the plugin's header, as `library` does."""
    return _built(name, "", sources, path=path, environ=environ)


def _built(name: str, suffix: str, sources: Path, *, path: Iterable[str] | None, environ: Mapping[str, str]) -> Path:
    missing = _obstacle(path, environ, sys.platform, platform.machine())
    if missing:
        raise NoStandIn("there is no stand-in for a TPU here.", found=missing[0], fix=missing[1])
    plugin, compiler = find_plugin(path), _compiler(environ)
    flags = (*_FLAGS, *(_SHARED if suffix else ()))
    kept = cache_folder(environ) / f"{name}-{_key(plugin, compiler, flags, sources)}{suffix}"
    if not kept.is_file():
        _compile(compiler, flags, plugin, sources, kept)
    return kept


def _compiler(environ: Mapping[str, str]) -> str | None:
    names = [environ["CC"]] if environ.get("CC") else ["cc", "gcc", "clang"]
    found = (shutil.which(name, path=environ.get("PATH")) for name in names)
    return next((name for name in found if name), None)


def _key(plugin: Plugin, compiler: str, flags: Iterable[str], sources: Path) -> str:
    asked = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=60)
    key = hashlib.sha256(asked.stdout)
    key.update(" ".join(flags).encode())
    for file in [plugin.headers / "pjrt_c_api.h", *sorted(sources.glob("*.[ch]"))]:
        key.update(f"\0{file.name}\0".encode())
        key.update(file.read_bytes())
    return key.hexdigest()[:16]


def cache_folder(environ: Mapping[str, str]) -> Path:
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
    raise NoStandIn(
        "what the stand-in is compiled to can be kept nowhere.",
        found="; ".join(tried),
        fix="set XDG_CACHE_HOME to a folder of your own",
    )


def _compile(compiler: str, flags: Iterable[str], plugin: Plugin, sources: Path, to: Path) -> None:
    files = [str(file) for file in sorted(sources.glob("*.c"))]
    # Into a folder beside its place, and moved there whole: another process may be compiling or loading the same.
    with tempfile.TemporaryDirectory(dir=to.parent, prefix="compiling-") as folder:
        made = Path(folder) / to.name
        command = [compiler, *flags, f"-I{plugin.headers}", "-o", str(made), *files, "-ldl", "-lpthread"]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=300)
        if ended.returncode:
            said = ended.stderr.strip().splitlines()
            errors = [line for line in said if "error" in line] or said or ["it said nothing"]
            raise NoStandIn(
                "the stand-in for a TPU does not compile.",
                found=f"{compiler} ended with status {ended.returncode}: {errors[0]}",
                fix="give CC another compiler (GCC 10 or later, or clang), or report this line",
            )
        os.replace(made, to)
