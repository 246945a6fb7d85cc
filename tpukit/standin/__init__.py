"""A stand-in for libtpu: torch_xla's whole TPU path, executed on the CPU of a machine without a chip."""

from tpukit.essentials.backends import KeptCompiles, cache_folder, open_kept
from tpukit.standin.build import program, why_not
from tpukit.standin.recording_runtime import Imagined, RecordingRuntime
from tpukit.standin.runtime import StandInRuntime

__all__ = [
    "Imagined", "KeptCompiles", "RecordingRuntime", "StandInRuntime", "cache_folder", "open_kept", "program", "why_not",
]  # fmt: skip
