"""The sources of the facts about a machine: folders, variables and functions."""

import os
import platform
import sys
from collections.abc import Callable, Container, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.display import NotInstalledError, optional_subpackage


def installed_version(package: str) -> str | None:
    """Return a package's version without importing it; None if not installed."""
    # Not at the top of the module, where it would add 13 ms, a tenth, to `import tpukit`.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def runtime_started() -> bool:
    """Return whether this process has started the XLA runtime, without starting it."""
    # If torch_xla is not imported, there is no runtime. An import for this test takes ten seconds.
    if "torch_xla" not in sys.modules:
        return False
    return bool(sys.modules["torch_xla"]._XLAC._xla_runtime_is_initialized())


def why_no_simulator() -> str | None:
    """Return why the simulated TPU cannot run on this machine; None if it can."""
    try:
        with optional_subpackage("the simulated TPU"):
            from tpukit.simulator import why_not
    except NotInstalledError as error:
        return error.fact
    return why_not()


# No repr, because help() would print it as the default of a parameter. It would contain all
# variables of the environment, and with them keys and tokens.
@dataclass(frozen=True, repr=False)
class Machine:
    """The sources of the facts about a machine. A test passes sources of its own.

    `MachineInfo` has the facts themselves.

    Attributes:
        environ: the environment variables.
        pci: folder of the devices on the PCI bus.
        proc: folder of the processes.
        cgroup: folder of the control groups, which limit a container.
        shm: folder of shared memory.
        dev: folder of the device nodes.
        colab: folder that exists on Colab, and also on Kaggle.
        kaggle: folder that exists only on Kaggle.
        modules: the modules that this process has imported.
        system: operating system and processor, such as "Linux x86_64".
        affinity: number of processors that this process may run on; None to ask the system.
        can_fork: whether the system has `os.fork`.
        installed: returns the version of a package; None if it is not installed.
        started: returns whether this process has started the XLA runtime.
        no_simulator: returns why the simulated TPU cannot run here; None if it can.
        access: returns whether a file may be opened in a mode, as `os.access` does.
        open_node: opens a device node, as `os.open` does.
    """

    environ: MutableMapping[str, str] = field(default_factory=lambda: os.environ)
    pci: Path = Path("/sys/bus/pci/devices")
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")
    dev: Path = Path("/dev")
    colab: Path = Path("/content")
    kaggle: Path = Path("/kaggle")
    modules: Container[str] = field(default_factory=lambda: sys.modules)
    system: str = f"{platform.system()} {platform.machine()}"
    affinity: int | None = None
    can_fork: bool = hasattr(os, "fork")
    installed: Callable[[str], str | None] = installed_version
    started: Callable[[], bool] = runtime_started
    no_simulator: Callable[[], str | None] = why_no_simulator
    access: Callable[[Path, int], bool] = os.access
    open_node: Callable[[str, int], int] = os.open


THIS_MACHINE = Machine()
