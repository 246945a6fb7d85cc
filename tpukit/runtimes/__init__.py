"""Further ways to run: GPUs, TorchTPU, all chips as one core, and what was compiled kept for the next session."""

from tpukit.runtimes.adam import adam_numbers
from tpukit.runtimes.c_library import NotCompiled, cache_folder, compiled, why_no_compiler
from tpukit.runtimes.kept_compiles import KeptCompiles, open_kept
from tpukit.runtimes.programs import programs_of
from tpukit.runtimes.sharded import ShardedTpu
from tpukit.runtimes.torch_tpu import TorchTpuRuntime, inside

__all__ = [
    "KeptCompiles", "NotCompiled", "ShardedTpu", "TorchTpuRuntime", "adam_numbers", "cache_folder", "compiled",
    "inside", "open_kept", "programs_of", "why_no_compiler",
]  # fmt: skip
