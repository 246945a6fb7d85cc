"""The backends: the code that uses torch_xla and gloo. `registry` lists all of them."""

from tpukit.essentials.backends.cpu import Cpu, CpuRuntime, dry_run_cores
from tpukit.essentials.backends.protocol import (
    Backend,
    BackendMismatchError,
    Compiling,
    Hosts,
    Runtime,
    Topology,
)
from tpukit.essentials.backends.registry import REGISTRY, RuntimeEntry, runtimes
from tpukit.essentials.backends.xla import (
    Tpu,
    XlaRuntime,
    import_torch_xla,
    start_pjrt,
    variable_set,
    with_own_flags,
)

__all__ = [
    "Backend", "BackendMismatchError", "Compiling", "Cpu", "CpuRuntime", "Hosts", "REGISTRY",
    "Runtime", "RuntimeEntry", "Topology", "Tpu", "XlaRuntime", "dry_run_cores", "import_torch_xla",
    "runtimes", "start_pjrt", "variable_set", "with_own_flags",
]  # fmt: skip
