"""Where the facts about a machine are read."""

import os
import platform
import sys
from collections.abc import Callable, Container, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.backends import runtime_started, why_no_simulator


def installed_version(package: str) -> str | None:
    """Read a package's version from its metadata, without importing it; None where it is not installed."""
    from importlib import metadata  # 13 ms of `import tpukit` otherwise, a tenth of it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# repr=False: help() shows the value of a parameter's default, and the environment may hold keys.
@dataclass(frozen=True, repr=False)
class Machine:
    """Where the facts about a machine are read: this machine's own places, unless a test names others.

    What was found there is a `MachineInfo`.
    """

    environ: MutableMapping[str, str] = field(default_factory=lambda: os.environ)
    pci: Path = Path("/sys/bus/pci/devices")
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")
    dev: Path = Path("/dev")
    colab: Path = Path("/content")  # Colab's own folder, and Kaggle's
    kaggle: Path = Path("/kaggle")
    modules: Container[str] = field(default_factory=lambda: sys.modules)  # imported in this kernel
    system: str = f"{platform.system()} {platform.machine()}"
    affinity: int | None = None  # processors that this process is bound to; None asks the system
    can_fork: bool = hasattr(os, "fork")
    installed: Callable[[str], str | None] = installed_version
    started: Callable[[], bool] = runtime_started
    no_simulator: Callable[[], str | None] = why_no_simulator
    access: Callable[[Path, int], bool] = os.access  # may a file be opened so?
    open_node: Callable[[str, int], int] = os.open


THIS_MACHINE = Machine()
