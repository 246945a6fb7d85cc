"""What a run needs of torch_xla and gloo. A new backend is a new file, and a line in this one."""

import functools
import importlib

from tpukit.essentials.backends.cpu import Cpu, CpuRuntime, rehearsal_cores
from tpukit.essentials.backends.protocol import Backend, BackendMismatchError, Compiling, Hosts, Runtime, Topology
from tpukit.essentials.backends.xla import (
    Tpu,
    XlaRuntime,
    import_torch_xla,
    runtime_started,
    start_pjrt,
    variable_set,
    with_own_flags,
)
from tpukit.essentials.display import missing_part

# By name, the best first: a launch takes the first that the machine has devices for. A part of the kit that is not here
# takes its backends along.
PLACES = {
    "xla": "tpukit.essentials.backends.xla:XlaRuntime",
    "torch_tpu": "tpukit.accelerators.torch_tpu:TorchTpuRuntime",
    "cuda": "tpukit.accelerators.cuda:CudaRuntime",
    "cpu": "tpukit.essentials.backends.cpu:CpuRuntime",
    "xla:sharded": "tpukit.accelerators.sharded:ShardedRuntime",
    "xla:simulator": "tpukit.simulator:SimulatorRuntime",
    "xla:cpu": "tpukit.essentials.backends.xla_cpu:XlaCpuRuntime",
    "torch_tpu:simulator": "tpukit.simulator:SimulatedTorchTpuRuntime",
    "torch_tpu:cpu": "tpukit.accelerators.torch_tpu:TorchTpuCpuRuntime",
    "xla:recording": "tpukit.simulator:RecordingRuntime",
}


@functools.cache
def runtimes() -> dict[str, Runtime]:
    """Return the backends that are here by name, the best first."""
    found = {}
    for name, place in PLACES.items():
        module, _, runtime = place.partition(":")
        if missing_part(module) is None:
            found[name] = getattr(importlib.import_module(module), runtime)()
    return found


def why_no_simulator() -> str | None:
    """Return why this machine cannot play chips for torch_xla, and what would change that; None if it can."""
    if missing := missing_part("tpukit.simulator"):
        return f"this copy of tpukit has no subpackage {missing}"
    return importlib.import_module("tpukit.simulator").why_not()


__all__ = [
    "PLACES", "Backend", "Compiling", "Cpu", "CpuRuntime", "Hosts", "Runtime", "Topology", "Tpu", "BackendMismatchError",
    "XlaRuntime", "import_torch_xla", "rehearsal_cores", "runtime_started", "runtimes",
    "start_pjrt", "variable_set", "why_no_simulator", "with_own_flags",
]  # fmt: skip
