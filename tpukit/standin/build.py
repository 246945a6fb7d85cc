"""The stand-in's library: compiled once from the C sources beside this file, kept in the user's own cache folder."""

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpukit.runtimes import NotCompiled, compiled, why_no_compiler

# PJRT C API versions of the plugin that the sources were compiled for and run with. Within a major version a plugin's
# table of functions only grows, but its answers were seen to differ: 0.106 and 0.115 hung with an early form of this.
BUILT_FOR = ((0, 81),)

_SOURCES = Path(__file__).parent
_INSTALL = "pip install xla_cpu_pjrt==0.0.1"


class NoStandIn(NotCompiled):
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
    return why_no_compiler(environ)


def library(
    *, path: Iterable[str] | None = None, environ: Mapping[str, str] = os.environ, sources: Path = _SOURCES
) -> Path:
    """Return the compiled library's file, which is compiled on the first call: about three seconds.

    Args:
        path: where packages are, else `sys.path`.
        environ: CC and PATH, for the compiler; XDG_CACHE_HOME and HOME, for the cache folder.
        sources: the folder of the C sources.

    Raises:
        NoStandIn: the machine cannot have it (see `why_not`).
        NotCompiled: the compiler failed.
    """
    return program("libtpu-standin.so", sources, path=path, environ=environ)


def program(
    name: str, sources: Path, *, path: Iterable[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Path:
    """Return what a folder of C sources makes, which may use the plugin's header; `library` says the rest."""
    missing = _obstacle(path, environ, sys.platform, platform.machine())
    if missing:
        raise NoStandIn("there is no stand-in for a TPU here.", found=missing[0], fix=missing[1])
    return compiled(name, sources, headers=find_plugin(path).headers, environ=environ)
