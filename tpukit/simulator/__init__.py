"""Simulate libtpu: run the TPU code of torch_xla and TorchTPU on the CPU, without a chip."""

from tpukit.accelerators import KeptCompiles, cache_folder, open_kept
from tpukit.simulator.build import program, why_not
from tpukit.simulator.recording_runtime import Imagined, RecordingRuntime
from tpukit.simulator.runtime import StandInRuntime
from tpukit.simulator.torch_tpu_runtime import TorchTpuStandInRuntime

__all__ = [
    "Imagined", "KeptCompiles", "RecordingRuntime", "StandInRuntime", "TorchTpuStandInRuntime",
    "cache_folder", "open_kept", "program", "why_not",
]  # fmt: skip
