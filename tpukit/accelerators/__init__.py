"""Further ways to run: GPUs, TorchTPU, all chips as one core, and what was compiled kept for the next session."""

from tpukit.accelerators.adam import adam_numbers
from tpukit.accelerators.c_library import NotCompiled, cache_folder, compiled, why_no_compiler
from tpukit.accelerators.compile_cache import KeptCompiles, open_kept
from tpukit.accelerators.programs import programs_of
from tpukit.accelerators.sharded import ShardedTpu
from tpukit.accelerators.torch_tpu import TorchTpuRuntime, inside

__all__ = [
    "KeptCompiles", "NotCompiled", "ShardedTpu", "TorchTpuRuntime", "adam_numbers", "cache_folder", "compiled",
    "inside", "open_kept", "programs_of", "why_no_compiler",
]  # fmt: skip
