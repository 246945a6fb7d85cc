"""Compile the simulated libtpu from its C sources, once, into the user's cache folder.

The simulated library passes most calls of torch_xla on to a PJRT plugin for the CPU, of the package
xla_cpu_pjrt. It adds the TPU's topology and collectives.
"""

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpukit.accelerators import BuildError, compiled, why_no_compiler

# The versions of the plugin's PJRT C API that the sources were compiled for and tested with. Within
# a major version a plugin's table of functions only grows, but the functions change what they do:
# with 0.106 and 0.115, an early form of the simulator waited forever.
BUILT_FOR = ((0, 81),)

_SOURCES = Path(__file__).parent
_INSTALL = "pip install xla_cpu_pjrt==0.0.1"
_VERSION = re.compile(r"^#define PJRT_API_(?:MAJOR|MINOR) (\d+)$", re.MULTILINE)


class SimulatorError(BuildError):
    """This machine cannot simulate a TPU."""


@dataclass(frozen=True)
class Plugin:
    """The PJRT plugin for the CPU.

    Attributes:
        library: the path of the plugin's file.
        headers: the folder that contains pjrt_c_api.h.
        version: the version of its PJRT C API, (major, minor); None if the header does not contain
            it.
    """

    library: Path
    headers: Path
    version: tuple[int, int] | None


def find_plugin(path: Iterable[str] | None = None) -> Plugin | None:
    """Return the plugin of the package xla_cpu_pjrt; None if the package is not installed.

    Args:
        path: the folders with packages; None for `sys.path`.
    """
    for entry in sys.path if path is None else path:
        folder = Path(entry or ".").absolute() / "xla_plugins" / "xla_cpu_pjrt"
        library = folder / "xla_cpu_pjrt.so"
        header = folder / "include" / "pjrt_c_api.h"
        if library.is_file() and header.is_file():
            # The header defines the two numbers, major before minor.
            numbers = [int(number) for number in _VERSION.findall(header.read_text())]
            version = (numbers[0], numbers[1]) if len(numbers) == 2 else None
            return Plugin(library, header.parent, version)
    return None


def why_not(
    *,
    path: Iterable[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    system: str = sys.platform,
    machine: str | None = None,
) -> str | None:
    """Return the reason why this machine cannot simulate a TPU, with the fix; None if it can.

    The result has one line. This function compiles nothing, so only `library` can find errors of
    the compiler.

    Args:
        path, environ: as in `library`.
        system: the operating system, as `sys.platform` names it.
        machine: the kind of processor, as `platform.machine` names it; None for this machine's.
    """
    missing = _missing(path, environ, system=system, machine=machine or platform.machine())
    return ": ".join(missing) if missing else None


def _missing(
    path: Iterable[str] | None,
    environ: Mapping[str, str],
    *,
    system: str,
    machine: str,
) -> tuple[str, str] | None:
    """Return (what is missing, the fix) for the first missing part; None if nothing is missing."""
    if (system, machine) != ("linux", "x86_64"):
        fact = f"torch_xla runs on Linux on x86-64 only, and this is {system} on {machine}"
        return fact, "use a machine with Linux on x86-64"
    plugin = find_plugin(path)
    if plugin is None:
        return "the PJRT plugin for the CPU is not installed", _INSTALL
    if plugin.version not in BUILT_FOR:
        found = _written(plugin.version)
        known = ", ".join(map(_written, BUILT_FOR))
        fact = f"the installed plugin has PJRT {found}, and the simulator was built for {known}"
        return fact, _INSTALL
    return why_no_compiler(environ)


def _written(version: tuple[int, int] | None) -> str:
    """Return a version as messages have it, such as "0.81"."""
    if version is None:
        return "no version"
    major, minor = version
    return f"{major}.{minor}"


def library(
    *,
    path: Iterable[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    sources: Path = _SOURCES,
) -> Path:
    """Return the path of the simulated libtpu. The first call compiles it in about three seconds.

    Args:
        path: the folders with packages; None for `sys.path`.
        environ: the variables CC and PATH, for the compiler, and XDG_CACHE_HOME and HOME, for the
            cache folder.
        sources: the folder of the C sources.

    Raises:
        SimulatorError: this machine cannot simulate a TPU; see `why_not`.
        BuildError: the compiler failed.
    """
    return program("libtpu-simulator.so", sources, path=path, environ=environ)


def program(
    name: str,
    sources: Path,
    *,
    path: Iterable[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Return the path of a file that is compiled from C sources and pjrt_c_api.h.

    Args:
        name: the name of the file; one that ends in ".so" is a library, others are programs.
        sources, path, environ: as in `library`.

    Raises:
        SimulatorError, BuildError: as in `library`.
    """
    missing = _missing(path, environ, system=sys.platform, machine=platform.machine())
    if missing:
        raise SimulatorError("this machine cannot simulate a TPU", found=missing[0], fix=missing[1])
    return compiled(name, sources, headers=find_plugin(path).headers, environ=environ)
