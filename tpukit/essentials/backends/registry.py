"""The backends of a launch by name, from the fastest device to the slowest.

By default `launch` uses the first backend whose devices the machine has; of two backends for TPUs,
the one whose package is installed. If the user names a backend and the machine has no such device,
`launch` uses the first dry run of that backend:

    "xla"              TPU chips, driven by torch_xla
    "xla:simulator"    dry run of "xla" on a simulated TPU
    "xla:cpu"          dry run of "xla" on XLA:CPU processes, if there is no simulator

`Runtime.dry_run_of` is the name of the backend that a dry run replaces.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tpukit.essentials.backends.cpu import CpuRuntime
from tpukit.essentials.backends.protocol import Runtime
from tpukit.essentials.backends.xla import XlaRuntime
from tpukit.essentials.backends.xla_cpu import XlaCpuRuntime
from tpukit.essentials.display import NotInstalledError, optional_subpackage


class RuntimeEntry(NamedTuple):
    """A backend in the registry.

    Attributes:
        name: the name in `launch(backend=...)`.
        find: a function that gets the name, imports the subpackage of the backend, and returns its
            `Runtime` class.
    """

    name: str
    find: Callable[[str], type[Runtime]]

    def load(self) -> Runtime:
        """Import the subpackage of the backend, and return its `Runtime`.

        Raises:
            NotInstalledError: this copy of tpukit does not have the subpackage of the backend.
        """
        return self.find(self.name)()


def _in_essentials(name: str) -> type[Runtime]:
    return _of_name(name, (XlaRuntime, XlaCpuRuntime, CpuRuntime))


def _in_accelerators(name: str) -> type[Runtime]:
    with optional_subpackage(f"the {name} backend"):
        from tpukit.accelerators import (
            CudaRuntime,
            ShardedRuntime,
            TorchTpuCpuRuntime,
            TorchTpuRuntime,
        )
    return _of_name(name, (CudaRuntime, ShardedRuntime, TorchTpuCpuRuntime, TorchTpuRuntime))


def _in_simulator(name: str) -> type[Runtime]:
    with optional_subpackage(f"the {name} backend"):
        from tpukit.simulator import (
            RecordingRuntime,
            SimulatedTorchTpuRuntime,
            SimulatorRuntime,
        )
    return _of_name(name, (RecordingRuntime, SimulatedTorchTpuRuntime, SimulatorRuntime))


def _of_name(name: str, classes: Iterable[type[Runtime]]) -> type[Runtime]:
    return next(each for each in classes if each.name == name)


# The first four drive real devices, the fastest first. The other entries are variants of them.
_ENTRIES = (
    RuntimeEntry("xla", _in_essentials),
    RuntimeEntry("torch_tpu", _in_accelerators),
    RuntimeEntry("cuda", _in_accelerators),
    RuntimeEntry("cpu", _in_essentials),
    RuntimeEntry("xla:sharded", _in_accelerators),
    RuntimeEntry("xla:simulator", _in_simulator),
    RuntimeEntry("xla:cpu", _in_essentials),
    RuntimeEntry("torch_tpu:simulator", _in_simulator),
    RuntimeEntry("torch_tpu:cpu", _in_accelerators),
    RuntimeEntry("xla:recording", _in_simulator),
)
REGISTRY = {entry.name: entry for entry in _ENTRIES}


@functools.cache
def runtimes() -> dict[str, Runtime]:
    """Return the backends whose subpackages are present, by name, in the registry's order."""
    found = {}
    for entry in _ENTRIES:
        try:
            found[entry.name] = entry.load()
        except NotInstalledError:
            continue
    return found
