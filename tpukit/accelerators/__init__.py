"""Run on GPUs, on TorchTPU, or with a model sharded over all chips; cache compiled programs."""

from tpukit.accelerators.adam import adam_numbers
from tpukit.accelerators.c_library import BuildError, cache_folder, compiled, why_no_compiler
from tpukit.accelerators.compile_cache import CompileCache, open_compile_cache
from tpukit.accelerators.cuda import CudaRuntime
from tpukit.accelerators.hosts import launch_on_host
from tpukit.accelerators.programs import programs_of
from tpukit.accelerators.sharded import ShardedRuntime, ShardedTpu, choose_sharded, how_it_is_cut
from tpukit.accelerators.torch_patches import shorten_adam
from tpukit.accelerators.torch_tpu import TorchTpuCpuRuntime, TorchTpuRuntime, inside

__all__ = [
    "BuildError", "CompileCache", "CudaRuntime", "ShardedRuntime", "ShardedTpu",
    "TorchTpuCpuRuntime", "TorchTpuRuntime", "adam_numbers", "cache_folder", "choose_sharded",
    "compiled", "how_it_is_cut", "inside", "launch_on_host", "open_compile_cache", "programs_of",
    "shorten_adam", "why_no_compiler",
]  # fmt: skip
