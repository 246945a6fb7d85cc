"""More ways to run: GPUs, TorchTPU, models sharded over all chips, and the compilation cache."""

from tpukit.accelerators.adam import adam_numbers
from tpukit.accelerators.c_library import BuildError, cache_folder, compiled, why_no_compiler
from tpukit.accelerators.compile_cache import CompileCache, open_compile_cache
from tpukit.accelerators.programs import programs_of
from tpukit.accelerators.sharded import ShardedTpu
from tpukit.accelerators.torch_tpu import TorchTpuRuntime, inside

__all__ = [
    "BuildError", "CompileCache", "ShardedTpu", "TorchTpuRuntime", "adam_numbers", "cache_folder",
    "compiled", "inside", "open_compile_cache", "programs_of", "why_no_compiler",
]  # fmt: skip
