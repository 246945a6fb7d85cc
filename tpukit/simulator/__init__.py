"""Simulate libtpu: run the TPU code of torch_xla and TorchTPU on the CPU, without a chip."""

from tpukit.accelerators import CompileCache, cache_folder, open_compile_cache
from tpukit.simulator.build import program, why_not
from tpukit.simulator.recording_runtime import Imagined, RecordingRuntime
from tpukit.simulator.runtime import SimulatorRuntime
from tpukit.simulator.torch_tpu_runtime import SimulatedTorchTpuRuntime

__all__ = [
    "Imagined", "CompileCache", "RecordingRuntime", "SimulatorRuntime", "SimulatedTorchTpuRuntime",
    "cache_folder", "open_compile_cache", "program", "why_not",
]  # fmt: skip
