"""Further ways to run: GPUs, TorchTPU, all chips as one core, and what was compiled kept for the next session."""

from tpukit.accelerators.adam import adam_numbers
from tpukit.accelerators.c_library import BuildError, cache_folder, compiled, why_no_compiler
from tpukit.accelerators.compile_cache import CompileCache, open_compile_cache
from tpukit.accelerators.hosts import launch_on_host
from tpukit.accelerators.programs import programs_of
from tpukit.accelerators.sharded import ShardedTpu
from tpukit.accelerators.torch_tpu import TorchTpuRuntime, inside

__all__ = [
    "CompileCache", "BuildError", "ShardedTpu", "TorchTpuRuntime", "adam_numbers", "cache_folder", "compiled",
    "inside", "launch_on_host", "open_compile_cache", "programs_of", "why_no_compiler",
]  # fmt: skip
