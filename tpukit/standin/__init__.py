"""Simulate libtpu: run the TPU code of torch_xla and TorchTPU on the CPU, without a chip."""

from tpukit.runtimes import KeptCompiles, cache_folder, open_kept
from tpukit.standin.build import program, why_not
from tpukit.standin.recording_runtime import Imagined, RecordingRuntime
from tpukit.standin.runtime import StandInRuntime
from tpukit.standin.torch_tpu_runtime import TorchTpuStandInRuntime

__all__ = [
    "Imagined", "KeptCompiles", "RecordingRuntime", "StandInRuntime", "TorchTpuStandInRuntime",
    "cache_folder", "open_kept", "program", "why_not",
]  # fmt: skip
