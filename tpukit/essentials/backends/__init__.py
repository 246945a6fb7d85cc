"""The only files that know torch_xla, TorchTPU, NCCL or gloo. A new backend is a new file, and a line in this one."""

import functools
import importlib
import importlib.util

from tpukit.essentials.backends.adam import adam_numbers
from tpukit.essentials.backends.c_library import NotCompiled, cache_folder, compiled, why_no_compiler
from tpukit.essentials.backends.cpu import Cpu, rehearsal_cores
from tpukit.essentials.backends.kept_compiles import KEEP_VARIABLE, Folders, KeptCompiles, folders_of, open_kept
from tpukit.essentials.backends.protocol import Backend, Compiling, Hosts, Runtime, Topology, Unlike
from tpukit.essentials.backends.sharded import ShardedTpu
from tpukit.essentials.backends.torch_tpu import TorchTpuRuntime, inside
from tpukit.essentials.backends.xla import Tpu, import_torch_xla, libtpu_flags, runtime_started, start_pjrt

# By name, the best first: a launch takes the first that the machine has devices for. A part of the kit that is not here
# takes its backends along.
PLACES = {
    "xla": "tpukit.essentials.backends.xla:XlaRuntime",
    "torch_tpu": "tpukit.essentials.backends.torch_tpu:TorchTpuRuntime",
    "cuda": "tpukit.essentials.backends.cuda:CudaRuntime",
    "cpu": "tpukit.essentials.backends.cpu:CpuRuntime",
    "xla:sharded": "tpukit.essentials.backends.sharded:ShardedRuntime",
    "xla:standin": "tpukit.standin:StandInRuntime",
    "xla:cpu": "tpukit.essentials.backends.xla_cpu:XlaCpuRuntime",
    "torch_tpu:standin": "tpukit.standin:TorchTpuStandInRuntime",
    "torch_tpu:cpu": "tpukit.essentials.backends.torch_tpu:TorchTpuCpuRuntime",
    "xla:recording": "tpukit.standin:RecordingRuntime",
}


@functools.cache
def runtimes() -> dict[str, Runtime]:
    """Return the backends that are here by name, the best first."""
    found = {}
    for name, place in PLACES.items():
        module, _, runtime = place.partition(":")
        if importlib.util.find_spec(module):
            found[name] = getattr(importlib.import_module(module), runtime)()
    return found


def why_no_stand_in() -> str | None:
    """Return why this machine cannot play chips for torch_xla, and what would change that; None if it can."""
    stand_in = runtimes().get("xla:standin")
    return stand_in.why_not() if stand_in else "this copy of the kit has no part tpukit.standin"


__all__ = [
    "KEEP_VARIABLE", "PLACES", "Backend", "Compiling", "Cpu", "Folders", "Hosts", "KeptCompiles", "NotCompiled",
    "Runtime", "ShardedTpu", "Topology", "TorchTpuRuntime", "Tpu", "Unlike", "adam_numbers", "cache_folder",
    "compiled", "folders_of", "import_torch_xla", "inside", "libtpu_flags", "open_kept", "rehearsal_cores",
    "runtime_started", "runtimes", "start_pjrt", "why_no_compiler", "why_no_stand_in",
]  # fmt: skip
